"""JSON read as it grows: what has been closed is known at once, whatever is still to come.

A reader takes a text in pieces. It can be copied at any point, at the cost of what is open there,
so particles that fork share what they have read. It refuses what no further text could make JSON,
and strings that hold half of a surrogate pair; a judge decides about the rest: values and keys, as
they are closed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from guided_smc.grammars.schema.values import exact_number

P = TypeVar("P")

_SPACE = " \t\n\r"
_ESCAPE = r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})"
_CHARS = rf"[^\"\\\x00-\x1f]*(?:{_ESCAPE}[^\"\\\x00-\x1f]*)*"
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_LEXEME = re.compile(
    rf'[{_SPACE}]+|[\[\]{{}},:]|"{_CHARS}"|{_NUMBER}(?=[{_SPACE}\]}},])|true|false|null'
)
_LAST_NUMBER = re.compile(_NUMBER)
_BEGUN = re.compile(
    rf'"{_CHARS}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?'
    r"|-?(?:(?:0|[1-9][0-9]*)(?:\.|(?:\.[0-9]+)?(?:[eE][+-]?[0-9]*)?)?)?"
    r"|t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?"
)
_HALF = "holds half of a surrogate pair"
_LITERALS: dict[str, Any] = {"true": True, "false": False, "null": None}


class Judge(Protocol[P]):
    """Decides about values by where they stand; a place stands for what has to hold there.

    Attributes:
        root: The place of the whole value.
    """

    root: P

    def enter(self, place: P, container: dict[str, Any] | list[Any]) -> Any:
        """Anything to remember while an object or array is open (immutable)."""

    def key(self, frame: Frame[P], key: str) -> bool:
        """Whether an object may have this key next."""

    def inside(self, frame: Frame[P]) -> P:
        """The place of the next value in an open object (by `frame.key`) or array."""

    def closed(self, place: P, value: Any) -> bool:
        """Whether a value may stand in its place."""

    def added(self, frame: Frame[P], value: Any) -> bool:
        """Whether an open object or array can still be valid, after a value has come in."""


@dataclass
class Frame(Generic[P]):
    """An object or array that is still open.

    Attributes:
        place: Where it stands.
        container: What has been closed in it.
        key: The last key of an object.
        memory: The judge's own.
    """

    place: P
    container: dict[str, Any] | list[Any]
    key: str = ""
    memory: Any = None

    def copy(self) -> Frame[P]:
        """Independent, but for the values that are closed and so never change."""
        return Frame(self.place, self.container.copy(), self.key, self.memory)


@dataclass
class Reader(Generic[P]):
    """A text that has been read up to some point.

    Attributes:
        judge: Asked about what is closed.
        alive: Whether the text can still become JSON that the judge accepts.
        length: Characters read.
        fault: Why it is dead, where that is for no judge to say; in words.
    """

    judge: Judge[P]
    alive: bool = True
    length: int = 0
    fault: str = ""
    _stack: list[Frame[P]] = field(default_factory=list)
    _expected: str = "v"  # value, value or ]: "i", key: "k", key or }: "o", ":", ",", end: "e"
    _pending: str = ""

    def copy(self) -> Reader[P]:
        """Independent of this one."""
        stack = [frame.copy() for frame in self._stack]
        return Reader(
            *(self.judge, self.alive, self.length, self.fault),
            *(stack, self._expected, self._pending),
        )

    def feed(self, text: str) -> bool:
        """Read on. False if no further text makes this a value that the judge accepts."""
        self.length += len(text)
        if not self.alive:
            return False
        text = self._pending + text
        at = 0
        while at < len(text):
            match = _LEXEME.match(text, at)
            if match is None:
                break
            at = match.end()
            if not self._take(match[0]):
                self.alive = False
                return False
        self._pending = text[at:]
        if self._pending:
            in_turn = self._expected in ("ko" if self._pending[0] == '"' else "") + "vi"
            self.alive = in_turn and _BEGUN.fullmatch(self._pending) is not None
        return self.alive

    def finish(self) -> bool:
        """Whether what was read is complete and accepted. Nothing can be fed after it."""
        last, self._pending = self._pending, ""
        if last and self.alive:
            self.alive = _LAST_NUMBER.fullmatch(last) is not None and self._take(last)
        self.alive = self.alive and self._expected == "e"
        return self.alive

    def steps(self) -> list[str | int]:
        """The keys and indices that lead to the value that is being read, or was read last."""
        if not self._stack:
            return []
        last = self._stack[-1]
        to_last = [f.key if _is_object(f) else len(f.container) for f in self._stack]
        if self._expected in "ko":
            return to_last[:-1]  # in front of a key
        if self._expected == "," and not _is_object(last):
            to_last[-1] = len(last.container) - 1
        return to_last

    def _take(self, lexeme: str) -> bool:
        first = lexeme[0]
        if first in _SPACE:
            return True
        expected = self._expected
        if first == '"' and expected in "ko":
            return self._key(lexeme)
        if first == ":":
            self._expected = "v"
            return expected == ":"
        if first == ",":
            self._expected = "k" if self._stack and _is_object(self._stack[-1]) else "v"
            return expected == ","
        if first in "]}":
            return self._end(first)
        if expected not in "vi":
            return False
        place = self.judge.inside(self._stack[-1]) if self._stack else self.judge.root
        if first in "[{":
            container: dict[str, Any] | list[Any] = {} if first == "{" else []
            frame = Frame(place, container)
            frame.memory = self.judge.enter(place, container)
            self._stack.append(frame)
            self._expected = "o" if first == "{" else "i"
            return True
        if first == '"':
            value = _string(lexeme)
            self.fault = _HALF if value is None else ""
            return value is not None and self._close(place, value)
        if lexeme in _LITERALS:
            return self._close(place, _LITERALS[lexeme])
        try:
            number = exact_number(lexeme)
        except ValueError:
            return False
        return self._close(place, number)

    def _key(self, lexeme: str) -> bool:
        frame, key = self._stack[-1], _string(lexeme)
        if key is None:
            self.fault = _HALF
            return False
        if key in frame.container:
            self.fault = f"the key {json.dumps(key, ensure_ascii=False)} comes twice"
            return False
        frame.key = key
        self._expected = ":"
        return self.judge.key(frame, key)

    def _end(self, bracket: str) -> bool:
        if not self._stack or self._expected not in ("o," if bracket == "}" else "i,"):
            return False
        frame = self._stack[-1]
        if _is_object(frame) != (bracket == "}"):
            return False
        self._stack.pop()
        self._expected = "v"  # the value that has just been read
        return self._close(frame.place, frame.container)

    def _close(self, place: P, value: Any) -> bool:
        if not self.judge.closed(place, value):
            return False
        if not self._stack:
            self._expected = "e"
            return True
        frame = self._stack[-1]
        if isinstance(frame.container, dict):
            frame.container[frame.key] = value
        else:
            frame.container.append(value)
        self._expected = ","
        return self.judge.added(frame, value)


def _is_object(frame: Frame[Any]) -> bool:
    return isinstance(frame.container, dict)


def _string(lexeme: str) -> str | None:
    """The string that a lexeme spells, or None if it is not Unicode."""
    if "\\" not in lexeme:
        return lexeme[1:-1]
    value: str = json.loads(lexeme)
    return value if not any("\ud800" <= c <= "\udfff" for c in value) else None
