"""The particle engine: draft, verify, weigh, score, resample, over a batch of prompts.

`Engine.step` is one step of SMC speculative decoding (arXiv 2604.15672) for every live particle of
every prompt in the batch, with the user's potentials in the same weight. For a particle with
tokens `x_1..t` it draws up to K tokens from the masked draft `q̃ ∝ q · m`, one more from the
masked target `p^α · m / Z`, and multiplies its weight by `p^α / q̃` for each; for the last one
that is Z. The target is never renormalised over the mask. Where a constraint has no mask, tokens
are drawn by rejection, and an unbiased estimate takes the place of the normaliser, Z's and q̃'s
(`guided_smc.rejection`): its expectation together with the token drawn is all that is needed.

Properly weighted: for any function f of finished texts, the expectation of
`exp(log_evidence) · Σ_n W_n f(x_n)` is `Σ_x p(x)^α Π Ψ(x) f(x)`, whatever K, the draft (as long as
it can draw what the target can), the resampling threshold and the scheme. That is said of one
start; a run that may start again when all particles have died is not unbiased.

The engine knows no grammar library, no reward and no model library.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from guided_smc.blocks import Batch, Block, Phases
from guided_smc.errors import GuidedSMCError, OptionError
from guided_smc.models.base import LanguageModel, LimitedSession
from guided_smc.models.budget import PAGE, Budget, Need
from guided_smc.options import StepOn
from guided_smc.outcome import result
from guided_smc.population import Closed, Population, Status
from guided_smc.proposing import Proposer, Sessions
from guided_smc.request import Request
from guided_smc.results import ErrorEvent, Event, ResultEvent, StepEvent

if TYPE_CHECKING:
    from guided_smc.device import DeviceProposer

_IDLE_S = 0.01  # between looks at whether a request has arrived


class Engine:
    """Runs requests over a target and an optional draft; groups join and leave between steps.

    Args:
        target: The model whose law is sampled.
        draft: Proposes blocks; must share the target's tokenizer.
        max_rows: Most particles to run at once. A request joins when its particles fit, as many
            as they may become (a request with more particles than that runs alone).
        step_on: Where tokens are drawn, see `options.StepOn`. `Usage.steps_on` tells where it was.
        budget: Of K/V for all that runs, besides what the models' own say.
    """

    proposer = Proposer

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None = None,
        *,
        max_rows: int = 64,
        step_on: StepOn = "auto",
        budget: Budget | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.max_rows = max_rows
        self.step_on = step_on
        self.budget = budget
        self.vocabulary = target.vocabulary
        self._phases = Phases()
        self._sessions = Sessions.start(target, draft)
        self._limited = [s for s in self._sessions.with_rows if isinstance(s, LimitedSession)]
        host = self.proposer(target, draft, self._sessions, self._phases)
        self._proposer: Proposer | DeviceProposer = host
        device: torch.device = getattr(target, "device", torch.device("cpu"))
        if step_on not in get_args(StepOn):
            raise OptionError(f"step_on must be one of {get_args(StepOn)}, got {step_on!r}")
        if step_on == "auto":
            step_on = "graphs" if device.type == "cuda" else "host"
        if step_on != "host":
            # Here, since it knows the cache of transformers' models, which a table needs not.
            from guided_smc.device import DeviceProposer

            self._proposer = DeviceProposer(host, device, graphs=step_on == "graphs")
        self._waiting: deque[Population[Any]] = deque()
        self._running: list[Population[Any]] = []
        self._flight: _Flight | None = None
        self._dropped: set[int] = set()  # of those that the flight is for

    def require(self, request: Request[Any]) -> None:
        """Refuse a request whose K/V would not fit even if it were alone; from any thread.

        Raises:
            OutOfPagesError: It will never fit; says what would.
        """
        budgets = [getattr(model, "budget", None) for model in (self.target, self.draft)]
        for budget in (self.budget, *budgets):
            if budget is not None:
                budget.require(request.need)

    def has_room(self, request: Request[Any]) -> bool:
        """Whether a request would join at the next step, with all that waits before it."""
        if not self.busy:  # what is dropped from a block that has begun may still hold pages
            return True
        held = [p.request.need for p in self._present]
        joining = [*(p.request.need for p in self._waiting), request.need]
        return self._fits(held, joining, sum(need.rows for need in (*held, *joining)))

    def add(self, request: Request[Any]) -> None:
        """Queue a request.

        Raises:
            OutOfPagesError: It will never fit.
        """
        self.require(request)
        self._waiting.append(Population(request, self.vocabulary))

    def cancel(self, index: int) -> bool:
        """Drop the request with this index between steps, and what it holds.

        Returns:
            Whether there was one, waiting or running.
        """
        for population in self._waiting:
            if population.request.index == index:
                self._waiting.remove(population)
                return True
        if all(p.request.index != index for p in self._present):
            return False
        if self._flight is not None:
            self._dropped.add(index)  # its rows are in a block that has begun
            return True
        keep = [p.request.index != index for p in self._running for _ in p.live]
        self._running = [p for p in self._running if p.request.index != index]
        for session in self._sessions.with_rows:
            session.reorder(torch.from_numpy(np.flatnonzero(keep)))
        return True

    @property
    def rows(self) -> int:
        """Particles whose keys and values are kept now."""
        return sum(len(p.live) for p in self._present)

    @property
    def reserved(self) -> int:
        """Tokens of the budget that are kept free for what was added; 0 without one."""
        if self.budget is None:
            return 0
        needs = [p.request.need for p in (*self._present, *self._waiting)]
        return self.budget.size(needs) * PAGE

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._present or self._waiting)

    @property
    def _present(self) -> list[Population[Any]]:
        """Those that run and were not dropped."""
        return [p for p in self._running if p.request.index not in self._dropped]

    @property
    def records(self) -> bool:
        """Whether steps are recorded as graphs."""
        return getattr(self._proposer, "captured", None) is not None

    @property
    def free_rows(self) -> int:
        """Particles that could join now, those waiting counted in."""
        return self.max_rows - sum(p.capacity for p in (*self._running, *self._waiting))

    @property
    def wants(self) -> bool:
        """Whether there is use for another request now: its particles may fit, or the next block
        begins before anybody could be asked again, and nobody waits to be in it.
        """
        return self.free_rows > 0 or (self._proposer.ahead and not self._waiting)

    def step(self) -> Iterator[Event[Any]]:
        """One step for every running prompt; yields a StepEvent for each and those that end.

        Where blocks are drawn on a device, the next one begins there before this one is told of:
        records, texts and results are then made while the device works, and so does whoever
        consumes the events. A request that arrives meanwhile is in the block after the next.
        """
        flight, self._flight = self._flight or self._launch(), None
        block, batch = flight.complete(), flight.batch
        running, errors = batch.running, batch.errors
        reports: list[_Report] = []
        stay: list[Population[Any]] = []
        index: list[int] = []  # the rows that go on, each by the row of its ancestor
        first = 0
        for g, population in enumerate(running):
            slots = population.live
            row_of = {int(s): first + i for i, s in enumerate(slots)}
            mine = slice(first, first + len(slots))
            first += len(slots)
            if population.request.index in self._dropped:
                continue
            report = _Report(
                population, block, mine, slots, self.draft is not None, error=errors.get(g)
            )
            reports.append(report)
            if report.error is None:
                size = batch.block_sizes[g]
                try:
                    report.closed = self._settle(population, slots, block, mine, size)
                except GuidedSMCError as error:
                    report.error = error
            if report.closed is not None and len(population.live):
                if population.request.block_size == "auto":
                    report.agree()  # the next block asks for it
                stay.append(population)
                sources = report.closed.ancestors[population.live]
                index += [row_of[s] for s in sources.tolist()]
        self._dropped.clear()
        self._running = stay
        with self._phases.timed("resample"):
            if index != list(range(len(batch.rows))):
                for session in self._sessions.with_rows:
                    session.reorder(torch.tensor(index, dtype=torch.int64))
        shares = np.bincount([g for g, _ in batch.rows], minlength=len(running))
        seconds = self._book(running, shares / max(len(batch.rows), 1))
        for report in reports:
            report.seconds = seconds[id(report.population)]
            if report.closed is not None and not len(report.population.live):
                report.record()  # before it starts again
                if report.population.all_dead and report.population.may_restart():
                    self._waiting.appendleft(report.population)
                else:
                    report.ends = True
        if self._proposer.ahead and self.busy:
            self._flight = self._launch_or_fail_later(index)
        for report in reports:
            yield from report.events()

    def _launch(self, sources: Sequence[int] = ()) -> _Flight:
        """Begin a block, after those who fit have joined.

        Args:
            sources: Of the rows there are already: see `Batch`.
        """
        self._admit()
        running = self._running
        rows = [(g, int(s)) for g, p in enumerate(running) for s in p.live]
        new = len(rows) - len(sources)
        batch = Batch(
            running=running,
            rows=rows,
            block_sizes=[p.block_size() for p in running],
            sources=np.array([*sources, *[-1] * new], dtype=np.int64),
        )
        return _Flight(batch, self._proposer.start(batch))

    def _launch_or_fail_later(self, sources: Sequence[int]) -> _Flight:
        """The same; an error is raised by the next step, so that it hides nothing of this one."""
        try:
            return self._launch(sources)
        except Exception as error:
            failure = error

        def fail() -> Block:
            raise failure

        return _Flight(Batch(self._running, [], [], np.zeros(0, dtype=np.int64)), fail)

    # -- joining ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting prompts join as far as their particles and their K/V fit, in turn, with one
        prefill for each.

        The last token of a prompt is held back: it is the first that a step feeds, and the first
        token of the text is then drawn per particle, like every other.
        """
        joining: list[Population[Any]] = []
        held = [p.request.need for p in self._running]
        needs: list[Need] = []
        rows = sum(need.rows for need in held)
        while self._waiting:
            needs.append(self._waiting[0].request.need)
            rows += needs[-1].rows
            if not self._fits(held, needs, rows):
                break
            joining.append(self._waiting.popleft())
            joining[-1].begin()
            joining[-1].usage.kv_cache = self._sessions.target.kv_cache
            joining[-1].usage.attention = self._sessions.target.attention
        if not joining:
            return
        prompts = [p.request.prompt_ids[:-1] for p in joining]
        copies = [p.n for p in joining]
        with self._phases.timed("prefill"):
            for session in self._sessions.with_rows:
                session.prefill(prompts, copies)
        lengths = np.array([1 + len(p) for p in prompts])
        self._book(joining, lengths / lengths.sum())
        self._running = self._running + joining

    def _fits(self, held: Sequence[Need], joining: Sequence[Need], rows: int) -> bool:
        """Whether some can join those that hold something, with so many rows together; what has
        more rows than there may be runs alone.
        """
        if rows > self.max_rows and len(held) + len(joining) > 1:
            return False
        if self.budget is not None and not self.budget.holds([*held, *joining]):
            return False
        return all(session.fits(held, joining) for session in self._limited)

    # -- settling --------------------------------------------------------------------------------

    def _settle(
        self,
        population: Population[Any],
        slots: np.ndarray,
        block: Block,
        mine: slice,
        block_size: int,
    ) -> Closed:
        """Weigh, end, score and resample one prompt's particles."""
        ended, dead = block.ended[mine], block.dead[mine]
        population.usage.particle_tokens += int(block.count[mine].sum())
        at_cap = population.length[slots] >= population.options.max_tokens
        constrained = bool(population.states)
        for i in np.flatnonzero(dead):
            population.kill(int(slots[i]), Status.DEAD_AT_CAP if at_cap[i] else Status.DEAD)
        for i in np.flatnonzero(ended & ~dead):
            population.status[slots[i]] = Status.STOPPED
        for i in np.flatnonzero(at_cap & ~ended & ~dead):
            s = int(slots[i])
            if not constrained:
                population.status[s] = Status.CUT
            elif not population.states[s].accepting:
                population.kill(s, Status.DEAD_AT_CAP)
        population.weigh(slots, block.log_p[mine], block.log_q[mine])
        with self._phases.timed("potentials"):
            population.score(slots)
        with self._phases.timed("resample"):
            return population.close_step(block_size=block_size, live=len(slots))

    # -- accounting ------------------------------------------------------------------------------

    def _book(
        self, populations: Sequence[Population[Any]], shares: np.ndarray
    ) -> dict[int, dict[str, float]]:
        """Book the seconds since the last booking to prompts by their shares of the work.

        Returns:
            What each was booked, by phase; prompts by identity.
        """
        taken = self._phases.take()
        booked: dict[int, dict[str, float]] = {}
        for population, share in zip(populations, shares.tolist(), strict=True):
            mine = booked[id(population)] = {p: seconds * share for p, seconds in taken.items()}
            for phase, seconds in mine.items():
                total = population.usage.seconds
                total[phase] = total.get(phase, 0.0) + seconds
        return booked


