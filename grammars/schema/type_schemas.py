"""The JSON Schemas of Python types, as pydantic makes them but for the keys of a `dict`.

JSON has texts for keys, and pydantic's schema hardly says which of them it reads as an `int`, an
`Enum`, a `Literal`. Here the schema lists them as a pattern, which a mask can enforce.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaValidator, ValidationError

from guided_smc.errors import ConstraintError

_PATTERNS = {
    "int": "^(0|-?[1-9][0-9]*)$",
    "float": r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$",
    "bool": "^(true|false)$",
}


class TypeSchemas(GenerateJsonSchema):
    """Pydantic's schemas, where the keys of a `dict` are told."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._parts: dict[str, Any] = {}

    def definitions_schema(self, schema: Any) -> Any:
        """A schema with parts that others refer to."""
        self._parts |= {part["ref"]: part for part in schema["definitions"]}
        return super().definitions_schema(schema)

    def complex_schema(self, schema: Any) -> dict[str, Any]:
        """None: JSON has no complex numbers, and pydantic's schema would allow every text.

        Raises:
            ConstraintError: Always.
        """
        raise ConstraintError(
            "complex numbers have no form in JSON: use tuple[float, float], or a model with the "
            "real and the imaginary part"
        )

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        """The schema of a `dict`.

        Raises:
            ConstraintError: Pydantic reads none of its keys from JSON.
        """
        made = super().dict_schema(schema)
        pattern = self._keys(schema.get("keys_schema", {}))
        if pattern is not None:
            made.pop("propertyNames", None)
            values = made.pop("additionalProperties", True)
            made |= {"patternProperties": {pattern: values}, "additionalProperties": False}
        return made

    def _keys(self, schema: Any) -> str | None:
        """The pattern of keys that are numbers or that can be listed; None for others."""
        inside = self._inside(schema)
        values = self._listed(inside)
        if values is None:
            return _PATTERNS.get(inside.get("type"))
        validator = SchemaValidator(inside)
        texts = [str(v) for v in values if _reads(validator, v)]
        if not texts:
            raise ConstraintError(
                f"no key of a dict can be {' or '.join(map(repr, values))}: JSON has texts for "
                "keys, and pydantic reads none as that"
            )
        return f"^(?:{'|'.join(map(re.escape, dict.fromkeys(texts)))})$"

    def _inside(self, schema: Any) -> Any:
        """What a schema holds behind references, validators, and a None that no key can be."""
        while True:
            if schema.get("type") == "definition-ref":
                schema = self._parts[schema["schema_ref"]]
            elif str(schema.get("type")).startswith(("function-", "nullable")):
                if "schema" not in schema:
                    return {}
                schema = schema["schema"]
            else:
                return schema

    def _listed(self, schema: Any) -> list[Any] | None:
        """The values that a schema lists; None if it does not."""
        match schema.get("type"):
            case "enum":
                return [member.value for member in schema["members"]]
            case "literal":
                return [v.value if isinstance(v, Enum) else v for v in schema["expected"]]
            case "union":
                choices = [c[0] if isinstance(c, tuple) else c for c in schema["choices"]]
                parts = [self._listed(self._inside(choice)) for choice in choices]
                every = [value for part in parts if part is not None for value in part]
                return None if None in parts else every
        return None


def _reads(validator: SchemaValidator, value: Any) -> bool:
    """Whether the text of a value is read as a key."""
    try:
        validator.validate_json(json.dumps(str(value)))
    except ValidationError:
        return False
    return True
