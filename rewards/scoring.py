"""How scores are asked for: what is being scored now, time limits, coroutines, and a cache.

A score may come from anyone's code: it may take minutes, wait for a network, or never return.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")
Item = TypeVar("Item")

_GRACE_S = 0.25
"""What coroutines get beyond their time limit to be cancelled in good order."""


class Active(NamedTuple):
    """A reward that is at work.

    Attributes:
        name: The reward's.
        seconds: Since it was asked.
        texts: How many it was given.
    """

    name: str
    seconds: float
    texts: int


_numbers = itertools.count()
_running: dict[int, tuple[str, float, int]] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def scoring(name: str, texts: int) -> Iterator[None]:
    """Note that a reward is at work, for `active`."""
    number = next(_numbers)
    with _lock:
        _running[number] = (name, time.monotonic(), texts)
    try:
        yield
    finally:
        with _lock:
            del _running[number]


def active() -> Active | None:
    """The reward that has been at work the longest, in any thread; None if none is.

    A progress display may ask this from another thread.
    """
    with _lock:
        if not _running:
            return None
        name, since, texts = min(_running.values(), key=lambda entry: entry[1])
    return Active(name, time.monotonic() - since, texts)


class TimedOut(Exception):
    """A call took longer than it may."""


class Failed(Exception):
    """A function raised; the cause is what it raised.

    Attributes:
        at: Which of the items it was given.
    """

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class _Stopped(SystemExit):
    """Put into a thread that must not go on: nobody catches it, and it ends a thread silently."""


class Progress:
    """How far a call over several items has come.

    Attributes:
        pending: Indices of the items without a result.
    """

    def __init__(self, n: int) -> None:
        self.pending = list(range(n))

    @property
    def first_pending(self) -> int:
        """The item to name where there was not enough time."""
        return next(iter(self.pending), 0)


def each(
    fn: Callable[[Item], Value],
    items: Sequence[Item],
    *,
    timeout: float | None,
    progress: Progress,
) -> list[Value]:
    """`fn` of every item, one after the other.

    Raises:
        Failed: `fn` raised.
        TimedOut: All of it took longer than `timeout` seconds; it has been stopped.
    """

    def work() -> list[Value]:
        results = []
        for i, item in enumerate(items):
            try:
                results.append(fn(item))
            except Exception as error:
                raise Failed(i) from error
            progress.pending.remove(i)
        return results

    return work() if timeout is None else in_thread(work, timeout)


def each_awaited(
    fn: Callable[[Item], Awaitable[Value]],
    items: Sequence[Item],
    *,
    timeout: float | None,
    progress: Progress,
) -> list[Value]:
    """`fn` of every item, awaited all at once. Raises as `each` does.

    Where this thread's event loop is running already, as in a notebook or a server, another thread
    runs them.
    """
    tasks: list[asyncio.Future[Value]] = []

    async def one(i: int, item: Item) -> Value:
        try:
            result = await fn(item)
        except _Stopped:
            # The event loop would report it as nobody's, and go on with the others.
            for task in tasks:
                task.cancel()
            raise TimedOut from None
        except Exception as error:
            raise Failed(i) from error
        progress.pending.remove(i)
        return result

    async def all_of_them() -> list[Value]:
        tasks.extend(asyncio.ensure_future(one(i, item)) for i, item in enumerate(items))
        first = asyncio.FIRST_EXCEPTION
        done, late = await asyncio.wait(tasks, timeout=timeout, return_when=first)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        ended = [task for task in tasks if task in done and not task.cancelled()]
        errors = [error for task in ended if (error := task.exception())]
        if errors:
            raise errors[0]
        if len(ended) < len(tasks):
            raise TimedOut
        return [task.result() for task in tasks]

    def work() -> list[Value]:
        return asyncio.run(all_of_them())

    if timeout is not None:
        return in_thread(work, timeout + _GRACE_S)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    return in_thread(work, None)


def in_thread(work: Callable[[], Value], timeout: float | None) -> Value:
    """Run `work` in a thread of its own, and stop it after `timeout` seconds.

    A thread that runs Python is stopped at its next instruction; one that waits in a library goes
    on waiting there and is stopped when it comes back. Nobody waits for it.

    Raises:
        TimedOut: It took longer.
    """
    results: list[Value] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except _Stopped:
            pass
        except BaseException as error:
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(run,), name="guided-smc reward", daemon=True
    )
    thread.start()
    try:
        thread.join(timeout)
    finally:
        # Also where Ctrl-C ends the wait.
        if thread.is_alive():
            _stop(thread)
    if results:
        return results[0]
    if errors:
        raise errors[0]
    raise TimedOut


def _stop(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped)
    )


class Cache(Generic[Value]):
    """The values last used, by key. Threads may share it.

    Args:
        size: Most values it holds.
    """

    def __init__(self, size: int = 4096) -> None:
        self.size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, default: Value | None = None) -> Value | None:
        """The value, now the last used; `default` if it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key, default)

    def put(self, key: Hashable, value: Value) -> None:
        """Keep a value, and forget the one that was not used for longest."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self.size:
                self._values.popitem(last=False)


def shorten(value: Any, most: int = 200) -> str:
    """A text, or the `repr` of something else, cut for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else text[:most] + "..."
