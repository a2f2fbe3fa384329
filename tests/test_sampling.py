"""Draws from weights over a vocabulary: their law, and that rounding hardly moves them."""

from __future__ import annotations

import numpy as np
import torch
from support import chi_square

from guided_smc.sampling import BLOCK, UNIFORMS, WIDTH, draw, masked_weights

VOCABULARY = 2 * WIDTH * BLOCK + 3 * BLOCK + 77  # a group, a block and a part that are not full


def some_scores(seed: int, *, spread: float = 4.0) -> torch.Tensor:
    """Log-probabilities as a model's: few likely tokens, and a long tail."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(1, VOCABULARY, generator=generator)


def drawn(scores: torch.Tensor, uniforms: np.ndarray, mask: torch.Tensor | None = None):
    weights, _ = masked_weights(scores.expand(len(uniforms), -1), mask)
    tokens, _ = draw(weights, torch.from_numpy(uniforms))
    return tokens.numpy()


def test_tokens_are_drawn_in_proportion_to_their_weights():
    scores = some_scores(0, spread=1.0)
    rng = np.random.default_rng(0)
    tokens = [drawn(scores, rng.random((1000, UNIFORMS))) for _ in range(100)]
    p = scores[0].double().softmax(0)
    found = torch.from_numpy(np.concatenate(tokens))
    assert chi_square(found, p) < 4
    assert chi_square(found // WIDTH, torch.nn.functional.pad(p, (0, 3)).view(-1, WIDTH).sum(1)) < 4


def test_what_has_no_weight_is_never_drawn_and_all_that_has_is_reached():
    allowed = [0, BLOCK - 1, BLOCK, WIDTH * BLOCK - 1, WIDTH * BLOCK, VOCABULARY - 1]
    mask = torch.zeros(1, VOCABULARY, dtype=torch.bool)
    mask[0, allowed] = True
    rng = np.random.default_rng(1)
    uniforms = rng.random((4000, UNIFORMS))
    ends = np.array([0.0, np.nextafter(1.0, 0.0)])
    uniforms[: 2**UNIFORMS] = np.stack(np.meshgrid(*[ends] * UNIFORMS), -1).reshape(-1, UNIFORMS)
    tokens = drawn(torch.zeros(1, VOCABULARY), uniforms, mask.expand(4000, -1))
    assert set(tokens) == set(allowed)


def test_rows_of_zero_or_nan_yield_some_token_and_a_total_that_says_so():
    weights = torch.zeros(2, -(-VOCABULARY // BLOCK) * BLOCK)
    weights[1] = torch.nan
    tokens, total = draw(weights, torch.full((2, UNIFORMS), 0.99, dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < weights.shape[1])).all()
    assert float(total[0]) == 0.0 and bool(total[1].isnan())


def test_logits_that_rounding_has_shifted_give_the_same_tokens():
    """As whoever shares a batch does: by some 1e-5. One draw in ten thousand may be another."""
    rng = np.random.default_rng(2)
    generator = torch.Generator().manual_seed(3)
    differ = total = unlikely = 0
    for seed in range(10):
        scores = some_scores(seed)
        noise = 1e-5 * torch.randn(1, VOCABULARY, generator=generator)
        uniforms = rng.random((2000, UNIFORMS))
        tokens = drawn(scores, uniforms)
        differ += int((tokens != drawn(scores + noise, uniforms)).sum())
        unlikely += int((scores[0].softmax(0).numpy()[tokens] < 1e-5).sum())
        total += len(tokens)
    assert unlikely > 100  # of which a single uniform would have made others
    assert differ <= 8 and total == 20_000
