"""Resampling schemes: which particle each slot continues.

Every scheme has the signature `scheme(weights, uniforms) -> ancestors`:

- `weights`: float64 `[N]`, non-negative, summing to 1;
- `uniforms`: float64 `[N']` in [0, 1) (a scheme may need only some of them): their number is that
  of the offspring, which may be another than that of the particles;
- `ancestors`: int64 `[N']`, with `E[#{i : ancestors[i] = n}] = N' · weights[n]`, which is what
  keeps the estimates unbiased.

Described in Douc, Cappé & Moulines, "Comparison of resampling schemes for particle filtering"
(2005). Systematic has the least variance in practice and costs one uniform.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def systematic(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """One uniform, N' points a distance 1/N' apart."""
    n = len(uniforms)
    return _inverse_cdf(weights, (np.arange(n) + uniforms[0]) / n)


def stratified(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """One uniform point in each of N' strata of length 1/N'."""
    n = len(uniforms)
    return _inverse_cdf(weights, (np.arange(n) + uniforms) / n)


def multinomial(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """N' independent draws."""
    return _inverse_cdf(weights, np.sort(uniforms))


def residual(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """⌊N' · w⌋ copies for sure, the rest by independent draws from what is left."""
    n = len(uniforms)
    expected = n * weights
    # A weight such as 1/3 gives 0.9999... copies where 1 is meant.
    certain = np.floor(expected * (1 + 1e-12)).astype(np.int64)
    copies = np.repeat(np.arange(len(weights)), certain)
    left = n - len(copies)
    if left == 0:
        return copies
    rest = np.maximum(expected - certain, 0.0)
    drawn = _inverse_cdf(rest / rest.sum(), np.sort(uniforms[:left]))
    return np.sort(np.concatenate([copies, drawn]))


SCHEMES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "systematic": systematic,
    "stratified": stratified,
    "multinomial": multinomial,
    "residual": residual,
}


def _inverse_cdf(weights: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Index of the weight under each sorted point of [0, 1); never one whose weight is 0."""
    cdf = np.cumsum(weights)
    index = np.searchsorted(cdf, points * cdf[-1], side="right")
    return np.minimum(index, np.flatnonzero(weights)[-1])


def keep_in_place(ancestors: np.ndarray) -> np.ndarray:
    """The same ancestors `[N']`, permuted so that every survivor keeps its own slot if it is left.

    Slots are exchangeable, so the law is the same; only the copies then have to move.
    """
    n = len(ancestors)
    copies = np.bincount(ancestors, minlength=n)
    own = np.flatnonzero(copies[:n])
    placed = np.full(n, -1)
    placed[own] = own
    copies[own] -= 1
    placed[placed < 0] = np.repeat(np.arange(len(copies)), copies)
    return placed


def log_sum_exp(log_w: np.ndarray) -> float:
    """`log Σ exp(log_w)`; −inf where all are −inf."""
    top = float(np.max(log_w, initial=-np.inf))
    if top == -np.inf:
        return -np.inf
    return top + float(np.log(np.sum(np.exp(log_w - top))))


def normalise(log_w: np.ndarray) -> np.ndarray:
    """Weights that sum to 1, float64 `[N]`; all 0 where all log-weights are −inf."""
    top = float(np.max(log_w, initial=-np.inf))
    if top == -np.inf:
        return np.zeros_like(log_w)
    w = np.exp(log_w - top)
    return w / w.sum()


def effective_sample_size(weights: np.ndarray) -> float:
    """`1 / Σ w²` of normalised weights (Kish 1965): N if all are equal; 0 if all are 0."""
    square = float(np.sum(weights**2))
    return 1.0 / square if square > 0 else 0.0
