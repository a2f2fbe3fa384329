"""Typed extraction with a tilt: fields are to stand in the note that they are taken from.

A schema says what an answer looks like, not that it is true. The reward counts the fields whose
value the note really contains, as soon as each of them is closed, and particles that invent one
are dropped there and then.
"""

from pydantic import BaseModel, Field

import guided_smc
from guided_smc import rewards

NOTE = "Marta Ilves called from Tartu at noon. She wants two tickets for the Friday ferry."
PROMPT = (
    f"Note: {NOTE}\n\nWho called, from which city, and for which day is the ferry? "
    "Answer in JSON with name, city and day."
)


class Booking(BaseModel):
    """What a note books."""

    name: str = Field(max_length=16)
    city: str = Field(max_length=16)
    day: str = Field(max_length=12)


def in_note(booking) -> float:
    """How many of the fields that are closed stand in the note."""
    fields = [booking[name] for name in ("name", "city", "day") if name in booking]
    return float(sum(field != "" and field in NOTE for field in fields))


def main() -> None:
    lm = guided_smc.load("smollm2-135m")
    for beta in (0.0, 3.0):
        out = lm.generate(
            PROMPT,
            output_type=guided_smc.json_schema(Booking, whitespace="line"),
            reward=rewards.field(in_note, name="in the note", bounds=(0, 3)),
            beta=beta,
            n_particles=8,
            max_tokens=48,
            temperature=0.7,
            seed=4,
        )
        found = out.rewards["in the note"].tilted
        print(f"beta {beta:.0f}: {found.value:.1f} of 3 fields in the note: {out.value!r}")


if __name__ == "__main__":
    main()
