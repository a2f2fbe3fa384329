"""The sampling contract on enumerable models: every estimate equals its exact value.

Tolerances are those of `exactness`.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from exactness import (
    DRAFT,
    LANGUAGE,
    PROMPT,
    TARGET,
    assert_unbiased,
    member,
    runs,
    score,
)
from support import (
    VOCABULARY,
    FollowingTable,
    Language,
    Score,
    exact,
    request,
    results,
    unnormalised,
    untimed,
)

from guided_smc import proposing
from guided_smc.costs import CostModel
from guided_smc.engine import Engine, run
from guided_smc.models.table import TableModel
from guided_smc.population import Population
from guided_smc.proposing import Proposer
from guided_smc.resampling import SCHEMES
from guided_smc.sampling import unpack_bitmask
from guided_smc.vocabulary import Vocabulary


@pytest.mark.parametrize("block_size", [0, 1, 3])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("rewarded", [None, "end", "prefix"])
def test_evidence_and_every_text_are_unbiased(block_size, constrained, rewarded):
    found = runs(
        600,
        constraint=LANGUAGE if constrained else None,
        potentials=[Score(score, prefixes=rewarded == "prefix")] if rewarded else [],
        block_size=block_size,
        n_particles=4,
    )
    expected = exact(
        TARGET,
        PROMPT,
        max_tokens=4,
        member=member if constrained else None,
        score=score if rewarded else None,
    )
    assert_unbiased(found, expected)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("block_size", [0, 1, 3])
def test_the_posterior_is_the_same_whatever_the_scheme_and_threshold(scheme, threshold, block_size):
    found = runs(
        500,
        constraint=LANGUAGE,
        potentials=[Score(score, prefixes=True)],
        block_size=block_size,
        resampling=scheme,
        ess_threshold=threshold,
        n_particles=5,
    )
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member, score=score))


STEEP = CostModel(target=((1, 1.0), (8, 1.1), (16, 6.0)), draft=((1, 0.2),))
"""Up to eight tokens in a pass cost next to nothing: four particles draft one token or none, and
those that are left when others have ended draft more."""

STEEP_FOR_ONE = CostModel(target=((1, 1.0), (2, 1.0), (8, 6.0)), draft=((1, 0.65),))
STEEP_FOR_TWO = CostModel(target=((2, 1.0), (4, 1.0), (8, 6.0)), draft=((1, 0.75),))


def assert_block_sizes_vary(found) -> None:
    """Between runs that had the same number of particles and as many tokens behind them."""
    chosen = defaultdict(set)
    for result in found:
        length = 0
        for s in result.steps:
            chosen[length, s.live].add(s.block_size)
            length += s.block_size + 1
    assert any(len(sizes) > 1 for sizes in chosen.values()), dict(chosen)


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("rewarded", [False, True])
@pytest.mark.parametrize("options", [{}, {"power": 2.0}, {"top_k": 3}], ids=str)
def test_a_block_size_that_adapts_leaves_every_estimate_unbiased(constrained, rewarded, options):
    found = runs(
        1000,
        constraint=LANGUAGE if constrained else None,
        potentials=[Score(score, prefixes=True)] if rewarded else [],
        block_size="auto",
        costs=STEEP,
        n_particles=4,
        **options,
    )
    assert_block_sizes_vary(found)
    expected = exact(
        TARGET,
        PROMPT,
        max_tokens=4,
        member=member if constrained else None,
        score=score if rewarded else None,
        **options,
    )
    assert_unbiased(found, expected)


@pytest.mark.parametrize("n_particles", [1, 3])
def test_block_and_population_may_adapt_together_and_a_single_particle_may_choose(n_particles):
    """With a longer text, since one particle has only its own past to learn from."""
    language = Language(lambda t: "a" not in t and t.count("b") == 1 and "dd" not in t, 6)
    adaptive = {} if n_particles == 1 else {"target_ess": 2.0, "max_particles": 5}
    found = runs(
        1000,
        constraint=language,
        block_size="auto",
        costs=STEEP if n_particles > 1 else STEEP_FOR_ONE,
        n_particles=n_particles,
        ess_threshold=0.9,
        max_tokens=6,
        **adaptive,
    )
    assert_block_sizes_vary(found)
    assert changes_of_number(found) == ({0} if n_particles == 1 else {-1, 0, 1})
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=6, member=language.member))


def changes_of_number(found) -> set[int]:
    """The signs of what the number of particles did at each step: it fell, stayed or rose."""
    return {int(np.sign(len(s.ancestors) - len(s.log_weights))) for r in found for s in r.steps}


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("block_size", [0, 2])
@pytest.mark.parametrize("constrained", [False, True])
def test_a_number_of_particles_that_adapts_leaves_every_estimate_unbiased(
    scheme, block_size, constrained
):
    def steep(text: str) -> float:
        return 2.5 * score(text)

    found = runs(
        800,
        constraint=LANGUAGE if constrained else None,
        potentials=[Score(steep, prefixes=True)],
        block_size=block_size,
        resampling=scheme,
        ess_threshold=0.95,
        n_particles=4,
        target_ess=3.0,
        max_particles=7,
    )
    assert changes_of_number(found) == {-1, 0, 1}
    expected = exact(
        TARGET, PROMPT, max_tokens=4, member=member if constrained else None, score=steep
    )
    assert_unbiased(found, expected)


@pytest.mark.parametrize("block_size", [0, 1, 3])
@pytest.mark.parametrize("power", [0.5, 2.0])
@pytest.mark.parametrize("constrained", [False, True])
def test_the_power_target_is_unbiased(block_size, power, constrained):
    found = runs(
        600,
        constraint=LANGUAGE if constrained else None,
        block_size=block_size,
        power=power,
        n_particles=4,
    )
    expected = exact(
        TARGET, PROMPT, max_tokens=4, power=power, member=member if constrained else None
    )
    assert_unbiased(found, expected)


@pytest.mark.parametrize(
    "transform",
    [
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [0, 2])
def test_the_transformed_target_is_the_target(transform, block_size):
    found = runs(500, constraint=LANGUAGE, block_size=block_size, n_particles=4, **transform)
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member, **transform))


@pytest.mark.parametrize("transform", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.4}], ids=str)
def test_a_cut_target_is_covered_by_its_draft(transform):
    """Where the two cuts differ, too; and so that most runs survive.

    By a draft that is near: what lies outside the cut of one that is far is drawn too rarely for
    the runs to tell their own error.
    """

    def near(context):
        p = TARGET.probabilities(context) ** 0.8 * DRAFT.probabilities(context) ** 0.2
        return p / p.sum()

    draft = TableModel(near, VOCABULARY)
    found = runs(1200, draft=draft, block_size=2, n_particles=4, **transform)
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, **transform))


@pytest.mark.parametrize("draft_temperature", [0.5, 3.0])
def test_the_draft_temperature_changes_the_proposal_and_not_the_posterior(draft_temperature):
    found = runs(
        600,
        constraint=LANGUAGE,
        block_size=2,
        draft_temperature=draft_temperature,
        n_particles=4,
    )
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("constrained", [False, True])
def test_a_draft_that_follows_the_targets_cache_is_a_draft_like_any_other(block_size, constrained):
    following = FollowingTable(DRAFT.probabilities, VOCABULARY)
    found = runs(
        600,
        draft=following,
        constraint=LANGUAGE if constrained else None,
        potentials=[Score(score, prefixes=True)],
        block_size=block_size,
        n_particles=4,
    )
    expected = exact(
        TARGET, PROMPT, max_tokens=4, member=member if constrained else None, score=score
    )
    assert_unbiased(found, expected)
    own_cache = runs(20, block_size=block_size, n_particles=4)
    same = runs(20, draft=following, block_size=block_size, n_particles=4)
    assert [r.particles for r in own_cache] == [r.particles for r in same]


def test_texts_of_six_tokens_with_blocks_across_the_cap_are_unbiased():
    language = Language(lambda t: "a" not in t and t.count("b") == 1 and "dd" not in t, 6)
    found = runs(1500, constraint=language, block_size=3, n_particles=4, max_tokens=6)
    expected = exact(TARGET, PROMPT, max_tokens=6, member=language.member)
    assert max(len(t) for t in expected) == 6
    assert_unbiased(found, expected)


def test_all_end_tokens_count_as_the_end():
    vocabulary = Vocabulary([b"a", b"b", b"", b"", None], eos_ids=[2, 3])
    target = TableModel.random(vocabulary, seed=5)
    draft = TableModel.random(vocabulary, seed=6)
    language = Language(lambda t: t.count("a") == 1, 3)
    found = runs(
        500,
        target=target,
        draft=draft,
        constraint=language,
        block_size=2,
        max_tokens=3,
        n_particles=4,
    )
    assert_unbiased(found, exact(target, PROMPT, max_tokens=3, member=language.member))


def test_a_batch_of_different_prompts_gives_each_its_own_result():
    """Ragged prompts, different options, joining late: bit for bit what each gives alone."""
    prompts = [(0,), (1, 2, 3), (3, 3), (2, 0, 1, 0, 2), (1,)]
    options = [
        dict(block_size=k, n_particles=n, max_tokens=t)
        for k, n, t in [(0, 3, 5), (2, 4, 3), (3, 2, 6), (1, 5, 4), (3, 3, 1)]
    ]

    def make(i):
        return request(TARGET, prompts[i], index=i, seed=i, constraint=LANGUAGE, **options[i])

    together = results(run(TARGET, [make(i) for i in range(5)], draft=DRAFT, max_rows=8))
    for i, result in enumerate(together):
        (alone,) = results(run(TARGET, [make(i)], draft=DRAFT))
        assert untimed(result) == untimed(alone)


def particle_measure_tv(n_particles: int, n_runs: int, engine=Engine) -> float:
    """Mean total variation between the law of the selection in a run and the posterior."""
    expected = exact(TARGET, PROMPT, max_tokens=4, member=member)
    z = sum(expected.values())
    found = runs(n_runs, engine=engine, constraint=LANGUAGE, block_size=2, n_particles=n_particles)
    total = 0.0
    for result in found:
        law = unnormalised(result)
        mass = sum(law.values())
        total += 0.5 * sum(abs(law.get(t, 0.0) / mass - expected[t] / z) for t in expected)
    return total / n_runs


def assert_tv_falls_as_inverse_root(engine=Engine) -> None:
    """From N = 16 to N = 256 the distance falls by 4, up to the ratio's own noise."""
    tv = {n: particle_measure_tv(n, 6400 // n, engine) for n in (16, 64, 256)}
    assert 1.5 < tv[16] / tv[64] < 2.7, tv
    assert 1.5 < tv[64] / tv[256] < 2.7, tv


def test_total_variation_of_the_selection_falls_as_one_over_root_n():
    assert_tv_falls_as_inverse_root()


def test_the_selected_text_has_the_posterior_law_for_many_particles():
    """The draw itself, over runs: its law is the posterior up to sampling noise."""
    n_runs = 500
    expected = exact(TARGET, PROMPT, max_tokens=4, member=member)
    z = sum(expected.values())
    drawn = [r.token_ids for r in runs(n_runs, constraint=LANGUAGE, block_size=2, n_particles=128)]
    # Texts that are expected fewer than five times are counted together.
    law = {t: m / z for t, m in expected.items() if n_runs * m / z >= 5}
    rest = 1 - sum(law.values())
    cells = [(p, drawn.count(t)) for t, p in law.items()]
    cells.append((rest, sum(t not in law for t in drawn)))
    for p, count in cells:
        assert abs(count / n_runs - p) < 4 * math.sqrt(p * (1 - p) / n_runs), (p, count)


def test_n_1_k_0_without_potentials_is_ordinary_sampling():
    found = runs(4000, n_particles=1)
    assert all(r.log_evidence == pytest.approx(0.0, abs=1e-5) for r in found)
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4))


