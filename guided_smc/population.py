"""The N particles of one prompt: everything that a particle owns, and what moves with it.

`Population` is the one owner of this state. Rows of K/V belong to the sessions; a particle that
is still growing has one there, in the order of its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic

import numpy as np

from guided_smc.adaptive import Agreement, best_block_size
from guided_smc.costs import CostModel
from guided_smc.errors import PotentialError
from guided_smc.options import (
    GREEDY_TEMPERATURE,
    LEAST_DRAFT_TEMPERATURE,
    BlockSize,
    Options,
)
from guided_smc.potentials import (
    CompiledConstraint,
    Completion,
    ConstraintState,
    Potential,
    Unmasked,
)
from guided_smc.resampling import (
    SCHEMES,
    effective_sample_size,
    keep_in_place,
    log_sum_exp,
    normalise,
)
from guided_smc.results import FinishReason, Particle, Result, Step, T, Usage
from guided_smc.vocabulary import Vocabulary

_POOR_COVER = -2.0  # log-evidence of a run whose exact one is 0

_GROWTH = 128  # columns of the token array to begin with


class Status(IntEnum):
    """How far a particle is."""

    LIVE = 0
    STOPPED = 1  # by an end token or a stop string
    CUT = 2  # at max_tokens, without a constraint
    DEAD = 3  # weight 0
    DEAD_AT_CAP = 4  # weight 0 because the constraint was not satisfied within max_tokens


_REASONS: dict[int, FinishReason] = {
    Status.LIVE: "failed",
    Status.STOPPED: "stop",
    Status.CUT: "length",
    Status.DEAD: "failed",
    Status.DEAD_AT_CAP: "length",
}


@dataclass
class Request(Generic[T]):
    """One prompt with all that it asks for, checked and compiled.

    Attributes:
        index: Position in the user's request; comes back in events and in the result.
        prompt: As the user gave it.
        prompt_ids: Its tokens, at least one.
        options: With `block_size` and `seed` filled in.
        potentials: The scores to multiply in.
        constraint: The language to stay in, or None.
        parse: Text to typed value.
        value_key: Text to a key that is equal for equal values.
        warnings: To be handed on to the result.
        costs: What passes cost, where the block size is `"auto"`.
    """

    index: int
    prompt: Any
    prompt_ids: list[int]
    options: Options
    potentials: tuple[Potential, ...]
    constraint: CompiledConstraint | None
    parse: Callable[[str], T]
    value_key: Callable[[str], Hashable]
    warnings: tuple[str, ...] = field(default=())
    costs: CostModel | None = None

    @property
    def block_size(self) -> BlockSize:
        """K, or `"auto"`."""
        assert self.options.block_size is not None
        return self.options.block_size

    @property
    def seed(self) -> int:
        """Of this request's generator."""
        assert self.options.seed is not None
        return self.options.seed


