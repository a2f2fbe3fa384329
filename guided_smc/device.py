"""The same block as `proposing`, with tokens, counts, masks and randomness on the device.

The host says once what it knows of the rows and reads once what was drawn; in between it only
launches. What it has to know beforehand is how many tokens each row will be fed, and it does: a row
that goes on has all of its K, and of one that ends within its block nothing is read later. So every
row is fed K tokens, wherever it ends.

A block is launched before the host tells of the one in front of it: records, texts and events are
made while the device is busy.

Masks of finite automata are made on the device (`kernels.DeviceAutomaton`). Others are made by the
host, a drafted token at a time: it reads the token just drawn, and makes the next mask while the
model reads that token too. Where tokens have to be tested one by one, a row's draw is made by the
host (`guided_smc.rejection`); if that is so when a block begins, all of the block is.

Weights, ancestors and lists of pages are the host's, as potentials are. So that the device need not
wait for them, it goes on meanwhile by weights of its own (`device_ahead`).

A row draws by a seed of its own, made of its prompt's seed and its slot, and by the number of the
draw: so a prompt's draws do not depend on who shares its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import numpy as np
import torch

from guided_smc.blocks import Batch, Block, Rows
from guided_smc.device_ahead import Ahead
from guided_smc.device_drawing import Drawing
from guided_smc.device_masks import Asked, Tables
from guided_smc.device_passes import CapturedPasses, Passes, SessionPasses
from guided_smc.device_rows import Found, Given
from guided_smc.population import Population
from guided_smc.proposing import Proposer, count_step

_FAR = 2**31 - 1  # tokens left to a text whose end no table has to plan


class DeviceProposer:
    """Draws blocks on the device where that can be done, and else as `host` does.

    Args:
        host: Draws what this one cannot.
        device: Where the target's logits are.
        graphs: Whether passes and draws are recorded as CUDA graphs.
    """

    ahead = True

    def __init__(self, host: Proposer, device: torch.device, *, graphs: bool) -> None:
        self.host = host
        self.device = device
        self.vocabulary = host.vocabulary
        self.captured = CapturedPasses(host, device) if graphs else None
        self._tables = Tables(host, device)
        self._ahead = None if self.captured is None else Ahead(host, self.captured, device)

    def start(self, batch: Batch) -> Callable[[], Block]:
        """As `Proposer.start`: what can be launched without waiting for the device is."""
        where = self._refusal(batch.running, batch.rows)
        if where is not None:
            if self._ahead is not None:
                self._ahead.drop(batch)
            for population in batch.running:
                count_step(population, f"host: {where}")
            return self.host.start(batch)
        block = self._propose(batch)
        with torch.inference_mode():
            next(block)

        def complete() -> Block:
            with torch.inference_mode():
                while True:
                    try:
                        next(block)
                    except StopIteration as done:
                        return cast(Block, done.value)

        return complete

    def _refusal(self, running: Sequence[Population[Any]], rows: Rows) -> str | None:
        """Why the tokens of this block must be drawn by the host; None if they need not."""
        sessions = self.host.sessions
        for session in (*sessions.with_rows, sessions.following):
            reads = session is not None and getattr(session, "reads_tokens", True)
            if reads and self.device.type != "cpu":
                return "a model that is not on the device reads the tokens"
        if any(p.scores.lookahead for p in running):
            return "a reward looks at the target's likeliest tokens before one is drawn"
        if any(p.request.logit_bias for p in running):
            return "logit_bias is added on the host"
        for g, s in rows:
            unmasked = running[g].unmasked
            try:
                if unmasked is not None and unmasked.judges(running[g].states[s]):
                    return "a constraint has to be asked about tokens one by one"
            except Exception:
                return "a constraint has failed"  # which the host will tell of
        return None

    def _propose(self, batch: Batch) -> Generator[None, None, Block]:
        """The block; stops wherever the host would wait for the device next."""
        host, timed = self.host, self.host.phases.timed
        host.begin(batch.running)
        rows, errors = batch.rows, batch.errors
        sizes = batch.block_sizes
        wanted = np.array([sizes[g] for g, _ in rows], dtype=np.int64)
        # Before tokens of this block count as theirs.
        following = [p.block_size_after(k) for p, k in zip(batch.running, sizes, strict=True)]
        drawing = self._begin(batch, wanted)
        passes, state, by_host = drawing.passes, drawing.state, drawing.by_host
        n_drafts = drawing.n_drafts
        block = Block.empty(len(rows), n_drafts)
        asked = Asked(host, rows, block, errors)

        for k in range(drawing.drafted, n_drafts):
            logits = drawing.read()
            if by_host:
                if k:
                    yield
                with timed("mask"):
                    if k:
                        self._book(rows, block, *state.peeked(len(rows)), errors)
                    state.allow(asked.bitmask(k < wanted))
            drawing.draw()
            asked.draft(state, logits)
            if by_host:
                state.peek()
        if n_drafts and not by_host:
            state.peek()
        with timed("verify"):
            logits = passes.target()
        if by_host:
            if n_drafts:
                yield
            with timed("mask"):
                if n_drafts:
                    self._book(rows, block, *state.peeked(len(rows)), errors)
                state.allow(asked.bitmask(np.ones(len(rows), dtype=bool)))
        drawing.verify(logits)
        if self._ahead is not None and not asked.judges:
            self._ahead.begin(batch, drawing, following)
        yield
        if n_drafts and not by_host:
            with timed("mask"):  # while the device is busy
                self._book(rows, block, *state.peeked(len(rows)), errors)
        with timed("verify"):
            found = state.reported(len(rows))
        asked.bonus(found, logits)
        self._finish(rows, block, found, wanted, errors)
        self._account(rows, wanted, batch.block_sizes, passes)
        return block

    def _begin(self, batch: Batch, wanted: np.ndarray) -> Drawing:
        """Begin a block, or go on with what was drafted ahead."""
        host, running, rows = self.host, batch.running, batch.rows
        with host.phases.timed("mask"):
            which = self._tables.of(running)
        by_host = which is None and any(p.states for p in running)
        if self._ahead is not None:
            drawing = self._ahead.take(batch, wanted, by_host=by_host)
            if drawing is not None:
                return drawing
        with host.phases.timed("mask"):
            tables = None if which is None else self._tables.joined(which)
            places = np.zeros(len(rows), dtype=np.int64)
            if which is not None:
                places = self._tables.places(running, rows, which)
        with host.phases.timed("draft" if wanted.any() else "verify"):
            passes = self._passes(rows, wanted)
            passes.state.upload(self._given(rows, wanted, places))
            passes.run("start", passes.state.start)
        return Drawing(host, passes, rows, wanted, tables, by_host)

    # -- what the host knows ---------------------------------------------------------------------

    def _passes(self, rows: Rows, wanted: np.ndarray) -> Passes:
        lacking = self.host.lacking(rows, wanted > 0)
        if self.captured is not None and self.captured.begin(lacking, wanted):
            return self.captured
        why = "" if self.captured is None else self.captured.refused
        return SessionPasses(self.host, self.device, lacking, wanted, why)

    def _given(self, rows: Rows, wanted: np.ndarray, places: np.ndarray) -> Given:
        each = [(self.host.running[g], s) for g, s in rows]

        def real(of: Callable[[Population[Any]], float]) -> np.ndarray:
            return np.array([of(p) for p, _ in each], dtype=np.float64)

        return Given(
            last=np.array([p.tokens[s, p.length[s]] for p, s in each]),
            wanted=wanted,
            seed=np.array([p.streams[s] for p, s in each]),
            counter=np.array([p.draws for p, _ in each]),
            state=places,
            left=np.array(
                [p.options.max_tokens - p.length[s] if p.states else _FAR for p, s in each]
            ),
            draft_temperature=real(lambda p: p.draft_temperature),
            temperature=real(lambda p: p.options.temperature),
            power=real(lambda p: p.options.power),
        )

    def _book(
        self,
        rows: Rows,
        block: Block,
        tokens: np.ndarray,
        count: np.ndarray,
        errors: dict[int, Exception],
    ) -> None:
        """Hand the first `count` `[R]` of the drawn tokens `[R, ...]` on to texts and constraints,
        as far as these have not got them and go on.
        """
        for r in range(len(rows)):
            for token in tokens[r, block.count[r] : count[r]].tolist():
                if block.ended[r] or block.dead[r]:
                    break
                self.host.book(rows, block, r, token, errors)

    def _finish(
        self,
        rows: Rows,
        block: Block,
        found: Found,
        wanted: np.ndarray,
        errors: dict[int, Exception],
    ) -> None:
        """Complete the block: the bonus tokens, what has died, and log p and log q̃."""
        host = self.host
        drafted = block.count.copy()
        self._book(rows, block, found.tokens, found.count, errors)
        # What goes on has been given a token for each that it was to have.
        block.dead |= ~block.ended & (found.count <= wanted)
        host.report_nan(rows, found.broken, host.draft or host.target, errors)
        host.report_nan(rows, np.isnan(found.log_p).any(axis=1), host.target, errors)
        for r, (g, _) in enumerate(rows):
            population = host.running[g]
            if not population.states and population.options.power == 1.0:
                # The target proposes for itself: Z is 1, not 1 to within rounding.
                last = int(found.count[r]) - 1
                if last >= found.drafted[r]:
                    found.log_q[r, last] = found.log_p[r, last]
        position = np.arange(found.log_p.shape[1])
        block.drafted = np.minimum(drafted, block.count)
        for n, suffix in ((block.drafted, "_drafted"), (block.count, "")):
            counts = position < n[:, None]
            for name in ("log_p", "log_q"):
                of_token = np.where(counts, getattr(found, name), 0.0)
                setattr(block, f"token_{name}", of_token)  # of all that count, in the end
                setattr(block, name + suffix, of_token.sum(axis=1))

    def _account(
        self, rows: Rows, wanted: np.ndarray, block_sizes: Sequence[int], passes: Passes
    ) -> None:
        """Count passes, draws and steps, and what the draft's cache now holds."""
        for (g, s), k in zip(rows, wanted.tolist(), strict=True):
            self.host.running[g].draft_holds[s] += max(k - 1, 0)
        for population, k in zip(self.host.running, block_sizes, strict=True):
            population.usage.draft_passes += k
            population.usage.target_passes += 1
            population.draws += k + 1
            population.usage.attention = passes.attention
            count_step(population, passes.name)
