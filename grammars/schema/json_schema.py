r"""JSON Schema as a constraint: texts that are JSON and valid against the schema.

The mask is llguidance's, whose states fork in microseconds. What it cannot enforce is loosened for
it (`relaxing`) and checked in the texts as they grow (`validating`): the constraint names it in
`relaxed`. Together the promise is firm: no text is accepted that the schema rejects, or that
repeats a key. Names, constants, patterns, lengths and bounds hold for values, however these are
spelt (`spelt`): with `\uXXXX` or `\/`, as `1.0`, `1e2` or `-0`. What is narrower than JSON allows:

- properties come in the schema's order, those that only alternatives name after them, and further
  ones last;
- where numbers have bounds or must be integers, an exponent comes only behind digits that may begin
  the number written out (see `begun_numbers`), and it makes no more than 330 digits;
- whitespace between tokens is bounded (see `json_schema`), and there is none around the value.
"""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_origin
from weakref import WeakKeyDictionary

import numpy as np
import pydantic

from guided_smc.errors import ConstraintError, OptionError, OutputValidationError
from guided_smc.grammars.matching import (
    EXACT_MASKS,
    CompiledGrammar,
    GrammarError,
    Limits,
    every_byte,
)
from guided_smc.grammars.schema.keywords import Schema, depth, json_path, shorten
from guided_smc.grammars.schema.layout import CompiledLayout
from guided_smc.grammars.schema.refusals import Refusal
from guided_smc.grammars.schema.relaxing import Relaxed, Superset
from guided_smc.grammars.schema.schema_text import BOM, RepeatedKeyError, StrictDecoder
from guided_smc.grammars.schema.spelt import CompiledSpelling
from guided_smc.grammars.schema.type_schemas import TypeSchemas
from guided_smc.grammars.schema.validating import Checker, Valid
from guided_smc.grammars.schema.values import exact_number, key_of, key_of_object
from guided_smc.grammars.worker import compiled_in_worker
from guided_smc.potentials import Completion, Constraint, Potential
from guided_smc.vocabulary import Vocabulary

Whitespace = Literal["compact", "line", "indented", "flexible", "any"]

_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_WHITESPACE: dict[str, dict[str, Any]] = {
    "compact": _COMPACT,
    "line": {"whitespace_pattern": "[ ]"},
    "indented": _COMPACT,  # the rest is `layout`
    "flexible": {"whitespace_pattern": r"[ ]|\r?\n([ ]{0,40}|\t{0,10})"},
    "any": {"whitespace_pattern": r"[ \t\r\n]{1,64}"},
}
"""Options of llguidance; its whitespace is optional where there is any."""

_MOST_INDENT = 40

_TOO_DEEP = (
    "the schema is nested too deeply to be read, whatever its limits: name inner parts in $defs "
    "and refer to them"
)

_INSTEAD = (
    "use a pydantic model, a dataclass or a TypedDict of what it consists of, or regex(...) or "
    "lark(...) for how it is written"
)

_MOST_NAMED = 5
"""Keywords that a note names."""


def json_schema(
    schema: Any,
    *,
    whitespace: Whitespace = "flexible",
    indent: int = 2,
    limits: Limits | None = None,
) -> JsonSchema:
    """A constraint to JSON that is valid against a schema.

    Args:
        schema: A JSON Schema as data or as JSON text, or a type that pydantic knows: a model, a
            dataclass, `list[int]`... The objects of a type have no further properties unless it
            says `extra="allow"`.
        whitespace: Between tokens. `"flexible"`: nothing, a space, or a newline with up to 40
            spaces or 10 tabs of indentation: what models like to write, and as probable under
            them as unlimited whitespace, without the endless blanks. `"any"`: up to 64 spaces,
            tabs and line breaks in any order. `"line"`: nothing or one space, so that the value
            stays on one line. `"compact"`: none, as `json.dumps(value, separators=(",", ":"))`
            writes it. `"indented"`: exactly as `json.dumps(value, indent=indent)` does.
        indent: Spaces for each level of `"indented"`.
        limits: What an untrusted schema may cost.

    Raises:
        OptionError: There is no such whitespace or indentation.
        UnsupportedConstraintError: Draft 3, or a `$ref` that leads out of the document.
        ConstraintError: Not a valid schema, unsatisfiable, or beyond the limits.
    """
    return JsonSchema(schema, whitespace=whitespace, indent=indent, limits=limits)


