"""What one step proposes: drafted tokens, their verification, and the bonus token, on the host.

`Proposer` is the step's first half, from the rows that grow to their new tokens with log p and log
q̃. It draws by uniforms of each prompt's own generator, and serves every model and constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from guided_smc.blocks import Batch, Block, Drawn, Phases, Rows
from guided_smc.errors import GuidedSMCError, ModelError, PotentialError
from guided_smc.lookahead import look_ahead
from guided_smc.models.base import FollowingModel, FollowingSession, LanguageModel, Session
from guided_smc.models.mirror import sent
from guided_smc.population import Population
from guided_smc.rejection import redraw
from guided_smc.sampling import (
    NEG_INF,
    UNIFORMS,
    draw,
    empty_bitmask,
    masked_weights,
    scale,
    target_scores,
    truncated_draft,
    unpack_bitmask,
)

_ONES = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


@dataclass
class Sessions:
    """The cached prefixes of the target and of a draft.

    Attributes:
        target: One row for each particle that grows.
        draft: The same of a draft with rows of its own.
        following: Of a draft on the rows of the target.
    """

    target: Session
    draft: Session | None = None
    following: FollowingSession | None = None

    @classmethod
    def start(cls, target: LanguageModel, draft: LanguageModel | None) -> Sessions:
        """Sessions without rows."""
        sessions = cls(target.start_session())
        if isinstance(draft, FollowingModel):
            sessions.following = draft.follow(sessions.target)
        elif draft is not None:
            sessions.draft = draft.start_session()
        return sessions

    @property
    def with_rows(self) -> list[Session]:
        """Those that have rows of their own."""
        return [s for s in (self.target, self.draft) if s is not None]


class Proposer:
    """Draws blocks for the rows of a batch.

    Args:
        target: The model whose law is sampled.
        draft: Proposes tokens, or None.
        sessions: Theirs.
        phases: Where seconds are counted.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None,
        sessions: Sessions,
        phases: Phases,
    ) -> None:
        self.target = target
        self.draft = draft
        self.sessions = sessions
        self.phases = phases
        self.vocabulary = target.vocabulary
        self._eos_ids = frozenset(self.vocabulary.eos_ids)
        self._ordinary = _bits(self.vocabulary.ordinary)
        self._ends = _bits(np.isin(np.arange(len(self.vocabulary)), self.vocabulary.eos_ids))
        real = torch.from_numpy(self.vocabulary.real)
        self._padding = None if bool(real.all()) else ~real
        self._padding_on: dict[torch.device, torch.Tensor] = {}
        self.running: Sequence[Population[Any]] = ()

    ahead = False
    """Whether it is of use to start a block before the one in front of it is told of."""

    def start(self, batch: Batch) -> Callable[[], Block]:
        """Begin what `propose` does; what is returned completes it."""
        return partial(self.propose, batch)

    def propose(self, batch: Batch) -> Block:
        """Draft K tokens, verify them in one target pass, and draw the bonus token."""
        running, rows, errors = batch.running, batch.rows, batch.errors
        block_sizes = batch.block_sizes
        self.begin(running)
        k_row = np.array([block_sizes[g] for g, _ in rows], dtype=np.int64)
        width = int(k_row.max(initial=0))
        last = np.array([[running[g].tokens[s, running[g].length[s]]] for g, s in rows])
        # For each slot and position, drawn by the prompt's own generator: a prompt's draws do not
        # depend on who shares its batch.
        uniforms = [
            p.rng.random((k + 1, p.n, UNIFORMS)) for p, k in zip(running, block_sizes, strict=True)
        ]
        unused = np.zeros(UNIFORMS)
        block = Block.empty(len(rows), width)
        for k in range(width):
            active = ~block.ended & ~block.dead & (k < k_row)
            if not active.any():
                break
            with self.phases.timed("mask"):
                mask = self._mask(rows, active, errors)
                self._note_mask(rows, block, active, mask)
            with self.phases.timed("draft"):
                if np.all(block.allowed[active, block.count[active]] == 1):
                    assert mask is not None
                    scores = torch.zeros(mask.shape)  # every token is forced: nothing to ask
                else:
                    scores = self._ask_draft(rows, active)
                    for g in {g for (g, _), on in zip(rows, active, strict=True) if on}:
                        running[g].usage.draft_passes += 1
            u = np.array([uniforms[g][k, s] if k < block_sizes[g] else unused for g, s in rows])
            self._take(rows, block, active, scores, mask, u, errors, draft=True)

        with self.phases.timed("verify"):
            feed = np.concatenate([last, block.tokens[:, :width]], axis=1)
            logits = self.sessions.target.extend(
                torch.from_numpy(feed), torch.from_numpy(1 + block.count), last_only=False
            )
            log_p_last = self._verify(rows, block, logits, errors)
        active = ~block.ended & ~block.dead
        with self.phases.timed("mask"):
            mask = self._mask(rows, active, errors)
            self._note_mask(rows, block, active, mask)
        u = np.array([uniforms[g][-1, s] for g, s in rows])
        self._take(rows, block, active, log_p_last, mask, u, errors, draft=False)
        for population in running:
            population.usage.target_passes += 1
        return block

    def begin(self, running: Sequence[Population[Any]]) -> None:
        """Begin a block of these prompts."""
        self.running = running
        if self.sessions.following is not None:
            self.sessions.following.begin_block()
            for population in running:
                population.draft_holds[:] = population.length

    def lacking(self, rows: Rows, active: np.ndarray) -> list[np.ndarray]:
        """For each row the tokens that the draft has not read, and now will; none if not active."""
        lacks: list[np.ndarray] = []
        for (g, s), on in zip(rows, active, strict=True):
            p = self.running[g]
            holds, has = int(p.draft_holds[s]), 1 + int(p.length[s])
            lacks.append(p.tokens[s, holds:has] if on else p.tokens[s, :0])
            if on:
                p.draft_holds[s] = has
        return lacks

    def _ask_draft(self, rows: Rows, active: np.ndarray) -> torch.Tensor:
        """Unnormalised log q `[R, V]` after each active row's tokens."""
        session = self.sessions.following or self.sessions.draft
        assert session is not None
        logits = session.extend(*padded(self.lacking(rows, active)), last_only=True)
        return self.draft_scores(rows, self._biased(rows, self.over_vocabulary(logits)))

    def draft_scores(self, rows: Rows, logits: torch.Tensor) -> torch.Tensor:
        """Unnormalised log q `[R, V]` of a draft's logits: at its temperature, and cut."""
        scores = torch.empty_like(logits)
        by = self._kinds(rows, lambda p: (p.draft_temperature, *p.target_cut), logits.device)
        for kind, members in by:
            temperature, top_k, top_p, min_p = kind
            part = scale(logits[members], temperature)
            if top_k or top_p < 1.0 or min_p:
                part = truncated_draft(part, top_k=top_k, top_p=top_p, min_p=min_p)
            scores[members] = part
        return scores

    def _kinds(
        self,
        rows: Rows,
        kind: Callable[[Population[Any]], tuple[Any, ...]],
        device: torch.device,
    ) -> list[tuple[tuple[Any, ...], Any]]:
        """Rows that are treated alike, as an index each: mostly one kind and all rows."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for r, (g, _) in enumerate(rows):
            found.setdefault(kind(self.running[g]), []).append(r)
        if len(found) == 1:
            return [(k, slice(None)) for k in found]
        return [(k, sent(np.array(members), device)) for k, members in found.items()]

    def _verify(
        self,
        rows: Rows,
        block: Block,
        logits: torch.Tensor,
        errors: dict[int, Exception],
    ) -> torch.Tensor:
        """Add log p of the drafted tokens to the block; return log p `[R, V]` after the last."""
        logits = self._biased(rows, self.over_vocabulary(logits))
        n_rows, width = logits.shape[0], logits.shape[1] - 1
        device = logits.device
        at = torch.from_numpy(block.count).to(device)
        log_p_last = torch.empty(n_rows, logits.shape[-1], device=device)
        chosen = torch.zeros(n_rows, width, device=device)
        drafted = torch.from_numpy(block.tokens[:, :width]).to(device)
        for members, scores, log_z in self.target_scores(rows, logits):
            taken = scores[:, :width].gather(-1, drafted[members].unsqueeze(-1))
            chosen[members] = (taken - log_z[:, :width]).squeeze(-1)
            which = torch.arange(len(scores), device=device)
            last = at[members]
            log_p_last[members] = scores[which, last] - log_z[which, last]
        counts = torch.arange(width, device=device) < at.unsqueeze(-1)
        # Beyond the tokens that count the logits mean nothing and may be NaN.
        chosen = torch.where(counts, chosen, torch.zeros_like(chosen))
        block.token_log_p[:, :width] = chosen.double().cpu().numpy()
        log_p = block.token_log_p.sum(axis=1)
        self.report_nan(rows, np.isnan(log_p), self.target, errors)
        block.log_p += log_p
        block.drafted = block.count.copy()
        block.log_p_drafted, block.log_q_drafted = block.log_p.copy(), block.log_q.copy()
        return log_p_last

    def target_scores(
        self, rows: Rows, logits: torch.Tensor
    ) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
        """The transformed target of logits `[R, ..., V]`: for each kind of rows their index, and
        scores and normaliser as of `sampling.target_scores`.
        """
        by = self._kinds(rows, lambda p: (p.options.temperature, *p.target_cut), logits.device)
        for kind, members in by:
            temperature, top_k, top_p, min_p = kind
            scores, log_z = target_scores(
                logits[members], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
            )
            yield members, scores, log_z

    def report_nan(
        self,
        rows: Rows,
        broken: np.ndarray,
        model: LanguageModel,
        errors: dict[int, Exception],
    ) -> None:
        """Note an error for the prompts of rows, bool `[R]`, whose logits were NaN."""
        for r in np.flatnonzero(broken):
            errors[rows[r][0]] = ModelError(
                f"model {model.name!r} gave logits that are NaN; try another dtype "
                "(bfloat16 or float32)"
            )

    def _take(
        self,
        rows: Rows,
        block: Block,
        active: np.ndarray,
        scores: torch.Tensor,
        mask: torch.Tensor | None,
        uniforms: np.ndarray,
        errors: dict[int, Exception],
        *,
        draft: bool,
    ) -> None:
        """Draw one token for every active row from `exp(scores) · mask` and append it."""
        drawn = self.draw(rows, active, scores, mask, uniforms, errors, draft=draft)
        died = active & ~np.isfinite(drawn.log_z)
        block.dead |= died
        with self.phases.timed("mask"):
            for r in np.flatnonzero(active & ~died).tolist():
                block.token_log_q[r, block.count[r]] = drawn.log_q[r]
                block.log_q[r] += drawn.log_q[r]
                if not draft:
                    block.token_log_p[r, block.count[r]] = drawn.log_p[r]
                    block.log_p[r] += drawn.log_p[r]
                self.book(rows, block, r, int(drawn.token[r]), errors)

    def book(
        self, rows: Rows, block: Block, r: int, token: int, errors: dict[int, Exception]
    ) -> None:
        """Append a token to row r of the block, and to its text and constraint."""
        g, s = rows[r]
        population = self.running[g]
        block.tokens[r, block.count[r]] = token
        block.count[r] += 1
        if token in self._eos_ids:
            block.ended[r] = True
            return
        block.ended[r] = population.ends(s, token)
        population.append(s, token)
        try:
            viable = not population.states or population.states[s].advance(token)
        except Exception as error:
            errors[g], viable = named(error, population), False
        block.dead[r] |= not viable

    def draw(
        self,
        rows: Rows,
        active: np.ndarray,
        scores: torch.Tensor,
        mask: torch.Tensor | None,
        uniforms: np.ndarray,
        errors: dict[int, Exception],
        *,
        draft: bool,
    ) -> Drawn:
        """Draw one token for every active row from `exp(scores) · mask`, by rejection where the
        mask is not the whole constraint; of a target from `exp(α · scores) · mask`.
        """
        running = self.running
        phase = "draft" if draft else "verify"
        with self.phases.timed(phase):
            if mask is not None:
                mask = mask.to(scores.device)
            log_p = scores
            powers = np.array([running[g].options.power for g, _ in rows])
            if not draft and np.any(powers != 1.0):
                # 0 · (−inf) does not occur: α is at least 0.001
                alpha = torch.from_numpy(powers).to(scores.device, scores.dtype)
                scores = scores * alpha.unsqueeze(-1)
        ahead = False
        if not draft and any(p.scores.lookahead for p in running):
            with self.phases.timed("potentials"):
                live = [(r, running[g], s) for r, (g, s) in enumerate(rows) if active[r]]
                untilted = scores
                scores, failed = look_ahead(live, scores, mask)
                ahead = scores is not untilted
            errors.update({rows[r][0]: error for r, error in failed.items()})
        with self.phases.timed(phase):
            weights, log_scale = masked_weights(scores, mask)
            u = torch.from_numpy(uniforms)
            tokens, total = draw(weights, u)
            empty = total == 0
            if draft and mask is not None and bool(empty.any()):
                # The draft gives no mass to what the mask allows: propose from the mask alone.
                flat = scores.masked_fill(empty.unsqueeze(-1), 0.0)
                weights, log_scale = masked_weights(flat, mask)
                tokens, total = draw(weights, u)
        if mask is not None:
            with self.phases.timed("mask"):
                live = [(r, running[g], s) for r, (g, s) in enumerate(rows) if active[r]]
                raised = redraw(live, weights, mask, uniforms, tokens, total, draft=draft)
            for broken_row, error in raised.items():
                g, _ = rows[broken_row]
                errors[g] = named(error, running[g])
        with self.phases.timed(phase):
            tokens = tokens.clamp_(max=log_p.shape[-1] - 1)  # where there was none to draw
            taken = tokens.unsqueeze(-1)
            log_p_taken = log_p.gather(-1, taken).squeeze(-1).double().cpu().numpy()
            chosen = weights.gather(-1, taken).squeeze(-1).double().log() - total.log()
            log_q_taken = chosen.cpu().numpy()
            log_z = (log_scale + total.log()).cpu().numpy()
            if not (draft or ahead):
                # Where the target proposes for itself Z is 1, not 1 to within rounding.
                own = np.array([not running[g].states for g, _ in rows]) & (powers == 1.0)
                log_q_taken = np.where(own, log_p_taken, log_q_taken)
                log_z = np.where(own & np.isfinite(log_z), 0.0, log_z)
            token = tokens.cpu().numpy()
        model = self.draft if draft and self.draft else self.target
        self.report_nan(rows, active & np.isnan(log_z), model, errors)
        return Drawn(token, log_p_taken, log_q_taken, log_z)

    def _note_mask(
        self, rows: Rows, block: Block, active: np.ndarray, mask: torch.Tensor | None
    ) -> None:
        if mask is not None:
            of_row = mask.numpy()
            # Row by row: that counts 30 times as fast as a sum over an axis.
            allowed = np.array([np.count_nonzero(row) for row in of_row])
            accepting = np.asarray(of_row[:, sorted(self._eos_ids)].any(axis=1))
            self._note(rows, block, active, allowed, accepting)

    def note_bits(self, rows: Rows, block: Block, active: np.ndarray, bitmask: np.ndarray) -> None:
        """Note in the block how much choice masks leave, from bits as `bitmask` gives them."""
        allowed = _ONES[bitmask.view(np.uint8)].sum(axis=1, dtype=np.int64)
        accepting = np.asarray((bitmask & self._ends).any(axis=1))
        self._note(rows, block, active, allowed, accepting)

    def _note(
        self,
        rows: Rows,
        block: Block,
        active: np.ndarray,
        allowed: np.ndarray,
        accepting: np.ndarray,
    ) -> None:
        constrained = np.array([bool(self.running[g].states) for g, _ in rows])
        at = np.flatnonzero(constrained & active)
        block.allowed[at, block.count[at]] = allowed[at]
        block.accepting[at, block.count[at]] = accepting[at]

    def _mask(
        self, rows: Rows, active: np.ndarray, errors: dict[int, Exception]
    ) -> torch.Tensor | None:
        """Bool `[R, V]`: what each active row may draw; None if every row may draw anything."""
        bits = self.bitmask(rows, active, errors)
        return None if bits is None else unpack_bitmask(bits, len(self.vocabulary))

    def bitmask(
        self, rows: Rows, active: np.ndarray, errors: dict[int, Exception]
    ) -> np.ndarray | None:
        """The same as bits, int32 `[R, ceil(V / 32)]`.

        A constrained text at the length cap may only end: the target is conditioned on finishing.
        """
        constrained = [
            (r, self.running[g], g, s)
            for r, (g, s) in enumerate(rows)
            if active[r] and self.running[g].states
        ]
        if not constrained:
            return None
        bitmask = np.full((len(rows), len(self._ordinary)), -1, dtype=np.int32)
        by_constraint: dict[int, list[tuple[int, Population[Any], int, int]]] = {}
        for item in constrained:
            by_constraint.setdefault(id(item[1].request.constraint), []).append(item)
        for items in by_constraint.values():
            constraint = items[0][1].request.constraint
            assert constraint is not None
            states = [p.states[s] for _, p, _, s in items]
            bits = empty_bitmask(len(items), len(self.vocabulary))
            try:
                constraint.fill_masks(states, bits)
                accepting = np.array([state.accepting for state in states])
            except Exception as error:
                for r, population, g, _ in items:
                    errors[g] = named(error, population)
                    bitmask[r] = 0
                continue
            bits &= self._ordinary
            bits[[bool(p.length[s] >= p.options.max_tokens) for _, p, _, s in items]] = 0
            bits |= np.where(accepting[:, None], self._ends, np.int32(0))
            bitmask[[r for r, *_ in items]] = bits
        return bitmask

    def over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over exactly the target's ids; those of ids that are no tokens are −inf."""
        width = len(self.vocabulary)
        if logits.shape[-1] > width:
            logits = logits[..., :width]
        elif logits.shape[-1] < width:
            logits = torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=NEG_INF)
        if self._padding is not None:
            if logits.device not in self._padding_on:
                self._padding_on[logits.device] = self._padding.to(logits.device)
            logits = logits.masked_fill(self._padding_on[logits.device], NEG_INF)
        return logits

    def _biased(self, rows: Rows, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[R, ..., V]` with what the prompts' requests add to them.

        Of draft and target alike: the target's is what they ask for, the draft's makes it propose
        what is then wanted.
        """
        biased = {g for g, p in enumerate(self.running) if p.request.logit_bias}
        if not biased:
            return logits
        logits = logits.clone()
        for r, (g, _) in enumerate(rows):
            if g in biased:
                bias = self.running[g].request.logit_bias
                ids = torch.tensor(list(bias), device=logits.device)
                logits[r, ..., ids] += logits.new_tensor(list(bias.values()))
        return logits


def padded(rows: Sequence[np.ndarray], width: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens side by side, int64 `[R, L]` with L at least `width`, and how many each row has."""
    feed = np.zeros((len(rows), max(width, *map(len, rows))), dtype=np.int64)
    for r, tokens in enumerate(rows):
        feed[r, : len(tokens)] = tokens
    return torch.from_numpy(feed), torch.tensor([len(tokens) for tokens in rows])


def count_step(population: Population[Any], where: str) -> None:
    """Count a step by where its tokens were drawn."""
    steps = population.usage.steps_on
    steps[where] = steps.get(where, 0) + 1


def _bits(chosen: np.ndarray) -> np.ndarray:
    """int32 `[ceil(V / 32)]` from bool `[V]`."""
    padded = np.pad(chosen, (0, -len(chosen) % 32))
    return np.packbits(padded, bitorder="little").view(np.int32)


def named(error: Exception, population: Population[Any]) -> Exception:
    """An error of ours as it is; another one as that of the constraint that raised it."""
    if isinstance(error, GuidedSMCError):
        return error
    name = type(population.request.constraint).__name__
    wrapped = PotentialError(
        f"constraint {name!r} raised {type(error).__name__}: {error}", potential=name
    )
    wrapped.__cause__ = error
    return wrapped
