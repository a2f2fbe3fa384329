"""The language model interface: prefill prompts, extend rows, reorder rows by ancestor.

A `Session` holds the K/V (or whatever an architecture keeps) of a list of *rows*, one for each
live particle of every prompt in the batch. The engine never looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from guided_smc.models.budget import Need
from guided_smc.vocabulary import Vocabulary


class Session(Protocol):
    """The cached prefixes of a batch of particles."""

    kv_cache: str
    """What keeps them: see `Usage.kv_cache`."""

    @property
    def attention(self) -> str:
        """What attends to them: see `Usage.attention`."""

    reads_tokens: bool
    """Whether `extend` looks at the tokens, which then must be on the CPU."""

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Encode each prompt once and append `copies[g]` rows that continue it.

        A prompt may be empty here (the engine holds back a prompt's last token, so that the first
        token of a text is drawn per particle like any other).
        """

    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, *, last_only: bool
    ) -> torch.Tensor:
        """Append tokens to every row and return logits.

        Args:
            tokens: int64 tensor `[R, L]`, left-aligned; what stands behind a row's count is
                padding and leaves no trace. On the CPU, or where the model is.
            counts: int64 CPU tensor `[R]`, tokens that count, in `0..L`. A row with 0 gets
                meaningless logits.
            last_only: Logits only after the last token that counts, not after each.

        Returns:
            float32 logits on the model's device, `[R, V]` if `last_only` else `[R, L, V]`.
        """

    def reorder(self, index: torch.Tensor) -> None:
        """Row `i` becomes a copy of the old row `index[i]`; the number of rows becomes
        `len(index)`. int64 CPU tensor. Serves resampling and the dropping of rows alike.
        """


@runtime_checkable
class LimitedSession(Protocol):
    """A session that may not have room for everyone."""

    def fits(self, running: Sequence[Need], joining: Sequence[Need]) -> bool:
        """Whether prompts could join now, so that they and those that run never lack room.

        Args:
            running: What those that run may come to hold.
            joining: The same of those that would be prefilled next, in this order.
        """


class LanguageModel(Protocol):
    """An autoregressive model over a vocabulary."""

    vocabulary: Vocabulary
    context_length: int | None
    """Most tokens a row may hold, prompt included (None: no limit)."""
    name: str

    def start_session(self) -> Session:
        """A session with no rows."""


@runtime_checkable
class WarmingModel(Protocol):
    """A model that becomes faster once it has run for a while."""

    def warm_up(self) -> None:
        """Become so now."""


class FollowingSession(Protocol):
    """A draft's session that stands on the target's: what the target holds, it holds."""

    reads_tokens: bool
    """As `Session.reads_tokens`."""

    def begin_block(self) -> None:
        """Forget what was drafted; every row stands where the target's row stands."""

    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, *, last_only: bool
    ) -> torch.Tensor:
        """As `Session.extend`, without a trace in what the target holds."""


@runtime_checkable
class FollowingModel(Protocol):
    """A draft that reads the target's cache instead of having one."""

    def follow(self, target: Session) -> FollowingSession:
        """A session on the target's."""
