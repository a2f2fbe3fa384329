"""Texts for tests of rewards."""

from __future__ import annotations

from guided_smc.potentials import Completion
from guided_smc.vocabulary import Vocabulary

LETTERS = Vocabulary([bytes([i]) for i in range(128)] + [b""], eos_ids=[128])
"""One token for each ASCII character."""


def completion(
    text: str, *, finished: bool = True, prompt="prompt", columns=None, max_tokens=None
) -> Completion:
    """A completion of ASCII text."""
    ids = tuple(text.encode())
    return Completion(prompt, ids, text, finished, LETTERS, columns or {}, max_tokens)


def completions(*texts: str, **settings) -> list[Completion]:
    return [completion(t, **settings) for t in texts]


def unfinished(*texts: str, **settings) -> list[Completion]:
    return [completion(t, finished=False, **settings) for t in texts]
