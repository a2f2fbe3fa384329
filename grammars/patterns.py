r"""Python's patterns, taken apart by Python's own parser and spelt anew for other engines.

What `\w`, `\s`, `.` or case folding mean differs from engine to engine. So nothing is handed on as
it is written: a module (`re`, or `regex` where that is whose patterns they are) is asked which
characters each class matches, and what is written has explicit classes only.

- `regular` writes what llguidance reads: literal characters, classes, groups, alternatives and
  repetitions, which mean the same everywhere; lookaround and the like are refused.
- `spelt` writes what the `regex` package reads, with lookaround, backreferences and all.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

from guided_smc.errors import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars.schema.keywords import shorten

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

MAX_REPEAT: Any = _parser.MAXREPEAT
"""The upper bound of a repetition without one."""

Ranges = tuple[tuple[int, int], ...]
"""Code points, as sorted inclusive ranges."""

_UNSUPPORTED = {
    "ASSERT": "lookaround",
    "ASSERT_NOT": "lookaround",
    "FAILURE": "lookaround",
    "GROUPREF": "backreference",
    "GROUPREF_IGNORE": "backreference",
    "GROUPREF_EXISTS": "conditional group",
    "ATOMIC_GROUP": "atomic group",
    "POSSESSIVE_REPEAT": "possessive repetition",
    "AT_BOUNDARY": "word boundary",
    "AT_NON_BOUNDARY": "word boundary",
}
"""What has no equivalent among regular languages, or none that is easy to find."""

_STARTS = ("AT_BEGINNING", "AT_BEGINNING_STRING")
_ENDS = ("AT_END", "AT_END_STRING")

_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}

_ALPHABETS = int(re.ASCII | re.LOCALE | re.UNICODE)  # one replaces another

_LAST = sys.maxunicode
_SURROGATES = (0xD800, 0xDFFF)  # no characters: no text holds them


_AT_BEGINNING, _AT_END = _parser.AT_BEGINNING, _parser.AT_END


class NotAPattern(ConstraintError):
    """Python's parser refuses a pattern."""


@dataclass(frozen=True)
class Parsed:
    """A pattern as Python's parser sees it.

    Attributes:
        items: Its parts, one after the other.
        flags: Of `re`, those inside the pattern too.
        shown: The pattern, for messages.
        module: Which characters a class has is what this module says: `re` or `regex`.
    """

    items: list[Any]
    flags: int
    shown: str
    module: ModuleType = re


def parse(pattern: str, flags: int = 0, *, module: ModuleType = re) -> Parsed:
    """Take a pattern apart.

    Raises:
        NotAPattern: It is no regular expression of Python's.
        ConstraintError: It is nested too deeply.
    """
    shown = shorten(repr(pattern))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what may mean something else one day
            parsed = _parser.parse(pattern, flags)
    except (re.error, OverflowError, ValueError) as error:
        raise NotAPattern(f"{shown} is not a regular expression: {error}") from None
    except RecursionError:
        raise _too_deep(shown) from None
    return Parsed(list(parsed), parsed.state.flags, shown, module)


def regular(parsed: Parsed, *, whole: bool = True) -> str:
    """The same language in the part of Rust's dialect that means the same.

    Args:
        parsed: The pattern.
        whole: Whether matches are whole texts, so that anchors at the ends say nothing.

    Raises:
        UnsupportedConstraintError: It is not regular, or not plainly so.
        ConstraintError: It has a class without characters, or is nested too deeply.
    """
    return _within_depth(
        parsed, lambda: _Regular(parsed).sequence(parsed.items, parsed.flags, whole, whole)
    )


def covering(parsed: Parsed) -> str:
    """A larger language, in the part of Rust's dialect that means the same.

    What is not regular allows whatever it might: lookaround and word boundaries everything, a
    backreference all that its group matches.

    Raises:
        ConstraintError: It has a class without characters, or is nested too deeply.
    """
    return _within_depth(
        parsed, lambda: _Covering(parsed).sequence(parsed.items, parsed.flags, True, True)
    )


