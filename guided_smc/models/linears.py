"""A model's linears in the forms that serve few rows at a time well.

Decoding multiplies each weight matrix by a handful of rows, so that reading the weights is the
work. On the CPU the layout of torch's own linears takes two to three times as long for that as
the blocked one that oneDNN packs to (`Packed`); 8-bit weights are a quarter of the size (`Int8`).
Linears that are given the same input become one product.
"""

from __future__ import annotations

import platform
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that are, as a rule, given the same input."""

_ROWS = 16
"""Rows that a packed layout is chosen for; what serves these serves 1 to 500 about as well."""


class Product(torch.nn.Module, ABC):
    """The weights of one or more linears, side by side, in some form."""

    @abstractmethod
    def weights(self) -> torch.Tensor:
        """Dense weights `[out, in]`, made anew."""

    @abstractmethod
    def biases(self) -> torch.Tensor | None:
        """`[out]` or None."""


_REDUCED = (
    platform.machine().lower() in ("x86_64", "amd64")
    and not getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
)
"""Whether activations get 7 bits: without VNNI, x86 adds pairs of products in 16 bits, where those
of 8 bits overflow."""


class Int8(Product):
    """Weights of 8 bits (one scale per output), activations quantised on the fly.

    Args:
        weight: `[out, in]`.
        bias: `[out]` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        weight = weight.float()
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-8).double()
        zero = torch.zeros(len(weight), dtype=torch.int64)
        # The engine is part of what is packed, and this one is twice as fast as the other.
        before = torch.backends.quantized.engine
        if "x86" in torch.backends.quantized.supported_engines:
            torch.backends.quantized.engine = "x86"
        try:
            with warnings.catch_warnings():
                # Torch means to drop quantised tensors; its own int8 products still want them.
                warnings.simplefilter("ignore", UserWarning)
                quantised = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(
                quantised, None if bias is None else bias.float()
            )
        finally:
            torch.backends.quantized.engine = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`, in the precision of `x`."""
        product = torch.ops.quantized.linear_dynamic
        y: torch.Tensor = product(x.float(), self.packed, reduce_range=_REDUCED)
        return y.to(x.dtype)

    def weights(self) -> torch.Tensor:
        """Those that the 8 bits stand for."""
        found: torch.Tensor = torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()
        return found

    def biases(self) -> torch.Tensor | None:
        """In float32."""
        found: torch.Tensor | None = torch.ops.quantized.linear_unpack(self.packed)[1]
        return found


class Packed(Product):
    """Weights of the model's own precision, in oneDNN's blocked layout.

    Args:
        weight: `[out, in]`, float32 or bfloat16, on the CPU.
        bias: `[out]` or None.
    """

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        # A buffer, so that copies of the model share it; not in the state dict, which is dense.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        product = torch.ops.guided_smc.packed_linear if torch.jit.is_tracing() else _packed_linear
        y: torch.Tensor = product(x, self.packed, self.bias)
        return y

    def weights(self) -> torch.Tensor:
        """Exactly those that were packed."""
        found: torch.Tensor = self.packed.to_dense()
        return found

    def biases(self) -> torch.Tensor | None:
        """As given."""
        return self.bias


def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    y: torch.Tensor = _pointwise(x, packed, bias, "none", [], "")
    return y


_pointwise: Any = None
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    _pointwise = torch.ops.mkldnn._linear_pointwise.default
# As an operator of ours: tracing cannot record the arguments of oneDNN's.
_library = torch.library.Library("guided_smc", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")


class Member(torch.nn.Module):
    """One of several linears that share a product.

    The first to see an input computes for all; the others take their parts. A member that is
    given another input than the others computes for itself.
    """

    def __init__(self, shared: Shared, place: int) -> None:
        super().__init__()
        if place == 0:
            self.product = shared.product  # in the module tree once
        self._shared = [shared]
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to this member's `[..., out]`."""
        return self._shared[0].part(x, self.place)

    @property
    def weight(self) -> torch.Tensor:
        """`[out, in]`, made anew."""
        shared = self._shared[0]
        return shared.product.weights().split(shared.sizes)[self.place]

    @property
    def bias(self) -> torch.Tensor | None:
        """`[out]` or None."""
        shared = self._shared[0]
        biases = shared.product.biases()
        return None if biases is None else biases.split(shared.sizes)[self.place]


class Shared:
    """A product, and the parts of its last output that nobody has taken yet."""

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self.product = product
        self.sizes = list(sizes)
        self._of: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def part(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """The output of the member at `place`."""
        if self._of is not x or place not in self._parts:
            self._of = x
            self._parts = dict(enumerate(self.product(x).split(self.sizes, dim=-1)))
        part = self._parts.pop(place)
        if not self._parts:
            self._of = None
        return part


class Alone(torch.nn.Module):
    """A linear with a product of its own."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        y: torch.Tensor = self.product(x)
        return y

    @property
    def weight(self) -> torch.Tensor:
        """`[out, in]`, made anew."""
        return self.product.weights()

    @property
    def bias(self) -> torch.Tensor | None:
        """`[out]` or None."""
        return self.product.biases()


def replace_linears(
    module: torch.nn.Module, make: Callable[[torch.Tensor, torch.Tensor | None], Product]
) -> None:
    """Put products in the place of every linear inside, in place.

    Args:
        module: Whose linears to replace, in whatever form they are.
        make: A product from weights `[out, in]` and biases `[out]`.
    """
    for parent in list(module.modules()):
        if isinstance(parent, Product | Alone | Member):
            continue
        linears: dict[str, Any] = {n: m for n, m in parent.named_children() if _is_linear(m)}
        for names in SIBLINGS:
            group = [linears[n] for n in names if n in linears]
            if len(group) < len(names) or len({m.bias is None for m in group}) > 1:
                continue
            weights = [_weight(m) for m in group]
            biases = [b for b in (_bias(m) for m in group) if b is not None]
            product = make(torch.cat(weights), torch.cat(biases) if biases else None)
            shared = Shared(product, [len(w) for w in weights])
            for place, name in enumerate(names):
                setattr(parent, name, Member(shared, place))
                del linears[name]
        for name, linear in linears.items():
            setattr(parent, name, Alone(make(_weight(linear), _bias(linear))))


def can_pack(model: torch.nn.Module) -> bool:
    """Whether `Packed` serves this model here."""
    weights = {(p.device.type, p.dtype) for p in model.parameters()}
    return (
        bool(weights)
        and weights <= {("cpu", torch.float32), ("cpu", torch.bfloat16)}
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and _pointwise is not None
        and all(_packs(dtype) for _, dtype in weights)
    )


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether this CPU packs weights of this precision: older ones refuse bfloat16."""
    try:
        Packed(torch.zeros(16, 16, dtype=dtype), None)
    except RuntimeError:
        return False
    return True


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear | Conv1D | Alone | Member)


def _weight(linear: Any) -> torch.Tensor:
    """`[out, in]`."""
    weight: torch.Tensor = linear.weight.detach()
    return weight.T if isinstance(linear, Conv1D) else weight


def _bias(linear: Any) -> torch.Tensor | None:
    """`[out]` or None."""
    return None if linear.bias is None else linear.bias.detach()
