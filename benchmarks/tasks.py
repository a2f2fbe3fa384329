"""What is asked: free text, three schemas of the kinds that people want filled, and one choice.

The fields are bounded, so that answers end. The schemas say no more than all contestants
understand: no references, no unions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jsonschema

SHORT = 8
"""Tokens of an answer that only warms up."""


@dataclass(frozen=True)
class Ask:
    """One question."""

    prompt: str
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Task:
    """Prompts, one a round; a JSON Schema of the answer (None is free text); the longest answer."""

    prompts: tuple[str, ...]
    schema: dict[str, Any] | None
    max_tokens: int

    def ask(self, round_: int, max_tokens: int | None = None) -> Ask:
        """The question of a round, with its number as the seed."""
        prompt = self.prompts[round_ % len(self.prompts)]
        return Ask(prompt, min(self.max_tokens, max_tokens or self.max_tokens), round_)

    @property
    def few_tokens(self) -> int:
        """As few as an answer may have, to show that something runs."""
        return 2 if self.schema is None else 16

    def accepts(self, text: str) -> bool:
        """Whether a text is JSON that the schema allows."""
        assert self.schema is not None
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return jsonschema.Draft202012Validator(self.schema).is_valid(value)


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PERSON = _object(
    name={"type": "string", "minLength": 1, "maxLength": 20},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    city={"enum": ["Cairo", "Lima", "Paris", "Rome"]},
)
FRIENDS = _object(
    friends={
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": _object(
            name={"type": "string", "minLength": 1, "maxLength": 12},
            years={"type": "integer", "minimum": 0, "maximum": 99},
        ),
    }
)
MOOD = {"enum": ["happy", "sad", "angry", "curious", "tired", "in love"]}

_SUBJECTS = ("who likes music", "who sails", "who paints", "who teaches", "who is a doctor")

TASKS = {
    "free": Task(
        (
            "Tell me a long story about a lighthouse keeper and a storm.",
            "Explain in detail how bread is made, from the field to the table.",
            "Describe a walk through a big city at night, street by street.",
            "Write a long letter to a friend about a journey by train.",
            "Explain in detail how the seasons come about.",
        ),
        None,
        64,
    ),
    "person": Task(
        tuple(f"Invent a person {s}. Answer in JSON with name, age and city." for s in _SUBJECTS),
        PERSON,
        64,
    ),
    "friends": Task(
        tuple(
            f"List two friends of a person {s}, in JSON, each with name and years."
            for s in _SUBJECTS
        ),
        FRIENDS,
        80,
    ),
    "mood": Task(
        tuple(f"What mood is a person {s} in? Answer with a JSON string." for s in _SUBJECTS),
        MOOD,
        12,
    ),
}
"""A flat object, a nested array of objects, and an enum: the kinds of the real model's tests."""

ANIMALS = {"enum": ["cat", "dog", "catfish", "dogfish"]}
QUESTION = 'Choose "cat", "dog", "catfish" or "dogfish". Answer:'
"""Masking alone answers it wrongly: "cat" ten times as often as the model does."""
ANSWER_TOKENS = 8
