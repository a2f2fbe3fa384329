"""How many tokens to draft: from what passes cost, and from how well target and draft agree.

Drafting K tokens buys K more tokens for a target pass, and pays with the spread of the weights. For
a factor w of the weights let `σ² = log(E[w²] / E[w]²)`: the variance of log w if that is small or
normal. It adds up over tokens, as far as these are independent, and `exp(−σ²)` is the share of the
particles that counts, ESS / N. With σ² of a drafted token, and σ_b² of the bonus token (which has
some under a constraint), a step adds `v = K σ² + σ_b²`. The share goes on falling until it is under
the resampling threshold τ, after `m = ⌈log(1/τ) / v⌉` steps, and then begins anew.
`best_block_size` takes the K with the most effective tokens per second,

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
from guided_smc.resampling import normalise

MOST_DRAFTED = 16
"""The largest K that is chosen."""

PRIOR_VARIANCE = 0.05
"""σ² before anything was drafted, that of a close draft: one that is tried shows what it is worth,
and of one that is not nothing is ever learnt."""

PRIOR_WEIGHT = 4.0
"""Tokens of one degree of freedom that the prior counts for."""

MEMORY = 0.95
"""Weight of the past from step to step. Agreement differs along a text; and where nothing is
drafted nothing is observed, so that what is remembered fades and drafting is tried again."""


@dataclass(frozen=True)
class DraftEstimate:
    """What there is to know of a draft.

    Attributes:
        draft_variance: σ² of a drafted token.
        bonus_variance: σ_b² of a bonus token, whose weight is Z: 0 in free text.
        end_probability: That a token ends a text; what is drafted behind an end is lost.
    """

    draft_variance: float
    bonus_variance: float = 0.0
    end_probability: float = 0.0


class Spread:
    """Running estimate of σ², what a token adds to the spread of the weights.

    The particles of a step gain factors `w = exp(d)` with c tokens each. Their relative variance,
    `r = Σ (w − w̄)² / ((n − 1) w̄²)`, is that of c tokens: `log(1 + r) / c` is an estimate of σ². It
    is finite for factors of 0 too. Of one or two particles it is too small where blocks spread the
    weights far (a third too small at `c σ² = 0.3`): they cannot show a large variance.

    A single particle has nobody to differ from. There d is compared with the mean of the steps
    before, as if a second particle had that mean; the variance of the difference, which is half
    that of two particles, is doubled.

    Args:
        prior: σ² to begin with.
    """

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.observed = False
        self._spread = self._tokens = 0.0  # both weighted by degrees of freedom
        self._gained = self._gaining = 0.0  # log-weight of single particles, and tokens of it

    @property
    def variance(self) -> float:
        """σ²."""
        return (PRIOR_WEIGHT * self.prior + self._spread) / (PRIOR_WEIGHT + self._tokens)

    def fade(self) -> None:
        """A step passes."""
        self._spread, self._tokens = MEMORY * self._spread, MEMORY * self._tokens
        self._gained, self._gaining = MEMORY * self._gained, MEMORY * self._gaining

    def add(self, tokens: np.ndarray, gained: np.ndarray) -> None:
        """Take in a step: c, int64 `[n]`, and d, float64 `[n]`, down to −inf."""
        c, d = tokens[tokens > 0].astype(np.float64), gained[tokens > 0]
        if not len(c):
            return
        self.observed = True
        if len(c) > 1:
            w = normalise(d)  # all 0 if every factor is 0: then as if one particle had it all
            relative = float(np.var(w, ddof=1)) / float(w.mean()) ** 2 if w.any() else len(w)
        else:
            mean = float(c[0]) * self._gained / self._gaining if self._gaining else 0.0
            relative = 4.0 * float(np.tanh((d[0] - mean) / 2)) ** 2
            if np.isfinite(d[0]):
                self._gained += float(d[0])
                self._gaining += float(c[0])
        freedom = max(len(c) - 1, 1)
        self._spread += freedom * float(np.log1p(relative))
        self._tokens += freedom * float(c.mean())


class Agreement:
    """Running estimates of a population, from its past steps alone."""

    def __init__(self) -> None:
        self.drafted = Spread(PRIOR_VARIANCE)
        self.bonus = Spread(0.0)
        self._ended = self._tokens = 0.0

    @property
    def estimate(self) -> DraftEstimate:
        """What is known now."""
        end_probability = self._ended / (PRIOR_WEIGHT + self._tokens)
        return DraftEstimate(self.drafted.variance, self.bonus.variance, end_probability)

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
    estimate: DraftEstimate,
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
    estimate: DraftEstimate, block_size: Any, *, ess_threshold: float, remaining: int
) -> np.ndarray:
    """Mean of ESS / N over the steps from one resampling to the next, for each K of an array.

    That of many particles: of few, ESS as it is measured is larger, and says too much of them.
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
