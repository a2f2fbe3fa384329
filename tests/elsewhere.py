"""Processes in which Triton runs, or only compiles, without a card.

Triton decides while it is imported whether it interprets; so that no other test sees a difference,
each way has a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def interpreting() -> Iterator[Callable[..., Any]]:
    """Yields `run(function, *args)`, which runs kernels on CPU tensors in Triton's interpreter."""
    yield from _process(_interpret)


def compiling() -> Iterator[Callable[..., Any]]:
    """Yields `run(function, *args)`, for `kernels_compiled`."""
    yield from _process(_only_compile)


def kernels_compiled(capability: int, launch: Callable[..., Any], *args: Any) -> list[str]:
    """Names of the kernels that `launch(*args)` launches, compiled for a card that is not there.

    Args:
        capability: The compute capability times ten.
        launch: It has no results to rely on, since nothing runs.
        args: On the CPU.
    """
    from triton.backends.compiler import GPUTarget

    _STATE["target"] = GPUTarget("cuda", capability, 32)
    _STATE["names"] = []
    launch(*args)
    return _STATE["names"]


_STATE: dict[str, Any] = {}


def _process(initializer: Callable[[], None]) -> Iterator[Callable[..., Any]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=initializer) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import torch

    torch.set_num_threads(1)
    # The interpreter computes both branches of a `where` with NumPy.
    np.seterr(all="ignore")


def _only_compile() -> None:
    import triton
    from triton.runtime.jit import JITFunction

    class NoDriver:
        """Says which card to compile for."""

        def get_current_target(self):
            return _STATE["target"]

        def get_current_device(self):
            return _STATE["target"].arch  # compiled kernels are kept by device

        def get_current_stream(self, device):
            return 0

    triton.runtime.driver.set_active(NoDriver())
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        _STATE["names"].append(self.fn.__name__)
        return kernel

    JITFunction.run = compile_only