def test_a_model_as_its_own_draft_gives_weights_zero():
    for result in runs(50, draft=TARGET, block_size=3, n_particles=4):
        assert np.allclose([p.log_weight for p in result.particles], 0, atol=1e-5)


def test_log_p_and_log_q_are_those_of_the_text_alone():
    """The end token is counted, wherever in a block it falls, and nothing behind it."""
    for result in runs(200, draft=DRAFT, block_size=3, n_particles=3, ess_threshold=0):
        for particle in result.particles:
            log_p = 0.0
            text = particle.token_ids
            for i, token in enumerate(text):
                log_p += math.log(TARGET.probabilities((*PROMPT, *text[:i]))[token])
            if particle.finish_reason == "stop":
                log_p += math.log(TARGET.probabilities((*PROMPT, *text))[4])
            assert particle.log_p == pytest.approx(log_p, abs=1e-5)
            assert particle.log_weight == pytest.approx(particle.log_p - particle.log_q, abs=1e-9)


# -- every random choice enumerated: exact, without sampling ---------------------------------------


class Choices:
    """Walks through every sequence of random choices, depth first, with its probability."""

    def __init__(self) -> None:
        self.path: list[int] = []
        self.widths: list[int] = []
        self.depth = 0
        self.probability = 1.0

    def __iter__(self):
        while True:
            self.depth, self.probability, self.widths = 0, 1.0, []
            yield self
            while self.path and self.path[-1] == self.widths[len(self.path) - 1] - 1:
                self.path.pop()
            if not self.path:
                return
            self.path[-1] += 1

    def choose(self, probabilities) -> int:
        """The index chosen among outcomes of positive probability."""
        outcomes = [i for i, p in enumerate(probabilities) if p > 0]
        if self.depth == len(self.path):
            self.path.append(0)
        self.widths.append(len(outcomes))
        chosen = outcomes[self.path[self.depth]]
        self.depth += 1
        self.probability *= float(probabilities[chosen])
        return chosen


