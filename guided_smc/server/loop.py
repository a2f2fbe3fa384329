"""One engine that all requests share, in a thread of its own.

Who asks hands in jobs and is called back; only this thread touches the engine. Between two steps
it takes what has arrived, drops what was cancelled or has run out of time, lets waiting jobs join
as far as rows and cache have room, and makes the next step.

Fairness: each owner (an API key, or an address) has a queue, and the owners take turns. The job
whose turn it is waits until it fits, and nobody overtakes it: a large one cannot starve.

Room: a job joins when the engine has room for all that it may come to need, so that nothing that
runs is ever dropped for lack of memory.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from guided_smc.engine import Engine
from guided_smc.request import Request
from guided_smc.results import ErrorEvent, Result, ResultEvent, StepEvent
from guided_smc.server.errors import ApiError, overloaded, stopping, too_late

if TYPE_CHECKING:
    from guided_smc.server.metrics import Metrics

log = logging.getLogger("guided_smc.server")

_LONGEST_RETRY_S = 60
_IDLE_S = 1.0


class Sink(Protocol):
    """Whom a job reports to; called in the engine's thread, and must not block."""

    def step(self, event: StepEvent) -> None:
        """A step was made."""

    def done(self, outcome: Result[Any] | Exception) -> None:
        """The last call, but none comes after `EngineLoop.cancel`."""


