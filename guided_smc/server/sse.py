"""Server-sent events, to clients that may go away or stop reading."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response

from guided_smc.records import finite
from guided_smc.server.middleware import Receive, Scope, Send

Made = TypeVar("Made")

DONE = b"data: [DONE]\n\n"
ALIVE = b": still at work\n\n"


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def data(content: Any, event: str | None = None) -> bytes:
    """One event."""
    head = "" if event is None else f"event: {event}\n"
    # No line breaks in it, since JSON escapes them.
    return f"{head}data: {json.dumps(finite(content), allow_nan=False)}\n\n".encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Made]) -> Made:
    """The result of some work, given up when the client disconnects.

    Raises:
        ClientGoneError: It has.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await future


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of events.

    Args:
        events: Encoded; closed when the client goes away, stops reading, or all is sent.
        send_timeout: Seconds after which a client that does not read is cut off.
        cut_off: Called with `gone` or `slow_reader` where the client was the reason to end.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, send_timeout: float, cut_off: Any
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._send_timeout = send_timeout
        self._cut_off = cut_off

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._write(send))
        except ClientGoneError:
            self._cut_off("gone")
        except asyncio.TimeoutError:
            self._cut_off("slow_reader")
            transport = scope.get("state", {}).get("transport")
            if transport is not None:
                transport.abort()  # to close it would wait for what is not read
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        async for event in self._events:
            message = {"type": "http.response.body", "body": event, "more_body": True}
            await asyncio.wait_for(send(message), self._send_timeout)
        await asyncio.wait_for(
            send({"type": "http.response.body", "body": b""}), self._send_timeout
        )
