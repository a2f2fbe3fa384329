"""Passes over the particle cache at fixed shapes and addresses, as step capture needs them.

`ParticleSession` plans each pass on the host, with sizes that change from pass to pass. Here the
pages of a whole block are planned beforehand, since it is known how many tokens each row will be
fed, and the plan is one tensor on the device: positions, window columns and page slots of each new
token. Windows have a fixed number of columns, of which masks show the right ones. Rows that nobody
asked for, and tokens that do not count, write to a page that no row holds.

What resampling changed (pages to copy, windows to fill) is done before the block, outside of any
graph: how much there is differs from step to step.

A block may also be read *ahead*, before it is known how the rows go on: what is on the device alone
says which row each continues, windows are copied there accordingly (`kernels.move_rows`), and the
pages get what was read when the host has come to the same (`keep`), or never (`drop`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from guided_smc import kernels
from guided_smc.models.capture import Capture, bucket
from guided_smc.models.mirror import Mirror, sent
from guided_smc.models.pages import NoMemoryError
from guided_smc.models.particles import ParticleSession, running
from guided_smc.models.passes import Commit, Pass

COLUMNS = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Columns up to which windows are read; beyond, multiples of the last."""

IN_PLACE = 16384
"""In place of `particles.IN_PLACE`: with prompts in place a pass has no fixed shape, and for a card
reading that many keys is a few per cent of reading a model's weights."""


