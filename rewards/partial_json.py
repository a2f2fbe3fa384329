"""What is closed in the beginning of a JSON text.

A value is closed when nothing that may follow can change it: a string with its last quote, an
object or array with its bracket, a literal when it is spelt, and a number when something else
follows, since `12` may become `120`. An object or array that is still open shows its closed fields
and elements alone, and raises `Open` when it is asked for what may still change: its length, its
order, a key that it does not have yet.

Objects give their fields as attributes and as items: `person.age`, `person["age"]`. They have no
methods, so that fields may be called `items` or `keys`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LITERALS = {"true": True, "false": False, "null": None}
_DEEPEST = 200


class Open(Exception):
    """What was asked for is not known yet."""


class MissingField(AttributeError, KeyError):
    """A closed value has no such field or element."""

    __str__ = AttributeError.__str__


class Record:
    """A JSON object. See the module for what an open one shows."""

    __slots__ = ("__fields", "__open")

    def __init__(self, fields: dict[str, Any], *, is_open: bool = False) -> None:
        self.__fields = fields
        self.__open = is_open

    def __getattr__(self, name: str) -> Any:
        # Python's own protocols (copying, pickling, ...) must not find fields.
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        if name in self.__fields:
            return self.__fields[name]
        raise Open if self.__open else MissingField(f"there is no field {name!r}")

    def __contains__(self, name: object) -> bool:
        return name in self.__fields or name in self.__settled()

    def __iter__(self) -> Iterator[str]:
        return iter(self.__settled())

    def __len__(self) -> int:
        return len(self.__settled())

    def __bool__(self) -> bool:
        return bool(self.__fields) or bool(self.__settled())

    def __eq__(self, other: object) -> bool:
        mine = self.__settled()
        return mine == (other.__settled() if isinstance(other, Record) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inside = [f"{name}={value!r}" for name, value in self.__fields.items()]
        return f"Record({', '.join([*inside, '...'] if self.__open else inside)})"

    def __settled(self) -> dict[str, Any]:
        if self.__open:
            raise Open
        return self.__fields


class OpenList:
    """A JSON array that is not closed. A closed one is a list."""

    def __init__(self, elements: list[Any]) -> None:
        self._elements = elements

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and 0 <= index < len(self._elements):
            return self._elements[index]
        raise Open

    def __contains__(self, value: object) -> bool:
        for element in self._elements:
            if element == value:
                return True
        raise Open

    def __iter__(self) -> Iterator[Any]:
        yield from self._elements
        raise Open

    def __len__(self) -> int:
        raise Open

    def __bool__(self) -> bool:
        if self._elements:
            return True
        raise Open

    def __eq__(self, other: object) -> bool:
        raise Open

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"[{', '.join([*map(repr, self._elements), '...'])}]"


class NotJson(Exception):
    """No JSON text begins like this.

    Attributes:
        at: Offset of the first wrong character.
    """

    def __init__(self, at: int) -> None:
        super().__init__(f"not JSON at character {at}")
        self.at = at


def closed_part(text: str) -> Any:
    """The value that a JSON text, or the beginning of one, holds.

    Returns:
        Plain data where it is closed, with `Record` for objects; else a `Record` or `OpenList`
        that shows what is closed.

    Raises:
        Open: Nothing is closed yet.
        NotJson: The text is no beginning of a JSON text, or a key or value is nested too deeply.
    """
    return _Reader(text).whole()


def whole_value(text: str) -> Any:
    """The value of a whole JSON text: plain data with `Record` for objects.

    Raises:
        NotJson: It is not one.
    """
    try:
        return json.loads(text, object_hook=Record)
    except (ValueError, RecursionError) as error:
        raise NotJson(getattr(error, "pos", 0)) from error


def last_closed(text: str) -> int | None:
    """Where the last closed field or element of the beginning of a JSON text ends.

    None where there is none. What follows where the text stops being JSON does not count.
    """
    reader = _Reader(text)
    with contextlib.suppress(Open, NotJson):
        reader.whole()
    return reader.closed


class _Cut(Exception):
    """The text ends here."""


class _Reader:
    """Reads from left to right; `closed` is where the last closed value ends."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.closed: int | None = None

    def whole(self) -> Any:
        try:
            value, is_open = self.value(0)
        except _Cut:
            raise Open from None
        if not is_open:
            self.space()
            if self.at < len(self.text):
                raise NotJson(self.at)
        return value

    def space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def peek(self) -> str:
        """The next character behind whitespace.

        Raises:
            _Cut: There is none.
        """
        self.space()
        if self.at >= len(self.text):
            raise _Cut
        return self.text[self.at]

    def value(self, depth: int) -> tuple[Any, bool]:
        """A value, and whether it is open.

        Raises:
            _Cut: Nothing of it is closed.
        """
        first = self.peek()
        if depth > _DEEPEST:
            raise NotJson(self.at)
        if first == "{":
            return self.object(depth)
        if first == "[":
            return self.array(depth)
        value = self.string() if first == '"' else self.scalar()
        self.closed = self.at
        return value, False

    def string(self) -> str:
        found = _STRING.match(self.text, self.at)
        if found is None:
            if re.search(r'(?<!\\)(?:\\\\)*"', self.text[self.at + 1 :]):
                raise NotJson(self.at)
            raise _Cut
        self.at = found.end()
        text: str = json.loads(found[0])
        return text

    def scalar(self) -> Any:
        rest = self.text[self.at : self.at + 5]
        for word, value in _LITERALS.items():
            if rest.startswith(word):
                self.at += len(word)
                return value
            if word.startswith(rest):
                raise _Cut
        found = _NUMBER.match(self.text, self.at)
        end = found.end() if found else self.at
        if re.fullmatch(r"[-+.eE0-9]*", self.text[end:]):
            raise _Cut
        if found is None or self.text[end] not in ",]} \t\n\r":
            raise NotJson(self.at)
        try:
            number = json.loads(found[0])
        except ValueError:  # more digits than Python reads
            raise NotJson(self.at) from None
        self.at = end
        return number

    def object(self, depth: int) -> tuple[Any, bool]:
        fields: dict[str, Any] = {}
        self.at += 1
        try:
            while True:
                if self.peek() == "}" and not fields:
                    break
                if self.peek() != '"':
                    raise NotJson(self.at)
                key = self.string()
                if self.peek() != ":":
                    raise NotJson(self.at)
                self.at += 1
                # A key that comes twice has its last value.
                fields.pop(key, None)
                fields[key], is_open = self.value(depth + 1)
                if is_open:
                    return Record(fields, is_open=True), True
                if self.peek() == "}":
                    break
                if self.peek() != ",":
                    raise NotJson(self.at)
                self.at += 1
        except _Cut:
            return Record(fields, is_open=True), True
        self.at += 1
        self.closed = self.at
        return Record(fields), False

    def array(self, depth: int) -> tuple[Any, bool]:
        elements: list[Any] = []
        self.at += 1
        try:
            while True:
                if self.peek() == "]" and not elements:
                    break
                value, is_open = self.value(depth + 1)
                elements.append(value)
                if is_open:
                    return OpenList(elements), True
                if self.peek() == "]":
                    break
                if self.peek() != ",":
                    raise NotJson(self.at)
                self.at += 1
        except _Cut:
            return OpenList(elements), True
        self.at += 1
        self.closed = self.at
        return elements, False
