"""What a run says of itself: estimates with standard errors, and how far its answers are one.

Particles that go back to one particle of the first step are a *family* ("Eve" is its first
member). Families draw independently, and only resampling ties them; so the spread of what they
contribute estimates the variance of a whole run, from that run alone: Chan & Lai, "A general theory
of particle filters in hidden Markov models and some applications" (2013); Lee & Whiteley, "Variance
estimation in the particle filter" (2018). Families of different islands are never tied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from guided_smc.resampling import effective_sample_size
from guided_smc.results import Diversity, Estimate

FEWEST_FAMILIES = 2.0
"""Effective number of families below which a run tells nothing of its own spread."""


@dataclass(frozen=True)
class Families:
    """What families of particles weigh.

    Attributes:
        of: int64 `[N]`, the family of each particle: the slot that it began in.
        luck: float64 `[families]`, weight that resampling has given to each by chance, in all. That
            moves no estimate of the evidence, so it has to be taken out of its variance.
    """

    of: np.ndarray
    luck: np.ndarray

    def sums(self, weights: np.ndarray) -> np.ndarray:
        """float64 `[families]`: totals of `weights` `[N]`; 0 for a family that has died out."""
        return np.bincount(self.of, weights, len(self.luck))

    def std_error(self, deviations: np.ndarray, weights: np.ndarray) -> float | None:
        """Of an estimate, from what each family makes it deviate by, float64 `[families]`.

        As the jackknife has it: each family left out in turn, which for one of weight ω moves the
        estimate by its deviation over 1 − ω.
        """
        weight = self.sums(weights)
        if effective_sample_size(weight) < FEWEST_FAMILIES:
            return None
        n = len(deviations)
        return math.sqrt(float(np.sum((deviations / (1.0 - weight)) ** 2)) * (n - 1) / n)


def diversity(
    weights: np.ndarray, families: Families, lineage: np.ndarray, texts: tuple[str, ...]
) -> Diversity:
    """From normalised weights `[N]`, `lineage` `[steps, N]` (slots of ancestors) and texts."""
    alive = weights > 0
    of_text = np.unique(np.asarray(texts, dtype=object), return_inverse=True)[1].ravel()
    return Diversity(
        ancestors=tuple(len(np.unique(slots[alive])) for slots in lineage),
        independent=effective_sample_size(families.sums(weights)),
        distinct=effective_sample_size(np.bincount(of_text, weights)),
    )


def mean(values: np.ndarray, weights: np.ndarray, families: Families) -> Estimate:
    """`Σ W f`, with its standard error.

    Args:
        values: float64 `[N]`, f; any where the weight is 0.
        weights: float64 `[N]`, summing to 1.
        families: Of the particles.
    """
    counts = weights > 0
    values = np.where(counts, values, 0.0)
    value = float(weights @ values)
    if not math.isfinite(value):
        return Estimate(value, None)
    if np.all(values[counts] == values[counts][0]):
        return Estimate(value, None)  # nothing is seen of how they differ
    deviations = families.sums(weights * np.where(counts, values - value, 0.0))
    return Estimate(value, families.std_error(deviations, weights))


def divergence(
    log_ratio: np.ndarray, log_evidence: float, weights: np.ndarray, families: Families
) -> Estimate:
    """`KL(π‖p) = E_π[log(π̃/p)] − log Z`, where `π = π̃ / Z`.

    Args:
        log_ratio: float64 `[N]`, `log π̃(x) − log p(x)`.
        log_evidence: Estimate of log Z.
        weights: As in `mean`.
        families: As in `mean`.
    """
    counts = weights > 0
    ratio = np.where(counts, log_ratio, 0.0)
    value = float(weights @ ratio)
    deviations = families.sums(weights * np.where(counts, ratio - value, 0.0))
    deviations -= _evidence_deviations(weights, families)
    if ratio.any() and np.all(ratio[counts] == ratio[counts][0]):
        return Estimate(value - log_evidence, None)
    return Estimate(value - log_evidence, families.std_error(deviations, weights))


def log_evidence_error(weights: np.ndarray, families: Families) -> float | None:
    """Standard error of log-evidence, to first order; None as in `Estimate`."""
    return families.std_error(_evidence_deviations(weights, families), weights)


def _evidence_deviations(weights: np.ndarray, families: Families) -> np.ndarray:
    """float64 `[families]`: a family that weighs more than its share has raised the evidence."""
    return families.sums(weights) - 1.0 / len(families.luck) - families.luck
