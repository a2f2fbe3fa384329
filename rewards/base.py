"""What all rewards share: `Ψ = exp(β·R(x))`, when R speaks, and arithmetic on R.

A reward says R of finished texts (`score`) and may say what R is likely to become of unfinished
ones (`estimate`; by default it scores them as they are). `on` says when it speaks of those: at each
step, or at the last sentence, line or JSON field that is whole, its score being held until the
next. Before the first of them it is *silent*: that adds nothing to a sum, and is R = 0 alone.

Sums, multiples, clipped and scaled rewards are rewards (`guided_smc.rewards.arithmetic`). β and its
schedule belong to the whole.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal
from typing import Any, TypeAlias, TypeVar, overload

from guided_smc.errors import OptionError, PotentialError
from guided_smc.options import check_beta
from guided_smc.potentials import Completion, Potential, Tilt
from guided_smc.rewards.boundaries import CUTS, check_on
from guided_smc.rewards.schedules import Schedule, check_schedule, fraction
from guided_smc.rewards.scoring import Cache, TimedOut, in_thread, scoring, shorten

Own = TypeVar("Own", bound="Reward")
Ask: TypeAlias = "Callable[[Sequence[Completion]], Sequence[Any]]"
Memo: TypeAlias = "dict[int, list[float | None]]"

_UNKNOWN = object()

_SLACK = 1e-6
"""By how much of its range (1, if that is infinite) a score may leave its bounds, by rounding."""


class Reward(Tilt):
    """`exp(β·R(x))`, to be multiplied into the target.

    A class of your own says `score`, and `estimate` where there is more to say of an unfinished
    text than its score.

    Args:
        beta: β, finite. Negative: away from the reward. 0: R is reported, and nothing else.
        on: When it speaks of unfinished texts: `"step"`, `"sentence"`, `"line"`, `"field"` (of
            JSON), or `"end"` (never). Default: what suits the reward.
        schedule: How β grows along unfinished texts: `"constant"`; `"linear"`, from 0 at the first
            token to β at `max_tokens`; a number of tokens, after which it is β; a function of the
            number of tokens to a fraction of β, from 0 to 1; or `"adaptive"`, as large as leaves
            enough particles that count.
        name: In results and messages.
        bounds: Least and largest R.
        lookahead: How many of the likeliest next tokens are scored, for each particle, before the
            target draws one: those that raise R are drawn more often, and the weights make up for
            it. Costs that many scores a token, and no passes of the model.

    Raises:
        OptionError: One of them cannot be.
    """

    natural_on: str = "end"
    """`on` where it is not given."""

    deterministic: bool = False
    """Whether equal texts of equal prompts always have the same score, so that it is kept."""

    timeout: float | None = None
    """Seconds that one call, for all texts of a step, may take."""

    may_abstain: bool = False
    """Whether it may say None of a text: that it does not apply. It is silent then."""

    def __init__(
        self,
        *,
        beta: float = 1.0,
        on: str | None = None,
        schedule: Schedule = "constant",
        name: str | None = None,
        bounds: tuple[float, float] | None = None,
        lookahead: int = 0,
    ) -> None:
        self.beta = check_beta(beta)
        self.on: str | None = self.natural_on if on is None else check_on(on)
        self.schedule = check_schedule(schedule)
        self.adaptive = schedule == "adaptive"
        self.name = name or type(self).__name__
        self.bounds = check_bounds(bounds)
        self.lookahead = _check_lookahead(lookahead)
        if self.on == "end":
            self._check_that_it_speaks()
        self._cache: Cache[Any] = Cache()

    def __repr__(self) -> str:
        return f"<reward {self.name}, beta={self.beta:g}, on={self.on}>"

    # -- what a subclass says ----------------------------------------------------------------

    @abstractmethod
    def score(self, completions: Sequence[Completion]) -> Sequence[Any]:
        """R of finished texts, one number each.

        May raise anything: it becomes a `PotentialError` that names the reward and the texts.
        """

    def estimate(self, completions: Sequence[Completion]) -> Sequence[Any]:
        """What R is likely to become of texts that go on; `score`, unless there is better."""
        return self.score(completions)

    def cache_key(self, completion: Completion) -> Hashable:
        """Equal for texts of equal score, beside `finished`."""
        return (repr(completion.prompt), repr(dict(completion.columns)), completion.text)

    # -- the potential -----------------------------------------------------------------------

    def rewards(self, completions: Sequence[Completion]) -> Sequence[float]:
        """R of finished texts.

        Raises:
            PotentialError: The reward raised, or gave something else than one number for each
                text; or NaN, or a number outside its bounds.
        """
        return self._numbers(completions, finished=True)

    def prefix_rewards(self, completions: Sequence[Completion]) -> Sequence[float]:
        """What can be said of R of unfinished texts, by `on`; 0 where that is nothing."""
        return self._numbers(completions, finished=False)

    def _numbers(self, completions: Sequence[Completion], *, finished: bool) -> list[float]:
        values = [v or 0.0 for v in self.evaluate(completions, {}, finished=finished)]
        for value, completion in zip(values, completions, strict=True):
            if math.isnan(value):
                raise self.error("is infinity minus infinity", [completion])
        return values

    @property
    def scores_prefixes(self) -> bool:
        """Whether anything is said of unfinished texts, and counts."""
        return self.on != "end" and self.beta != 0

    def prefix_beta(self, completion: Completion) -> float:
        """β of an unfinished text, by `schedule`."""
        return self.beta * fraction(self.schedule, completion, self.name)

    def evaluate(
        self, completions: Sequence[Completion], memo: Memo, *, finished: bool
    ) -> list[float | None]:
        """R of each text; None where the reward is silent.

        Args:
            completions: All finished, or all unfinished.
            memo: What this has returned for other rewards and the same texts, by `id`.
            finished: Whether they are finished.
        """
        if id(self) not in memo:
            memo[id(self)] = self._evaluate(completions, memo, finished)
        return memo[id(self)]

    def _evaluate(
        self, completions: Sequence[Completion], memo: Memo, finished: bool
    ) -> list[float | None]:
        if finished:
            return self._known_or_asked(completions, finished, keep=self.deterministic)
        values: list[float | None] = [None] * len(completions)
        if self.on is None or self.on == "end":
            return values
        cut = [_cut(c, self.on) for c in completions]
        spoken = [i for i, c in enumerate(cut) if c is not None]
        # A score that is held is not asked for again, whoever gives it.
        keep = self.deterministic or self.on != "step"
        found = self._known_or_asked([c for c in cut if c is not None], finished, keep=keep)
        for i, value in zip(spoken, found, strict=True):
            values[i] = value
        return values

    def _known_or_asked(
        self, completions: Sequence[Completion], finished: bool, *, keep: bool
    ) -> list[float | None]:
        if not keep:
            return self._ask(completions, finished)
        alike = finished or type(self).estimate is Reward.estimate
        keys: list[Hashable] = [(alike, self.cache_key(c)) for c in completions]
        values: dict[Hashable, float | None] = {}
        unknown: dict[Hashable, Completion] = {}
        for key, completion in zip(keys, completions, strict=True):
            if key in values or key in unknown:
                continue
            known = self._cache.get(key, _UNKNOWN)
            if known is _UNKNOWN:
                unknown[key] = completion
            else:
                values[key] = known
        if unknown:
            scores = self._ask(list(unknown.values()), finished)
            for key, value in zip(unknown, scores, strict=True):
                values[key] = value
                self._cache.put(key, value)
        return [values[key] for key in keys]

    def _ask(self, completions: Sequence[Completion], finished: bool) -> list[float | None]:
        """Checked scores."""
        if not completions:
            return []
        ask = self.score if finished else self.estimate
        with scoring(self.name, len(completions)):
            try:
                values = self._in_time(ask, completions)
            except TimedOut:
                what = f"took longer than timeout={self.timeout:g} seconds"
                raise self.error(what, completions) from None
            except (PotentialError, OptionError):
                raise
            except Exception as error:
                raise self.raised(error, completions) from error
        if len(values) != len(completions):
            raise self.error(
                f"returned {len(values)} scores for {len(completions)} texts", completions
            )
        return [self._checked(v, c, finished) for v, c in zip(values, completions, strict=True)]

    def _in_time(
        self,
        ask: Callable[[Sequence[Completion]], Sequence[Any]],
        completions: Sequence[Completion],
    ) -> list[Any]:
        """What `ask` says.

        Raises:
            TimedOut: It took longer than `timeout`.
        """
        if self.timeout is None:
            return list(ask(completions))
        return in_thread(lambda: list(ask(completions)), self.timeout)

    def _checked(self, value: Any, completion: Completion, finished: bool) -> float | None:
        if value is None and self.may_abstain:
            return None
        score = as_number(value)
        if score is None:
            what = f"{shorten(repr(value))} ({type(value).__name__}), not a number"
            raise self.error(f"returned {what}", [completion])
        if math.isnan(score):
            raise self.error(f"returned {score!r}, not a number", [completion])
        if self.bounds is not None and finished:
            low, high = self.bounds
            slack = _SLACK * (high - low if math.isfinite(high - low) else 1.0)
            if not low - slack <= score <= high + slack:
                raise self.error(
                    f"returned {score!r}, outside its bounds {self.bounds}", [completion]
                )
            score = min(max(score, low), high)
        return score

    def raised(self, error: BaseException, completions: Sequence[Completion]) -> PotentialError:
        """What to raise where something was raised in scoring these texts."""
        return self.error(f"raised {type(error).__name__}: {error}", completions)

    def error(self, what: str, completions: Sequence[Completion]) -> PotentialError:
        """An error that names the reward and the first of the texts it was given."""
        first = shorten(repr(completions[0].text))
        given = f"the text {first}"
        if len(completions) > 1:
            given = f"{len(completions)} texts, the first of them {first}"
        return PotentialError(
            f"the reward {self.name!r} {what}; given {given}{self._called()}",
            potential=self.name,
            text=completions[0].text,
        )

    def _called(self) -> str:
        """What else a message should say of how the reward was asked."""
        return ""

    # -- copies ------------------------------------------------------------------------------

    def with_(
        self: Own,
        *,
        beta: float | None = None,
        on: str | None = None,
        schedule: Schedule | None = None,
        name: str | None = None,
        timeout: float | None = None,
        lookahead: int | None = None,
    ) -> Own:
        """A copy with another β, time to speak, schedule, name, time limit (in seconds, of one call
        for all texts of a step) or lookahead; None leaves it as it is.

        Raises:
            OptionError: One of them cannot be.
        """
        other = copy.copy(self)
        if beta is not None:
            other.beta = check_beta(beta)
        if on is not None:
            other._speak_on(check_on(on))
        if schedule is not None:
            other.schedule = check_schedule(schedule)
            other.adaptive = schedule == "adaptive"
        if name is not None:
            other._rename(name)
        if timeout is not None:
            other._limit(check_timeout(timeout))
        if lookahead is not None:
            other.lookahead = _check_lookahead(lookahead)
        if not other.scores_prefixes and other.beta != 0:
            other._check_that_it_speaks()
        return other

    def _check_that_it_speaks(self) -> None:
        if self.lookahead:
            raise OptionError(
                f"lookahead needs a reward that scores unfinished texts, and {self.name!r} has "
                'on="end": give another on='
            )

    def _limit(self, timeout: float | None) -> None:
        self.timeout = timeout

    def _speak_on(self, on: str) -> None:
        self.on = on

    def _rename(self, name: str) -> None:
        self.name = name

    # -- arithmetic --------------------------------------------------------------------------

    def __add__(self, other: Reward | float) -> Reward:
        from guided_smc.rewards.arithmetic import total

        return total([(1.0, self), (1.0, other)])

    def __radd__(self, other: Reward | float) -> Reward:
        from guided_smc.rewards.arithmetic import total

        return total([(1.0, other), (1.0, self)])

    def __sub__(self, other: Reward | float) -> Reward:
        from guided_smc.rewards.arithmetic import total

        return total([(1.0, self), (-1.0, other)])

    def __rsub__(self, other: Reward | float) -> Reward:
        from guided_smc.rewards.arithmetic import total

        return total([(1.0, other), (-1.0, self)])

    def __neg__(self) -> Reward:
        return self._times(-1.0)

    # Numbers are more than what potentials multiply by.
    @overload  # type: ignore[override]
    def __mul__(self, other: float) -> Reward: ...
    @overload
    def __mul__(self, other: Potential) -> Potential: ...
    def __mul__(self, other: Any) -> Any:
        """A multiple of R by a number; the product of potentials by a potential."""
        if isinstance(other, Potential):
            return super().__mul__(other)
        number = as_number(other)
        return NotImplemented if number is None else self._times(number)

    def __rmul__(self, other: float) -> Reward:
        number = as_number(other)
        return NotImplemented if number is None else self._times(number)

    def __truediv__(self, other: float) -> Reward:
        number = as_number(other)
        if number is None:
            return NotImplemented
        if number == 0:
            raise OptionError(f"the reward {self.name!r} cannot be divided by 0")
        return self._times(1.0 / number)

    def _times(self, weight: float) -> Reward:
        from guided_smc.rewards.arithmetic import total

        return total([(weight, self)])

    def clip(self, low: float | None = None, high: float | None = None) -> Reward:
        """R within `low` and `high`; None is no limit.

        Raises:
            OptionError: They are not numbers, or the wrong way round.
        """
        from guided_smc.rewards.arithmetic import clipped

        return clipped(self, low, high)

    def normalised(self) -> Reward:
        """R moved and scaled so that its bounds become 0 and 1.

        Raises:
            OptionError: The bounds are not known, or are not finite and apart.
        """
        from guided_smc.rewards.arithmetic import normalised

        return normalised(self)

    def standardised(self, mean: float, std: float) -> Reward:
        """`(R − mean) / std`, for R of a known mean and standard deviation.

        Raises:
            OptionError: They are not finite, or `std` is not above 0.
        """
        from guided_smc.rewards.arithmetic import standardised

        return standardised(self, mean, std)


def _check_lookahead(lookahead: Any) -> int:
    if isinstance(lookahead, bool) or not isinstance(lookahead, int) or lookahead < 0:
        raise OptionError(f"lookahead must be a number of tokens, 0 or more, got {lookahead!r}")
    return lookahead


def check_timeout(timeout: Any) -> float | None:
    """A time limit in seconds; None is none.

    Raises:
        OptionError: Not a number above 0.
    """
    seconds = None if timeout is None else as_number(timeout)
    if timeout is not None and (seconds is None or not 0 < seconds < math.inf):
        raise OptionError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    return seconds


def check_bounds(bounds: Any) -> tuple[float, float] | None:
    """Bounds as two floats.

    Raises:
        OptionError: Not two numbers, the first not above the second.
    """
    if bounds is None:
        return None
    try:
        low, high = map(as_number, bounds)
    except (TypeError, ValueError):
        low = high = None
    if low is None or high is None or math.isnan(low) or math.isnan(high) or low > high:
        raise OptionError(f"bounds must be two numbers, least and largest, got {bounds!r}")
    return low, high


def as_number(value: Any) -> float | None:
    """A float for a real number, also one of numpy's or a tensor without dimensions."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real | Decimal):
        return None
    real: Any = value
    try:
        return float(real)
    except OverflowError:
        return math.inf if real > 0 else -math.inf


def _cut(completion: Completion, on: str) -> Completion | None:
    """What is to be scored of an unfinished text; None before the first boundary.

    Its tokens are those that lie in the text as a whole.
    """
    if on == "step":
        return completion
    end = CUTS[on](completion.text)
    if end is None:
        return None
    text = completion.text[:end]
    room, n = len(text.encode()), 0
    for token in completion.token_ids:
        room -= len(completion.vocabulary.tokens[token] or b"")
        if room < 0:
            break
        n += 1
    return dataclasses.replace(completion, text=text, token_ids=completion.token_ids[:n])
