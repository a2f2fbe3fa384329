"""Small models and constraints on which token masking goes wrong, in the ways that are known.

Masking goes by the probability of the next token, and the posterior by that of all that follows. So
each model here says some texts of which most begin like members of the language and are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guided_smc import LM, TableModel, Vocabulary, json_schema
from guided_smc.potentials import Constraint

PIECES = ["at", "ow", "fish", "12"]
WORDS = [*'"abcdfghiorstw0123456789.,[]', *PIECES]
"""Letters, and tokens of several: a text has more than one tokenisation."""
VOCABULARY = Vocabulary([*(word.encode() for word in WORDS), b""], eos_ids=[len(WORDS)])

AS_PIECES = 0.3
"""How often the model takes a token of several letters where it can."""
MAX_TOKENS = 24
"""Most tokens of a text: more than any needs."""
ANYTHING = 0.01
"""What it gives to all that it does not mean to say: nothing is impossible."""


@dataclass(frozen=True)
class Trap:
    """What the model says, how often; a constraint."""

    says: Mapping[str, float]
    constraint: Constraint

    def model(self) -> TableModel:
        """The model: next tokens as the texts continue, and a little of everything else."""
        return TableModel(self._row, VOCABULARY)

    def lm(self) -> LM:
        """The model, ready to generate with."""
        return LM(self.model())

    def _row(self, context: Sequence[int]) -> list[float]:
        prefix = VOCABULARY.decode(context)
        row = dict.fromkeys([*WORDS, ""], 0.0)
        for text, often in self.says.items():
            if text.startswith(prefix):
                rest = text[len(prefix) :]
                for piece in (p for p in PIECES if rest.startswith(p)):
                    row[piece] += often * AS_PIECES
                    often *= 1.0 - AS_PIECES
                row[rest[:1]] += often
        if not any(row.values()):
            row[""] = 1.0
        total = sum(row.values()) / (1.0 - ANYTHING)
        return [row[word] / total + ANYTHING / len(row) for word in [*WORDS, ""]]


TRAPS = {
    # The list would go on after a 0, which the schema forbids.
    "likely token, unlikely rest": Trap(
        {"[0,1]": 0.45, "[0,0]": 0.43, "[0]": 0.02, "[1]": 0.1},
        json_schema({"type": "array", "items": {"enum": [0, 1]}, "maxItems": 1}),
    ),
    # Most strings are longer than the schema allows, and masking cuts them at the last letter.
    "length that is reached": Trap(
        {f'"{"at" * n}"': 0.9**n for n in range(40)},
        json_schema({"type": "string", "pattern": "^[at]*$", "maxLength": 8}),
    ),
    # "cow" begins like what is listed.
    "shared beginnings": Trap(
        {'"cow"': 0.85, '"cat"': 0.02, '"car"': 0.01, '"cart"': 0.005, '"catfish"': 0.005,
         '"dog"': 0.08, '"dogfish"': 0.03},
        json_schema({"enum": ["cat", "car", "cart", "catfish", "dog", "dogfish"]}),
    ),
    # It speaks of 1.5 and 12.5, and every way on from there to an integer is unlikely.
    "no likely way on": Trap(
        {"1.5": 0.5, "12.5": 0.4, "1": 0.005, "12": 0.01, "7": 0.05, "3": 0.035},
        json_schema({"type": "integer", "minimum": 1, "maximum": 19}),
    ),
}  # fmt: skip
