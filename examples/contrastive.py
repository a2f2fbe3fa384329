"""Contrastive decoding: what a role would say more than the model says anyway.

The reward is the difference of two log-likelihoods of the same text, both under the same model: as
a pirate, and as itself. The posterior `p · (p_pirate / p)^β` leans toward what tells them apart.
"""

import guided_smc
from guided_smc import rewards

PROMPT = "Tell me about the weather today."
ROLE = "You are a pirate. Answer as one. Tell me about the weather today."


def main() -> None:
    lm = guided_smc.load("smollm2-135m")
    pirate = rewards.language_model(lm, prompt=ROLE) - rewards.language_model(lm)
    for beta in (0.0, 0.7):
        out = lm.generate(
            PROMPT,
            reward=pirate.with_(name="pirate"),
            beta=beta,
            n_particles=8,
            max_tokens=24,
            seed=3,
        )
        gain = out.rewards["pirate"].tilted
        print(f"beta {beta}: log-likelihood ratio {gain.value:+.1f} nats: {out.text!r}")


if __name__ == "__main__":
    main()
