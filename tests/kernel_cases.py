"""Arguments for the kernels, random but for their seeds, with the odd rows that must not break."""

from __future__ import annotations

import numpy as np
import torch

INF = float("inf")


def bits(mask: torch.Tensor) -> torch.Tensor:
    """int32 `[R, W]` from bool `[R, V]`."""
    packed = np.packbits(mask.numpy(), axis=-1, bitorder="little")
    padded = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
    return torch.from_numpy(np.ascontiguousarray(padded).view(np.int32))


def sampling_case(seed: int, rows: int, width: int, dtype=torch.float32, masked: bool = True):
    """scores, bitmask, temperature, seed, counter, active for `sample_masked`."""
    g = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(rows, width, generator=g)
    scores[torch.rand(rows, width, generator=g) < 0.1] = -INF
    mask = torch.rand(rows, width, generator=g) < torch.rand(rows, 1, generator=g)
    temperature = torch.tensor([1.0, 0.7, 0.0, 2.0])[torch.randint(4, (rows,), generator=g)]
    if rows > 5:
        scores[1] = -INF
        scores[2, width // 2] = torch.nan
        scores[3, width // 3] = INF
        mask[4] = False
        mask[5] = False
        mask[5, width - 1] = True
        scores[5, width - 1] = -80.0
    return (
        scores.to(dtype),
        bits(mask) if masked else None,
        temperature,
        torch.randint(2**62, (rows,), generator=g),
        torch.randint(2**40, (rows,), generator=g),
        torch.rand(rows, generator=g) < 0.9,
    )


def verifying_case(
    seed: int, rows: int, k: int, width: int, dtype=torch.float32, masked: bool = True
):
    """All arguments of `verify`."""
    g = torch.Generator().manual_seed(seed)
    one = sampling_case(seed, rows, width, dtype, masked)
    logits = (4 * torch.randn(rows, k + 1, width, generator=g)).to(dtype)
    count = torch.randint(k + 1, (rows,), generator=g)
    where = torch.arange(rows)
    logits[where, count] = one[0]
    for row, c in enumerate(count.tolist()):
        logits[row, c + 1 :] = torch.nan  # behind the bonus token nothing is read
    if rows > 6 and k:
        count[6] = k
        logits[6] = torch.randn(k + 1, width, generator=g)
        logits[6, 0, 0] = torch.nan
    power = torch.tensor([1.0, 0.5, 2.0]).double()[torch.randint(3, (rows,), generator=g)]
    tokens = torch.randint(width, (rows, k), generator=g)
    _, bitmask, temperature, seeds, counter, active = one
    return logits, tokens, count, bitmask, temperature, power, seeds, counter, active


def weighing_case(seed: int, groups: int, n: int, held: bool, scheme: str):
    """All arguments of `weigh_resample`; the first group is dead, the second nearly."""
    g = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(groups, n, generator=g, dtype=torch.float64)

    log_w = 2 * normal() - 1e5
    increment = normal()
    increment[torch.rand(groups, n, generator=g) < 0.2] = -INF
    log_w[0] = -INF
    if groups > 1:
        increment[1] = -INF
        increment[1, n // 2] = 0.5
    threshold = torch.rand(groups, generator=g, dtype=torch.float64)
    threshold[1::2] = 1.0
    uniform = torch.rand(groups, n, generator=g, dtype=torch.float64)
    if groups > 3:
        # The last point rounds to the very end of the weights, where the dead are.
        uniform[3] = 1.0 - 2.0**-53
        increment[3] = torch.where(torch.arange(n) == 0, 9.0, increment[3])
        increment[3, n // 2 + 1 :] = -INF
        log_w[3, 0] = log_w[3].amax()
    return log_w, increment, normal() if held else None, threshold, uniform, scheme


def automaton_case(seed: int, rows: int, width: int):
    """All arguments of `automaton_masks` and of `automaton_step`: any tables at all."""
    g = torch.Generator().manual_seed(seed)
    n_states, n_classes, n_automata = 9, 13, 3

    def draw(high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=g, dtype=torch.int32)

    classes = draw(n_classes, n_automata, width)
    following, reach = draw(n_states, n_states, n_classes), draw(6, n_states, n_classes) - 1
    reach[torch.rand(reach.shape, generator=g) < 0.3] = torch.iinfo(torch.int32).max
    owner, state, left = draw(n_automata, n_states), draw(n_states, rows), draw(6, rows)
    token = draw(width + 1, rows).long() - 1
    return (state, left, classes, reach, owner), (state, token, classes, following, owner)


def pages_case(rows: int, width: int, n_pages: int):
    """All arguments of `resample_pages`, for rows with nothing yet."""
    g = torch.Generator().manual_seed(0)
    return (
        torch.full((rows, width), -1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(n_pages, dtype=torch.int32),
        torch.randint(99, (rows, 7), generator=g),
        torch.randint(-1, rows, (rows,), generator=g),
        torch.randint(16 * width, (rows,), generator=g),
        16,
    )


def moving_case(seed: int, rows: int, heads: int, columns: int, size: int, dtype=torch.float32):
    """data, source, columns for `move_rows`: survivors stay, and only they are sources."""
    rng = np.random.default_rng(seed)
    survivors = np.flatnonzero(rng.random(rows) < 0.6) if rows > 1 else np.zeros(1, dtype=np.int64)
    survivors = survivors if len(survivors) else np.zeros(1, dtype=np.int64)
    source = rng.choice(survivors, rows)
    source[survivors] = survivors
    g = torch.Generator().manual_seed(seed)
    data = torch.randn(rows + 2, heads, columns + 3, size, generator=g).to(dtype)
    return data, torch.from_numpy(source), columns
