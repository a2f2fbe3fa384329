"""What the rows of a block keep on the device, and the draws that change it there.

Everything has a fixed address and a size that follows from the number of rows, K and the
vocabulary: so each method can be recorded as a CUDA graph and replayed. Nothing here waits for the
device. A row that ends or dies goes on being computed with, and nothing of that is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from guided_smc import kernels
from guided_smc.models.mirror import Mirror, sent

_INTS = ("last", "wanted", "seed", "counter", "state", "left")
_REALS = ("draft_temperature", "temperature", "power")


@dataclass(frozen=True)
class Given:
    """What the host says of R rows at the start of a block.

    Attributes:
        last: int64 `[R]`, the last token of each.
        wanted: int64 `[R]`, K of each.
        seed, counter: int64 `[R]`, of the next draw.
        state: int64 `[R]`, in the table of the batch's constraints, if there is one.
        left: int64 `[R]`, tokens that may still come before the end token.
        draft_temperature, temperature, power: float64 `[R]`.
    """

    last: np.ndarray
    wanted: np.ndarray
    seed: np.ndarray
    counter: np.ndarray
    state: np.ndarray
    left: np.ndarray
    draft_temperature: np.ndarray
    temperature: np.ndarray
    power: np.ndarray

    def packed(self, rows: int) -> np.ndarray:
        """int64 `[rows, 10]`: all of it side by side, and whether there is such a row."""
        columns = [getattr(self, name).astype(np.int64) for name in _INTS]
        columns += [getattr(self, name).astype(np.float64).view(np.int64) for name in _REALS]
        there = np.stack([*columns, np.ones_like(self.last)], axis=1)
        return np.pad(there, ((0, rows - len(there)), (0, 0)))


@dataclass(frozen=True)
class Found:
    """What a block has drawn, on the host.

    Attributes:
        tokens: int64 `[R, K + 1]`; behind `count` nothing.
        drafted: int64 `[R]`, drafted tokens.
        count: int64 `[R]`, the same with the bonus token.
        log_p, log_q: float64 `[R, K + 1]`, of each token.
        broken: bool `[R]`: a logit of the draft was NaN.
    """

    tokens: np.ndarray
    drafted: np.ndarray
    count: np.ndarray
    log_p: np.ndarray
    log_q: np.ndarray
    broken: np.ndarray


class DeviceRows:
    """Room for `rows` rows that draft up to `width` tokens.

    Args:
        rows: B; what is not asked for of them draws nothing.
        width: K.
        vocabulary: V.
        eos_ids: All end tokens.
        device: Where it all is.

    Attributes:
        fed: int64 `[B, K + 3]`: the last token, behind it those drawn, and in the end `count`.
        feed: int64 `[B, 1]`: what the draft reads next.
        count: int64 `[B]`, tokens drawn.
        drawn: int64 `[B]`: the token just drawn, −1 for none.
        bitmask: int32 `[B, ceil(V / 32)]`, what the next draw may give, if it may not give all.
        state, left: int32 `[B]`, of the rows' automata.
        there: bool `[B]`, rows that were asked for.
        alive: bool `[B]`, those of them that draw on.
        behind: int64 `[B, 2]`: what the draft has not read when a block begins that follows upon
            another one here: the last token drafted and the one behind it.
        source: int64 `[B]`, the row that each goes on from then.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        vocabulary: int,
        eos_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.rows, self.width, self.vocabulary = rows, width, vocabulary
        self.device = device
        self._given = Mirror(zeros(rows, len(_INTS) + len(_REALS) + 1))
        self._next = Mirror(zeros(rows))
        self.source = zeros(rows)
        self._told = Mirror(self.source)
        self.fed = zeros(rows, width + 3)
        self.feed = zeros(rows, 1)
        self.behind = zeros(rows, 2)
        self.wanted, self.seed, self.counter, self.count, self._drafted, self.drawn = (
            zeros(rows) for _ in range(6)
        )
        self._first = zeros(rows)  # counts of draws when the block began
        self.state, self.left = (zeros(rows, dtype=torch.int32) for _ in range(2))
        self.draft_temperature, self.temperature = (
            zeros(rows, dtype=torch.float32) for _ in range(2)
        )
        self.power = zeros(rows, dtype=torch.float64)
        self.there, self.alive, self._broken = (zeros(rows, dtype=torch.bool) for _ in range(3))
        self.log_q = zeros(rows, width + 1, dtype=torch.float64)
        self.log_p = zeros(rows, width + 1, dtype=torch.float64)
        self.bitmask = zeros(rows, (vocabulary + 31) // 32, dtype=torch.int32)
        self._ones = torch.ones(rows, dtype=torch.float32, device=device)
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._is_eos = zeros(vocabulary, dtype=torch.bool)
        self._is_eos[list(eos_ids)] = True
        self._out = Mirror(zeros(rows, 3 * (width + 1) + 3))
        self._seen = Mirror(self.fed)
        self._allowed = Mirror(self.bitmask)

    @property
    def changing(self) -> list[torch.Tensor]:
        """What draws change and later draws read."""
        return [*self._of_rows, self._out.there]

    @property
    def _of_rows(self) -> list[torch.Tensor]:
        """All that a row has."""
        return [
            *(self.fed, self.feed, self.behind, self.drawn, self.count, self._drafted),
            *(self.wanted, self.seed, self.counter, self._first, self.state, self.left),
            *(self.draft_temperature, self.temperature, self.power),
            *(self.there, self.alive, self._broken, self.log_q, self.log_p),
        ]

    def upload(self, given: Given) -> None:
        """Send what the host says; the copy is not waited for."""
        self._given.send(given.packed(self.rows))

    def start(self) -> None:
        """Begin a block with what was uploaded."""
        given = self._given.there
        ints = dict(zip(_INTS, given.unbind(1), strict=False))
        reals = dict(zip(_REALS, given[:, len(_INTS) :].unbind(1), strict=False))
        for name in ("wanted", "seed", "counter", "state", "left"):
            getattr(self, name).copy_(ints[name])
        for name, bits in reals.items():
            getattr(self, name).copy_(bits.contiguous().view(torch.float64))
        self.there.copy_(given[:, -1] > 0)
        self._begin(ints["last"], self.there)

    def _begin(self, last: torch.Tensor, alive: torch.Tensor) -> None:
        """Nothing is drawn yet behind the last tokens int64 `[B]`."""
        self._first.copy_(self.counter)
        self.alive.copy_(alive)
        self.fed.zero_()
        self.fed[:, 0].copy_(last)
        for tensor in (self.feed, self.count, self._drafted, self._broken, self.log_q, self.log_p):
            tensor.zero_()
        self.drawn.fill_(-1)

    # -- from block to block ---------------------------------------------------------------------

    @property
    def goes_on(self) -> torch.Tensor:
        """Bool `[B]`: the row has all that it wanted and the bonus token, and has not ended."""
        return self.alive & (self.count > self.wanted)

    def gained(self) -> torch.Tensor:
        """float64 `[B]`: what the block adds to each row's log-weight, potentials left out."""
        counts = torch.arange(self.width + 1, device=self.device) < self.count.unsqueeze(1)
        log_p = torch.where(counts, self.log_p, 0.0).sum(dim=1)
        log_q = torch.where(counts, self.log_q, 0.0).sum(dim=1)
        last = self.fed.gather(1, self.count.unsqueeze(1)).squeeze(1)
        ended = (self.count > 0) & self._is_eos[last]
        return torch.where(self.goes_on | ended, self.power * log_p - log_q, -torch.inf)

    def tell_sources(self) -> None:
        """Let the host read `source`, while the device goes on."""
        self._told.fetch()

    def sources(self) -> np.ndarray:
        """int64 `[B]`: what was told."""
        return self._told.read()

    def expect(self, wanted: np.ndarray) -> None:
        """Send how many tokens each of R rows will draft in the block that follows."""
        self._next.send(np.pad(wanted, (0, self.rows - len(wanted))))

    def follow(self, source: torch.Tensor) -> None:
        """Begin the block that follows, where each row goes on from row `source`, int64 `[B]`.

        A row draws by its own seed, and each block counts a draw for every token that was wanted.
        """
        at = torch.stack([self.wanted, self.wanted + 1], dim=1)
        self.behind.copy_(self.fed.gather(1, at)[source])
        alive = self.goes_on[source] & self.there
        self.state.copy_(self.state[source])
        self.left.copy_(self.left[source])
        self.counter.copy_(self._first + self.wanted + 1)
        self.wanted.copy_(self._next.there)
        self._begin(self.behind[:, 1], alive)

    def take(self, index: np.ndarray) -> None:
        """Let row i be what row `index[i]` was, int64 `[R]`; behind them there is none."""
        at = sent(np.pad(index, (0, self.rows - len(index))), self.device)
        for tensor in self._of_rows:
            tensor.copy_(tensor[at])
        self.there[len(index) :] = False
        self.alive.logical_and_(self.there)

    # -- what the host says and reads ------------------------------------------------------------

    def allow(self, bitmask: np.ndarray) -> None:
        """Send what the first R rows may draw next, int32 `[R, ceil(V / 32)]`."""
        self._allowed.send(bitmask)

    def peek(self) -> None:
        """Let the host read what is drawn by now, while the device goes on."""
        self._seen.fetch()

    def peeked(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 `[R, K + 1]`, and how many there are of each of the first R rows."""
        seen = self._seen.read()[:rows]
        return seen[:, 1:-1], seen[:, -1]

    # -- drafting --------------------------------------------------------------------------------

    def choose(self, scores: torch.Tensor, *, masked: bool, scaled: bool = False) -> None:
        """Draw a token for every row that drafts one more, and append it.

        Args:
            scores: `[B, V]`, the draft's logits.
            masked: Whether `bitmask` says what may be drawn.
            scaled: Whether the temperature is in the scores already.
        """
        active = self.alive & (self.count < self.wanted)
        bitmask = self.bitmask if masked else None
        temperature = self._ones if scaled else self.draft_temperature
        token, log_q, log_z = kernels.sample_masked(
            scores, bitmask, temperature, self.seed, self.counter, active
        )
        broken = active & log_z.isnan()
        if masked:
            # The draft gives no mass to what the mask allows: propose from the mask alone.
            empty = active & (token < 0) & ~broken
            flat, flat_log_q, _ = kernels.sample_masked(
                self._zeros(scores), bitmask, self._ones, self.seed, self.counter, empty
            )
            token = torch.where(empty, flat, token)
            log_q = torch.where(empty, flat_log_q, log_q)
        self._broken.logical_or_(broken)
        self.alive.logical_and_(~active | (token >= 0))
        self._append(token, log_q)
        self._drafted.copy_(self.count)

    def _append(self, token: torch.Tensor, log_q: torch.Tensor) -> None:
        """Book drawn tokens, int64 `[B]`, −1 for none, with their log q̃."""
        drew = token >= 0
        known = token.clamp(min=0)
        self.drawn.copy_(token)
        self.feed.copy_(known.unsqueeze(1))
        # Where nothing was drawn, there is nothing behind the end that this could overwrite.
        self.fed.scatter_(1, (self.count + 1).unsqueeze(1), known.unsqueeze(1))
        place = self.count.clamp(max=self.width).unsqueeze(1)
        self.log_q.scatter_(1, place, torch.where(drew, log_q, 0.0).unsqueeze(1))
        self.count.add_(drew)
        self.counter.add_(drew)
        self.left.sub_(drew.to(torch.int32))
        self.fed[:, -1].copy_(self.count)
        self.alive.logical_and_(~(drew & self._is_eos[known]))

    def place(self, row: int, token: int, log_q: float) -> None:
        """Give a row that could draw nothing a drafted token after all, drawn elsewhere."""
        others = torch.full_like(self.drawn, -1)
        others[row] = token
        drawn = self.drawn.clone()
        feed = self.feed.clone()
        self.alive[row] = True
        self._append(others, torch.full_like(self.log_q[:, 0], log_q))
        self.drawn.copy_(torch.where(others >= 0, others, drawn))
        self.feed.copy_(torch.where(others.unsqueeze(1) >= 0, self.feed, feed))
        self._drafted.copy_(self.count)

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        # One that a graph reads must stay where it is, whatever is drawn without one meanwhile.
        if like.dtype not in self._flat:
            self._flat[like.dtype] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return self._flat[like.dtype]

    # -- verifying -------------------------------------------------------------------------------

    def verify(self, logits: torch.Tensor, *, masked: bool, scaled: bool = False) -> None:
        """Score the drafted tokens, draw the bonus token, and pack all that the host will read.

        Args:
            logits: `[B, K + 1, V]`, of the target.
            masked: As in `choose`.
            scaled: As in `choose`.
        """
        drafted = self.count.clone()
        log_p, bonus, bonus_log_p, bonus_log_q, _ = kernels.verify(
            logits,
            self.fed[:, 1 : self.width + 1].contiguous(),
            drafted,
            self.bitmask if masked else None,
            self._ones if scaled else self.temperature,
            self.power,
            self.seed,
            self.counter,
            self.there,
        )
        # Of texts that ended within the block the drafted tokens count, and no more.
        bonus = torch.where(self.alive, bonus, -1)
        self.log_p[:, : self.width] = log_p
        drew = bonus >= 0
        place = drafted.unsqueeze(1)
        self.log_p.scatter_(1, place, torch.where(drew, bonus_log_p, 0.0).unsqueeze(1))
        broken = self.alive & ~drew & bonus_log_p.isnan()
        self._append(bonus, bonus_log_q)
        # A target that says NaN behind the last token says it of the row.
        self.log_p[:, -1].masked_fill_(broken, torch.nan)
        parts = (self.fed[:, 1:-1], self.log_p.view(torch.int64), self.log_q.view(torch.int64))
        flags = torch.stack([self._drafted, self.count, self._broken.long()], dim=1)
        self._out.there.copy_(torch.cat([*parts, flags], dim=1))

    def report(self) -> None:
        """Let the host read what the block has drawn, while the device goes on."""
        self._out.fetch()

    def reported(self, rows: int) -> Found:
        """What the first `rows` rows have drawn: the one thing that is waited for."""
        back = self._out.read()[:rows]
        n = self.width + 1
        return Found(
            tokens=back[:, :n].copy(),
            log_p=back[:, n : 2 * n].copy().view(np.float64),
            log_q=back[:, 2 * n : 3 * n].copy().view(np.float64),
            drafted=back[:, 3 * n].copy(),
            count=back[:, 3 * n + 1].copy(),
            broken=back[:, 3 * n + 2] != 0,
        )
