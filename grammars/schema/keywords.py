"""What a JSON Schema asks for, keyword by keyword.

A schema is held against the metaschema of its dialect, every `$ref` is followed, and what its
dialect does not know or what says nothing is dropped. Only what the root reaches counts: an unused
definition may contain anything. What remains is what `relaxing` puts into words that llguidance
enforces, and what `validating` checks where llguidance cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from math import inf
from typing import Any
from urllib.parse import quote

import referencing
import referencing.exceptions
from jsonschema import (
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
)
from referencing.jsonschema import specification_with

from guided_smc.errors import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars.schema import formats
from guided_smc.grammars.schema.metaschemas import dialect_of, flaw
from guided_smc.grammars.schema.regexes import PatternError, compiled
from guided_smc.grammars.schema.values import is_whole, key_of

Node = dict[str, Any] | bool

# fmt: off
_WITH_SCHEMA = (
    "not", "if", "then", "else", "contains", "propertyNames", "additionalProperties",
    "additionalItems", "items", "unevaluatedProperties", "unevaluatedItems", "allOf", "anyOf",
    "oneOf", "prefixItems",
)
_WITH_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "minContains", "maxContains",
)
_NOT_EVERYWHERE = frozenset({
    "const", "contains", "propertyNames", "if", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties", "unevaluatedItems", "prefixItems", "$dynamicRef", "$recursiveRef",
})
_UNCHECKED = (
    "contentEncoding", "contentMediaType", "contentSchema", "extends", "disallow", "divisibleBy",
)
# fmt: on
"""Keywords that some dialects do not know, and those that none of them lets constrain."""

_ALLOWS_ALL: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}),
}
"""Values with which a keyword says nothing."""

_MODIFIERS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that say nothing without another one."""

_JSON_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MOST_COMPARISONS = 50_000
"""Pairs of alternatives, and of properties in them, that are compared in one schema."""
_ANONYMOUS = "urn:guided-smc:schema"
"""What a document without a name of its own is called."""


