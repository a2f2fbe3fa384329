"""Blocks whose drafting begins before the host has seen the blocks in front of them.

When a block is verified, everything that its weights are made of is on the device, unless a
potential has a say. So the device weighs and resamples for itself (`kernels.weigh_resample`), moves
what its rows own, the draft's windows of K/V included, and drafts the next block, while the host
weighs, resamples and lists pages as ever. What the host finds is what holds: if the device has come
to the same ancestors, and nobody joined, the tokens that it has drafted are those that would have
been drafted now, under the same seeds; else they are thrown away, and drafted again.

So nothing about a result depends on whether a block was drafted ahead. It is worth it: without, the
device waits for the host between any two blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from guided_smc import kernels
from guided_smc.blocks import Batch
from guided_smc.device_drawing import Drawing
from guided_smc.device_passes import CapturedPasses
from guided_smc.device_rows import DeviceRows
from guided_smc.errors import OutOfPagesError
from guided_smc.kernels.weighing import SCHEMES
from guided_smc.models.capture import ROWS, bucket
from guided_smc.models.mirror import Mirror
from guided_smc.population import Population
from guided_smc.proposing import Proposer

_LONGEST_PAUSE = 16


class Weights:
    """Room for the log-weights of G prompts with N particles each, and whom these go on from.

    Args:
        groups: G; those without a prompt are not resampled.
        n: N.
        scheme: Of resampling.
        device: Where all is.
    """

    def __init__(self, groups: int, n: int, scheme: str, device: torch.device) -> None:
        self.groups, self.n, self.scheme = groups, n, scheme
        self._given = Mirror(torch.zeros(groups, 3 * n + 1, dtype=torch.int64, device=device))

    def upload(self, batch: Batch) -> None:
        """Send the weights as they are before the block of this batch."""
        groups = len(batch.running)
        log_w = np.stack([p.log_w for p in batch.running])
        uniform = np.stack([p.uniforms_ahead() for p in batch.running])
        row = np.full((groups, self.n), -1, dtype=np.int64)
        for r, (g, s) in enumerate(batch.rows):
            row[g, s] = r
        threshold = np.array([_threshold(p) for p in batch.running])[:, None]
        parts = [x.view(np.int64) for x in (log_w, row, uniform, threshold)]
        given = np.concatenate(parts, axis=1)
        nobody = np.zeros((self.groups - groups, given.shape[1]), dtype=np.int64)
        nobody[:, self.n : 2 * self.n] = -1
        self._given.send(np.concatenate([given, nobody]))

    def resample(self, state: DeviceRows) -> None:
        """Weigh what the rows have drawn, and say in `state.source` whom each goes on from.

        A row whose slot goes on from one that has no row stays as it is: it is not wanted.
        """
        log_w, row, uniform, threshold = self._given.there.split([self.n, self.n, self.n, 1], dim=1)
        nobody = row < 0
        gained = state.gained()[row.clamp(min=0)]
        _, ancestors, _, _, _ = kernels.weigh_resample(
            _floats(log_w),
            torch.where(nobody, 0.0, gained),
            None,
            _floats(threshold).squeeze(1),
            _floats(uniform),
            self.scheme,
        )
        of = row.gather(1, ancestors)
        of = torch.where(of < 0, row, of)
        # Slots without a row write behind the last.
        rows = len(state.source)
        found = torch.arange(rows + 1, device=row.device)
        found.scatter_(0, torch.where(nobody, rows, row).flatten(), of.flatten())
        state.source.copy_(found[:rows])


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.contiguous().view(torch.float64)


def _threshold(population: Population[Any]) -> float:
    options = population.options
    return options.ess_threshold if options.method == "smc" else 0.0


def _scheme(running: Sequence[Population[Any]]) -> str | None:
    """That of all the prompts; None where the device has not got it, or one would not do."""
    if len({p.n for p in running}) != 1 or any(
        p.options.islands > 1 or p.options.target_ess is not None for p in running
    ):
        return None
    (scheme, *others) = {p.options.resampling for p in running}
    return scheme if scheme in SCHEMES and not others else None


@dataclass(frozen=True)
class _Ahead:
    """A block that is drafted ahead.

    Attributes:
        batch: The block in front.
        drawing: As far as it has come, in the rows of that one.
        cut: Whether a target was cut in it.
    """

    batch: Batch
    drawing: Drawing
    cut: bool

    def rows_of(self, batch: Batch, wanted: np.ndarray) -> np.ndarray | None:
        """int64 `[R]`, the row here of each row of a batch; None if it is not what was expected."""
        there = {(id(self.batch.running[g]), s): r for r, (g, s) in enumerate(self.batch.rows)}
        source = self.drawing.state.sources()
        old = np.array(
            [there.get((id(batch.running[g]), s), -1) for g, s in batch.rows], dtype=np.int64
        )
        fits = (old >= 0) & (source[old] == batch.sources) & (self.drawing.wanted[old] == wanted)
        return old if len(old) and bool(fits.all()) else None


class Ahead:
    """Drafts ahead, and knows when it pays.

    Args:
        host: Whose batches they are.
        passes: At fixed shapes: only these are known beforehand.
        device: Where all is.
    """

    def __init__(self, host: Proposer, passes: CapturedPasses, device: torch.device) -> None:
        self.host = host
        self.passes = passes
        self._device = device
        self._weights: dict[tuple[int, int, str], Weights] = {}
        self._begun: _Ahead | None = None
        self._pause = 0  # blocks to wait before the next try
        self._misses = 0

    def begin(self, batch: Batch, drawing: Drawing, following: Sequence[int]) -> None:
        """Draft the block that follows upon that of a batch, which has been verified.

        Args:
            batch: Of the block in front.
            drawing: The same.
            following: K of each prompt in the block that follows.
        """
        if drawing.passes is not self.passes:
            return
        if self._pause:
            self._pause -= 1
            return
        running, sizes = batch.running, batch.block_sizes
        scheme = _scheme(running)
        wanted = np.array([following[g] for g, _ in batch.rows], dtype=np.int64)
        # Of a row that drafts after one block in which it did not, the draft has to read more.
        alike = min(sizes) > 0 if wanted.any() else max(sizes) == 0
        if scheme is None or not alike or not self.passes.same_shape(wanted):
            return
        with self.host.phases.timed("resample"):
            drawing.advance()
            weights = self._room(bucket(len(running), ROWS), running[0].n, scheme)
            weights.upload(batch)
            state = drawing.state
            self.passes.run(
                ("weigh", weights.groups, weights.n, scheme), lambda: weights.resample(state)
            )
            state.tell_sources()
        with self.host.phases.timed("draft" if wanted.any() else "verify"):
            try:
                self.passes.look_ahead(wanted)
            except OutOfPagesError:
                return  # the block itself will say so, unless somebody leaves
        ahead = Drawing(self.host, self.passes, batch.rows, wanted, drawing.tables, drawing.by_host)
        self._begun = _Ahead(batch, ahead, ahead.cut)
        if ahead.by_host and ahead.n_drafts:
            ahead.read()  # its tokens need masks
            return
        for _ in range(ahead.n_drafts):
            ahead.draw()

    def take(self, batch: Batch, wanted: np.ndarray, *, by_host: bool) -> Drawing | None:
        """What was drafted ahead for a batch, if it is right; else it is dropped."""
        ahead, self._begun = self._begun, None
        if ahead is None:
            return None
        begun = ahead.drawing
        old = ahead.rows_of(batch, wanted)
        drawing = begun.take(batch.rows, wanted)
        if (
            old is None
            or bucket(len(old), ROWS) != begun.state.rows
            or not self.passes.same_shape(wanted)
            or begun.by_host != by_host
            or (begun.unfinished and not np.array_equal(old, np.arange(len(old))))
            or drawing.cut != ahead.cut
            or not self.passes.stands()
        ):
            self._drop(ahead, batch)
            return None
        self._misses = 0
        self.host.lacking(batch.rows, wanted > 0)
        self.passes.take(old, wanted)
        for population in batch.running:
            population.usage.steps_ahead += 1
        return drawing

    def drop(self, batch: Batch) -> None:
        """Throw away what was drafted ahead, if anything was, since a batch is drawn otherwise."""
        ahead, self._begun = self._begun, None
        if ahead is not None:
            self._drop(ahead, batch)

    def _drop(self, ahead: _Ahead, batch: Batch) -> None:
        self.passes.drop()
        begun = {id(population) for population in ahead.batch.running}
        go_on = [population for population in batch.running if id(population) in begun]
        if not go_on:
            return  # nobody was left, which says nothing of others
        self._pause = min(2**self._misses - 1, _LONGEST_PAUSE)
        self._misses += 1
        for population in go_on:
            population.usage.steps_in_vain += 1

    def _room(self, groups: int, n: int, scheme: str) -> Weights:
        key = groups, n, scheme
        if key not in self._weights:
            self._weights[key] = Weights(*key, self._device)
        return self._weights[key]
