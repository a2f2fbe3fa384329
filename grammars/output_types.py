"""What an output type stands for: the one door through which a request's `output_type` comes.

Three readings, and every type has one of them:

- *free text*: `str`, without a constraint;
- *bare text*, with no quotes around it: `bool`, `Literal`, `Enum`, `date`, `time`, `datetime`, a
  `str` with a length, and whatever says itself which texts it means: `regex`, `choice`, `lark`
  and Outlines' terms;
- *JSON*: everything that pydantic knows else.

Numbers and None are the same either way (None is `None` as bare text and `null` in JSON). So a
union of bare texts and numbers is bare, a union of structures, numbers and None is JSON, and a
union of structures and bare texts has no single reading: it is refused, and `json_schema(T)` reads
it as JSON.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import math
import operator
import re
import sys
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from typing_extensions import NotRequired, TypedDict

from guided_smc.errors import ConstraintError, OutputValidationError, UnsupportedConstraintError
from guided_smc.grammars.choice import Choice, choice
from guided_smc.grammars.context_free import lark
from guided_smc.grammars.grammar import accepts
from guided_smc.grammars.regex import regex
from guided_smc.grammars.schema import formats
from guided_smc.grammars.schema.json_schema import (
    is_type,
    json_schema,
    type_adapter,
    type_name,
)
from guided_smc.grammars.schema.keywords import shorten
from guided_smc.potentials import (
    CompiledConstraint,
    Completion,
    Constraint,
    ConstraintState,
    Potential,
)
from guided_smc.vocabulary import Vocabulary

_DATE = formats.PATTERNS["date"].removeprefix("^").removesuffix("$")
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_MOMENTS: dict[type, str] = {
    datetime.date: _DATE,
    datetime.time: _TIME,
    datetime.datetime: f"{_DATE}[ T]{_TIME}",
}

_HINTS = {"title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly"}
"""Keywords of a schema that constrain nothing."""

Reading = Literal["text", "bare", "either", "json"]


def from_output_type(output_type: Any) -> Constraint | None:
    """The constraint that an output type stands for.

    Args:
        output_type: None or `str` for free text; a type: a number, `Literal`, `Enum`, a pydantic
            model, a dataclass, a container, a union...; a function, for the arguments of a call;
            a JSON Schema as a dict or as JSON text; a compiled regular expression; one of
            Outlines' types or terms; or a constraint, which is returned as it is.

    Raises:
        ConstraintError: Anything else, a type without a single reading, or a schema, pattern or
            grammar that is refused.
    """
    if output_type is None or output_type is str:
        return None
    if isinstance(output_type, Constraint):
        return output_type
    if isinstance(output_type, Potential):
        raise ConstraintError(
            f"{output_type.name!r} is a potential and no output type: pass it as potential="
        )
    if isinstance(output_type, dict | str):
        return json_schema(output_type)
    if isinstance(output_type, re.Pattern):
        return regex(output_type)
    if inspect.isroutine(output_type) or isinstance(output_type, functools.partial):
        return json_schema(_arguments(output_type))
    if is_type(output_type):
        return _from_type(output_type)
    constraint = _from_outlines(output_type)
    if constraint is not None:
        return constraint
    raise ConstraintError(
        "an output type must be None or str (free text), a type such as int, Literal, an Enum, a "
        "pydantic model or a dataclass, a function, a JSON Schema (dict or JSON text), a term of "
        f"Outlines, or a Constraint, got {shorten(repr(output_type))}"
    )


# -- types -----------------------------------------------------------------------------------------


def _from_type(hint: Any) -> Constraint | None:
    base, annotated = _base(hint)
    members = _members(hint)
    if len(members) == 1 and not _is_union(base):
        return _single(hint)
    readings = {_reading(member) for member in members}
    if readings <= {"json", "either"} and (
        "json" in readings or not any(_base(member)[0] is NoneType for member in members)
    ):
        return json_schema(hint)
    if "json" in readings:
        structures = [type_name(m) for m in members if _reading(m) == "json"]
        texts = [type_name(m) for m in members if _reading(m) in ("bare", "text")]
        raise ConstraintError(
            f"{type_name(hint)} mixes what is written as JSON ({', '.join(structures)}) with bare "
            f"text ({', '.join(texts)}): json_schema({type_name(hint)}) writes all of it as JSON, "
            "with texts in quotes; or put the alternatives into a model"
        )
    if "text" in readings:
        raise ConstraintError(
            f"{type_name(hint)} has no single reading, since any text is a str: "
            f"json_schema({type_name(hint)}) writes it as JSON, with texts in quotes"
        )
    numbers = [member for member in members if _reading(member) == "either"]
    numbers = [member for member in numbers if _base(member)[0] is not NoneType]
    parts: list[Constraint] = []
    if numbers:
        parts.append(json_schema(functools.reduce(operator.or_, numbers)))
    parts += [_bare(member) for member in members if member not in numbers]
    union = _OneOf(parts, type_name(hint))
    return _Typed(union, hint, checked=True) if annotated else union


def _single(hint: Any) -> Constraint | None:
    reading = _reading(hint)
    if reading == "text":
        return _text(hint)
    if reading == "bare" or _base(hint)[0] is NoneType:
        return _bare(hint)
    return json_schema(hint)


def _reading(hint: Any) -> Reading:
    base, _ = _base(hint)
    if base is str:
        return "text"
    if base in (int, float, NoneType):
        return "either"
    if base is bool or base in _MOMENTS or get_origin(base) is Literal or _is_enum(base):
        return "bare"
    return "json"


def _bare(hint: Any) -> Constraint:
    base, annotated = _base(hint)
    if base in _MOMENTS:
        return _Typed(regex(_MOMENTS[base]), hint, checked=annotated)
    if base is bool:
        chosen = choice([True, False])
    elif base is NoneType:
        chosen = choice([None])
    else:
        chosen = choice(base)
    chosen.name = type_name(hint)
    return _Typed(chosen, hint, checked=True) if annotated else chosen


def _text(hint: Any) -> Constraint | None:
    """A `str` with annotations: free text if they say nothing, else a length."""
    adapter = type_adapter(hint)
    if adapter.core_schema.keys() <= {"type", "metadata"} and adapter.core_schema["type"] == "str":
        return None
    schema = {k: v for k, v in adapter.json_schema().items() if k not in _HINTS}
    low, high = schema.pop("minLength", 0), schema.pop("maxLength", "")
    if schema != {"type": "string"}:
        raise ConstraintError(
            f"{type_name(hint)} as bare text: only the length of a str can be given "
            f"(this has {', '.join(sorted(schema.keys() - {'type'}))}); use regex(...), or "
            "json_schema(...) for a text in quotes"
        )
    return _Typed(regex(f"(?s:.{{{low},{high}}})"), hint, checked=True)


def _members(hint: Any) -> list[Any]:
    """The alternatives of a union, those of unions in it too; of another type itself."""
    base, _ = _base(hint)
    if not _is_union(base):
        return [hint]
    return [member for part in get_args(base) for member in _members(part)]


def _base(hint: Any) -> tuple[Any, bool]:
    """A type without its annotations and other names, and whether it had annotations."""
    annotated = False
    while True:
        if get_origin(hint) is Annotated:
            annotated = True
            hint = get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        elif hasattr(hint, "__value__") and not get_args(hint):
            hint = hint.__value__
        else:
            return (NoneType if hint is None else hint), annotated


def _is_union(base: Any) -> bool:
    return get_origin(base) in (Union, UnionType)


def _is_enum(base: Any) -> bool:
    return isinstance(base, type) and get_origin(base) is None and issubclass(base, Enum)


def _arguments(function: Callable[..., Any]) -> Any:
    """The keyword arguments of a call, as a `TypedDict`; those with a default may be missing."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", "function")
    try:
        signature = inspect.signature(function, eval_str=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConstraintError(f"the signature of {name} cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConstraintError(
                f"{name} cannot be called by keywords alone: its parameter {parameter} is "
                f"{parameter.kind.description}"
            )
        if parameter.annotation is parameter.empty:
            raise ConstraintError(f"the parameter {parameter.name!r} of {name} has no annotation")
        hint = parameter.annotation
        fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    return TypedDict(name, fields)  # type: ignore[operator]


class _Typed(Constraint):
    """Bare texts of a language, with values of a type.

    Args:
        language: Which texts.
        hint: The type.
        checked: Whether the type may refuse a text of the language.
    """

    def __init__(self, language: Constraint, hint: Any, *, checked: bool) -> None:
        self.language = language
        self.name = type_name(hint)
        self._adapter = type_adapter(hint)
        self._checked = checked

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        """The language's."""
        return self.language.compile(vocabulary)

    def parse(self, text: str) -> Any:
        """The value in the type.

        Raises:
            OutputValidationError: The type refuses it.
        """
        value = self.language.parse(text)
        try:
            if isinstance(value, str) and not isinstance(self.language, Choice | _OneOf):
                # As JSON, where also a strict date is written as a text.
                return self._adapter.validate_json(json.dumps(value))
            return self._adapter.validate_python(value)
        except ValueError as error:  # pydantic's ValidationError is one
            raise OutputValidationError(
                f"{self.name} refuses the output {shorten(text)!r}: {error}",
                text=text,
                finish_reason="stop",
            ) from error

    def check(self) -> Potential | None:
        """What the type refuses, if it may."""
        return _Parses(self) if self._checked else self.language.check()

    def value_key(self, text: str) -> Hashable:
        """The language's."""
        return self.language.value_key(text)


class _OneOf(Constraint):
    """Texts of any of several languages that share none.

    Raises:
        ConstraintError: A text of a choice is in another of the languages too.
    """

    def __init__(self, parts: Sequence[Constraint], name: str) -> None:
        self.parts = parts
        self.name = name
        for part in parts:
            texts = part.texts if isinstance(part, Choice) else {}
            for other in parts:
                shared = [t for t in texts if other is not part and accepts(other, t)]
                if shared:
                    raise ConstraintError(
                        f"{name} has no single reading: the text {shorten(shared[0])!r} may be "
                        f"{part.name} or {other.name}"
                    )

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        """Compile every part."""
        return _CompiledOneOf([part.compile(vocabulary) for part in self.parts])

    def check(self) -> Potential | None:
        """The checks of the part that a text belongs to."""
        return _Parses(self) if any(part.check() for part in self.parts) else None

    def parse(self, text: str) -> Any:
        """The value, as the part that the text belongs to sees it.

        Raises:
            OutputValidationError: That part refuses it, or it belongs to none.
        """
        return self._part_of(text).parse(text)

    def value_key(self, text: str) -> Hashable:
        """The key of the part that the text belongs to."""
        part = self._part_of(text)
        return self.parts.index(part), part.value_key(text)

    def _part_of(self, text: str) -> Constraint:
        for part in self.parts:
            if accepts(part, text):
                return part
        raise OutputValidationError(
            f"{shorten(text)!r} is not {self.name}", text=text, finish_reason="stop"
        )


class _CompiledOneOf:
    def __init__(self, parts: list[CompiledConstraint]) -> None:
        self.parts = parts

    def start(self) -> _OneOfState:
        return _OneOfState([part.start() for part in self.parts])

    def fill_masks(self, states: Sequence[_OneOfState], bitmask: np.ndarray) -> None:
        bitmask.fill(0)
        for i, part in enumerate(self.parts):
            rows = [row for row, state in enumerate(states) if state.states[i] is not None]
            if rows:
                own = np.empty((len(rows), bitmask.shape[1]), dtype=np.int32)
                part.fill_masks([states[row].states[i] for row in rows], own)
                bitmask[rows] |= own


class _OneOfState:
    """A state in each of the languages; None where the prefix belongs to none of its texts."""

    def __init__(self, states: list[ConstraintState | None]) -> None:
        self.states = states

    @property
    def accepting(self) -> bool:
        return any(s.accepting for s in self.states if s is not None)

    def fork(self) -> _OneOfState:
        return _OneOfState([s.fork() if s is not None else None for s in self.states])

    def advance(self, token: int) -> bool:
        self.states = [s if s is not None and s.advance(token) else None for s in self.states]
        return any(s is not None for s in self.states)

    def forced(self) -> list[int]:
        alive = [s for s in self.states if s is not None]
        return alive[0].forced() if len(alive) == 1 else []


class _Parses(Potential):
    """`1[the constraint's type accepts the text]`, asked of finished texts."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.name = f"{constraint.name} validates"

    def log_complete(self, completions: Sequence[Completion]) -> Sequence[float]:
        """0, or −inf where the type refuses."""
        return [self._log_indicator(c.text) for c in completions]

    def _log_indicator(self, text: str) -> float:
        try:
            self.constraint.parse(text)
        except OutputValidationError:
            return -math.inf
        return 0.0


# -- Outlines --------------------------------------------------------------------------------------


def _from_outlines(term: Any) -> Constraint | None:
    """The constraint of one of Outlines' terms, or of a genson builder; None for anything else.

    Neither library is imported: who has one of their objects has imported it.
    """
    genson: Any = sys.modules.get("genson")
    if genson is not None and isinstance(term, genson.SchemaBuilder):
        schema = {k: v for k, v in term.to_schema().items() if k != "$schema"}  # no dialect's URI
        return json_schema(schema)
    dsl: Any = sys.modules.get("outlines.types.dsl")
    if dsl is None or not isinstance(term, dsl.Term):
        return None
    if isinstance(term, dsl.CFG):
        return lark(term.definition)
    if isinstance(term, dsl.JsonSchema):
        if term.whitespace_pattern is not None:
            raise UnsupportedConstraintError(
                "whitespace_pattern of Outlines' JsonSchema is not supported: use "
                "guided_smc.json_schema(schema, whitespace=...)",
                keyword="whitespace_pattern",
            )
        return json_schema(term.schema)
    if isinstance(term, dsl.Choice):
        return choice(term.items)
    if isinstance(term, dsl.String):
        return choice([term.value])
    return regex(_pattern(term, dsl))


def _pattern(term: Any, dsl: Any) -> str:
    """The regular expression that a term of Outlines' DSL stands for."""
    if isinstance(term, dsl.String):
        return re.escape(term.value)
    if isinstance(term, dsl.Regex):
        return f"(?:{term.pattern})"
    if isinstance(term, dsl.Choice):
        return f"(?:{'|'.join(re.escape(text) for text in choice(term.items).texts)})"
    if isinstance(term, dsl.Sequence):
        return "".join(_pattern(part, dsl) for part in term.terms)
    if isinstance(term, dsl.Alternatives):
        return f"(?:{'|'.join(_pattern(part, dsl) for part in term.terms)})"
    counts: dict[Any, Callable[[Any], str]] = {
        dsl.KleeneStar: lambda t: "*",
        dsl.KleenePlus: lambda t: "+",
        dsl.Optional: lambda t: "?",
        dsl.QuantifyExact: lambda t: f"{{{t.count}}}",
        dsl.QuantifyMinimum: lambda t: f"{{{t.min_count},}}",
        dsl.QuantifyMaximum: lambda t: f"{{0,{t.max_count}}}",
        dsl.QuantifyBetween: lambda t: f"{{{t.min_count},{t.max_count}}}",
    }
    for kind, count in counts.items():
        if isinstance(term, kind):
            return f"(?:{_pattern(term.term, dsl)}){count(term)}"
    raise UnsupportedConstraintError(
        f"Outlines' {type(term).__name__} cannot stand inside a regular expression; say the whole "
        "with lark(...), which has %json for schemas",
        keyword=type(term).__name__,
    )
