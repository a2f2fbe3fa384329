"""Grammars of the `lark` package with llguidance's masks, where those mean the same.

Lark itself reads the grammar: imports, templates and repetitions are gone by then, and terminals
are patterns of Python's. From that a grammar for llguidance is written anew, if

- Lark's parser resolves no conflict (a shift before a reduction, or by the priority of rules), so
  that it takes all that the rules allow;
- every terminal is a plain regular expression, which `patterns` spells for llguidance;
- the lexers part texts alike (`lexing`).

What is ignored stands in the rules there, before the text and behind every terminal, since
llguidance ignores nothing at the ends of a text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import regex
from lark.exceptions import GrammarError
from lark.parsers.lalr_analysis import LALR_Analyzer

from guided_smc.errors import ConstraintError
from guided_smc.grammars.lexing import Differs, Lexers
from guided_smc.grammars.matching import EXACT_MASKS
from guided_smc.grammars.patterns import Parsed, parse, regular

_STRING = r'".*?(?<!\\)(\\\\)*?"'
_STRING_FORWARDS = r'"(?:[^"\\\n]|\\.)*"'
"""Lark's `common.ESCAPED_STRING` looks back for backslashes; this takes the same texts."""


def masked(parser: Any, start: str) -> str:
    """The same texts in llguidance's dialect.

    Args:
        parser: A `lark.Lark` with LALR and a contextual lexer, and no post-lexer.
        start: Its start rule.

    Raises:
        Differs: They could not be the same, or it cannot be told.
    """
    ignored = list(parser.ignore_tokens)
    analysis = _without_conflicts(parser, ignored)
    terminals = {t.name: _parsed(t.name, t.pattern.to_regexp()) for t in parser.terminals}
    follow = {
        name: {s.name for s in analysis.FOLLOW.get(symbol, ())} & terminals.keys() | set(ignored)
        for name, symbol in {s.name: s for s in analysis.FOLLOW if s.is_term}.items()
        if name in terminals
    }
    lexers = Lexers(terminals, {name: follow.get(name, ignored) for name in terminals})
    contextual = {id(lexer): lexer for lexer in parser.parser.lexer.lexers.values()}
    for lexer in contextual.values():
        lexers.compare([t.name for t in lexer.terminals], ignored)
    return _written(parser.rules, start, terminals, ignored)


def _without_conflicts(parser: Any, ignored: list[str]) -> Any:
    """Lark's analysis of the rules, as its parser has it."""
    for rule in parser.rules:
        if rule.options.priority is not None:
            raise Differs(f"the rule {rule.origin.name} has a priority")
        for symbol in rule.expansion:
            if symbol.is_term and symbol.name in ignored:
                raise Differs(f"{symbol.name} is ignored, and used in {rule.origin.name}")
    analysis: Any = LALR_Analyzer(parser.parser.parser_conf, strict=True)
    try:
        analysis.compute_lalr()
    except GrammarError as error:
        raise Differs(str(error).split("\n")[0].replace(". [strict-mode]", "")) from None
    return analysis


def _parsed(name: str, pattern: str) -> Parsed:
    if "[:" in pattern:
        raise Differs(f"{name} has a class that only the `regex` package knows")
    try:
        return parse(pattern.replace(_STRING, _STRING_FORWARDS), module=regex)
    except ConstraintError as error:
        raise Differs(f"{name}: {error}") from None


def _written(
    rules: Iterable[Any], start: str, terminals: dict[str, Parsed], ignored: list[str]
) -> str:
    numbers = {name: i for i, name in enumerate(terminals)}
    rule_numbers: dict[str, int] = {}
    bodies: dict[str, list[str]] = {}
    used = dict.fromkeys(ignored)
    for rule in rules:
        parts = []
        for symbol in rule.expansion:
            if symbol.is_term:
                used[symbol.name] = None
                parts.append(f"t{numbers[symbol.name]}")
            else:
                parts.append(f"r{rule_numbers.setdefault(symbol.name, len(rule_numbers))}")
        own = rule_numbers.setdefault(rule.origin.name, len(rule_numbers))
        bodies.setdefault(f"r{own}", []).append(" ".join(parts) or '""')
    skip = " i" if ignored else ""
    lines = [f"start:{skip} r{rule_numbers[start]}"]
    lines += [f"{name}: {' | '.join(dict.fromkeys(body))}" for name, body in bodies.items()]
    if ignored:
        lines.append(f"i: ({' | '.join(f'T{numbers[name]}' for name in ignored)})*")
    for name in used:
        if name not in ignored:
            lines.append(f"t{numbers[name]}: T{numbers[name]}{skip}")
        try:
            lines.append(f"T{numbers[name]}: /{regular(terminals[name], whole=False)}/")
        except ConstraintError as error:
            raise Differs(f"{name}: {error}") from None
    return EXACT_MASKS + "\n".join(lines) + "\n"
