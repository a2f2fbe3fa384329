"""How the tokens of one block are drawn on the device, pass by pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from guided_smc.blocks import Rows
from guided_smc.device_passes import Passes
from guided_smc.device_rows import DeviceRows
from guided_smc.kernels import DeviceAutomaton
from guided_smc.proposing import Proposer


@dataclass
class Drawing:
    """A block that is being drawn.

    Attributes:
        host: Knows the prompts and their temperatures and cuts.
        passes: Of the models.
        rows: The block's, R of them.
        wanted: int64 `[R]`, K of each.
        tables: The automata of the rows' constraints, where they all have one.
        by_host: Whether the host makes the masks.
        drafted: How many tokens each row was asked for by now.
    """

    host: Proposer
    passes: Passes
    rows: Rows
    wanted: np.ndarray
    tables: DeviceAutomaton | None
    by_host: bool
    drafted: int = 0
    _read: torch.Tensor | None = None

    @property
    def state(self) -> DeviceRows:
        """The rows on the device."""
        return self.passes.state

    @property
    def n_drafts(self) -> int:
        """The largest K."""
        return int(self.wanted.max(initial=0))

    @property
    def unfinished(self) -> bool:
        """Whether a pass was launched whose tokens are not drawn, so that rows must not move."""
        return self.by_host or not self.n_drafts

    @property
    def cut(self) -> bool:
        """Whether some target is cut by top-k, top-p or min-p, which differ from row to row."""
        running = self.host.running
        return any(p.target_cut != (0, 1.0, 0.0) for p in running)

    @property
    def _masked(self) -> bool:
        return self.by_host or self.tables is not None

    def read(self) -> torch.Tensor:
        """The draft's logits `[B, V']` for the next token; the pass is launched, unless it is."""
        if self._read is None:
            with self.host.phases.timed("draft"):
                self._read = self.passes.draft(self.drafted)
        return self._read

    def draw(self) -> None:
        """Draw a token for each row that wants one more; masks of the host are there already."""
        logits = self.read()
        self._mask()

        def cut(scores: torch.Tensor) -> None:
            scores[:] = self.host.draft_scores(self.rows, scores)

        with self.host.phases.timed("draft"):
            self._act("choose", self.state.choose, logits, cut)
            self.advance()
        self._read = None
        self.drafted += 1

    def verify(self, logits: torch.Tensor) -> None:
        """Verify by the target's logits `[B, K + 1, V']` and draw the bonus tokens."""
        self._mask()

        def cut(scores: torch.Tensor) -> None:
            for members, part, _ in self.host.target_scores(self.rows, scores.clone()):
                scores[members] = part

        with self.host.phases.timed("verify"):
            self._act("verify", self.state.verify, logits, cut)
            self.state.report()

    def _act(
        self,
        name: str,
        act: Callable[..., None],
        logits: torch.Tensor,
        cut: Callable[[torch.Tensor], None],
    ) -> None:
        """Let the rows do something with logits; cut ones differ from row to row and are scaled."""
        over, masked = self.host.over_vocabulary, self._masked
        if self.cut:
            scores = over(logits).float()
            cut(scores[: len(self.rows)])
            act(scores, masked=masked, scaled=True)
            return
        key = name, masked, logits.data_ptr()
        self.passes.run(key, lambda: act(over(logits), masked=masked))

    def take(self, rows: Rows, wanted: np.ndarray) -> Drawing:
        """The same for other rows, which go on with what was drawn and read for these."""
        return replace(self, rows=rows, wanted=wanted)

    def advance(self) -> None:
        """Lead the rows' automata on by the tokens just drawn."""
        if self.tables is not None:
            state = self.state
            state.state.copy_(self.tables.step(state.state, state.drawn))

    def _mask(self) -> None:
        if self.tables is not None:
            with self.host.phases.timed("mask"):
                state = self.state
                state.bitmask.copy_(self.tables.masks(state.state, state.left))
