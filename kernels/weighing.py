"""Weights, ESS, evidence and ancestors of groups of particles, in float64.

What `Population.finish_step` does with the schemes of `guided_smc.resampling`, for many groups at
once and without asking the device whether anything is to be resampled.
"""

from __future__ import annotations

import math

import torch

from guided_smc.kernels.dispatch import check, operator, runs_kernel

NEG_INF = float("-inf")
SCHEMES = ("systematic", "stratified")


def _fake(
    log_w: torch.Tensor,
    increment: torch.Tensor,
    held: torch.Tensor | None,
    threshold: torch.Tensor,
    uniform: torch.Tensor,
    scheme: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    new = log_w.new_empty(log_w.shape)
    ancestors = log_w.new_empty(log_w.shape, dtype=torch.int64)
    ess, evidence = (log_w.new_empty(log_w.shape[0]) for _ in range(2))
    return new, ancestors, ess, evidence, log_w.new_empty(log_w.shape[0], dtype=torch.bool)


@operator(_fake)
def weigh_resample(
    log_w: torch.Tensor,
    increment: torch.Tensor,
    held: torch.Tensor | None,
    threshold: torch.Tensor,
    uniform: torch.Tensor,
    scheme: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add to the log-weights and resample the groups whose ESS is below `threshold · N`.

    A group is one prompt's particles, or one island of them. The schemes are those of
    `guided_smc.resampling`; a survivor keeps its own slot.

    Args:
        log_w: float64 `[G, N]`, log-weights since the last resampling.
        increment: float64 `[G, N]`, added to them; −inf kills.
        held: float64 `[G, N]`, what the weights that particles are resampled by have more than
            `log_w`; each particle keeps minus that as its weight. None is 0.
        threshold: float64 `[G]` in [0, 1]; 0 for a group that is not to be resampled, such as
            one in which nothing grows any more.
        uniform: float64 `[G, N]` in [0, 1); systematic takes the first of each group.
        scheme: `"systematic"` or `"stratified"`.

    Returns:
        The new log-weights float64 `[G, N]`, those of each slot's ancestor; ancestors int64
        `[G, N]` within the group, 0..N-1 in order where it was not resampled; ESS before
        resampling, float64 `[G]`, 0 where all weights are; what is to be added to the group's
        log-evidence, float64 `[G]`, 0 where it was not resampled; and whether it was, bool `[G]`.

    Raises:
        ValueError: A shape, dtype or device does not fit, or the scheme is another.
    """
    check("weigh_resample", "log_w", log_w, torch.float64, (None, None), log_w)
    size = tuple(log_w.shape)
    check("weigh_resample", "increment", increment, torch.float64, size, log_w)
    if held is not None:
        check("weigh_resample", "held", held, torch.float64, size, log_w)
    check("weigh_resample", "threshold", threshold, torch.float64, size[:1], log_w)
    check("weigh_resample", "uniform", uniform, torch.float64, size, log_w)
    if scheme not in SCHEMES:
        raise ValueError(
            f"weigh_resample: scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}"
        )
    if runs_kernel(log_w):
        from guided_smc.kernels import weighing_triton

        if size[1] <= weighing_triton.MOST:
            return weighing_triton.launch(log_w, increment, held, threshold, uniform, scheme)
    return weigh_resample_reference(log_w, increment, held, threshold, uniform, scheme)


def weigh_resample_reference(
    log_w: torch.Tensor,
    increment: torch.Tensor,
    held: torch.Tensor | None,
    threshold: torch.Tensor,
    uniform: torch.Tensor,
    scheme: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`weigh_resample` in torch: what it means."""
    n = log_w.shape[1]
    log_w = log_w + increment
    held = torch.zeros_like(log_w) if held is None else held
    log_v = log_w + held
    top = log_v.amax(dim=-1, keepdim=True)
    top = torch.where(top.isneginf(), 0.0, top)
    masses = (log_v - top).exp()
    total = masses.sum(dim=-1, keepdim=True)
    weights = masses / torch.where(total > 0, total, 1.0)
    square = weights.square().sum(dim=-1)
    ess = torch.where(square > 0, 1.0 / square, 0.0)
    resampled = (ess > 0) & (ess < threshold * n)

    slots = torch.arange(n, device=log_w.device).expand_as(log_w).contiguous()
    if scheme == "systematic":
        uniform = uniform[:, :1]
    drawn = keep_in_place(_inverse_cdf(weights, (slots + uniform) / n))
    ancestors = torch.where(resampled.unsqueeze(-1), drawn, slots)
    kept = torch.where(resampled.unsqueeze(-1), 0.0 - held, log_w)
    evidence = (top + total.log()).squeeze(-1) - math.log(n)
    return (
        kept.gather(-1, ancestors),
        ancestors,
        ess,
        torch.where(resampled, evidence, 0.0),
        resampled,
    )


def _inverse_cdf(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Index of the weight under each point of [0, 1), `[G, N]`; never one whose weight is 0."""
    # The largest so far of the weights above 0: a device's scan may round one of 0 upwards.
    cdf = torch.where(weights > 0, weights.cumsum(dim=-1), 0.0).cummax(dim=-1).values
    index = torch.searchsorted(cdf, points * cdf[:, -1:], right=True)
    slots = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, slots, 0).amax(dim=-1, keepdim=True)
    return torch.minimum(index, last)


def keep_in_place(ancestors: torch.Tensor) -> torch.Tensor:
    """The same ancestors `[G, N]`, each survivor in its own slot, the copies in the others.

    As `guided_smc.resampling.keep_in_place`: the k-th slot left over gets the k-th copy.
    """
    copies = torch.zeros_like(ancestors).scatter_add_(-1, ancestors, torch.ones_like(ancestors))
    own = copies > 0
    before = (copies - own.long()).cumsum(dim=-1)
    rank = (~own).cumsum(dim=-1) - 1
    slots = torch.arange(ancestors.shape[1], device=ancestors.device)
    others = torch.searchsorted(before, rank, right=True).clamp_(max=ancestors.shape[1] - 1)
    return torch.where(own, slots, others)