@pytest.mark.parametrize("scheme", ["systematic", "multinomial"])
@pytest.mark.parametrize(
    "adaptive",
    [
        {"block_size": 0},
        {"block_size": 1},
        {"block_size": 0, "target_ess": 1.8, "max_particles": 3, "ess_threshold": 1.0},
        {"block_size": "auto", "costs": STEEP_FOR_TWO},
    ],
    ids=str,
)
def test_unbiased_exactly_when_every_choice_is_enumerated(monkeypatch, scheme, adaptive):
    vocabulary = Vocabulary([b"a", b"b", b""], eos_ids=[2])
    target = TableModel.random(vocabulary, seed=3)
    draft = TableModel.random(vocabulary, seed=4)
    language = Language(lambda t: not t.endswith("a") and t != "bb", 3)
    potentials = [Score(lambda t: 1.2 * t.count("a"), prefixes=True)]
    choices = Choices()

    def draw(weights, uniforms):
        tokens = np.zeros(len(weights), dtype=np.int64)
        rows = weights.double().numpy()
        for r, row in enumerate(rows):
            if row.sum() > 0:
                tokens[r] = choices.choose(row / row.sum())
        totals = torch.from_numpy(rows.sum(axis=1))
        return torch.from_numpy(tokens), totals

    def resample(weights, uniforms):
        # The ancestors are a step function of each uniform: choose a piece of it.
        cdf = np.cumsum(weights)[:-1]
        n = len(uniforms)
        points = np.zeros(n)
        pieces = n if scheme == "multinomial" else 1
        for i in range(pieces):
            cuts = cdf if scheme == "multinomial" else (n * cdf[:, None] - np.arange(n)).ravel()
            edges = np.unique(np.clip(np.concatenate([[0.0], cuts, [1.0]]), 0, 1))
            piece = choices.choose(np.diff(edges))
            points[i] = (edges[piece] + edges[piece + 1]) / 2
        return SCHEMES[scheme](weights, points)

    monkeypatch.setattr(proposing, "draw", draw)
    monkeypatch.setattr("guided_smc.population.SCHEMES", {scheme: resample})
    mean = dict.fromkeys(exact(target, (0,), max_tokens=3, member=language.member), 0.0)
    total = 0.0
    found = []
    for path in choices:
        r = request(
            target,
            (0,),
            constraint=language,
            potentials=potentials,
            n_particles=2,
            max_tokens=3,
            resampling=scheme,
            **{"ess_threshold": 0.9, **adaptive},
        )
        (result,) = results(run(target, [r], draft=draft if adaptive["block_size"] else None))
        found.append(result)
        total += path.probability
        for text, mass in unnormalised(result).items():
            mean[text] += path.probability * mass
    assert total == pytest.approx(1.0, abs=1e-9)
    assert changes_of_number(found) == ({-1, 0, 1} if "target_ess" in adaptive else {0})
    if adaptive["block_size"] == "auto":
        assert_block_sizes_vary(found)
    expected = exact(
        target, (0,), max_tokens=3, member=language.member, score=lambda t: 1.2 * t.count("a")
    )
    for text, mass in expected.items():
        assert mean[text] == pytest.approx(mass, rel=1e-5)


