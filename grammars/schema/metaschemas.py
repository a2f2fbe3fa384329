"""Which dialect of JSON Schema a document is in, and whether it is valid there.

The official metaschemas of the newer dialects are put together from vocabularies by dynamic
references, which cost more to follow than all else that compiling a schema takes. Here each
dialect's is one plain schema, where every reference is written out but those to the whole: that
takes a third of the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema import (
    Draft3Validator,
    Draft4Validator,
    Draft7Validator,
    Draft202012Validator,
    FormatChecker,
    SchemaError,
)
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY

from guided_smc.errors import ConstraintError, UnsupportedConstraintError

_NO_FORMATS = FormatChecker(formats=())  # Python's `re` does not know every valid pattern

_DEFINITION = re.compile(r".*#/(?:\$defs|definitions)/(\w+)")
_TO_THE_WHOLE = ("$dynamicRef", "$recursiveRef")


def flaw(dialect: Any, document: Any) -> SchemaError | None:
    """What is wrong with a document, as `jsonschema` tells it; None if it is a valid schema.

    Args:
        dialect: A validator class of `jsonschema`.
        document: JSON data.
    """
    if _flat(dialect).is_valid(document):
        return None
    try:  # for the official words; should it find nothing, it is right
        dialect.check_schema(document, format_checker=_NO_FORMATS)
    except SchemaError as error:
        return error
    return None


def dialect_of(document: Any) -> tuple[Any, bool]:
    """The validator class of a document's draft: the one it names, or else the newest that fits.

    Returns it, and whether the document was held against its metaschema already, and is valid.

    Raises:
        UnsupportedConstraintError: It names draft 3.
        ConstraintError: It names an unknown one.
    """
    named = str(document.get("$schema", "")) if isinstance(document, dict) else ""
    if not named:
        for dialect in (Draft202012Validator, Draft7Validator, Draft4Validator):
            if flaw(dialect, document) is None:
                return dialect, True
        return Draft202012Validator, False
    try:
        found: Any = validator_for({"$schema": named}, default=Draft202012Validator)
    except ValueError as error:
        path = "$.$schema"
        raise ConstraintError(f"{path}: {error}: {named!r}", path=path) from error
    if found is Draft3Validator:
        raise UnsupportedConstraintError(
            "$.$schema: draft 3 is not supported; say it in draft 4 or later",
            keyword="$schema",
            path="$.$schema",
        )
    return found, False


@cache
def _flat(dialect: Any) -> Any:
    """A validator against the metaschema in one piece."""
    parts = list(_vocabularies(dialect.META_SCHEMA))
    definitions: dict[str, Any] = {}
    for part in parts:
        definitions |= {**part.get("definitions", {}), **part.get("$defs", {})}

    def written_out(node: Any) -> Any:
        if isinstance(node, list):
            return [written_out(part) for part in node]
        if not isinstance(node, dict):
            return node
        if any(keyword in node for keyword in _TO_THE_WHOLE):
            return {"$ref": "#"}
        out = {key: written_out(part) for key, part in node.items()}
        named = _DEFINITION.fullmatch(node["$ref"]) if isinstance(node.get("$ref"), str) else None
        if named is not None:
            del out["$ref"]
            out = {**written_out(definitions[named[1]]), **out}
        return out

    properties: dict[str, Any] = {}
    for part in parts:
        # Not `written_out(properties)`: there, `$ref` is the name of a property.
        properties |= {name: written_out(value) for name, value in part["properties"].items()}
    rest = {k: v for k, v in parts[0].items() if k in ("type", "dependencies")}
    return dialect({**rest, "properties": properties}, format_checker=_NO_FORMATS)


def _vocabularies(metaschema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A metaschema and those that it is put together from."""
    yield metaschema
    for part in metaschema.get("allOf", ()):
        yield REGISTRY.contents(f"{metaschema['$id'].rpartition('/')[0]}/{part['$ref']}")
