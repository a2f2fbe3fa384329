"""The N particles of one prompt: everything that a particle owns, and what moves with it.

`Population` is the one owner of this state. Rows of K/V belong to the sessions; a particle that
is still growing has one there, in the order of its slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Generic

import numpy as np

from guided_smc.adaptive import Agreement, best_block_size
from guided_smc.options import GREEDY_TEMPERATURE, LEAST_DRAFT_TEMPERATURE
from guided_smc.potentials import Completion, ConstraintState, Potential, Pulling, Unmasked
from guided_smc.request import Request
from guided_smc.resampling import (
    SCHEMES,
    effective_sample_size,
    keep_in_place,
    log_sum_exp,
    normalise,
)
from guided_smc.results import ParticleStatus, Step, T, Usage
from guided_smc.scoring import Scores
from guided_smc.vocabulary import Vocabulary

_GROWTH = 128  # columns of the token array to begin with


class Status(IntEnum):
    """How far a particle is."""

    LIVE = 0
    STOPPED = 1  # by an end token or a stop string
    CUT = 2  # at max_tokens, without a constraint
    DEAD = 3  # weight 0
    DEAD_AT_CAP = 4  # weight 0 because the constraint was not satisfied within max_tokens


_NAMES: tuple[ParticleStatus, ...] = ("live", "stopped", "cut", "dead", "dead_at_cap")
"""Of each status, in records."""


@dataclass(frozen=True)
class Closed:
    """A step that is done, as long as it has not been recorded: see `Step`.

    Attributes:
        log_w: float64 `[N]`, before resampling, as the islands' evidence makes them comparable.
        ancestors: int64 `[N']`.
        status: int8 `[N]`, before resampling.
    """

    block_size: int
    live: int
    ess: float
    log_evidence: float
    log_w: np.ndarray
    resampled: bool
    ancestors: np.ndarray
    status: np.ndarray
    log_potentials: dict[str, tuple[float, ...]]
    rewards: dict[str, tuple[float | None, ...]]


class Population(Generic[T]):
    """N weighted particles.

    Attributes:
        n: N; with `target_ess` another one after each resampling.
        capacity: The most that N can become.
        agreement: How well the draft has agreed with the target so far, over restarts too.
        names: Of the potentials, numbered where two are the same.
        unmasked: The constraint, if its masks need `viable` besides them.
        pulling: The same, if it says which tokens are worth proposing.
        given_up: The probability left untried by each draw that gave up.
        log_evidence: float64 `[M]`, of each island up to its last resampling.
        coverage: Log of what the tokens alone have multiplied the weights by, potentials left out:
            without a constraint and a power 0 on average (in the exponential), and far below it
            where the draft hardly says what the target would.
        luck: float64 `[families]`, see `Families`.
        doubted: Of each draw near the cap that refused tokens without being sure, their
            probability.
        cut_short: Whether a particle died because its text did not end in time.
        streams: int64 `[capacity]`, for each slot the seed of what is drawn on a device.
        draws: How often each slot has drawn there: a (stream, number of draw) is used once.

    Attributes (N slots each):
        tokens: int64 `[N, ...]`, grown as needed; column 0 is the prompt's last token.
        length: int64 `[N]`, generated tokens without the end token.
        log_w: float64 `[N]` since the last resampling.
        log_p, log_q: float64 `[N]`, sums over the tokens of a particle.
        scores: Present score of each potential.
        family: int64 `[N]`, the slot that each particle's first ancestor had.
        last_finite_log_w: float64 `[N]`, before a particle died.
        status: int8 `[N]`.
        states: Constraint states, `[N]` (empty without a constraint).
        draft_holds: int64 `[N]`, columns of `tokens` that the draft's cache holds.
        place, placed: int64 `[N]`: the state of the constraint's table behind the first `placed`
            tokens, where it has one.
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
        self.names = _unique_names(request.potentials)
        constraint = request.constraint
        # Once: such a look at a protocol takes longer than many a mask.
        self.unmasked = constraint if isinstance(constraint, Unmasked) else None
        self.pulling = constraint if isinstance(constraint, Pulling) else None
        self.given_up: list[float] = []
        self.cut_short = False
        self.doubted: list[float] = []
        self._stops = tuple(s.encode() for s in request.options.stop)
        self.draws = 0

    def begin(self) -> None:
        """N particles at the end of the prompt, with weight 1."""
        self.n = n = self.options.n_particles
        self.tokens = np.zeros((n, _GROWTH), dtype=np.int64)
        self.tokens[:, 0] = self.request.prompt_ids[-1]
        self.length = np.zeros(n, dtype=np.int64)
        self.log_w = np.zeros(n)
        self.log_p = np.zeros(n)
        self.log_q = np.zeros(n)
        self.status = np.zeros(n, dtype=np.int8)
        self.draft_holds = np.zeros(n, dtype=np.int64)
        self.place = np.zeros(n, dtype=np.int64)
        self.placed = np.zeros(n, dtype=np.int64)
        self.log_evidence = np.zeros(self.options.islands)
        self.coverage = 0.0
        self.scores = Scores(
            self.request.potentials,
            n,
            islands=self.options.islands,
            steer=self.options.method == "smc",
            ess_threshold=self.options.ess_threshold,
        )
        self.states: list[ConstraintState] = []
        if self.request.constraint is not None:
            start = self.request.constraint.start()
            self.states = [start.fork() for _ in range(n)]
        self.last_finite_log_w = np.zeros(n)
        self.family = np.arange(n)
        self.luck = np.zeros(n)

    @cached_property
    def streams(self) -> np.ndarray:
        """Of each slot, the first being the same whatever the capacity."""
        of_seed = np.random.SeedSequence(self.request.seed, spawn_key=(1,))
        return of_seed.generate_state(self.capacity, np.uint64).view(np.int64)

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

    def block_size_after(self, drafted: int) -> int:
        """What `block_size` will be after a block of so many, as long as no weight has a say."""
        room = self.options.max_tokens - int(self.length[self.live[0]]) - drafted - 1
        if self.request.constraint is None:
            room -= 1
        wanted = self.request.block_size
        return max(min(drafted if wanted == "auto" else wanted, room), 0)

    def uniforms_ahead(self) -> np.ndarray:
        """float64 `[N]`: what the next resampling will use, if nothing else draws before it."""
        before = self.rng.bit_generator.state
        uniforms = self.rng.random(self.n)
        self.rng.bit_generator.state = before
        return uniforms

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
        before = log_sum_exp(self.log_w)
        self.log_w[slots] += self.options.power * log_p - log_q
        self.coverage += log_sum_exp(self.log_w) - before
        self._bury()

    def score(self, slots: np.ndarray) -> None:
        """Bring every potential up to date for slots that have changed. Errors as in `Scores`."""
        if not self.request.potentials:
            return
        grows = self.status[slots] == Status.LIVE
        self.scores.update(
            self.log_w, slots[grows].tolist(), slots[~grows].tolist(), self._completion
        )
        self._bury()

    def look_ahead(self, likely: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
        """What each of some tokens would multiply a slot's score by, in logs, were it appended.

        Args:
            likely: Slots, with tokens.

        Returns:
            For each slot, float64, one number for each of its tokens.
        """
        eos = set(self.vocabulary.eos_ids)
        asked: list[tuple[int, Completion, bool]] = []
        for slot, tokens in likely:
            ids = self.token_ids(slot)
            at_cap = len(ids) + 1 >= self.options.max_tokens and self.request.constraint is None
            for token in tokens:
                ends = token in eos or self.ends(slot, token)
                after = ids if token in eos else (*ids, token)
                asked.append((slot, self._completion_of(after, ends or at_cap), at_cap))
        gained = self.scores.ahead(asked)
        return np.split(gained, np.cumsum([len(tokens) for _, tokens in likely])[:-1])

    def _completion(self, slot: int, finished: bool) -> Completion:
        return self._completion_of(self.token_ids(slot), finished)

    def _completion_of(self, token_ids: tuple[int, ...], finished: bool) -> Completion:
        return Completion(
            prompt=self.request.prompt,
            token_ids=token_ids,
            text=self._text_of(token_ids, finished),
            finished=finished,
            vocabulary=self.vocabulary,
            columns=self.request.columns,
            max_tokens=self.options.max_tokens,
        )

    def _bury(self) -> None:
        """Particles of weight 0 grow no further."""
        finite = self.log_w > -np.inf
        self.last_finite_log_w[finite] = self.log_w[finite]
        self.status[~finite & (self.status < Status.DEAD)] = Status.DEAD

    def kill(self, slot: int, status: Status) -> None:
        """Set a particle's weight to 0."""
        self.log_w[slot] = -np.inf
        self.status[slot] = status
        self.cut_short = self.cut_short or status == Status.DEAD_AT_CAP

    def close_step(self, *, block_size: int, live: int) -> Closed:
        """Close a step: ESS, and in each island resampling if its ESS is low and particles are
        left there that grow.

        Args:
            block_size: K.
            live: Particles that grew.

        Particles are resampled by weights in which the scores of finished texts are tempered like
        those of the others; what these leave out, each keeps as its weight.
        """
        log_w = self.comparable_log_w
        held = self._held_back()
        status = self.status.copy()
        log_potentials, rewards = self.scores.told(self.names)
        log_evidence = self.total_log_evidence
        ess = effective_sample_size(normalise(log_w + held))
        ancestors = self._ancestors(held)
        if ancestors is not None:
            self.luck -= np.bincount(self.family, normalise(log_w), len(self.luck))
            self._follow(ancestors)
            weights = normalise(self.comparable_log_w)
            self.luck += np.bincount(self.family, weights, len(self.luck))
            self.usage.resamplings += 1
        return Closed(
            block_size=block_size,
            live=live,
            ess=ess,
            log_evidence=log_evidence,
            log_w=log_w,
            resampled=ancestors is not None,
            ancestors=np.arange(self.n) if ancestors is None else ancestors,
            status=status,
            log_potentials=log_potentials,
            rewards=rewards,
        )

    def record(self, closed: Closed, drawn: Mapping[str, Any], seconds: dict[str, float]) -> Step:
        """Enter a step into the record, before the prompt starts again or ends.

        Args:
            closed: The step.
            drawn: The fields of the record that tell what was drawn.
            seconds: Its time, by phase.
        """
        step = Step(
            index=len(self.steps),
            start=self.restarts,
            block_size=closed.block_size,
            live=closed.live,
            ess=closed.ess,
            log_evidence=closed.log_evidence,
            log_weights=tuple(closed.log_w.tolist()),
            resampled=closed.resampled,
            ancestors=tuple(closed.ancestors.tolist()),
            status=tuple(_NAMES[s] for s in closed.status.tolist()),
            log_potentials=closed.log_potentials,
            rewards=closed.rewards,
            seconds=seconds,
            **drawn,
        )
        self.steps.append(step)
        if self.agreement.drafted.observed:
            self.usage.draft_variance = self.agreement.drafted.variance
            self.usage.bonus_variance = self.agreement.bonus.variance
        return step

    @property
    def islands(self) -> list[slice]:
        """The slots of each island."""
        size = self.n_island
        return [slice(m * size, (m + 1) * size) for m in range(self.options.islands)]

    @property
    def comparable_log_w(self) -> np.ndarray:
        """float64 `[N]`: log-weights, those of an island raised by what its evidence so far is
        above that of all.
        """
        if self.options.islands == 1:
            return self.log_w.copy()
        lead = self.log_evidence - (log_sum_exp(self.log_evidence) - np.log(len(self.log_evidence)))
        return self.log_w + np.repeat(lead, self.n_island)

    @property
    def total_log_evidence(self) -> float:
        """Log of the mean of the islands' evidence."""
        per_island = [
            self.log_evidence[m] + log_sum_exp(self.log_w[island]) - np.log(self.n_island)
            for m, island in enumerate(self.islands)
        ]
        return log_sum_exp(np.array(per_island)) - float(np.log(len(per_island)))

    @property
    def n_island(self) -> int:
        """Particles of each island."""
        return self.n // self.options.islands

    def _held_back(self) -> np.ndarray:
        live = self.live
        if not len(live) or not self.request.potentials:
            return np.zeros(self.n)
        return self.scores.held_back(self._completion(int(live[0]), finished=False))

    def _ancestors(self, held: np.ndarray) -> np.ndarray | None:
        """int64 `[N']`: whom each slot is to continue; None if no island is to be resampled.

        Books the evidence of islands that are, and sets their weights to what is held back.
        """
        if self.options.method != "smc":
            return None
        live = self.status == Status.LIVE
        ancestors: list[np.ndarray] = []
        resampled: list[slice] = []
        for m, island in enumerate(self.islands):
            log_v = self.log_w[island] + held[island]
            weights = normalise(log_v)
            ess = effective_sample_size(weights)
            low = 0 < ess < self.options.ess_threshold * self.n_island
            if not (low and live[island].any()):
                ancestors.append(np.arange(island.start, island.stop))
                continue
            scheme = SCHEMES[self.options.resampling]
            drawn = scheme(weights, self.rng.random(self._offspring(ess)))
            ancestors.append(island.start + keep_in_place(drawn))
            self.log_evidence[m] += log_sum_exp(log_v) - np.log(self.n_island)
            resampled.append(island)
        if not resampled:
            return None
        for island in resampled:
            self.log_w[island] = -held[island]
        return np.concatenate(ancestors)

    def _offspring(self, ess: float) -> int:
        """How many particles to go on with: the number depends on the past alone, which keeps
        the weights proper whatever it is.
        """
        if self.options.target_ess is None:
            return self.n_island
        least, most = self.options.particle_range
        return int(np.clip(np.rint(self.n * self.options.target_ess / ess), least, most))

    def _follow(self, ancestors: np.ndarray) -> None:
        """Every slot goes on with what its ancestor owns."""
        self.n = len(ancestors)
        for name in (
            *("tokens", "length", "log_w", "log_p", "log_q"),
            *("status", "draft_holds", "place", "placed", "family", "last_finite_log_w"),
        ):
            setattr(self, name, getattr(self, name)[ancestors])
        self.scores.follow(ancestors)
        if self.states:
            # A survivor keeps its slot and so its own state; the copies fork it.
            self.states = [
                self.states[a] if a == slot else self.states[a].fork()
                for slot, a in enumerate(ancestors)
            ]

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
        finished = (self.status != Status.LIVE).tolist()
        return tuple(self.text(s, finished[s]) for s in range(self.n))

    def token_ids(self, slot: int) -> tuple[int, ...]:
        """Generated tokens, without the end token."""
        return tuple(self.tokens[slot, 1 : 1 + self.length[slot]].tolist())

    def text(self, slot: int, finished: bool) -> str:
        """Their text, cut before a stop string; unfinished, without half characters."""
        return self._text_of(self.token_ids(slot), finished)

    def _text_of(self, token_ids: tuple[int, ...], finished: bool) -> str:
        data = self.vocabulary.decode_bytes(token_ids)
        cuts = [at for stop in self._stops if (at := data.find(stop)) >= 0]
        return self.vocabulary.to_text(data[: min(cuts)] if cuts else data, finished=finished)


def _unique_names(potentials: Sequence[Potential]) -> list[str]:
    """The potentials' names, numbered where two are the same."""
    names = [p.name for p in potentials]
    return [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names)]
