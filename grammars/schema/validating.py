"""The rest of JSON Schema: what a mask cannot say, checked in texts as they grow.

`jsonschema` judges, with numbers, patterns, formats and equality made exact. What is closed in an
unfinished text is held against every subschema that holds for it whatever else is still to come,
and against the alternatives of `anyOf` and `oneOf` until none is left; so a text that cannot
become valid dies there, and not at its end. The whole is checked when it ends. A repeated key ends
a text whatever the schema.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from typing import Any

import referencing
from jsonschema import Draft4Validator, ValidationError
from jsonschema.validators import extend

from guided_smc.errors import ConstraintError
from guided_smc.grammars.schema import formats
from guided_smc.grammars.schema.keywords import Node, Schema, types_of
from guided_smc.grammars.schema.reading import Frame, Reader
from guided_smc.grammars.schema.refusals import Refusal, why_invalid
from guided_smc.grammars.schema.regexes import found
from guided_smc.grammars.schema.values import is_multiple, is_whole, key_of
from guided_smc.potentials import Completion, Potential

_MOST_TEXTS = 2048
"""Texts whose readers are kept: a step's particles go on from those of the step before."""

_MOST_VALID = 4096
"""Closed objects and arrays that are remembered as valid, so that what encloses them does not ask
again: nested references would be followed anew at every level."""

_MOST_PLACES = 4096

_MOST_FRAMES_OF_A_LOOKUP = 60

_MOST_BRANCHES = 64
"""Alternatives of one object or array that are followed while it is open."""


@dataclass
class Place:
    """Where a value stands: the schemas that it has to satisfy.

    Attributes:
        schemas: As the parents give them.
        facts: These, and what they imply: the targets of their `$ref` and the parts of `allOf`.
        impossible: Whether one of them is `false`.
        loosened: Whether the mask is looser than one of them.
        unique: Whether items must differ.
        most: Properties at most.
        names: The `propertyNames`.
        groups: For each `anyOf` or `oneOf` the places that its alternatives make of this one;
            None before they are asked for.
        inside: The places inside that are known so far.
    """

    schemas: tuple[dict[str, Any], ...]
    facts: list[dict[str, Any]]
    impossible: bool
    loosened: bool
    unique: bool = False
    most: float = math.inf
    names: list[Node] = field(default_factory=list)
    groups: tuple[tuple[Place, ...], ...] | None = None
    inside: dict[str | int, Place] = field(default_factory=dict)