class JsonSchema(Constraint):
    """Texts that are JSON and valid against a schema. See `json_schema` for the arguments.

    Attributes:
        schema: The schema as plain data.
        model: The type that values are parsed into, if one was given.
        relaxed: The keywords that the mask does not know, and their paths. They are enforced
            by checking texts, unless they constrain nothing in the schema's dialect.
        subschemas: How many schemas are in it, as far as the root reaches them.
        compiled_from: What llguidance is given.
        within_grammar: The same within a larger grammar, which knows one spelling, but for
            escapes where a string is free.
    """

    shows_ends = True

    def __init__(
        self,
        schema: Any,
        *,
        whitespace: Whitespace = "flexible",
        indent: int = 2,
        limits: Limits | None = None,
    ) -> None:
        if whitespace not in _WHITESPACE:
            raise OptionError(f"whitespace must be one of {[*_WHITESPACE]}, got {whitespace!r}")
        if not isinstance(indent, int) or not 0 <= indent <= _MOST_INDENT:
            raise OptionError(f"indent must be a number from 0 to {_MOST_INDENT}, got {indent!r}")
        self.limits = limits or Limits()
        self.model: Any = schema if is_type(schema) else None
        self.name = "json_schema" if self.model is None else type_name(self.model)
        self._adapter = None if self.model is None else type_adapter(self.model)
        text = _source(
            _schema_of(self._adapter, self.name) if self._adapter else schema, self.limits
        )
        self.schema: dict[str, Any] | bool = json.loads(text)
        self._has_sets = self.model is not None and '"uniqueItems": true' in text
        limits = compiled_in_worker(
            self.limits, _compiled, text, whitespace, closed=self.model is not None
        )
        checked, superset, checker = _compiled(
            text, whitespace, closed=self.model is not None, limits=limits
        )
        self.relaxed = superset.relaxed
        self.subschemas = len(checked.reached)
        self.compiled_from = _grammar(superset.document, whitespace)
        self.within_grammar = _json(superset.document, whitespace, any_escape=True)
        self._levels = checked.levels
        self._valid = Valid(checker, self.name)
        self._indent = indent if whitespace == "indented" else None
        self._compiled: WeakKeyDictionary[Vocabulary, CompiledSpelling | CompiledLayout]
        self._compiled = WeakKeyDictionary()

    def compile(self, vocabulary: Vocabulary) -> CompiledSpelling | CompiledLayout:
        """Bind to a vocabulary; done once for each.

        Raises:
            ConstraintError: The grammar is too large for this vocabulary.
        """
        if vocabulary not in self._compiled:
            self._compiled[vocabulary] = (
                self._bind(vocabulary)
                if self._indent is None
                else CompiledLayout(self._bind, vocabulary, self._indent)
            )
        return self._compiled[vocabulary]

    def _bind(self, vocabulary: Vocabulary) -> CompiledSpelling:
        return CompiledSpelling(self._bind_usual, vocabulary)

    def _bind_usual(self, vocabulary: Vocabulary) -> CompiledGrammar:
        return CompiledGrammar(
            self.compiled_from, vocabulary, self.limits, self.name, levels=self._levels
        )

    def parse(self, text: str) -> Any:
        """The value: an instance of the type, or plain data.

        Raises:
            OutputValidationError: The type has validators that its schema does not show, or a
                number is beyond what Python reads.
        """
        try:
            return self._adapter.validate_json(text) if self._adapter else json.loads(text)
        except (ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
            raise OutputValidationError(
                f"{self.name} refuses the output {shorten(text)!r}: {error}",
                text=text,
                finish_reason="stop",
            ) from error

    def check(self) -> Potential | None:
        """What the mask does not know, and the type's own validators."""
        if self._adapter is None:
            return self._valid
        return self._valid * _Validated(self._adapter, self.name)

    def notes(self) -> tuple[str, ...]:
        """Which keywords the mask does not know, and which nothing enforces."""
        checked = [r for r in self.relaxed if r.enforced]
        ignored = [r for r in self.relaxed if not r.enforced]
        notes = []
        if checked:
            notes.append(
                f"the mask does not know {_named(checked)}: texts are checked for it as they "
                "grow, and particles may die of it"
            )
        if ignored:
            notes.append(f"nothing is checked for {_named(ignored)}: an annotation here")
        return tuple(notes)

    def value_key(self, text: str) -> Hashable:
        """Canonical JSON: equal for equal values, however they are spelt (1 is 1.0, not true).

        Of a type with sets in it, the object itself in a form that can be compared.
        """
        try:
            if self._has_sets:
                return key_of_object(self.parse(text))
            return key_of(json.loads(text, parse_int=exact_number, parse_float=exact_number))
        except (ValueError, RecursionError, OutputValidationError):
            return text


class _Validated(Potential):
    """`1[pydantic accepts the text as the type]`, asked of finished texts."""

    def __init__(self, adapter: pydantic.TypeAdapter[Any], name: str) -> None:
        self.adapter = adapter
        self.name = f"{name} validates"

    def log_complete(self, completions: Sequence[Completion]) -> Sequence[float]:
        """0, or −inf where the type's validators refuse."""
        return [self._log_indicator(c.text) for c in completions]

    def why(self, text: str, *, finished: bool) -> Refusal | None:
        """What pydantic says of the first value that it refuses."""
        try:
            self.adapter.validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            return Refusal(json_path(first["loc"]), None, first["msg"]) if finished else None
        except ValueError as error:
            return Refusal("$", None, str(error)) if finished else None
        return None

    def _log_indicator(self, text: str) -> float:
        try:
            self.adapter.validate_json(text)
        except ValueError:  # pydantic's ValidationError is one
            return -math.inf
        return 0.0


def is_type(value: Any) -> bool:
    """Whether a value is a type, as an annotation may be: a class, `list[int]`, `int | None`."""
    return (
        isinstance(value, type | typing.TypeVar)
        or get_origin(value) is not None
        or hasattr(value, "__supertype__")  # NewType
        or hasattr(value, "__value__")  # a type alias
        or value is Any
    )


def type_name(value: Any) -> str:
    """What messages call a type."""
    if isinstance(value, type) and get_origin(value) is None:
        return value.__name__
    return shorten(str(value).replace("typing.", ""), 60)


def type_adapter(value: Any) -> pydantic.TypeAdapter[Any]:
    """Pydantic's view of a type.

    Raises:
        ConstraintError: It has none.
    """
    try:
        return pydantic.TypeAdapter(value)
    except pydantic.errors.PydanticSchemaGenerationError as error:
        what = (
            str(error)
            .partition(". ")[0]
            .removeprefix("Unable to generate pydantic-core schema for ")
        )
        raise ConstraintError(
            f"{type_name(value)} is no type of data: pydantic cannot tell how JSON becomes {what}; "
            f"{_INSTEAD}"
        ) from error
    except (pydantic.errors.PydanticUserError, NameError, TypeError) as error:
        raise ConstraintError(f"{type_name(value)} is no type of data: {error}") from error


def _schema_of(adapter: pydantic.TypeAdapter[Any], name: str) -> dict[str, Any]:
    try:
        return adapter.json_schema(schema_generator=TypeSchemas)
    except (pydantic.errors.PydanticUserError, AttributeError) as error:
        why = str(error).partition("\n")[0]
        raise ConstraintError(f"{name} has no JSON Schema: {why}; {_INSTEAD}") from error


def _source(schema: Any, limits: Limits) -> str:
    """The schema as JSON text within the limits."""
    if isinstance(schema, str):
        _check_size(schema, limits)
        schema = schema.removeprefix(BOM)
        if not schema.strip():
            raise ConstraintError(
                "the schema is empty: a JSON Schema is an object or a boolean, such as {}"
            )
        try:
            schema = json.loads(schema, cls=StrictDecoder, parse_constant=_no_constant)
        except RepeatedKeyError as error:
            raise ConstraintError(f"the schema is ambiguous: {error}", path=error.path) from None
        except ValueError as error:
            raise ConstraintError(
                f"the schema is not JSON: {error}; got {shorten(schema)!r}"
            ) from None
        except RecursionError:
            raise ConstraintError(_TOO_DEEP) from None
    if not isinstance(schema, dict | bool):
        raise ConstraintError(
            f"a JSON Schema is an object or a boolean, got {shorten(repr(schema))}"
        )
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"the schema is not JSON data: {error}") from None
    except RecursionError:
        _check_depth(schema, limits)
        raise ConstraintError(_TOO_DEEP) from None
    _check_size(text, limits)
    _check_depth(schema, limits)
    return text


