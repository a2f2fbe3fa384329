"""The tokens of a vocabulary in other spellings than the usual one, and what they spell.

Most tokens spell themselves, and a grammar's own mask says whether they may come. The few others
are sorted here by what they spell: once for each vocabulary, whatever the grammar.
"""

from __future__ import annotations

import re
import string
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from guided_smc.grammars.matching import GrammarState
from guided_smc.grammars.pieces import Pieces, pieces
from guided_smc.grammars.schema.spelling import (
    BEGUN,
    DELETE,
    Kind,
    Way,
    beginnings,
    read,
    spans,
    spelt_by,
    usual,
    written_out,
)
from guided_smc.vocabulary import Vocabulary

_ENDS = b",}] \n\t\r"
"""Behind a number."""

_IN_NUMBERS = frozenset(b"0123456789.eE+-")
_RUN = re.compile(rb"[0-9.eE+\-]*")
_SIGNED = re.compile(rb"[+-]?[0-9]*")
_ZEROS = re.compile(rb"[0-9]*0")
_POINT = re.compile(rb"[0-9]*\.([0-9]*0)?")
_POWER = re.compile(rb"[0-9]*(\.[0-9]*)?[eE][+-]?[0-9]*")
_SPECIAL = frozenset(b'"\\' + DELETE)
_SHORT_ESCAPES = frozenset(b'"\\bfnrt')
_DELETES = re.compile(rb"(\x7f)")
_DELETE_ESCAPED = rb"\u007f"
_HEX = frozenset(b"0123456789abcdefABCDEF")
_DIGITS = re.compile(rb"[0-9a-fA-F]{1,4}")
_PROBES = "a 0é—"
"""Characters that may come in most places where any may."""

_IN_NAMES = string.ascii_letters + string.digits + "_-$@/. "

_MOST_PATTERNS = 256
"""Answers of masks that are remembered, each a mask."""

_FEWER_THAN_A_MASK = 8
"""Tokens that are asked about one by one faster than by a mask."""

_OUTSIDE = frozenset(b' \t\r\n{}[],:truefalsn-0123456789"')
_ODD_IN_OUTSIDE = re.compile(rb'[ \t\r\n{}\[\],:truefalsn]*(?:-?[0-9][0-9.eE+\-]*|-|"|\Z)')
"""What a token that begins outside of a string may look like up to its first number or string."""


