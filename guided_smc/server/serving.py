"""The process: load what is served, listen, and stop when asked to."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from guided_smc.api import LM, load
from guided_smc.errors import OptionError
from guided_smc.models.base import WarmingModel
from guided_smc.rewards import Reward, specs
from guided_smc.server.app import Server, create_app
from guided_smc.server.logs import set_up
from guided_smc.server.settings import Settings

log = logging.getLogger("guided_smc.server")

_AFTER_GRACE_S = 5.0  # for answers that say so to be sent
_SWITCH_S = 0.001  # the engine's thread waits as long for one that compiles, again and again
_UNREAD_BYTES = 65_536
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_FILES = (".yaml", ".yml", ".toml")


def serve(settings: Settings) -> None:
    """Load the model and serve it until SIGINT or SIGTERM.

    On either, nothing new is taken, what waits is refused, and what runs has `settings.grace`
    seconds to finish. A second SIGINT ends it at once.

    Raises:
        OptionError: A reward cannot be had, or the port is taken.
        ModelError: The model cannot be loaded.
    """
    set_up(settings.log_level)
    sys.setswitchinterval(_SWITCH_S)
    # First: that a port is taken is not told after minutes of loading.
    listener = bind(settings.host, settings.port)
    rewards = load_rewards(settings.rewards)
    log.info("loading", extra={"model": settings.model})
    lm = load(
        settings.model,
        draft=settings.draft,
        dtype=settings.dtype,
        device=settings.device,
        notify=log.info,
    )
    warm_up(lm)
    if settings.host not in _LOOPBACK and not settings.api_keys:
        log.warning("anybody who reaches %s can use the server: no API key is set", settings.host)
    app = create_app(lm, settings, rewards)
    _Uvicorn(uvicorn_config(app, settings), app.state.server).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, which does not listen yet.

    Raises:
        OptionError: It cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OptionError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; give another host or port"
        ) from None
    return listener


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=_Protocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace + _AFTER_GRACE_S),
    )


def load_rewards(named: dict[str, str]) -> dict[str, Reward]:
    """Rewards by name, from specs and files.

    Raises:
        OptionError: With the name.
    """
    rewards = {}
    for name, spec in named.items():
        try:
            is_file = spec.endswith(_FILES)
            rewards[name] = specs.from_file(spec) if is_file else specs.parse(spec)
        except OptionError as error:
            raise OptionError(f"reward {name!r}: {error}") from None
    return rewards


def warm_up(lm: LM) -> None:
    """Let the models become fast before the first request."""
    for model in (lm.model, lm.draft):
        if isinstance(model, WarmingModel):
            model.warm_up()


class _Protocol(H11Protocol):
    """Hands the transport on, so that a client that does not read can be cut off; and keeps little
    for it in the kernel, where it does not show.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES
        )
        self.app_state = {**self.app_state, "transport": transport}


class _Uvicorn(uvicorn.Server):
    """Says where it listens, and tells the engine when it is asked to stop."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for listener in self.servers:
            for listening in listener.sockets:
                host, port = listening.getsockname()[:2]
                log.info("listening", extra={"url": f"http://{host}:{port}"})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            # In a thread: the handler may have interrupted one that holds the lock.
            grace = self._server.settings.grace
            threading.Thread(target=self._server.engine.drain, args=(grace,)).start()
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the process ends well when it was asked to end."""
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