@dataclass(frozen=True)
class _Flight:
    """A block that has begun.

    Attributes:
        batch: What it is for.
        complete: Finishes the block.
    """

    batch: Batch
    complete: Callable[[], Block]


@dataclass
class _Report:
    """What a step has to tell of one prompt.

    Attributes:
        population: Its particles.
        block: What was drawn.
        mine: Their rows of it.
        slots: int64 `[rows]`, their slots.
        drafted: Whether there is a draft, whose agreement with the target counts.
        closed: The step, unless there was an error.
        error: What it ends with.
        seconds: Its share of the step's time.
        ends: Whether the prompt is done.
    """

    population: Population[Any]
    block: Block
    mine: slice
    slots: np.ndarray
    drafted: bool
    closed: Closed | None = None
    error: Exception | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    ends: bool = False
    _recorded: StepEvent | None = None

    def agree(self) -> None:
        """Take in how far draft and target agreed; once."""
        if not self.drafted:
            return
        self.drafted = False
        block, mine = self.block, self.mine
        alpha = self.population.options.power
        self.population.agreement.add(
            block.drafted[mine],
            alpha * block.log_p_drafted[mine] - block.log_q_drafted[mine],
            all_tokens=block.count[mine],
            all_gained=alpha * block.log_p[mine] - block.log_q[mine],
            ended=block.ended[mine],
        )

    def record(self) -> StepEvent:
        """The event of the step, whose record enters the prompt's; made once."""
        if self._recorded is None:
            assert self.closed is not None
            self.agree()
            drawn = self.block.drawn(self.mine, self.slots, len(self.closed.log_w))
            step = self.population.record(self.closed, drawn, self.seconds)
            texts = self.population.texts()
            self._recorded = StepEvent(self.population.request.index, step, texts)
        return self._recorded

    def events(self) -> Iterator[Event[Any]]:
        """All there is to tell."""
        index = self.population.request.index
        if self.error is not None:
            yield ErrorEvent(index, self.error)
            return
        yield self.record()
        if self.ends:
            yield ResultEvent(index, result(self.population))


