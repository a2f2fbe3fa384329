"""What a step is asked to draw and what it draws, row by row, and where its time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from guided_smc.population import Population

Rows = list[tuple[int, int]]
"""The particles that grow, each by the number of its prompt among those that run, and its slot."""


@dataclass(frozen=True)
class Batch:
    """What a block is to be drawn for.

    Attributes:
        running: The prompts; their particles are advanced.
        rows: The particles that grow, R of them, in the order of the sessions' rows.
        block_sizes: K of each prompt.
        sources: int64 `[R]`, the row of the block in front that each goes on from; −1 where there
            is none.
        errors: Where errors go, by number of the prompt.
    """

    running: Sequence[Population[Any]]
    rows: Rows
    block_sizes: list[int]
    sources: np.ndarray
    errors: dict[int, Exception] = field(default_factory=dict)


@dataclass
class Block:
    """What one step has proposed for each of R live particles.

    Attributes:
        tokens: int64 `[R, K + 1]`.
        count: int64 `[R]`, tokens that count; behind an end token or a death none does.
        log_p, log_q: float64 `[R]`, summed over the tokens that count.
        ended: bool `[R]`: the last token that counts ends the text.
        dead: bool `[R]`: nothing could be drawn.
        token_log_p, token_log_q: float64 `[R, K + 1]`, log p and log q̃ of each token that counts;
            0 elsewhere.
        allowed: int64 `[R, K + 1]`, how many tokens the constraint's mask let through at each draw,
            also at one that found nothing; −1 where there was no draw, no constraint, or a mask
            that stays on a device.
        accepting: bool `[R, K + 1]`, whether an end token was among them.
        drafted, log_p_drafted, log_q_drafted: `count`, `log_p` and `log_q` of the drafted tokens
            alone, without the bonus token; set by verification.
    """

    tokens: np.ndarray
    count: np.ndarray
    log_p: np.ndarray
    log_q: np.ndarray
    ended: np.ndarray
    dead: np.ndarray
    token_log_p: np.ndarray
    token_log_q: np.ndarray
    allowed: np.ndarray
    accepting: np.ndarray
    drafted: np.ndarray = field(init=False)
    log_p_drafted: np.ndarray = field(init=False)
    log_q_drafted: np.ndarray = field(init=False)

    @classmethod
    def empty(cls, rows: int, width: int) -> Block:
        """Of so many rows that draft up to `width` tokens: nothing yet."""
        return cls(
            tokens=np.zeros((rows, width + 1), dtype=np.int64),
            count=np.zeros(rows, dtype=np.int64),
            log_p=np.zeros(rows),
            log_q=np.zeros(rows),
            ended=np.zeros(rows, dtype=bool),
            dead=np.zeros(rows, dtype=bool),
            token_log_p=np.zeros((rows, width + 1)),
            token_log_q=np.zeros((rows, width + 1)),
            allowed=np.full((rows, width + 1), -1, dtype=np.int64),
            accepting=np.zeros((rows, width + 1), dtype=bool),
        )

    def drawn(self, mine: slice, slots: np.ndarray, n: int) -> dict[str, tuple[Any, ...]]:
        """What was drawn for the rows of one prompt, as the fields of a `Step` that tell it.

        Args:
            mine: The prompt's rows.
            slots: int64 `[rows]`, the slot of each.
            n: How many slots there are; those without a row have drawn nothing.
        """
        count = self.count[mine].tolist()
        asked = (self.allowed[mine] >= 0).sum(axis=1).tolist()
        told: dict[str, tuple[Any, ...]] = {}
        for name, lengths in (
            ("tokens", count),
            ("token_log_p", count),
            ("token_log_q", count),
            ("allowed", asked),
            ("accepting", asked),
        ):
            of_slot: list[tuple[Any, ...]] = [()] * n
            values = getattr(self, name)[mine].tolist()
            for s, row, length in zip(slots.tolist(), values, lengths, strict=True):
                of_slot[s] = tuple(row[:length])
            told[name] = tuple(of_slot)
        return told


@dataclass(frozen=True)
class Drawn:
    """One token for each of R rows.

    Attributes:
        token: int64 `[R]`.
        log_p, log_q: float64 `[R]`, of the model that was asked, and of what it was drawn from.
        log_z: float64 `[R]`: not finite where nothing could be drawn.
    """

    token: np.ndarray
    log_p: np.ndarray
    log_q: np.ndarray
    log_z: np.ndarray


class Phases:
    """Seconds by phase since they were last taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count what is done inside."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds so far; counts from 0 again."""
        taken, self.seconds = self.seconds, {}
        return taken
