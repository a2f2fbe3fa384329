"""Where a model goes, refused before anything is read where it cannot go."""

from __future__ import annotations

from typing import Any

import torch

from guided_smc.errors import ModelError, OptionError

LEAST_CAPABILITY = (8, 0)
"""Of a CUDA device: Triton supports no older one, and bfloat16 is native from there on."""


def place(
    device: str | torch.device | None, device_map: str | dict[str, Any] | None
) -> torch.device | str | dict[str, Any]:
    """A device that exists and is new enough, or the device map as it was given.

    Args:
        device: None: CUDA where there is one.
        device_map: Of transformers.

    Raises:
        OptionError: Both, or something that is no device.
        ModelError: The device is not there, or too old.
    """
    if device_map is not None:
        if device is not None:
            raise OptionError("give `device` or `device_map`, not both")
        for one in _cuda_devices(device_map):
            _require_cuda("device_map", one)
        return device_map
    if device is None:
        chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise OptionError(
                f"device={device!r} is not a device; use 'cpu', 'cuda' or 'cuda:0'"
            ) from error
    if chosen.type == "cuda":
        _require_cuda("device", chosen)
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device='mps' was asked for, but this machine has none: use device='cpu'")
    return chosen


def _cuda_devices(device_map: str | dict[str, Any]) -> list[torch.device]:
    """The CUDA devices that a device map may use: those it names, or all that there are."""
    if isinstance(device_map, dict):
        named = {f"cuda:{d}" if isinstance(d, int) else str(d) for d in device_map.values()}
        return [torch.device(d) for d in sorted(named) if d.startswith("cuda")]
    if device_map.startswith("cuda"):
        return [torch.device(device_map)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", i) for i in range(count)]


def _require_cuda(option: str, device: torch.device) -> None:
    """Refuse a CUDA device that is not there, or too old for what runs on it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ModelError(
            f"{option}={str(device)!r} was asked for, but torch {torch.__version__} sees no CUDA "
            "device: use device='cpu', or install a CUDA build of torch and its driver"
        )
    if device.index is not None and device.index >= count:
        raise ModelError(
            f"{option}={str(device)!r} was asked for, but there are {count} CUDA devices "
            f"(cuda:0 to cuda:{count - 1})"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (capability, LEAST_CAPABILITY))
        raise ModelError(
            f"{torch.cuda.get_device_name(device)} ({device}) has compute capability {have}, and "
            f"{need} (Ampere) is the least that Triton's kernels and bfloat16 run on: use a newer "
            "card, or device='cpu'"
        )
