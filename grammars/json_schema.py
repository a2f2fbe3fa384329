r"""JSON Schema as a constraint: texts that are JSON and valid against the schema.

Compiled by llguidance, whose states fork in microseconds. The promise is one-sided and firm: no
text is accepted that the schema rejects. What cannot be enforced is refused by name when the
constraint is made; what is narrower than JSON allows is only the spelling:

- properties come in the schema's order, further ones after them;
- numbers with bounds have no exponent and no trailing zeros, integers no fraction;
- strings use no `\uXXXX` and no `\/` escapes (characters stand for themselves);
- whitespace between tokens is bounded (see `json_schema`), and there is none around the value.
"""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Hashable, Sequence
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, Literal, get_origin
from weakref import WeakKeyDictionary

import pydantic
import pydantic.json_schema
import torch

from guided_smc.errors import ConstraintError, OutputValidationError, UnsupportedConstraintError
from guided_smc.grammars.keywords import Schema, depth, shorten
from guided_smc.grammars.matching import EXACT_MASKS, CompiledGrammar, GrammarError, Limits
from guided_smc.potentials import Completion, Constraint, Potential
from guided_smc.vocabulary import Vocabulary

Whitespace = Literal["compact", "flexible"]

_WHITESPACE = {
    "compact": "[ ]",
    "flexible": r"[ ]|\r?\n([ ]{0,40}|\t{0,10})",
}

_REFUSALS = (
    (r"oneOf constraints are not supported", "oneOf", "may hold for two alternatives at once"),
    (r"circular references with sibling", "$ref", "refers to itself with keywords beside it"),
    (r"m(in|ax)Properties", "minProperties|maxProperties", "cannot be counted here"),
    (r"patternProperty regexes", "patternProperties", "has patterns that may overlap"),
    (r"multipleOf", "multipleOf", "has too many digits"),
    (r"range", "minimum|maximum|exclusiveMinimum|exclusiveMaximum", "cannot be a pattern"),
)
"""What llguidance says of a schema that it cannot enforce, the keywords meant, and why."""


def json_schema(
    schema: Any,
    *,
    whitespace: Whitespace = "flexible",
    limits: Limits | None = None,
) -> JsonSchema:
    """A constraint to JSON that is valid against a schema.

    Args:
        schema: A JSON Schema as data or as JSON text, or a type that pydantic knows: a model, a
            dataclass, `list[int]`... The objects of a type have no further properties unless it
            says `extra="allow"`.
        whitespace: Between tokens. `"flexible"`: nothing, a space, or a newline with up to 40
            spaces or 10 tabs of indentation: what models like to write, and as probable under
            them as unlimited whitespace, without the endless blanks. `"compact"`: nothing or one
            space, so that the value stays on one line.
        limits: What an untrusted schema may cost.

    Raises:
        UnsupportedConstraintError: A keyword that cannot be enforced, with its JSON path.
        ConstraintError: Not a valid schema, unsatisfiable, or beyond the limits.
    """
    return JsonSchema(schema, whitespace=whitespace, limits=limits)


