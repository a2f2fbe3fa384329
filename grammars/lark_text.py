"""Grammars as the `lark` package reads them: its own lexer and LALR parser, one prefix at a time.

`LarkText` takes what `lark.Lark(parser="lalr", lexer="contextual", regex=True)` takes: terminal
priorities, templates, `%import`, `%ignore`, `%declare` with an `Indenter`. The language is the
texts that `Lark.parse` accepts, its lexer's choices included.

That lexer commits itself: at each place the first terminal in its order that matches is taken,
whatever the parser makes of it later. A token is settled if the lexer has not looked behind the end
of the text on its way to it (which the `regex` package's partial matching tells). Then no longer
text changes it, and the parser is fed with it once and for all. What remains is the *tail*. A
prefix is viable if

- some terminal that the parser takes here could be all of the tail and what follows it, or
- the tail's first token stays as it is, and the rest is viable behind it, or
- that token's own pattern may cease to match, by a lookahead or an atomic group: then all is open.

No beginning of a member is ever refused. A prefix that passes may still be hopeless where one
terminal takes the text away from another that the parser needs; a particle there dies later.

The parser is run on its own tables without building trees, so that a fork shares the stack.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import regex
from lark.indenter import Indenter
from lark.lexer import BasicLexer, TerminalDef, Token
from lark.parsers.lalr_analysis import Shift

from guided_smc.errors import ConstraintError, OptionError, UnsupportedConstraintError
from guided_smc.grammars.matching import Limits, check_size
from guided_smc.grammars.partial_regex import (
    TIMEOUT_S,
    tells_kinds_apart,
    to_try,
    without_tests_of_the_end,
)
from guided_smc.grammars.predicates import MAX_REJECTED, PrefixConstraint
from guided_smc.grammars.trees import TreeReader, read_grammar
from guided_smc.grammars.worker import compiled_in_worker

_END = "$END"
_CEASES = re.compile(r"\(\?[=!>(]|[*+?}]\+|\(\*")
"""Lookaheads, atomic groups, conditions, verbs: a longer text may match no more."""

_REFERS = re.compile(r"\\[1-9]|\\g<|\(\?P[=>]|\(\?[(&0-9R]")
"""Backreferences, calls of groups and recursion; perhaps more."""

_OWN_METHODS = ("process", "_process", "handle_NL", "always_accept")


@dataclass(frozen=True, slots=True)
class _Place:
    """How far lexer, post-lexer and parser are in a text.

    Attributes:
        at: Characters consumed.
        stack: The parser's states.
        indents: The indenter's columns.
        parens: Parentheses that the indenter has seen opened and not closed.
    """

    at: int
    stack: tuple[int, ...]
    indents: tuple[int, ...] = (0,)
    parens: int = 0


@dataclass(frozen=True, slots=True)
class _Cursor:
    """A viable text, and the place up to which it is settled."""

    text: str
    settled: _Place = field(compare=False)


class LarkText(PrefixConstraint):
    """The texts that a Lark grammar accepts.

    Args:
        grammar: The grammar's source.
        start: Its start rule.
        postlex: An `Indenter`, such as `lark.indenter.PythonIndenter()`, with its own methods.
        import_paths: Folders for `%import`.
        tree: Whether the value is the `lark.Tree` of the text; else it is the text.
        transformer: What makes the value of the tree, such as a `lark.Transformer`.
        name: What messages call it.
        max_rejected: Tokens to try at one place before a particle is given up, with a warning.
        limits: What an untrusted grammar may cost.
        reason: Why it has no masks; said in the result's `warnings`.

    Attributes:
        grammar: As it was given.
        start: The rule that a text is.
        parser: Lark's own.
        engine: What enforces it.
        dialect: Whose grammar it is.

    Raises:
        ConstraintError: Lark refuses the grammar, no finite text satisfies one of its rules, or
            it is beyond the limits.
        OptionError: The transformer is none, or the post-lexer is a class.
        UnsupportedConstraintError: It holds what cannot be judged on prefixes.
    """

    shows_ends = True

    engine: Literal["lark"] = "lark"
    dialect: Literal["lark"] = "lark"

    def __init__(
        self,
        grammar: str,
        *,
        start: str = "start",
        postlex: Indenter | None = None,
        import_paths: Sequence[str] = (),
        tree: bool = False,
        transformer: Any = None,
        name: str = "lark",
        max_rejected: int = MAX_REJECTED,
        limits: Limits | None = None,
        reason: str | None = None,
    ) -> None:
        given = {"start": start, "postlex": postlex, "import_paths": import_paths, "name": name}
        limits = compiled_in_worker(limits or Limits(), LarkText, grammar, **given)
        check_size(grammar, "the grammar", limits)
        self.name = name
        self.grammar = grammar
        self.start = start
        self.max_rejected = max_rejected
        self._reason = reason
        self._indenter = postlex
        if isinstance(postlex, type):
            raise OptionError(
                f"postlex must be an Indenter, and {postlex.__name__} is a class: pass an "
                f"instance, postlex={postlex.__name__}()"
            )
        if postlex is not None and not _is_plain(postlex):
            raise UnsupportedConstraintError(
                f"{name}: the post-lexer {type(postlex).__name__} is not an Indenter with the "
                "methods of lark's own; only those can be followed prefix by prefix",
                keyword="postlex",
            )
        try:
            self.parser = read_grammar(
                grammar,
                start=start,
                parser="lalr",
                lexer="contextual",
                postlex=postlex,
                import_paths=list(import_paths),
            )
        except ConstraintError as error:
            raise ConstraintError(f"{name}: {error}") from error
        self._refuse_declared()
        self._refuse_endless()
        reader = TreeReader(self.parser, transformer, name)
        self.reader = reader if tree or transformer is not None else None
        frontend: Any = self.parser.parser
        table = frontend.parser.parser.parse_table
        self._states = table.states
        self._start, self._end = table.start_states[start], table.end_states[start]
        contextual = frontend.lexer if postlex is None else frontend.lexer.lexer
        sources = {t.name: self._source(t) for t in self.parser.terminals if t.pattern}
        self._by_kind = all(
            tells_kinds_apart(t.pattern.to_regexp(), 0) for t in self.parser.terminals if t.pattern
        )
        self._sources = sources
        self._patterns = {terminal: _Pattern(terminal, sources[terminal]) for terminal in sources}
        self._contextual: dict[int, BasicLexer] = contextual.lexers
        self._lexers: dict[int, _Lexer] = {}

    def _source(self, terminal: TerminalDef) -> str:
        try:
            return without_tests_of_the_end(terminal.pattern.to_regexp(), 0)
        except UnsupportedConstraintError as error:
            raise UnsupportedConstraintError(
                f"{self.name}: terminal {terminal.name}: {error}", keyword=error.keyword
            ) from None

    def _refuse_declared(self) -> None:
        made = {_END, *(t.name for t in self.parser.terminals if t.pattern)}
        if self._indenter is not None:
            made |= {self._indenter.INDENT_type, self._indenter.DEDENT_type}
        for rule in self.parser.rules:
            for symbol in rule.expansion:
                if symbol.is_term and symbol.name not in made:
                    raise UnsupportedConstraintError(
                        f"{self.name}: nothing makes the terminal {symbol.name} that the grammar "
                        "declares; pass the Indenter that does as `postlex`",
                        keyword="%declare",
                    )

    def _refuse_endless(self) -> None:
        finite: set[str] = set()
        waiting = list(self.parser.rules)
        while True:
            ending = [r for r in waiting if all(s.is_term or s.name in finite for s in r.expansion)]
            if not ending:
                break
            finite |= {rule.origin.name for rule in ending}
            waiting = [rule for rule in waiting if rule.origin.name not in finite]
        if waiting:
            raise ConstraintError(
                f"{self.name}: no finite text satisfies the rule {waiting[0].origin.name!r}: every "
                "alternative needs it again"
            )

    def because(self, reason: str) -> LarkText:
        """The same, with a reason why it has no masks."""
        same = copy(self)
        same._reason = reason
        return same

    def notes(self) -> tuple[str, ...]:
        """Why tokens are drawn by rejection, where that was not asked for."""
        if self._reason is None:
            return ()
        return (f"{self.name}: {self._reason}, so tokens are drawn by rejection",)

    def sizes(self) -> dict[str, int]:
        """Of the parser: its states, rules and terminals."""
        return {
            "parser_states": len(self._states),
            "rules": len(self.parser.rules),
            "terminals": len(self.parser.terminals),
        }

    def parse(self, text: str) -> Any:
        """The tree of a member if it was asked for, or what is made of it; else the text.

        Raises:
            OutputValidationError: The transformer refuses it.
        """
        return text if self.reader is None else self.reader.value(text)

    def value_key(self, text: str) -> Hashable:
        """Equal for texts with equal trees, if trees are asked for."""
        return text if self.reader is None else self.reader.key(text)

    def begin(self) -> _Cursor:
        """The parser's start, in front of the text."""
        return _Cursor("", _Place(0, (self._start,)))

    def extend(self, cursor: _Cursor, text: str) -> _Cursor | None:
        """Settle what can be settled, and see whether the parser could take the tail.

        Raises:
            ConstraintError: A terminal's pattern took too long.
        """
        text = cursor.text + text
        place, settled = cursor.settled, None
        while place.at < len(text):
            lexer = self._lexer(place.stack[-1])
            found = lexer.first(text, place.at)
            if lexer.is_open(text, place.at):
                settled = settled or place
                if lexer.may_cease(text, place.at, found) or any(
                    self._takes(place, name) for name in lexer.could_be(text, place.at)
                ):
                    return _Cursor(text, settled)
            after = found and self._feed(place, lexer, *found)
            if not after:
                return None
            place = after
        return _Cursor(text, settled or place)

    def complete(self, cursor: _Cursor) -> bool:
        """Whether Lark accepts the text.

        Raises:
            ConstraintError: A terminal's pattern took too long.
        """
        place = cursor.settled
        while place.at < len(cursor.text):
            lexer = self._lexer(place.stack[-1])
            found = lexer.first(cursor.text, place.at)
            after = found and self._feed(place, lexer, *found)
            if not after:
                return False
            place = after
        stack: tuple[int, ...] | None = place.stack
        for _ in place.indents[1:]:
            assert self._indenter is not None
            stack = stack and self._shift(stack, self._indenter.DEDENT_type)
        return stack is not None and self._shift(stack, _END) is not None

    def begins(self, cursor: _Cursor, begun: bytes) -> bool:
        """Whether a character that begins like this may come next, where the terminals tell."""
        if not self._by_kind:
            return True
        return any(self.extend(cursor, c) is not None for c in to_try(begun, cursor.text))

    # -- the parser ------------------------------------------------------------------------------

    def _lexer(self, state: int) -> _Lexer:
        """Of a state of the parser; made when it is first reached, since a text reaches few."""
        lexer = self._contextual[state]
        if id(lexer) not in self._lexers:
            self._lexers[id(lexer)] = _Lexer(lexer, self._sources, self._patterns)
        return self._lexers[id(lexer)]

    def _takes(self, place: _Place, name: str) -> bool:
        """Whether a token of this terminal may come next."""
        if name in self.parser.ignore_tokens:
            return True
        indenter = self._indenter
        if indenter is not None and name == indenter.NL_type and place.parens:
            return True
        return self._shift(place.stack, name) is not None

    def _feed(self, place: _Place, lexer: _Lexer, name: str, value: str) -> _Place | None:
        """The place behind a token; None if the parser does not take it."""
        at = place.at + len(value)
        if name in self.parser.ignore_tokens:
            return replace(place, at=at)
        name = lexer.type_of(name, value)
        indenter = self._indenter
        parens = place.parens
        if indenter is not None:
            if name == indenter.NL_type:
                return replace(place, at=at) if parens else self._new_line(place, at, value)
            parens += (name in indenter.OPEN_PAREN_types) - (name in indenter.CLOSE_PAREN_types)
        stack = self._shift(place.stack, name)
        if stack is None or parens < 0:
            return None
        return _Place(at, stack, place.indents, parens)

    def _new_line(self, place: _Place, at: int, value: str) -> _Place | None:
        """As `Indenter.handle_NL` does: the line break, and what its indentation makes of it."""
        indenter = self._indenter
        assert indenter is not None
        if "\n" not in value:
            return None
        spaces = value.rsplit("\n", 1)[1]
        column = spaces.count(" ") + spaces.count("\t") * indenter.tab_len
        stack = self._shift(place.stack, indenter.NL_type)
        indents = place.indents
        if column > indents[-1]:
            indents = (*indents, column)
            stack = stack and self._shift(stack, indenter.INDENT_type)
        while column < indents[-1]:
            indents = indents[:-1]
            stack = stack and self._shift(stack, indenter.DEDENT_type)
        if stack is None or column != indents[-1]:
            return None
        return _Place(at, stack, indents, place.parens)

    def _shift(self, stack: tuple[int, ...], name: str) -> tuple[int, ...] | None:
        """The parser's stack after a token; None if it is not taken."""
        states = self._states
        new = list(stack)
        while True:
            action = states[new[-1]].get(name)
            if action is None:
                return None
            kind, to = action
            if kind is Shift:
                return (*new, to)
            if to.expansion:
                del new[-len(to.expansion) :]
            new.append(states[new[-1]][to.origin.name][1])
            if name == _END and new[-1] == self._end:
                return tuple(new)


