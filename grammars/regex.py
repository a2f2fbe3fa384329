r"""Regular expressions as constraints, in the dialect of Python's `re`.

A text satisfies `regex(pattern)` if and only if `re.fullmatch(pattern, text)` finds a match. That
is a promise about every character, whichever engine keeps it: `patterns` spells the pattern anew
for llguidance, whose masks are exact, or, with lookaround, backreferences and the like, for the
`regex` package, which is asked about one token at a time.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Literal, get_args
from weakref import WeakKeyDictionary

from guided_smc.errors import ConstraintError, OptionError, UnsupportedConstraintError
from guided_smc.grammars.automata import (
    MAX_STATES,
    Automaton,
    ByteAutomaton,
    CompiledFinite,
    finite,
)
from guided_smc.grammars.byte_regex import as_python, automaton_of
from guided_smc.grammars.grammar import Grammar
from guided_smc.grammars.matching import (
    EXACT_MASKS,
    CompiledGrammar,
    GrammarError,
    Limits,
    check_size,
)
from guided_smc.grammars.partial_regex import PartialRegex, tells_kinds_apart
from guided_smc.grammars.patterns import NotAPattern, Parsed, covering, parse, regular, spelt
from guided_smc.grammars.pieces import pieces
from guided_smc.grammars.schema.keywords import shorten
from guided_smc.grammars.worker import compiled_in_worker
from guided_smc.potentials import CompiledConstraint, intersected
from guided_smc.vocabulary import Vocabulary

RegexEngine = Literal["auto", "llguidance", "partial"]


def regex(
    pattern: str | re.Pattern[str],
    *,
    engine: RegexEngine = "auto",
    limits: Limits | None = None,
) -> Regex | PartialRegex:
    r"""A constraint to texts that a regular expression matches as a whole.

    Args:
        pattern: In Python's dialect, as a text or compiled, with flags inside (`(?i)`) or of the
            compiled pattern. `\d`, `\w` and `\s` are Unicode's unless the flag `a` is set. Where
            the whole text has to match, greedy and lazy repetition are the same, and `^` and `$`
            at its ends say nothing. What `re` does not know may be in the dialect of the `regex`
            package (`\p{L}`, `(?R)`): then the text matches as `regex.fullmatch` says.
        engine: What enforces it; the constraint's `engine` tells which it became. `"llguidance"`
            makes masks. `"partial"` has the `regex` package judge the beginnings of texts, and
            tokens are drawn by rejection. `"auto"` takes the first where it can and else the
            second, which the result's `warnings` then say.
        limits: What an untrusted pattern may cost.

    Raises:
        UnsupportedConstraintError: The engine cannot keep to it exactly: with `"llguidance"`
            lookaround, a backreference, a word boundary, an anchor in the middle, an atomic or
            conditional group; with `"partial"` and `"auto"` little (see `PartialRegex`).
        ConstraintError: Not a regular expression, without any match, or beyond the limits.
        OptionError: There is no such engine.
    """
    if engine not in get_args(RegexEngine):
        raise OptionError(f"engine must be one of {get_args(RegexEngine)}, got {engine!r}")
    limits = compiled_in_worker(limits or Limits(), regex, pattern, engine=engine)
    if engine == "partial":
        return _partial(pattern, limits, None)
    try:
        return Regex(pattern, limits=limits)
    except (UnsupportedConstraintError, NotAPattern) as error:
        if engine == "llguidance":
            raise
        return _partial(pattern, limits, error)


class Regex(Grammar):
    """Texts that a regular expression matches as a whole, with masks. See `regex`.

    Attributes:
        pattern: As it was given.
        engine: What enforces it.
    """

    engine: Literal["llguidance"] = "llguidance"

    def __init__(self, pattern: str | re.Pattern[str], *, limits: Limits | None = None) -> None:
        limits = compiled_in_worker(limits or Limits(), Regex, pattern)
        self.pattern, flags = _source(pattern, limits)
        parsed = parse(self.pattern, flags)
        self._translated = regular(parsed)
        self._finite: WeakKeyDictionary[Vocabulary, CompiledFinite | CompiledGrammar] = (
            WeakKeyDictionary()
        )
        start = f"/{self._translated}/" if self._translated else '""'
        try:
            super().__init__(
                f"{EXACT_MASKS}start: {start}\n",
                name=f"regex {shorten(repr(self.pattern), 60)}",
                limits=limits,
            )
        except GrammarError as error:
            raise ConstraintError(
                f"the regular expression {parsed.shown} does not compile: {error.reason}; simplify "
                "it, or raise its `limits`"
            ) from None

    def compile(self, vocabulary: Vocabulary) -> CompiledFinite | CompiledGrammar:
        """Bind to a vocabulary; done once for each."""
        if vocabulary not in self._finite:
            self._finite[vocabulary] = finite(
                self._bind(vocabulary), self.over_bytes, pieces(vocabulary)
            )
        return self._finite[vocabulary]

    @cached_property
    def over_bytes(self) -> ByteAutomaton | None:
        """The language over bytes; None if it has too many states."""
        return automaton_of(as_python(self._translated), MAX_STATES)

    def automaton(self, vocabulary: Vocabulary) -> Automaton | None:
        """The language over the tokens of a vocabulary as tables, for masks on a device.

        Returns:
            None if they would be too large (see `automata.MAX_STATES` and `MAX_ENTRIES`).
        """
        compiled = self.compile(vocabulary)
        return compiled.tables if isinstance(compiled, CompiledFinite) else None


class _PythonPartial(PartialRegex):
    """A pattern of Python's, judged by the `regex` package on prefixes.

    What that lets pass where it would have to look behind the end of the text, as everything under
    a lookahead, a mask still refuses if no regular part of the pattern allows it.

    Args:
        pattern: As it was given.
        flags: Of `re`.
        reason: Why it has no masks, if that was not asked for.
        limits: What its mask may cost.
    """

    def __init__(self, pattern: str, flags: int, reason: str | None, limits: Limits) -> None:
        super().__init__(spelt(parse(pattern, flags)), reason=reason)
        self.pattern = pattern
        self.name = f"regex {shorten(repr(pattern), 60)}"
        self._by_kind = tells_kinds_apart(pattern, flags)
        self._cover = _covered(parse(pattern, flags), self.name, limits)
        self._both: WeakKeyDictionary[Vocabulary, CompiledConstraint] = WeakKeyDictionary()

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        """Bind to a vocabulary; done once for each."""
        if vocabulary not in self._both:
            asked = super().compile(vocabulary)
            self._both[vocabulary] = (
                asked
                if self._cover is None
                else intersected([self._cover.compile(vocabulary), asked])
            )
        return self._both[vocabulary]


def _covered(parsed: Parsed, name: str, limits: Limits) -> Grammar | None:
    """Texts that the regular parts of a pattern allow; None where llguidance cannot say."""
    try:
        source = covering(parsed)
        start = f"/{source}/" if source else '""'
        return Grammar(f"{EXACT_MASKS}start: {start}\n", name=name, limits=limits)
    except ConstraintError:
        return None


def _partial(
    pattern: str | re.Pattern[str], limits: Limits, refused: ConstraintError | None
) -> PartialRegex:
    """What the `regex` package makes of a pattern, `refused` by the other engine if that was tried.

    Raises:
        ConstraintError: It cannot be taken here either.
    """
    source, flags = _source(pattern, limits)
    reason = None
    if isinstance(refused, UnsupportedConstraintError):
        reason = f"no mask knows its {refused.keyword}"
    try:
        return _PythonPartial(source, flags, reason, limits)
    except NotAPattern as error:
        if refused is not None:
            reason = "only the `regex` package takes it"
        try:
            return PartialRegex(source, reason=reason)
        except UnsupportedConstraintError:
            raise
        except ConstraintError:
            raise error from None


def _source(pattern: str | re.Pattern[str], limits: Limits) -> tuple[str, int]:
    """The pattern's text and flags.

    Raises:
        ConstraintError: It has no text, or too much of it.
    """
    flags = 0
    if isinstance(pattern, re.Pattern):
        flags, pattern = pattern.flags, pattern.pattern
    if not isinstance(pattern, str):
        raise ConstraintError(f"a regular expression is a text, got {shorten(repr(pattern))}")
    check_size(pattern, "the regular expression", limits)
    return pattern, flags