@dataclass(frozen=True)
class _Ahead:
    """A block that is read ahead.

    Attributes:
        first, more: int64 `[R]`, as in `FixedPasses.plan`.
        columns: int64 `[R, L + passes]`, of the windows, for each token.
    """

    first: np.ndarray
    more: np.ndarray
    columns: np.ndarray


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
        self._plans: dict[tuple[int, int, int], Mirror] = {}
        self._kept: dict[tuple[int, int], Mirror] = {}
        self._ahead: _Ahead | None = None
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
        spare = self._prepare(
            rows,
            self._columns(starts, width + passes),
            extension.copied,
            session._stale(starts - session._base),
        )
        session._fresh = session.table.lengths - session._base
        order, counts = _places(first, more, width, passes)
        slots = np.full((n, width + passes), spare)
        slots[counts] = extension.slots
        self._arrange(tokens, starts[:, None] + order, slots, first, rows, spare)

    def plan_ahead(
        self, first: np.ndarray, more: np.ndarray, width: int, *, rows: int, passes: int
    ) -> None:
        """Arrange a block that is read ahead; `follow` and `feed` come next.

        Arguments are those of `plan`, for the rows that there are now (those that go on from them
        get as many tokens); `width` is L.
        """
        session = self.session
        starts = session.table.lengths
        spare = self._prepare(
            rows,
            self._columns(starts, width + passes),
            np.zeros((0, 2), dtype=np.int64),
            session._stale(starts - session._base),
        )
        order, _ = _places(first, more, width, passes)
        positions = starts[:, None] + order
        slots = np.full(order.shape, spare)
        tokens = np.zeros((len(starts), width), dtype=np.int64)
        self._arrange(tokens, positions, slots, first, rows, spare)
        self._ahead = _Ahead(first, more, positions - session._base[:, None])

    def follow(self, source: torch.Tensor) -> None:
        """Let each row's window be that of row `source`, int64 `[B]`, always the same tensor."""
        used = self._used

        def move() -> None:
            for store in self.session.cache.stores:
                assert store is not None
                kernels.move_rows(store.keys, source, used)
                kernels.move_rows(store.values, source, used)

        self.capture.run(("follow", self._rows, used, source.data_ptr()), move)

    def feed(self, tokens: torch.Tensor) -> None:
        """What the first pass is fed, int64 `[B, L]`, in place of what was planned."""
        self._plan[:, : self._width].copy_(tokens)

    def stands(self) -> bool:
        """Whether the rows that there are now would read as many columns as were read ahead.

        Sums over more of them may differ in the last bit.
        """
        assert self._ahead is not None
        size = self._ahead.columns.shape[1]
        return self._columns(self.session.table.lengths, size) == self._used

    def keep(self, old: np.ndarray) -> None:
        """Put into the pages what was read ahead, after the rows have been reordered.

        Args:
            old: int64 `[R]`, the row that was read ahead for each row that there is now.
        """
        ahead, session, rows = self._ahead, self.session, self._rows
        assert ahead is not None
        self._ahead = None
        first, more = ahead.first[old], ahead.more[old]
        extension = session.table.extend(first + more)
        spare = self._prepare(rows, self._used, extension.copied, None)
        size = ahead.columns.shape[1]
        width = self._width
        _, counts = _places(first, more, width, size - width)
        slots = np.full((len(old), size), spare)
        slots[counts] = extension.slots
        kept = np.zeros((rows, 2 * size), dtype=np.int64)
        kept[:, size:] = spare
        kept[: len(ahead.columns), :size] = ahead.columns
        kept[old, size:] = slots
        if (rows, size) not in self._kept:
            there = torch.zeros(kept.shape, dtype=torch.int64, device=self.model.device)
            self._kept[rows, size] = Mirror(there)
        self._kept[rows, size].send(kept)
        given = self._kept[rows, size].there

        def write() -> None:
            row = torch.arange(rows, device=given.device).unsqueeze(1)
            columns, slots = given[:, :size], given[:, size:].flatten()
            for store in self.session.cache.stores:
                assert store is not None
                pairs = ((store.keys, store.key_pool), (store.values, store.value_pool))
                for window, pool in pairs:
                    found = window[row, :, columns]  # [B, L, heads, head_dim]
                    pool.write(slots, found.permute(2, 0, 1, 3).flatten(1, 2))

        self.capture.run(("keep", rows, size), write)
        # Rows that have moved find what they have in the pages alone.
        stays = old == np.arange(len(old))
        session._fresh = np.where(stays, session.table.lengths - session._base, 0)

    def drop(self, source: np.ndarray) -> None:
        """Forget what was read ahead; windows int64 `[B]` were made what `source` says."""
        self._ahead = None
        session = self.session
        n = min(len(source), len(session._fresh))
        session._fresh[:n][source[:n] != np.arange(n)] = 0

    def _columns(self, starts: np.ndarray, more: int) -> int:
        """Columns of windows to read, for rows that get so many tokens more."""
        ends = starts - self.session._base + more
        return bucket(int(ends.max(initial=1)), COLUMNS)

    def _arrange(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        first: np.ndarray,
        rows: int,
        spare: int,
    ) -> None:
        """Send the plan: int64 tokens `[R, L]`, positions and slots `[R, L + passes]`."""
        n, width = tokens.shape
        passes = positions.shape[1] - width
        columns = positions - self.session._base[:, None]
        plan = np.zeros((rows, 4 * width + 1 + 3 * passes), dtype=np.int64)
        plan[:, 3 * width : 4 * width] = plan[:, 4 * width + 3 :: 3] = spare
        plan[:n, :width] = tokens
        for i, part in enumerate((positions, columns, slots)):
            plan[:n, (i + 1) * width : (i + 2) * width] = part[:, :width]
            plan[:n, 4 * width + 1 + i :: 3] = part[:, width:]
        plan[:n, 4 * width] = np.maximum(first - 1, 0)
        shape = rows, width, passes
        if shape not in self._plans:
            there = torch.zeros(plan.shape, dtype=torch.int64, device=self.model.device)
            self._plans[shape] = Mirror(there)
        self._plans[shape].send(plan)
        self._rows, self._width, self._plan = rows, width, self._plans[shape].there

    def _prepare(
        self,
        rows: int,
        columns: int,
        copied: np.ndarray,
        stale: tuple[torch.Tensor, int, torch.Tensor] | None,
    ) -> int:
        """Make room, copy pages and fill windows in every layer; returns the slot of no row."""
        self._used = columns
        cache, pages = self.session.cache, self.session.table.capacity
        copies = sent(copied, self.model.device) if len(copied) else None
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


def _places(
    first: np.ndarray, more: np.ndarray, width: int, passes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each token's place in its row, and whether it counts, `[R, L + passes]`."""
    order = np.zeros((len(first), width + passes), dtype=np.int64)
    order[:, :width] = np.arange(width)
    order[:, width:] = first[:, None] + np.arange(passes)
    counts = np.zeros(order.shape, dtype=bool)
    counts[:, :width] = order[:, :width] < first[:, None]
    counts[:, width:] = np.arange(passes) < more[:, None]
    return order, counts


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
