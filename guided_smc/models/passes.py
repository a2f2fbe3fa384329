"""One pass over the particle cache: columns of windows, slots of pages, masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from guided_smc.models.attention import visible_mask
from guided_smc.models.mirror import sent
from guided_smc.models.pages import Extension, Pool
from guided_smc.models.plans import CascadePlan

_GROWTH = 64  # columns


@dataclass
class Store:
    """One layer: the pages, and the rows' windows `[rows, heads, columns, head_dim]`."""

    key_pool: Pool
    value_pool: Pool
    keys: torch.Tensor
    values: torch.Tensor
    moves: int = field(default=0, init=False)

    @classmethod
    def like(cls, key: torch.Tensor, value: torch.Tensor, limit: int | None) -> Store:
        """For keys and values such as these, `[..., heads, tokens, head_dim]`."""
        empty = [x.new_zeros(0, x.shape[-3], 0, x.shape[-1]) for x in (key, value)]
        return cls(Pool(key, limit), Pool(value, limit), *empty)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room in the windows."""
        have = (self.keys.shape[0], self.keys.shape[2])
        if rows <= have[0] and columns <= have[1]:
            return
        rows = max(rows, have[0])
        columns = max(-(-columns // _GROWTH) * _GROWTH, have[1])
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
            new[: have[0], :, : have[1]] = old
            setattr(self, name, new)
        self.moves += 1

    def refresh(self, rows: torch.Tensor, start: int, slots: torch.Tensor) -> None:
        """Fill `rows`' columns from `start` on with what is at `slots` `[len(rows), columns]`."""
        n, width = slots.shape
        for window, pool in ((self.keys, self.key_pool), (self.values, self.value_pool)):
            found = pool.data.index_select(1, slots.flatten())
            found = found.view(found.shape[0], n, width, -1).transpose(0, 1)
            window[rows, :, start : start + width] = found

    @property
    def nbytes(self) -> int:
        """Bytes of pages and windows."""
        tensors = (self.key_pool.data, self.value_pool.data, self.keys, self.values)
        return sum(x.nbytes for x in tensors)


@dataclass(frozen=True)
class Commit:
    """New tokens that stay: which of the pass's `[R · L]` (None: all), and their slots."""

    chosen: torch.Tensor | None
    slots: torch.Tensor
    copied: torch.Tensor | None

    @classmethod
    def of(
        cls, extension: Extension, counts: np.ndarray, width: int, device: torch.device
    ) -> Commit:
        """`counts` `[R]` of `width` tokens a row."""
        chosen = None
        if not np.all(counts == width):
            chosen = sent(np.flatnonzero(np.arange(width) < counts[:, None]), device)
        copied = sent(extension.copied, device) if len(extension.copied) else None
        return cls(chosen, sent(extension.slots, device), copied)

    def to(self, device: torch.device) -> Commit:
        """The same on another device."""
        return Commit(
            None if self.chosen is None else self.chosen.to(device),
            self.slots.to(device),
            None if self.copied is None else self.copied.to(device),
        )

    def write(self, pool: Pool, new: torch.Tensor) -> None:
        """Put what stays of `[R, heads, L, head_dim]` into the pages."""
        if self.copied is not None:
            pool.copy_pages(self.copied)
        flat = new.transpose(0, 1).flatten(1, 2)
        pool.write(self.slots, flat if self.chosen is None else flat.index_select(1, self.chosen))


@dataclass
class Pass:
    """What every layer of one forward pass does alike.

    Attributes:
        positions: int64 `[R, L]`.
        pages: There must be room for.
        columns: int64 `[R, L]`, of the window, where the new keys go; None when prompts are read.
        used: Columns in use.
        uniform: The first of these columns if it is the same for all rows.
        refresh: Rows, first column and slots that windows take from the pages first.
        commit: What goes into the pages; None for drafts.
        in_place: Prompts not in the windows: rows, first slot, tokens.
        plan: How to attend to the pages themselves, where something does that.
    """

    positions: torch.Tensor
    pages: int
    columns: torch.Tensor | None = None
    used: int = 0
    uniform: int | None = None
    refresh: tuple[torch.Tensor, int, torch.Tensor] | None = None
    commit: Commit | None = None
    in_place: Sequence[tuple[slice, int, int]] = ()
    plan: CascadePlan | None = None
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict)
    _elsewhere: dict[torch.device, Pass] = field(default_factory=dict)

    def on(self, device: torch.device) -> Pass:
        """The same on the device of a layer: a model may be spread over several."""
        of = self.columns if self.commit is None else self.commit.slots
        if of is None or of.device == device:
            return self
        if device not in self._elsewhere:
            refresh = self.refresh
            if refresh is not None:
                refresh = (refresh[0].to(device), refresh[1], refresh[2].to(device))
            self._elsewhere[device] = replace(
                self,
                columns=None if self.columns is None else self.columns.to(device),
                refresh=refresh,
                commit=None if self.commit is None else self.commit.to(device),
                _masks={},
                _elsewhere={},
            )
        return self._elsewhere[device]

    def mask(self, sliding: int | None, groups: int, like: torch.Tensor) -> torch.Tensor:
        """`[R, 1, groups · L, used]` over the windows: 0 where a query sees a key, else −inf.

        Made once per pass, and as numbers: attention would turn bools into them in every layer.
        """
        key = (None, sliding, groups, like.dtype)
        if key not in self._masks:
            assert self.columns is not None
            self._masks[key] = visible_mask(self.columns, self.used, sliding, groups, like)
        return self._masks[key]

    def prompt_mask(
        self, run: int, sliding: int | None, groups: int, like: torch.Tensor
    ) -> torch.Tensor | None:
        """`[1, 1, rows · groups · L, tokens]` over a prompt in place; None: all is seen."""
        rows, _, tokens = self.in_place[run]
        positions = self.positions[rows]
        if sliding is None or int(positions.max()) - sliding < 0:
            return None
        key = (run, sliding, groups, like.dtype)
        if key not in self._masks:
            mask = visible_mask(positions, tokens, sliding, groups, like)
            self._masks[key] = mask.reshape(1, 1, -1, tokens)
        return self._masks[key]
