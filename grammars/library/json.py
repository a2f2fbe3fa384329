"""JSON (RFC 8259)."""

from __future__ import annotations

from typing import Literal

from guided_smc.grammars.library.base import check_one_of, listed
from guided_smc.grammars.schema.json_schema import JsonSchema, Whitespace, json_schema

Top = Literal["any", "object", "array"]


@listed(
    accepted=('{"a": [1, -2.5e3, true, null]}', "[]", '"\\u00e9 \\ud83d\\ude00"', "0", "{}"),
    refused=("", "{'a': 1}", "[1,]", '{"a": 1, "a": 2}', "01", "NaN", '"\\x41"', "[1] "),
)
def json(*, top: Top = "any", whitespace: Whitespace = "flexible") -> JsonSchema:
    r"""Any JSON value: what `json_schema` means without a schema.

    Dialect: RFC 8259. Left out: white space around the value, more of it inside than `whitespace`
    says, keys that occur twice in one object, halves of surrogate pairs, and the escape `\/`.

    Args:
        top: What the outermost value is.
        whitespace: As in `json_schema`.

    Returns:
        A constraint whose values are plain data, as `json.loads` gives them.

    Raises:
        ConstraintError: An argument is not one of its values.
    """
    check_one_of(top, ("any", "object", "array"), "top")
    constraint = json_schema(True if top == "any" else {"type": top}, whitespace=whitespace)
    constraint.name = "json"
    return constraint
