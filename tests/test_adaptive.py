"""Block sizes that adapt: what is estimated, what is chosen by it, and that nothing else enters."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import VOCABULARY, FollowingTable, request, results, untimed

from guided_smc import LM, CostModel, OptionError
from guided_smc.adaptive import (
    MOST_DRAFTED,
    PRIOR_VARIANCE,
    DraftEstimate,
    Spread,
    best_block_size,
    expected_tokens,
    mean_ess,
)
from guided_smc.costs import NOMINAL
from guided_smc.engine import run
from guided_smc.models.table import TableModel

TARGET = TableModel.random(VOCABULARY, seed=11, eos_probability=0.02)
DRAFT = TableModel.random(VOCABULARY, seed=22, eos_probability=0.02)
CHEAP_DRAFT = CostModel(target=((1, 1.0), (64, 1.5)), draft=((1, 0.05), (64, 0.1)))


def choose(
    estimate: DraftEstimate, costs=NOMINAL, *, rows=8, ess_threshold=0.5, remaining=200, **most
):
    return best_block_size(
        costs, estimate, rows=rows, ess_threshold=ess_threshold, remaining=remaining, **most
    )


# -- the estimate --------------------------------------------------------------------------------


def settled(n, draw, *, steps=200, size=3) -> float:
    """What is estimated after many steps of n particles, on average over independent runs."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(40):
        spread = Spread(PRIOR_VARIANCE)
        for _ in range(steps):
            spread.fade()
            c = np.full(n, size)
            spread.add(c, draw(rng, n, size))
        found.append(spread.variance)
    return float(np.mean(found))


@pytest.mark.parametrize("n", [1, 2, 8, 64])
@pytest.mark.parametrize("size", [1, 3])
def test_the_variance_of_normal_log_weights_is_found(n, size):
    def draw(rng, n, size):
        return -0.3 * size + rng.normal(size=n) * math.sqrt(0.1 * size)

    few = n <= 2 and size > 1  # they cannot show as much variance as there is
    assert settled(n, draw, size=size) == pytest.approx(0.07 if few else 0.1, rel=0.25)


def test_what_counts_is_the_share_that_the_weights_leave_and_not_the_variance_of_their_logs():
    def draw(rng, n, size):  # one in ten is as good as lost, however far below it is
        return np.where(rng.random(n) < 0.1, -20.0, 0.0)

    assert settled(64, draw, size=1) == pytest.approx(-math.log(0.9), rel=0.1)


def test_a_common_shift_is_no_spread():
    spread = Spread(0.0)
    for shift in (0.0, -3.0, 5.0, -1e5):
        spread.add(np.full(4, 3), np.full(4, shift))
    assert spread.variance == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("far", [-1e5, -math.inf])
def test_a_population_that_loses_its_weight_gives_a_finite_variance(n, far):
    spread = Spread(PRIOR_VARIANCE)
    spread.add(np.full(n, 2), np.array([0.0] * (n - 1) + [far]))
    spread.add(np.full(n, 2), np.full(n, -np.inf))
    assert PRIOR_VARIANCE < spread.variance < math.inf


def test_what_is_not_observed_any_more_fades_to_the_prior():
    spread = Spread(PRIOR_VARIANCE)
    for _ in range(50):
        spread.add(np.array([1, 1]), np.array([-2.0, 2.0]))
    assert spread.variance > 0.5
    for _ in range(400):
        spread.fade()
        spread.add(np.array([0, 0]), np.array([0.0, 0.0]))
    assert spread.variance == pytest.approx(PRIOR_VARIANCE, rel=1e-3)


# -- the choice ----------------------------------------------------------------------------------


def test_with_a_resampling_at_every_step_the_share_is_that_of_log_normal_weights():
    k = np.arange(9)
    share = mean_ess(DraftEstimate(0.2, 0.1), k, ess_threshold=1.0, remaining=99)
    assert share == pytest.approx(np.exp(-(0.2 * k + 0.1)))


def test_the_mean_over_a_cycle_is_that_of_its_steps():
    (share,) = mean_ess(DraftEstimate(0.1), [2], ess_threshold=0.5, remaining=99)
    # exp(-0.8) is the first below a half.
    assert share == pytest.approx(np.mean(np.exp(-0.2 * np.arange(1, 5))))
    (never,) = mean_ess(DraftEstimate(0.1), [2], ess_threshold=0.0, remaining=30)
    assert never == pytest.approx(np.mean(np.exp(-0.2 * np.arange(1, 11))))


def test_equal_weights_cost_nothing():
    assert mean_ess(DraftEstimate(0.0), [0, 5], ess_threshold=0.5, remaining=9) == pytest.approx(
        1.0
    )


def test_the_mean_share_is_that_of_simulated_weights():
    rng = np.random.default_rng(0)
    n, estimate, k = 20_000, DraftEstimate(0.15, 0.05), 3
    shares, log_w = [], np.zeros(n)
    for _ in range(60):
        log_w += rng.normal(size=n) * math.sqrt(k * 0.15 + 0.05)
        w = np.exp(log_w - log_w.max())
        shares.append(w.sum() ** 2 / (w @ w) / n)
        if shares[-1] < 0.4:
            log_w = np.zeros(n)
    (expected,) = mean_ess(estimate, [k], ess_threshold=0.4, remaining=10**6)
    assert np.mean(shares) == pytest.approx(expected, rel=0.03)