class Population(Generic[T]):
    """N weighted particles.

    Attributes:
        n: N; with `target_ess` another one after each resampling.
        capacity: The most that N can become.
        agreement: How well the draft has agreed with the target so far, over restarts too.
        unmasked: The constraint, if its masks need `viable` besides them.
        given_up: The probability left untried by each draw that gave up.

    Attributes (N slots each):
        tokens: int64 `[N, ...]`, grown as needed; column 0 is the prompt's last token.
        length: int64 `[N]`, generated tokens without the end token.
        log_w: float64 `[N]` since the last resampling.
        log_p, log_q: float64 `[N]`, sums over the tokens of a particle.
        log_psi: float64 `[N, P]`, present score of each potential.
        status: int8 `[N]`.
        states: Constraint states, `[N]` (empty without a constraint).
        draft_holds: int64 `[N]`, columns of `tokens` that the draft's cache holds.
    """

    def __init__(self, request: Request[T], vocabulary: Vocabulary) -> None:
        self.request = request
        self.vocabulary = vocabulary
        self.options = request.options
        self.n = request.options.n_particles
        self.capacity = request.options.particle_range[1]
        self.rng = np.random.default_rng(request.seed)
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self.steps: list[Step] = []
        self.restarts = 0
        self.agreement = Agreement()
        constraint = request.constraint
        self.unmasked = constraint if isinstance(constraint, Unmasked) else None
        self.given_up: list[float] = []
        self._stops = tuple(s.encode() for s in request.options.stop)

    def begin(self) -> None:
        """N particles at the end of the prompt, with weight 1."""
        self.n = n = self.options.n_particles
        n_psi = len(self.request.potentials)
        self.tokens = np.zeros((n, _GROWTH), dtype=np.int64)
        self.tokens[:, 0] = self.request.prompt_ids[-1]
        self.length = np.zeros(n, dtype=np.int64)
        self.log_w = np.zeros(n)
        self.log_p = np.zeros(n)
        self.log_q = np.zeros(n)
        self.log_psi = np.zeros((n, n_psi))
        self.status = np.zeros(n, dtype=np.int8)
        self.draft_holds = np.zeros(n, dtype=np.int64)
        self.log_evidence = 0.0
        self.states: list[ConstraintState] = []
        if self.request.constraint is not None:
            start = self.request.constraint.start()
            self.states = [start.fork() for _ in range(n)]
        self._last_finite_log_w = np.zeros(n)
        self._first_step = len(self.steps)

    # -- what the engine asks ----------------------------------------------------------------

    @property
    def target_cut(self) -> tuple[int, float, float]:
        """Top-k, top-p and min-p of the target."""
        return self.options.top_k, self.options.top_p, self.options.min_p

    @property
    def draft_temperature(self) -> float:
        """Of the draft: by default what makes it resemble `p^α`."""
        own = self.options.draft_temperature
        if own is not None:
            return max(own, GREEDY_TEMPERATURE)
        return max(self.options.temperature / self.options.power, LEAST_DRAFT_TEMPERATURE)

    @property
    def live(self) -> np.ndarray:
        """Slots of the particles that still grow, ascending."""
        return np.flatnonzero(self.status == Status.LIVE)

    def block_size(self) -> int:
        """Tokens to draft now, so that no particle passes the length cap.

        All live particles have the same length. A constrained text may be drafted up to the cap,
        since its bonus token is then the end token; another one reaches the cap with the bonus.
        """
        room = self.options.max_tokens - int(self.length[self.live[0]])
        if self.request.constraint is None:
            room -= 1
        wanted = self.request.block_size
        if wanted != "auto":
            return min(wanted, room)
        assert self.request.costs is not None
        return best_block_size(
            self.request.costs,
            self.agreement.estimate,
            rows=len(self.live),
            ess_threshold=self.options.ess_threshold,
            remaining=room + 1,
            most=room,
        )

    def ends(self, slot: int, token: int) -> bool:
        """Whether `token`, not yet appended, ends the text by completing a stop string."""
        if not self._stops:
            return False
        text = self.tokens[slot, 1 : 1 + self.length[slot]].tolist()
        data = self.vocabulary.decode_bytes([*text, token])
        return any(stop in data for stop in self._stops)

    def append(self, slot: int, token: int) -> None:
        """Append a token to a particle."""
        self.length[slot] += 1
        if self.length[slot] >= self.tokens.shape[1]:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, self.tokens.shape[1])))
        self.tokens[slot, self.length[slot]] = token

    # -- weights ---------------------------------------------------------------------------------

    def weigh(self, slots: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> None:
        """`log w += α · log p − log q̃` for what each slot has sampled, float64 `[len(slots)]`."""
        self.log_p[slots] += log_p
        self.log_q[slots] += log_q
        self.log_w[slots] += self.options.power * log_p - log_q
        self._bury()

    def score(self, slots: np.ndarray) -> None:
        """Bring every potential up to date for particles that have changed.

        `log w += log ψ(new) − log ψ(old)`; a finished particle gets the complete score instead.

        Raises:
            PotentialError: A potential raised, or returned NaN, +inf or the wrong number.
        """
        for i, potential in enumerate(self.request.potentials):
            for finished in (False, True):
                if not finished and not potential.scores_prefixes:
                    continue
                chosen = [
                    s
                    for s in slots
                    if self.log_w[s] > -np.inf and (self.status[s] != Status.LIVE) == finished
                ]
                if not chosen:
                    continue
                new = self._ask(potential, chosen, finished)
                self.log_w[chosen] += new - self.log_psi[chosen, i]
                self.log_psi[chosen, i] = new
        self._bury()

    def _ask(self, potential: Potential, slots: list[int], finished: bool) -> np.ndarray:
        completions = [self._completion(s, finished) for s in slots]
        ask = potential.log_complete if finished else potential.log_prefix
        try:
            scores = np.asarray(ask(completions), dtype=np.float64)
        except PotentialError:
            raise
        except Exception as error:
            raise PotentialError(
                f"potential {potential.name!r} raised {type(error).__name__}: {error}; it was "
                f"given {len(completions)} text(s), the first {completions[0].text!r}",
                potential=potential.name,
                text=completions[0].text,
            ) from error
        if scores.shape != (len(slots),):
            raise PotentialError(
                f"potential {potential.name!r} returned scores of shape {scores.shape} for "
                f"{len(slots)} text(s), the first {completions[0].text!r}",
                potential=potential.name,
                text=completions[0].text,
            )
        bad = np.isnan(scores) | (scores == np.inf)
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            raise PotentialError(
                f"potential {potential.name!r} returned {scores[j]} for {completions[j].text!r}; "
                "a log score must be finite or -inf",
                potential=potential.name,
                text=completions[j].text,
            )
        return scores

    def _completion(self, slot: int, finished: bool) -> Completion:
        return Completion(
            prompt=self.request.prompt,
            token_ids=self._token_ids(slot),
            text=self._text(slot, finished),
            finished=finished,
            vocabulary=self.vocabulary,
        )

    def _bury(self) -> None:
        """Particles of weight 0 grow no further."""
        finite = self.log_w > -np.inf
        self._last_finite_log_w[finite] = self.log_w[finite]
        self.status[~finite & (self.status < Status.DEAD)] = Status.DEAD

    def kill(self, slot: int, status: Status) -> None:
        """Set a particle's weight to 0."""
        self.log_w[slot] = -np.inf
        self.status[slot] = status

    def finish_step(self, *, block_size: int, live: int) -> Step:
        """Close a step: ESS, and resampling if it is low and particles are left that grow."""
        weights = normalise(self.log_w)
        ess = effective_sample_size(weights)
        log_mean = log_sum_exp(self.log_w) - float(np.log(self.n))
        resample = len(self.live) > 0 and ess > 0 and ess < self.options.ess_threshold * self.n
        ancestors = np.arange(self.n)
        log_weights = tuple(self.log_w.tolist())
        log_evidence = self.log_evidence + log_mean
        if resample:
            ancestors = self._resample(weights, self._offspring(ess))
            self.log_evidence = log_evidence
            self.usage.resamplings += 1
        step = Step(
            index=len(self.steps),
            block_size=block_size,
            live=live,
            ess=ess,
            log_evidence=log_evidence,
            log_weights=log_weights,
            resampled=resample,
            ancestors=tuple(ancestors.tolist()),
        )
        self.steps.append(step)
        if self.agreement.drafted.observed:
            self.usage.draft_variance = self.agreement.drafted.variance
            self.usage.bonus_variance = self.agreement.bonus.variance
        return step

    def _offspring(self, ess: float) -> int:
        """How many particles to go on with: the number depends on the past alone, which keeps
        the weights proper whatever it is.
        """
        if self.options.target_ess is None:
            return self.n
        least, most = self.options.particle_range
        return int(np.clip(np.rint(self.n * self.options.target_ess / ess), least, most))

    def _resample(self, weights: np.ndarray, n_offspring: int) -> np.ndarray:
        scheme = SCHEMES[self.options.resampling]
        ancestors = keep_in_place(scheme(weights, self.rng.random(n_offspring)))
        self.n = n_offspring
        for name in (
            *("tokens", "length", "log_p", "log_q", "log_psi"),
            *("status", "draft_holds", "_last_finite_log_w"),
        ):
            setattr(self, name, getattr(self, name)[ancestors])
        if self.states:
            # A survivor keeps its slot and so its own state; the copies fork it.
            self.states = [
                self.states[a] if a == slot else self.states[a].fork()
                for slot, a in enumerate(ancestors)
            ]
        self.log_w = np.zeros(self.n)
        return ancestors

    # -- the outcome -----------------------------------------------------------------------------

    @property
    def all_dead(self) -> bool:
        """Whether every weight is 0."""
        return not np.any(self.log_w > -np.inf)

    def may_restart(self) -> bool:
        """Whether to begin again, after every particle has died; counts the restart."""
        if self.restarts >= self.options.max_restarts:
            return False
        self.restarts += 1
        return True

    def texts(self) -> tuple[str, ...]:
        """`[N]` texts so far."""
        return tuple(self._text(s, bool(self.status[s] != Status.LIVE)) for s in range(self.n))

    def _warnings(self, log_evidence: float) -> tuple[str, ...]:
        """The request's, and what the outcome says."""
        request = self.request
        if self.given_up and self.unmasked is not None:
            found = (
                f"{len(self.given_up)} draw(s) gave up after {self.unmasked.max_rejected} tokens "
                f"that the constraint refused, with up to {max(self.given_up):.2g} of the "
                "probability untried: what they did not find counts as impossible, and "
                f"log_evidence may be too low; {self.unmasked.remedy}"
            )
            return (*request.warnings, found)
        free = request.constraint is None and not request.potentials and self.options.power == 1.0
        if free and log_evidence < _POOR_COVER:
            found = (
                f"log_evidence is {log_evidence:.1f} where 0 is exact: the draft hardly ever says "
                "what the target would; lower block_size, raise n_particles, or use a closer draft"
            )
            return (*request.warnings, found)
        return request.warnings

    def result(self) -> Result[T]:
        """Select the answer and report everything."""
        weights = normalise(self.log_w)
        log_evidence = (
            self.log_evidence
            + log_sum_exp(self.log_w)
            - float(np.log(self.n))
            - float(np.log(1 + self.restarts))
        )
        lineage = self._lineage()
        particles = tuple(
            Particle(
                text=self._text(s, True),
                token_ids=self._token_ids(s),
                finish_reason=_REASONS[int(self.status[s])],
                log_weight=float(self.log_w[s]),
                weight=float(weights[s]),
                log_p=float(self.log_p[s]),
                log_q=float(self.log_q[s]),
                log_potentials={
                    name: float(self.log_psi[s, i])
                    for i, name in enumerate(_unique_names(self.request.potentials))
                },
                ancestors=tuple(lineage[:, s].tolist()),
            )
            for s in range(self.n)
        )
        selected = self._select(weights, particles)
        if selected:
            best = selected[0]
            finish_reason = particles[best].finish_reason
        else:
            best = int(np.argmax(self._last_finite_log_w))
            at_cap = bool(np.any(self.status == Status.DEAD_AT_CAP))
            finish_reason = "length" if at_cap else "failed"
        return Result(
            index=self.request.index,
            text=particles[best].text,
            token_ids=particles[best].token_ids,
            finish_reason=finish_reason,
            log_evidence=log_evidence,
            particles=particles,
            selected=selected,
            steps=tuple(self.steps),
            usage=self.usage,
            seed=self.request.seed,
            restarts=self.restarts,
            warnings=self._warnings(log_evidence),
            _parse=self.request.parse,
            _key=self.request.value_key,
        )

    def _select(self, weights: np.ndarray, particles: Sequence[Particle]) -> tuple[int, ...]:
        if self.all_dead:
            return ()
        # Drawn whatever the way of selection, so that it does not change the particles' draws.
        u = self.rng.random()
        if self.options.select == "sample":
            cdf = np.cumsum(weights)
            drawn = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
            return (min(drawn, int(np.flatnonzero(weights)[-1])),)
        if self.options.select == "best":
            return (int(np.argmax(weights)),)
        total: dict[Hashable, float] = {}
        heaviest: dict[Hashable, int] = {}
        for s in np.flatnonzero(weights).tolist():
            key = self.request.value_key(particles[s].text)
            total[key] = total.get(key, 0.0) + float(weights[s])
            if key not in heaviest or weights[s] > weights[heaviest[key]]:
                heaviest[key] = s
        ranked = tuple(heaviest[k] for k in sorted(total, key=lambda k: -total[k]))
        return ranked[:1] if self.options.select == "vote" else ranked

    def _lineage(self) -> np.ndarray:
        """int64 `[steps, N]`: slot of each final particle's ancestor at each step of this run.

        N is the final one; a step's slots are as many as it had particles.
        """
        steps = self.steps[self._first_step :]
        lineage = np.empty((len(steps), self.n), dtype=np.int64)
        slots = np.arange(self.n)
        for t in range(len(steps) - 1, -1, -1):
            slots = np.asarray(steps[t].ancestors)[slots]
            lineage[t] = slots
        return lineage

    def _token_ids(self, slot: int) -> tuple[int, ...]:
        return tuple(self.tokens[slot, 1 : 1 + self.length[slot]].tolist())

    def _text(self, slot: int, finished: bool) -> str:
        data = self.vocabulary.decode_bytes(self._token_ids(slot))
        cuts = [at for stop in self._stops if (at := data.find(stop)) >= 0]
        return self.vocabulary.to_text(data[: min(cuts)] if cuts else data, finished=finished)


def _unique_names(potentials: Sequence[Potential]) -> list[str]:
    """The potentials' names, numbered where two are the same."""
    names = [p.name for p in potentials]
    return [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names)]
