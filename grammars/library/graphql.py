"""GraphQL queries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from guided_smc.errors import ConstraintError
from guided_smc.grammars.library.base import (
    Ready,
    check_mapping,
    check_names,
    check_one_of,
    either,
    listed,
    literal,
    source,
)
from guided_smc.grammars.matching import Limits
from guided_smc.grammars.schema.keywords import shorten

Operation = Literal["query", "mutation"]

_SCALARS = {
    "Int": "INT_32",
    "Float": "INT_32 | FLOAT",
    "String": "STRING",
    "Boolean": '"true" | "false"',
    "ID": "STRING | INT_32",
}
_NAME = "[_A-Za-z][_0-9A-Za-z]*"
_RULE = "is made of ASCII letters, digits and _, and begins with no digit"


@listed(
    accepted=(
        "{ hero { name } }",
        "query Hero($id: ID!, $n: Int = 3) {\n  hero(id: $id) {\n    ...on Droid { name }\n  }\n}",
        'mutation { add(item: {name: "a", tags: [RED, 1.5e3, null]}) @include(if: $x) { id } }',
        "{ a: b(c: true), d } fragment F on T { e ...F }",
    ),
    refused=("", "{}", "{ hero { } }", "query", "{ a(b) }", "{ a(b: 01) }", "queryA { b }", "{ a"),
)
def graphql_query(
    types: Mapping[str, Any] | None = None,
    *,
    operation: Operation = "query",
    limits: Limits | None = None,
) -> Ready:
    """One GraphQL operation; with the types of a schema, one that is valid for it.

    Dialect: executable documents of the GraphQL specification of October 2021: one operation, and
    behind it fragments. Between tokens a space, or a newline and up to 40 spaces, each also behind
    a comma. Left out: several operations, block strings, comments. Not checked without types:
    whether fields, variables and fragments exist.

    With types the operation has literal arguments, in the order in which they were given, and no
    variables, directives or fragments: each member is then valid for the schema, but for fields
    that are there twice with different arguments under one name.

    Args:
        types: The schema: object types as mappings from fields to types, written as in GraphQL
            (`"[Character!]!"`), or to pairs of a type and a mapping of arguments to types; enum
            types as lists of names; other scalars as None (not for arguments). The roots are
            called `Query` and `Mutation`.
        operation: Which root a query with types begins at.
        limits: What the grammar may cost; it grows with the number of fields.

    Returns:
        A constraint whose values are the texts.

    Raises:
        ConstraintError: The types have no such root, refer to one that is not there, or have a
            name that GraphQL does not allow.
    """
    check_one_of(operation, ("query", "mutation"), "operation")
    rules = [source("graphql_terminals")]
    if types is None:
        if operation != "query":
            raise ConstraintError("operation belongs to types: without them any may be written")
        return Ready("".join([source("graphql"), *rules]), "graphql_query", limits=limits)
    schema = _Schema(check_mapping(types, "types"))
    root = operation.capitalize()
    if root not in schema.objects:
        raise ConstraintError(f"the types have no object {root!r}, where a {operation} begins")
    head = f"{literal(operation)} [SEPARATOR NAME] [SEPARATOR]"
    if operation == "query":
        head = f"[{head}]"
    rules.append(f"start: {head} {schema.objects[root]}\n")
    rules.append('alias: NAME ":" [" "]\nINT_32: /-?(0|[1-9][0-9]{0,8})/\n')
    return Ready("".join([*rules, *schema.rules]), "graphql_query", limits=limits)


@dataclass
class _Schema:
    """Rules for the selections of each object type.

    Attributes:
        types: As they were given.
        objects: The rule of each object type.
        rules: Their text.
    """

    types: Mapping[str, Any]
    objects: dict[str, str] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in check_names(self.types, "types", _NAME, _RULE):
            if name in _SCALARS:
                raise ConstraintError(f"{name!r} is built in: leave it out of the types")
            if isinstance(self.types[name], Mapping):
                self.objects[name] = f"selections_{len(self.objects)}"
            elif self.types[name] is not None:
                values = check_names(self.types[name], f"values of {name}", _NAME, _RULE)
                if {"true", "false", "null"} & set(values):
                    raise ConstraintError(f"values of {name}: true, false and null are none")
        for name, rule in self.objects.items():
            self._object(name, rule)

    def _object(self, name: str, rule: str) -> None:
        fields = check_names(self.types[name], f"fields of {name}", _NAME, _RULE)
        chosen = ['"__typename"']
        for i, field_name in enumerate(fields):
            given: Any = self.types[name][field_name]
            arguments: Any = {}
            if isinstance(given, tuple) and len(given) == 2:
                given, arguments = given
            where = f"{name}.{field_name}"
            base = self._base(given, where)
            parts = [literal(field_name), self._arguments(arguments, f"{rule}_{i}", where)]
            if base in self.objects:
                parts.append(f"[SEPARATOR] {self.objects[base]}")
            chosen.append(" ".join(parts))
        self.rules.append(
            f'{rule}: "{{" [SEPARATOR] {rule}_of (SEPARATOR {rule}_of)* [SEPARATOR] "}}"\n'
            f"{rule}_of: [alias] ({' | '.join(chosen)})\n"
        )

    def _base(self, given: Any, where: str) -> str:
        """The type's name without lists and exclamation marks."""
        base = re.sub(r"[\[\]!]", "", given) if isinstance(given, str) else ""
        wrapped = re.fullmatch(rf"(\[)*{_NAME}(!?\])*!?", given) if base else None
        if wrapped is None or given.count("[") != given.count("]"):
            raise ConstraintError(
                f"{where} has the type {shorten(repr(given))}: write it as GraphQL does, such as "
                "'String!' or '[Character]'"
            )
        if base not in _SCALARS and base not in self.types:
            raise ConstraintError(
                f"{where} has the type {base!r}, which is not among the types: add its fields, "
                "its values, or None for a scalar"
            )
        return base

    def _arguments(self, arguments: Any, rule: str, where: str) -> str:
        """Rules for arguments in their order, of which those with `!` have to be there."""
        given = check_mapping(arguments, f"arguments of {where}")
        if not given:
            return ""
        names = check_names(given, f"arguments of {where}", _NAME, _RULE)
        needed = [name for name in names if str(given[name]).endswith("!")]
        for i in reversed(range(len(names))):
            name = names[i]
            value = self._value(given[name], f"{where}({name})")
            self.rules.append(f'{rule}_{i}: {literal(name)} ":" [" "] ({value})\n')
            last = i == len(names) - 1
            more = "" if last else f" {rule}_more_{i + 1}"
            skipped = '""' if last else f"{rule}_more_{i + 1}"
            later = "" if last else f"{rule}_from_{i + 1}"
            optional = name not in needed
            self.rules.append(
                f"{rule}_more_{i}: SEPARATOR {rule}_{i}{more}"
                f"{f' | {skipped}' if optional else ''}\n"
                f"{rule}_from_{i}: {rule}_{i}{more}{f' | {later}' if optional and later else ''}\n"
            )
        written = f'"(" [SEPARATOR] {rule}_from_0 [SEPARATOR] ")"'
        return written if needed else f"[{written}]"

    def _value(self, given: str, where: str) -> str:
        """A literal of an input type."""
        base = self._base(given, where)
        if base in self.objects or self.types.get(base, ()) is None:
            raise ConstraintError(
                f"{where} has the type {base!r}; arguments are of the built-in scalars, of enum "
                "types, or lists of them"
            )
        inner = given.removesuffix("!")
        null = "" if given.endswith("!") else ' | "null"'
        if inner.startswith("["):
            item = f"({self._value(inner[1:-1], where)})"
            many = f"{item} (SEPARATOR {item})* [SEPARATOR]"
            return f'"[" [SEPARATOR] [{many}] "]"{null}'
        own = either(self.types[base]) if base in self.types else _SCALARS[base]
        return own + null