class JsonSchema(Constraint):
    """Texts that are JSON and valid against a schema. See `json_schema` for the arguments.

    Attributes:
        schema: The schema as plain data.
        model: The type that values are parsed into, if one was given.
    """

    def __init__(
        self,
        schema: Any,
        *,
        whitespace: Whitespace = "flexible",
        limits: Limits | None = None,
    ) -> None:
        if whitespace not in _WHITESPACE:
            raise ConstraintError(
                f"whitespace must be one of {sorted(_WHITESPACE)}, got {whitespace!r}"
            )
        self.limits = limits or Limits()
        self.model: Any = schema if is_type(schema) else None
        self.name = "json_schema" if self.model is None else type_name(self.model)
        self._adapter = None if self.model is None else type_adapter(self.model)
        text = _source(
            _schema_of(self._adapter, self.name) if self._adapter else schema, self.limits
        )
        self.schema: dict[str, Any] | bool = json.loads(text)
        try:
            checked = Schema(json.loads(text), closed=self.model is not None)
            self._grammar = _grammar(checked.document, whitespace, checked.unicode_escapes)
            self._levels = checked.levels
            _compile_once(self._grammar, checked, self.limits)
        except RecursionError:
            raise ConstraintError("the schema is nested too deeply") from None
        self._compiled: WeakKeyDictionary[Vocabulary, CompiledGrammar] = WeakKeyDictionary()

    def compile(self, vocabulary: Vocabulary) -> CompiledGrammar:
        """Bind to a vocabulary; done once for each.

        Raises:
            ConstraintError: The grammar is too large for this vocabulary.
        """
        if vocabulary not in self._compiled:
            self._compiled[vocabulary] = CompiledGrammar(
                self._grammar, vocabulary, self.limits, self.name, levels=self._levels
            )
        return self._compiled[vocabulary]

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
        """The type's own validators, which its schema does not show; none for plain schemas."""
        return _Validated(self._adapter, self.name) if self._adapter else None

    def value_key(self, text: str) -> Hashable:
        """Canonical JSON: equal for equal values, however they are spelt (1 is 1.0, not true)."""
        try:
            return json.dumps(
                _canonical(json.loads(text, parse_int=_exact_number, parse_float=_exact_number)),
                sort_keys=True,
            )
        except (ValueError, RecursionError):
            return text


class _Validated(Potential):
    """`1[pydantic accepts the text as the type]`, asked of finished texts."""

    def __init__(self, adapter: pydantic.TypeAdapter[Any], name: str) -> None:
        self.adapter = adapter
        self.name = f"{name} validates"

    def log_complete(self, completions: Sequence[Completion]) -> Sequence[float]:
        """0, or −inf where the type's validators refuse."""
        return [self._log_indicator(c.text) for c in completions]

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
    except (pydantic.errors.PydanticUserError, NameError, TypeError) as error:
        raise ConstraintError(f"{type_name(value)} is no type of data: {error}") from error


class _Schemas(pydantic.json_schema.GenerateJsonSchema):
    """Pydantic's schemas, where keys that are integers are written as such."""

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        """The schema of a `dict`."""
        made = super().dict_schema(schema)
        if schema.get("keys_schema", {}).get("type") == "int":
            values = made.pop("additionalProperties", True)
            made |= {"patternProperties": {_INTEGER: values}, "additionalProperties": False}
        return made


_INTEGER = "^(0|-?[1-9][0-9]*)$"


def _schema_of(adapter: pydantic.TypeAdapter[Any], name: str) -> dict[str, Any]:
    try:
        return adapter.json_schema(schema_generator=_Schemas)
    except (pydantic.errors.PydanticUserError, AttributeError) as error:
        raise ConstraintError(f"{name} has no JSON Schema: {error}") from error


def _source(schema: Any, limits: Limits) -> str:
    """The schema as JSON text within the limits."""
    if isinstance(schema, str):
        _check_size(schema, limits)
        try:
            schema = json.loads(schema, parse_constant=_no_constant)
        except ValueError as error:
            raise ConstraintError(
                f"the schema is not JSON: {error}; got {shorten(schema)!r}"
            ) from None
        except RecursionError:
            raise ConstraintError("the schema is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise ConstraintError(
            f"a JSON Schema is an object or a boolean, got {shorten(repr(schema))}"
        )
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not JSON data: {error}") from None
    _check_size(text, limits)
    levels = depth(schema)
    if levels > limits.max_depth:
        raise ConstraintError(
            f"the schema is nested {levels} deep, more than the limit of {limits.max_depth}"
        )
    return text


