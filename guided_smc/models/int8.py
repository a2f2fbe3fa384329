"""The int8 twin: the target's own linears quantised, as a draft that needs no second model.

The twin has the target's shapes and shares all that is not quantised. While it drafts it reads the
target's own cache for everything that is committed, and writes the drafted positions there too,
in the windows alone, behind the end of each row; verification writes them in the target's
precision. So it
needs no prefill and no cache of its own, and the prompt is never encoded in int8, which would
spoil it: one activation scale a tensor cannot hold the outliers of the first tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from guided_smc.errors import ModelError
from guided_smc.models.linears import Int8, replace_linears
from guided_smc.models.particles import ParticleSession
from guided_smc.models.transformers import TransformersModel


class Int8Twin:
    """The target with its linears quantised, as a draft for it.

    Args:
        target: Must run on the CPU and keep its K/V in rows.

    Raises:
        ModelError: The target's architecture or device cannot have such a twin.
    """

    def __init__(self, target: TransformersModel) -> None:
        if not target.uses_particle_cache:
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
        replace_linears(module, Int8)
        self.model = target.with_module(module, name=self.name)

    def warm_up(self) -> None:
        """Do now what is otherwise done once the twin has run for a while."""
        self.model.warm_up()

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

    reads_tokens = False

    def __init__(self, model: TransformersModel, target: ParticleSession) -> None:
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
