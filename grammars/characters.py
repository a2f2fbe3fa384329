"""Which characters may come next in a text, and how to say it in a few words.

The constraint is bound to single bytes (`matching.every_byte`), so that no model is needed.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Protocol, runtime_checkable

import numpy as np

from guided_smc.grammars.matching import every_byte, only_way
from guided_smc.potentials import CompiledConstraint, ConstraintState

_MOST_LISTED = 8
"""Characters outside ASCII that are named one by one."""

_MOST_ASKED = 2000
"""Beginnings of characters that are tried in search of those."""

_NAMES = {"\n": "a line break", "\r": "a carriage return", "\t": "a tab", " ": "a space"}
_KINDS = (
    (frozenset(string.ascii_letters), "letters"),
    (frozenset(string.ascii_lowercase), "lower-case letters"),
    (frozenset(string.ascii_uppercase), "upper-case letters"),
    (frozenset(string.digits), "digits"),
)
_CONTROLS = frozenset(map(chr, (*range(32), 127))) - frozenset("\n\r\t")
_WRITTEN = frozenset(map(chr, range(32, 127))) | frozenset("\n\r\t")
_ASCII = frozenset(map(chr, range(128)))


@dataclass(frozen=True)
class Allowed:
    """What may come next in a text.

    Attributes:
        characters: The next characters. Of those outside ASCII only a few, if there are more.
        others: Whether there are more of those outside ASCII.
        forced: What has to come, where there is no choice: at least the one next character.
        end: Whether the text may end here.
    """

    characters: frozenset[str]
    others: bool = False
    forced: str = ""
    end: bool = False

    def __str__(self) -> str:
        """In words, such as `digits, "," or the end`."""
        if len(self.forced) > 1 and not self.end:
            return quoted(self.forced)
        parts = list(_in_words(self.characters, self.others))
        parts += ["the end"] if self.end else []
        if not parts:
            return "nothing"
        return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


@runtime_checkable
class HasUsualMasks(Protocol):
    """A compiled constraint that knows several spellings of the same."""

    def fill_usual_masks(self, states: Any, bitmask: np.ndarray) -> None:
        """`fill_masks`, but for other spellings where the text may go on in the usual one."""


def usual_masks(compiled: CompiledConstraint) -> Callable[[Any, np.ndarray], None]:
    """What fills masks with the usual spellings, where a constraint knows several."""
    return compiled.fill_usual_masks if isinstance(compiled, HasUsualMasks) else compiled.fill_masks


def next_bytes(compiled: CompiledConstraint, state: ConstraintState) -> list[int]:
    """The bytes that a mask lets pass, one by one, in the usual spelling; not all are viable."""
    mask = np.empty((1, 9), dtype=np.int32)  # [1, ceil(257 / 32)]
    usual_masks(compiled)([state], mask)
    bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
    return [int(byte) for byte in np.flatnonzero(bits[:256])]


def allowed_next(compiled: CompiledConstraint, state: ConstraintState) -> Allowed:
    """What may come next where a text stands at a character's beginning.

    Args:
        compiled: Over `every_byte`.
        state: One of its states.
    """
    ascii_, longer = set(), []
    for byte in next_bytes(compiled, state):
        after = state.fork()
        if after.advance(byte):
            if byte < 128:
                ascii_.add(chr(byte))
            else:
                longer.append((bytes([byte]), after))
    search = _Search(compiled)
    found = list(islice(search.characters(longer), _MOST_LISTED + 1))
    only = state.forced()
    if isinstance(compiled, HasUsualMasks):
        only = only_way(compiled.fill_usual_masks, state, 9)
    forced = every_byte().decode(only, finished=False)
    if not forced and len(ascii_) + len(found) == 1:
        forced = next(iter((*ascii_, *found)))
    return Allowed(
        characters=frozenset(ascii_) | frozenset(found),
        others=len(found) > _MOST_LISTED or (not search.finished and bool(longer)),
        forced=forced,
        end=state.accepting,
    )


class _Search:
    """Characters outside ASCII that may come next, in no order, as far as patience goes."""

    def __init__(self, compiled: CompiledConstraint) -> None:
        self._compiled = compiled
        self._asked = 0

    @property
    def finished(self) -> bool:
        """Whether patience did not run out."""
        return self._asked < _MOST_ASKED

    def characters(self, begun: list[tuple[bytes, Any]]) -> Iterator[str]:
        """All that begin with these bytes, and the states behind them."""
        stack = begun[::-1]
        while stack and self.finished:
            data, state = stack.pop()
            for byte in next_bytes(self._compiled, state):
                self._asked += 1
                after = state.fork()
                if not 0x80 <= byte < 0xC0 or not after.advance(byte):
                    continue
                try:
                    yield (data + bytes([byte])).decode()
                except UnicodeDecodeError:
                    stack.append((data + bytes([byte]), after))


def quoted(text: str) -> str:
    """A text between quotes, with what cannot be seen written out."""
    if text == "\\":
        return '"\\"'
    if '"' in text:
        return repr(text)
    return '"' + repr("'" + text)[2:]  # with a single quote in it, `repr` takes double ones


def _in_words(characters: Collection[str], others: bool) -> Iterator[str]:
    ascii_ = _ASCII & set(characters)
    beyond = sorted(set(characters) - ascii_)
    missing = _WRITTEN - ascii_
    if len(missing) <= _MOST_LISTED:
        what = "any character" if others else "any ASCII character"
        yield what + (f" but {' '.join(map(_named, sorted(missing)))}" if missing else "")
        beyond, ascii_, others = [] if others else beyond, frozenset(), False
    for kind, name in _KINDS:
        if ascii_ >= kind:
            yield name
            ascii_ -= kind
    for low, high in _runs(sorted(ascii_)):
        if ord(high) - ord(low) > 1:
            yield f"{_named(low)} to {_named(high)}"
        elif low == high:
            yield _named(low)
        else:
            yield from (_named(low), _named(high))
    if others:
        yield "others outside ASCII" + (f" such as {_named(beyond[0])}" if beyond else "")
    else:
        yield from map(_named, beyond)


def _named(character: str) -> str:
    return _NAMES.get(character) or quoted(character)


def _runs(characters: list[str]) -> Iterator[tuple[str, str]]:
    """Neighbours in ASCII as first and last, where both are letters, digits or control codes."""
    by_run = groupby(enumerate(characters), lambda pair: (ord(pair[1]) - pair[0], _sort(pair[1])))
    for (_, sort), run in by_run:
        members = [character for _, character in run]
        if sort == "other":
            yield from ((c, c) for c in members)
        else:
            yield members[0], members[-1]


def _sort(character: str) -> str:
    if character in _NAMES:
        return "other"
    if character in _CONTROLS:
        return "control"
    return "word" if character.isalnum() else "other"
