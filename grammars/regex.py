r"""Regular expressions as constraints, in the dialect of Python's `re`.

A text satisfies `regex(pattern)` if and only if `re.fullmatch(pattern, text)` finds a match. That
is a promise about every character: llguidance reads Rust's dialect, where `\w`, `\s`, `$` and case
folding mean something else, so no pattern is handed on as it is written. Python's own parser takes
it apart, `re` itself says which characters each class matches, and what llguidance gets is made of
literal characters, explicit classes, groups, alternatives and repetitions, which mean the same
everywhere.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from functools import cache, cached_property
from typing import Any
from weakref import WeakKeyDictionary

from guided_smc.errors import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars.automata import (
    MAX_STATES,
    Automaton,
    ByteAutomaton,
    CompiledFinite,
    finite,
)
from guided_smc.grammars.byte_regex import as_python, automaton_of
from guided_smc.grammars.grammar import Grammar, check_size
from guided_smc.grammars.keywords import shorten
from guided_smc.grammars.matching import EXACT_MASKS, CompiledGrammar, GrammarError, Limits
from guided_smc.grammars.pieces import pieces
from guided_smc.potentials import Constraint
from guided_smc.vocabulary import Vocabulary

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_Ranges = tuple[tuple[int, int], ...]
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


def regex(pattern: str | re.Pattern[str], *, limits: Limits | None = None) -> Constraint:
    r"""A constraint to texts that a regular expression matches as a whole.

    Args:
        pattern: In Python's dialect, as a text or compiled, with flags inside (`(?i)`) or of the
            compiled pattern. `\d`, `\w` and `\s` are Unicode's unless the flag `a` is set. Where
            the whole text has to match, greedy and lazy repetition are the same, and `^` and `$`
            at its ends say nothing.
        limits: What an untrusted pattern may cost.

    Raises:
        UnsupportedConstraintError: Lookaround, a backreference, a word boundary, an anchor in the
            middle, an atomic or conditional group.
        ConstraintError: Not a regular expression, without any match, or beyond the limits.
    """
    # The one door for patterns, from every output type. Languages that are not a grammar's would
    # be told apart here, by the error.
    return Regex(pattern, limits=limits)


class Regex(Grammar):
    """Texts that a regular expression matches as a whole. See `regex` for the arguments.

    Attributes:
        pattern: As it was given.
    """

    def __init__(self, pattern: str | re.Pattern[str], *, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        flags = 0
        if isinstance(pattern, re.Pattern):
            flags, pattern = pattern.flags, pattern.pattern
        if not isinstance(pattern, str):
            raise ConstraintError(f"a regular expression is a text, got {shorten(repr(pattern))}")
        self.pattern = pattern
        shown = shorten(repr(pattern))
        check_size(pattern, "the regular expression", limits)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what may mean something else one day
                parsed = _parser.parse(pattern, flags)
            translated = _Translation(shown).sequence(list(parsed), parsed.state.flags, True, True)
        except (re.error, OverflowError, ValueError) as error:
            if isinstance(error, ConstraintError):
                raise
            raise ConstraintError(f"{shown} is not a regular expression: {error}") from None
        except RecursionError:
            raise ConstraintError(f"the regular expression {shown} is nested too deeply") from None
        self._translated = translated
        self._finite: WeakKeyDictionary[Vocabulary, CompiledFinite | CompiledGrammar] = (
            WeakKeyDictionary()
        )
        start = f"/{translated}/" if translated else '""'
        try:
            super().__init__(
                f"{EXACT_MASKS}start: {start}\n",
                name=f"regex {shorten(repr(pattern), 60)}",
                limits=limits,
            )
        except GrammarError as error:
            raise ConstraintError(
                f"the regular expression {shown} does not compile: {error.reason}; simplify it, or "
                "raise its `limits`"
            ) from None

    def compile(self, vocabulary: Vocabulary) -> CompiledFinite | CompiledGrammar:
        """Bind to a vocabulary; done once for each."""
        if vocabulary not in self._finite:
            self._finite[vocabulary] = finite(
                self._bind(vocabulary), self._byte_automaton, pieces(vocabulary)
            )
        return self._finite[vocabulary]

    @cached_property
    def _byte_automaton(self) -> ByteAutomaton | None:
        """None if it has too many states."""
        return automaton_of(as_python(self._translated), MAX_STATES)

    def automaton(self, vocabulary: Vocabulary) -> Automaton | None:
        """The language over the tokens of a vocabulary as tables, for masks on a device.

        Returns:
            None if they would be too large (see `automata.MAX_STATES` and `MAX_ENTRIES`).
        """
        compiled = self.compile(vocabulary)
        return compiled.tables if isinstance(compiled, CompiledFinite) else None


class _Translation:
    """A parsed pattern in the part of Rust's dialect that means the same.

    Args:
        shown: The pattern, for messages.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def sequence(self, items: list[Any], flags: int, first: bool, last: bool) -> str:
        """Parts one after the other; `first` and `last`: whether they touch the text's ends."""
        full = [i for i, item in enumerate(items) if not _is_empty(item)]
        begin, end = (full[0], full[-1]) if full else (len(items), 0)
        return "".join(
            self._item(item, flags, first and i <= begin, last and i >= end)
            for i, item in enumerate(items)
        )

    def _item(self, item: Any, flags: int, first: bool, last: bool) -> str:
        op, argument = item
        match op.name:
            case "LITERAL" if not flags & re.IGNORECASE:
                return self._class(((argument, argument),))
            case "LITERAL" | "NOT_LITERAL":
                negated = "^" if op.name == "NOT_LITERAL" else ""
                return self._class(_matched(f"[{negated}{_escaped(argument)}]", _asked(flags)))
            case "ANY":
                return self._class(_matched(".", flags & re.DOTALL))
            case "IN":
                return self._class(_members(argument, flags))
            case "BRANCH":
                branches = [self.sequence(list(b), flags, first, last) for b in argument[1]]
                return f"(?:{'|'.join(branches)})"
            case "SUBPATTERN":
                _, added, removed, inside = argument
                if added & _ALPHABETS:
                    flags &= ~_ALPHABETS
                changed = (flags | added) & ~removed
                return f"(?:{self.sequence(list(inside), changed, first, last)})"
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, inside = argument
                once = high == 1 or _is_empty(item)
                body = self.sequence(list(inside), flags, first and once, last and once)
                count = "" if high == _parser.MAXREPEAT else int(high)
                return f"(?:{body}){{{low},{count}}}"
            case "AT":
                return self._anchor(argument.name, first, last)
        raise self._unsupported(_UNSUPPORTED.get(op.name, op.name.lower()))

    def _anchor(self, name: str, first: bool, last: bool) -> str:
        if (name in _STARTS and first) or (name in _ENDS and last):
            return ""
        what = "anchor in the middle" if name in (*_STARTS, *_ENDS) else _UNSUPPORTED[name]
        raise self._unsupported(what)

    def _class(self, ranges: _Ranges) -> str:
        ranges = tuple(_without_surrogates(ranges))
        if not ranges:
            raise ConstraintError(
                f"the regular expression {self._shown} has a class that no character matches"
            )
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return _character(ranges[0][0])
        parts = (_character(a) if a == b else f"{_character(a)}-{_character(b)}" for a, b in ranges)
        return f"[{''.join(parts)}]"

    def _unsupported(self, what: str) -> UnsupportedConstraintError:
        article = "an" if what[0] in "aeiou" else "a"
        return UnsupportedConstraintError(
            f"the regular expression {self._shown} is not supported: it has {article} {what}",
            keyword=what,
        )


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


def _members(items: list[Any], flags: int) -> _Ranges:
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
    return _matched(f"[{text}]", _asked(flags))


def _merged(pairs: list[tuple[int, int]]) -> _Ranges:
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


@cache
def _matched(one_character: str, flags: int) -> _Ranges:
    """The characters that a pattern of one character matches, as `re` itself says."""
    runs = re.finditer(f"(?:{one_character})+", _every_character(), flags)
    return tuple((run.start(), run.end() - 1) for run in runs)


@cache
def _every_character() -> str:
    """All code points in order, so that the place of each is its number."""
    return "".join(map(chr, range(_LAST + 1)))


def _without_surrogates(ranges: _Ranges) -> list[tuple[int, int]]:
    low, high = _SURROGATES
    parts = [p for a, b in ranges for p in ((a, min(b, low - 1)), (max(a, high + 1), b))]
    return list(_merged([(a, b) for a, b in parts if a <= b]))


def _escaped(code: int) -> str:
    """A character as Python's `re` reads it."""
    return f"\\U{code:08x}"


def _character(code: int) -> str:
    """A character as llguidance reads it."""
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:X}}}"
