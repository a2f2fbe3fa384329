"""Tilt a real model toward a reward: shorter or longer sentences, at three strengths.

The reward judges unfinished texts too (`reward_on="step"`), so that it steers from the first
token on. The posterior is `p · exp(beta · R)`, and beta = 0 is the model itself.
"""

import guided_smc

PROMPT = "Describe the sea in one sentence."


def commas(text: str) -> float:
    """Number of commas: a taste for enumerations."""
    return float(text.count(","))


def main() -> None:
    lm = guided_smc.load("smollm2-135m")
    for beta in (-3.0, 0.0, 3.0):
        out = lm.generate(
            PROMPT,
            reward=commas,
            beta=beta,
            reward_on="step",
            n_particles=6,
            max_tokens=28,
            seed=1,
        )
        mean = sum(p.weight * commas(p.text) for p in out.particles)
        print(f"beta {beta:+.0f}: {mean:.1f} commas on average, for example {out.text!r}")


if __name__ == "__main__":
    main()