class Checker:
    """Judges the values of one schema; see `reading.Judge`.

    Args:
        schema: The schema.
        loosened: Its subschemas (by id) that the mask is looser than.
        max_steps: References that are followed to check one value.
    """

    def __init__(self, schema: Schema, loosened: set[int], max_steps: int) -> None:
        self._max_steps = max_steps
        self._schema = schema
        self._loosened = _with_parents(schema, loosened)
        registry: Any = referencing.Registry()
        self._registry = registry.with_resource(schema.base, schema.resource()).crawl()
        self._dialect = _exact_dialect(schema.dialect)
        self._validators: dict[int, Any] = {}
        self._places: dict[tuple[int, ...], Place] = {}
        self._valid: dict[
            tuple[int, int], Any
        ] = {}  # by ids; holds the value, so that its id stays
        # What a dynamic reference means depends on where validation began.
        self._whole_only = any(keyword in node for node in schema.reached for keyword in _DYNAMIC)
        self.root = self._place([schema.document])

    @property
    def needed(self) -> bool:
        """Whether the mask alone may let invalid values through."""
        return self.root.loosened

    def enter(self, place: Place, container: dict[str, Any] | list[Any]) -> Any:
        """The items so far, and the alternatives that are left."""
        kind = "object" if isinstance(container, dict) else "array"
        seen: frozenset[str] | None = None
        if place.unique and kind == "array":
            seen = frozenset()
        if place.groups is None:
            place.groups = tuple(self._groups(place))
        groups = tuple(tuple(b for b in group if _may_be(kind, b)) for group in place.groups)
        return seen, groups

    def key(self, frame: Frame[Place], key: str) -> bool:
        """Whether an object may have this key next."""
        place = frame.place
        if len(frame.container) >= place.most:
            return False
        if not all(self.holds(schema, key) for schema in place.names):
            return False
        return not self._inside(place, key).impossible

    def inside(self, frame: Frame[Place]) -> Place:
        """The place of the next value of an open object or array."""
        return self._inside(frame.place, _position(frame))

    def closed(self, place: Place, value: Any, *, thorough: bool = False) -> bool:
        """Whether a value may stand in its place (`thorough`: as if there were no mask)."""
        if place.impossible:
            return False
        if not thorough and not place.loosened:
            return True
        return all(
            self.holds(schema, value)
            for schema in place.schemas
            if thorough or id(schema) in self._loosened
        )

    def added(self, frame: Frame[Place], value: Any) -> bool:
        """Whether an open object or array can still be valid with its last value."""
        seen, groups = frame.memory
        if seen is not None:
            key = key_of(value)
            if key in seen:
                return False
            seen |= {key}
        if groups:
            at: str | int = frame.key
            if isinstance(frame.container, list):
                at = len(frame.container) - 1
            groups = tuple(
                tuple(b for b in group if self.closed(self._inside(b, at), value, thorough=True))
                for group in groups
            )
        frame.memory = seen, groups
        return all(groups)

    # -- places ------------------------------------------------------------------------------------

    def _place(self, schemas: Iterable[Node]) -> Place:
        """The one place for these schemas."""
        nodes = {id(s): s for s in schemas if s is not True}
        key = tuple(sorted(nodes))
        if key not in self._places:
            if len(self._places) >= _MOST_PLACES:  # by keys that patterns sort into ever new sets
                self._places.clear()
            self._places[key] = self._new_place(list(nodes.values()))
        return self._places[key]

    def _new_place(self, nodes: list[Node]) -> Place:
        schemas = tuple(node for node in nodes if isinstance(node, dict))
        facts: dict[int, dict[str, Any]] = {}
        impossible = len(schemas) < len(nodes)
        for schema in schemas:
            for fact in self._schema.facts(schema):
                impossible = impossible or fact.get("enum") == []
                facts[id(fact)] = fact
        place = Place(
            schemas=schemas,
            facts=list(facts.values()),
            impossible=impossible,
            loosened=any(id(schema) in self._loosened for schema in schemas),
        )
        if not self._whole_only:
            place.unique = any(fact.get("uniqueItems") is True for fact in place.facts)
            most = (fact.get("maxProperties", math.inf) for fact in place.facts)
            place.most = min(most, default=math.inf)
            place.names = [f["propertyNames"] for f in place.facts if "propertyNames" in f]
        return place

    def _groups(self, place: Place) -> Iterator[tuple[Place, ...]]:
        for fact in place.facts if place.loosened and not self._whole_only else ():
            for keyword in ("anyOf", "oneOf"):
                if 0 < len(fact.get(keyword, ())) <= _MOST_BRANCHES:
                    yield tuple(self._place([part]) for part in fact[keyword])

    def _inside(self, place: Place, at: str | int) -> Place:
        """The place of the value of a property, or of an item."""
        if self._whole_only or not place.facts:
            return self._place([])
        if at in place.inside:
            return place.inside[at]
        if isinstance(at, str):
            found_there = self._place(s for f in place.facts for s in _of_property(f, at))
            listed = any(at in fact.get("properties", ()) for fact in place.facts)
        else:
            found_there = self._place(s for f in place.facts for s in _of_item(f, at))
            listed = at < 256
        if listed:  # any other key may come only once
            place.inside[at] = found_there
        return found_there

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

    def remember(self, schema: dict[str, Any], value: Any) -> None:
        """Note that a closed value, which never changes, is valid against a subschema."""
        # Against a dynamic reference it may be valid here and not elsewhere.
        if isinstance(value, dict | list) and not self._whole_only:
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

    def errors(self, schema: dict[str, Any], value: Any) -> list[ValidationError]:
        """Why a value is not valid against a subschema."""
        self._begin()
        try:
            return list(self._validator(schema).iter_errors(value))
        except RecursionError:
            return [ValidationError("is nested too deeply")]

    def _validator(self, schema: dict[str, Any]) -> Any:
        validator = self._validators.get(id(schema))
        if validator is None:
            validator = self._dialect(
                {"$ref": self._schema.reference(schema)}, registry=self._registry
            )
            self._validators[id(schema)] = validator
        return validator


