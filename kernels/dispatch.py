"""How a function becomes a torch operator, which of its versions runs, and checks of arguments."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def operator(
    fake: Callable[P, R], changes: Sequence[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function of tensors as `torch.ops.guided_smc.<its name>`, and call it as that.

    torch's own decorator for this imports its compiler at the first call, which takes seconds.

    Args:
        fake: The same for tensors without data: the results' shapes and dtypes.
        changes: Names of the arguments that are changed in place.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        torch.library.define(
            f"guided_smc::{name}", torch.library.infer_schema(function, mutates_args=changes)
        )
        torch.library.impl(f"guided_smc::{name}", "default")(function)
        torch.library.register_fake(f"guided_smc::{name}", fake)
        registered = getattr(torch.ops.guided_smc, name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = registered(*args, **kwargs)
            return result

        return call

    return register


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported for that."""
    return importlib.util.find_spec("triton") is not None


def runs_kernel(tensor: torch.Tensor) -> bool:
    """Whether a function of this tensor runs as a Triton kernel: on CUDA, if Triton is there.

    With `TRITON_INTERPRET=1` in the environment, CPU tensors do so too, in Triton's interpreter.
    """
    if not has_triton():
        return False
    return tensor.is_cuda or (
        tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    )


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of a tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check(
    function: str,
    name: str,
    tensor: torch.Tensor,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    like: torch.Tensor,
) -> None:
    """Check one argument, with nothing asked of the device.

    Args:
        function: The function's name, for the message.
        name: The argument's name.
        tensor: The argument.
        dtypes: What it may be.
        shape: What it must be; None stands for any size.
        like: An argument on the device where all must be.

    Raises:
        ValueError: It is not so.
    """
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    fits = len(shape) == tensor.dim() and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if fits and tensor.dtype in dtypes and tensor.device == like.device:
        return
    kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    sizes = ", ".join("any" if n is None else str(n) for n in shape)
    got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
    raise ValueError(f"{function}: {name} must be {kinds} [{sizes}] on {like.device}, got {got}")