def _check_depth(schema: Any, limits: Limits) -> None:
    levels = depth(schema)
    if levels > limits.max_depth:
        raise ConstraintError(
            f"the schema is nested {levels} deep, more than the limit of {limits.max_depth}: name "
            "inner parts in $defs and refer to them",
            limit="max_depth",
        )


def _check_size(text: str, limits: Limits) -> None:
    size = len(text.encode("utf-8", errors="surrogatepass"))
    if size > limits.max_bytes:
        raise ConstraintError(
            f"the schema has {size} bytes, more than the limit of {limits.max_bytes}"
        )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _compiled(
    text: str, whitespace: Whitespace, *, closed: bool, limits: Limits
) -> tuple[Schema, Superset, Checker]:
    """What a schema says, what llguidance is given of it, and who checks the rest."""
    try:
        checked = Schema(json.loads(text), closed=closed, max_steps=limits.max_check_steps)
        trial = _Trial(whitespace, limits, checked.levels)
        superset = Superset(checked, trial)
        trial.check(superset)
        return checked, superset, Checker(checked, superset.loosened, limits.max_check_steps)
    except RecursionError:
        raise ConstraintError(_TOO_DEEP) from None


def _grammar(document: dict[str, Any] | bool, whitespace: Whitespace) -> str:
    return f"{EXACT_MASKS}start: {_json(document, whitespace)}\n"