class Odd:
    """Tokens in another spelling at one kind of place, grouped by what they do.

    A group is possible if the grammar's mask has one token, `sure`; some may be possible without,
    and only if it has another one, `need`. What a mask says depends on its bits for these tokens
    and for single bytes alone, so that answers are remembered by them.

    Attributes:
        ways: What each group does.
        tokens: Of each group.
    """

    def __init__(
        self, own: Pieces, found: dict[Way, list[int]], add: Callable[[bytes], int], words: slice
    ):
        self._own = own
        self.ways, self.tokens = list(found), list(found.values())
        self._byte_words = words
        witnesses = [_witnesses(way) for way in found]
        self._sure = [[add(s) if s else None for s in sure] for _, sure in witnesses]
        self._need = [add(need) if need else None for need, _ in witnesses]
        looks = {look for sure in self._sure for look in sure} | {*self._need}
        looks |= {tokens[0] for tokens in self.tokens}
        self._looks = _Looks(sorted(look for look in looks if look is not None))
        self._patterns: OrderedDict[bytes, tuple[np.ndarray, list[int]]] = OrderedDict()

    def possible(self, row: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """What a mask of the grammar says of the groups.

        Args:
            row: int32 `[ceil(V' / 32)]`, over the grammar's vocabulary.

        Returns:
            The tokens of those that are possible, as bits, and the groups to ask about.
        """
        key = self._looks.at(row).tobytes() + row[self._byte_words].tobytes()
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = self._pattern(row)
            if len(self._patterns) > _MOST_PATTERNS:
                self._patterns.popitem(last=False)
        return pattern

    def _pattern(self, row: np.ndarray) -> tuple[np.ndarray, list[int]]:
        allowed = bits_of(row[self._byte_words])
        possible: list[int] = []
        asked: list[int] = []
        for group, (way, tokens) in enumerate(zip(self.ways, self.tokens, strict=True)):
            need = self._need[group]
            if any(look is None or has(row, look) for look in self._sure[group]):
                possible += tokens
            elif not _is_unsure(way) or has(row, tokens[0]):
                continue  # the mask says it all
            elif way.kind == "escape" and not way.head:
                single, several = _first_bytes(way.text)
                if allowed & single:
                    possible += tokens
                elif any(allowed >> first & 1 for first in several):
                    asked.append(group)
            elif need is None or has(row, need):
                asked.append(group)
        return self._own.mask(possible), asked


class _Looks:
    """Places of a mask to look at."""

    def __init__(self, tokens: list[int]) -> None:
        ids = np.array(tokens, dtype=np.int64)
        self._words = ids >> 5
        self._bits = (np.uint32(1) << (ids & 31).astype(np.uint32)).view(np.int32)

    def at(self, row: np.ndarray) -> np.ndarray:
        """The bits, each in its place in a word: int32."""
        found: np.ndarray = row.take(self._words)
        found &= self._bits
        return found


def has(row: np.ndarray, token: int) -> bool:
    """Whether a token is in a mask, int32 `[W]`."""
    return bool(int(row[token >> 5]) >> (token & 31) & 1)


def _is_unsure(way: Way) -> bool:
    return way.kind in ("escape", "number") or DELETE in way.head


def bits_of(words: np.ndarray) -> int:
    """Words of a mask as the bits of one number."""
    return int.from_bytes(words.tobytes(), "little")


def _witnesses(way: Way) -> tuple[bytes, list[bytes]]:
    """What has to be possible for a way to be, and what shows that it is; `b""` always is."""
    if DELETE in way.head:
        escaped = way.head.replace(DELETE, _DELETE_ESCAPED)
        need = way.head.partition(DELETE)[0] + b"\\"  # or it is in the mask as it is
        return need, [escaped] if way.kind in ("string", "outside") else []
    if way.kind == "escape":
        ranges = spans(way.text)
        likely = [c for c in _PROBES if any(low <= ord(c) <= high for low, high in ranges)]
        probes = likely[:1] or [chr(ranges[0][0])]
        if way.head.endswith(b'"'):  # names and constants, which are in nearly every schema
            probes += [c for c in _IN_NAMES if any(low <= ord(c) <= high for low, high in ranges)]
        return way.head, [way.head + usual(c) for c in probes]
    if way.kind == "number":
        if way.text == "-":  # of 0, if of nothing else
            return way.head + b"0", [way.head + bytes([ord("0"), end]) for end in _ENDS]
        digits = way.text.lstrip("-")
        return way.head + (b"0" if way.text[0] == "-" else digits[:1].encode()), []
    return way.head, [way.head]


@dataclass
class HexTokens:
    """Tokens that begin with certain hexadecimal digits.

    Attributes:
        alone: Those that are nothing else.
        with_rest: Those that go on as one token of the grammar's vocabulary would, int64.
        rests: These tokens, int64.
        others: Those with what spells itself neither alone nor so.
        halves: Those that go on with a backslash.
    """

    alone: list[int]
    with_rest: np.ndarray
    rests: np.ndarray
    others: list[int]
    halves: list[int]


_Begun: TypeAlias = list[tuple[str, HexTokens]]


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
        begun = {p: m.end() for p in own.ids if p[0] in _HEX and (m := _DIGITS.match(p))}
        self._hex = {missing: self._by_hex(missing, begun) for missing in (1, 2, 3, 4)}
        self.within_escape = lru_cache(256)(self._within_escape)
        slashes = [p for p in own.ids if p[:1] == b"/"]
        plain = {p for p in slashes if self._spells_itself(p)}
        self.slashes = self._mask(plain)
        self.after_backslash = [
            (token, *self._behind_backslash(way))
            for p, ids in own.ids.items()
            if (p[:1] == b"u" or (p[:1] == b"/" and p not in plain))
            or (p[0] in _SHORT_ESCAPES and set(p[1:]) & _SPECIAL)
            if (way := read("escape", "\\", p)) is not None and not self._literal(way, p)
            for token in ids
        ]
        # All tokens that are added have been by now.
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
        runs = {piece: run_of(piece) for piece in own.ids if piece[0] in _IN_NUMBERS}
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

    def all_taken(self, native: GrammarState, tokens: np.ndarray) -> np.ndarray:
        """Which of these tokens the grammar takes next: bool, of the same shape."""
        if not len(tokens):
            return np.zeros(0, dtype=bool)
        if len(tokens) > _FEWER_THAN_A_MASK:
            row = native.mask()
            return row[tokens >> 5] >> (tokens & 31) & 1 != 0
        return np.array([native.takes([token]) for token in tokens.tolist()], dtype=bool)

    def may_end(self, native: GrammarState, number: bytes) -> bool:
        """Whether a number, or what is left of one, may come next, and then its end."""
        if not number and native.accepting:  # perhaps of all
            return True
        if not self.takes(native, number):
            return False
        ids = [self.byte_ids[byte] for byte in number]
        return any(native.takes([*ids, end]) > len(ids) for end in self.ends)

    def may_become(self, native: GrammarState, escape: str, allowed: int | None = None) -> bool:
        """Whether an escape in a string may become a character that the grammar takes.

        Args:
            native: The grammar's state in front of the escape.
            escape: As far as it goes.
            allowed: The bytes that may come there, as bits, if they are known.
        """
        if allowed is None:
            allowed = self.next_bytes(native.mask())
        single, several = _first_bytes(escape)
        return bool(allowed & single) or any(
            self.takes(native, start)
            for first, starts in several.items()
            if allowed >> first & 1
            for start in starts
        )

    def next_bytes(self, row: np.ndarray) -> int:
        """Which bytes may come next by a mask, as bits."""
        return bits_of(row[self._byte_words])

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
                possible = piece[0] in _OUTSIDE and _ODD_IN_OUTSIDE.match(piece) is not None
            else:
                possible = b"\\" in piece or b'"' in piece or DELETE in piece
            if not possible:
                continue
            way = read(kind, "", piece)
            if way is None or (way.literal and (way.kind != "number" or _as_usual(way.text))):
                continue
            if way.kind != "number" or BEGUN.fullmatch(way.text):
                found[way._replace(literal=False)] += ids
        return Odd(self.own, found, self._token_of, self._byte_words)

    def _behind_backslash(self, way: Way) -> tuple[Way, int | None, bool]:
        """What a token does behind a backslash, what shows that it may come (and, if it does not
        end in an escape or number, that it may not), and whether that is a token behind the
        backslash or in front of it.
        """
        _, sure = _witnesses(way)
        if not way.head or DELETE in way.head or not sure:
            return way, None, False
        behind = sure[0][:1] == b"\\"
        return way, self._token_of(sure[0][behind:]), behind

    def _within_escape(self, text: str) -> tuple[list[tuple[bytes, HexTokens]], _Begun]:
        """The tokens that begin with digits of an escape, as far as it goes.

        Returns:
            Those that complete it, by what it then spells; the others, by what it has become.
        """
        complete, begun = [], []
        missing = (6 if len(text) < 6 else 12) - len(text)
        for digits, found in self._hex[missing].items():
            escape = text + digits
            if len(digits) == missing and (character := spelt_by(escape)) is not None:
                complete.append((usual(character), found))
            elif spans(escape) and (found.alone or found.halves):
                begun.append((escape, found))
        return complete, begun

    def _by_hex(self, missing: int, begun: dict[bytes, int]) -> dict[str, HexTokens]:
        """Tokens that begin with so many digits, or are fewer: by the digits, in lower case.

        Args:
            missing: Digits of an escape.
            begun: Pieces that begin with some, and with how many.
        """
        alone: dict[str, list[int]] = defaultdict(list)
        rests: dict[str, list[tuple[int, int]]] = defaultdict(list)
        others: dict[str, list[int]] = defaultdict(list)
        halves: dict[str, list[int]] = defaultdict(list)
        for piece, has_digits in begun.items():
            if missing > has_digits != len(piece):
                continue
            ids, length = self.own.ids[piece], min(missing, has_digits)
            digits, rest = piece[:length].decode().lower(), piece[length:]
            way = read("string", "", rest)
            if not rest:
                alone[digits] += ids
            elif way is None:
                continue
            elif way.kind in ("string", "outside") and DELETE not in way.head:
                look = self._token_of(way.head)
                rests[digits] += [(token, look) for token in ids]
            else:
                others[digits] += ids
            if rest[:1] == b"\\":
                halves[digits] += ids
        found = {}
        for digits in {*alone, *rests, *others}:
            pairs = np.array(rests[digits], dtype=np.int64).reshape(-1, 2)
            found[digits] = HexTokens(
                alone[digits], pairs[:, 0], pairs[:, 1], others[digits], halves[digits]
            )
        return found

    def _ids(self, chosen: Iterable[bytes]) -> np.ndarray:
        return np.array([t for p in chosen for t in self.own.ids[p]], dtype=np.int64)

    def _mask(self, chosen: Iterable[bytes]) -> np.ndarray:
        return self.own.mask(t for p in chosen for t in self.own.ids[p])


@lru_cache(4096)
def _first_bytes(escape: str) -> tuple[int, dict[int, list[bytes]]]:
    """What may begin the characters of an escape.

    Returns:
        The single bytes, as bits, and beginnings of several bytes by their first.
    """
    single = 0
    several: dict[int, list[bytes]] = defaultdict(list)
    for start in (start for span in spans(escape) for start in beginnings(*span)):
        if len(start) == 1:
            single |= 1 << start[0]
        if len(start) > 1 or start == DELETE:
            several[_DELETE_ESCAPED[0] if start == DELETE else start[0]].append(start)
    return single, dict(several)


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
