"""Recording and replaying as CUDA graphs do, without a card: the operators of a call, on the very
tensors that they were called with.

What a recorded function depends on besides the contents of its tensors is then as it was when it
was recorded, as on a card: a key that leaves something out gives wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from guided_smc.models.capture import Capture

ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero")
"""In the names of operators that ask the device something, which no graph can hold."""


class Graph(TorchDispatchMode):
    """The operators of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not any(name in str(function) for name in ASKS), f"{function} asks the device"
        out = function(*args, **(kwargs or {}))
        self.operators.append((function, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for function, args, kwargs, out in self.operators:
            results = tensors(out)
            given = {address(x) for x in tensors((args, kwargs))}
            changes = function._schema.is_mutable
            if results and not changes and all(address(x) in given for x in results):
                continue  # a view
            found = function(*args, **kwargs)
            if not changes:
                for result, value in zip(results, tensors(found), strict=True):
                    result.copy_(value)


def tensors(of: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(of)[0] if isinstance(x, torch.Tensor)]


def address(of: torch.Tensor) -> int:
    """Of its storage; packed weights have none that is known."""
    return of.untyped_storage().data_ptr() if of.layout == torch.strided else -1


def run(
    self: Capture,
    key: Any,
    function: Callable[[], None],
    changing: Sequence[torch.Tensor] = (),
) -> None:
    """As `Capture.run` does on CUDA."""
    self.calls[key] = self.calls.get(key, 0) + 1
    if key not in self._graphs:
        saved = [tensor.clone() for tensor in changing]
        function()
        self._restore(changing, saved)
        graph = Graph()
        with graph:
            function()
        self._restore(changing, saved)  # on a card nothing runs while it is recorded
        self._graphs[key] = graph
    self._graphs[key].replay()
