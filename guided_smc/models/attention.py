"""Attention of a layer: masks by position, log-sum-exps to merge parts by, caps and sinks.

Query heads that share a key head stand side by side along the queries, so that no key is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def visible_mask(
    at: torch.Tensor, columns: int, sliding: int | None, groups: int, like: torch.Tensor
) -> torch.Tensor:
    """`[R, 1, groups · L, columns]` for queries at columns `at` `[R, L]`."""
    at = at.to(like.device).unsqueeze(-1)
    column = torch.arange(columns, device=like.device)
    visible = column <= at
    if sliding is not None:
        visible &= column > at - sliding
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    # Not −inf: a query that sees nothing of a prompt must not become NaN before it is merged.
    mask.masked_fill_(~visible, torch.finfo(like.dtype).min / 2)
    return mask.repeat(1, groups, 1).unsqueeze(1)


@dataclass(frozen=True)
class Style:
    """How a layer attends: scale, sliding window, soft cap of the scores, learnt sinks `[Hq]`."""

    scaling: float | None = None
    sliding: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention without the sinks.

        Args:
            query: `[B, H, Q, D]`.
            key: `[B, H, C, D]`.
            value: `[B, H, C, Dv]`.
            mask: To add to the scores, `[B or 1, 1, Q, C]`.
            want_lse: Else the second result may be empty.

        Returns:
            `[B, H, Q, Dv]`, and the log-sum-exp of the scores, float32 `[B, H, Q]`.
        """
        plain = self.softcap is None
        want_lse = want_lse or self.sinks is not None
        if plain and not want_lse:
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=self.scaling
            )
            return out, out.new_empty(0)
        if plain and query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
            found: tuple[torch.Tensor, torch.Tensor] = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value, attn_mask=mask, scale=self.scaling
                )
            )
            return found
        scaling = query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        scores = (query @ key.transpose(-1, -2)).float() * scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            scores = scores + mask
        lse = scores.logsumexp(dim=-1)
        return (scores - lse.unsqueeze(-1)).exp().to(value.dtype) @ value, lse

    def sink(
        self, out: torch.Tensor, lse: torch.Tensor, n_kv: int, groups: int, width: int
    ) -> torch.Tensor:
        """A learnt sink per query head takes part in the softmax and then gives nothing."""
        if self.sinks is None:
            return out
        sinks = self.sinks.float().view(1, n_kv, groups, 1).expand(-1, -1, -1, width)
        kept = torch.sigmoid(lse - sinks.reshape(1, n_kv, groups * width))
        return out * kept.unsqueeze(-1).to(out.dtype)


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, style: Style
) -> torch.Tensor:
    """Attention of tokens among themselves, for prompts. Shapes as in `ParticleCache.attend`."""
    n_rows, n_heads, width, _ = query.shape
    n_kv = key.shape[1]
    groups = n_heads // n_kv
    sliding = style.sliding if style.sliding is not None and style.sliding < width else None
    if style.softcap is None and style.sinks is None and sliding is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=style.scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2)
    packed = query.reshape(n_rows, n_kv, groups * width, -1)
    mask = visible_mask(torch.arange(width).unsqueeze(0), width, sliding, groups, query)
    out, lse = style.attend(packed, key, value, mask, want_lse=False)
    out = style.sink(out, lse, n_kv, groups, width)
    return out.reshape(n_rows, n_heads, width, -1).transpose(1, 2)