def test_tokens_behind_an_end_are_not_expected():
    assert expected_tokens([0, 1, 3], 0.0) == pytest.approx([1, 2, 4])
    assert expected_tokens([0, 1, 2], 0.5) == pytest.approx([1, 1.5, 1.75])


def test_a_draft_that_agrees_better_or_costs_less_drafts_more():
    sizes = [choose(DraftEstimate(v)) for v in (0.0, 0.05, 0.2, 2.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (MOST_DRAFTED, 0)
    dear = CostModel(NOMINAL.target, draft=((1, 2.0),))
    assert choose(DraftEstimate(0.05), dear) == 0


def test_the_choice_keeps_to_the_room_that_is_left():
    assert choose(DraftEstimate(0.0), most=3) == 3
    assert choose(DraftEstimate(0.0), most=0) == 0


def test_what_a_constraint_costs_anyway_is_no_reason_against_drafting():
    """With weights that spread at K = 0 too, the spread of drafted tokens matters less."""
    free, constrained = DraftEstimate(0.3), DraftEstimate(0.3, bonus_variance=0.6)
    assert choose(constrained) > choose(free)


def test_texts_that_are_about_to_end_are_drafted_in_smaller_blocks():
    assert choose(DraftEstimate(0.01, end_probability=0.5)) < choose(DraftEstimate(0.01))


# -- the run -------------------------------------------------------------------------------------


def auto(index=0, seed=0, **options):
    settings = {"n_particles": 6, "max_tokens": 40, "costs": CHEAP_DRAFT, **options}
    return request(TARGET, (0, 3), index=index, seed=seed, block_size="auto", **settings)


def sizes(result) -> list[int]:
    return [s.block_size for s in result.steps]


def test_the_block_size_follows_what_was_seen_and_the_result_tells_the_estimate():
    (result,) = results(run(TARGET, [auto(seed=3)], draft=DRAFT))
    assert len(set(sizes(result)[:-1])) > 1
    assert result.usage.draft_variance > PRIOR_VARIANCE
    assert result.usage.bonus_variance == pytest.approx(0.0, abs=1e-9)
    (itself,) = results(run(TARGET, [auto(max_tokens=200)], draft=TARGET))
    assert itself.usage.draft_variance < PRIOR_VARIANCE
    assert max(sizes(itself)) > max(sizes(result))


def test_nothing_drafted_is_no_estimate():
    (result,) = results(run(TARGET, [request(TARGET, (0,), max_tokens=5)]))
    assert result.usage.draft_variance is None
    assert result.usage.bonus_variance is None


def test_a_single_particle_is_discounted_by_how_its_weight_changes_over_time():
    other = TableModel.random(VOCABULARY, seed=33, concentration=0.3, eos_probability=0.02)
    long = {"n_particles": 1, "max_tokens": 200}
    (unlike,) = results(run(TARGET, [auto(seed=3, **long)], draft=other))
    (alike,) = results(run(TARGET, [auto(**long)], draft=TARGET))
    assert max(sizes(alike)) > 2 * min(sizes(unlike))
    assert unlike.usage.draft_variance > 3 * PRIOR_VARIANCE
    assert alike.usage.draft_variance < PRIOR_VARIANCE


def test_a_result_depends_neither_on_the_batch_nor_on_when_it_is_made():
    requests = [auto(i, seed=i, n_particles=n, max_tokens=30) for i, n in enumerate([4, 1, 7])]
    for draft in (DRAFT, FollowingTable(DRAFT.probabilities, VOCABULARY)):
        together = results(run(TARGET, requests, draft=draft, max_rows=8))
        alone = [results(run(TARGET, [r], draft=draft))[0] for r in requests]
        assert [untimed(r) for r in together] == [untimed(r) for r in alone]


def test_a_language_model_chooses_by_the_costs_it_was_given():
    dear = CostModel(target=((1, 1.0),), draft=((1, 9.0),))
    options = {"block_size": "auto", "n_particles": 4, "max_tokens": 30, "seed": 1}
    generous = LM(TARGET, draft=DRAFT, costs=CHEAP_DRAFT).generate("ad", **options)
    mean = LM(TARGET, draft=DRAFT, costs=dear).generate("ad", **options)
    assert max(sizes(generous)) > 0
    assert set(sizes(mean)) == {0}


def test_tables_have_nominal_costs_so_that_exact_tests_repeat():
    assert LM(TARGET, draft=DRAFT).costs is NOMINAL


def test_without_a_draft_or_with_a_greedy_target_nothing_is_drafted():
    without = LM(TARGET).generate("a", block_size="auto", max_tokens=5, seed=0)
    assert set(sizes(without)) == {0}
    greedy = LM(TARGET, draft=DRAFT).generate(
        "a", block_size="auto", temperature=0, max_tokens=5, seed=0
    )
    assert set(sizes(greedy)) == {0}
    assert "greedy" in greedy.warnings[0]


def test_costs_that_do_not_know_the_draft_are_refused():
    lm = LM(TARGET, draft=DRAFT, costs=CostModel(target=((1, 1.0),)))
    with pytest.raises(OptionError, match="knows the draft"):
        lm.generate("a", block_size="auto")
    lm.generate("a", block_size=2, max_tokens=3)


@pytest.mark.parametrize("block_size", ["Auto", "4", 2.0, True, -1])
def test_a_block_size_is_a_number_or_auto(block_size):
    with pytest.raises(OptionError, match='block_size: must be a whole number from 0, or "auto"'):
        LM(TARGET, draft=DRAFT).generate("a", block_size=block_size)
