"""The kernels behind `sample_masked` and `verify`.

Two launches. The first has a program for each block of `4 · STRIDE` tokens of each position of each
row: enough programs to fill a card with a handful of rows, and each logit is read once. It leaves
six numbers a block: the largest logit and the sum of exponentials relative to it, of all and of
those allowed, and the winner of the race with its key. The second combines them, one program for
each position of each row. No program waits for another and nothing is added atomically, so the
result does not depend on the order in which they run.

Sums are float32 within a block and float64 across blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from guided_smc.kernels.dispatch import on_device_of
from guided_smc.kernels.philox import ROUNDS, STRIDE
from guided_smc.options import GREEDY_TEMPERATURE

# Four warps for four runs of 1024 tokens: eight tokens of each run to a thread, which in 16 bits
# are one load of 16 bytes.
_WARPS = 4

_RUN = tl.constexpr(STRIDE)
_PHILOX_ROUNDS = tl.constexpr(ROUNDS)
_LEAST_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)
_NEG_INF = tl.constexpr(float("-inf"))


def launch(
    logits: torch.Tensor,
    tokens: torch.Tensor | None,
    count: torch.Tensor | None,
    bitmask: torch.Tensor | None,
    temperature: torch.Tensor,
    power: torch.Tensor | None,
    seed: torch.Tensor,
    counter: torch.Tensor,
    active: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both launches. Arguments and results are those of `verify`, over `[R, K + 1, V]`.

    Without `count` K must be 0, and a row of −inf has nothing allowed instead of being broken.
    """
    n_rows, positions, width = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    n_blocks = triton.cdiv(width, 4 * STRIDE)
    real = torch.empty(5, n_rows, positions, n_blocks, dtype=torch.float32, device=logits.device)
    winner = torch.empty(n_rows, positions, n_blocks, dtype=torch.int32, device=logits.device)
    log_p = torch.empty(n_rows, positions - 1, dtype=torch.float64, device=logits.device)
    token = torch.empty(n_rows, dtype=torch.int64, device=logits.device)
    token_log_p = torch.empty(n_rows, dtype=torch.float64, device=logits.device)
    token_log_q = torch.empty_like(token_log_p)
    log_z = torch.empty_like(token_log_p)
    if n_rows == 0:
        return log_p, token, token_log_p, token_log_q, log_z
    temperature, seed, counter = temperature.contiguous(), seed.contiguous(), counter.contiguous()
    tokens, count, bitmask, power, active = (
        None if x is None else x.contiguous() for x in (tokens, count, bitmask, power, active)
    )
    with on_device_of(logits):
        _race_blocks[(n_blocks, positions, n_rows)](
            logits,
            logits.stride(0),
            logits.stride(1),
            width,
            count,
            bitmask,
            0 if bitmask is None else bitmask.shape[1],
            temperature,
            power,
            seed,
            counter,
            active,
            real,
            winner,
            real.stride(0),
            num_warps=_WARPS,
            enable_fp_fusion=True,  # said, since releases of Triton differ in what is the default
        )
        _combine_blocks[(positions, n_rows)](
            logits,
            logits.stride(0),
            logits.stride(1),
            tokens,
            count,
            temperature,
            power,
            active,
            real,
            winner,
            real.stride(0),
            n_blocks,
            log_p,
            token,
            token_log_p,
            token_log_q,
            log_z,
            BLOCKS=triton.next_power_of_2(n_blocks),
            num_warps=1,  # some tens of numbers
            enable_fp_fusion=True,
        )
    return log_p, token, token_log_p, token_log_q, log_z


