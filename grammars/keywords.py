"""What a JSON Schema asks for, keyword by keyword: enforced, harmless, or refused by name.

llguidance enforces most of JSON Schema exactly and says so when it does not; this module is
for the rest. It rewrites what has an exact equivalent that llguidance does enforce, refuses what
would be loosened, and finds the place in the schema that a message means. Only what the root
reaches counts: an unused definition may contain anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import referencing
import referencing.exceptions
from jsonschema import Draft3Validator, Draft202012Validator, FormatChecker, SchemaError
from jsonschema.validators import validator_for
from referencing.jsonschema import DRAFT202012, specification_with

from guided_smc.errors import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars import formats

Node = dict[str, Any] | bool

# fmt: off
_WITH_SCHEMA = (
    "not", "if", "then", "else", "contains", "propertyNames", "additionalProperties",
    "additionalItems", "items", "unevaluatedProperties", "unevaluatedItems", "allOf", "anyOf",
    "oneOf", "prefixItems",
)
_WITH_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

_REFUSED = (
    "not", "if", "uniqueItems", "contains", "propertyNames", "dependencies", "dependentRequired",
    "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef",
    "$recursiveRef", "contentEncoding", "contentMediaType", "contentSchema", "extends", "disallow",
    "divisibleBy",
)
# fmt: on
"""Keywords that constrain and that nothing here enforces."""

_ALLOWS_ALL: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
}
"""Values with which a keyword says nothing."""

_MODIFIERS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that say nothing without another one."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_JSON_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MOST_COMPARISONS = 50_000
"""Pairs of alternatives, and of properties in them, that are compared in one schema."""
_NO_FORMATS = FormatChecker(formats=())  # Python's `re` does not know every valid pattern
_EXACT = 2**53  # llguidance computes with float64


class Schema:
    """A JSON Schema, checked against its metaschema and made ready for llguidance.

    Args:
        document: The schema as plain JSON data; changed in place.
        closed: Whether objects that do not mention additional properties have none.

    Attributes:
        document: What llguidance is given: equivalent to the original where the rest of this
            package does not refuse it.
        unicode_escapes: Whether strings must be able to contain control characters.
        levels: How deep a recursive reader may go that follows each `$ref` once.

    Raises:
        UnsupportedConstraintError: A keyword or format that is reached cannot be enforced.
        ConstraintError: A `$ref` leads nowhere, or no finite value satisfies the schema.
    """

    def __init__(self, document: Node, *, closed: bool = False) -> None:
        self.document = document
        self._closed = closed
        self._paths = {id(v): path for path, v in _containers(document)}
        self._dialect = str(document.get("$schema", "")) if isinstance(document, dict) else ""
        self._legacy = re.search("draft-0[34567]", self._dialect) is not None
        self._check(document, "$")
        self._targets: dict[int, Node] = {}  # of `$ref`, by id of the node that has it
        self._comparisons = 0
        self.reached: list[dict[str, Any]] = []
        self._reach(document)
        if not self._has_finite_value():
            raise ConstraintError(
                "no JSON value satisfies the schema: it requires `false`, or itself without end",
                path="$",
            )
        pointers_into_alternatives = any(
            re.search("/(oneOf|anyOf)/", node["$ref"]) for node in self.reached if "$ref" in node
        )
        for node in self.reached:
            self._rewrite(node, keep_alternatives=pointers_into_alternatives)
        self.unicode_escapes = self._needs_unicode_escapes()
        targets = {id(target): target for target in self._targets.values()}
        self.levels = sum(depth(part) for part in (document, *targets.values()))

    def _check(self, schema: Node, at: str) -> None:
        """Hold a schema against the metaschema of the document's dialect."""
        try:
            metaschema: Any = validator_for(
                {"$schema": self._dialect}, default=Draft202012Validator
            )
        except ValueError as error:
            path = "$.$schema"
            raise ConstraintError(f"{path}: {error}: {self._dialect!r}", path=path) from error
        if metaschema is Draft3Validator:
            raise UnsupportedConstraintError(
                "$.$schema: draft 3 is not supported; say it in draft 4 or later",
                keyword="$schema",
                path="$.$schema",
            )
        try:
            metaschema.check_schema(schema, format_checker=_NO_FORMATS)
        except SchemaError as error:
            path = at + "".join(map(_step, error.absolute_path))
            message = shorten(error.message)
            raise ConstraintError(f"{path}: not valid JSON Schema: {message}", path=path) from None

    def path(self, node: Any, *keys: str | int) -> str:
        """JSON path of a part of the document, such as `$.properties.age`."""
        return self._paths.get(id(node), "$") + "".join(map(_step, keys))

    def places(self, keyword: str) -> Iterator[tuple[str, Any]]:
        """Path and value of a keyword wherever the root reaches it."""
        for node in self.reached:
            if keyword in node:
                yield self.path(node, keyword), node[keyword]

    def _reach(self, document: Node) -> None:
        """Find and check every subschema that the root reaches, and what each `$ref` means."""
        specification = specification_with(self._dialect, default=DRAFT202012)
        root = specification.create_resource(document)
        try:
            base = root.id() or ""
            resolver = referencing.Registry().with_resource(base, root).resolver(base)
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
            self._refuse(node)  # first: what its dialect does not know is not checked inside
            for child in _subschemas(node):
                try:
                    inside = resolver.in_subresource(specification.create_resource(child))
                except ValueError as error:
                    path = self.path(child)
                    raise ConstraintError(f"{path}: bad $id: {error}", path=path) from error
                stack.append((child, inside))
            if "$ref" in node:
                try:
                    found = resolver.lookup(node["$ref"])
                except (referencing.exceptions.Unresolvable, ValueError, AttributeError) as error:
                    raise self._bad_reference(node) from error
                if not isinstance(found.contents, dict | bool):
                    raise self._bad_reference(node)
                if not re.fullmatch(r"#(/(\$defs|definitions)/[^/]+)?", node["$ref"]):
                    # It may stand where the metaschema sees no schema, and so did not look.
                    self._check(found.contents, self.path(found.contents))
                self._targets[id(node)] = found.contents
                stack.append((found.contents, found.resolver))

    def _bad_reference(self, node: dict[str, Any]) -> ConstraintError:
        path, reference = self.path(node, "$ref"), str(node["$ref"])
        if reference.startswith("#"):
            return ConstraintError(
                f"{path}: {reference!r} leads to no schema in this document", path=path
            )
        return UnsupportedConstraintError(
            f"{path}: {reference!r} is outside this document, and nothing is fetched; put the "
            'schema under "$defs" and refer to it as "#/$defs/..."',
            keyword="$ref",
            path=path,
        )

    def _unsupported(self, node: dict[str, Any], keyword: str, why: str) -> ConstraintError:
        path = self.path(node, keyword)
        return UnsupportedConstraintError(f"{path}: {keyword!r} {why}", keyword=keyword, path=path)

    def _refuse(self, node: dict[str, Any]) -> None:
        """Raise for the first keyword that would be loosened; drop those that say nothing."""
        if not isinstance(node.get("items"), list):
            node.pop("additionalItems", None)  # says nothing without them
        if self._legacy and "prefixItems" in node:
            raise self._unsupported(node, "prefixItems", f"is not known to {self._dialect}")
        for keyword in _COUNTS:
            if keyword in node:
                node[keyword] = int(node[keyword])
        for keyword, other in _MODIFIERS.items():
            if other not in node:
                node.pop(keyword, None)
        if "if" in node and "then" not in node and "else" not in node:
            del node["if"]
        for keyword, harmless in _ALLOWS_ALL.items():
            if keyword in node and any(_equal(node[keyword], value) for value in harmless):
                del node[keyword]
        if "contentMediaType" in node and "json" not in node["contentMediaType"]:
            del node["contentMediaType"]  # an annotation: it names no structure of the text
        for keyword in _REFUSED:
            if keyword in node:
                raise self._unsupported(node, keyword, "is not supported: it cannot be enforced")
        types = _types(node)
        for keyword in _BOUNDS:
            bound = node.get(keyword)
            if bound is not None and abs(bound) > _EXACT and "integer" in types:
                raise self._unsupported(node, keyword, "is not supported beyond 2**53")
        for keyword in ("const", "enum"):
            if any(not _exact(number) for number in _numbers(node.get(keyword))):
                raise self._unsupported(
                    node, keyword, "is not supported with integers that float64 cannot hold"
                )
        self._refuse_format(node)
        self._check_min_properties(node)

    def _refuse_format(self, node: dict[str, Any]) -> None:
        name = node.get("format")
        known = formats.ENFORCED | formats.HINTS | set(formats.PATTERNS) | set(formats.BOUNDS)
        numeric = name in formats.BOUNDS or name in ("float", "double")
        if name is None or (name in known and not (numeric and "integer" not in _types(node))):
            return
        path = self.path(node, "format")
        raise UnsupportedConstraintError(
            f"{path}: the format {name!r} is not supported (supported: "
            f"{', '.join(sorted(known))}); a `pattern` may say the same",
            keyword="format",
            path=path,
        )

    def _check_min_properties(self, node: dict[str, Any]) -> None:
        """A key may be written twice, which counts once; so at least two must be told apart."""
        least = node.get("minProperties")
        if least is None:
            return
        if least <= len(set(node.get("required", ()))):
            del node["minProperties"]
        elif least > 1 and (
            node.get("additionalProperties") is not False or "patternProperties" in node
        ):
            raise self._unsupported(
                node,
                "minProperties",
                "above 1 is only supported where all properties are listed and "
                '"additionalProperties" is false',
            )

    def _has_finite_value(self) -> bool:
        """Whether the recursion of the schema can end (values and bounds are not looked at)."""
        finite: dict[int, bool] = {}

        def holds(schema: Any) -> bool:
            return schema if isinstance(schema, bool) else finite.get(id(schema), False)

        def ends(node: dict[str, Any]) -> bool:
            if id(node) in self._targets and not holds(self._targets[id(node)]):
                return False
            if not all(map(holds, node.get("allOf", ()))):
                return False
            if any(k in node and not any(map(holds, node[k])) for k in ("anyOf", "oneOf")):
                return False
            types = _types(node)
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

    def _rewrite(self, node: dict[str, Any], *, keep_alternatives: bool) -> None:
        """Say in words that llguidance enforces what it would loosen or refuse."""
        also: list[Node] = []
        if self._closed and "properties" in node:
            node.setdefault("additionalProperties", False)
        name = node.get("format")
        if name in formats.PATTERNS:
            also.append({"pattern": formats.PATTERNS[name]})
        elif name in formats.BOUNDS:
            low, high = formats.BOUNDS[name]
            also.append({"minimum": low, "maximum": high})
        if re.search(r"\\[sS]", node.get("pattern", "")):
            also.append({"pattern": formats.PORTABLE_SPACES})
        if name not in formats.ENFORCED:
            node.pop("format", None)
        options = node.get("oneOf")
        if options is not None and not keep_alternatives and self._exclusive(node, options):
            del node["oneOf"]
            also.append({"anyOf": options})
        if also:
            node["allOf"] = [*node.get("allOf", ()), *also]

    def _needs_unicode_escapes(self) -> bool:
        r"""Whether strings must be able to contain `\uXXXX`, for the sake of control characters.

        They are left out where they can be: with them the name of an additional property could
        be another spelling of one that is restricted, and so escape the restriction. But without
        them llguidance drops control characters from literals and patterns.
        """
        needed = [
            (node, keyword)
            for node in self.reached
            for keyword in ("const", "enum", "pattern", "patternProperties")
            if keyword in node and _has_control_characters(keyword, node[keyword])
        ]
        open_names = any(
            {"properties", "required", "patternProperties"} & node.keys()
            and node.get("additionalProperties") is not False
            for node in self.reached
        )
        if needed and open_names:
            raise self._unsupported(
                *needed[0],
                "is not supported with control characters, unless all objects of the schema "
                'have "additionalProperties": false',
            )
        return bool(needed)

    def _exclusive(self, node: dict[str, Any], options: list[Node]) -> bool:
        """Whether no value satisfies two of the alternatives, so that `oneOf` is `anyOf`."""
        around = self._facts({k: v for k, v in node.items() if k != "oneOf"}, node)
        facts = [around + self._facts(option) for option in options]
        return all(self._disjoint(a, b) for i, a in enumerate(facts) for b in facts[i + 1 :])

    def _facts(self, schema: Node, node: Node | None = None) -> list[dict[str, Any]]:
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
                if id(original) in self._targets:
                    if self._legacy:
                        facts.pop()  # before 2019-09, what stands beside a `$ref` says nothing
                    stack.append((self._targets[id(original)],) * 2)
                if not (self._legacy and id(original) in self._targets):
                    stack += [(s, s) for s in part.get("allOf", ())]
        return facts

    def _disjoint(self, a: list[dict[str, Any]], b: list[dict[str, Any]], depth: int = 4) -> bool:
        """Whether no value satisfies both conjunctions, as far as is easy to see."""
        types = frozenset.intersection(*(_types(f) for f in a), *(_types(f) for f in b))
        if not types:
            return True
        listed = [f["enum"] for f in (*a, *b) if "enum" in f]
        listed += [[f["const"]] for f in (*a, *b) if "const" in f]
        if listed and not set.intersection(*({_key(v) for v in values} for values in listed)):
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
                inside += self._facts(fact["properties"][name])
            elif "patternProperties" not in fact:
                closed = self._closed and "properties" in fact
                inside += self._facts(fact.get("additionalProperties", not closed))
        return inside


