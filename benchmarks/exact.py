"""The exact posterior of a small language, by enumeration, and what token masking makes of it.

The same text has many tokenisations, and the constraint admits all of them: so token sequences are
enumerated, along the constraint's own masks, and their probabilities summed by text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import guided_smc
from guided_smc.grammars import from_output_type
from guided_smc.models.loading import LoadedModel
from guided_smc.potentials import CompiledConstraint, Constraint, ConstraintState
from guided_smc.vocabulary import Vocabulary

NextTokens = Callable[[Sequence[Sequence[int]]], torch.Tensor]
"""Log-probabilities `[F, V]` of the token after each of F texts, given without the prompt."""


@dataclass(frozen=True)
class Exact:
    """`π` over texts, what normalises it, and what masking draws instead.

    Token masking renormalises the model over the mask at each step, as if what comes later did not
    matter: it draws from `Π p(x_t)·m(x_t) / Z_t`. That is given for texts that end in time.
    """

    log_evidence: float
    probabilities: dict[str, float]
    missed: float
    """Bound on the share of `π` in token sequences that were too improbable to follow."""
    masked: dict[str, float]
    masked_missed: float
    """Share of masking's draws that were not followed, or did not end in time."""


@dataclass(frozen=True)
class _Prefix:
    tokens: tuple[int, ...]
    state: ConstraintState
    log_p: float
    log_masked: float


def enumerate_posterior(
    lm: guided_smc.LM,
    peer: LoadedModel,
    prompt: list[int],
    schema: dict[str, Any],
    *,
    max_tokens: int,
    log_cut: float = -32.0,
) -> Exact:
    """That of a real model and a schema, with a plain forward pass for each token sequence.

    Args:
        lm: Knows the vocabulary.
        peer: The same model, plain.
        prompt: Token ids.
        schema: The language: small, and finite within `max_tokens`.
        max_tokens: Most tokens before the end token.
        log_cut: Sequences whose log-probability is no higher are not followed.
    """

    @torch.no_grad()
    def next_tokens(texts: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *text] for text in texts])
        return peer.model(ids, logits_to_keep=1).logits[:, -1].double().log_softmax(-1)

    constraint = from_output_type(schema)
    assert constraint is not None
    vocabulary = lm.model.vocabulary
    return enumerate_language(
        vocabulary, next_tokens, constraint, max_tokens=max_tokens, log_cut=log_cut
    )


def enumerate_language(
    vocabulary: Vocabulary,
    next_tokens: NextTokens,
    constraint: Constraint,
    *,
    max_tokens: int,
    log_cut: float = -math.inf,
) -> Exact:
    """Every token sequence of a language, breadth first.

    Args:
        vocabulary: Of the model.
        next_tokens: The model. All texts that it is asked about at once have the same length.
        constraint: The language; all that it says is in its masks.
        max_tokens: Most tokens before the end token.
        log_cut: Sequences whose log-probability is no higher are not followed.
    """
    grammar = constraint.compile(vocabulary)
    never = {*vocabulary.eos_ids, *vocabulary.special_ids}
    ends = list(vocabulary.eos_ids)
    mass: dict[str, float] = {}
    masked: dict[str, float] = {}
    missed = 0.0
    level = [_Prefix((), grammar.start(), 0.0, 0.0)]
    for depth in range(max_tokens + 1):
        if not level:
            break
        log_p = next_tokens([prefix.tokens for prefix in level])  # [F, V]
        allowed = _allowed(grammar, [prefix.state for prefix in level], log_p.shape[1])
        longer = []
        for prefix, row, tokens in zip(level, log_p, allowed, strict=True):
            tokens = sorted(tokens - never)
            accepting = prefix.state.accepting
            log_z = float(row[tokens + ends * accepting].logsumexp(0))
            if accepting:
                text = vocabulary.decode(prefix.tokens)
                ended = float(row[ends].logsumexp(0))
                mass[text] = mass.get(text, 0.0) + math.exp(prefix.log_p + ended)
                share = math.exp(prefix.log_masked + ended - log_z)
                masked[text] = masked.get(text, 0.0) + share
            if depth == max_tokens:
                continue
            for token in tokens:
                log_next = float(row[token])
                total = prefix.log_p + log_next
                if total <= log_cut:
                    missed += math.exp(total)
                    continue
                state = prefix.state.fork()
                state.advance(token)
                ahead = prefix.log_masked + log_next - log_z
                longer.append(_Prefix((*prefix.tokens, token), state, total, ahead))
        level = longer
    evidence, in_time = sum(mass.values()), sum(masked.values())
    return Exact(
        math.log(evidence),
        {text: each / evidence for text, each in mass.items()},
        missed / evidence,
        {text: each / in_time for text, each in masked.items()},
        1.0 - in_time,
    )


def _allowed(
    grammar: CompiledConstraint, states: list[ConstraintState], width: int
) -> list[set[int]]:
    bitmask = np.zeros((len(states), (width + 31) // 32), dtype=np.int32)
    grammar.fill_masks(states, bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def total_variation(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
    """`½ Σ |p − q|`, over the last axis's texts."""
    return float(np.abs(p - q).sum() / 2)


def divergence(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
    """`KL(p ‖ q)` in nats; `q` is positive."""
    seen = p > 0
    return float((p[seen] * np.log(p[seen] / q[seen])).sum())