# Sizes that change from call to call are not worth a compilation each.
@triton.jit(do_not_specialize=["plane"])
def _race_blocks(
    logits,
    row_stride,
    position_stride,
    width,
    count,
    bitmask,
    words_per_row,
    temperature,
    power,
    seed,
    counter,
    active,
    real,
    winner,
    plane,
):
    block = tl.program_id(0)
    position = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    if active is not None:
        if tl.load(active + row) == 0:
            return
    last = 0
    if count is not None:
        last = tl.load(count + row)
    if position > last:
        return

    inverse = _reciprocal(temperature, row)
    first = block * 4 * _RUN
    lane = tl.arange(0, _RUN)
    start = logits + row * row_stride + position * position_stride
    x0 = _load(start, first + lane, width)
    x1 = _load(start, first + _RUN + lane, width)
    x2 = _load(start, first + 2 * _RUN + lane, width)
    x3 = _load(start, first + 3 * _RUN + lane, width)
    offset = (row * tl.num_programs(1) + position) * tl.num_programs(0) + block
    at = real + offset
    top, total = _sum_exp(x0, x1, x2, x3, inverse)
    tl.store(at, top)
    tl.store(at + plane, total)
    if position < last:
        return

    sharpness = _sharpen(inverse, power, row)
    if bitmask is not None:
        allow = bitmask + row * words_per_row
        x0 = tl.where(_allowed(allow, first + lane, width), x0, _NEG_INF)
        x1 = tl.where(_allowed(allow, first + _RUN + lane, width), x1, _NEG_INF)
        x2 = tl.where(_allowed(allow, first + 2 * _RUN + lane, width), x2, _NEG_INF)
        x3 = tl.where(_allowed(allow, first + 3 * _RUN + lane, width), x3, _NEG_INF)
    if (bitmask is not None) or (power is not None):
        top, total = _sum_exp(x0, x1, x2, x3, sharpness)
    best = tl.full((), float("-inf"), tl.float32)
    best_token = first
    # Under a mask most blocks have nothing to race.
    if top != _NEG_INF:
        w0, w1, w2, w3 = _words(seed, counter, row, block * _RUN + lane)
        keys = (x0 - top) * sharpness - tl.log(_exponential(w0))
        run = tl.zeros([_RUN], dtype=tl.int32)
        keys, run = _better(keys, run, (x1 - top) * sharpness - tl.log(_exponential(w1)), 1)
        keys, run = _better(keys, run, (x2 - top) * sharpness - tl.log(_exponential(w2)), 2)
        keys, run = _better(keys, run, (x3 - top) * sharpness - tl.log(_exponential(w3)), 3)
        best = tl.max(keys, axis=0)
        best_token = first + tl.min(tl.where(keys == best, run * _RUN + lane, 4 * _RUN), axis=0)
    tl.store(at + 2 * plane, top)
    tl.store(at + 3 * plane, total)
    tl.store(at + 4 * plane, best)
    tl.store(winner + offset, best_token)