class Kept:
    """An engine that one run leaves to the next, so that its graphs need not be recorded again."""

    engine: Engine | None = None

    def take(
        self, target: LanguageModel, draft: LanguageModel | None, max_rows: int, step_on: StepOn
    ) -> Engine:
        """The engine that is kept, if it is such a one, else a new one; two runs share none."""
        kept, self.engine = self.engine, None
        asked = (target, draft, max_rows, step_on)
        if kept is None or asked != (kept.target, kept.draft, kept.max_rows, kept.step_on):
            return Engine(target, draft, max_rows=max_rows, step_on=step_on)
        return kept

    def leave(self, engine: Engine) -> None:
        """Keep an engine that has recorded graphs and has nothing more to do."""
        if engine.records and not engine.busy:
            self.engine = engine


def run(
    target: LanguageModel,
    requests: Iterable[Request[Any] | None],
    *,
    draft: LanguageModel | None = None,
    max_rows: int = 64,
    step_on: StepOn = "auto",
    kept: Kept | None = None,
) -> Iterator[Event[Any]]:
    """Run requests to the end; they are asked for one by one, as particles fit.

    None among them says that no more is there yet: what runs goes on meanwhile. The engine is that
    of an earlier run, where `kept` has one.
    """
    kept = kept or Kept()
    engine = kept.take(target, draft, max_rows, step_on)
    pending = iter(requests)
    ended = False
    while True:
        while not ended and engine.wants:
            try:
                request = next(pending)
            except StopIteration:
                ended = True
                break
            if request is None:
                break
            engine.add(request)
        if engine.busy:
            yield from engine.step()
        elif ended:
            kept.leave(engine)
            return
        else:
            time.sleep(_IDLE_S)
