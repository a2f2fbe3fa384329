"""Compilers that do what a compiler should not, each found by a worker by its name."""

from __future__ import annotations

import signal
import time


def sleeps(*, limits):
    time.sleep(600)


def needs_memory(*, limits):
    bytearray(1 << 32)


def crashes(*, limits):
    signal.raise_signal(signal.SIGSEGV)


def raises(*, limits):
    raise ZeroDivisionError("on purpose")


def prints(*, limits):
    print("not an answer")


def has_limits(*, limits):
    assert limits.max_compile_seconds is limits.max_compile_memory is None
