"""Copies between host and device that neither side waits for."""

from __future__ import annotations

import numpy as np
import torch


def sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of these values on a device.

    A copy out of ordinary memory would first wait for all that the device has to do.
    """
    here = torch.from_numpy(values)
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


class Mirror:
    """A tensor of fixed address on a device, and its twin in memory of the host.

    Args:
        there: The tensor on the device.
    """

    def __init__(self, there: torch.Tensor) -> None:
        self.there = there
        self._here = torch.zeros(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
        self._copied = torch.cuda.Event() if there.is_cuda else None

    def send(self, values: np.ndarray) -> None:
        """Copy to the device, `values` first; the twin's other rows go along as they are."""
        self._wait()  # the copy in front reads the twin
        self._here[: len(values)].copy_(torch.from_numpy(values))
        self.there.copy_(self._here, non_blocking=True)
        self._mark()

    def fetch(self) -> None:
        """Let the device copy to the host what it has when it comes to that."""
        self._here.copy_(self.there, non_blocking=True)
        self._mark()

    def read(self) -> np.ndarray:
        """What was fetched, waited for: a copy."""
        self._wait()
        found: np.ndarray = self._here.numpy().copy()
        return found

    def _mark(self) -> None:
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.there.device))

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