_DYNAMIC = ("$dynamicRef", "$recursiveRef")


def _position(frame: Frame[Place]) -> str | int:
    return frame.key if isinstance(frame.container, dict) else len(frame.container)


def _may_be(kind: str, place: Place) -> bool:
    return not place.impossible and all(kind in types_of(fact) for fact in place.facts)


def _of_property(fact: dict[str, Any], key: str) -> Iterator[Node]:
    """What a schema says directly of the value of a property."""
    known = False
    if key in fact.get("properties", ()):
        known = True
        yield fact["properties"][key]
    for pattern, schema in fact.get("patternProperties", {}).items():
        if found(pattern, key):
            known = True
            yield schema
    if not known and "additionalProperties" in fact:
        yield fact["additionalProperties"]


def _of_item(fact: dict[str, Any], index: int) -> Iterator[Node]:
    """What a schema says directly of an item."""
    items = fact.get("items", True)
    first, rest = fact.get("prefixItems", []), items
    if isinstance(items, list):
        first, rest = items, fact.get("additionalItems", True)
    yield first[index] if index < len(first) else rest


def _with_parents(schema: Schema, loosened: set[int]) -> set[int]:
    """The schemas in which something is loosened, or in what they hold or refer to."""
    users: dict[int, list[int]] = {}
    for node in schema.reached:
        parts: list[Any] = list(schema.children(node))
        if id(node) in schema.targets:
            parts.append(schema.targets[id(node)])
        for part in parts:
            users.setdefault(id(part), []).append(id(node))
    stack, found_so_far = list(loosened), set(loosened)
    while stack:
        for user in users.get(stack.pop(), ()):
            if user not in found_so_far:
                found_so_far.add(user)
                stack.append(user)
    return found_so_far


class Valid(Potential):
    """`1[the text is JSON that is valid, without repeated keys]`, also of unfinished texts.

    Args:
        checker: Of the schema.
        name: Of the constraint.
    """

    def __init__(self, checker: Checker, name: str) -> None:
        self.name = f"{name} is valid"
        self._checker = checker
        self._readers: OrderedDict[str, Reader[Place]] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._lock = threading.Lock()

    def log_prefix(self, completions: Sequence[Completion]) -> Sequence[float]:
        """0, or −inf where no further text can make this one valid."""
        return [0.0 if self._reader(c.text).alive else -math.inf for c in completions]

    def log_complete(self, completions: Sequence[Completion]) -> Sequence[float]:
        """0 for valid texts, −inf for others."""
        return [0.0 if self._reader(c.text).copy().finish() else -math.inf for c in completions]

    def why(self, text: str, *, finished: bool) -> Refusal | None:
        """Which value and keyword; None where the text is not refused."""
        return why_invalid(self._checker, text, finished=finished)

    def _reader(self, text: str) -> Reader[Place]:
        """The reader of a text, which goes on from the longest beginning that was read before."""
        with self._lock:
            reader = self._known(text)
        if reader is None or reader.length < len(text):
            reader = Reader(self._checker) if reader is None else reader.copy()
            reader.feed(text[reader.length :])
            with self._lock:
                self._keep(text, reader)
        return reader

    def _known(self, text: str) -> Reader[Place] | None:
        for length in range(len(text), 0, -1):
            if length in self._lengths and (beginning := text[:length]) in self._readers:
                self._readers.move_to_end(beginning)
                return self._readers[beginning]
        return None

    def _keep(self, text: str, reader: Reader[Place]) -> None:
        if text not in self._readers:
            self._lengths[len(text)] += 1
        self._readers[text] = reader
        if len(self._readers) > _MOST_TEXTS:
            oldest, _ = self._readers.popitem(last=False)
            self._lengths[len(oldest)] -= 1
            if not self._lengths[len(oldest)]:
                del self._lengths[len(oldest)]


# -- jsonschema, made exact --------------------------------------------------------------------

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
_asked: ContextVar[Checker] = ContextVar("asked")


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
        checker = _asked.get()
        if checker.known_valid(schema, instance):
            return
        if _is_deep():
            raise RecursionError
        valid = True
        for error in keyword(validator, value, instance, schema):
            valid = False
            yield error
        if valid:
            checker.remember(schema, instance)

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
