"""Weighing and resampling on a device: the same as the population's, and the kernel beside it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import INF, weighing_case
from support import VOCABULARY, request

from guided_smc import kernels
from guided_smc.kernels.weighing import keep_in_place, weigh_resample_reference
from guided_smc.models.table import TableModel
from guided_smc.population import Population, Status
from guided_smc.resampling import keep_in_place as keep_in_place_of_one

SCHEMES = ["systematic", "stratified"]


class Given:
    """A generator whose next numbers are known."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def random(self, n: int) -> np.ndarray:
        return self.numbers[:n]


def population(case, group: int) -> Population:
    """A group of the case, after its increments, as the engine would hold it."""
    log_w, increment, held, threshold, uniform, scheme = case
    model = TableModel(VOCABULARY, lambda _: [1 / 6] * 6)
    p = Population(
        request(
            model,
            (0,),
            n_particles=log_w.shape[1],
            ess_threshold=float(threshold[group]),
            resampling=scheme,
        ),
        VOCABULARY,
    )
    p.begin()
    p.log_w = (log_w + increment)[group].numpy()
    p.status[~np.isfinite(p.log_w)] = Status.DEAD
    p.rng = Given(uniform[group].numpy())
    if held is not None:
        p._held_back = lambda: held[group].numpy()
    return p


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 64])
def test_weights_ancestors_ess_and_evidence_are_those_of_a_population(n, held, scheme):
    case = weighing_case(n, 8, n, held, scheme)
    log_w, ancestors, ess, evidence, resampled = kernels.weigh_resample(*case)
    for group in range(8):
        p = population(case, group)
        before = float(p.log_evidence[0])
        step = p.close_step(block_size=0, live=n)
        assert ancestors[group].tolist() == list(step.ancestors)
        assert bool(resampled[group]) == step.resampled
        assert log_w[group].numpy() == pytest.approx(p.log_w, rel=1e-12)
        assert float(ess[group]) == pytest.approx(step.ess, rel=1e-9)
        added = float(p.log_evidence[0]) - before
        assert float(evidence[group]) == pytest.approx(added, rel=1e-12)
    assert bool(resampled.any()) == (n > 1)


def test_a_group_of_weight_0_is_left_as_it_is():
    log_w = torch.full((1, 5), -INF, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    new, ancestors, ess, evidence, resampled = kernels.weigh_resample(
        log_w, torch.zeros_like(log_w), None, one, torch.rand_like(log_w), "systematic"
    )
    assert torch.equal(new, log_w)
    assert ancestors.tolist() == [[0, 1, 2, 3, 4]]
    assert (float(ess), float(evidence), bool(resampled)) == (0.0, 0.0, False)


def test_the_evidence_of_resampled_weights_and_what_they_keep_is_what_it_was():
    case = weighing_case(3, 6, 9, True, "systematic")
    log_w, _, _, evidence, resampled = kernels.weigh_resample(*case)
    assert resampled.sum() > 2
    # Unbiased only on average: by systematic resampling of equal `held`, exactly.
    case = (*case[:2], torch.zeros_like(case[0]), *case[3:])
    log_w, _, _, evidence, resampled = kernels.weigh_resample(*case)
    after = evidence + log_w.logsumexp(-1) - math.log(9)
    before = (case[0] + case[1]).logsumexp(-1) - math.log(9)
    assert torch.allclose(after[resampled], before[resampled], rtol=1e-14)


@given(st.lists(st.integers(0, 9), min_size=10, max_size=10))
def test_survivors_keep_their_slots_as_in_a_population(ancestors):
    placed = keep_in_place(torch.tensor([ancestors, sorted(ancestors)]))
    for row, given_ in zip(placed.tolist(), (ancestors, sorted(ancestors)), strict=True):
        assert row == keep_in_place_of_one(np.array(given_)).tolist()


def test_an_unknown_scheme_is_named():
    case = weighing_case(0, 1, 2, False, "residual")
    with pytest.raises(ValueError, match="systematic, stratified, got 'residual'"):
        kernels.weigh_resample(*case)


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        if a.dtype.is_floating_point:
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("held", [False, True])
def test_the_kernel_gives_what_the_reference_gives_for_any_number_of_particles(
    interpreted, held, scheme
):
    resampled = 0
    for n in (1, 2, 3, 8, 13, 33, 64, 128):
        case = weighing_case(n, 4, n, held, scheme)
        got = interpreted(kernels.weigh_resample, *case)
        assert_same(got, weigh_resample_reference(*case))
        resampled += int(got[-1].sum())
    assert resampled > 8


def test_more_particles_than_the_kernel_holds_are_resampled_by_the_reference(interpreted):
    case = weighing_case(1, 2, 300, True, "stratified")
    assert_same(interpreted(kernels.weigh_resample, *case), weigh_resample_reference(*case))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n", range(1, 65))
def test_the_kernel_agrees_with_the_reference_from_1_to_64_particles(interpreted, n, scheme):
    case = weighing_case(100 + n, 9, n, bool(n % 2), scheme)
    assert_same(interpreted(kernels.weigh_resample, *case), weigh_resample_reference(*case))
