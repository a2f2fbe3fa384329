"""Proposals that look one token ahead: what the potentials would say of the likeliest next tokens.

The proposal of the token that the target draws becomes `q̃(v) ∝ p(v)^α · m(v) · g(v)`, with
`g(v) = ψ(x v) / ψ(x)` for the few likeliest tokens v, and 1 for all others. Where g knows every
token, the weight no longer depends on the token drawn: it is the locally optimal proposal, which
sees what comes of a token before it is drawn and not only when others have been resampled away. It
costs scores and no pass of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from guided_smc.population import Population


def look_ahead(
    rows: Sequence[tuple[int, Population[Any], int]],
    scores: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[int, Exception]]:
    """Scores with `log g` added.

    Args:
        rows: Row, population and slot of each that is to be drawn.
        scores: float32 `[R, V]`, `α · log p`.
        mask: bool `[R, V]`, or None for no mask.

    Returns:
        `[R, V]`: the same tensor where nothing looks ahead. And what a potential raised, by row.
    """
    errors: dict[int, Exception] = {}
    by_population: dict[int, list[tuple[int, Population[Any], int]]] = {}
    for row in rows:
        if row[1].scores.lookahead:
            by_population.setdefault(id(row[1]), []).append(row)
    if not by_population:
        return scores, errors
    scores = scores.clone()
    for items in by_population.values():
        population = items[0][1]
        where = torch.tensor([r for r, _, _ in items], device=scores.device)
        part = scores[where]
        if mask is not None:
            part = part.masked_fill(~mask[where], -torch.inf)
        top = part.topk(min(population.scores.lookahead, part.shape[-1]), dim=-1)
        likely = [
            (slot, [t for t, s in zip(tokens, logs, strict=True) if s > -torch.inf])
            for (_, _, slot), tokens, logs in zip(
                items, top.indices.tolist(), top.values.tolist(), strict=True
            )
        ]
        try:
            gained = population.look_ahead(likely)
        except Exception as error:
            errors.update({r: error for r, _, _ in items})
            continue
        for (r, _, _), (_, tokens), gain in zip(items, likely, gained, strict=True):
            scores[r, tokens] += torch.from_numpy(gain).to(scores)
    return scores, errors
