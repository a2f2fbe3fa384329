"""Draws without a mask are properly weighted: exactly, and through the whole engine."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from support import VOCABULARY, Language, Score, exact, request, results, unnormalised, untimed
from test_exact import (
    DRAFT,
    LANGUAGE,
    PROMPT,
    TARGET,
    Choices,
    assert_unbiased,
    member,
    runs,
    score,
)

from guided_smc import proposing, rejection
from guided_smc.engine import run
from guided_smc.models.table import TableModel
from guided_smc.potentials import Constraint, Intersection, Unmasked
from guided_smc.rejection import Arrivals, draw_viable
from guided_smc.vocabulary import Vocabulary

ENOUGH = 10**6


class Asked(Constraint):
    """A language whose mask is kept secret: one can only ask about a token."""

    def __init__(self, language: Language, max_rejected: int = ENOUGH) -> None:
        self.language = language
        self.max_rejected = max_rejected
        self.name = "asked"

    def compile(self, vocabulary):
        return _Asked(self.language.compile(vocabulary), self.max_rejected)


class _Asked:
    def __init__(self, compiled, max_rejected) -> None:
        self.compiled = compiled
        self.max_rejected = max_rejected
        self.remedy = "raise the constraint's max_rejected"
        self.start = compiled.start

    def fill_masks(self, states, bitmask) -> None:
        bitmask.fill(-1)

    def judges(self, state) -> bool:
        return True

    def viable(self, state, token) -> bool:
        return state.fork().advance(token)


# -- the estimator, with every order of draws ------------------------------------------------------


def arrivals_by(choices: Choices):
    """Arrivals that take every order, each with its probability."""

    class Enumerated:
        def __init__(self, weights, rng) -> None:
            self.weights = dict(enumerate(weights.tolist()))
            self.there = set(self.weights)

        def take(self):
            if not self.there:
                return None
            there = sorted(self.there)
            weights = np.array([self.weights[i] for i in there])
            index = there[choices.choose(weights / weights.sum())]
            self.there.remove(index)
            return index

        def put_back(self, index) -> None:
            self.there.add(index)

    return Enumerated


CASES = {
    "one of many": ([0.4, 0.3, 0.2, 0.06, 0.04], {4}),
    "one that is heavy": ([0.9, 0.05, 0.05], {0}),
    "all": ([0.5, 0.3, 0.15, 0.05], {0, 1, 2, 3}),
    "none": ([0.5, 0.3, 0.2], set()),
    "the light half": ([3.0, 2.0, 1.0, 0.5, 0.25, 0.25], {1, 3, 5}),
    "with zeros": ([0.0, 0.7, 0.0, 0.2, 0.1], {0, 1, 4}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("surveyed", [0, 1, 2, 8])
@pytest.mark.parametrize("free", [(), (1,), (4,)])
def test_token_and_estimate_are_properly_weighted_over_every_order_of_draws(
    monkeypatch, case, surveyed, free
):
    weights, viable = CASES[case]
    free = [v for v in free if v in viable]
    choices = Choices()
    monkeypatch.setattr(rejection, "Arrivals", arrivals_by(choices))
    monkeypatch.setattr(rejection, "SURVEYED", surveyed)
    mean: dict[int, float] = defaultdict(float)
    law: dict[int, float] = defaultdict(float)
    total = 0.0
    for path in choices:
        asked = []

        def test(token, asked=asked):
            assert token not in free
            assert weights[token] > 0
            asked.append(token)
            return token in viable

        found = draw_viable(
            np.array(weights), test, np.random.default_rng(0), free=free, max_rejected=ENOUGH
        )
        assert len(asked) == len(set(asked)) == found.calls
        total += path.probability
        mean[found.token] += path.probability * found.total
        law[found.token] += path.probability
        assert (found.total > 0) == (found.token >= 0)
    assert total == pytest.approx(1.0)
    z = sum(weights[v] for v in viable)
    for v, w in enumerate(weights):
        expected = w if v in viable else 0.0
        assert mean[v] == pytest.approx(expected)
        assert law[v] == pytest.approx(expected / z if z else 0.0)


def spread(weights, viable, monkeypatch, **settings) -> float:
    """Standard deviation of the estimate, relative to its mean."""
    choices = Choices()
    monkeypatch.setattr(rejection, "Arrivals", arrivals_by(choices))
    for name, value in settings.items():
        monkeypatch.setattr(rejection, name, value)
    moments = np.zeros(2)
    for path in choices:
        found = draw_viable(
            np.array(weights), viable.__contains__, np.random.default_rng(0), max_rejected=ENOUGH
        )
        moments += path.probability * np.array([found.total, found.total**2])
    return math.sqrt(max(moments[1] - moments[0] ** 2, 0.0)) / moments[0]


def test_the_estimate_is_exact_where_all_tokens_are_viable(monkeypatch):
    assert spread(*CASES["all"], monkeypatch) == pytest.approx(0.0, abs=1e-6)
    assert spread(*CASES["all"], monkeypatch, SURVEYED=0) == pytest.approx(0.0, abs=1e-6)


def test_the_estimate_is_exact_where_the_survey_covers_everything(monkeypatch):
    for case in ("one of many", "one that is heavy", "the light half"):
        assert spread(*CASES[case], monkeypatch) == pytest.approx(0.0, abs=1e-6)


def test_a_draw_that_gives_up_says_how_much_it_has_not_tried(monkeypatch):
    monkeypatch.setattr(rejection, "SURVEYED", 0)
    weights = np.ones(10)
    found = draw_viable(weights, lambda v: False, np.random.default_rng(0), max_rejected=4)
    assert (found.token, found.total, found.calls) == (-1, 0.0, 4)
    assert found.untried == pytest.approx(0.6)


def test_a_limit_makes_the_estimate_too_low_by_the_probability_of_giving_up(monkeypatch):
    weights, viable = [0.4, 0.3, 0.2, 0.06, 0.04], {2, 4}
    choices = Choices()
    monkeypatch.setattr(rejection, "Arrivals", arrivals_by(choices))
    monkeypatch.setattr(rejection, "SURVEYED", 0)
    mean, given_up = defaultdict(float), 0.0
    for path in choices:
        found = draw_viable(
            np.array(weights), viable.__contains__, np.random.default_rng(0), max_rejected=2
        )
        mean[found.token] += path.probability * found.total
        given_up += path.probability * (found.token < 0)
        assert (found.untried > 0) == (found.token < 0)
    assert 0.1 < given_up < 0.9
    for v in viable:
        assert mean[v] == pytest.approx(weights[v] * (1 - given_up))


def test_a_draw_that_gives_up_takes_what_is_known_to_be_viable_with_the_right_weight(monkeypatch):
    weights, viable = [0.4, 0.3, 0.2, 0.06, 0.04], {2, 4}
    choices = Choices()
    monkeypatch.setattr(rejection, "Arrivals", arrivals_by(choices))
    monkeypatch.setattr(rejection, "SURVEYED", 0)
    mean, given_up = defaultdict(float), 0.0
    for path in choices:
        found = draw_viable(
            np.array(weights),
            viable.__contains__,
            np.random.default_rng(0),
            free=[4],
            max_rejected=2,
        )
        mean[found.token] += path.probability * found.total
        given_up += path.probability * (found.untried > 0)
    assert 0.1 < given_up < 0.9
    assert mean == pytest.approx({4: 0.04, 2: 0.2 * (1 - given_up)})


def test_arrivals_come_by_weight_without_replacement_and_anew_when_put_back():
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    first, pairs = np.zeros(4), np.zeros((4, 4))
    n = 20_000
    for seed in range(n):
        arrivals = Arrivals(weights, np.random.default_rng(seed))
        a = arrivals.take()
        first[a] += 1
        arrivals.put_back(a)
        pairs[a, arrivals.take()] += 1
    p = weights / weights.sum()
    assert first / n == pytest.approx(p, abs=0.02)
    assert pairs / n == pytest.approx(np.outer(p, p), abs=0.02)
    rest = Arrivals(np.ones(500), np.random.default_rng(0))
    assert sorted(iter(rest.take, None)) == list(range(500))


# -- the engine ------------------------------------------------------------------------------------


@pytest.fixture(params=[0, 8], ids=["unsurveyed", "surveyed"])
def surveyed(request, monkeypatch):
    monkeypatch.setattr(rejection, "SURVEYED", request.param)


@pytest.mark.usefixtures("surveyed")
@pytest.mark.parametrize(
    ("block_size", "rewarded", "n_particles"),
    [(0, None, 4), (1, "prefix", 4), (3, "end", 4), (0, "prefix", 1), (3, None, 1)],
)
def test_evidence_and_every_text_are_unbiased_without_masks(block_size, rewarded, n_particles):
    found = runs(
        1000 if n_particles == 1 else 600,
        constraint=Asked(LANGUAGE),
        potentials=[Score(score, prefixes=rewarded == "prefix")] if rewarded else [],
        block_size=block_size,
        n_particles=n_particles,
    )
    expected = exact(TARGET, PROMPT, max_tokens=4, member=member, score=score if rewarded else None)
    assert_unbiased(found, expected)
    assert all(r.usage.constraint_calls > 0 for r in found)


@pytest.mark.usefixtures("surveyed")
@pytest.mark.parametrize("options", [{"power": 2.0}, {"top_k": 3}, {"temperature": 0.6}], ids=str)
def test_the_target_may_be_transformed_without_masks(options):
    found = runs(
        600,
        constraint=Asked(LANGUAGE),
        block_size=2,
        n_particles=4,
        ess_threshold=0.9,
        **options,
    )
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member, **options))


@pytest.mark.usefixtures("surveyed")
def test_a_mask_and_a_question_intersect():
    masked = Language(lambda t: t.count("a") % 2 == 0 and t != "", 4)
    asked = Asked(Language(lambda t: "cc" not in t and "ab" not in t, 4))
    both = Intersection(masked, asked)
    assert isinstance(both.compile(VOCABULARY), Unmasked)
    assert not isinstance(Intersection(masked, masked).compile(VOCABULARY), Unmasked)
    found = runs(600, constraint=both, block_size=2, n_particles=4)
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


def test_a_draft_that_never_says_what_is_viable_draws_evenly_from_the_mask():
    """Where the draft gives no weight to what the language allows, something must."""

    def without_d(text):
        return member(text) and "d" not in text

    draft = TableModel(lambda context: np.array([0, 0, 0, 1.0, 0, 0]), VOCABULARY)
    found = runs(
        1500, constraint=Asked(Language(without_d, 4)), draft=draft, block_size=2, n_particles=4
    )
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=without_d))


def enumerated(monkeypatch, block_size: int):
    """Every text's mean estimate over all orders of draws, and what it should be."""
    vocabulary = Vocabulary([b"a", b"b", b""], eos_ids=[2])
    target = TableModel.random(vocabulary, seed=3)
    draft = TableModel.random(vocabulary, seed=4)
    language = Language(lambda t: not t.endswith("a") and t != "bb", 2)
    choices = Choices()
    monkeypatch.setattr(rejection, "Arrivals", arrivals_by(choices))

    def no_draw(weights, uniforms):
        totals = weights.double().sum(dim=-1)
        return totals.long() * 0, totals

    monkeypatch.setattr(proposing, "draw", no_draw)
    mean: dict = defaultdict(float)
    total = 0.0
    for path in choices:
        r = request(
            target,
            (0,),
            constraint=Asked(language),
            n_particles=1,
            max_tokens=2,
            block_size=block_size,
        )
        (result,) = results(run(target, [r], draft=draft if block_size else None))
        total += path.probability
        for text, mass in unnormalised(result).items():
            mean[text] += path.probability * mass
    assert total == pytest.approx(1.0, abs=1e-9)
    return mean, exact(target, (0,), max_tokens=2, member=language.member)


