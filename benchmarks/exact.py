"""The exact posterior of a small language on a real model, by enumeration.

The same text has many tokenisations, and the constraint admits all of them: so token sequences are
enumerated, along the constraint's own masks, and their probabilities summed by text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import guided_smc
from guided_smc.grammars import from_output_type
from guided_smc.models.loading import LoadedModel
from guided_smc.potentials import CompiledConstraint, ConstraintState


@dataclass(frozen=True)
class Exact:
    """`π` over texts, and what normalises it."""

    log_evidence: float
    probabilities: dict[str, float]
    missed: float
    """Bound on the share of `π` in token sequences that were too improbable to follow."""


@dataclass(frozen=True)
class _Prefix:
    tokens: tuple[int, ...]
    state: ConstraintState
    log_p: float


@torch.no_grad()
def enumerate_posterior(
    lm: guided_smc.LM,
    peer: LoadedModel,
    prompt: list[int],
    schema: dict[str, Any],
    *,
    max_tokens: int,
    log_cut: float = -32.0,
) -> Exact:
    """Every token sequence of the language, breadth first, with a plain forward pass for each.

    Args:
        lm: Knows the vocabulary.
        peer: The same model, plain.
        prompt: Token ids.
        schema: The language: small, and finite within `max_tokens`.
        max_tokens: Most tokens before the end token.
        log_cut: Sequences below this log-probability are not followed.
    """
    vocabulary = lm.model.vocabulary
    constraint = from_output_type(schema)
    assert constraint is not None
    grammar = constraint.compile(vocabulary)
    never = {*vocabulary.eos_ids, *vocabulary.special_ids}
    ends = list(vocabulary.eos_ids)
    mass: dict[str, float] = {}
    missed = 0.0
    level = [_Prefix((), grammar.start(), 0.0)]
    for depth in range(max_tokens + 1):
        if not level:
            break
        ids = torch.tensor([[*prompt, *prefix.tokens] for prefix in level])
        logits = peer.model(ids, logits_to_keep=1).logits[:, -1]
        log_p = logits.double().log_softmax(-1)  # [F, V]
        allowed = _allowed(grammar, [prefix.state for prefix in level], log_p.shape[1])
        longer = []
        for prefix, row, tokens in zip(level, log_p, allowed, strict=True):
            if prefix.state.accepting:
                text = vocabulary.decode(prefix.tokens)
                ended = prefix.log_p + float(row[ends].logsumexp(0))
                mass[text] = mass.get(text, 0.0) + math.exp(ended)
            if depth == max_tokens:
                continue
            for token in tokens - never:
                total = prefix.log_p + float(row[token])
                if total < log_cut:
                    missed += math.exp(total)
                    continue
                state = prefix.state.fork()
                state.advance(token)
                longer.append(_Prefix((*prefix.tokens, token), state, total))
        level = longer
    evidence = sum(mass.values())
    return Exact(
        math.log(evidence),
        {text: each / evidence for text, each in mass.items()},
        missed / evidence,
    )


def _allowed(
    grammar: CompiledConstraint, states: list[ConstraintState], width: int
) -> list[set[int]]:
    bitmask = torch.zeros((len(states), (width + 31) // 32), dtype=torch.int32)
    grammar.fill_masks(states, bitmask)
    bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]
