"""Compiling in another process first, which can be stopped: for what strangers hand in.

Neither llguidance nor Lark can be interrupted, and a bad input may take them minutes, gigabytes, or
the whole stack. So, where `Limits` say so, a constraint is made in a worker before it is made here.
If that takes too long or too much memory, or ends the worker, there is one error and no harm done.
If it goes well it is done again here, in as much time: what llguidance compiles cannot be handed
from one process to another.

A worker is a process that imports everything once (a second; `start_worker` does it ahead of time)
and then forks: the child compiles, and if it is ended, by its alarm clock or otherwise, the next
one is there in milliseconds. Threads that compile at the same time get workers of their own, up to
one for each core.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from guided_smc.errors import ConstraintError, GuidedSMCError, OptionError
from guided_smc.grammars.matching import Limits, every_byte

_PROGRAM = "import sys; sys.path[:] = {path!r}; from guided_smc.grammars.worker import main; main()"
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "RAYON")}
"""Only a process of one thread can be forked without care; nothing here takes more."""

_READY, _DONE, _ENDED = "ready", "done", "ended"
_OUT_OF_MEMORY, _WORN_OUT = 77, 78
"""Exit statuses of a child."""

_REQUESTS_PER_CHILD = 200
"""After so many a child makes room for a fresh one: compiling leaves things behind in caches."""


def compiled_in_worker(
    limits: Limits, make: Callable[..., Any], *args: Any, **given: Any
) -> Limits:
    """Make a constraint in a worker first, if the limits ask for that.

    Args:
        limits: Of the constraint.
        make: Makes it; found in the worker by its name.
        args: Its positional arguments.
        given: Its keyword arguments; `limits` is added.

    Returns:
        The limits with which to make it here, without a worker.

    Raises:
        ConstraintError: It takes more time or memory than the limits allow, or ends the worker.
        GuidedSMCError: What `make` raised.
        OptionError: The arguments cannot be sent to another process.
    """
    seconds, memory = limits.max_compile_seconds, limits.max_compile_memory
    if seconds is None and memory is None:
        return limits
    if not hasattr(os, "fork"):
        raise OptionError("max_compile_seconds is kept where processes can fork; leave it out")
    if memory is not None and sys.platform != "linux":
        raise OptionError("max_compile_memory is kept on Linux only; leave it out")
    here = replace(limits, max_compile_seconds=None, max_compile_memory=None)
    try:
        request = pickle.dumps((make, args, {**given, "limits": here}, seconds, memory))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"it cannot be sent to the worker in which it would be compiled: {error}; leave out "
            "max_compile_seconds and max_compile_memory"
        ) from None
    failed = _workers.ask(request, limits)
    if failed is not None:
        raise failed
    return here


def start_worker() -> None:
    """Start a worker if none is waiting, and wait until it is ready.

    A server calls this when it starts, so that its first request does not wait for a second.

    Raises:
        ConstraintError: It does not start.
    """
    _workers.give_back(_workers.take())


class _Worker:
    """A process whose children compile one thing after the other."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **_ONE_THREAD},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    @property
    def lost(self) -> bool:
        """Whether it was ready and is no more: somebody has ended it."""
        return self._ready and self._process.poll() is not None

    def wait_until_ready(self) -> None:
        """Wait for its imports.

        Raises:
            ConstraintError: It does not start.
        """
        if self._ready:
            return
        try:
            pickle.load(self._answers)
        except (EOFError, pickle.UnpicklingError):
            said = self._last_words(0)
            raise ConstraintError(
                f"the worker in which constraints are compiled does not start: {said}"
            ) from None
        self._ready = True

    def ask(self, request: bytes, limits: Limits) -> GuidedSMCError | None:
        """Have a request done: None, or the error that it led to.

        Raises:
            EOFError: The worker itself was ended.
        """
        heard = os.fstat(self._stderr.fileno()).st_size
        try:
            self._requests.write(len(request).to_bytes(8, "little") + request)
            self._requests.flush()
        except BrokenPipeError:
            raise EOFError from None
        what, answer = pickle.load(self._answers)
        if what == _ENDED:
            return _why_ended(answer, self._last_words(heard), limits)
        if answer is None:
            return None
        kind, message, attributes = answer
        error: GuidedSMCError = kind.__new__(kind, message)
        vars(error).update(attributes)
        return error

    def stop(self) -> None:
        """End it. A child that is at work ends by its alarm clock."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers, self._stderr):
            with contextlib.suppress(BrokenPipeError):  # what could not be written is still there
                pipe.close()

    def _last_words(self, begin: int) -> str:
        # The file's position is the worker's too, and must not be moved.
        said = os.pread(self._stderr.fileno(), 100_000, begin).decode(errors="replace").strip()
        return said.rpartition("\n")[2] or "it said nothing"


def _why_ended(status: int, said: str, limits: Limits) -> ConstraintError:
    """What ended a child (a negative status is a signal), and what to do."""
    seconds, memory = limits.max_compile_seconds, limits.max_compile_memory
    if seconds is not None and status == -signal.SIGALRM:
        return ConstraintError(
            f"compiling it takes more than the limit of {seconds:g} seconds; simplify it",
            limit="max_compile_seconds",
        )
    # Python exits where there is no memory, Rust aborts.
    if memory is not None and status in (_OUT_OF_MEMORY, -signal.SIGABRT):
        return ConstraintError(
            f"compiling it takes more than the limit of {memory >> 20} MiB of memory; simplify it",
            limit="max_compile_memory",
        )
    return ConstraintError(
        f"compiling it ends the compiler (exit status {status}: {said}); simplify it"
    )


class _Workers:
    """Those that wait for work, and room for more."""

    def __init__(self) -> None:
        self._forget()
        atexit.register(self._stop_idle)
        if hasattr(os, "register_at_fork"):  # two processes must not share the pipes
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(os.cpu_count() or 1)

    def take(self) -> _Worker:
        """A worker that is ready.

        Raises:
            ConstraintError: It does not start.
        """
        self._places.acquire()
        worker = None
        try:
            with self._lock:
                worker = self._idle.pop() if self._idle else _Worker()
            if worker.lost:
                worker.stop()
                worker = _Worker()
            worker.wait_until_ready()
        except BaseException:
            if worker is not None:
                worker.stop()
            self._places.release()
            raise
        return worker

    def give_back(self, worker: _Worker | None) -> None:
        """Let a worker wait for more work; None: it is no more."""
        if worker is not None:
            with self._lock:
                self._idle.append(worker)
        self._places.release()

    def ask(self, request: bytes, limits: Limits) -> GuidedSMCError | None:
        """Have a request done by a worker: None, or the error that it led to.

        Raises:
            ConstraintError: No worker starts.
        """
        worker: _Worker | None = self.take()
        assert worker is not None
        try:
            return worker.ask(request, limits)
        except EOFError:
            worker.stop()
            worker = None
            return ConstraintError("the worker was ended while it compiled; try again")
        except BaseException:  # its answer would be taken for that of the next request
            worker.stop()
            worker = None
            raise
        finally:
            self.give_back(worker)

    def _stop_idle(self) -> None:
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.stop()


_workers = _Workers()


# -- in the worker ---------------------------------------------------------------------------------


def main() -> None:
    """Compile what comes on standard input until it ends, and say on standard output how it went.

    Nobody calls this but the process that `_Worker` starts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b") as nothing:  # whatever a library prints is no answer
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    every_byte()  # which is made once
    _answer(answers, _READY, None)
    while True:
        child = os.fork()
        if not child:
            _serve(requests, answers)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not status:
            return
        if status != _WORN_OUT:
            _answer(answers, _ENDED, status)


