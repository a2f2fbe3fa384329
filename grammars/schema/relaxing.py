"""A schema in words that llguidance enforces, as narrow as it can be and never too narrow.

llguidance enforces most of JSON Schema exactly. The document that it is given here is written
anew: in one dialect, with every `$ref` leading to a definition of its own, dates and times spelt
out as patterns, `oneOf` as `anyOf`, and without the keywords that it cannot enforce. So the
language is that of the schema or a larger one, and what was loosened is noted: by keyword and path
for the user, by schema for `validating`, which checks the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jsonschema import Draft4Validator

from guided_smc.errors import ConstraintError
from guided_smc.grammars.patterns import found_by
from guided_smc.grammars.schema import formats, numbers
from guided_smc.grammars.schema.keywords import Node, Schema, types_of
from guided_smc.grammars.schema.regexes import portable

_MOST_REMAINDERS = 20_000
"""That a mask counts for `multipleOf`; it takes a tenth of a second to compile so many."""

_EXACT = 2**53  # llguidance computes with float64
_BOUNDS = numbers.BOUNDS
_PLAIN = (
    *("type", "minLength", "maxLength", "minItems", "maxItems", "required"),
    *("minProperties", "maxProperties", "multipleOf"),
)

# fmt: off
_DROPPED = frozenset({
    "not", "if", "uniqueItems", "contains", "propertyNames", "dependencies", "dependentRequired",
    "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef",
    "$recursiveRef",
})
"""Keywords that llguidance cannot enforce."""

_HINTS = (
    (r"m(in|ax)Properties", (("minProperties", "maxProperties"),)),
    (r"patternProperty regexes", (("patternProperties",),)),
    (r"multipleOf", (("multipleOf",),)),
    (r"range|bound", (("multipleOf", *_BOUNDS),)),
    (r"circular references", (("$ref",), ("allOf",), ("oneOf", "anyOf"))),
    (r"regex|pattern|look|backref", (("pattern", "patternProperties"),)),
)
"""What llguidance says of a schema that it refuses, and the keywords that it may mean."""

_LAST_RESORTS = (
    ("multipleOf",), _BOUNDS, ("minProperties", "maxProperties"), ("pattern",),
    ("patternProperties",), ("format",), ("$ref",), ("allOf",), ("oneOf", "anyOf"),
    ("const", "enum"), ("minLength", "maxLength"), ("minItems", "maxItems"), ("items",),
    ("properties", "required", "additionalProperties"),
)
"""What is given up, one after the other, where the message is no help."""
# fmt: on

Attempt = Callable[["dict[str, Any] | bool"], "str | None"]
"""Compiles a document: None, or why llguidance refuses."""


@dataclass(frozen=True)
class Relaxed:
    """A keyword of a schema that the mask does not know.

    Attributes:
        keyword: Such as `uniqueItems`.
        path: Where, as a JSON path.
        enforced: Whether finished values are checked for it; if not, it is an annotation: an
            unknown format, or a keyword that constrains nothing in the schema's dialect.
    """

    keyword: str
    path: str
    enforced: bool = True


class Superset:
    """What llguidance is given of a schema.

    Args:
        schema: The schema; not changed.
        attempt: Tries to compile a document.

    Attributes:
        document: The document that compiles, or that fails for good.
        error: Why it does not compile: it is unsatisfiable, or beyond limits.
        relaxed: What is looser in it than in the schema, in the order of the paths.
        loosened: The schemas (by id) in which something is.
    """

    def __init__(self, schema: Schema, attempt: Attempt) -> None:
        self._schema = schema
        self._attempt = attempt
        self._given_up: dict[int, set[str]] = {}
        self._covers: dict[str, str | None] = {}
        self._recursive = _recursive(schema)
        self._too_many_remainders = _too_many_remainders(schema)
        while True:
            self._found: dict[Relaxed, None] = {}
            self.loosened: set[int] = set()
            self.document = self._translate_all()
            self.error = attempt(self.document)
            if self.error is None or is_final(self.error) or not self._give_up(self.error):
                break
        notes = [*self._found, *(Relaxed(k, p, enforced=False) for k, p in schema.unchecked)]
        self.relaxed = tuple(sorted(notes, key=lambda r: (r.path, r.keyword)))

    # -- what llguidance refuses -------------------------------------------------------------------

    def _give_up(self, error: str) -> bool:
        """Relax what an error means; False if nothing is left to relax."""
        for keywords in next((groups for hint, groups in _HINTS if re.search(hint, error)), ()):
            suspects = list(self._suspects(keywords))
            culprits = [(node, keyword) for node, keyword in suspects if self._fails(node, keyword)]
            if self._mark(culprits or suspects):
                return True
        return any(self._mark(list(self._suspects(keywords))) for keywords in _LAST_RESORTS)

    def _cover(self, pattern: str) -> str | None:
        """What the regular parts of a pattern allow, if llguidance can take that."""
        if pattern not in self._covers:
            try:
                cover = found_by(portable(pattern))
            except ConstraintError:
                cover = None
            if cover is not None and self._attempt({"type": "string", "pattern": cover}):
                cover = None
            self._covers[pattern] = cover
        return self._covers[pattern]

    def _suspects(self, keywords: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
        for node in self._schema.reached:
            if self._schema.legacy and "$ref" in node:
                continue
            for keyword in keywords:
                if keyword not in node or keyword in self._given_up.get(id(node), ()):
                    continue
                # A `$ref` is not given up itself, but what stands beside it.
                if keyword != "$ref" or node.keys() & _ASSERTIONS - {"$ref"}:
                    yield node, keyword

    def _fails(self, node: dict[str, Any], keyword: str) -> bool:
        """Whether a schema fails by one of its keywords alone, all inside it left out."""
        if keyword == "$ref":
            return self._is_circular(node)
        if keyword in ("allOf", "anyOf", "oneOf"):
            return any(isinstance(p, dict) and self._is_circular(p) for p in node[keyword])
        shallow = {k: v for k, v in node.items() if k == keyword or k in ("type", *_BOUNDS)}
        if keyword == "patternProperties":
            shallow[keyword] = dict.fromkeys(node[keyword], True)
            shallow["properties"] = dict.fromkeys(node.get("properties", ()), True)
        if keyword in ("minProperties", "maxProperties"):
            shallow["properties"] = dict.fromkeys(node.get("properties", ()), True)
            shallow["required"] = node.get("required", [])
            shallow["additionalProperties"] = node.get("additionalProperties", True) is not False
        return self._attempt(self._translate(shallow, original=node)) is not None

    def _mark(self, places: list[tuple[dict[str, Any], str]]) -> bool:
        for node, keyword in places:
            self._given_up.setdefault(id(node), set()).add(keyword)
        return bool(places)

    def _is_circular(self, node: dict[str, Any]) -> bool:
        return id(self._schema.targets.get(id(node))) in self._recursive

    # -- translation -------------------------------------------------------------------------------

    def _translate_all(self) -> dict[str, Any] | bool:
        self._names: dict[int, str] = {}
        self._definitions: dict[str, Any] = {}
        self._queue: list[tuple[str, Node]] = []
        root = self._translate(self._schema.document)
        while self._queue:
            name, node = self._queue.pop()
            self._definitions[name] = self._translate(node)
        if isinstance(root, dict) and self._definitions:
            root["$defs"] = self._definitions
        return root

    def _reference(self, target: Node) -> dict[str, Any] | bool:
        if isinstance(target, bool):
            return target
        if target is self._schema.document:
            return {"$ref": "#"}
        if id(target) not in self._names:
            self._names[id(target)] = name = f"d{len(self._names)}"
            self._queue.append((name, target))
        return {"$ref": f"#/$defs/{self._names[id(target)]}"}

    def _loosen(self, node: dict[str, Any], keyword: str) -> None:
        self.loosened.add(id(node))
        self._found[Relaxed(keyword, self._schema.path(node, keyword))] = None

    def _loosen_inside(self, value: Any) -> None:
        """Note that the mask knows nothing of the schemas in the value of a keyword."""
        stack, seen = [value], set()
        while stack:
            part = stack.pop()
            if id(part) in seen or not isinstance(part, dict | list):
                continue
            seen.add(id(part))
            if isinstance(part, dict):
                self.loosened.add(id(part))
                stack += [self._schema.targets.get(id(part)), *part.values()]
            else:
                stack += part

    def _translate(self, node: Node, original: Node | None = None) -> dict[str, Any] | bool:
        """A schema in llguidance's words (`original`: the one that a part was taken from)."""
        if isinstance(node, bool):
            return node
        source = node if original is None else original
        assert isinstance(source, dict)
        given_up = self._given_up.get(id(source), set()) if original is None else set()
        target = self._schema.targets.get(id(source)) if "$ref" in node else None
        if target is not None and (self._schema.legacy or "$ref" in given_up):
            if not self._schema.legacy:
                for keyword in node.keys() & _ASSERTIONS - {"$ref"}:
                    self._loosen(source, keyword)
                    self._loosen_inside(node[keyword])
            return self._reference(target)
        out: dict[str, Any] = {}
        also: list[Node | dict[str, Any]] = []
        # llguidance takes properties in the order of the text: an object's own come before those
        # that its alternatives mention.
        late = ("anyOf", "oneOf") if "properties" in node else ()
        if self._schema.dialect is Draft4Validator and "integer" in _as_list(node.get("type", ())):
            self.loosened.add(id(source))  # 1.0 is none there, but is read as 1
        for keyword in sorted(node, key=lambda name: name in late):
            value = node[keyword]
            if keyword in given_up:
                self._loosen(source, keyword)
                self._loosen_inside(value)
                if keyword == "pattern" and (cover := self._cover(value)) is not None:
                    out["pattern"] = cover
            elif keyword in _DROPPED:
                if not _says_nothing(node, keyword):
                    self._loosen(source, keyword)
            elif keyword == "$ref":
                assert target is not None
                reference = self._reference(target)
                if isinstance(reference, dict):
                    out.update(reference)
                else:
                    also.append(reference)
            elif keyword == "multipleOf" and value in self._too_many_remainders:
                self._loosen(source, keyword)
            elif keyword in _PLAIN:
                out[keyword] = float(value) if isinstance(value, Decimal) else value
            elif keyword in _BOUNDS:
                self._bound(source, node, keyword, out)
            elif keyword in ("const", "enum"):
                self._listed(source, keyword, value, out, also)
            elif keyword == "pattern":
                out["pattern"] = portable(value)
            elif keyword == "format":
                self._format(source, value, out, also)
            elif keyword in ("anyOf", "allOf", "prefixItems"):
                out[keyword] = [self._translate(part) for part in value]
            elif keyword == "oneOf":
                if original is None and not self._schema.exclusive(source, value):
                    self._loosen(source, keyword)
                options = {"anyOf": [self._translate(part) for part in value]}
                if "anyOf" in node:
                    also.append(options)
                else:
                    out.update(options)
            elif keyword == "properties":
                out[keyword] = {name: self._translate(part) for name, part in value.items()}
            elif keyword == "patternProperties":
                out[keyword] = {portable(p): self._translate(part) for p, part in value.items()}
            elif keyword == "additionalProperties":
                # Without them any name may be one that a pattern knows.
                out[keyword] = "patternProperties" in given_up or self._translate(value)
                if "patternProperties" in given_up:
                    self._loosen_inside(value)
            elif keyword == "items":
                if isinstance(value, list):
                    out["prefixItems"] = [self._translate(part) for part in value]
                else:
                    out["items"] = self._translate(value)
            elif keyword == "additionalItems":
                out["items"] = self._translate(value)
        self._at_least_and_most(node, out)
        self._decimals(source, out, also)
        if also:
            out["allOf"] = [*out.get("allOf", ()), *also]
        return out

    def _bound(
        self, source: dict[str, Any], node: dict[str, Any], keyword: str, out: dict[str, Any]
    ) -> None:
        value = node[keyword]
        if isinstance(value, bool):  # draft 4: whether the bound itself is excluded
            return
        if abs(value) > _EXACT and "integer" in types_of(source):
            self._loosen(source, keyword)
            return
        exclusive = "exclusive" + keyword[0].upper() + keyword[1:]
        name = exclusive if node.get(exclusive) is True else keyword
        out[name] = float(value) if isinstance(value, Decimal) else value

    def _listed(
        self,
        source: dict[str, Any],
        keyword: str,
        value: Any,
        out: dict[str, Any],
        also: list[Any],
    ) -> None:
        if all(_is_float(number) for number in _numbers(value)):
            out[keyword] = _with_floats(value)
            return
        self._loosen(source, keyword)
        values = value if keyword == "enum" else [value]
        exact = [v for v in values if all(map(_is_float, _numbers(v)))]
        types = sorted({_type_of(v) for v in values if not all(map(_is_float, _numbers(v)))})
        also.append({"anyOf": [{"enum": _with_floats(exact)}, {"type": types}]})

    def _format(
        self, source: dict[str, Any], name: str, out: dict[str, Any], also: list[Any]
    ) -> None:
        types = types_of(source)
        if name in formats.PATTERNS:
            also.append({"pattern": portable(formats.PATTERNS[name])})
        elif name in formats.BOUNDS:
            if "integer" in types:
                low, high = formats.BOUNDS[name]
                also.append({"minimum": low, "maximum": high})
        elif name in formats.ENFORCED:
            out["format"] = name
        elif name not in formats.HINTS:
            self._loosen(source, "format")

    def _decimals(self, source: dict[str, Any], out: dict[str, Any], also: list[Any]) -> None:
        """Numbers with a fraction, which llguidance would lose next to bounds with several."""
        said = {keyword: out[keyword] for keyword in numbers.NUMERIC if keyword in out}
        options = numbers.alternatives(said) if "number" in types_of(source) else [said]
        if options != [said]:
            for keyword in said:
                del out[keyword]
            also.append({"anyOf": options})

    def _at_least_and_most(self, node: dict[str, Any], out: dict[str, Any]) -> None:
        """Numbers of items that follow from what else was dropped."""
        if "contains" in node and isinstance(node["contains"], dict):
            least = node.get("minContains", 1)
            out["minItems"] = max(out.get("minItems", 0), least)
        items = node.get("items")
        if node.get("uniqueItems") and isinstance(items, dict) and "prefixItems" not in node:
            target = self._schema.targets.get(id(items), items)
            if isinstance(target, dict) and "enum" in target:
                most = len(target["enum"])
                out["maxItems"] = min(out.get("maxItems", most), most)