def _subschemas(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas directly inside one, but for those that are true or false."""
    parts: list[Any] = []
    for keyword in _WITH_SCHEMA:
        inside = node.get(keyword)
        parts += inside if isinstance(inside, list) else [inside]
    for keyword in _WITH_NAMED_SCHEMAS:
        parts += node.get(keyword, {}).values()
    yield from (part for part in parts if isinstance(part, dict))


def _containers(value: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    """Every array and object in JSON data with its JSON path."""
    stack = [(path, value)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict | list):
            yield path, value
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            stack += [(path + _step(k), v) for k, v in parts]


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


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if re.fullmatch(r"[\w$-]+", key) else f"[{json.dumps(key)}]"


def shorten(text: str, length: int = 200) -> str:
    """At most `length` characters, the middle left out."""
    if len(text) <= length:
        return text
    return f"{text[: length * 2 // 3]} ... {text[-length // 4 :]}"


def _types(node: dict[str, Any]) -> frozenset[str]:
    """JSON types that the node's `type` allows; whole numbers are `integer`."""
    said = node.get("type")
    if said is None:
        return _JSON_TYPES | {"integer"}
    types = frozenset([said] if isinstance(said, str) else said)
    return types | {"integer"} if "number" in types else types


def _has_control_characters(keyword: str, value: Any) -> bool:
    """Whether strings or patterns mention characters that JSON has no short escape for."""
    text = json.dumps(list(value) if keyword == "patternProperties" else value)
    if keyword in ("const", "enum"):
        return re.search(r"\\u00[01]|\\u007f|\x7f", text) is not None
    escapes = r"\\u00[01]|\\u007f|\x7f|\\\\([av0-7c]|x[01]|x7f|u00[01]|u007f|[xuU]\{)"
    return re.search(escapes, text, re.IGNORECASE) is not None


def _numbers(value: Any) -> Iterator[int | float]:
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _exact(number: int | float) -> bool:
    try:
        return not isinstance(number, int) or int(float(number)) == number
    except OverflowError:
        return False


def _key(value: Any) -> str:
    """Equal for JSON values that JSON Schema calls equal (1 and 1.0; not 1 and true)."""
    if isinstance(value, dict):
        return json.dumps({k: _key(v) for k, v in value.items()}, sort_keys=True)
    if isinstance(value, list):
        return json.dumps([_key(v) for v in value])
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


def _equal(a: Any, b: Any) -> bool:
    return _key(a) == _key(b)