@pytest.mark.parametrize("surveyed", [0, 1, 8])
@pytest.mark.parametrize("block_size", [0, 1, 2])
def test_unbiased_exactly_when_every_order_of_draws_is_enumerated(
    monkeypatch, block_size, surveyed
):
    monkeypatch.setattr(rejection, "SURVEYED", surveyed)
    mean, expected = enumerated(monkeypatch, block_size)
    assert mean == pytest.approx(expected, rel=1e-5)


def forget_the_estimate(monkeypatch, *, of_the_draft: bool) -> None:
    """As if all that the mask lets through were viable."""
    real = rejection.redraw

    def forgetful(rows, weights, mask, uniforms, tokens, total, *, draft):
        before = total.clone()
        errors = real(rows, weights, mask, uniforms, tokens, total, draft=draft)
        if draft == of_the_draft:
            total[total > 0] = before[total > 0]
        return errors

    monkeypatch.setattr(proposing, "redraw", forgetful)


@pytest.mark.parametrize("of_the_draft", [True, False])
def test_the_enumeration_catches_a_forgotten_estimate(monkeypatch, of_the_draft):
    forget_the_estimate(monkeypatch, of_the_draft=of_the_draft)
    mean, expected = enumerated(monkeypatch, 2 if of_the_draft else 1)
    assert mean != pytest.approx(expected, rel=0.02)


