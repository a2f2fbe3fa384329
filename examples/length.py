"""Length control: answers of about ten words, and of about twenty-five.

The reward falls with the distance from the target. Of an unfinished text only what is too long
counts, since it may still grow.
"""

import guided_smc
from guided_smc import rewards

PROMPT = "What is a lighthouse?"


def main() -> None:
    lm = guided_smc.load("smollm2-135m")
    for words in (10, 25):
        out = lm.generate(
            PROMPT,
            reward=rewards.length(words, unit="words", band=2),
            beta=12.0,
            n_particles=8,
            max_tokens=48,
            seed=2,
        )
        lengths = [len(p.text.split()) for p in out.particles if p.weight > 0]
        print(f"about {words} words: got {len(out.text.split())} (particles: {sorted(lengths)})")
        print(f"    {out.text}")


if __name__ == "__main__":
    main()
