"""What token masking does to a distribution, and what the weights undo.

A model given as a table says "a" nine times in ten, and after an "a" almost always "b". The
constraint wants a text that ends in "a". Token masking keeps the first token's odds, although what
follows an "a" makes the constraint very unlikely there; the posterior does not.
"""

from collections import Counter

from rich.console import Console
from rich.table import Table

from guided_smc import LM, TableModel, Vocabulary, json_schema

VOCABULARY = Vocabulary([b"[", b"]", b"0", b"1", b",", b""], eos_ids=[5])
ROWS = {
    "": {"[": 1.0},
    "[": {"0": 0.9, "1": 0.1},
    "[0": {",": 0.99, "]": 0.01},  # after a 0 the list goes on ...
    "[1": {",": 0.01, "]": 0.99},  # ... and after a 1 it ends
}
SCHEMA = {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 1}


def probabilities(context: tuple[int, ...]) -> list[float]:
    text = VOCABULARY.decode(context)
    row = ROWS.get(text, {"": 1.0} if text.endswith("]") else {"0": 0.5, "]": 0.5})
    return [row.get(t.decode(), 0.0) for t in VOCABULARY.tokens[:5]] + [row.get("", 0.0)]


def main() -> None:
    lm = LM(TableModel(probabilities, VOCABULARY))
    constraint = json_schema(SCHEMA)
    # p([0]) = 0.9 * 0.01 and p([1]) = 0.1 * 0.99: the model itself prefers [1], 11 to 1.
    exact = {"[0]": 0.009 / 0.108, "[1]": 0.099 / 0.108}

    # One particle without its weight is token masking.
    masked = Counter(
        lm.generate("", output_type=constraint, n_particles=1, seed=s, max_tokens=4).text
        for s in range(100)
    )
    smc = Counter(
        lm.generate("", output_type=constraint, n_particles=64, seed=s, max_tokens=4).text
        for s in range(100)
    )
    table = Table("text", "posterior", "token masking", "SMC, 64 particles")
    for text, p in exact.items():
        table.add_row(text, f"{p:.2f}", f"{masked[text] / 100:.2f}", f"{smc[text] / 100:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