@triton.jit(do_not_specialize=["plane"])
def _combine_blocks(
    logits,
    row_stride,
    position_stride,
    tokens,
    count,
    temperature,
    power,
    active,
    real,
    winner,
    plane,
    n_blocks,
    log_p,
    bonus,
    bonus_log_p,
    bonus_log_q,
    log_z,
    BLOCKS: tl.constexpr,
):
    position = tl.program_id(0)
    width = tl.num_programs(0) - 1
    row = tl.program_id(1).to(tl.int64)
    is_active = True
    if active is not None:
        is_active = tl.load(active + row) != 0
    last = 0
    if count is not None:
        last = tl.load(count + row).to(tl.int32)
    if tokens is not None:
        if position < width:
            if (position >= last) | (is_active == 0):
                tl.store(log_p + row * width + position, 0.0)
    if is_active == 0:
        if position == 0:
            tl.store(bonus + row, -1)
            tl.store(bonus_log_p + row, 0.0)
            tl.store(bonus_log_q + row, 0.0)
            tl.store(log_z + row, 0.0)
        return
    if position > last:
        return

    inverse = _reciprocal(temperature, row)
    start = logits + row * row_stride + position * position_stride
    block = tl.arange(0, BLOCKS)
    there = block < n_blocks
    offset = (row * (width + 1) + position) * n_blocks + block
    at = real + offset
    tops = tl.load(at, mask=there, other=_NEG_INF)
    totals = tl.load(at + plane, mask=there, other=0.0)
    top = _finite(tl.max(tops, axis=0))
    log_sum = _log_sum(tops, totals, top, inverse)
    if position < last:
        if tokens is not None:
            chosen = tl.load(tokens + row * width + position)
            logit = tl.load(start + chosen).to(tl.float32)
            taken = ((logit - top) * inverse).to(tl.float64) - log_sum
            tl.store(log_p + row * width + position, taken)
        return

    sharpness = _sharpen(inverse, power, row)
    allowed_tops = tl.load(at + 2 * plane, mask=there, other=_NEG_INF)
    allowed_totals = tl.load(at + 3 * plane, mask=there, other=0.0)
    allowed_top = _finite(tl.max(allowed_tops, axis=0))
    mass = _log_sum(allowed_tops, allowed_totals, allowed_top, sharpness)
    keys = tl.load(at + 4 * plane, mask=there, other=_NEG_INF).to(tl.float64)
    keys += ((allowed_tops - allowed_top) * sharpness).to(tl.float64)
    best = tl.max(keys, axis=0)
    candidates = tl.load(winner + offset, mask=there, other=2147483647)
    token = tl.min(tl.where(keys == best, candidates, 2147483647), axis=0)

    whole = log_sum
    if power is not None:
        whole = tl.load(power + row) * log_sum
    z = ((allowed_top - top) * sharpness).to(tl.float64) + mass - whole
    if count is None:
        # Nothing to draw from is an answer to a draft; a target that says nothing is broken.
        if log_sum == _NEG_INF:
            z = log_sum
    if (mass == _NEG_INF) & (z == z):
        z = mass
    drawn = (z == z) & (mass != _NEG_INF)
    logit = tl.load(start + token, mask=drawn, other=0.0).to(tl.float32)
    of_p = ((logit - top) * inverse).to(tl.float64) - log_sum
    of_q = ((logit - allowed_top) * sharpness).to(tl.float64) - mass
    tl.store(bonus + row, tl.where(drawn, token, -1).to(tl.int64))
    tl.store(bonus_log_p + row, tl.where(drawn, of_p, z))
    tl.store(bonus_log_q + row, tl.where(drawn, of_q, z))
    tl.store(log_z + row, z)


@triton.jit
def _load(start, at, width):
    return tl.load(start + at, mask=at < width, other=_NEG_INF).to(tl.float32)


@triton.jit
def _allowed(start, at, width):
    return ((tl.load(start + at // 32, mask=at < width, other=0) >> (at % 32)) & 1) != 0


@triton.jit
def _reciprocal(temperature, row):
    return tl.div_rn(1.0, tl.maximum(tl.load(temperature + row), _LEAST_TEMPERATURE))


@triton.jit
def _sharpen(inverse, power, row):
    sharpness = inverse
    if power is not None:
        sharpness = inverse * tl.load(power + row).to(tl.float32)
    return sharpness


@triton.jit
def _finite(top):
    # −inf − (−inf) would be NaN where there is merely nothing.
    return tl.where(top == _NEG_INF, 0.0, top)


@triton.jit
def _sum_exp(x0, x1, x2, x3, factor):
    top = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), axis=0)
    base = _finite(top)
    low = tl.exp((x0 - base) * factor) + tl.exp((x1 - base) * factor)
    high = tl.exp((x2 - base) * factor) + tl.exp((x3 - base) * factor)
    return top, tl.sum(low + high, axis=0)


@triton.jit
def _log_sum(tops, totals, top, factor):
    parts = totals.to(tl.float64) * tl.exp((tops - top) * factor).to(tl.float64)
    return tl.log(tl.sum(parts, axis=0))


@triton.jit
def _words(seed, counter, row, call):
    draw = tl.load(counter + row)
    low = (draw & 0xFFFFFFFF).to(tl.uint32)
    high = ((draw >> 32) & 0xFFFFFFFF).to(tl.uint32)
    nothing = call * 0
    return tl.philox(
        tl.load(seed + row), call, low + nothing, high + nothing, nothing, _PHILOX_ROUNDS
    )


@triton.jit
def _exponential(word):
    # As `philox.exponentials`.
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.where(u < 0.03125, series, -tl.log(1.0 - u))


@triton.jit
def _better(keys, run, others, number):
    # The earlier run wins ties, as the lower token does within a run.
    ahead = others > keys
    return tl.where(ahead, others, keys), tl.where(ahead, number, run)
