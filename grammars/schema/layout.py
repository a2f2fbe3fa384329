"""JSON laid out as `json.dumps(value, indent=n)` does it, over a grammar that has no whitespace.

Where that layout has whitespace is decided by the text before it, but for one question: behind an
opened array or object comes either its end or a new line, and behind an item either a comma or a
new line and the end. So a text in this layout stands for the same text without whitespace, which
the compact grammar judges, and a new line is a promise about what it goes on with. A token is
allowed if its layout is right, the compact grammar takes the rest of it, and what it promises is
possible there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from guided_smc.grammars.pieces import pieces
from guided_smc.grammars.schema.spelt import CompiledSpelling, SpeltState
from guided_smc.vocabulary import Vocabulary

_PLAUSIBLE = re.compile(rb'[ \n{}\[\],:0-9eE+\-.truefalsn]*(?:"|\Z)')
"""What a token that begins outside of a string may look like up to the next one."""


_MOST_PLACES = 1024
"""Whose tokens a compiled layout remembers."""


class Place(NamedTuple):
    """Where a text is in the layout.

    Attributes:
        kind: `item`: in front of an item (which is promised) or the whole value; `value`: in front
            of the value of a key; `inside`: within a number or literal, or behind any value or
            key; `string` and `escape`: within a string, and behind its backslash; `opened`: behind
            `[` or `{`; `comma` and `colon`: behind those; `end`: in front of a promised `]` or `}`.
        depth: Arrays and objects that are open.
        spaces: How many must come first, where that is so.
    """

    kind: str
    depth: int = 0
    spaces: int = 0


class Layout:
    """The whitespace of `json.dumps(value, indent=indent)`."""

    def __init__(self, indent: int) -> None:
        self.indent = indent

    def after(self, place: Place, byte: int) -> tuple[Place, bool] | None:
        """The place behind a byte, and whether the byte counts in the compact text.

        None if the layout has another byte there.
        """
        kind, depth, spaces = place
        char = chr(byte)
        if spaces:
            return (Place(kind, depth, spaces - 1), False) if char == " " else None
        if kind == "string":
            kind = {'"': "inside", "\\": "escape"}.get(char, "string")
            return Place(kind, depth), True
        if kind == "escape":
            return Place("string", depth), True
        if kind == "colon":
            return (Place("value", depth), False) if char == " " else None
        if char in "]}":
            return (Place("inside", depth - 1), True) if kind in ("opened", "end") else None
        if char == "\n":
            if kind in ("opened", "comma"):
                return Place("item", depth, self.indent * depth), False
            if kind == "inside" and depth:
                return Place("end", depth, self.indent * (depth - 1)), False
            return None
        if kind in ("opened", "comma", "end") or char in " \t\r":
            return None
        if kind == "inside":
            kind = {",": "comma", ":": "colon"}.get(char, "inside")
            return Place(kind, depth), True
        kind = {'"': "string", "[": "opened", "{": "opened"}.get(char, "inside")
        return Place(kind, depth + (kind == "opened")), True


@dataclass(frozen=True)
class _Way:
    """What a token does at a place: the bytes that count, and the place behind it."""

    counts: bytes
    place: Place


class _Tokens:
    """A vocabulary with every byte as a further token, so that any rest of a token can be fed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.own = pieces(vocabulary)
        self.width = len(vocabulary)
        self.extended = Vocabulary(
            [*vocabulary.tokens, *(bytes([i]) for i in range(256))],
            vocabulary.eos_ids,
            vocabulary.special_ids,
        )

    @cached_property
    def outside(self) -> list[bytes]:
        """What tokens that may begin outside of a string are."""
        return [piece for piece in self.own.ids if _PLAUSIBLE.match(piece)]

    @cached_property
    def quoted(self) -> list[bytes]:
        """What tokens with a quote or a backslash are."""
        return [piece for piece in self.own.ids if b'"' in piece or b"\\" in piece]

    @cached_property
    def unquoted(self) -> np.ndarray:
        """The other tokens, as bits `[ceil(V / 32)]`."""
        return self.bits(self.own.ids.keys() - set(self.quoted))

    def bits(self, found: Iterable[bytes]) -> np.ndarray:
        """The tokens that are one of these, as bits `[ceil(V / 32)]`."""
        return self.own.mask(token for piece in found for token in self.own.ids[piece])


_tokens_of: WeakKeyDictionary[Vocabulary, _Tokens] = WeakKeyDictionary()