_ASSERTIONS = (
    frozenset({"$ref", "const", "enum", "pattern", "format", "anyOf", "allOf", "oneOf"})
    | frozenset({"prefixItems", "properties", "patternProperties", "additionalProperties"})
    | frozenset({"items", "additionalItems", *_PLAIN, *_BOUNDS})
    | _DROPPED
)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _says_nothing(node: dict[str, Any], keyword: str) -> bool:
    """Whether a keyword is there for its annotations alone."""
    if keyword == "if":
        return "then" not in node and "else" not in node
    return keyword in ("unevaluatedProperties", "unevaluatedItems") and node[keyword] in (True, {})


def is_final(error: str) -> bool:
    """Whether an error of llguidance cannot be helped by a looser schema."""
    return re.search("Unsatisfiable schema|too (big|large)|[lL]imit|fuel", error) is not None


def _recursive(schema: Schema) -> set[int]:
    """Targets of `$ref` (by id) that lead to themselves."""
    leads: dict[int, list[int]] = {}
    for node in schema.reached:
        parts: list[Any] = list(schema.children(node))
        if id(node) in schema.targets:
            parts.append(schema.targets[id(node)])
        leads[id(node)] = [id(part) for part in parts]
    found: set[int] = set()
    for start in {id(target) for target in schema.targets.values()}:
        stack, seen = list(leads.get(start, ())), set()
        while stack:
            at = stack.pop()
            if at == start:
                found.add(start)
                break
            if at not in seen:
                seen.add(at)
                stack += leads.get(at, ())
    return found


def _too_many_remainders(schema: Schema) -> set[int | Decimal]:
    """Values of `multipleOf` that would make too large an automaton, alone or with the others.

    It counts remainders, those of factors 2 and 5 by the last digits. Where a schema applies two
    of the values to one number, it is their least common multiple that counts.
    """
    values = {node["multipleOf"] for node in schema.reached if "multipleOf" in node}
    together, left_out = 1, set()
    for value in sorted(values):
        remainders = Fraction(value).numerator
        for factor in (2, 5):
            while remainders % factor == 0:
                remainders //= factor
        if math.lcm(together, remainders) > _MOST_REMAINDERS:
            left_out.add(value)
        else:
            together = math.lcm(together, remainders)
    return left_out


def _numbers(value: Any) -> Iterator[int | Decimal]:
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, int | Decimal) and not isinstance(value, bool):
            yield value


def _is_float(number: int | Decimal) -> bool:
    try:
        return isinstance(number, Decimal) or int(float(number)) == number
    except OverflowError:
        return False


def _type_of(value: Any) -> str:
    if isinstance(value, dict):
        return "object"
    return "array" if isinstance(value, list) else "integer"


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_floats(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_with_floats(v) for v in value]
    return float(value) if isinstance(value, Decimal) else value