# -- mutants: the checks above must fail under them ------------------------------------------------


class RenormalisesTheTarget(Engine):
    """Token masking: every token weighs as if the target had been renormalised over the mask."""

    class proposer(Proposer):
        def propose(self, batch):
            self.log_z = np.zeros(len(batch.rows))
            return super().propose(batch)

        def bitmask(self, rows, active, errors):
            bits = super().bitmask(rows, active, errors)
            mask = unpack_bitmask(bits, len(self.vocabulary))
            for r, (g, s) in enumerate(rows):
                if active[r]:
                    p = self.running[g]
                    text = p.tokens[s, 1 : 1 + p.length[s]]
                    row = self.target.probabilities((*p.request.prompt_ids, *text))
                    kept = row[mask[r].numpy()].sum()
                    self.log_z[r] += np.log(kept) if kept > 0 else 0.0
            return bits

    def _settle(self, population, slots, block, mine, block_size):
        block.log_p[mine] -= self._proposer.log_z[mine]
        return super()._settle(population, slots, block, mine, block_size)


class ForgetsLogZ(Engine):
    """The bonus token weighs nothing."""

    class proposer(Proposer):
        def _take(self, rows, block, active, scores, mask, uniforms, errors, *, draft):
            before = block.log_q.copy()
            log_p = block.log_p.copy()
            super()._take(rows, block, active, scores, mask, uniforms, errors, draft=draft)
            if not draft:
                block.log_q[:] = before + block.log_p - log_p


