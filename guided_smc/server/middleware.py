"""What every request goes through: an id, the key, the size of the body, one line in the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from guided_smc.server.errors import ApiError, failed, too_slow_to_send
from guided_smc.server.logs import request_id
from guided_smc.server.metrics import Metrics
from guided_smc.server.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger("guided_smc.server")

_GIVEN_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")
OPEN_PATHS = frozenset({"/", "/healthz"})
"""Which no key is asked for."""


class Gate:
    """Around the application, as ASGI.

    Args:
        app: The application.
        settings: Keys and limits.
        metrics: Told of every request.
        endpoints: Paths that are counted under their own name.
    """

    def __init__(
        self, app: Any, settings: Settings, metrics: Metrics, endpoints: Collection[str]
    ) -> None:
        self._app = app
        self._keys = [key.get_secret_value().encode() for key in settings.api_keys]
        self._most = settings.max_body_bytes
        self._pause = settings.receive_timeout
        self._metrics = metrics
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = {k.lower(): v for k, v in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        number = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        token = request_id.set(number)
        status = 0
        body = _Body(receive, self._most, self._pause, self._too_large)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", number.encode()),
                ]
            await send(message)

        try:
            try:
                scope.setdefault("state", {})
                scope["state"]["owner"] = self._owner(scope, headers)
                self._check_length(headers)
                await self._app(scope, body.receive, sending)
            except ApiError as error:
                if status:
                    raise
                await respond(sending, error)
            except Exception:
                if status:
                    raise
                log.exception("a request failed")
                await respond(sending, failed(number))
        finally:
            path = scope["path"] if scope["path"] in self._endpoints else "other"
            seconds = time.perf_counter() - start
            self._metrics.requests.labels(path, str(status or 499)).inc()
            self._metrics.request_seconds.labels(path).observe(seconds)
            log.info(
                "request",
                extra={
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status or 499,
                    "seconds": round(seconds, 4),
                    **scope["state"].get("log", {}),
                },
            )
            request_id.reset(token)

    def _owner(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Who asks: by key, or by address where there are no keys.

        Raises:
            ApiError: 401.
        """
        client = (scope.get("client") or ("",))[0]
        if not self._keys or scope["path"] in OPEN_PATHS:
            return str(client)
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # All are compared, so that time tells nothing of which is near.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            what = "is wrong" if key else "is missing"
            raise ApiError(
                401,
                f"the API key {what}: send it as Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return f"key {matches.index(True)}"

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._most} bytes", code="body_too_large")


class _Body:
    """A body that may not say how long it is."""

    def __init__(
        self, receive: Receive, most: int, pause: float, too_large: Callable[[], ApiError]
    ) -> None:
        self._receive = receive
        self._most = most
        self._pause = pause
        self._too_large = too_large
        self._seen = 0
        self._whole = False

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ApiError: There is too much, or the client pauses for too long.
        """
        if self._whole:  # what may come now is that the client goes away
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self._pause)
        except asyncio.TimeoutError:
            raise too_slow_to_send(self._pause) from None
        if message["type"] == "http.request":
            self._whole = not message.get("more_body", False)
            self._seen += len(message.get("body", b""))
            if self._seen > self._most:
                raise self._too_large()
        return message


async def respond(send: Send, error: ApiError) -> None:
    """Send an error."""
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
