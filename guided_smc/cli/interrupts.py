"""Ctrl-C and SIGTERM as an exception that never cuts a record in two."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop.

    Attributes:
        exit_code: 128 + the signal: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.exit_code = 128 + signum


class Interrupts:
    """While entered, SIGINT and SIGTERM raise `Interrupted`, but not where they are held back."""

    def __init__(self) -> None:
        self._pending: int | None = None
        self._held = False
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
        if self._held:
            self._pending = signum
        else:
            raise Interrupted(signum)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back until the block is done."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending is not None:
            signum, self._pending = self._pending, None
            raise Interrupted(signum)
