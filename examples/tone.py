"""Tone control: the same question answered gloomily, as the model likes, and cheerfully.

The reward is a lexicon's sentiment, from -1 to 1. It judges unfinished texts too, so that particles
on the way to the wrong tone are dropped early. `out.kl` says how far the answers had to be bent.
"""

import guided_smc
from guided_smc import rewards

PROMPT = "Write one sentence about a train station."


def main() -> None:
    lm = guided_smc.load("smollm2-135m")
    for beta in (-4.0, 0.0, 4.0):
        out = lm.generate(
            PROMPT,
            reward=rewards.sentiment(),
            beta=beta,
            n_particles=8,
            max_tokens=28,
            seed=1,
        )
        mean = out.rewards["sentiment"].tilted
        print(f"beta {beta:+.0f}: sentiment {mean.value:+.2f}, KL {out.kl.value:.2f}: {out.text!r}")


if __name__ == "__main__":
    main()
