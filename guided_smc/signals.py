"""Ctrl-C and other signals, held back where an exception would break something."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block is done, and then let their handlers run.

    Only handlers written in Python are held back, which are those that may raise; they run in the
    main thread, so that elsewhere there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handlers = {
        int(s): handler
        for s in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(s))
    }
    for signum in handlers:
        signal.signal(signum, lambda signum, frame: arrived.append((signum, frame)))
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for signum, frame in arrived:
            handlers[signum](signum, frame)
