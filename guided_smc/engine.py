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
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from guided_smc.errors import GuidedSMCError, ModelError, PotentialError
from guided_smc.lookahead import look_ahead
from guided_smc.models.base import (
    FollowingModel,
    FollowingSession,
    LanguageModel,
    LimitedSession,
    Session,
)
from guided_smc.outcome import result
from guided_smc.population import Population, Request, Status
from guided_smc.rejection import redraw
from guided_smc.results import ErrorEvent, Event, ResultEvent, Step, StepEvent
from guided_smc.sampling import (
    NEG_INF,
    draw,
    empty_bitmask,
    masked_weights,
    scale,
    target_scores,
    truncated_draft,
    unpack_bitmask,
)

_IDLE_S = 0.01  # between looks at whether a request has arrived


@dataclass
class Block:
    """What one step has proposed for each of R live particles.

    Attributes:
        tokens: int64 `[R, K + 1]`.
        count: int64 `[R]`, tokens that count; behind an end token or a death none does.
        log_p, log_q: float64 `[R]`, summed over the tokens that count.
        ended: bool `[R]`: the last token that counts ends the text.
        dead: bool `[R]`: nothing could be drawn.
        drafted, log_p_drafted, log_q_drafted: `count`, `log_p` and `log_q` of the drafted tokens
            alone, without the bonus token; set by verification.
    """

    tokens: np.ndarray
    count: np.ndarray
    log_p: np.ndarray
    log_q: np.ndarray
    ended: np.ndarray
    dead: np.ndarray
    drafted: np.ndarray = field(init=False)
    log_p_drafted: np.ndarray = field(init=False)
    log_q_drafted: np.ndarray = field(init=False)


