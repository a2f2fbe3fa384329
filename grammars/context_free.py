"""The one door for context-free grammars: those of the `lark` package, and llguidance's dialect.

A text may be a grammar in both, with another meaning: Lark's lexer makes up its mind by the order
of terminals, ignores at the ends of a text too, and reads regular expressions as Python does. What
Lark takes is therefore read as Lark reads it, with masks where it can be shown that they mean the
same (`lark_masks`). Only what Lark refuses is read in llguidance's dialect.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

from lark.indenter import Indenter

from guided_smc.errors import ConstraintError, OptionError, UnsupportedConstraintError
from guided_smc.grammars.grammar import Grammar
from guided_smc.grammars.lark import Lark
from guided_smc.grammars.lark_masks import masked
from guided_smc.grammars.lark_text import LarkText
from guided_smc.grammars.lexing import Differs
from guided_smc.grammars.matching import GrammarError, Limits, check_size
from guided_smc.grammars.schema.keywords import shorten
from guided_smc.grammars.schema.schema_text import BOM
from guided_smc.grammars.trees import read_grammar
from guided_smc.grammars.worker import compiled_in_worker

LarkEngine = Literal["auto", "llguidance", "lark"]


def lark(
    grammar: str,
    *,
    start: str = "start",
    engine: LarkEngine = "auto",
    tree: bool = False,
    transformer: Any = None,
    postlex: Indenter | None = None,
    import_paths: Sequence[str] = (),
    limits: Limits | None = None,
) -> Lark | LarkMasks | LarkText:
    """A constraint to the texts of a context-free grammar.

    Args:
        grammar: As the `lark` package takes it for its LALR parser with the contextual lexer, or in
            llguidance's dialect, which has `%json` and regular expressions as Rust means them.
        start: The rule to begin with. In llguidance's dialect, with another one than `start`, no
            rule may be called so.
        engine: What reads the grammar. `"lark"` is that package, which judges the beginnings of
            texts, and tokens are drawn by rejection. `"llguidance"` makes masks for what it reads
            in its own dialect. `"auto"` reads as Lark where Lark takes the grammar, with masks if
            they mean the same, and in llguidance's dialect what Lark refuses. The constraint's
            `engine` tells what enforces it (`"llguidance"`: masks), `dialect` how it was read; what
            may surprise is in the result's `warnings` too.
        tree: Whether the value is the `lark.Tree` of the text; else it is the text. In
            llguidance's dialect it takes a grammar that `lark` reads as well, if need be with
            Earley's parser.
        transformer: What makes the value of the tree, such as a `lark.Transformer`.
        postlex: Of the `lark` package: an `Indenter` that makes the terminals which the grammar
            declares, with its own methods (`lark.indenter.PythonIndenter()`).
        import_paths: Folders for Lark's `%import`.
        limits: What an untrusted grammar may cost.

    Raises:
        UnsupportedConstraintError: What cannot be enforced exactly: special tokens, references to
            other grammars, attributes that speak of tokens; a terminal that cannot be judged on
            prefixes; with the place.
        ConstraintError: Not a grammar, without any text, or beyond the limits; with the place.
            Where both engines refuse it, with both reasons. Or it has no tree.
        OptionError: An option that is none, or that does not go with the engine.
    """
    if engine not in get_args(LarkEngine):
        raise OptionError(f"engine must be one of {get_args(LarkEngine)}, got {engine!r}")
    if not isinstance(grammar, str):
        raise ConstraintError(f"a grammar is a text, got {shorten(repr(grammar))}")
    if not grammar.strip(f"{BOM} \t\r\n"):
        raise ConstraintError(f"the grammar is empty: it needs a rule {start!r}")
    given: dict[str, Any] = {"start": start, "engine": engine, "postlex": postlex}
    limits = compiled_in_worker(
        limits or Limits(), lark, grammar, import_paths=import_paths, **given
    )
    check_size(grammar, "the grammar", limits)
    values: dict[str, Any] = {"tree": tree, "transformer": transformer}
    if engine == "llguidance":
        if postlex is not None or import_paths:
            raise OptionError("postlex and import_paths are Lark's and need its engine")
        return Lark(grammar, start=start, limits=limits, **values)
    try:
        text = LarkText(
            grammar,
            start=start,
            postlex=postlex,
            import_paths=import_paths,
            name="grammar",
            limits=limits,
            **values,
        )
    except ConstraintError as error:
        if engine == "lark" or postlex is not None:
            raise
        note = _surprise(grammar, start, error)
        try:
            return Lark(grammar, start=start, limits=limits, note=note, **values)
        except ConstraintError as other:
            raise _both(other, error) from None
    if engine == "lark" or postlex is not None:
        return text
    try:
        return LarkMasks(text, masked(text.parser, start), limits)
    except Differs as reason:
        why = str(reason)
    except GrammarError as error:
        why = error.reason
    return text.because(f"its masks could mean something else ({why})")


class LarkMasks(Grammar):
    """Texts that a Lark grammar accepts, by masks that mean the same.

    Args:
        text: The same by prefixes.
        source: The same in llguidance's dialect.
        limits: What it may cost.

    Attributes:
        grammar: As it was given.
        start: The rule that a text is.
        engine: What enforces it.
        dialect: Whose grammar it is.

    Raises:
        GrammarError: It does not compile within the limits.
        ConstraintError: No text belongs to it.
    """

    engine: Literal["llguidance"] = "llguidance"
    dialect: Literal["lark"] = "lark"

    def __init__(self, text: LarkText, source: str, limits: Limits) -> None:
        self.grammar = text.grammar
        self.start = text.start
        self._reader = text.reader
        super().__init__(source, name=text.name, limits=limits, levels=source.count("\n"))

    def parse(self, text: str) -> Any:
        """The tree of a member if it was asked for, or what is made of it; else the text.

        Raises:
            OutputValidationError: The transformer refuses it.
        """
        return text if self._reader is None else self._reader.value(text)

    def value_key(self, text: str) -> Hashable:
        """Equal for texts with equal trees, if trees are asked for."""
        return text if self._reader is None else self._reader.key(text)


def _surprise(grammar: str, start: str, refused: ConstraintError) -> str | None:
    """What to say of a grammar of Lark's that is read in the other dialect."""
    try:
        read_grammar(grammar, start=start, parser="earley")
    except ConstraintError:
        return None  # no grammar of Lark's
    return f"read in llguidance's dialect, since Lark's LALR parser refuses it: {_short(refused)}"


def _both(error: ConstraintError, of_lark: ConstraintError) -> ConstraintError:
    """What both engines say of a grammar; llguidance's alone if it is plainly in its dialect."""
    if isinstance(error, UnsupportedConstraintError) and "Unexpected" in str(of_lark):
        return error
    message = (
        f"{shorten(str(error), 250)} (and as a grammar of the lark package: {_short(of_lark)})"
    )
    if isinstance(error, UnsupportedConstraintError):
        return UnsupportedConstraintError(message, keyword=error.keyword, path=error.path)
    return ConstraintError(message, path=error.path)


def _short(error: ConstraintError) -> str:
    message = str(error).removeprefix("grammar: ")
    return shorten(message.partition(" Expected one of:")[0].partition(" in <string>:")[0], 160)
