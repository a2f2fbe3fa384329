"""What constraints say to a block on the device: by tables that go there, or by the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from guided_smc.blocks import Block, Rows
from guided_smc.device_rows import DeviceRows, Found
from guided_smc.kernels import DeviceAutomaton
from guided_smc.population import Population
from guided_smc.proposing import Proposer, named
from guided_smc.rejection import judged
from guided_smc.sampling import UNIFORMS, unpack_bitmask


class Tables:
    """The automata of the constraints of a batch, side by side on the device.

    Args:
        host: Whose vocabulary they are over.
        device: Where they go.
    """

    def __init__(self, host: Proposer, device: torch.device) -> None:
        self._host = host
        self._device = device
        self._parts: dict[int, tuple[Any, DeviceAutomaton]] = {}  # by identity of the tables
        self._joined: tuple[tuple[int, ...], DeviceAutomaton] | None = None

    def of(self, running: Sequence[Population[Any]]) -> list[int] | None:
        """For each prompt the identity of its constraint's tables, 0 for none; None if a
        constraint has none, so that the host must make masks.
        """
        found = []
        for population in running:
            tables = getattr(population.request.constraint, "tables", None)
            if tables is None and population.states:
                return None
            found.append(0 if tables is None else id(tables))
            if tables is not None and id(tables) not in self._parts:
                part = DeviceAutomaton.of(
                    tables.transitions,
                    tables.accepting,
                    tables.distances,
                    self._host.vocabulary.eos_ids,
                )
                self._parts[id(tables)] = tables, part
        return found if any(found) else None

    def joined(self, which: Sequence[int]) -> DeviceAutomaton:
        """The automata of a batch on the device; forgets those of others."""
        vocabulary = self._host.vocabulary
        if 0 in which and 0 not in self._parts:
            real = torch.from_numpy(vocabulary.real)
            self._parts[0] = None, DeviceAutomaton.free(real, vocabulary.eos_ids)
        order = tuple(sorted(set(which)))
        if self._joined is None or self._joined[0] != order:
            self._parts = {i: self._parts[i] for i in order}
            parts = [self._parts[i][1] for i in order]
            self._joined = order, DeviceAutomaton.joined(parts).to(self._device)
        return self._joined[1]

    def places(
        self, running: Sequence[Population[Any]], rows: Rows, which: Sequence[int]
    ) -> np.ndarray:
        """int64 `[R]`: where each row stands in `joined(which)`."""
        automaton = self.joined(which)
        order = sorted(set(which))
        for population, i in zip(running, which, strict=True):
            if i:
                _follow(population, self._parts[i][1])
        starts = [automaton.starts[order.index(i)] for i in which]
        return np.array([starts[g] + running[g].place[s] for g, s in rows], dtype=np.int64)


def _follow(population: Population[Any], automaton: DeviceAutomaton) -> None:
    """Bring the places of a prompt's live particles up to their ends."""
    classes, following = automaton.classes[0].numpy(), automaton.following.numpy()
    slots = population.live
    while len(slots := slots[population.placed[slots] < population.length[slots]]):
        token = population.tokens[slots, 1 + population.placed[slots]]
        population.place[slots] = following[population.place[slots], classes[token]]
        population.placed[slots] += 1


class Asked:
    """The constraints of a block that the host asks, for masks and where tokens are tested.

    Args:
        host: Asks them.
        rows: Of the block.
        block: As far as it has come.
        errors: Where errors go, by prompt.
    """

    def __init__(
        self, host: Proposer, rows: Rows, block: Block, errors: dict[int, Exception]
    ) -> None:
        self._host = host
        self._rows = rows
        self._block = block
        self._errors = errors
        self._judged: list[int] = []
        self._bits = np.zeros((0, 0), dtype=np.int32)

    @property
    def judges(self) -> bool:
        """Whether the token of some row has to be tested now, which the device knows nothing of."""
        return bool(self._judged)

    def bitmask(self, wanted: np.ndarray) -> np.ndarray:
        """int32 `[R, ceil(V / 32)]`: what each row may draw that is wanted to, bool `[R]`.

        Rows that have ended may draw nothing, nor may those whose tokens have to be tested: theirs
        are drawn by `draft` and `bonus`.
        """
        host, block = self._host, self._block
        active = wanted & ~block.ended & ~block.dead
        self._judged = []
        for r in np.flatnonzero(active).tolist():
            g, s = self._rows[r]
            try:
                if judged(host.running[g], s):
                    self._judged.append(r)
            except Exception as error:
                self._errors[g] = named(error, host.running[g])
                active[r] = False
        bits = host.bitmask(self._rows, active, self._errors)
        if bits is None:
            bits = np.full((len(self._rows), -(-len(host.vocabulary) // 32)), -1, dtype=np.int32)
        else:
            host.note_bits(self._rows, block, active, bits)
        bits[~active] = 0
        self._bits = bits.copy()
        bits[self._judged] = 0
        return bits

    def draft(self, state: DeviceRows, logits: torch.Tensor) -> None:
        """Draw the drafted tokens that have to be tested, from logits `[B, V']`."""
        if not self._judged:
            return
        rows = [self._rows[r] for r in self._judged]
        scores = self._host.over_vocabulary(logits[self._judged]).float()
        drawn = self._draw(rows, self._host.draft_scores(rows, scores), draft=True)
        for i, r in enumerate(self._judged):
            if np.isfinite(drawn.log_z[i]):
                state.place(r, int(drawn.token[i]), float(drawn.log_q[i]))

    def bonus(self, found: Found, logits: torch.Tensor) -> None:
        """Draw the bonus tokens that have to be tested, from logits `[B, K + 1, V']`."""
        if not self._judged:
            return
        rows = [self._rows[r] for r in self._judged]
        at = self._block.count[self._judged]
        last = self._host.over_vocabulary(logits[self._judged, at.tolist()]).float()
        log_p = torch.empty_like(last)
        for members, scores, log_z in self._host.target_scores(rows, last):
            log_p[members] = scores - log_z
        drawn = self._draw(rows, log_p, draft=False)
        for i, r in enumerate(self._judged):
            if np.isfinite(drawn.log_z[i]):
                found.tokens[r, at[i]] = drawn.token[i]
                found.log_p[r, at[i]] = drawn.log_p[i]
                found.log_q[r, at[i]] = drawn.log_q[i]
                found.count[r] = at[i] + 1

    def _draw(self, rows: Rows, scores: torch.Tensor, *, draft: bool) -> Any:
        populations = [(self._host.running[g], s) for g, s in rows]
        uniforms = np.array(
            [
                _uniforms(int(p.streams[s]), p.draws + int(self._block.count[r]))
                for (p, s), r in zip(populations, self._judged, strict=True)
            ]
        )
        mask = unpack_bitmask(self._bits[self._judged], len(self._host.vocabulary))
        every = np.ones(len(rows), dtype=bool)
        return self._host.draw(rows, every, scores, mask, uniforms, self._errors, draft=draft)


def _uniforms(seed: int, counter: int) -> np.ndarray:
    return np.random.default_rng([seed % 2**64, counter]).random(UNIFORMS)