# -- the lexer -------------------------------------------------------------------------------------


class _Pattern:
    """One terminal, or several in the order in which the lexer tries them."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.may_cease = _CEASES.search(source) is not None
        self._regex = regex.compile(source)
        # Its first match can be neither taken (nothing follows `(?!)`) nor exchanged for another
        # (it is atomic): what is left to find is a look behind the end on the way to it.
        self._way = regex.compile(f"(?>{source})(?!)")

    def match(self, text: str, at: int) -> Any:
        """The match that the lexer would take here, or None."""
        return self._within(self._regex.match, text, at, partial=False)

    def is_open(self, text: str, at: int) -> bool:
        """Whether `match` may give something else in a longer text."""
        return self._within(self._way.match, text, at, partial=True) is not None

    def could_be(self, text: str, at: int) -> bool:
        """Whether all that there is from here is a match or may become one."""
        return self._within(self._regex.fullmatch, text, at, partial=True) is not None

    def _within(self, ask: Any, text: str, at: int, *, partial: bool) -> Any:
        try:
            return ask(text, at, partial=partial, timeout=TIMEOUT_S)
        except TimeoutError as error:
            raise ConstraintError(
                f"terminal {self.name} took more than {TIMEOUT_S:g} seconds on a text of "
                f"{len(text)} characters; write it with less backtracking"
            ) from error


class _Lexer:
    """The lexer of some states of the parser.

    Args:
        lexer: Lark's.
        sources: The pattern of each terminal.
        patterns: The same, compiled.
    """

    def __init__(
        self, lexer: BasicLexer, sources: dict[str, str], patterns: dict[str, _Pattern]
    ) -> None:
        tried = [t.name for t in lexer.scanner.terminals]  # builds `callback` too
        source = "|".join(f"(?P<{name}>{sources[name]})" for name in tried)
        self._all = _Pattern(" or ".join(tried), source or "(?!)")
        # A keyword that an identifier's pattern covers is not tried, but may be what is found.
        self._possible = [patterns[t.name] for t in lexer.terminals]
        possible = [f"(?:{sources[t.name]})" for t in lexer.terminals]
        self._any: _Pattern | None = None
        if not any(map(_REFERS.search, possible)):  # by numbers that change in a union
            self._any = _Pattern("of several", "|".join(possible) or "(?!)")
        self._patterns = patterns
        self._retype = dict(lexer.callback)

    def first(self, text: str, at: int) -> tuple[str, str] | None:
        """The terminal that the lexer takes here, and its text."""
        found = self._all.match(text, at)
        return None if found is None else (found.lastgroup, found[0])

    def type_of(self, name: str, value: str) -> str:
        """The keyword that an identifier is, or the name as it is."""
        retype = self._retype.get(name)
        return name if retype is None else retype(Token(name, value)).type

    def is_open(self, text: str, at: int) -> bool:
        """Whether `first` may find something else in a longer text."""
        return self._all.is_open(text, at)

    def may_cease(self, text: str, at: int, found: tuple[str, str] | None) -> bool:
        """Whether what `first` has found may not match at all in a longer text."""
        if found is None:
            return False
        pattern = self._patterns[found[0]]
        return pattern.may_cease and pattern.is_open(text, at)

    def could_be(self, text: str, at: int) -> Iterator[str]:
        """The terminals that may be all of the text from here and perhaps more."""
        if self._any is None or self._any.could_be(text, at):  # or dozens are asked in vain
            yield from (p.name for p in self._possible if p.could_be(text, at))


def _is_plain(postlex: object) -> bool:
    return isinstance(postlex, Indenter) and all(
        getattr(type(postlex), name) is getattr(Indenter, name) for name in _OWN_METHODS
    )
