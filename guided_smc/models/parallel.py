"""Tensor parallelism: one process for each device, which all run the same program in step.

transformers splits the weights (`tp_plan`), and every process then sees the same logits. So all of
them have to draw the same tokens, come to the same weights and stop at the same time: whatever
chooses must choose alike everywhere.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from guided_smc.errors import ModelError


def is_first() -> bool:
    """Whether this process is the one that speaks."""
    return int(os.environ.get("RANK", "0")) == 0


def distributed_config(tp_plan: str | dict[str, str]) -> Any:
    """What transformers is to be given to split a model.

    Args:
        tp_plan: `"auto"`, the plan that comes with the model, or a plan, as of transformers.

    Raises:
        ModelError: This program was not started as several processes, or transformers is too old.
    """
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise ModelError(
            f"tp_plan={tp_plan!r} splits a model over several processes, and this is one alone: "
            "start the program with `torchrun --nproc-per-node=N`, N devices, or spread the model "
            "from one process with device_map='auto'"
        )
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        raise ModelError(
            "tp_plan needs a newer transformers: pip install --upgrade transformers"
        ) from None
    return DistributedConfig(tp_plan=tp_plan)


def agreed(number: int) -> int:
    """The first process's number, in all of them."""
    shared: list[Any] = [number]
    torch.distributed.broadcast_object_list(shared, src=0)
    return int(shared[0])