class Engine:
    """Runs requests over a target and an optional draft; groups join and leave between steps.

    Args:
        target: The model whose law is sampled.
        draft: Proposes blocks; must share the target's tokenizer.
        max_rows: Most particles to run at once. A request joins when its particles fit, as many
            as they may become (a request with more particles than that runs alone).
    """

    def __init__(
        self, target: LanguageModel, draft: LanguageModel | None = None, *, max_rows: int = 64
    ) -> None:
        self.target = target
        self.draft = draft
        self.max_rows = max_rows
        self.vocabulary = target.vocabulary
        self._eos = np.array(self.vocabulary.eos_ids)
        self._ordinary = torch.from_numpy(self.vocabulary.ordinary)
        real = torch.from_numpy(self.vocabulary.real)
        self._padding = None if bool(real.all()) else ~real
        self._target_session: Session = target.start_session()
        self._draft_session: Session | None = None  # with rows of its own
        self._following: FollowingSession | None = None  # on those of the target
        if isinstance(draft, FollowingModel):
            self._following = draft.follow(self._target_session)
        elif draft is not None:
            self._draft_session = draft.start_session()
        self._limited = [s for s in self._sessions() if isinstance(s, LimitedSession)]
        self._waiting: deque[Population[Any]] = deque()
        self._running: list[Population[Any]] = []
        self._seconds: dict[str, float] = {}

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

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._running or self._waiting)

    @property
    def free_rows(self) -> int:
        """Particles that could join now, those waiting counted in."""
        return self.max_rows - sum(p.capacity for p in (*self._running, *self._waiting))

    def step(self) -> Iterator[Event[Any]]:
        """One step for every running prompt; yields a StepEvent for each and those that end."""
        self._seconds = {}
        self._admit()
        running = self._running
        rows = [(g, int(s)) for g, p in enumerate(running) for s in p.live]
        block_sizes = [p.block_size() for p in running]
        errors: dict[int, Exception] = {}
        block = self._propose(rows, block_sizes, errors)

        events: list[Event[Any]] = []
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
                    step = self._settle(population, slots, block, mine, block_sizes[g])
                except GuidedSMCError as error:
                    errors[g] = error
            if g in errors:
                events.append(ErrorEvent(population.request.index, errors[g]))
                continue
            events.append(StepEvent(population.request.index, step, population.texts()))
            if len(population.live):
                stay.append(population)
                index += [row_of[step.ancestors[s]] for s in population.live]
            elif population.all_dead and population.may_restart():
                self._waiting.appendleft(population)
            else:
                events.append(ResultEvent(population.request.index, result(population)))
        self._running = stay
        with self._timed("resample"):
            if index != list(range(len(rows))):
                for session in self._sessions():
                    session.reorder(torch.tensor(index, dtype=torch.int64))
        shares = np.bincount([g for g, _ in rows], minlength=len(running)) / max(len(rows), 1)
        self._book(running, shares)
        yield from events

    # -- joining ---------------------------------------------------------------------------------

    def _sessions(self) -> list[Session]:
        return [s for s in (self._target_session, self._draft_session) if s is not None]

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
            joining[-1].usage.kv_cache = self._target_session.kv_cache
            joining[-1].usage.attention = self._target_session.attention
            rows += n
        if not joining:
            return
        prompts = [p.request.prompt_ids[:-1] for p in joining]
        copies = [p.n for p in joining]
        with self._timed("prefill"):
            self._target_session.prefill(prompts, copies)
            if self._draft_session is not None:
                self._draft_session.prefill(prompts, copies)
        lengths = np.array([1 + len(p) for p in prompts])
        self._book(joining, lengths / lengths.sum())
        self._running = self._running + joining

    # -- proposing -------------------------------------------------------------------------------

    def _propose(
        self,
        rows: list[tuple[int, int]],
        block_sizes: list[int],
        errors: dict[int, Exception],
    ) -> Block:
        """Draft K tokens, verify them in one target pass, and draw the bonus token."""
        running = self._running
        n_rows = len(rows)
        k_row = np.array([block_sizes[g] for g, _ in rows], dtype=np.int64)
        width = int(k_row.max(initial=0))
        last = np.array([[running[g].tokens[s, running[g].length[s]]] for g, s in rows])
        # One uniform per slot and position, drawn by the prompt's own generator: a prompt's
        # draws do not depend on who shares its batch.
        uniforms = [p.rng.random((k + 1, p.n)) for p, k in zip(running, block_sizes, strict=True)]
        block = Block(
            tokens=np.zeros((n_rows, width + 1), dtype=np.int64),
            count=np.zeros(n_rows, dtype=np.int64),
            log_p=np.zeros(n_rows),
            log_q=np.zeros(n_rows),
            ended=np.zeros(n_rows, dtype=bool),
            dead=np.zeros(n_rows, dtype=bool),
        )

        if self._following is not None:
            self._following.begin_block()
            for population in running:
                population.draft_holds[:] = population.length

        for k in range(width):
            active = ~block.ended & ~block.dead & (k < k_row)
            if not active.any():
                break
            with self._timed("mask"):
                mask = self._mask(rows, active, errors)
            with self._timed("draft"):
                if mask is not None and bool((mask[active].sum(dim=-1) == 1).all()):
                    scores = torch.zeros(mask.shape)  # every token is forced: nothing to ask
                else:
                    scores = self._draft_scores(rows, active)
                    for g in {g for (g, _), on in zip(rows, active, strict=True) if on}:
                        running[g].usage.draft_passes += 1
            u = np.array([uniforms[g][k, s] if k < block_sizes[g] else 0.0 for g, s in rows])
            self._take(rows, block, active, scores, mask, u, errors, draft=True)

        with self._timed("verify"):
            feed = np.concatenate([last, block.tokens[:, :width]], axis=1)
            logits = self._target_session.extend(
                torch.from_numpy(feed), torch.from_numpy(1 + block.count), last_only=False
            )
            log_p_last = self._verify(rows, block, logits, errors)
        active = ~block.ended & ~block.dead
        with self._timed("mask"):
            mask = self._mask(rows, active, errors)
        u = np.array([uniforms[g][-1, s] for g, s in rows])
        self._take(rows, block, active, log_p_last, mask, u, errors, draft=False)
        for population in running:
            population.usage.target_passes += 1
        return block

    def _draft_scores(self, rows: list[tuple[int, int]], active: np.ndarray) -> torch.Tensor:
        """Unnormalised log q `[R, V]` after each active row's tokens."""
        session = self._following or self._draft_session
        assert session is not None
        running = self._running
        lacks: list[np.ndarray] = []
        for (g, s), on in zip(rows, active, strict=True):
            p = running[g]
            holds, has = int(p.draft_holds[s]), 1 + int(p.length[s])
            lacks.append(p.tokens[s, holds:has] if on else p.tokens[s, :0])
            if on:
                p.draft_holds[s] = has
        feed = np.zeros((len(rows), max(len(x) for x in lacks)), dtype=np.int64)
        for r, x in enumerate(lacks):
            feed[r, : len(x)] = x
        counts = torch.tensor([len(x) for x in lacks])
        logits = session.extend(torch.from_numpy(feed), counts, last_only=True)
        logits = self._over_vocabulary(logits)
        scores = torch.empty_like(logits)
        for kind, members in self._kinds(rows, lambda p: (p.draft_temperature, *p.target_cut)):
            temperature, top_k, top_p, min_p = kind
            part = scale(logits[members], temperature)
            if top_k or top_p < 1.0 or min_p:
                part = truncated_draft(part, top_k=top_k, top_p=top_p, min_p=min_p)
            scores[members] = part
        return scores

    def _kinds(
        self, rows: list[tuple[int, int]], kind: Callable[[Population[Any]], tuple[Any, ...]]
    ) -> list[tuple[tuple[Any, ...], Any]]:
        """Rows that are treated alike, as an index each: mostly one kind and all rows."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for r, (g, _) in enumerate(rows):
            found.setdefault(kind(self._running[g]), []).append(r)
        if len(found) == 1:
            return [(k, slice(None)) for k in found]
        return [(k, torch.tensor(members)) for k, members in found.items()]

    def _verify(
        self,
        rows: list[tuple[int, int]],
        block: Block,
        logits: torch.Tensor,
        errors: dict[int, Exception],
    ) -> torch.Tensor:
        """Add log p of the drafted tokens to the block; return log p `[R, V]` after the last."""
        logits = self._over_vocabulary(logits)
        n_rows, width = logits.shape[0], logits.shape[1] - 1
        device = logits.device
        at = torch.from_numpy(block.count).to(device)
        log_p_last = torch.empty(n_rows, logits.shape[-1], device=device)
        chosen = torch.zeros(n_rows, width, device=device)
        drafted = torch.from_numpy(block.tokens[:, :width]).to(device)
        for kind, members in self._kinds(rows, lambda p: (p.options.temperature, *p.target_cut)):
            temperature, top_k, top_p, min_p = kind
            scores, log_z = target_scores(
                logits[members], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
            )
            taken = scores[:, :width].gather(-1, drafted[members].unsqueeze(-1))
            chosen[members] = (taken - log_z[:, :width]).squeeze(-1)
            which = torch.arange(len(scores), device=device)
            last = at[members]
            log_p_last[members] = scores[which, last] - log_z[which, last]
        counts = torch.arange(width, device=device) < at.unsqueeze(-1)
        # Beyond the tokens that count the logits mean nothing and may be NaN.
        chosen = torch.where(counts, chosen, torch.zeros_like(chosen))
        log_p = chosen.double().sum(-1).cpu().numpy()
        self._report_nan(rows, np.isnan(log_p), self.target, errors)
        block.log_p += log_p
        block.drafted = block.count.copy()
        block.log_p_drafted, block.log_q_drafted = block.log_p.copy(), block.log_q.copy()
        return log_p_last

    def _report_nan(
        self,
        rows: list[tuple[int, int]],
        broken: np.ndarray,
        model: LanguageModel,
        errors: dict[int, Exception],
    ) -> None:
        for r in np.flatnonzero(broken):
            errors[rows[r][0]] = ModelError(
                f"model {model.name!r} gave logits that are NaN; try another dtype "
                "(bfloat16 or float32)"
            )

    def _take(
        self,
        rows: list[tuple[int, int]],
        block: Block,
        active: np.ndarray,
        scores: torch.Tensor,
        mask: torch.Tensor | None,
        uniforms: np.ndarray,
        errors: dict[int, Exception],
        *,
        draft: bool,
    ) -> None:
        """Draw one token for every active row from `exp(scores) · mask` and append it."""
        running = self._running
        phase = "draft" if draft else "verify"
        with self._timed(phase):
            if mask is not None:
                mask = mask.to(scores.device)
            log_p = scores
            powers = np.array([running[g].options.power for g, _ in rows])
            if not draft and np.any(powers != 1.0):
                # 0 · (−inf) does not occur: α is at least 0.001
                alpha = torch.from_numpy(powers).to(scores.device, scores.dtype)
                scores = scores * alpha.unsqueeze(-1)
        ahead = False
        if not draft and any(p.scores.lookahead for p in running):
            with self._timed("potentials"):
                live = [(r, running[g], s) for r, (g, s) in enumerate(rows) if active[r]]
                untilted = scores
                scores, failed = look_ahead(live, scores, mask)
                ahead = scores is not untilted
            errors.update({rows[r][0]: error for r, error in failed.items()})
        with self._timed(phase):
            weights, log_scale = masked_weights(scores, mask)
            u = torch.from_numpy(uniforms)
            tokens, total = draw(weights, u)
            empty = total == 0
            if draft and mask is not None and bool(empty.any()):
                # The draft gives no mass to what the mask allows: propose from the mask alone.
                flat = scores.masked_fill(empty.unsqueeze(-1), 0.0)
                weights, log_scale = masked_weights(flat, mask)
                tokens, total = draw(weights, u)
        if mask is not None:
            with self._timed("mask"):
                live = [(r, running[g], s) for r, (g, s) in enumerate(rows) if active[r]]
                raised = redraw(live, weights, mask, uniforms, tokens, total, draft=draft)
            for broken_row, error in raised.items():
                g, _ = rows[broken_row]
                errors[g] = _named(error, running[g])
        with self._timed(phase):
            tokens = tokens.clamp_(max=log_p.shape[-1] - 1)  # where there was none to draw
            taken = tokens.unsqueeze(-1)
            log_p_taken = log_p.gather(-1, taken).squeeze(-1).double().cpu().numpy()
            if not (draft or ahead) and mask is None and np.all(powers == 1.0):
                # The target proposes for itself: Z is 1, not 1 to within rounding.
                log_q_taken = log_p_taken
                log_z = torch.where(total > 0, torch.zeros_like(total), total.log()).cpu().numpy()
            else:
                chosen = weights.gather(-1, taken).squeeze(-1).double().log() - total.log()
                log_q_taken = chosen.cpu().numpy()
                log_z = (log_scale + total.log()).cpu().numpy()
            token = tokens.cpu().numpy()
            broken = active & np.isnan(log_z)
            died = active & ~np.isfinite(log_z)
        block.dead |= died
        self._report_nan(rows, broken, self.draft if draft and self.draft else self.target, errors)
        is_eos = np.isin(token, self._eos)
        with self._timed("mask"):
            for r in np.flatnonzero(active & ~died):
                g, s = rows[r]
                population = running[g]
                t = int(token[r])
                block.tokens[r, block.count[r]] = t
                block.count[r] += 1
                block.log_q[r] += log_q_taken[r]
                if not draft:
                    block.log_p[r] += log_p_taken[r]
                if is_eos[r]:
                    block.ended[r] = True
                    continue
                block.ended[r] = population.ends(s, t)
                population.append(s, t)
                try:
                    viable = not population.states or population.states[s].advance(t)
                except Exception as error:
                    errors[g], viable = _named(error, population), False
                block.dead[r] |= not viable

    def _mask(
        self, rows: list[tuple[int, int]], active: np.ndarray, errors: dict[int, Exception]
    ) -> torch.Tensor | None:
        """Bool `[R, V]`: what each active row may draw; None if every row may draw anything.

        A constrained text at the length cap may only end: the target is conditioned on finishing.
        """
        width = len(self.vocabulary)
        constrained = [
            (r, self._running[g], g, s)
            for r, (g, s) in enumerate(rows)
            if active[r] and self._running[g].states
        ]
        if not constrained:
            return None
        mask = torch.ones(len(rows), width, dtype=torch.bool)
        by_constraint: dict[int, list[tuple[int, Population[Any], int, int]]] = {}
        for item in constrained:
            by_constraint.setdefault(id(item[1].request.constraint), []).append(item)
        for items in by_constraint.values():
            constraint = items[0][1].request.constraint
            assert constraint is not None
            states = [p.states[s] for _, p, _, s in items]
            bits = empty_bitmask(len(items), width)
            try:
                constraint.fill_masks(states, bits)
                accepting = torch.tensor([state.accepting for state in states])
            except Exception as error:
                for r, population, g, _ in items:
                    errors[g] = _named(error, population)
                    mask[r] = False
                continue
            part = unpack_bitmask(bits, width) & self._ordinary
            at_cap = [bool(p.length[s] >= p.options.max_tokens) for _, p, _, s in items]
            part[torch.tensor(at_cap)] = False
            part[:, list(self.vocabulary.eos_ids)] = accepting.unsqueeze(-1)
            mask[[r for r, *_ in items]] = part
        return mask

    def _over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over exactly the target's ids; those of ids that are no tokens are −inf."""
        width = len(self.vocabulary)
        if logits.shape[-1] > width:
            logits = logits[..., :width]
        elif logits.shape[-1] < width:
            logits = torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=NEG_INF)
        if self._padding is not None:
            logits = logits.masked_fill(self._padding.to(logits.device), NEG_INF)
        return logits

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
        with self._timed("potentials"):
            population.score(slots)
        with self._timed("resample"):
            return population.finish_step(block_size=block_size, live=len(slots))

    # -- accounting ------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def _book(self, populations: Sequence[Population[Any]], shares: np.ndarray) -> None:
        """Book the seconds since the last booking to prompts by their shares of the work."""
        for population, share in zip(populations, shares.tolist(), strict=True):
            booked = population.usage.seconds
            for phase, seconds in self._seconds.items():
                booked[phase] = booked.get(phase, 0.0) + seconds * share
        self._seconds = {}


def _named(error: Exception, population: Population[Any]) -> Exception:
    """An error of ours as it is; another one as that of the constraint that raised it."""
    if isinstance(error, GuidedSMCError):
        return error
    name = type(population.request.constraint).__name__
    wrapped = PotentialError(
        f"constraint {name!r} raised {type(error).__name__}: {error}", potential=name
    )
    wrapped.__cause__ = error
    return wrapped


def run(
    target: LanguageModel,
    requests: Iterable[Request[Any] | None],
    *,
    draft: LanguageModel | None = None,
    max_rows: int = 64,
) -> Iterator[Event[Any]]:
    """Run requests to the end; they are asked for one by one, as particles fit.

    None among them says that no more is there yet: what runs goes on meanwhile.
    """
    engine = Engine(target, draft, max_rows=max_rows)
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
            return
        else:
            time.sleep(_IDLE_S)