def found_by(pattern: str) -> str:
    """A larger language than the texts in which a pattern is found, to be searched for as well.

    Raises:
        ConstraintError: As `covering`, or it is no pattern of Python's.
    """
    parsed = parse(pattern)
    ends = [(op.name, argument) for op, argument in (*parsed.items[:1], *parsed.items[-1:])]
    begins = ends and ends[0] == ("AT", _AT_BEGINNING)
    stops = ends and ends[1] == ("AT", _AT_END)
    return f"{'^' if begins else ''}(?:{covering(parsed)}){'$' if stops else ''}"


def spelt(parsed: Parsed) -> str:
    """The same pattern for the `regex` package, where only explicit classes are left.

    Anchors and word boundaries become lookaround, so that all can be judged on prefixes.

    Raises:
        UnsupportedConstraintError: A backreference ignores case.
        ConstraintError: It is nested too deeply.
    """
    return _within_depth(parsed, lambda: _Spelt(parsed).sequence(parsed.items, parsed.flags))


def characters(item: Any, flags: int, module: ModuleType) -> Ranges | None:
    """The characters that a part matches one of; None for a part that is no single character."""
    op, argument = item
    match op.name:
        case "LITERAL" if not flags & re.IGNORECASE:
            return ((argument, argument),)
        case "LITERAL" | "NOT_LITERAL":
            negated = "^" if op.name == "NOT_LITERAL" else ""
            return _matched(f"[{negated}{_escaped(argument)}]", _asked(flags), module)
        case "ANY":
            return _matched(".", flags & re.DOTALL, module)
        case "IN":
            return _members(argument, flags, module)
    return None


def group_flags(argument: Any, flags: int) -> int:
    """The flags inside a group."""
    _, added, removed, _ = argument
    if added & _ALPHABETS:
        flags &= ~_ALPHABETS
    return int((flags | added) & ~removed)


def unsupported(shown: str, what: str) -> UnsupportedConstraintError:
    """The error that a pattern has something."""
    article = "an" if what[0] in "aeiou" else "a"
    return UnsupportedConstraintError(
        f"the regular expression {shown} is not supported: it has {article} {what}", keyword=what
    )


def named(op: str) -> str:
    """What a part of a pattern is called."""
    return _UNSUPPORTED.get(op, op.lower().replace("_", " "))


def _too_deep(shown: str) -> ConstraintError:
    return ConstraintError(f"the regular expression {shown} is nested too deeply")


def _within_depth(parsed: Parsed, write: Callable[[], str]) -> str:
    try:
        return write()
    except RecursionError:
        raise _too_deep(parsed.shown) from None


class _Regular:
    """Writes what llguidance reads."""

    def __init__(self, parsed: Parsed) -> None:
        self._shown = parsed.shown
        self._module = parsed.module

    def sequence(self, items: list[Any], flags: int, first: bool, last: bool) -> str:
        """Parts one after the other; `first` and `last`: whether they touch the text's ends."""
        full = [i for i, item in enumerate(items) if not _is_empty(item)]
        begin, end = (full[0], full[-1]) if full else (len(items), 0)
        return "".join(
            self._item(item, flags, first and i <= begin, last and i >= end)
            for i, item in enumerate(items)
        )

    def _item(self, item: Any, flags: int, first: bool, last: bool) -> str:
        ranges = characters(item, flags, self._module)
        if ranges is not None:
            return self._class(ranges)
        op, argument = item
        match op.name:
            case "BRANCH":
                branches = [self.sequence(list(b), flags, first, last) for b in argument[1]]
                return f"(?:{'|'.join(branches)})"
            case "SUBPATTERN":
                inside = group_flags(argument, flags)
                return f"(?:{self.sequence(list(argument[3]), inside, first, last)})"
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, inside = argument
                once = high == 1 or _is_empty(item)
                body = self.sequence(list(inside), flags, first and once, last and once)
                return f"(?:{body}){{{low},{_count(high)}}}"
            case "AT":
                return self._anchor(argument.name, first, last)
        raise unsupported(self._shown, named(op.name))

    def _anchor(self, name: str, first: bool, last: bool) -> str:
        if (name in _STARTS and first) or (name in _ENDS and last):
            return ""
        is_anchor = name in (*_STARTS, *_ENDS)
        raise unsupported(self._shown, "anchor in the middle" if is_anchor else named(name))

    def _class(self, ranges: Ranges) -> str:
        ranges = tuple(_without_surrogates(ranges))
        if not ranges:
            raise ConstraintError(
                f"the regular expression {self._shown} has a class that no character matches"
            )
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return _character(ranges[0][0])
        parts = (_character(a) if a == b else f"{_character(a)}-{_character(b)}" for a, b in ranges)
        return f"[{''.join(parts)}]"