@dataclass(frozen=True)
class Deadline:
    """When the time of a request is over.

    Attributes:
        seconds: That it may take in all, which is what a client is told.
        at: When they are over, on the monotonic clock.
    """

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then."""
        return max(0.0, self.at - time.monotonic())


@dataclass(eq=False)
class Job:
    """One answer to be made.

    Attributes:
        request: Its index is set by the loop.
        sink: Whom to tell.
        owner: Who takes turns.
        deadline: Of its request, the waiting counted in.
        started: When it joined the batch, on the same clock; 0 while it waits.
    """

    request: Request[Any]
    sink: Sink
    owner: str
    deadline: Deadline
    started: float = 0.0

    @property
    def rows(self) -> int:
        """Most particles."""
        return self.request.options.particle_range[1]


class EngineLoop:
    """The engine's thread.

    Args:
        make_engine: Called again if a step fails in a way that no request is to blame for.
        max_queue: Most jobs that wait.
        metrics: Told what happens.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        max_queue: int,
        metrics: Metrics | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._engine = make_engine()
        self._max_queue = max_queue
        self._metrics = metrics
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()
        self._running: dict[int, Job] = {}  # of the thread alone
        self._cancelled: set[Job] = set()
        self._numbers = itertools.count()
        self._stop_at: float | None = None  # from when on nothing runs any more
        self._ended = False
        self._mean_s = 1.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- for other threads -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes jobs."""
        return self._thread.is_alive() and self._stop_at is None

    @property
    def waiting(self) -> int:
        """Jobs in the queues."""
        return sum(map(len, self._queues.values()))

    def check_room(self, job: Job) -> None:
        """Refuse what would not fit if it were alone.

        Raises:
            ApiError: 400.
            OutOfPagesError: Its K/V.
        """
        if job.rows > self._engine.max_rows:
            most = self._engine.max_rows
            raise ApiError(
                400,
                f"{job.rows} particles are more than the server runs at once ({most})",
                param="smc.n_particles",
                code="too_large",
            )
        self._engine.require(job.request)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none.

        Raises:
            ApiError: 429, the queue is full; 503, the server is stopping; 400, one has too many
                particles.
            OutOfPagesError: The K/V of one never fits.
        """
        for job in jobs:
            self.check_room(job)
        with self._changed:
            if self._stop_at is not None:
                raise stopping()
            waiting = self.waiting
            # A request alone may be longer than the queue: nobody is in front of it.
            if waiting and waiting + len(jobs) > self._max_queue:
                raise overloaded(self._retry_after(waiting))
            for job in jobs:
                self._queues.setdefault(job.owner, deque()).append(job)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Drop jobs, at the latest after the present step; their sinks hear nothing more."""
        with self._changed:
            for job in jobs:
                queue = self._queues.get(job.owner)
                if queue is not None and job in queue:
                    self._remove(job)
                else:
                    self._cancelled.add(job)
            self._changed.notify()

    def drain(self, grace: float) -> None:
        """Take nothing more, refuse what waits, and let what runs go on for so many seconds."""
        with self._changed:
            if self._stop_at is None:
                self._stop_at = time.monotonic() + grace
            self._changed.notify()

    def stop(self, timeout: float | None = None) -> None:
        """End the thread; what still runs fails with 503."""
        with self._changed:
            self._stop_at = time.monotonic()
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._running and not self.waiting and not self._ended:
                    self._cancelled.clear()
                    self._changed.wait(_IDLE_S)
                self._drop_cancelled()
                late = self._expired()
                self._admit()
                ended = self._ended
            for job, error in late:
                self._tell(job, error)
            self._observe()
            if ended:
                return
            if self._running:
                self._step()
                self._observe()

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            events = list(self._engine.step())
        except Exception:  # the sessions cannot be trusted any more
            log.exception("a step failed; all that ran is lost")
            self._engine = self._make_engine()
            failed = list(self._running.values())
            self._running.clear()
            if self._metrics:
                self._metrics.engine_failures.inc()
            for job in failed:
                self._tell(job, RuntimeError("a step failed"))
            return
        if self._metrics:
            self._metrics.step(time.perf_counter() - start)
        for event in events:
            job = self._running[event.index]
            if isinstance(event, StepEvent):
                if self._metrics:
                    self._metrics.population_step(event.step)
                self._call(job.sink.step, event)
                continue
            del self._running[event.index]
            took = time.monotonic() - job.started
            self._mean_s += 0.1 * (took - self._mean_s)
            if isinstance(event, ErrorEvent):
                self._tell(job, event.error)
            elif isinstance(event, ResultEvent):
                if self._metrics:
                    self._metrics.result(event.result)
                self._tell(job, event.result)

    def _drop_cancelled(self) -> None:
        for number, job in list(self._running.items()):
            if job in self._cancelled:
                self._engine.cancel(number)
                del self._running[number]
        self._cancelled.clear()

    def _expired(self) -> list[tuple[Job, Exception]]:
        """What may not go on, taken out, with the reason."""
        now = time.monotonic()
        late: list[tuple[Job, Exception]] = []
        for job in [job for queue in self._queues.values() for job in queue]:
            if self._stop_at is not None:
                late.append((job, stopping()))
            elif now >= job.deadline.at:
                late.append((job, too_late(job.deadline.seconds, waiting=True)))
            else:
                continue
            self._remove(job)
        over = self._stop_at is not None and now >= self._stop_at
        for number, job in list(self._running.items()):
            if over or now >= job.deadline.at:
                self._engine.cancel(number)
                del self._running[number]
                late.append((job, stopping() if over else too_late(job.deadline.seconds)))
        return late

    def _admit(self) -> None:
        while self._queues:
            owner, queue = next(iter(self._queues.items()))
            job = queue[0]
            if not self._engine.has_room(job.request):
                return
            queue.popleft()
            if queue:
                self._queues.move_to_end(owner)  # the next owner's turn
            else:
                del self._queues[owner]
            number = next(self._numbers)
            job.request.index = number
            job.started = time.monotonic()
            self._running[number] = job
            self._engine.add(job.request)

    def _remove(self, job: Job) -> None:
        queue = self._queues[job.owner]
        queue.remove(job)
        if not queue:
            del self._queues[job.owner]

    def _retry_after(self, waiting: int) -> int:
        at_once = max(1, len(self._running))
        return min(max(1, math.ceil(self._mean_s * waiting / at_once)), _LONGEST_RETRY_S)

    def _tell(self, job: Job, outcome: Result[Any] | Exception) -> None:
        self._call(job.sink.done, outcome)

    def _call(self, report: Callable[[Any], None], what: Any) -> None:
        try:
            report(what)
        except Exception:  # somebody else's, and no reason to stop
            log.exception("a report failed")

    def _observe(self) -> None:
        if self._metrics:
            self._metrics.load(
                waiting=self.waiting,
                groups=len(self._running),
                particles=self._engine.rows,
                reserved=self._engine.reserved,
            )
