"""From logits to what is sampled: the transformed target, masked proposals, and draws.

All functions take float32 `[..., V]` on the logits' device and answer there.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from guided_smc.options import GREEDY_TEMPERATURE, OUTSIDE

NEG_INF = float("-inf")

BLOCK = 256
"""Tokens that a draw takes together at first."""
WIDTH = 16
"""Blocks in a group of them, and tokens in a part of a block."""
UNIFORMS = 4
"""That a draw uses."""

_LOG2_E = math.log2(math.e)


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


def masked_weights(
    scores: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The proposal `q̃ ∝ exp(scores) · mask`, not normalised.

    Args:
        scores: float32 `[R, V]`, unnormalised log-probabilities.
        mask: bool `[R, V]`, or None for no mask.

    Returns:
        Weights float32 `[R, W]`, `W ≥ V` a multiple of `BLOCK`, 0 from `V` on; the largest of each
        row is 1 (all are 0 where the mask or the scores leave nothing, NaN where the scores hold
        one). And float64 `[R]`, the log of what they must be multiplied by.
    """
    n_rows, width = scores.shape
    weights = scores.new_empty(n_rows, -(-width // BLOCK) * BLOCK)
    weights[:, width:] = NEG_INF
    if mask is None:
        weights[:, :width] = scores
    else:
        torch.where(mask, scores, scores.new_tensor(NEG_INF), out=weights[:, :width])
    top = weights.amax(dim=-1, keepdim=True)
    top = torch.where(top.isneginf(), torch.zeros_like(top), top)
    # exp is a dozen times slower than exp2 where results underflow, as most do.
    weights = weights.sub_(top).mul_(_LOG2_E).exp2_()
    return weights, top.squeeze(-1).double()


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row in proportion to its weight; never one of weight 0.

    Down a tree: a group of blocks, a block, a part of it, a token, each among some `WIDTH` by a
    uniform of its own. A single one that inverts the cumulative weights of the whole vocabulary
    would do, were logits the same to the last bit whoever shares the batch. They are not, and what
    rounding shifts the cumulative weights by is more than the whole weight of an unlikely token:
    whenever one of those is drawn, it would be another one each time. The share of a token in its
    part, and so on upwards, shifts in proportion.

    Args:
        weights: float32 `[R, W]`, as of `masked_weights`; rows of 0 or NaN yield some token.
        uniforms: float64 `[R, UNIFORMS]` in [0, 1).

    Returns:
        Tokens int64 `[R]`, and the rows' totals float64 `[R]`, on the device of the weights.
    """
    n_rows = len(weights)
    rows = torch.arange(n_rows, device=weights.device)
    u = uniforms.to(weights.device).unbind(-1)
    sums = weights.view(n_rows, -1, BLOCK).sum(dim=-1, dtype=torch.float64)
    sums = torch.nn.functional.pad(sums, (0, -sums.shape[1] % WIDTH)).view(n_rows, -1, WIDTH)
    groups = sums.sum(dim=-1)
    group = _choose(groups, u[0])
    block = group * WIDTH + _choose(sums[rows, group], u[1])
    # Behind the last block stands none, which only a row of 0 or NaN can come to.
    block = block.clamp_(max=weights.shape[1] // BLOCK - 1)
    parts = weights.view(n_rows, -1, BLOCK // WIDTH, WIDTH)[rows, block].double()
    part = _choose(parts.sum(dim=-1), u[2])
    token = _choose(parts[rows, part], u[3])
    return block * BLOCK + part * WIDTH + token, groups.sum(dim=-1)


def _choose(masses: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """For each row of masses `[R, n]` the index int64 `[R]` that a uniform `[R]` falls on."""
    cdf = masses.cumsum(dim=-1)
    total = cdf[:, -1]
    # Rounding must not put a point at the very end, where no interval is.
    points = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, points.unsqueeze(-1), right=True).squeeze(-1)
    return index.clamp_(max=masses.shape[1] - 1)


def unpack_bitmask(bitmask: np.ndarray, width: int) -> torch.Tensor:
    """Bool `[R, width]` from an int32 bitmask `[R, ceil(width / 32)]`."""
    bits = np.unpackbits(bitmask.view(np.uint8), axis=-1, count=width, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)


def empty_bitmask(rows: int, width: int) -> np.ndarray:
    """A zeroed bitmask for `width` tokens."""
    return np.zeros((rows, (width + 31) // 32), dtype=np.int32)
