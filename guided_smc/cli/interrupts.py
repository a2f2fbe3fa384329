"""Ctrl-C and SIGTERM as an exception."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop.

    Attributes:
        exit_code: 128 + the signal: 130 for SIGINT, 143 for SIGTERM.
        told: How far things were, for whoever is told of it last; None where nobody said.
    """

    told: str | None = None

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.exit_code = 128 + signum


@contextmanager
def where_it_stands(told: str) -> Iterator[None]:
    """Say of an interruption of the block how far things were."""
    try:
        yield
    except Interrupted as interrupted:
        interrupted.told = told
        raise


class Interrupts:
    """While entered, SIGINT and SIGTERM raise `Interrupted`, but later where they are `held`."""

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for signum in (signal.SIGINT, signal.SIGTERM):
            # A job started in the background of a script is told to ignore Ctrl-C.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum)