def test_the_check_of_unbiasedness_catches_a_forgotten_estimate(monkeypatch):
    forget_the_estimate(monkeypatch, of_the_draft=False)
    found = runs(600, constraint=Asked(LANGUAGE), n_particles=4)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


def test_giving_up_is_told_and_kills_the_particle(monkeypatch):
    monkeypatch.setattr(rejection, "SURVEYED", 0)
    (result, *_) = runs(
        1, constraint=Asked(Language(lambda t: False, 2), max_rejected=2), n_particles=2
    )
    assert result.log_evidence == -math.inf
    assert result.finish_reason == "failed"
    (warning,) = result.warnings
    assert "gave up after 2 tokens" in warning
    assert "max_rejected" in warning
    (hopeless, *_) = runs(1, constraint=Asked(Language(lambda t: False, 2)), n_particles=2)
    assert hopeless.log_evidence == -math.inf
    assert hopeless.warnings == ()


def test_the_draws_of_a_prompt_do_not_depend_on_who_shares_its_batch():
    def make(i):
        constraint = Asked(LANGUAGE) if i % 2 else LANGUAGE
        return request(
            TARGET, PROMPT, index=i, seed=i, constraint=constraint, n_particles=3, max_tokens=4,
            block_size=i % 3,
        )  # fmt: skip

    together = results(run(TARGET, [make(i) for i in range(6)], draft=DRAFT))
    for i, result in enumerate(together):
        (alone,) = results(run(TARGET, [make(i)], draft=DRAFT))
        assert untimed(result) == untimed(alone)


def test_an_error_of_the_constraint_ends_its_prompt_alone():
    class Broken(_Asked):
        def viable(self, state, token):
            raise RuntimeError("no parser")

    from guided_smc.results import ErrorEvent, ResultEvent

    broken = request(TARGET, PROMPT, index=0, constraint=Asked(LANGUAGE), max_tokens=4)
    broken.constraint = Broken(LANGUAGE.compile(VOCABULARY), ENOUGH)
    fine = request(TARGET, PROMPT, index=1, constraint=LANGUAGE, max_tokens=4)
    events = list(run(TARGET, [broken, fine]))
    (error,) = [e for e in events if isinstance(e, ErrorEvent)]
    assert error.index == 0
    assert "RuntimeError: no parser" in str(error.error)
    assert [e.index for e in events if isinstance(e, ResultEvent)] == [1]


def test_the_language_needs_no_more_calls_than_tokens():
    found = runs(50, constraint=Asked(LANGUAGE), n_particles=4)
    calls = sum(r.usage.constraint_calls for r in found)
    tokens = sum(r.usage.particle_tokens for r in found)
    assert calls <= 4 * tokens
