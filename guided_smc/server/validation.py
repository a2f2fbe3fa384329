"""What pydantic says of a request, as an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from guided_smc.server.errors import ApiError
from guided_smc.server.protocol import DISAGREE, NEUTRAL

_MOST = 5


def refused(error: RequestValidationError) -> ApiError:
    """400, with every field that is to blame."""
    errors = error.errors()
    unknown = [e for e in errors if e["type"] == "extra_forbidden"]
    if unknown:
        paths = list(dict.fromkeys(_path(e["loc"], error.body) for e in unknown))
        names = ", ".join(repr(path) for path in paths[:_MOST])
        what = "the field {} is not supported" if len(paths) == 1 else "not supported: {}"
        message = what.format(names) + _what_may_be_sent(paths[0])
        return ApiError(400, message, param=paths[0], code="unsupported_field")
    said: dict[str, str] = {}
    for one in errors:
        path = _path(_blamed(one), error.body)
        said.setdefault(path, _message(one))
    parts = [f"{path}: {message}" if path else message for path, message in said.items()]
    code = "missing_field" if errors[0]["type"] == "missing" else "invalid_value"
    return ApiError(400, "; ".join(parts[:_MOST]), param=next(iter(said), None) or None, code=code)


def _what_may_be_sent(path: str) -> str:
    """The values of a field at the top of a body that change nothing, if it has any."""
    if path not in NEUTRAL:
        return ""
    values = " or ".join(json.dumps(value) for value in (*NEUTRAL[path], None))
    return f"; of {path!r} only what changes nothing may be sent: {values}"


def _blamed(one: dict[str, Any]) -> tuple[str | int, ...]:
    """Where it is, down to the field that is to blame where several disagree."""
    loc: tuple[str | int, ...] = one["loc"]
    return (*loc, one["ctx"]["field"]) if one["type"] == DISAGREE else loc


def _message(one: dict[str, Any]) -> str:
    message = str(one["msg"]).removeprefix("Value error, ")
    if one["type"] in ("missing", "value_error", DISAGREE):
        return message
    given = repr(one.get("input"))
    return f"{message}, got {given if len(given) <= 100 else given[:100] + '...'}"


def _path(loc: Sequence[str | int], body: Any) -> str:
    """Where in the body, without the names of alternatives that pydantic puts in between."""
    path, node = "", body
    steps = list(loc[1:])
    for i, step in enumerate(steps):
        if isinstance(node, dict) and step in node:
            path += f".{step}" if path else str(step)
            node = node[str(step)]
        elif isinstance(node, list) and isinstance(step, int) and 0 <= step < len(node):
            path += f"[{step}]"
            node = node[step]
        elif isinstance(node, dict) and i == len(steps) - 1:  # what is missing
            path += f".{step}" if path else str(step)
    return path
