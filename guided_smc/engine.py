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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from guided_smc.errors import GuidedSMCError, OptionError
from guided_smc.models.base import LanguageModel, LimitedSession
from guided_smc.options import StepOn
from guided_smc.outcome import result
from guided_smc.population import Population, Request, Status
from guided_smc.proposing import Block, Phases, Proposer, Sessions
from guided_smc.results import ErrorEvent, Event, ResultEvent, Step, StepEvent

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
    """

    proposer = Proposer

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None = None,
        *,
        max_rows: int = 64,
        step_on: StepOn = "auto",
    ) -> None:
        self.target = target
        self.draft = draft
        self.max_rows = max_rows
        self.step_on = step_on
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

    def add(self, request: Request[Any]) -> None:
        """Queue a request.

        Raises:
            OutOfPagesError: It will never fit.
        """
        for model in (self.target, self.draft):
            budget = getattr(model, "budget", None)
            if budget is not None:
                budget.require(request.need)
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
        if all(p.request.index != index for p in self._running):
            return False
        keep = [p.request.index != index for p in self._running for _ in p.live]
        self._running = [p for p in self._running if p.request.index != index]
        for session in self._sessions.with_rows:
            session.reorder(torch.from_numpy(np.flatnonzero(keep)))
        return True

    @property
    def rows(self) -> int:
        """Particles whose keys and values are kept now."""
        return sum(len(p.live) for p in self._running)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._running or self._waiting)

    @property
    def records(self) -> bool:
        """Whether steps are recorded as graphs."""
        return getattr(self._proposer, "captured", None) is not None

    @property
    def free_rows(self) -> int:
        """Particles that could join now, those waiting counted in."""
        return self.max_rows - sum(p.capacity for p in (*self._running, *self._waiting))

    def step(self) -> Iterator[Event[Any]]:
        """One step for every running prompt; yields a StepEvent for each and those that end."""
        self._phases.take()
        self._admit()
        running = self._running
        rows = [(g, int(s)) for g, p in enumerate(running) for s in p.live]
        block_sizes = [p.block_size() for p in running]
        errors: dict[int, Exception] = {}
        block = self._proposer.propose(running, rows, block_sizes, errors)

        events: list[Event[Any]] = []
        steps: dict[int, Step] = {}
        stay: list[Population[Any]] = []
        index: list[int] = []  # the rows that go on, each by the row of its ancestor
        first = 0
        for g, population in enumerate(running):
            slots = population.live
            row_of = {int(s): first + i for i, s in enumerate(slots)}
            mine = slice(first, first + len(slots))
            first += len(slots)
            if g not in errors:
                try:
                    steps[g] = self._settle(population, slots, block, mine, block_sizes[g])
                except GuidedSMCError as error:
                    errors[g] = error
            if g in errors:
                events.append(ErrorEvent(population.request.index, errors[g]))
                continue
            step = steps[g]
            events.append(StepEvent(population.request.index, step, population.texts()))
            if len(population.live):
                stay.append(population)
                index += [row_of[step.ancestors[s]] for s in population.live]
            elif population.all_dead and population.may_restart():
                self._waiting.appendleft(population)
            else:
                events.append(ResultEvent(population.request.index, result(population)))
        self._running = stay
        with self._phases.timed("resample"):
            if index != list(range(len(rows))):
                for session in self._sessions.with_rows:
                    session.reorder(torch.tensor(index, dtype=torch.int64))
        shares = np.bincount([g for g, _ in rows], minlength=len(running)) / max(len(rows), 1)
        self._book(running, shares, steps)
        yield from events

    # -- joining ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting prompts join as far as their particles and their K/V fit, in turn, with one
        prefill for each.

        The last token of a prompt is held back: it is the first that a step feeds, and the first
        token of the text is then drawn per particle, like every other.
        """
        joining: list[Population[Any]] = []
        rows = sum(p.capacity for p in self._running)
        while self._waiting:
            n = self._waiting[0].capacity
            if rows + n > self.max_rows and rows > 0:
                break
            needs = [p.request.need for p in (*joining, self._waiting[0])]
            held = [p.request.need for p in self._running]
            if not all(session.fits(held, needs) for session in self._limited):
                break
            joining.append(self._waiting.popleft())
            joining[-1].begin()
            joining[-1].usage.kv_cache = self._sessions.target.kv_cache
            joining[-1].usage.attention = self._sessions.target.attention
            rows += n
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

    # -- settling --------------------------------------------------------------------------------

    def _settle(
        self,
        population: Population[Any],
        slots: np.ndarray,
        block: Block,
        mine: slice,
        block_size: int,
    ) -> Step:
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
        if self.draft is not None:
            alpha = population.options.power
            population.agreement.add(
                block.drafted[mine],
                alpha * block.log_p_drafted[mine] - block.log_q_drafted[mine],
                all_tokens=block.count[mine],
                all_gained=alpha * block.log_p[mine] - block.log_q[mine],
                ended=ended,
            )
        with self._phases.timed("potentials"):
            population.score(slots)
        with self._phases.timed("resample"):
            return population.finish_step(
                block_size=block_size,
                live=len(slots),
                drawn=block.drawn(mine, slots, population.n),
            )

    # -- accounting ------------------------------------------------------------------------------

    def _book(
        self,
        populations: Sequence[Population[Any]],
        shares: np.ndarray,
        steps: Mapping[int, Step] = MappingProxyType({}),
    ) -> None:
        """Book the seconds since the last booking to prompts by their shares of the work, and to
        the step that each has made.
        """
        taken = self._phases.take()
        for g, (population, share) in enumerate(zip(populations, shares.tolist(), strict=True)):
            booked = population.usage.seconds
            for phase, seconds in taken.items():
                booked[phase] = booked.get(phase, 0.0) + seconds * share
                if g in steps:
                    steps[g].seconds[phase] = seconds * share


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
        while not ended and engine.free_rows > 0:
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
