"""Random numbers that are a function of (seed, counter, token): the same on every device.

Philox-4x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): a keyed
permutation of 128-bit counters, with no state to carry. The key is the row's seed; the counter
holds the row's own count of draws and the token's id. So a row's draw does not depend on which rows
stand beside it, nor on how a kernel divides its work.

One call gives four words, for four tokens `STRIDE` apart: a kernel that loads four runs of `STRIDE`
tokens has a word for each, with no value moved between threads.
"""

from __future__ import annotations

import torch

ROUNDS = 7
"""Fewest that pass all of TestU01's batteries (Salmon et al., section 5.2)."""

STRIDE = 1024
"""Distance in tokens between those that share a call."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_SMALL = 2.0**-5  # below it `exponentials` are a series, since 1 − u would round away their digits


def philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...], rounds: int = ROUNDS
) -> tuple[torch.Tensor, ...]:
    """Four words for each counter.

    Args:
        counter: Four int64 tensors of 32-bit words, which broadcast together.
        key: Two of them.
        rounds: Of the permutation.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # Wraps around as uint64 would; only the high word has to be cleared of the sign.
        product_0 = c0 * _MULTIPLIERS[0]
        product_1 = c2 * _MULTIPLIERS[1]
        c0 = ((product_1 >> 32) & _LOW) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & _LOW) ^ c3 ^ k1
        c1 = product_1 & _LOW
        c3 = product_0 & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def words(seed: torch.Tensor, counter: torch.Tensor, width: int) -> torch.Tensor:
    """A random 32-bit word for each token, int64 `[R, width]`.

    Args:
        seed: int64 `[R]`.
        counter: int64 `[R]`, another for each draw of a row.
        width: Tokens.
    """
    blocks = -(-width // (4 * STRIDE))
    lanes = min(width, STRIDE)  # where this is less than STRIDE, only first words are wanted
    call = torch.arange(blocks * lanes, device=seed.device)
    seed, counter = seed.unsqueeze(-1), counter.unsqueeze(-1)
    four = philox(
        (call, counter & _LOW, (counter >> 32) & _LOW, torch.zeros_like(call)),
        (seed & _LOW, (seed >> 32) & _LOW),
    )
    n_rows = len(seed)
    apart = torch.stack([w.view(n_rows, blocks, lanes) for w in four], dim=2)
    return apart.view(n_rows, -1)[:, :width]


def exponentials(word: torch.Tensor) -> torch.Tensor:
    """Draws of the standard exponential law from 32-bit words, float32.

    Small ones decide a race, so they are made of small words, where floats are dense: down to
    2^-33. Half of the word's spacing keeps them above 0.
    """
    u = ((word.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return torch.where(u < _SMALL, series, -(1.0 - u).log())