class CompiledLayout:
    """A compact grammar of JSON, in the layout of `json.dumps(value, indent=indent)`.

    Args:
        compile_compact: Binds the compact grammar to a vocabulary.
        vocabulary: The model's tokens.
        indent: Spaces for each level.
    """

    def __init__(
        self,
        compile_compact: Callable[[Vocabulary], CompiledSpelling],
        vocabulary: Vocabulary,
        indent: int,
    ) -> None:
        if vocabulary not in _tokens_of:
            _tokens_of[vocabulary] = _Tokens(vocabulary)
        self.tokens = _tokens_of[vocabulary]
        self.compact = compile_compact(self.tokens.extended)
        self.layout = Layout(indent)
        self._ways = lru_cache(_MOST_PLACES)(self._find_ways)

    def start(self) -> LayoutState:
        """The state before the first token."""
        return LayoutState(self, self.compact.start(), Place("item"))

    def fill_usual_masks(self, states: Sequence[LayoutState], bitmask: np.ndarray) -> None:
        """`fill_masks`, but for other spellings where the text may go on in the usual one."""
        self._fill(states, bitmask, usual_only=True)

    def fill_masks(self, states: Sequence[LayoutState], bitmask: np.ndarray) -> None:
        """Write the tokens that keep each prefix completable; none for a dead or complete one.

        Args:
            states: States of this layout.
            bitmask: int32 array `[len(states), ceil(V / 32)]`, overwritten. Bits of special
                and padded ids are always 0.

        Raises:
            ConstraintError: A mask would cost more than the limits allow.
        """
        self._fill(states, bitmask, usual_only=False)

    def _fill(
        self, states: Sequence[LayoutState], bitmask: np.ndarray, *, usual_only: bool
    ) -> None:
        every = self._masks([state.compact for state in states], usual_only=usual_only)
        for row, state in enumerate(states):
            if not state.alive:
                bitmask[row] = 0
                continue
            plain, others = self._ways(state.place)
            bitmask[row] = every[row, : self.tokens.own.words] & plain
            first = self._byte_bits(every[row])
            for way, tokens in others.items():
                if way.counts and not first[way.counts[0]]:
                    continue
                if self._possible(state.compact, way.counts, way.place):
                    bitmask[row] |= tokens
        # The words may end with bits of further tokens.
        if self.tokens.width % 32:
            bitmask[:, -1] &= (1 << (self.tokens.width % 32)) - 1

    def way(self, place: Place, piece: bytes) -> _Way | None:
        """What the bytes of a token do at a place; None if the layout has something else there."""
        counts = bytearray()
        for byte in piece:
            after = self.layout.after(place, byte)
            if after is None:
                return None
            place, counted = after
            if counted:
                counts.append(byte)
        return _Way(bytes(counts), place) if piece else None

    def feed(self, compact: SpeltState, counts: bytes) -> bool:
        """Consume bytes in the compact grammar's state."""
        return all(compact.advance(self.tokens.width + byte) for byte in counts)

    def keeps(self, compact: SpeltState, place: Place) -> bool:
        """Whether what a place promises is possible in the compact grammar's state."""
        if place.kind not in ("item", "end"):
            return True
        first = self._byte_bits(self._masks([compact])[0])
        ends = [first[byte] for byte in b"]}"]
        return any(ends) if place.kind == "end" else bool(first.sum() > sum(ends))

    def _possible(self, compact: SpeltState, counts: bytes, place: Place) -> bool:
        if counts:
            compact = compact.fork()
            if not self.feed(compact, counts):
                return False
        return self.keeps(compact, place)

    def _masks(self, states: Sequence[SpeltState], *, usual_only: bool = False) -> np.ndarray:
        words = -(-len(self.tokens.extended) // 32)
        masks = np.empty((len(states), words), dtype=np.int32)
        fill = self.compact.fill_usual_masks if usual_only else self.compact.fill_masks
        fill(states, masks)
        return masks

    def _byte_bits(self, mask: np.ndarray) -> np.ndarray:
        """Which bytes may come next, `[256]`."""
        first = self.tokens.width // 32
        bits = np.unpackbits(mask[first:].view(np.uint8), bitorder="little")
        begin = self.tokens.width - 32 * first
        return bits[begin : begin + 256]

    def _find_ways(self, place: Place) -> tuple[np.ndarray, dict[_Way, np.ndarray]]:
        """Tokens that the compact grammar judges alone, as bits, and the others by what they do."""
        tokens = self.tokens
        candidates: Iterable[bytes] = tokens.outside
        if place.kind in ("string", "escape"):
            candidates = tokens.quoted if place.kind == "string" else tokens.own.ids
        alone: list[bytes] = []
        others: dict[_Way, list[bytes]] = {}
        for piece in candidates:
            way = self.way(place, piece)
            if way is None:
                continue
            if len(way.counts) == len(piece) and way.place.kind not in ("item", "end"):
                alone.append(piece)
            else:
                others.setdefault(way, []).append(piece)
        plain = tokens.bits(alone)
        if place.kind == "string":
            plain |= tokens.unquoted
        return plain, {way: tokens.bits(found) for way, found in others.items()}


class LayoutState:
    """Where one particle stands: in the compact grammar, and in the layout."""

    __slots__ = ("_compiled", "alive", "compact", "place")

    def __init__(
        self, compiled: CompiledLayout, compact: SpeltState, place: Place, alive: bool = True
    ) -> None:
        self._compiled = compiled
        self.compact = compact
        self.place = place
        self.alive = alive

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a member of the language."""
        return self.alive and self.place == Place("inside") and self.compact.accepting

    def fork(self) -> LayoutState:
        """An independent copy."""
        return LayoutState(self._compiled, self.compact.fork(), self.place, self.alive)

    def advance(self, token: int) -> bool:
        """Consume one ordinary token. False if no member of the language begins like this.

        Raises:
            ConstraintError: The parser exceeded its limits.
        """
        piece = self._compiled.tokens.own.piece(token)
        way = self._compiled.way(self.place, piece) if self.alive else None
        if way is None:
            self.alive = False
            return False
        self.place = way.place
        self.alive = self._compiled.feed(self.compact, way.counts) and self._compiled.keeps(
            self.compact, way.place
        )
        return self.alive

    def forced(self) -> list[int]:
        """Nothing: what is forced is not looked for."""
        return []
