"""Length control: a sentence of about fifteen words, and one of about thirty.

The reward falls with the distance from the target. Of an unfinished text only what is too long
counts, since it may still grow.
"""

import guided_smc
from guided_smc import rewards

PROMPT = "Describe a lighthouse in one sentence."


def main() -> None:
    lm = guided_smc.load("smollm2-135m")
    for words in (15, 30):
        out = lm.generate(
            PROMPT,
            reward=rewards.length(words, unit="words", band=2),
            beta=10.0,
            n_particles=12,
            max_tokens=56,
            temperature=0.8,
            seed=2,
        )
        lengths = [len(p.text.split()) for p in out.particles if p.weight > 0]
        print(f"about {words} words: got {len(out.text.split())} (particles: {sorted(lengths)})")
        print(f"    {out.text}")


if __name__ == "__main__":
    main()
