"""The module's forward pass as a graph of its operators, without its Python.

With few rows, half the time of a quantised pass goes into module calls and not into arithmetic. A
traced graph runs the same operators in the same order, with attention as one operator of ours.
It is made once a model has run often enough to be worth it, and used only if it gives exactly
what the module gives for other shapes than those that it was made from; a module whose path
depends on its input is not traced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from guided_smc.models.checks import quiet
from guided_smc.models.particles import blank
from guided_smc.signals import held

AFTER = 32
"""Small passes before tracing, which takes as long as a few dozen of them."""

SMALL = 256
"""Tokens in a pass, up to which module calls are a share of the time."""

Forward = Callable[..., torch.Tensor]


class TracedPass:
    """Runs the module until it is worth tracing, and then the graph.

    Args:
        module: The model.
        forward: Its pass: tokens `[R, L]`, positions `[R, L]`, the positions to keep and
            a cache, to logits `[R, kept, V]`.
        n_layers: Of the model.
    """

    def __init__(self, module: torch.nn.Module, forward: Forward, n_layers: int) -> None:
        self._module = module
        self._forward = forward
        self._n_layers = n_layers
        self._passes = 0
        self._tried = False
        self._graph: Any = None

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        keep: int | torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """Logits `[R, kept, V]`."""
        if tokens.numel() <= SMALL:
            self._passes += 1
            if self._passes >= AFTER:
                self.prepare(tokens.device)
            if self._graph is not None:
                # An exception out of a Python operator within the graph would come as another's.
                with torch.jit.optimized_execution(False), held():
                    logits: torch.Tensor = self._graph(
                        tokens, positions, _indices(keep, tokens.shape[1], tokens.device)
                    )
                return logits
        return self._forward(tokens, positions, keep, cache=cache)

    def prepare(self, device: torch.device) -> None:
        """Trace now, unless that was tried before."""
        if not self._tried:
            self._tried = True
            with held():
                self._graph = self._trace(device)

    def _trace(self, device: torch.device) -> Any:
        """The graph, or None if this module has none that can be trusted."""
        inputs = [_example(rows, width, device) for rows, width in ((2, 2), (3, 1), (1, 5))]
        with (
            blank(self._n_layers) as cache,
            torch.no_grad(),
            # Tracing looks at attributes that transformers comments on.
            quiet(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            # A warning says that the path depends on the input; but torch's own code is sure.
            warnings.simplefilter("error", torch.jit.TracerWarning)
            torch.jit.TracerWarning.ignore_lib_warnings()
            try:
                module = _Module(self._module, partial(self._forward, cache=cache))
                graph = torch.jit.trace(module, inputs[0], check_trace=False, strict=False)
                same = all(torch.equal(graph(*x), module(*x)) for x in inputs)
            except Exception:
                # Whatever a module does that cannot be traced, it can still be run.
                return None
        return graph if same else None


class _Module(torch.nn.Module):
    """What `torch.jit.trace` asks for: one module over what is traced."""

    def __init__(self, module: torch.nn.Module, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._module = module
        self._run = run

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        return self._run(tokens, positions, keep)


def _indices(keep: int | torch.Tensor, width: int, device: torch.device) -> torch.Tensor:
    if isinstance(keep, torch.Tensor):
        return keep
    return torch.arange(width - keep if keep else 0, width, device=device)


def _example(
    rows: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = (torch.arange(rows * width, device=device) % 7).view(rows, width)
    positions = torch.arange(width, device=device) + 3 * torch.arange(rows, device=device)[:, None]
    return tokens, positions, torch.arange(width - 1, width, device=device)
