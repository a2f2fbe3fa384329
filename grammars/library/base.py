"""What ready grammars share: values, examples, and names of the user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

from guided_smc.errors import ConstraintError, OutputValidationError
from guided_smc.grammars.grammar import accepts
from guided_smc.grammars.lark import Lark
from guided_smc.grammars.matching import Limits
from guided_smc.grammars.regex import Regex
from guided_smc.grammars.schema.keywords import shorten
from guided_smc.potentials import Constraint

_Make = TypeVar("_Make", bound=Callable[..., Constraint])


@dataclass(frozen=True)
class Examples:
    """Texts that show what a ready grammar means.

    Attributes:
        arguments: What the grammar was made with, beside defaults.
        accepted: Members of the language.
        refused: Texts that are none.
    """

    arguments: Mapping[str, Any]
    accepted: tuple[str, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Listed:
    """A ready grammar: the function that makes it, and its examples."""

    make: Callable[..., Constraint]
    examples: Examples


LIBRARY: dict[str, Listed] = {}
"""All ready grammars by name, in the order in which they were declared."""


def listed(
    *, accepted: Iterable[str], refused: Iterable[str], **arguments: Any
) -> Callable[[_Make], _Make]:
    """Put the function below into the library, with its examples."""

    def put(make: _Make) -> _Make:
        examples = Examples(arguments, tuple(accepted), tuple(refused))
        LIBRARY[make.__name__] = Listed(make, examples)
        return make

    return put


class _Valued(Constraint):
    """Texts with values, which two functions read and compare."""

    _read: Callable[[str], Any] | None
    _key: Callable[[Any], Hashable] | None

    def parse(self, text: str) -> Any:
        """The value of a member.

        Raises:
            OutputValidationError: The text is no member.
        """
        if self._read is None:
            return text
        if not accepts(self, text):
            raise OutputValidationError(
                f"{shorten(text)!r} is no member of {self.name}", text=text, finish_reason="stop"
            )
        return self._read(text)

    def value_key(self, text: str) -> Hashable:
        """Equal for texts with equal values."""
        value: Hashable = self.parse(text)
        return value if self._key is None else self._key(value)


class Ready(_Valued, Lark):
    """Texts of a ready grammar, with their values.

    Args:
        grammar: In llguidance's dialect of Lark.
        name: Of the function that makes it.
        read: The value of a member; the text itself if None.
        key: Equal for equal values; the value itself if None.
        limits: What it may cost.

    Raises:
        ConstraintError: The user's part of it makes it larger than the limits allow.
    """

    def __init__(
        self,
        grammar: str,
        name: str,
        *,
        read: Callable[[str], Any] | None = None,
        key: Callable[[Any], Hashable] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._read = read
        self._key = key
        try:
            super().__init__(grammar, limits=limits)
        except ConstraintError as error:
            raise ConstraintError(f"{name}: {error}") from None
        self.name = name


class ReadyPattern(_Valued, Regex):
    """Texts of a ready regular expression, with their values.

    Args:
        pattern: In Python's dialect.
        name: Of the function that makes it.
        read: The value of a member; the text itself if None.
    """

    def __init__(
        self, pattern: str, name: str, *, read: Callable[[str], Any] | None = None
    ) -> None:
        super().__init__(pattern)
        self.name = name
        self._read = read
        self._key = None


def source(name: str) -> str:
    """The grammar in a file of this folder, without comments: parts of it may be used often."""
    text = files(__package__).joinpath(f"{name}.lark").read_text(encoding="utf-8")
    return re.sub(r"^//.*\n", "", text, flags=re.M)


def literal(text: str) -> str:
    """A text as the grammar's dialect writes it."""
    return json.dumps(text)


def either(texts: Iterable[str]) -> str:
    """Alternatives of literals."""
    return " | ".join(map(literal, texts))


def repeated(rule: str, low: int, high: int | None) -> str:
    """A rule several times; nothing where it may not occur at all."""
    if high == 0:
        return ""
    return f"({rule}){{{low},{'' if high is None else high}}}"


def check_names(
    names: Any, what: str, pattern: str = r"(?s:.+)", rule: str = "", *, fold: bool = False
) -> list[str]:
    """The user's own names as a list.

    Args:
        names: An iterable of texts, of which there is at least one.
        what: What messages call them, in the plural.
        pattern: Which names can be written.
        rule: The pattern in words.
        fold: Whether names that differ in case alone are the same.

    Raises:
        ConstraintError: Something else, a name twice, or one that cannot be written.
    """
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise ConstraintError(f"{what} are a list of names, got {shorten(repr(names))}")
    found: list[str] = []
    seen: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str):
            raise ConstraintError(f"{what} are texts, got {shorten(repr(name))}")
        if not re.fullmatch(pattern, name) or not _is_text(name):
            raise ConstraintError(
                f"{shorten(repr(name))} cannot be written among the {what}: a name "
                f"{rule or 'has at least one character'}"
            )
        folded = name.lower() if fold else name
        if folded in seen:
            same = "twice" if seen[folded] == name else f"beside {seen[folded]!r}, in another case"
            raise ConstraintError(f"{name!r} is among the {what} {same}: remove or rename one")
        seen[folded] = name
        found.append(name)
    if not found:
        raise ConstraintError(f"{what} are empty: give at least one name")
    return found


def check_mapping(value: Any, what: str) -> Mapping[str, Any]:
    """A mapping, or an error that says so.

    Raises:
        ConstraintError: It is none.
    """
    if not isinstance(value, Mapping):
        raise ConstraintError(f"{what} are a mapping, got {shorten(repr(value))}")
    return value


def check_one_of(value: Any, allowed: Sequence[Any], what: str) -> None:
    """Raise unless a value is among those allowed.

    Raises:
        ConstraintError: With what is.
    """
    if value not in allowed:
        raise ConstraintError(
            f"{what} must be one of {', '.join(map(repr, allowed))}, got {shorten(repr(value))}"
        )


def check_count(value: Any, what: str, low: int, high: int | None = None) -> None:
    """Raise unless a value is an int within bounds.

    Raises:
        ConstraintError: With the bounds.
    """
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConstraintError(f"{what} must be an int {bounds}, got {shorten(repr(value))}")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
