"""From logits to what is sampled: the transformed target, masked proposals, and draws.

All functions take and return float32 log-probabilities `[..., V]` on the logits' device.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from guided_smc.options import GREEDY_TEMPERATURE, OUTSIDE

NEG_INF = float("-inf")


def target_scores(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The transformed target `p`, as scores and their normaliser: `log p = scores − log_z`.

    Not subtracted here: of all positions of a block only one token each is asked for.

    The order is that of transformers: temperature, top-k, top-p, min-p. Each keeps at least the
    most likely token.

    Args:
        logits: float32 `[..., V]`; −inf for ids that are no tokens.
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.

    Returns:
        Scores `[..., V]`, and `log_z` `[..., 1]`.
    """
    scaled = scale(logits, temperature)
    if top_k and top_k < scaled.shape[-1]:
        kth = scaled.topk(top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, NEG_INF)
    if top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        # A token stays if the mass before it is less than top_p.
        cut = probs.cumsum(dim=-1) - probs >= top_p
        cut[..., 0] = False
        scaled = scaled.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), NEG_INF)
    if min_p > 0.0:
        top = scaled.amax(dim=-1, keepdim=True)
        scaled = scaled.masked_fill(scaled < top + float(np.log(min_p)), NEG_INF)
    # Not log_softmax: it rounds otherwise than the proposals' normaliser does, always to one side.
    return scaled, scaled.logsumexp(dim=-1, keepdim=True)


def truncated_draft(
    scores: torch.Tensor, *, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """What a draft proposes for a target that is cut by top-k, top-p or min-p: log q `[R, V]`.

    Mostly its own distribution cut alike, since a token outside the target's cut ends a particle;
    and with a share of `OUTSIDE` all of it, since the two cuts differ and everything that the
    target can say must be reachable.

    Args:
        scores: float32 `[R, V]`, the draft's unnormalised log-probabilities.
        top_k: Of the target.
        top_p: Of the target.
        min_p: Of the target.
    """
    whole = scores - scores.logsumexp(dim=-1, keepdim=True)
    cut, log_z = target_scores(scores, top_k=top_k, top_p=top_p, min_p=min_p)
    return torch.logaddexp(cut - log_z + math.log1p(-OUTSIDE), whole + math.log(OUTSIDE))


def scale(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits divided by the temperature; shifted first, so that a tiny one stays exact."""
    if temperature == 1.0:
        return logits
    return (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, GREEDY_TEMPERATURE)


def masked_log_probs(
    scores: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The proposal `q̃ ∝ exp(scores) · mask`.

    Args:
        scores: float32 `[R, V]`, unnormalised log-probabilities.
        mask: bool `[R, V]`, or None for no mask.

    Returns:
        `log q̃` `[R, V]` and the log-normaliser `[R]`: −inf where the mask (or the scores) leave
        nothing, NaN where the scores hold one; that row of `log q̃` is then all −inf.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, NEG_INF)
    log_z = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - log_z).masked_fill(~log_z.isfinite(), NEG_INF), log_z.squeeze(-1)


def draw(log_q: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token per row by inverting the cumulative distribution; never one of probability 0.

    Args:
        log_q: float32 `[R, V]`, normalised; rows of −inf yield some token.
        uniforms: float64 `[R]` in [0, 1).

    Returns:
        int64 `[R]` on the device of `log_q`.
    """
    cdf = log_q.exp().double().cumsum(dim=-1)
    total = cdf[:, -1:]
    points = uniforms.to(cdf.device).unsqueeze(-1) * total
    # Rounding must not put a point at the very end, where no token's interval is.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, points, right=True).squeeze(-1)
    return token.clamp_(max=log_q.shape[-1] - 1)


def unpack_bitmask(bitmask: torch.Tensor, width: int) -> torch.Tensor:
    """Bool `[R, width]` from an int32 CPU bitmask `[R, ceil(width / 32)]`."""
    as_bytes = bitmask.contiguous().numpy().view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=-1, count=width, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)


def empty_bitmask(rows: int, width: int) -> torch.Tensor:
    """A zeroed bitmask for `width` tokens."""
    return torch.zeros(rows, (width + 31) // 32, dtype=torch.int32)
