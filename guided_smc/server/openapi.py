"""What the OpenAPI document says beyond what follows from the types."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_SAID = {
    400: "The request cannot work; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model or page.",
    405: "The page knows other methods.",
    413: "The body is too large.",
    415: "The body does not say that it is JSON.",
    422: "Every particle died: no text satisfies what was asked.",
    429: "The queue is full; Retry-After says when to try again.",
    499: "The client went away.",
    500: "Internal error, or a reward failed.",
    503: "The server is shutting down.",
    504: "The deadline has passed.",
}

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": said, "content": {"application/json": {"schema": _ERROR}}}
    for status, said in _SAID.items()
}

_EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}

_STREAMED = ("/v1/chat/completions", "/v1/completions", "/smc/run")


def describe(app: FastAPI) -> None:
    """Add to the application's document: streams, and the key."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        document = original()
        document.setdefault("components", {})["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"}
        }
        document["security"] = [{}, {"key": []}]
        for path in _STREAMED:
            answer = document["paths"][path]["post"]["responses"]["200"]
            kinds: dict[str, Any] = (
                {} if path == "/smc/run" else {"application/json": {"schema": {}}}
            )
            answer["content"] = {**kinds, "text/event-stream": {"schema": _EVENT}}
        text = {"text/plain": {"schema": {"type": "string"}}}
        document["paths"]["/metrics"]["get"]["responses"]["200"]["content"] = text
        app.openapi_schema = document
        return document

    app.openapi = openapi  # type: ignore[method-assign]
