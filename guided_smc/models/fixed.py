"""Passes over the particle cache at fixed shapes and addresses, as step capture needs them.

`ParticleSession` plans each pass on the host, with sizes that change from pass to pass. Here the
pages of a whole block are planned beforehand, since it is known how many tokens each row will be
fed, and the plan is one tensor on the device: positions, window columns and page slots of each new
token. Windows have a fixed number of columns, of which masks show the right ones. Rows that nobody
asked for, and tokens that do not count, write to a page that no row holds.

What resampling changed (pages to copy, windows to fill) is done before the block, outside of any
graph: how much there is differs from step to step.
"""

from __future__ import annotations

import numpy as np
import torch

from guided_smc.models.capture import Capture, bucket
from guided_smc.models.pages import NoMemoryError
from guided_smc.models.particles import ParticleSession, running
from guided_smc.models.passes import Commit, Pass

COLUMNS = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Columns up to which windows are read; beyond, multiples of the last."""

IN_PLACE = 16384
"""In place of `particles.IN_PLACE`: with prompts in place a pass has no fixed shape, and for a card
reading that many keys is a few per cent of reading a model's weights."""


class FixedPasses:
    """The passes of one session in a block: one over several tokens a row, and more over one.

    Args:
        session: Its rows.
        capture: Records the passes.
    """

    def __init__(self, session: ParticleSession, capture: Capture) -> None:
        self.session = session
        self.model = session.model
        self.capture = capture
        session.in_place_from = IN_PLACE
        self._moves = -1
        self._plans: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._single: dict[int, torch.Tensor] = {}
        self._results: dict[tuple[int, int], torch.Tensor] = {}

    def plan(
        self,
        tokens: np.ndarray,
        first: np.ndarray,
        more: np.ndarray,
        *,
        rows: int,
        passes: int,
    ) -> None:
        """Book the pages of a block, and bring what the passes will read up to date.

        Args:
            tokens: int64 `[R, L]`, what the first pass is fed, if that is known.
            first: int64 `[R]`, how many of L tokens count.
            more: int64 `[R]`, how many of the passes over one token a row takes part in.
            rows: B, at least R.
            passes: Passes over one token that there is room for, at least `more`.
        """
        session, (n, width) = self.session, tokens.shape
        starts = session.table.lengths
        extension = session.table.extend(first + more)
        ends = starts - session._base + width + passes
        used = bucket(int(ends.max(initial=1)), COLUMNS)
        spare = self._prepare(rows, used, extension.copied, session._stale(starts - session._base))
        session._fresh = session.table.lengths - session._base

        order = np.zeros((n, width + passes), dtype=np.int64)  # of each token in its row
        order[:, :width] = np.arange(width)
        order[:, width:] = first[:, None] + np.arange(passes)
        positions = starts[:, None] + order
        counts = np.zeros(order.shape, dtype=bool)
        counts[:, :width] = order[:, :width] < first[:, None]
        counts[:, width:] = np.arange(passes) < more[:, None]
        slots = np.full(order.shape, spare)
        slots[counts] = extension.slots
        columns = positions - session._base[:, None]
        plan = np.zeros((rows, 4 * width + 1 + 3 * passes), dtype=np.int64)
        plan[:, 3 * width : 4 * width] = plan[:, 4 * width + 3 :: 3] = spare
        plan[:n, :width] = tokens
        for i, part in enumerate((positions, columns, slots)):
            plan[:n, (i + 1) * width : (i + 2) * width] = part[:, :width]
            plan[:n, 4 * width + 1 + i :: 3] = part[:, width:]
        plan[:n, 4 * width] = np.maximum(first - 1, 0)
        self._rows, self._width, self._used = rows, width, used
        self._plan = self._upload(plan, (rows, width, passes))

    def _prepare(
        self,
        rows: int,
        columns: int,
        copied: np.ndarray,
        stale: tuple[torch.Tensor, int, torch.Tensor] | None,
    ) -> int:
        """Make room, copy pages and fill windows in every layer; returns the slot of no row."""
        cache, pages = self.session.cache, self.session.table.capacity
        copies = torch.from_numpy(copied).to(self.model.device) if len(copied) else None
        spare = 0
        try:
            for store in cache.stores:
                assert store is not None
                for pool in (store.key_pool, store.value_pool):
                    if pages > pool.room:
                        # Twice as many: all that was recorded has to be recorded again.
                        pool.reserve(2 * pages if pool.limit is None else pages)
                    if copies is not None:
                        pool.copy_pages(copies)
                store.reserve(rows, columns)
                if stale is not None:
                    store.refresh(*stale)
                spare = store.key_pool.spare
        except (NoMemoryError, torch.OutOfMemoryError) as error:
            raise self.session.out_of_memory(getattr(error, "pages", pages)) from error
        if cache.moves != self._moves:
            self._moves = cache.moves
            self.capture.clear()
        return spare

    def _upload(self, plan: np.ndarray, shape: tuple[int, int, int]) -> torch.Tensor:
        device = self.model.device
        if shape not in self._plans:
            pinned = torch.zeros(plan.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._plans[shape] = pinned, torch.zeros_like(pinned, device=device)
        pinned, there = self._plans[shape]
        pinned.copy_(torch.from_numpy(plan))
        there.copy_(pinned, non_blocking=True)
        return there

    # -- passes ----------------------------------------------------------------------------------

    def first(self, tokens: torch.Tensor | None = None, *, last_only: bool) -> torch.Tensor:
        """The pass over L tokens a row.

        Args:
            tokens: int64 `[B, L]`, always the same tensor for one shape; None for those planned.
            last_only: Logits only behind the last token that counts.

        Returns:
            Logits in the model's dtype, `[B, V']` or `[B, L, V']`; overwritten by the next pass of
            this shape.
        """
        plan, width = self._plan, self._width
        fed = plan[:, :width] if tokens is None else tokens
        at = plan[:, 4 * width] if last_only else None
        parts = plan[:, width : 4 * width].unflatten(1, (3, width)).unbind(1)
        # The plan's width is part of its address.
        return self._run(("first", plan.shape[1], last_only), fed, parts, at)

    def single(self, number: int, tokens: torch.Tensor) -> torch.Tensor:
        """The pass over one token a row that has this number, from 0.

        Args:
            number: Of the pass.
            tokens: int64 `[B, 1]`, always the same tensor for one B.

        Returns:
            As `first`, `[B, V']`.
        """
        if self._rows not in self._single:
            self._single[self._rows] = self._plan.new_zeros(self._rows, 3)
        now = self._single[self._rows]
        start = 4 * self._width + 1 + 3 * number
        now.copy_(self._plan[:, start : start + 3])
        parts = tuple(part.unsqueeze(1) for part in now.unbind(1))
        return self._run(("single",), tokens, parts, None)[:, 0]

    def _run(
        self,
        kind: tuple[object, ...],
        tokens: torch.Tensor,
        parts: tuple[torch.Tensor, ...],
        at: torch.Tensor | None,
    ) -> torch.Tensor:
        positions, columns, slots = parts
        rows, width, used = self._rows, tokens.shape[1], self._used
        kept = 1 if at is not None else width
        out = self._result(rows, kept)

        def forward() -> None:
            now = Pass(
                positions=positions,
                pages=self.session.table.capacity,
                columns=columns,
                used=used,
                commit=Commit(None, slots.flatten(), None),
            )
            with running(self.session.cache, now):
                logits = self.model.run_module(tokens, positions, self.session.cache)
            if at is not None:
                logits = logits[torch.arange(rows, device=logits.device), at].unsqueeze(1)
            out.copy_(logits)

        self.capture.run((*kind, rows, width, used, tokens.data_ptr()), forward)
        return out[:, 0] if at is not None else out

    def _result(self, rows: int, kept: int) -> torch.Tensor:
        if (rows, kept) not in self._results:
            width = self.model.logit_width
            self._results[rows, kept] = torch.zeros(
                rows, kept, width, dtype=self.model.dtype, device=self.model.device
            )
        return self._results[rows, kept]


def refusal(session: object, device: torch.device) -> str | None:
    """Why the passes of a session cannot have fixed shapes on a device now; None if they can."""
    if not isinstance(session, ParticleSession):
        return "only rows in the particle cache have fixed shapes"
    if session.model.device != device:
        return "the draft is not where the target is"
    if session._in_place:
        return "a long prompt is attended to in place"
    if any(store is None for store in session.cache.stores):
        return "nothing was read yet"
    if len(getattr(session.model.model, "hf_device_map", None) or ()) > 1:
        return "the model is spread over several devices"
    if session.model.split:
        return "the model is spread over several processes"
    return None
