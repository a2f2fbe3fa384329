"""Jobs of one HTTP request, as the event loop sees them: the bridge from the engine's thread.

What the engine reports is kept as state, the newest only, and whoever writes to the client takes
what is there: a slow client makes nothing grow. Only `/smc/run`, which must not lose a step, has a
queue, and it is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from guided_smc.request import Request
from guided_smc.results import Result, StepEvent
from guided_smc.server.errors import too_slow
from guided_smc.server.loop import Deadline, EngineLoop, Job
from guided_smc.server.streaming import decided

_BEAT_S = 15.0

_MOST_STEPS = 256
"""Steps that wait to be sent to a client."""


@dataclass
class Answer:
    """The state of one answer. Written by the engine's thread, read by the event loop.

    Attributes:
        text: What is decided so far.
        steps: Not yet sent, where they are asked for.
        outcome: In the end.
        left: Whether the engine is done with it.
    """

    text: str = ""
    steps: deque[StepEvent] = field(default_factory=deque)
    outcome: Result[Any] | Exception | None = None
    left: bool = False


class Ticket:
    """The answers of one HTTP request. To be used in `async with`: leaving it drops what runs.

    Args:
        engine: The loop.
        requests: One for each answer.
        owner: Who takes turns in the queue.
        deadline: Of all of them.
        texts: Whether to follow the texts.
        steps: Whether to keep the steps.
    """

    def __init__(
        self,
        engine: EngineLoop,
        requests: Sequence[Request[Any]],
        *,
        owner: str,
        deadline: Deadline,
        texts: bool = False,
        steps: bool = False,
    ) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.answers = [Answer() for _ in requests]
        self._jobs = [
            Job(r, _Sink(self, answer, r.options.stop, texts, steps), owner, deadline)
            for r, answer in zip(requests, self.answers, strict=True)
        ]

    async def __aenter__(self) -> Ticket:
        """Queue the jobs. Raises ApiError as `EngineLoop.submit` does."""
        self._engine.submit(self._jobs)
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Drop what is not done."""
        pairs = zip(self._jobs, self.answers, strict=True)
        if running := [job for job, answer in pairs if not answer.left]:
            self._engine.cancel(running)

    async def results(self) -> list[Result[Any]]:
        """All results; raises the first error as soon as it is known."""
        async for _ in self.changes():
            pass
        return [a.outcome for a in self.answers if isinstance(a.outcome, Result)]

    async def changes(self) -> AsyncIterator[bool]:
        """Yields True whenever something has changed, the last time when all is done; and False
        now and then when nothing has.

        Raises:
            Exception: What an answer failed with.
        """
        while True:
            try:
                await asyncio.wait_for(self._changed.wait(), _BEAT_S)
            except asyncio.TimeoutError:
                yield False
                continue
            self._changed.clear()
            # Looked at before the reader does, who then sees at least as much.
            outcomes = [answer.outcome for answer in self.answers]
            yield True
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            if None not in outcomes:
                return

    def wake(self) -> None:
        """Say that something has changed; from any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._changed.set)


@dataclass
class _Sink:
    """What the engine's thread calls."""

    ticket: Ticket
    answer: Answer
    stops: Sequence[str]
    follows_text: bool
    keeps_steps: bool

    def step(self, event: StepEvent) -> None:
        if self.keeps_steps:
            if len(self.answer.steps) >= _MOST_STEPS:
                self.answer.outcome = too_slow()
            else:
                self.answer.steps.append(event)
            self.ticket.wake()
        elif self.follows_text:
            text = decided(event, self.stops)
            if len(text) > len(self.answer.text):
                self.answer.text = text
                self.ticket.wake()

    def done(self, outcome: Result[Any] | Exception) -> None:
        self.answer.left = True
        if self.answer.outcome is None:
            self.answer.outcome = outcome
        self.ticket.wake()
