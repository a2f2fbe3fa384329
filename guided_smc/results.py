"""What a run tells: the answer, every particle, every step, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal

from typing_extensions import TypeVar

from guided_smc.errors import IncompleteOutputError

T = TypeVar("T", default=str)

FinishReason = Literal["stop", "length", "failed"]
"""`stop`: an end token or stop string. `length`: cut at `max_tokens`; under a constraint, not
completed by then. `failed`: every continuation has weight 0."""

ParticleStatus = Literal["live", "stopped", "cut", "dead", "dead_at_cap"]
"""`live`: grows. `stopped`: ended by an end token or stop string. `cut`: at `max_tokens`, without a
constraint. `dead`: has weight 0. `dead_at_cap`: the same, because the constraint was not satisfied
within `max_tokens`."""


@dataclass(frozen=True)
class Estimate:
    """A number from weighted particles.

    Attributes:
        value: The estimate.
        std_error: Standard error, one σ; None where the value is infinite, where all particles
            have the same one, and where fewer than two families of particles count
            (`Diversity.independent`): then there is nothing to compare. More particles, or
            `islands`, help. It is that of many particles; of few it is too small, the more so the
            stronger the tilt, since what none of them has seen cannot show.
    """

    value: float
    std_error: float | None


@dataclass(frozen=True)
class RewardEstimate:
    """What became of one reward.

    Attributes:
        tilted: `E_π[R]`, under the posterior.
        untilted: `E_p[R]`, without any reward but under the same constraint, from the same
            particles by weights `exp(−Σ β·R)`. The stronger the tilt, the fewer of them count.
        chosen: R of the answer.
    """

    tilted: Estimate
    untilted: Estimate
    chosen: float


@dataclass(frozen=True)
class Diversity:
    """How many of the particles are different.

    Attributes:
        ancestors: For each step, the number of its particles that some final particle of positive
            weight descends from.
        independent: Effective number of independent answers: `1 / Σ ω²` over families, whose
            weights are ω. Near 1, the run has seen one answer, however many particles it had.
        distinct: Effective number of different texts: the same over texts.
    """

    ancestors: tuple[int, ...]
    independent: float
    distinct: float


@dataclass(frozen=True)
class Particle:
    """One of the N weighted texts.

    Attributes:
        text: Its text (partial where it did not finish).
        token_ids: Its tokens, without the end token.
        finish_reason: How it ended.
        log_weight: Since the last resampling; −inf for a dead particle.
            With islands, raised by what its island's evidence is above that of all.
        weight: Normalised over the prompt's particles; all 0 if every particle is dead. Whatever
            the method, it is that of the posterior.
        share: How likely the method was to choose it as the answer; for SMC the weight.
        log_p: `Σ log p` under the target (temperature, top-p, ... applied; end token included).
        log_q: `Σ log q̃` under what it was really sampled from; under a constraint without masks
            with an unbiased estimate of q̃'s normaliser.
        log_potentials: Last score of each potential, by name.
        rewards: R of each reward, by name, if the text was finished when it was asked.
        ancestors: Its slot at each step of its lineage, oldest first.
        token_log_p: Log p of each token; of those in `token_ids`, and of the end token if one was
            drawn. They add up to `log_p`.
        token_log_q: Log q̃ of the same, which add up to `log_q`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    log_weight: float
    weight: float
    share: float
    log_p: float
    log_q: float
    log_potentials: dict[str, float]
    rewards: dict[str, float]
    ancestors: tuple[int, ...]
    token_log_p: tuple[float, ...] = ()
    token_log_q: tuple[float, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step of one prompt's population.

    What is said of slots is said before resampling: with `ancestors` the way of any particle can be
    followed, also of one that was not continued. A slot that had ended before draws nothing.

    Attributes:
        index: From 0; counts on over restarts.
        block_size: Tokens drafted per particle.
        live: Particles that were still growing when the step began.
        ess: Effective sample size of the weights before resampling, in [0, N]; 0 if all are dead.
            Of those that resampling looks at: as long as texts grow, finished ones have no more of
            a score than those (β_t's part, or nothing of a score that speaks at the end).
        log_evidence: Running estimate after this step.
        log_weights: `[N]`, before resampling; with islands as in `Particle`.
        resampled: Whether the population was resampled.
        ancestors: `[N']`: slot that each particle continues (the identity if not resampled). N' is
            N, unless `target_ess` chose another number.
        start: Which start of the run this is a step of: from 0, one more after each restart.
        tokens: `[N]` tokens that each slot has drawn, end token included.
        token_log_p: Log p of each of them.
        token_log_q: Log q̃ of each of them. Of the last that a live slot draws (the bonus token)
            `log p − log q̃` is the log of the probability that the constraint leaves there, unless
            `power` is not 1 or a reward looks ahead.
        allowed: `[N]` for each draw, how many tokens the constraint's mask let through: 1 is a
            token without an alternative, and at a draw behind the last of `tokens`, which found
            nothing, 0 is a dead end of the constraint (more are tokens of probability 0). Empty
            without a constraint, and where its masks are made on a device.
        accepting: `[N]` for each of those draws, whether the text might have ended there.
        status: `[N]`.
        log_potentials: `[N]` last scores of each potential, by name; −inf for what has taken all
            weight. A dead slot is not asked for the others.
        rewards: `[N]` R of each reward, by name, also of unfinished texts if the reward steers by
            those; None where it was not asked.
        seconds: The prompt's share of the step's time, by phase; without prefill.
    """

    index: int
    block_size: int
    live: int
    ess: float
    log_evidence: float
    log_weights: tuple[float, ...]
    resampled: bool
    ancestors: tuple[int, ...]
    start: int = 0
    tokens: tuple[tuple[int, ...], ...] = ()
    token_log_p: tuple[tuple[float, ...], ...] = ()
    token_log_q: tuple[tuple[float, ...], ...] = ()
    allowed: tuple[tuple[int, ...], ...] = ()
    accepting: tuple[tuple[bool, ...], ...] = ()
    status: tuple[ParticleStatus, ...] = ()
    log_potentials: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rewards: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)


@dataclass
class Usage:
    """Counts of one prompt's run, and its share of the batch's seconds per phase."""

    prompt_tokens: int = 0
    particle_tokens: int = 0
    """Tokens that entered a weight, all particles, end tokens included."""
    target_passes: int = 0
    draft_passes: int = 0
    resamplings: int = 0
    constraint_calls: int = 0
    """How often a constraint without masks was asked about a token."""
    kv_cache: str = ""
    """How the target keeps what it has read: `"particle"` (prompts once, tails in pages),
    `"general"` (the library's own cache for each prompt, for recurrent and other architectures
    that the first cannot serve), or `"none"`."""
    attention: str = ""
    """What attends to it: `"flashinfer"` (to the pages themselves, on CUDA) or `"torch"`, in
    the last step; empty where the model keeps no K/V in pages."""
    steps_on: dict[str, int] = field(default_factory=dict)
    """Steps by where their tokens were drawn: `"graphs"` (on the device, captured as CUDA graphs),
    `"device"`, or `"host"`; what is less than was asked for says behind a colon why. Empty if the
    host was what was asked for, as by default on a CPU."""
    steps_ahead: int = 0
    """Steps that began on the device before the host had weighed the step in front, and stood."""
    steps_in_vain: int = 0
    """Others that began so, and began again: other particles went on, or others had joined."""
    draft_variance: float | None = None
    """σ²: what a drafted token adds to the variance of the log-weights, as estimated in the end. K
    of them in a row leave an ESS of about `N · exp(−K σ²)`. None where nothing was drafted."""
    bonus_variance: float | None = None
    """The same of a bonus token, drawn from the target: 0 without a constraint."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: prefill, draft, mask, verify, potentials, resample."""

    @property
    def total_seconds(self) -> float:
        """Sum over the phases."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Weighted(Generic[T]):
    """A distinct value among the particles, with the total share of those that have it."""

    value: T
    text: str
    weight: float


@dataclass(frozen=True)
class Result(Generic[T]):
    """The outcome of one prompt.

    Attributes:
        index: Position of the prompt in the request.
        text: Text of the selected particle; of the best partial one if none completed.
        token_ids: Its tokens, without the end token.
        finish_reason: How it ended.
        log_evidence: Estimate of `log Σ_x p(x)^α Π Ψ(x)`. With `max_restarts=0`, `exp` of it is
            unbiased. A run that may start again stops at the first start that survives, and
            averages over its starts: that is too large on average where starts often die.
            −inf if every particle died.
        log_evidence_std_error: Of it, to first order; None where `Estimate` has none, and after a
            restart.
        kl: `KL(π‖p)` in nats: how far the posterior is from the model. What a reward, a constraint
            and a power have changed, all together. None if every particle died.
        rewards: What became of each reward, by name; empty if every particle died.
        diversity: How many of the particles are different.
        particles: All N of them.
        selected: Indices into `particles`: one, or with `select="all"` one for each distinct
            value, heaviest first. Empty if every particle died.
        steps: What happened at each step.
        usage: Counts and seconds.
        seed: Generates this result again, for this prompt alone (up to the last bits of floats,
            which depend on the shape of the batch).
        restarts: How often the run started again because every particle had died.
        warnings: What the reader should know: fallbacks taken, proposals that do not cover.
        constraint: The name of the constraint, if there is one.
        token_texts: Bytes of every token that occurs in `steps`; none for end tokens and other
            control tokens.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    log_evidence: float
    log_evidence_std_error: float | None
    kl: Estimate | None
    rewards: dict[str, RewardEstimate]
    diversity: Diversity
    particles: tuple[Particle, ...]
    selected: tuple[int, ...]
    steps: tuple[Step, ...]
    usage: Usage
    seed: int
    restarts: int
    warnings: tuple[str, ...]
    constraint: str | None = field(default=None, kw_only=True)
    token_texts: dict[int, bytes] = field(default_factory=dict, kw_only=True, repr=False)
    _parse: Callable[[str], T] = field(repr=False, compare=False)
    _key: Callable[[str], Any] = field(repr=False, compare=False)

    @property
    def value(self) -> T:
        """The answer in the requested output type.

        Raises:
            IncompleteOutputError: No particle completed a valid output; carries the partial text.
            OutputValidationError: The output type refuses the text (custom validators).
        """
        if not self.selected:
            if self.finish_reason == "length":
                what = "no particle completed a valid output within max_tokens"
                todo = "raise max_tokens or n_particles"
            else:
                what = "every particle reached weight 0"
                alone = "the constraint may allow no text at all, " if self.constraint else ""
                todo = (
                    f"raise n_particles, or check that something is left: {alone}potentials may "
                    "forbid every text, and top_k, top_p or min_p every token that a constraint "
                    "allows or a draft proposes"
                )
            told = "".join(f"; {warning}" for warning in self.warnings)
            raise IncompleteOutputError(
                f"{what} (best partial text: {self.text!r}); {todo}{told}",
                text=self.text,
                finish_reason=self.finish_reason,
            )
        return self._parse(self.text)

    @property
    def values(self) -> list[Weighted[T]]:
        """All distinct values among the particles of positive share, heaviest first.

        The shares are the method's: for SMC the weights.

        Raises:
            OutputValidationError: The output type refuses one of the texts.
        """
        total: dict[Any, float] = {}
        text: dict[Any, str] = {}
        for p in self.particles:
            if p.share > 0:
                key = self._key(p.text)
                total[key] = total.get(key, 0.0) + p.share
                text.setdefault(key, p.text)
        ranked = sorted(total, key=lambda k: -total[k])
        return [Weighted(self._parse(text[k]), text[k], total[k]) for k in ranked]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the value, as plain data (infinities as floats)."""
        names = [f for f in self.__dataclass_fields__ if not f.startswith("_")]
        plain = {name: getattr(self, name) for name in names}
        plain["kl"] = None if self.kl is None else asdict(self.kl)
        plain["rewards"] = {name: asdict(r) for name, r in self.rewards.items()}
        plain["diversity"] = asdict(self.diversity)
        plain["particles"] = [asdict(p) for p in self.particles]
        plain["steps"] = [vars(s).copy() for s in self.steps]
        plain["token_texts"] = plain_texts(self.token_texts)
        plain["usage"] = asdict(self.usage)
        return plain


def plain_texts(token_texts: Mapping[int, bytes]) -> dict[str, str | list[int]]:
    """For JSON, each token's text; where its bytes are no UTF-8 on their own, the list of them."""

    def plain(data: bytes) -> str | list[int]:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return list(data)

    return {str(token): plain(data) for token, data in token_texts.items()}


@dataclass(frozen=True)
class StepEvent:
    """A step was made. The texts may still be cut by later resampling.

    Attributes:
        index: Position of the prompt in the request.
        step: The record that also enters the result.
        texts: `[N']` texts so far, after resampling.
    """

    index: int
    step: Step
    texts: tuple[str, ...]


@dataclass(frozen=True)
class ResultEvent(Generic[T]):
    """A prompt is done."""

    index: int
    result: Result[T]


@dataclass(frozen=True)
class ErrorEvent:
    """A prompt failed; the others go on."""

    index: int
    error: Exception


Event = StepEvent | ResultEvent[T] | ErrorEvent