def _serve(requests: int, answers: int) -> None:
    """In a child: compile one thing after the other. Does not return."""
    from guided_smc.grammars.regex import regex

    regex("a")  # llguidance's threads, which take memory; here, since a fork would lose them
    with os.fdopen(requests, "rb", buffering=0) as stream:
        for _ in range(_REQUESTS_PER_CHILD):
            size = int.from_bytes(_read(stream, 8), "little")
            make, args, given, seconds, memory = pickle.loads(_read(stream, size))
            # Without a handler the alarm ends the process, wherever it is.
            signal.setitimer(signal.ITIMER_REAL, seconds or 0)
            _limit_memory(memory)
            error = _error_of(make, args, given)
            _limit_memory(None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _answer(answers, _DONE, error)
    os._exit(_WORN_OUT)


def _read(stream: Any, size: int) -> bytes:
    """So many bytes, and not one more: what follows may be for the next child."""
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:  # the process that asks has ended
            os._exit(0)
        data += part
    return data


def _answer(answers: int, what: str, content: Any) -> None:
    os.write(answers, pickle.dumps((what, content)))


def _error_of(make: Callable[..., Any], args: Any, given: Any) -> Any:
    """None, or type, message and attributes of the error."""
    try:
        make(*args, **given)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except GuidedSMCError as error:
        return type(error), str(error), vars(error)
    except BaseException as error:  # a panic in Rust is no Exception
        if "can't start new thread" in str(error):  # there is no memory for its stack
            os._exit(_OUT_OF_MEMORY)
        return ConstraintError, f"compiling it failed: {type(error).__name__}: {error}", {}
    return None


def _limit_memory(more: int | None) -> None:
    """Allow this process so many bytes more than it has now; None: as many as there are."""
    if sys.platform != "linux":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = most
    if more is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        allowed = pages * resource.getpagesize() + more
        if most != resource.RLIM_INFINITY:
            allowed = min(allowed, most)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, most))
