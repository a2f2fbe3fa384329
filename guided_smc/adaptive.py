"""How many tokens to draft: from what passes cost, and from how well target and draft agree.

Drafting K tokens buys K more tokens for a target pass, and pays with the spread of the weights. If
a drafted token adds variance σ² to the log-weights, and the bonus token (under a constraint) σ_b²,
one step adds `v = K σ² + σ_b²`, and an effective sample size of `N · exp(−v)` is left (log-normal
weights). It goes on falling until it is under the resampling threshold τ, after
`m = ⌈log(1/τ) / v⌉` steps, and then begins anew. `best_block_size` takes the K with the most
effective tokens per second,

    N · E[tokens of a particle] · (1/m) Σ_{j=1..m} exp(−j v) / T(N, K)

with T of `costs`: what `guided-smc tune` measures as tokens/s × mean ESS. With τ = 1 every step
resamples, and the middle is `exp(−v)`. Smaller τ makes small blocks less worthwhile: the weights
are left to spread as far as τ anyway, so that only blocks with `K σ² > log(1/τ)` spread them
further.

`Agreement` estimates the variances from the population's own past weights. K is then known before a
step's randomness is drawn, so that the weights of the step are proper whatever K it is. Nothing
else enters: neither a clock nor the prompts that share the batch, and so a seed gives its result
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from guided_smc.costs import CostModel

MOST_DRAFTED = 16
"""The largest K that is chosen."""

PRIOR_VARIANCE = 0.1
"""σ² before anything was drafted. Rather low: a draft that is tried shows what it is worth."""

PRIOR_WEIGHT = 4.0
"""Observations that the prior counts for."""

MEMORY = 0.95
"""Weight of the past from step to step. Agreement differs along a text; and where nothing is
drafted nothing is observed, so that what is remembered fades and drafting is tried again."""

NEGLIGIBLE = 5.0
"""Nats below the heaviest at which a particle counts as lost: how far below it is costs nothing."""


@dataclass(frozen=True)
class Estimate:
    """What there is to know of a draft.

    Attributes:
        draft_variance: σ², of the log-weight per drafted token.
        bonus_variance: σ_b², of the log-weight per bonus token: that of log Z; 0 in free text.
        end_probability: That a token ends a text; what is drafted behind an end is lost.
    """

    draft_variance: float
    bonus_variance: float = 0.0
    end_probability: float = 0.0


class Spread:
    """Running estimate of the variance that a token adds to the log-weights.

    With c tokens a log-weight gains d, of variance c·σ² among the particles. Over a step's n
    particles `Σ (d − c·μ)² / c`, with `μ = Σ d / Σ c`, is `(n − 1)·σ²` on average. A single
    particle has nobody to differ from; there d is compared with the mean of the steps before.

    A particle of weight 0, or of next to none beside the heaviest, would dominate the variance,
    and yet costs no more than itself. Such particles are counted instead: if each token loses a
    share δ of the particles, K leave `(1 − δ)^K` of them, so δ adds `−log(1 − δ)` to σ².

    Args:
        prior: σ² to begin with.
    """

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.observed = False
        self._squares = self._freedom = 0.0
        self._gained = self._tokens = 0.0
        self._lost = self._exposed = 0.0

    @property
    def variance(self) -> float:
        """σ², lost particles included."""
        squares = PRIOR_WEIGHT * self.prior + self._squares
        lost = self._lost / (PRIOR_WEIGHT + self._exposed)
        return float(squares / (PRIOR_WEIGHT + self._freedom) - np.log1p(-lost))

    def fade(self) -> None:
        """A step passes."""
        self._squares, self._freedom = MEMORY * self._squares, MEMORY * self._freedom
        self._gained, self._tokens = MEMORY * self._gained, MEMORY * self._tokens
        self._lost, self._exposed = MEMORY * self._lost, MEMORY * self._exposed

    def add(self, tokens: np.ndarray, gained: np.ndarray) -> None:
        """Take in a step: c, int64 `[n]`, and d, float64 `[n]`, down to −inf."""
        c, d = tokens[tokens > 0].astype(np.float64), gained[tokens > 0]
        if not len(c):
            return
        self.observed = True
        usual = c[0] * self._gained / self._tokens if self._tokens else 0.0
        heaviest = d.max() if len(d) > 1 else usual
        lost = np.isneginf(d) | (d < heaviest - NEGLIGIBLE)
        self._lost += float(lost.sum())
        # Which of its tokens lost a particle is not told: it is exposed for one.
        self._exposed += float(c[~lost].sum() + lost.sum())
        self._compare(c[~lost], d[~lost])

    def _compare(self, c: np.ndarray, d: np.ndarray) -> None:
        if len(c) > 1:
            self._squares += float(np.sum((d - c * d.sum() / c.sum()) ** 2 / c))
            self._freedom += len(c) - 1
        elif len(c) and self._tokens:
            # The difference of the means of c and C tokens has variance σ² (1/c + 1/C).
            difference = float(d[0] / c[0]) - self._gained / self._tokens
            self._squares += difference**2 / (1 / float(c[0]) + 1 / self._tokens)
            self._freedom += 1
        self._gained += float(d.sum())
        self._tokens += float(c.sum())


class Agreement:
    """Running estimates of a population, from its past steps alone."""

    def __init__(self) -> None:
        self.drafted = Spread(PRIOR_VARIANCE)
        self.bonus = Spread(0.0)
        self._ended = self._tokens = 0.0

    @property
    def estimate(self) -> Estimate:
        """What is known now."""
        end_probability = self._ended / (PRIOR_WEIGHT + self._tokens)
        return Estimate(self.drafted.variance, self.bonus.variance, end_probability)

    def add(
        self,
        drafted: np.ndarray,
        gained: np.ndarray,
        *,
        all_tokens: np.ndarray,
        all_gained: np.ndarray,
        ended: np.ndarray,
    ) -> None:
        """Take in a step.

        Args:
            drafted: int64 `[n]`, drafted tokens of each particle that count.
            gained: float64 `[n]`, `Σ α log p − log q̃` over them, down to −inf.
            all_tokens: The same with the bonus token.
            all_gained: The same with the bonus token.
            ended: bool `[n]`, whether the last token ended the text.
        """
        self.drafted.fade()
        self.bonus.fade()
        self._ended = MEMORY * self._ended + float(ended.sum())
        self._tokens = MEMORY * self._tokens + float(all_tokens.sum())
        self.drafted.add(drafted, gained)
        drawn = np.where(np.isneginf(gained), 0, all_tokens - drafted)
        self.bonus.add(drawn, all_gained - np.where(drawn > 0, gained, 0.0))


def best_block_size(
    costs: CostModel,
    estimate: Estimate,
    *,
    rows: int,
    ess_threshold: float,
    remaining: int,
    most: int = MOST_DRAFTED,
) -> int:
    """The K in `0..most` with the most effective tokens per second; the smallest of equals.

    Args:
        costs: What passes cost.
        estimate: Of the draft.
        rows: Particles that grow.
        ess_threshold: τ.
        remaining: Tokens that a text may still have.
        most: Largest K allowed; more than `MOST_DRAFTED` is never chosen.
    """
    k = np.arange(min(most, MOST_DRAFTED) + 1)
    share = mean_ess(estimate, k, ess_threshold=ess_threshold, remaining=remaining)
    tokens = expected_tokens(k, estimate.end_probability)
    return int(np.argmax(share * tokens / costs.step_seconds(rows, k)))


def mean_ess(
    estimate: Estimate, block_size: Any, *, ess_threshold: float, remaining: int
) -> np.ndarray:
    """Mean of ESS / N over the steps from one resampling to the next, for each K of an array.

    Log-normal weights (Kong, Liu & Wong 1994): ESS / N = exp(−variance of the log-weights).
    """
    k = np.asarray(block_size)
    v = np.maximum(k * estimate.draft_variance + estimate.bonus_variance, 1e-12)
    spread_allowed = -np.log(ess_threshold) if ess_threshold > 0 else np.inf
    steps = np.clip(np.ceil(spread_allowed / v), 1, np.ceil(max(remaining, 1) / (k + 1)))
    return np.exp(-v) * np.expm1(-steps * v) / (steps * np.expm1(-v))


def expected_tokens(block_size: Any, end_probability: float) -> np.ndarray:
    """Tokens of a particle in a step, bonus token included, for each K of an array."""
    k = np.asarray(block_size)
    if end_probability == 0:
        return k + 1.0
    return (1 - (1 - end_probability) ** (k + 1)) / end_probability