class _Covering(_Regular):
    """Writes a regular language that holds that of any pattern."""

    def __init__(self, parsed: Parsed) -> None:
        super().__init__(parsed)
        self._groups: dict[int, str] = {}

    def _item(self, item: Any, flags: int, first: bool, last: bool) -> str:
        op, argument = item
        match op.name:
            case "AT" | "ASSERT" | "ASSERT_NOT" | "FAILURE":
                return ""
            case "SUBPATTERN":
                written = super()._item(item, flags, first, last)
                if argument[0] is not None:
                    self._groups[argument[0]] = written
                return written
            case "ATOMIC_GROUP":
                return f"(?:{self.sequence(list(argument), flags, False, False)})"
            case "POSSESSIVE_REPEAT":
                low, high, inside = argument
                body = self.sequence(list(inside), flags, False, False)
                return f"(?:{body}){{{low},{_count(high)}}}"
            case "GROUPREF" | "GROUPREF_IGNORE" if argument in self._groups:
                return self._groups[argument]
            case "GROUPREF" | "GROUPREF_IGNORE":
                return f"{self._class(((0, _LAST),))}{{0,}}"
            case "GROUPREF_EXISTS":
                _, yes, no = argument
                ways = [self.sequence(list(w or []), flags, False, False) for w in (yes, no)]
                return f"(?:{'|'.join(ways)})"
        return super()._item(item, flags, first, last)


_SOME = r"[\s\S]"
_AFTER_NOTHING = f"(?<!{_SOME})"
_BEFORE_NOTHING = f"(?!{_SOME})"
# Whether an empty text has a place that is no word boundary depends on Python's version.
_NO_BOUNDARY_IN = "" if re.fullmatch(r"\B", "") else f"(?:(?<={_SOME})|(?={_SOME}))"


class _Spelt:
    """Writes what the `regex` package reads."""

    def __init__(self, parsed: Parsed) -> None:
        self._shown = parsed.shown
        self._module = parsed.module

    def sequence(self, items: list[Any], flags: int) -> str:
        """Parts one after the other."""
        return "".join(self._item(item, flags) for item in items)

    def _item(self, item: Any, flags: int) -> str:
        ranges = characters(item, flags, self._module)
        if ranges is not None:
            return _set(ranges)
        op, argument = item
        match op.name:
            case "BRANCH":
                return f"(?:{'|'.join(self.sequence(list(b), flags) for b in argument[1])})"
            case "SUBPATTERN":
                body = self.sequence(list(argument[3]), group_flags(argument, flags))
                return f"(?:{body})" if argument[0] is None else f"({body})"
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                low, high, inside = argument
                kind = {"MAX_REPEAT": "", "MIN_REPEAT": "?", "POSSESSIVE_REPEAT": "+"}[op.name]
                return f"(?:{self.sequence(list(inside), flags)}){{{low},{_count(high)}}}{kind}"
            case "ATOMIC_GROUP":
                return f"(?>{self.sequence(list(argument), flags)})"
            case "ASSERT" | "ASSERT_NOT":
                behind = "<" if argument[0] < 0 else ""
                sign = "=" if op.name == "ASSERT" else "!"
                return f"(?{behind}{sign}{self.sequence(list(argument[1]), flags)})"
            case "FAILURE":
                return "(?!)"
            case "GROUPREF" if not flags & re.IGNORECASE:
                return f"\\g<{argument}>"
            case "GROUPREF" | "GROUPREF_IGNORE":
                raise unsupported(self._shown, "backreference that ignores case")
            case "GROUPREF_EXISTS":
                number, yes, no = argument
                otherwise = f"|{self.sequence(list(no), flags)}" if no else ""
                return f"(?({number}){self.sequence(list(yes), flags)}{otherwise})"
            case "AT":
                return self._anchor(argument.name, flags)
        raise unsupported(self._shown, named(op.name))

    def _anchor(self, name: str, flags: int) -> str:
        lines = flags & re.MULTILINE
        match name:
            case "AT_BEGINNING" if lines:
                return r"(?<![^\n])"
            case "AT_BEGINNING" | "AT_BEGINNING_STRING":
                return _AFTER_NOTHING
            case "AT_END" if lines:
                return f"(?=\\n|{_BEFORE_NOTHING})"
            case "AT_END":
                return f"(?=\\n?{_BEFORE_NOTHING})"
            case "AT_END_STRING":
                return _BEFORE_NOTHING
        word = _set(_matched(r"\w", _asked(flags & ~re.IGNORECASE), self._module))
        if name == "AT_BOUNDARY":
            return f"(?:(?<={word})(?!{word})|(?<!{word})(?={word}))"
        if name == "AT_NON_BOUNDARY":
            return f"(?:(?<={word})(?={word})|(?<!{word})(?!{word})){_NO_BOUNDARY_IN}"
        raise unsupported(self._shown, named(name))


