"""`jsonschema`'s validators made exact: in numbers, patterns, formats and equality.

What was found valid is remembered, and what a check costs is counted: references that lead to the
same schemas again and again would make a short schema's check as long as anybody likes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from decimal import Decimal
from functools import cache
from typing import Any

import referencing
from jsonschema import Draft4Validator, ValidationError
from jsonschema.validators import extend

from guided_smc.errors import ConstraintError
from guided_smc.grammars.schema import formats
from guided_smc.grammars.schema.keywords import Node, Schema
from guided_smc.grammars.schema.regexes import found
from guided_smc.grammars.schema.values import is_multiple, is_whole, key_of

_MOST_VALID = 4096
"""Closed objects and arrays that are remembered as valid, so that what encloses them does not ask
again: nested references would be followed anew at every level."""

_MOST_FRAMES_OF_A_LOOKUP = 60

_DYNAMIC = ("$dynamicRef", "$recursiveRef")


class ExactValidators:
    """Judges values by any subschema of a schema.

    Args:
        schema: The schema.
        max_steps: References that are followed to check one value.

    Attributes:
        dynamic: Whether a subschema may mean something else where validation begins at it: it
            leads to a dynamic reference.
    """

    def __init__(self, schema: Schema, max_steps: int) -> None:
        self._schema = schema
        self._max_steps = max_steps
        registry: Any = referencing.Registry()
        self._registry = registry.with_resource(schema.base, schema.resource()).crawl()
        self._dialect = _exact_dialect(schema.dialect)
        self._validators: dict[int, Any] = {}
        # By the ids of a schema and a value; holds the value, so that its id stays.
        self._valid: dict[tuple[int, int], Any] = {}
        self.dynamic = any(keyword in node for node in schema.reached for keyword in _DYNAMIC)

    def holds(self, schema: Node, value: Any) -> bool:
        """Whether a value is valid against a subschema.

        Raises:
            ConstraintError: That takes more steps than the limits allow.
        """
        if isinstance(schema, bool):
            return schema
        self._begin()
        try:
            holds = bool(self._validator(schema).is_valid(value))
        except RecursionError:  # what encloses it is nested even deeper
            return False
        if holds:
            self.remember(schema, value)
        return holds

    def errors(self, schema: dict[str, Any], value: Any) -> list[ValidationError]:
        """Why a value is not valid against a subschema."""
        self._begin()
        try:
            return list(self._validator(schema).iter_errors(value))
        except RecursionError:
            return [ValidationError("is nested too deeply")]

    def remember(self, schema: dict[str, Any], value: Any) -> None:
        """Note that a closed value, which never changes, is valid against a subschema."""
        # Against a dynamic reference it may be valid here and not elsewhere.
        if isinstance(value, dict | list) and not self.dynamic:
            if len(self._valid) >= _MOST_VALID:
                self._valid.clear()
            self._valid[id(schema), id(value)] = value
            self._valid[id(self._schema.targets.get(id(schema), schema)), id(value)] = value

    def known_valid(self, reference: dict[str, Any], value: Any) -> bool:
        """Whether a value was found valid against a `$ref`, or against what it leads to."""
        target = self._schema.targets.get(id(reference), reference)
        return any((id(schema), id(value)) in self._valid for schema in (reference, target))

    def _begin(self) -> None:
        _steps_left.set([self._max_steps])
        _asked.set(self)

    def _validator(self, schema: dict[str, Any]) -> Any:
        validator = self._validators.get(id(schema))
        if validator is None:
            validator = self._dialect(
                {"$ref": self._schema.reference(schema)}, registry=self._registry
            )
            self._validators[id(schema)] = validator
        return validator


Errors = Iterator[ValidationError]


@cache
def _exact_dialect(dialect: Any) -> Any:
    """A validator class with numbers as `int` and `Decimal`, and patterns as they are meant."""
    whole = _is_int if dialect is Draft4Validator else _is_whole_number
    counted = {k: _counted(v) for k, v in dialect.VALIDATORS.items() if k in _COSTLY}
    return extend(
        dialect,
        validators={
            **counted,
            "$ref": _reference(dialect.VALIDATORS["$ref"]),
            "additionalProperties": _additional_properties,
            "const": _const,
            "dependencies": _dependencies,
            "enum": _enum,
            "format": _format,
            "multipleOf": _multiple_of,
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
            "uniqueItems": _unique_items,
        },
        type_checker=dialect.TYPE_CHECKER.redefine("integer", whole),
    )


_COSTLY = ("$ref", "$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems")
"""Keywords by which a short schema makes a long check: each may double it."""

_steps_left: ContextVar[list[int]] = ContextVar("steps_left")
_asked: ContextVar[ExactValidators] = ContextVar("asked")


def _count_step() -> None:
    """Raise where a check has taken too many steps."""
    left = _steps_left.get()
    left[0] -= 1
    if left[0] < 0:
        raise ConstraintError(
            "a value takes more steps to check than the limit allows (max_check_steps): its "
            "references lead to the same schemas again and again; simplify the schema, or "
            "raise its `limits`"
        )


def _counted(keyword: Any) -> Any:
    """A keyword whose uses are counted."""

    def count(validator: Any, value: Any, instance: Any, schema: Any) -> Errors:
        _count_step()
        yield from keyword(validator, value, instance, schema) or ()

    return count


def _reference(keyword: Any) -> Any:
    """A `$ref` that is counted, and not followed where its value was found valid before."""

    def follow(validator: Any, value: Any, instance: Any, schema: Any) -> Errors:
        _count_step()
        asked = _asked.get()
        if asked.known_valid(schema, instance):
            return
        if _is_deep():
            raise RecursionError
        valid = True
        for error in keyword(validator, value, instance, schema):
            valid = False
            yield error
        if valid:
            asked.remember(schema, instance)

    return follow


def _is_deep() -> bool:
    """Whether so many calls are open that looking up a reference might be one too many.

    The interpreter's own error there ends in a panic of the library that holds the references.
    """
    try:
        sys._getframe(sys.getrecursionlimit() - _MOST_FRAMES_OF_A_LOOKUP)
    except ValueError:
        return False
    return True


def _is_int(_: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_whole_number(_: Any, value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool) and is_whole(value)


def _error_unless(holds: bool, message: str) -> Errors:
    if not holds:
        yield ValidationError(message)


def _const(_: Any, const: Any, value: Any, __: Any) -> Errors:
    return _error_unless(key_of(const) == key_of(value), "is another constant")


def _enum(_: Any, values: list[Any], value: Any, __: Any) -> Errors:
    if isinstance(value, str):
        return _error_unless(value in values, "is not listed")
    key = key_of(value)
    return _error_unless(any(key_of(v) == key for v in values), "is not listed")


def _multiple_of(_: Any, of: Any, value: Any, __: Any) -> Errors:
    number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    return _error_unless(not number or is_multiple(value, of), "is no multiple")


def _unique_items(_: Any, unique: Any, value: Any, __: Any) -> Errors:
    counted = isinstance(value, list) and unique
    return _error_unless(
        not counted or len({key_of(v) for v in value}) == len(value), "has equal items"
    )


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Errors:
    return _error_unless(not isinstance(value, str) or found(pattern, value), "does not match")


def _format(_: Any, name: str, value: Any, __: Any) -> Errors:
    return _error_unless(formats.holds(name, value), f"is no {name}")


def _pattern_properties(validator: Any, patterns: Any, value: Any, _: Any) -> Errors:
    if isinstance(value, dict):
        for pattern, schema in patterns.items():
            for key, part in value.items():
                if found(pattern, key):
                    yield from validator.descend(part, schema, path=key, schema_path=pattern)


def _additional_properties(validator: Any, schema: Any, value: Any, parent: Any) -> Errors:
    if isinstance(value, dict):
        patterns = parent.get("patternProperties", ())
        for key, part in value.items():
            listed = key in parent.get("properties", ())
            if not listed and not any(found(pattern, key) for pattern in patterns):
                yield from validator.descend(part, schema, path=key)


def _dependencies(validator: Any, dependencies: Any, value: Any, _: Any) -> Errors:
    if isinstance(value, dict):
        for key, needed in dependencies.items():
            if key not in value:
                continue
            if isinstance(needed, dict | bool):
                yield from validator.descend(value, needed, schema_path=key)
            else:
                names = [needed] if isinstance(needed, str) else needed
                yield from _error_unless(all(n in value for n in names), "lacks a dependency")
