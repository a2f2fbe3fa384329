"""Masked sampling and verification: what the references mean, and the kernels beside them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_cases import INF, bits, sampling_case, verifying_case
from support import chi_square

from guided_smc import kernels
from guided_smc.kernels.philox import STRIDE, exponentials, philox, words
from guided_smc.kernels.sampling import sample_masked_reference
from guided_smc.kernels.verification import verify_reference
from guided_smc.sampling import masked_weights, target_scores

ONE = torch.ones(1)
ZERO = torch.zeros(1, dtype=torch.int64)


def draws(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    temperature: float,
    seed: torch.Tensor,
    counter: torch.Tensor,
) -> torch.Tensor:
    n = max(len(seed), len(counter))
    row = None if mask is None else bits(mask.unsqueeze(0)).expand(n, -1)
    token, _, _ = kernels.sample_masked(
        scores.expand(n, -1),
        row,
        torch.full((n,), temperature),
        seed.expand(n).contiguous(),
        counter.expand(n).contiguous(),
    )
    return token


# -- random numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "word", "expected"),
    [
        (7, 0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (7, 0xFFFFFFFF, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (10, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (10, 0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_gives_the_words_that_its_authors_publish(rounds, word, expected):
    word = torch.tensor(word)
    assert [int(w) for w in philox((word,) * 4, (word,) * 2, rounds)] == expected


def test_a_word_depends_on_seed_counter_and_token_alone():
    seed, counter = torch.tensor([5, 5, 6]), torch.tensor([1, 2, 1])
    together = words(seed, counter, 3 * STRIDE + 7)
    assert torch.equal(together[1:2], words(seed[1:2], counter[1:2], 3 * STRIDE + 7))
    assert torch.equal(together[:, :10], words(seed, counter, 10))
    for a in range(3):
        assert float((together[a] == together[(a + 1) % 3]).float().mean()) < 0.01


def test_every_bit_of_seed_and_counter_counts():
    bit = torch.tensor([0] + [1 << i for i in range(63)] + [-(1 << 63)])
    none = torch.zeros_like(bit)
    found = torch.cat([words(bit, none, 3), words(none, bit, 3)[1:]])
    for column in found.T:
        assert len(column.unique()) == len(found)


@pytest.mark.parametrize("word", [0, 1, 2**20, 2**27 - 2**8, 2**27, 2**31, 2**32 - 2**20])
def test_exponentials_are_the_inverse_of_their_law_at_the_word(word):
    expected = -math.log1p(-(word + 0.5) / 2**32)
    assert float(exponentials(torch.tensor(word))) == pytest.approx(expected, rel=2e-6)


def test_the_largest_word_gives_a_finite_exponential():
    assert 16 < float(exponentials(torch.tensor(2**32 - 1))) < 23


# -- the law -----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["seed", "counter"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("masked", [False, True])
def test_tokens_have_the_law_of_the_masked_scores(by, temperature, masked):
    scores = torch.tensor([0.3, -1.0, 2.0, 1.0, -INF, 0.0, -2.5, 1.5])
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0]).bool() if masked else None
    many = torch.arange(40_000)
    seed, counter = (many, ZERO) if by == "seed" else (ZERO + 3, many)
    tokens = draws(scores, mask, temperature, seed, counter)
    allowed = scores if mask is None else scores.masked_fill(~mask, -INF)
    assert chi_square(tokens, (allowed / temperature).double().softmax(-1)) < 4


def test_tokens_that_share_a_call_of_philox_are_drawn_independently():
    width = 3 * STRIDE + 1
    mask = torch.zeros(width, dtype=torch.bool)
    mask[::STRIDE] = True
    tokens = draws(torch.zeros(width), mask, 1.0, torch.arange(2_000), ZERO)
    assert chi_square(tokens // STRIDE, torch.full((4,), 0.25)) < 4


def test_successive_draws_of_a_row_are_independent():
    scores = torch.tensor([0.0, 1.0, 0.5])
    tokens = draws(scores, None, 1.0, ZERO + 11, torch.arange(40_000))
    p = scores.double().softmax(-1)
    pairs = tokens[0::2] * 3 + tokens[1::2]
    assert chi_square(pairs, torch.outer(p, p).flatten()) < 4


def test_draws_of_neighbouring_seeds_are_independent():
    scores = torch.tensor([0.0, 1.0, 0.5])
    tokens = draws(scores, None, 1.0, torch.arange(40_000), ZERO)
    p = scores.double().softmax(-1)
    pairs = tokens[0::2] * 3 + tokens[1::2]
    assert chi_square(pairs, torch.outer(p, p).flatten()) < 4


# -- the reference -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_q_and_log_z_are_those_of_the_engine(temperature):
    scores, bitmask, _, seed, counter, _ = sampling_case(1, 5, 501)
    t = torch.full((5,), temperature)
    token, log_q, log_z = kernels.sample_masked(scores, bitmask, t, seed, counter)
    unpacked = np.unpackbits(bitmask.numpy().view(np.uint8), axis=-1, bitorder="little")
    mask = torch.from_numpy(unpacked[:, :501]).bool()
    scaled, log_all = target_scores(scores, temperature=temperature)
    weights, log_scale = masked_weights(scaled, mask)
    total = weights.double().sum(-1)
    chosen = weights.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
    assert torch.allclose(log_q, chosen.log() - total.log(), atol=1e-5)
    assert torch.allclose(log_z, log_scale + total.log() - log_all.squeeze(-1), atol=1e-5)


def test_temperature_0_takes_the_likeliest_token_that_is_allowed():
    scores = torch.tensor([[3.0, 2.0, 2.5, 1.0]])
    mask = bits(torch.tensor([[False, True, True, True]]))
    token, log_q, log_z = kernels.sample_masked(scores, mask, 0 * ONE, ZERO, ZERO)
    assert token.tolist() == [2]
    assert log_q.tolist() == [0.0]
    assert float(log_z) == pytest.approx(-0.5e5)


def test_temperature_0_splits_ties():
    tokens = draws(torch.tensor([1.0, 2.0, 2.0]), None, 0.0, torch.arange(4_000), ZERO)
    assert chi_square(tokens, torch.tensor([0.0, 0.5, 0.5])) < 4


def test_without_a_mask_log_z_is_exactly_0():
    scores, _, temperature, seed, counter, _ = sampling_case(2, 5, 3_001, masked=False)
    _, _, log_z = kernels.sample_masked(scores, None, temperature, seed, counter)
    assert log_z.tolist() == [0.0] * 5


def test_where_nothing_is_allowed_there_is_no_token_and_no_mass():
    scores = torch.tensor([[1.0, 2.0], [-INF, -INF], [-INF, 1.0]])
    mask = bits(torch.tensor([[False, False], [True, True], [True, False]]))
    token, log_q, log_z = kernels.sample_masked(
        scores, mask, ONE.expand(3), ZERO.expand(3), ZERO.expand(3)
    )
    assert token.tolist() == [-1] * 3
    assert log_q.tolist() == log_z.tolist() == [-INF] * 3


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_score_that_is_none_shows_in_log_z_even_if_its_token_is_not_allowed(bad, allowed):
    scores = torch.tensor([[1.0, 2.0, bad]])
    mask = bits(torch.tensor([[True, True, allowed]]))
    token, log_q, log_z = kernels.sample_masked(scores, mask, ONE, ZERO, ZERO)
    assert token.tolist() == [-1]
    assert torch.isnan(log_q).all() and torch.isnan(log_z).all()


def test_a_row_draws_the_same_whoever_stands_beside_it():
    scores, bitmask, temperature, seed, counter, active = sampling_case(3, 6, 700)
    together = kernels.sample_masked(scores, bitmask, temperature, seed, counter, active)
    for r in range(6):
        one = slice(r, r + 1)
        alone = kernels.sample_masked(
            scores[one], bitmask[one], temperature[one], seed[one], counter[one], active[one]
        )
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a.nan_to_num(7), b[one].nan_to_num(7))


@pytest.mark.parametrize("power", [1.0, 0.5, 2.0])
def test_the_bonus_token_and_what_it_weighs_are_those_of_the_engine(power):
    logits, tokens, count, bitmask, temperature, _, seed, counter, _ = verifying_case(4, 5, 3, 301)
    temperature = temperature.clamp(min=0.7)
    alpha = torch.full((5,), power, dtype=torch.float64)
    active = torch.ones(5, dtype=torch.bool)
    log_p, bonus, bonus_log_p, bonus_log_q, log_z = kernels.verify(
        logits, tokens, count, bitmask, temperature, alpha, seed, counter, active
    )
    unpacked = np.unpackbits(bitmask.numpy().view(np.uint8), axis=-1, bitorder="little")
    mask = torch.from_numpy(unpacked[:, :301]).bool()
    for r in range(5):
        scores, log_all = target_scores(logits[r], temperature=float(temperature[r]))
        target = scores - log_all
        last = int(count[r])
        for k in range(3):
            expected = float(target[k, tokens[r, k]]) if k < last else 0.0
            assert float(log_p[r, k]) == pytest.approx(expected, abs=1e-5)
        weights, log_scale = masked_weights(power * target[last : last + 1], mask[r : r + 1])
        total = float(log_scale + weights.double().sum().log())
        assert float(log_z[r]) == pytest.approx(total, abs=2e-5)
        taken = float(target[last, bonus[r]])
        assert mask[r, bonus[r]]
        assert float(bonus_log_p[r]) == pytest.approx(taken, abs=1e-5)
        assert float(bonus_log_q[r]) == pytest.approx(power * taken - total, abs=5e-5)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_bonus_tokens_have_the_law_of_the_masked_power_target(power):
    n = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    mask = torch.tensor([1, 1, 1, 0, 1]).bool()
    many = torch.arange(n)
    _, bonus, *_ = kernels.verify(
        logits.expand(n, 1, -1),
        torch.zeros(n, 0, dtype=torch.int64),
        torch.zeros(n, dtype=torch.int64),
        bits(mask.unsqueeze(0)).expand(n, -1),
        ONE.expand(n),
        torch.full((n,), power, dtype=torch.float64),
        many,
        torch.zeros_like(many),
        torch.ones(n, dtype=torch.bool),
    )
    p = (power * logits.double()).masked_fill(~mask, -INF).softmax(-1)
    assert chi_square(bonus, p) < 4


def test_a_target_that_proposes_for_itself_has_z_exactly_1():
    case = list(verifying_case(5, 5, 2, 2_049, masked=False))
    case[5] = torch.ones_like(case[5])
    _, bonus, bonus_log_p, bonus_log_q, log_z = kernels.verify(*case)
    assert log_z.tolist() == [0.0] * 5
    assert torch.equal(bonus_log_p, bonus_log_q)
    assert torch.equal(bonus >= 0, case[-1])


def test_a_target_that_is_minus_infinity_throughout_is_broken_and_not_out_of_the_language():
    _, bonus, *_, log_z = kernels.verify(
        torch.full((1, 1, 9), -INF),
        torch.zeros(1, 0, dtype=torch.int64),
        ZERO,
        None,
        ONE,
        ONE.double(),
        ZERO,
        ZERO,
        torch.tensor([True]),
    )
    assert bonus.tolist() == [-1]
    assert torch.isnan(log_z).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {0: torch.zeros(2, 9, dtype=torch.int64)},
            "scores must be float32 or bfloat16 or float16",
        ),
        ({1: torch.zeros(2, 0, dtype=torch.int32)}, "bitmask has 0 words of 32 bits for 9 tokens"),
        ({1: torch.zeros(3, 1, dtype=torch.int32)}, r"bitmask must be int32 \[2, any\] on cpu"),
        ({2: torch.ones(2, 1)}, r"temperature must be float32 \[2\] on cpu, got float32 \[2, 1\]"),
        ({3: torch.zeros(2)}, r"seed must be int64 \[2\] on cpu, got float32 \[2\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    case = list(sampling_case(6, 2, 9))
    for at, value in change.items():
        case[at] = value
    with pytest.raises(ValueError, match=message):
        kernels.sample_masked(*case)


# -- the kernels -------------------------------------------------------------------------------


def assert_same(got, expected, tolerance=1e-5):
    """Tokens equal; numbers equal to a tolerance, −inf and NaN included."""
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        if a.dtype.is_floating_point:
            assert torch.allclose(a, b, rtol=1e-6, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("seed", "rows", "width", "dtype", "masked"),
    [
        (0, 6, 1, torch.float32, True),
        (1, 6, 31, torch.float32, False),
        (2, 6, 1_023, torch.float16, True),
        (3, 6, 2_050, torch.bfloat16, False),
        (4, 6, 4_097, torch.float32, True),
        (5, 6, 9_001, torch.bfloat16, True),
        (6, 1, 49_152, torch.bfloat16, True),
    ],
)
def test_the_sampling_kernel_draws_what_the_reference_draws(
    interpreted, seed, rows, width, dtype, masked
):
    case = sampling_case(seed, rows, width, dtype, masked)
    assert_same(interpreted(kernels.sample_masked, *case), sample_masked_reference(*case))


def test_the_kernel_gives_the_same_bits_again(interpreted):
    case = sampling_case(7, 3, 5_000)
    first, again = (interpreted(kernels.sample_masked, *case) for _ in range(2))
    assert_same(again, first, tolerance=0.0)


@pytest.mark.parametrize(
    ("seed", "rows", "k", "width", "dtype", "masked"),
    [
        (0, 7, 0, 33, torch.float32, True),
        (1, 7, 3, 1_500, torch.float32, False),
        (2, 7, 2, 4_200, torch.bfloat16, True),
    ],
)
def test_the_verification_kernel_gives_what_the_reference_gives(
    interpreted, seed, rows, k, width, dtype, masked
):
    case = verifying_case(seed, rows, k, width, dtype, masked)
    assert_same(interpreted(kernels.verify, *case), verify_reference(*case))


def test_the_kernels_read_rows_that_do_not_lie_side_by_side(interpreted):
    logits = torch.randn(3, 4, 600)
    scores = logits[:, 2]
    _, bitmask, temperature, seed, counter, active = sampling_case(7, 3, 600)
    case = (scores, bitmask, temperature, seed, counter, active)
    assert_same(interpreted(kernels.sample_masked, *case), sample_masked_reference(*case))


def test_the_kernel_takes_no_rows(interpreted):
    case = sampling_case(8, 0, 40)
    assert [len(x) for x in interpreted(kernels.sample_masked, *case)] == [0, 0, 0]


# Few in the tests that always run: the reference draws the same tokens.
@pytest.mark.parametrize("n", [60, pytest.param(1_000, marks=pytest.mark.slow)])
def test_draws_of_the_kernel_have_the_law_of_the_masked_scores(interpreted, n):
    scores = torch.tensor([0.3, 0.0, 2.0, 1.0])
    mask = torch.tensor([1, 1, 0, 1]).bool()
    tokens, _, _ = interpreted(
        kernels.sample_masked,
        scores.expand(n, -1),
        bits(mask.unsqueeze(0)).expand(n, -1),
        ONE.expand(n),
        torch.arange(n),
        ZERO.expand(n),
    )
    assert chi_square(tokens, scores.double().masked_fill(~mask, -INF).softmax(-1)) < 4


@pytest.mark.slow
@pytest.mark.parametrize("width", [49_152, 128_256, 151_936, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampling_kernel_agrees_at_the_vocabularies_of_real_models(interpreted, width, dtype):
    case = sampling_case(9, 6, width, dtype)
    assert_same(interpreted(kernels.sample_masked, *case), sample_masked_reference(*case))


@pytest.mark.slow
@pytest.mark.parametrize("width", [49_152, 128_256, 151_936, 262_144])
def test_the_verification_kernel_agrees_at_the_vocabularies_of_real_models(interpreted, width):
    case = verifying_case(10, 3, 1, width, torch.bfloat16)
    assert_same(interpreted(kernels.verify, *case), verify_reference(*case))
