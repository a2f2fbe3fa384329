"""The tokens of a model as bytes: what the engine, the constraints and the potentials share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np


class Vocabulary:
    """Bytes, end tokens and special tokens of a model, over its whole logit width.

    Text is bytes until it is complete: a token may end in the middle of a UTF-8 character.

    Args:
        tokens: Bytes of every id; `None` for ids that are padding (never sampled).
        eos_ids: *All* ids that end a text. At least one.
        special_ids: Control tokens: no text of their own, never allowed inside constrained text.
            End tokens are special whether or not they are listed.
    """

    def __init__(
        self,
        tokens: Sequence[bytes | None],
        eos_ids: Iterable[int],
        special_ids: Iterable[int] = (),
    ) -> None:
        self.eos_ids: tuple[int, ...] = tuple(sorted(set(eos_ids)))
        if not self.eos_ids:
            raise ValueError("a vocabulary needs at least one end token")
        self.special_ids: frozenset[int] = frozenset(special_ids) | frozenset(self.eos_ids)
        out_of_range = [i for i in self.special_ids if not 0 <= i < len(tokens)]
        if out_of_range:
            raise ValueError(f"special ids {out_of_range} are outside 0..{len(tokens) - 1}")
        self.tokens: tuple[bytes | None, ...] = tuple(
            b"" if i in self.special_ids else t for i, t in enumerate(tokens)
        )

    def __len__(self) -> int:
        """The logit width, padding included."""
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} tokens, eos_ids={self.eos_ids})"

    @cached_property
    def real(self) -> np.ndarray:
        """Bool `[V]`: ids that stand for something (not padding)."""
        return np.array([t is not None for t in self.tokens], dtype=bool)

    @cached_property
    def ordinary(self) -> np.ndarray:
        """Bool `[V]`: ids that carry text: not padding, not special. Constraints choose here."""
        ordinary = self.real.copy()
        ordinary[list(self.special_ids)] = False
        return ordinary

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """Bytes of a token sequence; special tokens and padding contribute none."""
        return b"".join(self.tokens[i] or b"" for i in token_ids)

    def decode(self, token_ids: Iterable[int], *, finished: bool = True) -> str:
        """Text of a token sequence.

        Args:
            token_ids: Ids in `0..V-1`.
            finished: If False, a UTF-8 character that is only begun at the end is left out;
                if True it becomes U+FFFD, as any invalid byte does.
        """
        return self.to_text(self.decode_bytes(token_ids), finished=finished)

    @staticmethod
    def to_text(data: bytes, *, finished: bool = True) -> str:
        """Text of bytes, as `decode` does."""
        if not finished:
            data = data[: len(data) - _begun_character(data)]
        return data.decode("utf-8", errors="replace")


def _begun_character(data: bytes) -> int:
    """Number of bytes at the end of `data` that begin a UTF-8 character without completing it."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue  # a continuation byte: the lead byte is further back
        width = (
            2
            if byte >> 5 == 0b110
            else 3
            if byte >> 4 == 0b1110
            else 4
            if byte >> 3 == 0b11110
            else 1
        )
        return back if back < width else 0
    return 0