class Schema:
    """A JSON Schema, checked against its metaschema, with all that its root reaches.

    Args:
        document: The schema as plain JSON data; changed in place.
        closed: Whether objects that do not mention additional properties have none.
        max_steps: Subschemas that may apply to one value, each counted as often as it is reached.

    Attributes:
        document: The schema without what says nothing, its numbers exact.
        dialect: The validator class of its draft.
        legacy: Whether a `$ref` hides what stands beside it (before 2019-09).
        base: The URI of the document.
        reached: Every object that is a schema and that the root reaches.
        targets: What each `$ref` leads to, by id of the schema that has it.
        unchecked: Keyword and path of what reads like a constraint and is none in this dialect.
        levels: How deep a recursive reader may go that follows each `$ref` once.

    Raises:
        UnsupportedConstraintError: Draft 3, or a `$ref` that leads out of the document.
        ConstraintError: Not a valid schema, a `$ref` leads nowhere, or no finite value satisfies
            the schema.
    """

    def __init__(self, document: Node, *, closed: bool = False, max_steps: float = inf) -> None:
        self.dialect, checked = dialect_of(document)
        self.legacy = self.dialect in (Draft4Validator, Draft6Validator, Draft7Validator)
        if not checked:
            self._check(document, "$")
        self.document = _with_exact_numbers(document)
        self._closed = closed
        places = list(_containers(self.document))
        self._paths = {id(value): path for value, path, _ in places}
        self._pointers = {id(value): pointer for value, _, pointer in places}
        self.targets: dict[int, Node] = {}
        self._comparisons = 0
        self._dropped: list[tuple[dict[str, Any], str, Any]] = []
        self.reached: list[dict[str, Any]] = []
        self.unchecked: list[tuple[str, str]] = []
        self._reach(self.document)
        self._refuse_loops(max_steps)
        if not self._has_finite_value():
            raise ConstraintError(
                "no JSON value satisfies the schema: it requires `false`, or itself without end",
                path="$",
            )
        targets = {id(target): target for target in self.targets.values()}
        self.levels = sum(depth(part) for part in (self.document, *targets.values()))

    def _check(self, schema: Node, at: str) -> None:
        """Hold a schema against the metaschema of the document's dialect."""
        found = flaw(self.dialect, schema)
        if found is not None:
            path = at + "".join(map(_step, found.absolute_path))
            message = shorten(found.message)
            raise ConstraintError(f"{path}: not valid JSON Schema: {message}", path=path)

    def path(self, node: Any, *keys: str | int) -> str:
        """JSON path of a part of the document, such as `$.properties.age`."""
        return self._paths.get(id(node), "$") + "".join(map(_step, keys))

    def reference(self, node: Any) -> str:
        """The absolute URI of a part of the document."""
        return f"{self.base}#{quote(self._pointers[id(node)])}"

    def places(self, keyword: str) -> Iterator[tuple[str, Any]]:
        """Path and value of a keyword wherever the root reaches it."""
        for node in self.reached:
            if keyword in node:
                yield self.path(node, keyword), node[keyword]

    def children(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The schemas directly inside one, but for those that are true or false."""
        if self.legacy and "$ref" in node:
            return
        parts: list[Any] = []
        for keyword in _WITH_SCHEMA:
            inside = node.get(keyword)
            parts += inside if isinstance(inside, list) else [inside]
        for keyword in _WITH_NAMED_SCHEMAS:
            inside = node.get(keyword)
            parts += inside.values() if isinstance(inside, dict) else []
        yield from (part for part in parts if isinstance(part, dict))

    def resource(self) -> referencing.Resource[Any]:
        """The document as `referencing` takes it."""
        return self._specification.create_resource(self.document)

    def _reach(self, document: Node) -> None:
        """Find every subschema that the root reaches, and what each `$ref` means."""
        naming = "$id" if "$id" in self.dialect.META_SCHEMA else "id"
        self._specification = specification = _careful(
            specification_with(self.dialect.META_SCHEMA[naming]), naming
        )
        root = self.resource()
        try:
            self.base = root.id() or _ANONYMOUS
            resolver = referencing.Registry().with_resource(self.base, root).resolver(self.base)
        except ValueError as error:
            raise ConstraintError(f"$: bad $id: {error}", path="$") from error
        stack = [(document, resolver)]
        seen: set[int] = set()
        while stack:
            node, resolver = stack.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            self.reached.append(node)
            self._clean(node)  # first: what its dialect does not know is not checked inside
            for child in self.children(node):
                try:
                    inside = resolver.in_subresource(specification.create_resource(child))
                except ValueError as error:
                    path = self.path(child)
                    raise ConstraintError(f"{path}: bad $id: {error}", path=path) from error
                stack.append((child, inside))
            if "$dynamicRef" in node:
                self._look_up(node, resolver, "$dynamicRef")  # it has to lead somewhere
            if "$ref" in node:
                found = self._look_up(node, resolver, "$ref")
                if not re.fullmatch(r"#(/(\$defs|definitions)/[^/]+)?", node["$ref"]):
                    # It may stand where the metaschema sees no schema, and so did not look.
                    self._check(found.contents, self.path(found.contents))
                self.targets[id(node)] = found.contents
                stack.append((found.contents, found.resolver))
        if self._dropped:
            self._rescue()

    def _look_up(self, node: dict[str, Any], resolver: Any, keyword: str) -> Any:
        """What the reference of a schema leads to, with a resolver for what is inside it."""
        unresolvable = (referencing.exceptions.Unresolvable, ValueError, AttributeError)
        try:
            found = resolver.lookup(node[keyword])
        except unresolvable:
            for owner, dropped, value in self._dropped:
                owner[dropped] = value
            try:
                found = resolver.lookup(node[keyword])
            except unresolvable as error:
                raise self._bad_reference(node, keyword) from error
            finally:
                for owner, dropped, _ in self._dropped:
                    del owner[dropped]
        if not isinstance(found.contents, dict | bool):
            raise self._bad_reference(node, keyword)
        return found

    def _rescue(self) -> None:
        """Move what a `$ref` leads to in a dropped keyword to the definitions."""
        gone = {id(part) for _, _, value in self._dropped for part, _, _ in _containers(value)}
        keyword = "definitions" if self.legacy else "$defs"
        for target in {id(target): target for target in self.targets.values()}.values():
            if id(target) not in gone:
                continue
            assert isinstance(self.document, dict)
            definitions = self.document.setdefault(keyword, {})
            name = f"dropped {len(definitions)}"
            definitions[name] = target
            for part, _, pointer in _containers(target):
                self._pointers[id(part)] = f"/{keyword}/{name}{pointer}"
        for node in self.reached:
            meant = self.targets.get(id(node))
            if isinstance(meant, dict) and (id(node) in gone or id(meant) in gone):
                node["$ref"] = self.reference(meant)

    def _bad_reference(self, node: dict[str, Any], keyword: str) -> ConstraintError:
        path, reference = self.path(node, keyword), node[keyword]
        if not isinstance(reference, str):
            return ConstraintError(f"{path}: a reference is a text, got {reference!r}", path=path)
        if reference.startswith("#"):
            return ConstraintError(
                f"{path}: {reference!r} leads to no schema in this document", path=path
            )
        return UnsupportedConstraintError(
            f"{path}: {reference!r} is outside this document, and nothing is fetched; put the "
            'schema under "$defs" and refer to it as "#/$defs/..."',
            keyword=keyword,
            path=path,
        )

    def _clean(self, node: dict[str, Any]) -> None:
        """Drop what says nothing, and note what only looks as if it said something."""
        node.pop("$schema", None)  # jsonschema would turn to its own validators at it
        if self.legacy and "$ref" in node:
            return  # the rest is hidden
        for keyword in _NOT_EVERYWHERE - self.dialect.VALIDATORS.keys():
            self._drop(node, keyword)
        if not isinstance(node.get("items"), list):
            self._drop(node, "additionalItems")  # says nothing without them
        for keyword in _COUNTS:
            if keyword in node:
                node[keyword] = int(node[keyword])
        for keyword, other in _MODIFIERS.items():
            if other not in node:
                self._drop(node, keyword)
        for keyword, harmless in _ALLOWS_ALL.items():
            if keyword in node and any(_equal(node[keyword], value) for value in harmless):
                self._drop(node, keyword)
        if node.get("minProperties", 1) <= len(set(node.get("required", ()))):
            node.pop("minProperties", None)
        if self._closed and "properties" in node:
            node.setdefault("additionalProperties", False)
        if "format" in node and not formats.is_known(node["format"]):
            self.unchecked.append(("format", self.path(node, "format")))
            del node["format"]
        for keyword in _UNCHECKED:
            if keyword in node:
                if keyword != "contentMediaType" or "json" in str(node[keyword]):
                    self.unchecked.append((keyword, self.path(node, keyword)))
                self._drop(node, keyword)
        for keyword in ("pattern", "patternProperties"):
            value = node.get(keyword, ())
            for pattern in [value] if isinstance(value, str) else value:
                self._check_pattern(pattern, self.path(node, keyword))

    def _drop(self, node: dict[str, Any], keyword: str) -> None:
        """Take a keyword away; a `$ref` may still lead into it."""
        if keyword in node:
            value = node.pop(keyword)
            if isinstance(value, dict | list):
                self._dropped.append((node, keyword, value))

    def _check_pattern(self, pattern: str, path: str) -> None:
        try:
            compiled(pattern)
        except PatternError as error:
            raise ConstraintError(
                f"{path}: {shorten(pattern)!r} is not a regular expression: {error}", path=path
            ) from error

    def _refuse_loops(self, max_steps: float) -> None:
        """Refuse a schema that applies itself to the same value, or too many to one."""
        applied: dict[int, list[dict[str, Any]]] = {}
        for node in self.reached:
            target = self.targets.get(id(node))
            parts: list[Any] = [] if target is None else [target]
            if target is None or not self.legacy:
                parts += [node.get(keyword) for keyword in ("not", "if", "then", "else")]
                for keyword in ("allOf", "anyOf", "oneOf"):
                    parts += node.get(keyword, ())
            applied[id(node)] = [part for part in parts if isinstance(part, dict)]
        done: dict[int, int] = {}  # how many apply, itself included
        for start in self.reached:
            trail: list[tuple[dict[str, Any], Iterator[dict[str, Any]]]] = []
            trail.append((start, iter(applied[id(start)])))
            open_: set[int] = {id(start)}
            while trail:
                node, parts_left = trail[-1]
                part = next(parts_left, None)
                if part is None:
                    trail.pop()
                    open_.discard(id(node))
                    done[id(node)] = 1 + sum(done[id(p)] for p in applied[id(node)])
                    if done[id(node)] > max_steps:
                        path = self.path(node)
                        raise ConstraintError(
                            f"{path}: more than {max_steps} subschemas apply to one value, since "
                            "references lead to the same ones again and again; simplify the "
                            "schema",
                            path=path,
                            limit="max_check_steps",
                        )
                elif id(part) in open_:
                    path = self.path(part)
                    raise ConstraintError(
                        f"{path}: the schema applies itself to the same value without end",
                        path=path,
                    )
                elif id(part) not in done:
                    open_.add(id(part))
                    trail.append((part, iter(applied[id(part)])))

    def _has_finite_value(self) -> bool:
        """Whether the recursion of the schema can end (values and bounds are not looked at)."""
        finite: dict[int, bool] = {}

        def holds(schema: Any) -> bool:
            return schema if isinstance(schema, bool) else finite.get(id(schema), False)

        def ends(node: dict[str, Any]) -> bool:
            if self.legacy and id(node) in self.targets:
                return holds(self.targets[id(node)])
            if id(node) in self.targets and not holds(self.targets[id(node)]):
                return False
            if not all(map(holds, node.get("allOf", ()))):
                return False
            if any(k in node and not any(map(holds, node[k])) for k in ("anyOf", "oneOf")):
                return False
            types = types_of(node)
            if "const" in node or "enum" in node or types - {"object", "array"}:
                return True
            if "object" in types:
                named, rest = node.get("properties", {}), node.get("additionalProperties", True)
                if all(holds(named.get(name, rest)) for name in node.get("required", ())):
                    return True
            if "array" in types:
                tuple_form = node.get("items") if isinstance(node.get("items"), list) else None
                first = tuple_form or node.get("prefixItems", [])
                rest = node.get("additionalItems" if tuple_form else "items", True)
                least = node.get("minItems", 0)
                return all(map(holds, first[:least])) and (least <= len(first) or holds(rest))
            return False

        changed = True
        while changed:
            changed = False
            for node in reversed(self.reached):
                if not finite.get(id(node)) and ends(node):
                    finite[id(node)] = changed = True
        return holds(self.document)

    def exclusive(self, node: dict[str, Any], options: list[Node]) -> bool:
        """Whether no value satisfies two of the alternatives, so that `oneOf` is `anyOf`."""
        around = self.facts({k: v for k, v in node.items() if k != "oneOf"}, node)
        facts = [around + self.facts(option) for option in options]
        return all(self._disjoint(a, b) for i, a in enumerate(facts) for b in facts[i + 1 :])

    def facts(self, schema: Node, node: Node | None = None) -> list[dict[str, Any]]:
        """The schemas that all hold where this one does: itself, its `$ref` and `allOf`."""
        facts: list[dict[str, Any]] = []
        stack, seen = [(schema, node or schema)], set()
        while stack:
            part, original = stack.pop()
            if isinstance(part, bool):
                facts += [] if part else [{"enum": []}]
            elif id(original) not in seen:
                seen.add(id(original))
                facts.append(part)
                if id(original) in self.targets:
                    if self.legacy:
                        facts.pop()  # before 2019-09, what stands beside a `$ref` says nothing
                    stack.append((self.targets[id(original)],) * 2)
                if not (self.legacy and id(original) in self.targets):
                    stack += [(s, s) for s in part.get("allOf", ())]
        return facts

    def _disjoint(self, a: list[dict[str, Any]], b: list[dict[str, Any]], depth: int = 4) -> bool:
        """Whether no value satisfies both conjunctions, as far as is easy to see."""
        types = frozenset.intersection(*(types_of(f) for f in a), *(types_of(f) for f in b))
        if not types:
            return True
        listed = [f["enum"] for f in (*a, *b) if "enum" in f]
        listed += [[f["const"]] for f in (*a, *b) if "const" in f]
        if listed and not set.intersection(*({key_of(v) for v in values} for values in listed)):
            return True
        self._comparisons += 1
        if types != {"object"} or not depth or self._comparisons > _MOST_COMPARISONS:
            return False
        required = {name for f in (*a, *b) for name in f.get("required", ())}
        return any(
            self._disjoint(self._property(a, n), self._property(b, n), depth - 1) for n in required
        )

    def _property(self, facts: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        """What holds for the value of a property of an object for which `facts` hold."""
        inside: list[dict[str, Any]] = [{}]
        for fact in facts:
            if name in fact.get("properties", {}):
                inside += self.facts(fact["properties"][name])
            elif "patternProperties" not in fact:
                closed = self._closed and "properties" in fact
                inside += self.facts(fact.get("additionalProperties", not closed))
        return inside


def _careful(
    specification: referencing.Specification[Any], naming: str
) -> referencing.Specification[Any]:
    """The same, which does not take the schema of a property called `id` or `$id` for a name."""

    def id_of(contents: Any) -> str | None:
        if isinstance(contents, dict) and not isinstance(contents.get(naming, ""), str):
            return None
        return specification.id_of(contents)

    make: Any = referencing.Specification  # its annotations do not show what it takes
    careful: referencing.Specification[Any] = make(
        name=specification.name,
        id_of=id_of,
        subresources_of=specification.subresources_of,
        maybe_in_subresource=specification.maybe_in_subresource,
        anchors_in=lambda _, contents: specification.anchors_in(contents),
    )
    return careful


def _with_exact_numbers(value: Any) -> Any:
    """The same data; each float an `int`, or the `Decimal` that it is written as."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            value[key] = _with_exact_numbers(part)
    elif isinstance(value, float):
        number = Decimal(repr(value))
        return int(number) if abs(value) < 1e300 and is_whole(number) else number
    return value


def _containers(value: Any) -> Iterator[tuple[Any, str, str]]:
    """Every array and object in JSON data with its JSON path and its JSON pointer."""
    stack = [(value, "$", "")]
    while stack:
        value, path, pointer = stack.pop()
        if isinstance(value, dict | list):
            yield value, path, pointer
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                step = str(key).replace("~", "~0").replace("/", "~1")
                stack.append((part, path + _step(key), f"{pointer}/{step}"))


def depth(value: Any) -> int:
    """How deep arrays and objects are nested in JSON data."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        value, level = stack.pop()
        if isinstance(value, dict | list | tuple):
            deepest = max(deepest, level)
            parts = value.values() if isinstance(value, dict) else value
            stack += [(part, level + 1) for part in parts]
    return deepest


def json_path(steps: Iterable[str | int]) -> str:
    """The JSON path that keys and indices make, from the root."""
    return "$" + "".join(map(_step, steps))


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if re.fullmatch(r"[\w$-]+", key) else f"[{json.dumps(key)}]"


def shorten(text: str, length: int = 200) -> str:
    """At most `length` characters, the middle left out."""
    if len(text) <= length:
        return text
    return f"{text[: length * 2 // 3]} ... {text[-length // 4 :]}"


def types_of(node: dict[str, Any]) -> frozenset[str]:
    """JSON types that the node's `type` allows; whole numbers are `integer`."""
    said = node.get("type")
    if said is None:
        return _JSON_TYPES | {"integer"}
    types = frozenset([said] if isinstance(said, str) else said)
    return types | {"integer"} if "number" in types else types


def _equal(a: Any, b: Any) -> bool:
    return key_of(a) == key_of(b)
