"""Functions of tensors at fixed addresses, recorded once as CUDA graphs and then replayed.

Launching the few hundred kernels of a pass one by one takes a host longer than a card takes to run
them. A graph is one launch. What it reads and writes stays where it was when it was recorded, so
everything that changes from call to call is in tensors that live as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows that graphs are recorded for; beyond, multiples of the last."""

WIDTHS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)
"""The same of K."""


def bucket(n: int, sizes: Sequence[int]) -> int:
    """The smallest of ascending sizes that holds n; beyond the last, a multiple of it."""
    for size in sizes:
        if n <= size:
            return size
    return -(-n // sizes[-1]) * sizes[-1]


class Capture:
    """Runs functions by key: on CUDA the first call records a graph, the others replay it.

    Elsewhere every call is the plain one, so that all else can be tested without a card.

    Args:
        device: Where the functions' tensors are.

    Attributes:
        calls: How often each key was run.
        refused: Why recording failed, if it did; functions are then called as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: dict[Hashable, int] = {}
        self.refused: str | None = None
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(
        self, key: Hashable, function: Callable[[], None], changing: Sequence[torch.Tensor] = ()
    ) -> None:
        """Do what `function` does.

        Args:
            key: Of everything that the function depends on but the contents of its tensors.
            function: Reads and writes tensors that stay where they are; asks the device nothing.
            changing: Those of them that it both reads and writes: it runs once more before it is
                recorded, which they must not show.
        """
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.device.type != "cuda" or self.refused is not None:
            function()
            return
        if key not in self._graphs:
            with torch.cuda.device(self.device):
                graph = self._record(function, changing)
            if graph is None:
                function()
                return
            self._graphs[key] = graph
        self._graphs[key].replay()

    def clear(self) -> None:
        """Forget all graphs: something has moved."""
        if self._graphs and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # one of them may be running
        self._graphs.clear()
        self.calls.clear()
        self._pool = None

    @staticmethod
    def _restore(changing: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> None:
        for tensor, before in zip(changing, saved, strict=True):
            tensor.copy_(before)

    def _record(
        self, function: Callable[[], None], changing: Sequence[torch.Tensor]
    ) -> torch.cuda.CUDAGraph | None:
        """The graph; None where there can be none, and why is then in `refused`."""
        saved = [tensor.clone() for tensor in changing]
        # Libraries set themselves up and kernels are compiled at a first call, which a graph may
        # not hold; on a stream of its own, since that is how it will be recorded.
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        self._restore(changing, saved)
        graph = torch.cuda.CUDAGraph()
        try:
            # Results leave the graphs' memory before the next replay, so that all may share it.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                function()
        except Exception as error:
            # Whatever a model does that no graph can hold, it can still be run.
            self.refused = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return None
        if self._pool is None:
            self._pool = graph.pool()
        return graph
