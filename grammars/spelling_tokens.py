"""The tokens of a vocabulary in other spellings than the usual one, and what they spell.

Most tokens spell themselves, and a grammar's own mask says whether they may come. The few others
are sorted here by what they spell: once for each vocabulary, whatever the grammar.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from guided_smc.grammars.matching import GrammarState
from guided_smc.grammars.pieces import Pieces, pieces
from guided_smc.grammars.spelling import (
    BEGUN,
    DELETE,
    Kind,
    Way,
    beginnings,
    read,
    spans,
    usual,
    written_out,
)
from guided_smc.vocabulary import Vocabulary

_ENDS = b",}] \n\t\r"
"""Behind a number."""

_RUN = re.compile(rb"[0-9.eE+\-]*")
_SIGNED = re.compile(rb"[+-]?[0-9]*")
_ZEROS = re.compile(rb"[0-9]*0")
_POINT = re.compile(rb"[0-9]*\.([0-9]*0)?")
_POWER = re.compile(rb"[0-9]*(\.[0-9]*)?[eE][+-]?[0-9]*")
_SPECIAL = frozenset(b'"\\' + DELETE)
_SHORT_ESCAPES = frozenset(b'"\\bfnrt')
_DELETES = re.compile(rb"(\x7f)")
_DELETE_ESCAPED = rb"\u007f"
_HEX = b"0123456789abcdefABCDEF"
_PROBES = "a 0é—"
"""Characters that may come in most places where any may."""

_MOST_PATTERNS = 256
"""Answers of masks that are remembered, each a mask."""

_ODD_IN_OUTSIDE = re.compile(rb'[ \t\r\n{}\[\],:truefalsn]*(?:-?[0-9][0-9.eE+\-]*|-|"|\Z)')
"""What a token that begins outside of a string may look like up to its first number or string."""


class Odd:
    """Tokens in another spelling at one kind of place, grouped by what they do.

    A group is possible if the grammar's mask has one token, `sure`; some may be possible without,
    and only if it has another one, `need`.

    Attributes:
        ways: What each group does.
        tokens: Of each group.
    """

    def __init__(self, own: Pieces, found: dict[Way, list[int]], add: Callable[[bytes], int]):
        self._own = own
        self.ways, self.tokens = list(found), list(found.values())
        need, sure = zip(*map(_witnesses, found), strict=True) if found else ((), ())
        self._sure = _Looks([add(s) if s else None for s in sure])
        self._always = np.array([s == b"" for s in sure], dtype=bool)
        self._need = _Looks([add(n) if n else None for n in need])
        self._needless = np.array([not n for n in need], dtype=bool)
        self._unsure = np.array([_is_unsure(way) for way in found], dtype=bool)
        self._patterns: OrderedDict[bytes, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def possible(self, row: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """What a mask of the grammar says of the groups.

        Args:
            row: int32 `[ceil(V' / 32)]`, over the grammar's vocabulary.

        Returns:
            The tokens of those that are possible, as bits, and the groups to ask about.
        """
        sure = self._sure.at(row)
        key = sure.tobytes()
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = self._pattern((sure != 0) | self._always)
            if len(self._patterns) > _MOST_PATTERNS:
                self._patterns.popitem(last=False)
        mask, unsure = pattern
        asked = (unsure & ((self._need.at(row) != 0) | self._needless)).nonzero()[0].tolist()
        return mask, [group for group in asked if not has(row, self.tokens[group][0])]

    def _pattern(self, sure: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        groups = np.flatnonzero(sure)
        mask = self._own.mask(token for group in groups for token in self.tokens[group])
        return mask, self._unsure & ~sure


class _Looks:
    """Places of a mask to look at; where there is none, nothing is found."""

    def __init__(self, tokens: list[int | None]) -> None:
        ids = np.array([token or 0 for token in tokens], dtype=np.int64)
        self._words, self._shifts = ids >> 5, (ids & 31).astype(np.int32)
        self._there = np.array([token is not None for token in tokens], dtype=np.int32)

    def at(self, row: np.ndarray) -> np.ndarray:
        """The bits, int32."""
        found: np.ndarray = (row[self._words] >> self._shifts) & self._there
        return found


def has(row: np.ndarray, token: int) -> bool:
    """Whether a token is in a mask, int32 `[W]`."""
    return bool(int(row[token >> 5]) >> (token & 31) & 1)


def _is_unsure(way: Way) -> bool:
    return way.kind in ("escape", "number") or DELETE in way.head


def _witnesses(way: Way) -> tuple[bytes, bytes | None]:
    """What has to be possible for a way to be, and what shows that it is."""
    if DELETE in way.head:
        escaped = way.head.replace(DELETE, _DELETE_ESCAPED)
        need = way.head.partition(DELETE)[0] + b"\\"  # or it is in the mask as it is
        return need, escaped if way.kind in ("string", "outside") else None
    if way.kind == "escape":
        ranges = spans(way.text)
        likely = [c for c in _PROBES if any(low <= ord(c) <= high for low, high in ranges)]
        return way.head, way.head + usual(likely[0] if likely else chr(ranges[0][0]))
    if way.kind == "number":
        digits = way.text.lstrip("-")
        return way.head + (b"0" if way.text[0] == "-" else digits[:1].encode()), None
    return way.head, way.head


@dataclass
class HexTokens:
    """Tokens that begin with certain hexadecimal digits.

    Attributes:
        alone: Those that are nothing else.
        with_rest: Those that go on with what is a token, too, in the usual spelling.
        rests: These tokens.
        with_plain_rest: Those that go on with characters that spell themselves in a string.
        others: The rest.
    """

    alone: list[int] = field(default_factory=list)
    with_rest: list[int] = field(default_factory=list)
    rests: list[int] = field(default_factory=list)
    with_plain_rest: list[tuple[bytes, list[int]]] = field(default_factory=list)
    others: list[int] = field(default_factory=list)


class SpellingTokens:
    """A vocabulary with more tokens: every byte, and what tokens in other spellings spell."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.own = own = pieces(vocabulary)
        self.way = lru_cache(1 << 16)(read)
        self._extra: dict[bytes, int] = {}
        padding = -len(vocabulary) % 32
        first = len(vocabulary) + padding
        self._byte_words = slice(first // 32, first // 32 + 8)
        self.byte_ids = range(first, first + 256)
        self._width = first + 256
        self.odd = {kind: self._odd(kind) for kind in ("outside", "string")}
        self.extended = Vocabulary(
            [
                *(*vocabulary.tokens, *[None] * padding),
                *(*(bytes([byte]) for byte in range(256)), *self._extra),
            ],
            vocabulary.eos_ids,
            vocabulary.special_ids,
        )
        self.ends = [*(self.byte_ids[byte] for byte in _ENDS), vocabulary.eos_ids[0]]
        self.own_bits = own.mask(t for ids in own.ids.values() for t in ids)
        runs = {piece: run for piece in own.ids if (run := run_of(piece))}
        self.numeric = self._mask(runs)
        ending = {
            piece: run
            for piece, run in runs.items()
            if len(run) == len(piece)
            or (
                run[-1:].isdigit()
                and piece[len(run)] in _ENDS
                and self.way("outside", "", piece[len(run) :])
            )
        }
        self.points = self._ids(p for p, run in ending.items() if _POINT.fullmatch(run))
        self.powers = self._ids(p for p, run in ending.items() if _POWER.fullmatch(run))
        self.zeros = self._ids(p for p, run in ending.items() if _ZEROS.fullmatch(run))
        self.zero_first = self._ids(p for p in ending if p[:1] == b"0")
        self.signed = self._ids(p for p, run in ending.items() if _SIGNED.fullmatch(run))
        self.simple = {
            token: "." if piece[:1] == b"." else "e"
            for piece in ending
            if re.fullmatch(rb"\.0*|[eE][+-]?", piece)
            for token in own.ids[piece]
        }
        """Tokens that are possible behind any number that may end there."""
        self.short_escapes = self._mask(p for p in own.ids if p[0] in _SHORT_ESCAPES)
        slashes = [p for p in own.ids if p[:1] == b"/"]
        plain = {p for p in slashes if self._spells_itself(p)}
        self.slashes = self._mask(plain)
        self.after_backslash = [
            token
            for p, ids in own.ids.items()
            if (p[:1] == b"u" or (p[:1] == b"/" and p not in plain))
            or (p[0] in _SHORT_ESCAPES and set(p[1:]) & _SPECIAL)
            if (way := read("escape", "\\", p)) is not None and not self._literal(way, p)
            for token in ids
        ]
        self.by_hex = lru_cache(4)(self._by_hex)

    def feed(self, native: GrammarState, data: bytes) -> bool:
        """Consume bytes in the grammar's state."""
        for part in _DELETES.split(data) if DELETE in data else [data]:
            if part == DELETE and not self.takes_of(native, part):
                part = _DELETE_ESCAPED
            if part and not native.advance_all([self.byte_ids[byte] for byte in part]):
                return False
        return native.alive

    def takes(self, native: GrammarState, data: bytes) -> bool:
        """Whether the grammar takes these bytes next."""
        if DELETE in data:
            return self.feed(native.fork(), data)
        return self.takes_of(native, data) == len(data)

    def takes_of(self, native: GrammarState, data: bytes) -> int:
        """How many of these bytes the grammar takes next, as they are."""
        return native.takes([self.byte_ids[byte] for byte in data])

    def may_end(self, native: GrammarState, number: bytes) -> bool:
        """Whether a number may come next, and then its end."""
        if not self.takes(native, number):
            return False
        ids = [self.byte_ids[byte] for byte in number]
        return any(native.takes([*ids, end]) > len(ids) for end in self.ends)

    def may_become(
        self, native: GrammarState, escape: str, allowed: np.ndarray | None = None
    ) -> bool:
        """Whether an escape in a string may become a character that the grammar takes.

        Args:
            native: The grammar's state in front of the escape.
            escape: As far as it goes.
            allowed: The bytes that may come there, if they are known: bool `[256]`.
        """
        if allowed is None:
            allowed = self.next_bytes(native.mask())
        single, several, longer = _first_bytes(escape)
        if (allowed & single).any():
            return True
        return any(
            self.takes(native, start)
            for first in np.flatnonzero(allowed & several).tolist()
            for start in longer[first]
        )

    def next_bytes(self, row: np.ndarray) -> np.ndarray:
        """Which bytes may come next by a mask: bool `[256]`."""
        words = np.ascontiguousarray(row[self._byte_words])
        return np.unpackbits(words.view(np.uint8), bitorder="little").view(bool)

    def ends_by(self, row: np.ndarray) -> bool:
        """Whether what may end a number may come next."""
        return any(has(row, end) for end in self.ends[:-1])

    def _spells_itself(self, piece: bytes) -> bool:
        way = read("string", "", piece)
        return way is not None and way.literal and way.kind != "number"

    def _literal(self, way: Way, piece: bytes) -> bool:
        if DELETE in piece or way.kind not in ("string", "outside"):
            return False
        return way.head == b"\\" + piece

    def _token_of(self, data: bytes) -> int:
        """A token with these bytes, a new one if need be."""
        if data in self.own.ids:
            return self.own.ids[data][0]
        return self._extra.setdefault(data, self._width + len(self._extra))

    def _odd(self, kind: Kind) -> Odd:
        found: dict[Way, list[int]] = defaultdict(list)
        for piece, ids in self.own.ids.items():
            if kind == "outside":
                possible = _ODD_IN_OUTSIDE.match(piece) is not None
            else:
                possible = b"\\" in piece or b'"' in piece or DELETE in piece
            if not possible:
                continue
            way = read(kind, "", piece)
            if way is None or (way.literal and (way.kind != "number" or _as_usual(way.text))):
                continue
            if way.kind != "number" or BEGUN.fullmatch(way.text):
                found[way._replace(literal=False)] += ids
        return Odd(self.own, found, self._token_of)

    def _by_hex(self, missing: int) -> dict[str, HexTokens]:
        """Tokens that begin with so many hexadecimal digits, or are fewer: by these digits."""
        found: dict[str, HexTokens] = defaultdict(HexTokens)
        for piece, ids in self.own.ids.items():
            length = 0
            while length < min(missing, len(piece)) and piece[length] in _HEX:
                length += 1
            if length and (length == missing or length == len(piece)):
                rest, tokens = piece[length:], found[piece[:length].decode()]
                if not rest:
                    tokens.alone += ids
                elif rest in self.own.ids and self._spells_itself(rest):
                    tokens.with_rest += ids
                    tokens.rests += [self.own.ids[rest][0]] * len(ids)
                elif _SPECIAL.isdisjoint(rest):
                    tokens.with_plain_rest.append((rest, ids))
                else:
                    tokens.others += ids
        return found

    def _ids(self, chosen: Iterable[bytes]) -> np.ndarray:
        return np.array([t for p in chosen for t in self.own.ids[p]], dtype=np.int64)

    def _mask(self, chosen: Iterable[bytes]) -> np.ndarray:
        return self.own.mask(t for p in chosen for t in self.own.ids[p])


@lru_cache(4096)
def _first_bytes(escape: str) -> tuple[np.ndarray, np.ndarray, dict[int, list[bytes]]]:
    """What may begin the characters of an escape: single bytes, and first ones of several.

    Returns:
        Both as bool `[256]`, and the several bytes by their first.
    """
    single, several = np.zeros(256, dtype=bool), np.zeros(256, dtype=bool)
    longer: dict[int, list[bytes]] = defaultdict(list)
    for start in (start for span in spans(escape) for start in beginnings(*span)):
        if len(start) == 1:
            single[start[0]] = True
        if len(start) > 1 or start == DELETE:
            first = _DELETE_ESCAPED[0] if start == DELETE else start[0]
            several[first] = True
            longer[first].append(start)
    return single, several, dict(longer)


def run_of(piece: bytes) -> bytes:
    """The beginning of some bytes that a number may hold."""
    match = _RUN.match(piece)
    assert match is not None
    return match[0]


def _as_usual(number: str) -> bool:
    """Whether only the grammar need be asked about the beginning of a number."""
    return number != "-" and written_out(number) == number


_tokens_of: WeakKeyDictionary[Vocabulary, SpellingTokens] = WeakKeyDictionary()


def spelling_tokens(vocabulary: Vocabulary) -> SpellingTokens:
    """The tokens of a vocabulary by what they spell; made once for each."""
    if vocabulary not in _tokens_of:
        _tokens_of[vocabulary] = SpellingTokens(vocabulary)
    return _tokens_of[vocabulary]
