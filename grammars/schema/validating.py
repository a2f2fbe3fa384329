"""The rest of JSON Schema: what a mask cannot say, checked in texts as they grow.

What is closed in an unfinished text is held against every subschema that holds for it whatever else
is still to come, and against the alternatives of `anyOf` and `oneOf` until none is left; so a text
that cannot become valid dies there, and not at its end. The whole is checked when it ends. A
repeated key ends a text whatever the schema. `exact_validators` judge values.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from guided_smc.grammars.schema.exact_validators import ExactValidators
from guided_smc.grammars.schema.keywords import Node, Schema, types_of
from guided_smc.grammars.schema.reading import Frame, Reader
from guided_smc.grammars.schema.refusals import Refusal, why_invalid
from guided_smc.grammars.schema.regexes import found
from guided_smc.grammars.schema.values import key_of
from guided_smc.potentials import Completion, Potential

_MOST_TEXTS = 2048
"""Texts whose readers are kept: a step's particles go on from those of the step before."""

_MOST_PLACES = 4096

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

    Attributes:
        validators: Of its subschemas.
        root: The place of the whole value.
    """

    def __init__(self, schema: Schema, loosened: set[int], max_steps: int) -> None:
        self.validators = ExactValidators(schema, max_steps)
        self._schema = schema
        self._loosened = _with_parents(schema, loosened)
        self._places: dict[tuple[int, ...], Place] = {}
        # What a dynamic reference means depends on where validation began.
        self._whole_only = self.validators.dynamic
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
        if not all(self.validators.holds(schema, key) for schema in place.names):
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
            self.validators.holds(schema, value)
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
