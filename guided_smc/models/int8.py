"""The int8 twin: the target's own linears quantised, as a draft that needs no second model.

The twin has the target's shapes and shares all that is not quantised. While it drafts it reads the
target's own cache for everything that is committed, and writes the drafted positions there too,
behind the end of each row; verification then writes them again in the target's precision. So it
needs no prefill and no cache of its own, and the prompt is never encoded in int8, which would
spoil it: one activation scale a tensor cannot hold the outliers of the first tokens.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from guided_smc.errors import ModelError
from guided_smc.models.rows import RowSession
from guided_smc.models.transformers import TransformersModel

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
        with warnings.catch_warnings():
            # Torch means to drop quantised tensors; its own int8 products still want them.
            warnings.simplefilter("ignore", UserWarning)
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


class Int8Twin:
    """The target with its linears quantised, as a draft for it.

    Args:
        target: Must run on the CPU and keep its K/V in rows.

    Raises:
        ModelError: The target's architecture or device cannot have such a twin.
    """

    def __init__(self, target: TransformersModel) -> None:
        if not target.uses_rows:
            raise ModelError(
                f"draft='int8' reads the target's K/V by position, and {target.name!r} "
                f"({type(target.model).__name__}) keeps other state; use a second model as draft"
            )
        if target.device.type != "cpu":
            raise ModelError(
                f"draft='int8' runs on the CPU, and {target.name!r} is on {target.device}; "
                "use a second model as draft"
            )
        self.vocabulary = target.vocabulary
        self.context_length = target.context_length
        self.name = f"{target.name} (int8)"
        shared = [*target.model.parameters(), *target.model.buffers()]
        module = copy.deepcopy(target.model, memo={id(t): t for t in shared})
        quantise(module)
        self.model = target.with_module(module, name=self.name)

    def start_session(self) -> Any:
        """Not without the target's.

        Raises:
            ModelError: Always: the twin has no cache of its own.
        """
        raise ModelError(f"{self.name!r} can only draft for its own target")

    def follow(self, target: Any) -> TwinSession:
        """A session on the target's cache."""
        return TwinSession(self.model, target)


class TwinSession:
    """Drafted positions behind the rows of the target's session, until verification."""

    def __init__(self, model: TransformersModel, target: RowSession) -> None:
        self.model = model
        self.target = target
        self._ahead = torch.zeros(0, dtype=torch.int64)

    def begin_block(self) -> None:
        """Forget what was drafted: the rows stand where the target's stand."""
        self._ahead = torch.zeros_like(self.target.lengths)

    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, *, last_only: bool
    ) -> torch.Tensor:
        """Append tokens to the drafted part of every row."""
        lengths = self.target.lengths + self._ahead
        self._ahead = self._ahead + counts
        return self.target.extend_at(self.model, lengths, tokens, counts, last_only=last_only)


def quantise(module: torch.nn.Module) -> None:
    """Replace every linear inside, siblings that share an input by one product."""
    # The engine is part of what is packed, and this one is twice as fast as the other.
    before = torch.backends.quantized.engine
    if "x86" in torch.backends.quantized.supported_engines:
        torch.backends.quantized.engine = "x86"
    try:
        for parent in list(module.modules()):
            _quantise_children(parent)
    finally:
        torch.backends.quantized.engine = before


def _quantise_children(parent: torch.nn.Module) -> None:
    linears = {n: m for n, m in parent.named_children() if isinstance(m, torch.nn.Linear | Conv1D)}
    for names in SIBLINGS:
        group = [linears[n] for n in names if n in linears]
        if len(group) < len(names) or len({m.bias is None for m in group}) > 1:
            continue
        leader = Leader(_int8(group), [len(_weight(m)) for m in group])
        for place, name in enumerate(names):
            setattr(parent, name, Follower(leader, place) if place else leader)
            del linears[name]
    for name, linear in linears.items():
        setattr(parent, name, _int8([linear]))


def _int8(linears: Sequence[Any]) -> Int8Linear:
    biases = [m.bias for m in linears if m.bias is not None]
    return Int8Linear([_weight(m) for m in linears], biases)


def _weight(linear: Any) -> torch.Tensor:
    """`[out, in]`."""
    weight: torch.Tensor = linear.weight
    return weight.T if isinstance(linear, Conv1D) else weight