class CountsBehindTheEnd(Engine):
    """What is drafted behind an end token enters the weight."""

    class proposer(Proposer):
        def _take(self, rows, block, active, scores, mask, uniforms, errors, *, draft):
            super()._take(rows, block, active, scores, mask, uniforms, errors, draft=draft)
            for r in np.flatnonzero(block.ended & active) if draft else ():
                g, s = rows[r]
                p = self.running[g]
                text = (*p.request.prompt_ids, *p.tokens[s, 1 : 1 + p.length[s]], 4)
                token = int(self.draft.probabilities(text).argmax())
                block.log_p[r] += np.log(self.target.probabilities(text)[token])
                block.log_q[r] += np.log(self.draft.probabilities(text)[token])


class SharesTheFirstToken(Engine):
    """One first token for all particles of a prompt, as when it is drawn with the prefill."""

    class proposer(Proposer):
        def _take(self, rows, block, active, scores, mask, uniforms, errors, *, draft):
            uniforms = uniforms.copy()
            for r, (g, _) in enumerate(rows):
                p = self.running[g]
                if not p.steps and block.count[r] == 0:
                    uniforms[r] = uniforms[min(q for q, row in enumerate(rows) if row[0] == g)]
            super()._take(rows, block, active, scores, mask, uniforms, errors, draft=draft)


@pytest.mark.parametrize("block_size", [0, 2])
@pytest.mark.parametrize("mutant", [RenormalisesTheTarget, ForgetsLogZ])
def test_the_check_of_unbiasedness_catches_a_wrong_weight(mutant, block_size):
    found = runs(600, engine=mutant, constraint=LANGUAGE, block_size=block_size, n_particles=4)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


def test_the_check_of_unbiasedness_catches_tokens_counted_behind_the_end():
    found = runs(1500, engine=CountsBehindTheEnd, constraint=LANGUAGE, block_size=3, n_particles=4)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


def test_the_check_of_total_variation_catches_a_shared_first_token():
    """It leaves every mean right: only the law within one run shows it."""
    with pytest.raises(AssertionError):
        assert_tv_falls_as_inverse_root(SharesTheFirstToken)


def test_survivors_of_a_resampling_keep_their_slots():
    population = Population(request(TARGET, PROMPT, n_particles=4, ess_threshold=0.9), VOCABULARY)
    population.begin()
    population.tokens[:, 1] = [0, 1, 2, 3]
    population.length[:] = 1
    population.log_w[:] = [-np.inf, 0.0, 0.0, -np.inf]
    step = population.close_step(block_size=0, live=4)
    assert step.resampled
    assert step.ancestors.tolist() == [1, 1, 2, 2]
    assert population.tokens[:, 1].tolist() == [1, 1, 2, 2]