def _check_size(text: str, limits: Limits) -> None:
    size = len(text.encode("utf-8", errors="surrogatepass"))
    if size > limits.max_bytes:
        raise ConstraintError(
            f"the schema has {size} bytes, more than the limit of {limits.max_bytes}"
        )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _grammar(
    document: dict[str, Any] | bool, whitespace: Whitespace, unicode_escapes: bool = False
) -> str:
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE[whitespace]}
    if not unicode_escapes:
        options["json_allowed_escapes"] = '"\\bfnrt'
    document = document if isinstance(document, dict) else {}  # `true`: `false` was refused
    return f"{EXACT_MASKS}start: %json {json.dumps({**document, 'x-guidance': options})}\n"


def _compile_once(grammar: str, schema: Schema, limits: Limits) -> None:
    """Compile over plain bytes, so that a bad schema is known before there is a model."""
    try:
        compiled = CompiledGrammar(
            grammar, _every_byte(), limits, "json_schema", levels=schema.levels
        )
    except GrammarError as error:
        raise _explain(error.reason, schema, limits) from None
    first = torch.empty((1, 9), dtype=torch.int32)
    compiled.fill_masks([compiled.start()], first)
    if not first.any():
        raise ConstraintError("no JSON value satisfies the schema", path="$")


@cache
def _every_byte() -> Vocabulary:
    return Vocabulary([bytes([i]) for i in range(256)] + [b""], eos_ids=[256])


def _explain(error: str, schema: Schema, limits: Limits) -> ConstraintError:
    """An error of llguidance with the keyword and the place that it means."""
    reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", error)
    if reason.startswith("Unsatisfiable schema"):
        return ConstraintError(f"no JSON value satisfies the schema: {reason}")
    for keyword in ("pattern", "patternProperties"):
        for path, value in schema.places(keyword):
            for pattern in [value] if isinstance(value, str) else value:
                wrong = _wrong_pattern(pattern, path, keyword, limits)
                if wrong is not None:
                    return wrong
    for message, keywords, why in _REFUSALS:
        if re.search(message, reason):
            for keyword in keywords.split("|"):
                for path, _ in schema.places(keyword):
                    return UnsupportedConstraintError(
                        f"{path}: {keyword!r} is not supported: it {why} ({reason})",
                        keyword=keyword,
                        path=path,
                    )
    unknown = re.search(r'Unimplemented keys: \["([^"]+)"', reason)
    if unknown:
        for path, _ in schema.places(unknown[1]):
            return UnsupportedConstraintError(
                f"{path}: {unknown[1]!r} is not supported", keyword=unknown[1], path=path
            )
    return ConstraintError(f"the schema does not compile: {reason}")


def _wrong_pattern(pattern: str, path: str, keyword: str, limits: Limits) -> ConstraintError | None:
    """What is wrong with a regular expression alone, if anything is."""
    grammar = _grammar({"type": "string", "pattern": pattern}, "compact")
    try:
        CompiledGrammar(grammar, _every_byte(), limits, "pattern")
    except GrammarError as error:
        reason = error.reason
    else:
        return None
    try:
        re.compile(pattern)
    except re.error as error:
        return ConstraintError(
            f"{path}: {shorten(pattern)!r} is not a regular expression: {error}", path=path
        )
    return UnsupportedConstraintError(
        f"{path}: the regular expression {shorten(pattern)!r} is not supported: {reason}",
        keyword=keyword,
        path=path,
    )


def _exact_number(text: str) -> Decimal:
    """A number of any size.

    Raises:
        ValueError: The exponent is beyond what Decimal holds.
    """
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text} is too large") from error


def _canonical(value: Any) -> Any:
    """JSON data with numbers as texts that are the same for equal ones, and strings marked."""
    if isinstance(value, dict):
        return {key: _canonical(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    if isinstance(value, str):
        return f"'{value}"
    if isinstance(value, Decimal):
        sign, digits, exponent = value.as_tuple()
        significand = "".join(map(str, digits)).lstrip("0")
        short = significand.rstrip("0")
        if not short:
            return "0"
        return f"{'-' * sign}{short}e{int(exponent) + len(significand) - len(short)}"
    return value