def _set(ranges: Ranges) -> str:
    """A class as the `regex` package reads it."""
    if not ranges:
        return "(?!)"
    parts = (_escaped(a) if a == b else f"{_escaped(a)}-{_escaped(b)}" for a, b in ranges)
    return f"[{''.join(parts)}]"


def _count(high: Any) -> str:
    return "" if high == MAX_REPEAT else str(int(high))


def _is_empty(item: Any) -> bool:
    """Whether a part matches nothing but the empty text, such as an anchor."""
    op, argument = item
    match op.name:
        case "AT":
            return True
        case "BRANCH":
            return all(_is_empty(part) for branch in argument[1] for part in branch)
        case "SUBPATTERN":
            return all(_is_empty(part) for part in argument[3])
        case "MAX_REPEAT" | "MIN_REPEAT":
            return all(_is_empty(part) for part in argument[2])
    return False


def _members(items: list[Any], flags: int, module: ModuleType) -> Ranges:
    """The characters of a class such as `[a-z_]`."""
    kinds = {op.name for op, _ in items}
    if not flags & re.IGNORECASE and kinds <= {"LITERAL", "RANGE"}:
        pairs = [argument if op.name == "RANGE" else (argument,) * 2 for op, argument in items]
        return _merged(pairs)
    text = ""
    for op, argument in items:
        match op.name:
            case "NEGATE":
                text += "^"
            case "LITERAL":
                text += _escaped(argument)
            case "RANGE":
                text += f"{_escaped(argument[0])}-{_escaped(argument[1])}"
            case "CATEGORY":
                text += _CATEGORIES[argument.name]
    return _matched(f"[{text}]", _asked(flags), module)


def _merged(pairs: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def _asked(flags: int) -> int:
    """The flags that decide which characters a class matches."""
    return int(flags & (re.IGNORECASE | re.ASCII))


@lru_cache(1024)  # a class takes 20 ms to ask for, and its ranges up to some 100 kB
def _matched(one_character: str, flags: int, module: ModuleType) -> Ranges:
    """The characters that a pattern of one character matches, as the module itself says."""
    names = [name for name in ("IGNORECASE", "ASCII", "DOTALL") if flags & getattr(re, name)]
    flags = sum(int(getattr(module, name)) for name in names)
    runs = module.finditer(f"(?:{one_character})+", _every_character(), flags)
    return tuple((run.start(), run.end() - 1) for run in runs)


@cache
def _every_character() -> str:
    """All code points in order, so that the place of each is its number."""
    return "".join(map(chr, range(_LAST + 1)))


def _without_surrogates(ranges: Ranges) -> list[tuple[int, int]]:
    low, high = _SURROGATES
    parts = [p for a, b in ranges for p in ((a, min(b, low - 1)), (max(a, high + 1), b))]
    return list(_merged([(a, b) for a, b in parts if a <= b]))


def _escaped(code: int) -> str:
    """A character as `re` and `regex` read it."""
    return f"\\U{code:08x}"


def _character(code: int) -> str:
    """A character as llguidance reads it."""
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:X}}}"