def _json(
    document: dict[str, Any] | bool, whitespace: Whitespace, *, any_escape: bool = False
) -> str:
    options = dict(_WHITESPACE[whitespace])
    if any_escape:
        options["json_allow_general_unicode_escapes"] = True
    document = document if isinstance(document, dict) else {}  # `true`: `false` was refused
    return f"%json {json.dumps({**document, 'x-guidance': options})}"


class _Trial:
    """Compiles over plain bytes, so that a bad schema is known before there is a model."""

    def __init__(self, whitespace: Whitespace, limits: Limits, levels: int) -> None:
        self._whitespace = whitespace
        self._limits = limits
        self._levels = levels

    def __call__(self, document: dict[str, Any] | bool) -> str | None:
        """Why llguidance refuses a document, or None."""
        try:
            self._last = CompiledGrammar(
                _grammar(document, self._whitespace),
                every_byte(),
                self._limits,
                "json_schema",
                levels=self._levels,
            )
        except GrammarError as error:
            return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", error.reason)
        return None

    def check(self, superset: Superset) -> None:
        """Raise if nothing could be compiled, or only what no value satisfies."""
        if superset.error is not None:
            if superset.error.startswith("Unsatisfiable schema"):
                raise ConstraintError(f"no JSON value satisfies the schema: {superset.error}")
            if "recursion limit" in superset.error:  # of llguidance's reader of JSON
                raise ConstraintError(_TOO_DEEP)
            raise ConstraintError(f"the schema does not compile: {superset.error}")
        first = np.empty((1, 9), dtype=np.int32)
        self._last.fill_masks([self._last.start()], first)
        if not first.any():
            raise ConstraintError("no JSON value satisfies the schema", path="$")


def _named(relaxed: list[Relaxed]) -> str:
    names = [f"{r.keyword} ({r.path})" for r in relaxed[:_MOST_NAMED]]
    more = len(relaxed) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
