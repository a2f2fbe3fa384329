"""Context-free grammars as constraints, in llguidance's dialect of Lark.

The dialect is described in llguidance's `docs/syntax.md`: rules in lower case, terminals in upper
case (regular expressions in Rust's dialect), `%ignore`, `%import common`, and `%json {...}` for a
JSON Schema, which means here what `json_schema` means. What speaks of tokens instead of texts is
refused, since a constraint is a set of texts.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from guided_smc.errors import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars.grammar import Grammar
from guided_smc.grammars.matching import EXACT_MASKS, GrammarError, Limits, check_size
from guided_smc.grammars.schema.json_schema import JsonSchema
from guided_smc.grammars.schema.keywords import shorten
from guided_smc.grammars.schema.schema_text import BOM, RepeatedKeyError, StrictDecoder
from guided_smc.grammars.trees import TreeReader, parser_of
from guided_smc.grammars.worker import compiled_in_worker

_TOKENS = re.compile(
    r"""
    (?P<space>      [ \t]+ | (?:\#|//)[^\n]* )
  | (?P<newline>    (?:\r?\n)+ )
  | (?P<string>     "(?:\\.|[^"\\\n])*"i? )
  | (?P<regex>      /(?:\\.|[^/\\\n])+/[imslux]* )
  | (?P<special>    <[^<>\s]+> )
  | (?P<reference>  @[a-zA-Z0-9_{}-]* )
  | (?P<statement>  %[a-z]+ )
  | (?P<name>       _*[a-zA-Z][a-zA-Z0-9_-]* )
  | (?P<other>      . )
    """,
    re.VERBOSE,
)
"""llguidance's lexer, as far as it matters where something begins and ends."""

_ABOUT_TOKENS = ("temperature", "max_tokens", "stop", "stop_capture")
"""Attributes of a rule that say something else than which texts it has."""

_OPTIONS = ("allow_initial_skip", "no_forcing", "skip_repetition")
"""Options of `%llguidance` that leave a grammar a set of texts."""


class Lark(Grammar):
    """Texts of a context-free grammar in llguidance's dialect.

    Args:
        grammar: Its source. Regular expressions are Rust's.
        start: The rule to begin with. With another one than `start`, no rule may be called so.
        tree: Whether the value is a `lark.Tree`, which takes a grammar that `lark` reads as well.
        transformer: What makes the value of the tree, such as a `lark.Transformer`.
        limits: What an untrusted grammar may cost.
        note: What the result's `warnings` should say of it.

    Attributes:
        grammar: As it was given.
        start: The rule that a text is.
        engine: What enforces it.
        dialect: Whose grammar it is.

    Raises:
        UnsupportedConstraintError: Special tokens, references to other grammars, and attributes
            that speak of tokens (`max_tokens`, `temperature`, `stop`); with the line.
        ConstraintError: Not a grammar, without any text, or beyond the limits; with the line. Or
            a tree is asked for, and `lark` does not take the grammar.
        OptionError: The transformer is none.
    """

    engine: Literal["llguidance"] = "llguidance"
    dialect: Literal["llguidance"] = "llguidance"

    def __init__(
        self,
        grammar: str,
        *,
        start: str = "start",
        tree: bool = False,
        transformer: Any = None,
        limits: Limits | None = None,
        note: str | None = None,
    ) -> None:
        limits = compiled_in_worker(limits or Limits(), Lark, grammar, start=start)
        if not isinstance(grammar, str):
            raise ConstraintError(f"a grammar is a text, got {shorten(repr(grammar))}")
        if not isinstance(start, str) or not re.fullmatch(r"_*[a-z][a-z0-9_-]*", start):
            raise ConstraintError(f"a start rule has a name in lower case, got {start!r}")
        check_size(grammar, "the grammar", limits)
        self.grammar = grammar
        self.start = start
        read = _read(grammar.removeprefix(BOM), limits)
        if start not in read.rules:
            known = ", ".join(sorted(read.rules)) or "none"
            raise ConstraintError(f"the grammar has no rule {start!r} (found: {known})")
        endless = _endless(read.rules)
        if endless is not None:
            raise ConstraintError(
                f"no finite text satisfies the rule {endless!r}: every alternative needs it again"
            )
        source = read.source
        if start != "start":
            if "start" in read.rules:
                raise ConstraintError(
                    "the grammar has a rule 'start', which is where it begins: rename that to "
                    f"begin with {start!r}"
                )
            source += f"\nstart: {start}"
        # At the end, where it moves no line, and overrides what the grammar says itself.
        source += f"\n{EXACT_MASKS}"
        try:
            super().__init__(
                source, name="grammar", limits=limits, levels=read.levels + len(read.rules)
            )
        except GrammarError as error:
            raise ConstraintError(_located(error, grammar.removeprefix(BOM))) from None
        self._note = note
        self._reader: TreeReader | None = None
        if tree or transformer is not None:
            self._reader = TreeReader(parser_of(grammar, start), transformer, self.name)

    def notes(self) -> tuple[str, ...]:
        """In whose dialect it is read, where that may surprise."""
        return () if self._note is None else (self._note,)

    def parse(self, text: str) -> Any:
        """The tree of a member if it was asked for, or what is made of it; else the text.

        Raises:
            OutputValidationError: `lark` finds no tree, or the transformer refuses it.
        """
        return text if self._reader is None else self._reader.value(text)

    def value_key(self, text: str) -> Hashable:
        """Equal for texts with equal trees, if trees are asked for."""
        return text if self._reader is None else self._reader.key(text)


@dataclass
class _Grammar:
    """What a grammar says on the surface.

    Attributes:
        source: The grammar, with the schemas of its `%json` made ready for llguidance.
        rules: What is behind the colon of each rule and terminal, as kinds and texts of tokens.
        levels: How deep its parentheses and schemas are nested.
    """

    source: str
    rules: dict[str, list[tuple[str, str]]]
    levels: int


def _read(grammar: str, limits: Limits) -> _Grammar:
    """Find rules, refuse what speaks of tokens, and hold schemas to what `json_schema` keeps."""
    rules: dict[str, list[tuple[str, str]]] = {}
    body: list[tuple[str, str]] = []
    source: list[str] = []
    position, line, opened, levels, schemas = 0, 1, 0, 0, 0
    line_start = True
    head: str | None = None  # the rule whose name was read, but not its colon
    while position < len(grammar):
        found = _TOKENS.match(grammar, position)
        assert found is not None, "every character is some token"
        kind, text, end = str(found.lastgroup), found.group(), found.end()
        if kind == "special":
            raise _unsupported(line, f"the special token {text}", text)
        if kind == "reference":
            raise _unsupported(line, f"the reference {text} to another grammar", text)
        if kind == "statement" and text in ("%json", "%llguidance"):
            value, end = _json_value(grammar, end, text, line)
            if text == "%json":
                inline = _inline(value, line, limits)
                schemas = max(schemas, inline.levels)
                text = inline.source + "\n" * grammar.count("\n", position, end)
            else:
                _check_options(value, line)
                text = grammar[position:end]
        elif kind == "name" and line_start and not opened:
            head, body = text, []
        elif kind == "statement" and line_start and text != "%regex":
            body = []  # of no rule
        elif kind == "name" and head and opened and text in _ABOUT_TOKENS:
            raise _unsupported(line, f"the attribute {text!r}", text)
        elif text == ":" and head and not opened:
            body = rules.setdefault(head, [])
            head = None
        elif text in _OPENING:
            opened += 1
            levels = max(levels, opened)
            if opened > limits.max_depth:
                raise ConstraintError(
                    f"line {line}: nested more than the limit of {limits.max_depth} deep"
                )
        elif text in _CLOSING:
            opened = max(opened - 1, 0)
        if kind != "space" and not (line_start and text in ("!", "?")):
            line_start = kind == "newline"
        if kind not in ("space", "newline"):
            body.append((kind, text))
        line += grammar.count("\n", position, end)
        position = end
        source.append(text)
    return _Grammar("".join(source), rules, levels + schemas)


_OPENING, _CLOSING = ("(", "[", "{"), (")", "]", "}")


def _json_value(grammar: str, position: int, statement: str, line: int) -> tuple[Any, int]:
    """The JSON value behind a statement, and where it ends."""
    begin = position + len(grammar[position:]) - len(grammar[position:].lstrip())
    try:
        return StrictDecoder().raw_decode(grammar, begin)
    except RepeatedKeyError as error:
        raise ConstraintError(f"line {line}: {statement}: {error}", path=error.path) from None
    except ValueError as error:
        raise ConstraintError(
            f"line {line}: what follows {statement} is not JSON: {error}"
        ) from None
    except RecursionError:
        raise ConstraintError(f"line {line}: the JSON is nested too deeply") from None


def _endless(rules: dict[str, list[tuple[str, str]]]) -> str | None:
    """A rule that no finite text satisfies, since every alternative needs it again."""
    mentioned: dict[str, set[str]] = {name: set() for name in rules}
    for name, body in rules.items():
        for _, text in body:
            mentioned.get(text, set()).add(name)
    finite = dict.fromkeys(rules, False)
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if not finite[name] and _ends(iter(rules[name]), finite):
            finite[name] = True
            waiting += mentioned[name]
    return next((name for name, ends in finite.items() if not ends), None)


def _ends(body: Iterator[tuple[str, str]], finite: dict[str, bool]) -> bool:
    """Whether some alternative, up to the closing parenthesis, consists of what has a finite text.

    What a rule says beside names and groups has one.
    """
    some = False
    parts: list[bool] = []  # of the alternative
    for kind, text in body:
        if text == "|":
            some, parts = some or all(parts), []
        elif text in ("(", "["):
            parts.append(_ends(body, finite) or text == "[")
        elif text in (")", "]"):
            break
        elif text in ("*", "?") or (text in ("{", "~") and _next(body) in ("0", ",")):
            parts[-1:] = [True]
        elif text == ">":
            _next(body)  # the alias behind an arrow
        elif kind == "name":
            parts.append(finite.get(text, True))
    return some or all(parts)


def _next(body: Iterator[tuple[str, str]]) -> str:
    return next(body, ("", ""))[1]


@dataclass
class _Inline:
    source: str
    levels: int


def _inline(schema: Any, line: int, limits: Limits) -> _Inline:
    """A schema as llguidance is given it, held to what `json_schema` promises."""
    try:
        constraint = JsonSchema(schema, limits=limits)
    except UnsupportedConstraintError as error:
        raise UnsupportedConstraintError(
            f"line {line}: %json: {error}", keyword=error.keyword, path=error.path
        ) from None
    except ConstraintError as error:
        raise ConstraintError(f"line {line}: %json: {error}", path=error.path) from None
    for missing in constraint.relaxed:
        raise UnsupportedConstraintError(
            f"line {line}: %json: {missing.path}: {missing.keyword!r} is more than a grammar can "
            "say: leave it out, or make the whole text JSON, by a schema",
            keyword=missing.keyword,
            path=missing.path,
        )
    return _Inline(constraint.within_grammar, constraint._levels)


def _check_options(options: Any, line: int) -> None:
    unknown = [n for n in options if n not in _OPTIONS] if isinstance(options, dict) else ["{...}"]
    if unknown:
        raise _unsupported(
            line, f"the %llguidance option {unknown[0]!r} (of {', '.join(_OPTIONS)})", unknown[0]
        )


def _unsupported(line: int, what: str, keyword: str) -> UnsupportedConstraintError:
    return UnsupportedConstraintError(f"line {line}: {what} is not supported", keyword=keyword)


def _located(error: GrammarError, grammar: str) -> str:
    """An error of llguidance, with the line that it means."""
    reason = re.sub(r"^(at )?\d+\(\d+\): ", "", error.reason)
    lines = grammar.split("\n")
    if error.line is None or error.line > len(lines):
        return f"the grammar does not compile: {reason}"
    return f"line {error.line}: {reason} in {shorten(lines[error.line - 1].strip(), 80)!r}"
