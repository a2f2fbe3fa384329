"""What is asked of one prompt: what a run takes in, and everything in it reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

from guided_smc.costs import CostModel
from guided_smc.models.budget import Need
from guided_smc.options import BlockSize, Options
from guided_smc.potentials import CompiledConstraint, Potential
from guided_smc.results import T


@dataclass
class Request(Generic[T]):
    """One prompt with all that it asks for, checked and compiled.

    Attributes:
        index: Position in the user's request; comes back in events and in the result.
        prompt: As the user gave it.
        prompt_ids: Its tokens, at least one.
        options: With `block_size` and `seed` filled in.
        potentials: The scores to multiply in.
        constraint: The language to stay in, or None.
        parse: Text to typed value.
        value_key: Text to a key that is equal for equal values.
        warnings: To be handed on to the result.
        warnings_of_loss: The same, if a particle did not end within `max_tokens`.
        language: The name of the constraint.
        languages: The names of those that are intersected, to be told if every particle dies.
        costs: What passes cost, where the block size is `"auto"`.
        columns: What else belongs to the prompt, for the potentials.
        logit_bias: Added to the logits of these tokens, target's and draft's, before temperature
            and all else: part of the target.
    """

    index: int
    prompt: Any
    prompt_ids: list[int]
    options: Options
    potentials: tuple[Potential, ...]
    constraint: CompiledConstraint | None
    parse: Callable[[str], T]
    value_key: Callable[[str], Hashable]
    warnings: tuple[str, ...] = field(default=())
    warnings_of_loss: tuple[str, ...] = field(default=())
    language: str | None = None
    languages: tuple[str, ...] = field(default=())
    costs: CostModel | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def block_size(self) -> BlockSize:
        """K, or `"auto"`."""
        assert self.options.block_size is not None
        return self.options.block_size

    @property
    def need(self) -> Need:
        """What it may come to hold in a cache."""
        most = self.options.particle_range[1]
        return Need.of(len(self.prompt_ids), most, self.options.max_tokens)

    @property
    def seed(self) -> int:
        """Of this request's generator."""
        assert self.options.seed is not None
        return self.options.seed
