"""What attention over pages needs to know before a pass: which queries read which pages.

The words and layouts are FlashInfer's: a *level* is a batch of segments, each a run of queries with
the pages that all of them read. New tokens are in the pages before attention reads these. There are
two levels:

- the prompts, one segment for all rows side by side that continue one prompt, so that its pages are
  read once for all of them;
- the tails, one segment a row, causal: the row's new tokens are the last of its pages.

What a query finds in each is merged by log-sum-exp. `PageTable` gives all of it; nothing here
touches K/V or a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from guided_smc.models.budget import PAGE
from guided_smc.models.pages import PageTable


@dataclass(frozen=True)
class Level:
    """Segments of queries and the pages that they read; B of them, none empty on either side.

    Attributes:
        queries: int64 `[q]`, which of the pass's queries are asked; None for all.
        qo_indptr: int32 `[B + 1]`, where each segment's queries begin among those.
        indptr: int32 `[B + 1]`, where each segment's pages begin in `indices`.
        indices: int32 `[pages]`, pages in the order of their tokens.
        last_page_len: int32 `[B]`, tokens in each segment's last page, from 1 to `PAGE`.
        causal: Whether the queries are the segment's last tokens, each of which sees none behind
            it; else all see all.
    """

    queries: torch.Tensor | None
    qo_indptr: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    causal: bool

    @property
    def kv_lengths(self) -> torch.Tensor:
        """int32 `[B]`, tokens that each segment reads."""
        return (self.indptr.diff() - 1) * PAGE + self.last_page_len


@dataclass
class CascadePlan:
    """The levels of one pass.

    Attributes:
        chosen: int64 `[Q]`, the queries that count among the `[R · L]` of the pass; None for all.
        tails: Reads what rows have appended.
        prompts: Reads what they share; None if no prompt has a token.
        positions: int64 `[Q]`, of the queries.
    """

    chosen: torch.Tensor | None
    tails: Level
    prompts: Level | None
    positions: np.ndarray
    _masks: dict[int, torch.Tensor | None] = field(default_factory=dict)
    _indices: dict[torch.device, tuple[torch.Tensor | None, torch.Tensor | None]] = field(
        default_factory=dict
    )

    def indices(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`chosen`, and the queries of the prompts' level, on a device; moved once."""
        if device not in self._indices:
            of = None if self.prompts is None else self.prompts.queries
            self._indices[device] = (
                None if self.chosen is None else self.chosen.to(device),
                None if of is None else of.to(device),
            )
        return self._indices[device]

    def prompt_mask(self, sliding: int | None) -> torch.Tensor | None:
        """Which tokens of its prompt each query sees through a sliding window; None for all.

        Bool `[Σ queries · tokens]`, segment by segment, as FlashInfer takes a mask of one's own:
        its sliding window would count from the end of the prompt, and not from the query.
        """
        if sliding is None or self.prompts is None:
            return None
        if sliding not in self._masks:
            self._masks[sliding] = self._make_mask(sliding, self.prompts)
        return self._masks[sliding]

    def _make_mask(self, sliding: int, level: Level) -> torch.Tensor | None:
        asked = self.positions if level.queries is None else self.positions[level.queries.numpy()]
        if int(asked.max()) < sliding:
            return None
        bounds = level.qo_indptr.tolist()
        parts = [
            np.arange(length) > asked[start:stop, None] - sliding
            for start, stop, length in zip(
                bounds[:-1], bounds[1:], level.kv_lengths.tolist(), strict=True
            )
        ]
        return torch.from_numpy(np.concatenate([part.ravel() for part in parts]))


def plan_cascade(table: PageTable, counts: np.ndarray, width: int) -> CascadePlan:
    """The levels of a pass in which rows have just appended tokens.

    Args:
        table: Behind `extend(counts)`: the new tokens are in it.
        counts: int64 `[R]`, new tokens of each row; at least one in all.
        width: Tokens of a row in the pass, those that do not count included.
    """
    rows = np.flatnonzero(counts)
    asked = counts[rows]
    chosen = None
    if not np.all(counts == width):
        chosen = torch.from_numpy(np.flatnonzero(np.arange(width) < counts[:, None]))
    lengths = table.tail[rows]
    n_pages = -(-lengths // PAGE)
    pages = table.pages[rows]
    tails = _level(None, asked, pages[np.arange(pages.shape[1]) < n_pages[:, None]], lengths, True)

    positions = np.concatenate(
        [np.arange(n - c, n) for n, c in zip(table.lengths[rows], asked, strict=True)]
    )
    shared = table.prompt_lengths[rows] > 0
    if not shared.any():
        return CascadePlan(chosen, tails, None, positions)
    queries = None
    if not shared.all():
        queries = torch.from_numpy(np.flatnonzero(np.repeat(shared, asked)))
    numbers = table.prompt[rows][shared]
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    # Rows side by side that continue one prompt are one segment.
    segment_queries = np.add.reduceat(asked[shared], starts)
    prompts = [int(p) for p in numbers[starts]]
    runs = [table.prompt_pages(p) for p in prompts]
    level = _level(
        queries,
        segment_queries,
        np.concatenate(runs),
        np.array([table.prompt_length(p) for p in prompts]),
        False,
    )
    return CascadePlan(chosen, tails, level, positions)


def _level(
    queries: torch.Tensor | None,
    asked: np.ndarray,
    pages: np.ndarray,
    lengths: np.ndarray,
    causal: bool,
) -> Level:
    return Level(
        queries,
        _indptr(asked),
        _indptr(-(-lengths // PAGE)),
        torch.from_numpy(pages.astype(np.int32)),
        torch.from_numpy(((lengths - 1) % PAGE + 1).astype(np.int32)),
        causal,
    )


def _indptr(sizes: Sequence[int] | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(sizes)).astype(np.int32))
