"""The kernel behind `weigh_resample`: one program for each group.

A group is some tens of numbers, and everything about it fits the registers of a few warps. What
takes a scan or a search on paper is done by comparing every pair of slots: with N slots that is N²
comparisons at once in place of a chain.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from guided_smc.kernels.dispatch import on_device_of

MOST = 128
"""Largest N: the pairs of more slots would not fit the registers."""

_NEG_INF = tl.constexpr(float("-inf"))


def launch(
    log_w: torch.Tensor,
    increment: torch.Tensor,
    held: torch.Tensor | None,
    threshold: torch.Tensor,
    uniform: torch.Tensor,
    scheme: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One launch. Arguments and results are those of `weigh_resample`, with N up to `MOST`."""
    n_groups, n = log_w.shape
    new = torch.empty(n_groups, n, dtype=torch.float64, device=log_w.device)
    ancestors = torch.empty(n_groups, n, dtype=torch.int64, device=log_w.device)
    ess = torch.empty(n_groups, dtype=torch.float64, device=log_w.device)
    evidence = torch.empty_like(ess)
    resampled = torch.empty(n_groups, dtype=torch.bool, device=log_w.device)
    if n_groups == 0 or n == 0:
        return new, ancestors, ess.zero_(), evidence.zero_(), resampled.zero_()
    slots = triton.next_power_of_2(n)
    with on_device_of(log_w):
        _weigh_resample[(n_groups,)](
            log_w.contiguous(),
            increment.contiguous(),
            None if held is None else held.contiguous(),
            threshold.contiguous(),
            uniform.contiguous(),
            new,
            ancestors,
            ess,
            evidence,
            resampled,
            N=n,
            SLOTS=slots,
            STRATIFIED=scheme == "stratified",
            # One warp needs no barriers; 64² pairs are too many for its registers.
            num_warps=1 if slots <= 16 else 4,
            enable_fp_fusion=True,  # said, since releases of Triton differ in what is the default
        )
    return new, ancestors, ess, evidence, resampled


@triton.jit
def _weigh_resample(
    log_w,
    increment,
    held,
    threshold,
    uniform,
    new,
    ancestors,
    ess,
    evidence,
    resampled,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    STRATIFIED: tl.constexpr,
):
    group = tl.program_id(0)
    base = group.to(tl.int64) * N
    slot = tl.arange(0, SLOTS)
    there = slot < N
    weight = tl.load(log_w + base + slot, mask=there, other=_NEG_INF)
    weight += tl.load(increment + base + slot, mask=there, other=0.0)
    value = weight
    if held is not None:
        value += tl.load(held + base + slot, mask=there, other=0.0)
    top = tl.max(value, axis=0)
    top = tl.where(top == _NEG_INF, 0.0, top)
    masses = tl.exp(value - top)
    total = tl.sum(masses, axis=0)
    shares = masses / tl.where(total > 0, total, 1.0)
    square = tl.sum(shares * shares, axis=0)
    size = tl.full((), N, tl.float64)
    effective = tl.where(square > 0, 1.0 / square, 0.0)
    low = (effective > 0) & (effective < tl.load(threshold + group) * size)
    tl.store(ess + group, effective)
    tl.store(resampled + group, low)
    tl.store(evidence + group, tl.where(low, top + tl.log(total) - tl.log(size), 0.0))
    if low == 0:
        tl.store(new + base + slot, weight, mask=there)
        tl.store(ancestors + base + slot, slot.to(tl.int64), mask=there)
        return

    # Pairs are [other, slot]. Every sum has the same order with zeros left in, so it grows from
    # slot to slot, and not at all where a weight is 0: such a slot is never found.
    other = slot[:, None]
    up_to = other <= slot[None, :]
    cdf = tl.sum(tl.where(up_to, shares[:, None], 0.0), axis=0)
    whole = tl.sum(tl.where(slot == SLOTS - 1, cdf, 0.0), axis=0)
    if STRATIFIED:
        draw = tl.load(uniform + base + slot, mask=there, other=0.0)
    else:
        draw = tl.load(uniform + base)
    points = (slot.to(tl.float64) + draw) / size * whole
    last = tl.max(tl.where(shares > 0, slot, 0), axis=0)
    drawn = tl.minimum(tl.sum((cdf[:, None] <= points[None, :]).to(tl.int32), axis=0), last)

    drawn = tl.where(there, drawn, -1)
    copies = tl.sum((drawn[:, None] == slot[None, :]).to(tl.int32), axis=0)
    own = copies > 0
    spare = copies - own.to(tl.int32)
    before = tl.sum(tl.where(up_to, spare[:, None], 0), axis=0)
    free = (there & (copies == 0)).to(tl.int32)
    rank = tl.sum(tl.where(up_to, free[:, None], 0), axis=0) - 1
    taken = tl.sum((before[:, None] <= rank[None, :]).to(tl.int32), axis=0)
    placed = tl.where(own, slot, taken)
    tl.store(ancestors + base + slot, placed.to(tl.int64), mask=there)
    kept = tl.zeros([SLOTS], dtype=tl.float64)
    if held is not None:
        kept = 0.0 - tl.load(held + base + placed, mask=there, other=0.0)
    tl.store(new + base + slot, kept, mask=there)
