"""Bodies of requests: JSON objects, or an error that says what else they are.

Read here and not by FastAPI, whose words for a broken body are its parser's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from guided_smc.server.errors import ApiError

_EXAMPLE = 'send a JSON object, such as {"model": "...", "messages": [...]}'
_KINDS = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


class JsonRoute(APIRoute):
    """A route that reads its body as a JSON object before anything else does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of requests."""
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            if self.body_field is not None:
                request = _JsonRequest(request.scope, request.receive)
                await request.json()
            return await handle(request)

        return read_and_handle


class _JsonRequest(Request):
    """A request whose body is parsed here, once."""

    async def json(self) -> Any:
        """The body.

        Raises:
            ApiError: It is no JSON object, or does not say that it is JSON.
        """
        if not hasattr(self, "_read"):
            _check_type(self.headers.get("content-type"))
            self._read = parsed(await self.body())
        return self._read


def _check_type(content_type: str | None) -> None:
    """Refuse what does not say that it is JSON: pages of other sites can make browsers send that.

    Raises:
        ApiError: 415.
    """
    message = Message()
    message["content-type"] = content_type or "none/none"
    kind, _, sub = message.get_content_type().partition("/")
    if kind != "application" or not (sub == "json" or sub.endswith("+json")):
        told = (
            f"the Content-Type is {content_type!r}" if content_type else "there is no Content-Type"
        )
        raise ApiError(
            415,
            f"{told}; send JSON, with Content-Type: application/json",
            code="unsupported_media_type",
        )


def parsed(body: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        ApiError: 400.
    """
    if not body.strip():
        _refuse(f"the body is empty; {_EXAMPLE}")
    try:
        found = json.loads(
            body.decode("utf-8-sig"), parse_constant=_no_constant, object_pairs_hook=_once
        )
    except UnicodeDecodeError as error:
        _refuse(
            f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}; "
            "encode it as UTF-8"
        )
    except json.JSONDecodeError as error:
        _refuse(
            f"the body is not JSON: line {error.lineno}, column {error.colno}: "
            f"{error.msg[:1].lower()}{error.msg[1:]}; {_EXAMPLE}"
        )
    except RecursionError:
        _refuse("the body is nested too deeply; send one with fewer arrays and objects in another")
    except ValueError:  # of int: its limit keeps strangers from long computations
        _refuse("the body has a number with thousands of digits; send a shorter one")
    if not isinstance(found, dict):
        _refuse(f"the body is {_KINDS.get(type(found), 'a number')}; {_EXAMPLE}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, none of whose keys is given twice: one of the values would be ignored."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        _refuse(f"the body has an object with the key {twice!r} twice; send it once")
    return found


def _no_constant(name: str) -> NoReturn:
    _refuse(f"the body is not JSON: {name} is no number of JSON; send a finite one, or null")


def _refuse(message: str) -> NoReturn:
    raise ApiError(400, message, code="invalid_json") from None
