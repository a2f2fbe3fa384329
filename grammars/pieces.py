"""The tokens of a vocabulary by their bytes: which spell a text, and in how few."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property, lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from guided_smc.vocabulary import Vocabulary


class Pieces:
    """The ordinary tokens of a vocabulary. Holds no reference to it; see `pieces`.

    Attributes:
        ids: Tokens by their bytes.
        longest: Bytes of the longest token.
        words: int32 words of a mask.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces: list[bytes] = [
            (token or b"") if plain else b""
            for token, plain in zip(vocabulary.tokens, vocabulary.ordinary.tolist(), strict=True)
        ]
        self.ids: dict[bytes, list[int]] = {}
        for i, piece in enumerate(self._pieces):
            if piece:
                self.ids.setdefault(piece, []).append(i)
        self.longest = max(map(len, self._pieces), default=0)
        self.words = -(-len(self._pieces) // 32)
        self.fewest = lru_cache(8192)(self._fewest)

    def __len__(self) -> int:
        """Tokens of the vocabulary, special and padded ones included."""
        return len(self._pieces)

    def piece(self, token: int) -> bytes:
        """Bytes of an ordinary token; none for others."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def mask(self, tokens: Iterable[int]) -> np.ndarray:
        """Bits of tokens, int32 `[ceil(V / 32)]`."""
        chosen = np.zeros(len(self), dtype=bool)
        chosen[list(tokens)] = True
        return self.pack(chosen)

    def pack(self, chosen: np.ndarray) -> np.ndarray:
        """Bits of bool `[..., V]`: int32 `[..., ceil(V / 32)]`."""
        room = np.zeros((*chosen.shape[:-1], 32 * self.words), dtype=bool)
        room[..., : len(self)] = chosen
        return np.packbits(room, axis=-1, bitorder="little").view("<i4").astype(np.int32)

    def _fewest(self, text: bytes) -> int | None:
        """The fewest tokens that spell a text; None if none do."""
        return self.fewest_from(text)[0]

    def fewest_from(self, text: bytes) -> list[int | None]:
        """The fewest tokens that spell what is left of a text, for each place in it.

        Returns:
            One more than the text has bytes: the last is 0.
        """
        best: list[int | None] = [0]  # from the end
        for start in range(len(text) - 1, -1, -1):
            ways = [
                after + 1
                for n in range(1, min(self.longest, len(text) - start) + 1)
                if (after := best[-n]) is not None and text[start : start + n] in self.ids
            ]
            best.append(min(ways, default=None))
        return best[::-1]

    def begins(self, data: bytes) -> bool:
        """Whether some token begins like this."""
        place = bisect_left(self._sorted, data)
        return place < len(self._sorted) and self._sorted[place].startswith(data)

    @cached_property
    def alphabet(self) -> bytes:
        """The bytes that tokens consist of."""
        return bytes(sorted(set(b"".join(self.ids))))

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self.ids)

    @cached_property
    def by_first_byte(self) -> tuple[np.ndarray, ...]:
        """The tokens that begin with each byte, 256 arrays of int64."""
        firsts = np.array([piece[0] if piece else -1 for piece in self._pieces])
        return tuple(np.flatnonzero(firsts == byte) for byte in range(256))

    @cached_property
    def by_position(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Tokens from long to short, int64 `[V]`, and the bytes at each place of those that have
        one there: uint8 arrays, shorter and shorter.
        """
        order = np.array(sorted(range(len(self)), key=lambda i: -len(self._pieces[i])))
        columns = []
        for place in range(self.longest):
            column = [piece[place] for i in order if len(piece := self._pieces[i]) > place]
            columns.append(np.array(column, dtype=np.uint8))
        return order, columns


_pieces_of: WeakKeyDictionary[Vocabulary, Pieces] = WeakKeyDictionary()


def pieces(vocabulary: Vocabulary) -> Pieces:
    """The tokens of a vocabulary by their bytes; made once for each."""
    if vocabulary not in _pieces_of:
        _pieces_of[vocabulary] = Pieces(vocabulary)
    return _pieces_of[vocabulary]
