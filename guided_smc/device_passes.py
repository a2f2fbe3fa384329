"""The passes of one block on the device: of any session, or recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import numpy as np
import torch

from guided_smc.device_rows import DeviceRows
from guided_smc.errors import OutOfPagesError
from guided_smc.models.capture import ROWS, WIDTHS, Capture, bucket
from guided_smc.models.fixed import FixedPasses, refusal
from guided_smc.models.particles import ParticleSession
from guided_smc.options import GRAPH_FAILED
from guided_smc.proposing import Proposer, padded

_LACKED = 2
"""Tokens that a draft has not read when a block begins: the last drafted one and the bonus."""


FIXED = "device: at fixed shapes; only CUDA records graphs"
"""Where graphs were asked for elsewhere."""


class Passes(Protocol):
    """The passes of one block.

    Attributes:
        state: The rows on the device.
        name: As in `Usage.steps_on`.
        attention: As in `Usage.attention`, of the target.
    """

    state: DeviceRows
    name: str
    attention: str

    def draft(self, k: int) -> torch.Tensor:
        """The draft's logits `[B, V']` behind what each row has, for its drafted token k."""

    def target(self) -> torch.Tensor:
        """The target's logits `[B, K + 1, V']` at the last token and at those drafted."""

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what a function of the state and of logits does."""


class SessionPasses:
    """Passes of any sessions, as they come.

    Args:
        host: Whose sessions they are.
        device: Where the target's logits are.
        lacking: For each row the tokens that the draft has not read, none if it is not to.
        wanted: int64 `[R]`, K of each row.
        why: Why it is these passes, if others were asked for.
    """

    def __init__(
        self,
        host: Proposer,
        device: torch.device,
        lacking: Sequence[np.ndarray],
        wanted: np.ndarray,
        why: str,
    ) -> None:
        self.name = f"device: {why}" if why else "device"
        self._sessions = host.sessions
        self.attention = host.sessions.target.attention
        self._lacking = lacking
        self._wanted = wanted
        vocabulary = host.vocabulary
        width = int(wanted.max(initial=0))
        self.state = DeviceRows(len(wanted), width, len(vocabulary), vocabulary.eos_ids, device)

    def draft(self, k: int) -> torch.Tensor:
        """As `Passes.draft`."""
        session = self._sessions.following or self._sessions.draft
        assert session is not None
        if k == 0:
            tokens, counts = padded(self._lacking)
        else:
            tokens, counts = self.state.feed, torch.from_numpy((k < self._wanted).astype(np.int64))
        logits = session.extend(tokens, counts, last_only=True)
        return logits.to(self.state.device)  # the draft may be elsewhere

    def target(self) -> torch.Tensor:
        """As `Passes.target`."""
        fed = self.state.fed[:, : self.state.width + 1]
        counts = torch.from_numpy(1 + self._wanted)
        return self._sessions.target.extend(fed, counts, last_only=False)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """As `Passes.run`."""
        function()


class CapturedPasses:
    """Passes and draws recorded as CUDA graphs, one for each bucket of rows and K.

    Args:
        host: Whose sessions they are.
        device: Where the target is.

    Attributes:
        refused: Why the last block could not be captured.
        captures: Of draws, of the target's passes and of the draft's.
    """

    attention = "torch"

    def __init__(self, host: Proposer, device: torch.device) -> None:
        self.refused = ""
        self.name = "graphs" if device.type == "cuda" else FIXED
        self._host = host
        self._device = device
        self._states: dict[tuple[int, int], DeviceRows] = {}
        self._draws = Capture(device)
        sessions = host.sessions
        self._refusal = None
        if sessions.following is not None:
            self._refusal = "the draft follows the target's cache"
        self._target = self._fixed(sessions.target)
        self._draft = self._fixed(sessions.draft)
        self.state: DeviceRows
        self._wanted = np.zeros(0, dtype=np.int64)
        self._reader: FixedPasses | None = None  # what was read ahead last
        self._taken: np.ndarray | None = None  # rows of it that are not in the pages
        self._logits: torch.Tensor  # of the target, if it was that

    def _fixed(self, session: object) -> FixedPasses | None:
        if not isinstance(session, ParticleSession):
            return None
        return FixedPasses(session, Capture(self._device))

    @property
    def captures(self) -> list[Capture]:
        """All there are."""
        fixed = [passes.capture for passes in (self._target, self._draft) if passes is not None]
        return [self._draws, *fixed]

    def begin(self, lacking: Sequence[np.ndarray], wanted: np.ndarray) -> bool:
        """Plan a block; False if it cannot be captured, and why is then in `refused`.

        Args:
            lacking: As for `SessionPasses`.
            wanted: int64 `[R]`, K of each row.
        """
        self.refused = self._why_not() or ""
        if self.refused:
            return False
        rows = bucket(len(wanted), ROWS)
        width = bucket(int(wanted.max(initial=0)), WIDTHS)
        if (rows, width) not in self._states:
            vocabulary = self._host.vocabulary
            self._states[rows, width] = DeviceRows(
                rows, width, len(vocabulary), vocabulary.eos_ids, self._device
            )
        self.state = self._states[rows, width]
        if wanted.any() and self._draft is not None:
            behind = [tokens[:-_LACKED] for tokens in lacking]
            if any(len(tokens) for tokens in behind):
                self._draft.session.extend(*padded(behind), last_only=True)
            tokens, counts = padded([x[-_LACKED:] for x in lacking], _LACKED)
            more = np.maximum(wanted - 1, 0)
            self._draft.plan(
                tokens.numpy(), counts.numpy(), more, rows=rows, passes=max(width - 1, 0)
            )
        self._wanted = wanted
        return True

    # -- ahead: see `device_ahead` ---------------------------------------------------------------

    def same_shape(self, wanted: np.ndarray) -> bool:
        """Whether a block with K of these rows, int64 `[R]`, has the shape of the present one."""
        most = int(wanted.max(initial=0))
        return bucket(most, WIDTHS) == self.state.width and not self._why_not()

    def look_ahead(self, wanted: np.ndarray) -> None:
        """Begin the block that follows, K of each row being int64 `[R]`, from `state.source`.

        Where nothing is drafted, the target's pass is launched, too.

        Raises:
            OutOfPagesError: There is no memory to do so; nothing has begun.
        """
        state = self.state
        reader, width = (self._draft, _LACKED) if wanted.any() else (self._target, 1)
        assert reader is not None
        first = np.where(wanted > 0, width, 0 if wanted.any() else 1)  # in the first pass
        more = np.maximum(wanted - 1, 0)
        passes = max(state.width - 1, 0)
        try:
            reader.plan_ahead(first, more, width, rows=state.rows, passes=passes)
        except OutOfPagesError:
            reader.session.invalidate()
            raise
        state.expect(wanted)
        self.run("follow", lambda: state.follow(state.source))
        reader.follow(state.source)
        self._reader = reader
        if reader is self._draft:
            reader.feed(state.behind)
        else:
            self._logits = reader.first(state.fed[:, :1], last_only=False)

    def stands(self) -> bool:
        """Whether the rows that there are now would read what has begun, to the last bit."""
        assert self._reader is not None
        return self._reader.stands()

    def take(self, old: np.ndarray, wanted: np.ndarray) -> None:
        """Go on with what has begun; rows move only when they have all of their drafted tokens.

        Args:
            old: int64 `[R]`, the row that each row was in it.
            wanted: int64 `[R]`, K of each.
        """
        if len(old) != len(self._wanted) or (old != np.arange(len(old))).any():
            self.state.take(old)
        self._wanted = wanted
        self._taken = old

    def drop(self) -> None:
        """Let what has begun be forgotten."""
        assert self._reader is not None
        self._reader.drop(self.state.sources())

    def _why_not(self) -> str | None:
        sessions = self._host.sessions
        if self._refusal is not None:
            return self._refusal
        for session in sessions.with_rows:
            if (why := refusal(session, self._device)) is not None:
                return why
        for capture in self.captures:
            if capture.refused is not None:
                return f"{GRAPH_FAILED}: {capture.refused}"
        return None

    def draft(self, k: int) -> torch.Tensor:
        """As `Passes.draft`."""
        assert self._draft is not None
        if k == 0:
            return self._draft.first(last_only=True)
        return self._draft.single(k - 1, self.state.feed)

    def target(self) -> torch.Tensor:
        """As `Passes.target`."""
        assert self._target is not None
        state, wanted = self.state, self._wanted
        if self._taken is not None:
            assert self._reader is not None
            self._reader.keep(self._taken)
            self._taken = None
            if self._reader is self._target:
                return self._logits
        # Planned now and not with the draft's passes: the device is busy with those meanwhile.
        unknown = np.zeros((len(wanted), state.width + 1), dtype=np.int64)
        none = np.zeros_like(wanted)
        self._target.plan(unknown, 1 + wanted, none, rows=state.rows, passes=0)
        return self._target.first(state.fed[:, : state.width + 1], last_only=False)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """As `Passes.run`."""
        at = (self.state.rows, self.state.width)
        self._draws.run((key, *at), function, self.state.changing)
