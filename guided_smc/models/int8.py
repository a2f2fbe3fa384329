"""The int8 twin: the target's own linears quantised, as a draft that needs no second model.

The twin has the target's shapes and shares all that is not quantised. While it drafts it reads the
target's own cache for everything that is committed, and writes the drafted positions there too,
behind the end of each row; verification then writes them again in the target's precision. So it
needs no prefill and no cache of its own, and the prompt is never encoded in int8, which would
spoil it: one activation scale a tensor cannot hold the outliers of the first tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that are given the same input: one quantised product serves all of them."""


class Int8Linear(torch.nn.Module):
    """A linear with weights of 8 bits (one scale per output) and activations quantised on the fly.

    Args:
        weights: The float weights `[out_i, in]` of the linears that it stands for, joined.
        biases: Theirs, all or none.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None
    ) -> None:
        super().__init__()
        weight = torch.cat([w.detach().float() for w in weights])
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-8).double()
        zero = torch.zeros(len(weight), dtype=torch.int64)
        quantised = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
        bias = torch.cat([b.detach().float() for b in biases]) if biases else None
        self.packed = torch.ops.quantized.linear_prepack(quantised, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`, float32."""
        y: torch.Tensor = torch.ops.quantized.linear_dynamic(x, self.packed, reduce_range=False)
        return y


class Leader(torch.nn.Module):
    """The first of several linears with one input: computes all, keeps the others' parts."""

    def __init__(self, joined: Int8Linear, sizes: Sequence[int]) -> None:
        super().__init__()
        self.joined = joined
        self.sizes = list(sizes)
        self.parts: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first linear's output."""
        self.parts = list(self.joined(x).split(self.sizes, dim=-1))
        return self.parts[0]


class Follower(torch.nn.Module):
    """A linear whose output its leader has computed."""

    def __init__(self, leader: Leader, place: int) -> None:
        super().__init__()
        self._leader = [leader]  # not a submodule: it has its own place
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its part of what the leader computed from the same input."""
        return self._leader[0].parts[self.place]
