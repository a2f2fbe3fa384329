"""What a text of a Lark grammar becomes: itself, its tree, or what a transformer makes of that."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import lark
from lark.exceptions import LarkError, VisitError

from guided_smc.errors import ConstraintError, OptionError, OutputValidationError
from guided_smc.grammars.schema.keywords import shorten
from guided_smc.grammars.schema.schema_text import BOM


class TreeReader:
    """Reads finished texts.

    Args:
        parser: Of the `lark` package.
        transformer: Of the `lark` package too, for instance a `lark.Transformer`; None to leave
            trees as they are.
        name: What messages call the constraint.

    Raises:
        OptionError: The transformer has no method `transform`.
    """

    def __init__(self, parser: lark.Lark, transformer: Any, name: str) -> None:
        if transformer is not None and (
            isinstance(transformer, type) or not callable(getattr(transformer, "transform", None))
        ):
            raise OptionError(
                f"transformer must be an instance of lark.Transformer, got {transformer!r}"
            )
        self._parser = parser
        self._transformer = transformer
        self._name = name

    def value(self, text: str) -> Any:
        """The tree of a text, or what the transformer makes of it.

        Raises:
            OutputValidationError: There is none.
        """
        try:
            tree = self._parser.parse(text)
        except (LarkError, RecursionError) as error:
            raise self._refused(text, f"the lark package finds no tree: {error}") from error
        if self._transformer is None:
            return tree
        try:
            return self._transformer.transform(tree)
        except VisitError as error:
            raise self._refused(text, f"the transformer raised {error.orig_exc!r}") from error

    def key(self, text: str) -> Hashable:
        """Equal for texts with equal trees."""
        try:
            return cast(Hashable, self._parser.parse(text))
        except (LarkError, RecursionError):
            return text

    def _refused(self, text: str, reason: str) -> OutputValidationError:
        return OutputValidationError(
            f"{self._name}: of the output {shorten(text)!r} {one_line(reason)}",
            text=text,
            finish_reason="stop",
        )


def read_grammar(grammar: str, **options: Any) -> lark.Lark:
    """A parser of the `lark` package, with the patterns of the `regex` package.

    Raises:
        ConstraintError: The package does not take the grammar.
    """
    try:
        return lark.Lark(grammar.removeprefix(BOM), regex=True, **options)
    except RecursionError:
        raise ConstraintError("the grammar is nested too deeply") from None
    except Exception as error:  # on some broken grammars Lark breaks itself, with a TypeError
        raise ConstraintError(one_line(error)) from error


def parser_of(grammar: str, start: str) -> lark.Lark:
    """A parser for a grammar that llguidance reads: LALR where that does, else Earley.

    Raises:
        ConstraintError: The lark package does not take the grammar.
    """
    try:
        return read_grammar(grammar, start=start, parser="lalr")
    except ConstraintError:
        pass
    try:
        return read_grammar(grammar, start=start, parser="earley")
    except ConstraintError as error:
        raise ConstraintError(
            "tree=True needs a grammar that the lark package takes as well, and it says: "
            f"{shorten(str(error), 200)}"
        ) from None


def one_line(error: object) -> str:
    """A message without line breaks."""
    return " ".join(str(error).split())
