"""Tilted posteriors on enumerable models: islands, tempered tilts, methods, estimates."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from exactness import LANGUAGE, PROMPT, TARGET, assert_unbiased, member, runs
from support import VOCABULARY, Score, exact

from guided_smc import LM
from guided_smc.errors import OptionError, PotentialError
from guided_smc.options import make_options
from guided_smc.potentials import Completion, Potential, Tilt
from guided_smc.results import Estimate
from guided_smc.scoring import Scores

BETA = 1.5


def value(text: str) -> float:
    return 0.6 * text.count("b") - 0.4 * (text[:1] == "c")


class Tilted(Tilt):
    """`R = fn(text)`, on prefixes too if it steers."""

    def __init__(self, fn=value, *, beta=BETA, steers=False, adaptive=False, name="value"):
        self.fn, self.beta, self.steers, self.adaptive, self.name = fn, beta, steers, adaptive, name
        self.seen = []

    @property
    def scores_prefixes(self):
        return self.steers

    def rewards(self, completions):
        return [self.fn(c.text) for c in completions]

    def prefix_rewards(self, completions):
        self.seen += [c.text for c in completions]
        return self.rewards(completions)


class Ramp(Tilted):
    """β_t rises with the length, beyond β, and depends on the text."""

    def prefix_beta(self, completion):
        return self.beta * len(completion.token_ids) * (0.3 if "a" in completion.text else 0.7)


def truth(constrained: bool, beta: float = BETA, **options) -> dict:
    return exact(
        TARGET,
        PROMPT,
        max_tokens=4,
        member=member if constrained else None,
        score=lambda text: beta * value(text),
        **options,
    )


def moments(constrained: bool, beta: float = BETA) -> tuple[float, float, float]:
    """`E_π[R]`, `E_p[R]` (under the constraint) and `KL(π‖p)` by enumeration."""
    tilted, plain = truth(constrained, beta), truth(constrained, 0.0)
    log_z = math.log(sum(tilted.values()))
    rewards = {t: value(VOCABULARY.decode(t)) for t in tilted}
    mean = sum(w * rewards[t] for t, w in tilted.items()) / sum(tilted.values())
    untilted = sum(w * rewards[t] for t, w in plain.items()) / sum(plain.values())
    return mean, untilted, beta * mean - log_z


def tilts(constrained=False, tilt=None, **options):
    options = {"n_particles": 4, **options}
    return runs(
        options.pop("n_runs", 400),
        constraint=LANGUAGE if constrained else None,
        potentials=[tilt or Tilted(steers=True)],
        **options,
    )


class TestTempering:
    @pytest.mark.parametrize("block_size", [0, 2])
    @pytest.mark.parametrize("constrained", [False, True])
    @pytest.mark.parametrize(
        "tilt", [Ramp(steers=True), Tilted(steers=True, adaptive=True)], ids=["ramp", "adaptive"]
    )
    def test_the_finished_weight_is_exact_whatever_the_schedule(
        self, tilt, constrained, block_size
    ):
        found = tilts(constrained, tilt, block_size=block_size, ess_threshold=0.8)
        assert any(s.resampled for r in found for s in r.steps)
        assert_unbiased(found, truth(constrained))

    def test_an_adaptive_tilt_goes_as_far_as_lets_half_of_the_particles_count(self):
        """Here weights come from the tilt alone: after a step their ESS is half of N where the
        tilt was held back, or more where it had come to its end.
        """
        strong = Tilted(beta=30.0, steers=True, adaptive=True)
        steps = [s for r in tilts(tilt=strong, n_particles=40, n_runs=20) for s in r.steps]
        first = [s for s in steps if s.index == 0]
        held_back = [s for s in first if s.ess == pytest.approx(20, abs=1e-3)]
        assert len(held_back) > 10 and all(s.resampled for s in held_back)
        assert all(s.ess > 20 for s in first if s not in held_back)

        constant = Tilted(beta=30.0, steers=True)
        steps = [s for r in tilts(tilt=constant, n_particles=40, n_runs=20) for s in r.steps]
        assert np.median([s.ess for s in steps if s.index == 0]) < 15

    def test_an_adaptive_tilt_is_whole_at_once_where_nothing_is_resampled(self):
        held = tilts(tilt=Tilted(steers=True, adaptive=True), ess_threshold=0.0, n_runs=5)
        free = tilts(tilt=Tilted(steers=True), ess_threshold=0.0, n_runs=5)
        assert [r.steps for r in held] == [r.steps for r in free]

    def test_an_adaptive_tilt_may_be_negative_and_may_forbid(self):
        def forbids(text):
            return -math.inf if text[:1] == "b" else value(text)

        found = tilts(tilt=Tilted(forbids, beta=2.0, steers=True, adaptive=True))
        left = {t: m for t, m in truth(False, 2.0).items() if VOCABULARY.decode(t)[:1] != "b"}
        assert_unbiased(found, left)
        found = tilts(tilt=Tilted(beta=-2.0, steers=True, adaptive=True))
        assert_unbiased(found, truth(False, -2.0))


class Half(Tilted):
    """β_t is half of β."""

    def prefix_beta(self, completion):
        return self.beta / 2


class TestFinishedTexts:
    """As long as others grow, what a finished text has is tempered like what they have."""

    def test_a_score_that_speaks_at_the_end_resamples_nothing_before_the_end(self):
        for tilt in (Tilted(beta=5.0), Score(lambda text: 5.0 * value(text), prefixes=False)):
            found = runs(40, potentials=[tilt], n_particles=8, ess_threshold=1.0)
            assert not any(s.resampled for r in found for s in r.steps)
            plain = runs(40, potentials=[tilt], n_particles=8, method="importance")
            assert [r.particles for r in found] == [r.particles for r in plain]

    @pytest.mark.parametrize("constrained", [False, True])
    def test_the_posterior_stays_exact(self, constrained):
        tilt = Half(beta=BETA, steers=True)
        found = tilts(constrained, tilt, ess_threshold=1.0, n_particles=6, n_runs=800)
        early = [p for r in found for p in r.particles if len(p.token_ids) < len(r.steps) - 1]
        assert early  # texts that ended, and were resampled, while others went on
        assert_unbiased(found, truth(constrained))

    def test_resampling_sees_the_part_that_unfinished_texts_have(self):
        end = Score(lambda text: 1.0, prefixes=False)
        step = Score(lambda text: 1.0, prefixes=True)
        potentials = [Half(beta=4.0, steers=True), end, step, Tilted(beta=0.0, steers=True)]
        scores = Scores(potentials, 3, islands=1, steer=True, ess_threshold=0.5)

        def completion(slot, finished):
            return Completion("", (1,) * slot, "b" * slot, finished, VOCABULARY)

        log_w = np.zeros(3)
        scores.update(log_w, [0, 1], [2], completion)
        assert log_w.tolist() == pytest.approx([1.0, 1.0 + 2.0 * 0.6, 2.0 + 4.0 * 1.2])
        held = scores.held_back(completion(0, False))
        assert held.tolist() == pytest.approx([0.0, 0.0, -1.0 - 2.0 * 1.2])


class TestIslands:
    @pytest.mark.parametrize("constrained", [False, True])
    @pytest.mark.parametrize("block_size", [0, 2])
    @pytest.mark.parametrize("adaptive", [False, True])
    def test_evidence_and_every_text_are_unbiased(self, constrained, block_size, adaptive):
        found = tilts(
            constrained,
            Tilted(steers=True, adaptive=adaptive),
            block_size=block_size,
            n_particles=6,
            islands=3,
            ess_threshold=0.9,
        )
        assert_unbiased(found, truth(constrained))

    def test_no_particle_descends_from_another_island(self):
        for r in tilts(n_particles=8, islands=2, ess_threshold=1.0, n_runs=50):
            for s in r.steps:
                assert all((a < 4) == (slot < 4) for slot, a in enumerate(s.ancestors))

    def test_each_island_is_resampled_by_its_own_weights(self):
        moved = Counter()
        for r in tilts(n_particles=8, islands=2, ess_threshold=0.8, n_runs=50):
            for s in r.steps:
                if s.resampled:
                    halves = s.ancestors[:4] != (0, 1, 2, 3), s.ancestors[4:] != (4, 5, 6, 7)
                    moved[halves] += 1
        assert moved[True, False] and moved[False, True]

    def test_one_island_is_a_run_without_islands(self):
        one, none = tilts(islands=1, n_runs=20), tilts(n_runs=20)
        assert [r.steps for r in one] == [r.steps for r in none]
        assert [r.particles for r in one] == [r.particles for r in none]

    def test_an_island_that_dies_leaves_the_others_their_weights(self):
        """With two particles each, islands die often under this potential."""

        class Dies(Potential):
            name = "dies"

            def log_prefix(self, completions):
                return [-math.inf if "c" in c.text else 0.0 for c in completions]

            def log_complete(self, completions):
                return self.log_prefix(completions)

        found = runs(800, potentials=[Dies()], n_particles=4, islands=2)
        halves = [[sum(p.weight for p in r.particles[i : i + 2]) for i in (0, 2)] for r in found]
        assert any(min(h) == 0 and max(h) > 0 for h in halves)
        expected = exact(
            TARGET, PROMPT, max_tokens=4, score=lambda t: -math.inf if "c" in t else 0.0
        )
        assert_unbiased(found, {t: m for t, m in expected.items() if m > 0})


METHODS = ["importance", "best_of_n", "soft_best_of_n", "token_masking"]


class TestMethods:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("constrained", [False, True])
    def test_every_method_has_true_weights(self, method, constrained):
        tilt = Tilted(steers=True)
        found = tilts(constrained, tilt, method=method)
        assert not any(s.resampled for r in found for s in r.steps)
        assert tilt.seen == []  # no unfinished text was scored
        assert_unbiased(found, truth(constrained))

    @staticmethod
    def law(method: str, constrained: bool, n: int = 2) -> dict:
        """Of the answer of each method with two candidates, by enumerating both."""
        single = masked_law() if constrained else truth(constrained, 0.0)
        law = Counter()
        for x, p in single.items():
            for y, q in single.items():
                rx, ry = (value(VOCABULARY.decode(t)) for t in (x, y))
                if method == "best_of_n":
                    share = 0.5 if rx == ry else float(rx > ry)
                elif method == "soft_best_of_n":
                    share = 1 / (1 + math.exp(BETA * (ry - rx)))
                else:
                    share = 0.5
                law[x] += p * q * share
                law[y] += p * q * (1 - share)
        return law

    @pytest.mark.parametrize(
        "method, constrained",
        [
            ("best_of_n", False),
            ("best_of_n", True),
            ("soft_best_of_n", False),
            ("soft_best_of_n", True),
            ("token_masking", True),
        ],
    )
    def test_the_answer_has_the_law_of_the_method(self, method, constrained):
        found = tilts(constrained, Tilted(), method=method, n_particles=2, n_runs=1500)
        law = self.law(method, constrained)
        assert sum(law.values()) == pytest.approx(1)
        drawn = Counter(r.token_ids for r in found)
        for text, p in law.items():
            error = 4 * math.sqrt(p * (1 - p) / len(found)) + 2 / len(found)
            assert abs(drawn[text] / len(found) - p) < error, text

    @pytest.mark.parametrize("method", [*METHODS, "smc"])
    def test_the_shares_are_those_by_which_the_answer_is_chosen(self, method):
        found = tilts(True, Tilted(), method=method, n_particles=3, n_runs=50, select="best")
        for r in found:
            shares = [p.share for p in r.particles]
            assert sum(shares) == pytest.approx(1) or not r.selected
            if r.selected:
                assert shares[r.selected[0]] == max(shares)
            if method in ("smc", "importance"):
                assert shares == [p.weight for p in r.particles]

    def test_a_method_that_does_not_resample_refuses_what_resampling_takes(self):
        for name, given in {"islands": 2, "ess_threshold": 0.5, "resampling": "residual"}.items():
            with pytest.raises(OptionError, match=f"{name}: nothing is resampled with method="):
                make_options(None, method="best_of_n", **{name: given})
        with pytest.raises(OptionError, match=r"block_size: nothing is drafted with .*, got 3"):
            make_options(None, method="importance", block_size=3)

    def test_a_method_refuses_a_request_that_lacks_what_it_chooses_by(self):
        lm = LM(TARGET)
        with pytest.raises(OptionError, match=r"best_of_n.* needs a reward"):
            lm.generate("ad", method="best_of_n", max_tokens=3)
        with pytest.raises(OptionError, match=r"beta other than 0"):
            lm.generate("ad", method="soft_best_of_n", potential=Tilted(beta=0.0), max_tokens=3)
        with pytest.raises(OptionError, match=r"token_masking.* needs a constraint"):
            lm.generate("ad", method="token_masking", max_tokens=3)

    def test_baselines_do_not_draft_and_say_so(self):
        out = LM(TARGET, draft=TARGET).generate(
            "ad", method="best_of_n", potential=Tilted(), max_tokens=3, seed=0
        )
        assert any("no tokens were drafted: method='best_of_n'" in w for w in out.warnings)
        assert out.usage.draft_passes == 0


def masked_law() -> dict:
    """Of one text drawn by token masking: each token from the renormalised mask."""
    law: dict = {}

    def completable(text: str) -> bool:
        return any(t[: len(text)] == text for t in MEMBERS)

    def visit(text, p):
        row = TARGET.probabilities((*PROMPT, *text))
        decoded = VOCABULARY.decode(text)
        allowed = {4: row[4]} if decoded in MEMBERS else {}
        if len(text) < 4:
            allowed |= {v: row[v] for v in range(4) if completable(decoded + "abcd"[v])}
        total = sum(allowed.values())
        for v, weight in allowed.items():
            if v == 4:
                law[text] = p * weight / total
            else:
                visit((*text, v), p * weight / total)

    visit((), 1.0)
    return law


MEMBERS = {VOCABULARY.decode(t) for t in truth(True)}


class TestEstimates:
    @pytest.mark.parametrize("constrained", [False, True])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"islands": 20},
            {"method": "importance"},
            {"block_size": 2, "n_particles": 600},  # of weights that spread far
            {"ess_threshold": 0.9, "resampling": "multinomial"},
        ],
        ids=str,
    )
    def test_rewards_and_divergence_come_near_their_exact_values_as_their_errors_say(
        self, constrained, options
    ):
        """The spread between runs is what a single run says of itself, within a third."""
        options = {"n_particles": 120, **options}
        found = tilts(constrained, Tilted(steers=True), n_runs=60, **options)
        mean, untilted, kl = moments(constrained)
        log_z = math.log(sum(truth(constrained).values()))
        estimates = {
            "tilted": (mean, [r.rewards["value"].tilted for r in found]),
            "untilted": (untilted, [r.rewards["value"].untilted for r in found]),
            "kl": (kl, [r.kl for r in found]),
            "log_evidence": (
                log_z,
                [Estimate(r.log_evidence, r.log_evidence_std_error) for r in found],
            ),
        }
        for name, (expected, each) in estimates.items():
            values = np.array([e.value for e in each])
            error = math.sqrt(np.mean([e.std_error**2 for e in each]))
            assert 2 / 3 < error / values.std() < 3 / 2, name
            # Self-normalised estimates are biased by as much as the square of their error.
            tolerance = 4 * values.std() / math.sqrt(len(values)) + 2 * values.std() ** 2
            assert abs(values.mean() - expected) < tolerance, name

    def test_a_tilt_of_strength_zero_still_tells_what_its_reward_is(self):
        r = tilts(tilt=Tilted(beta=0.0), n_particles=3000, n_runs=1)[0]
        estimate = r.rewards["value"]
        assert estimate.tilted == estimate.untilted
        expected = moments(False, 0.0)[1]
        assert abs(estimate.tilted.value - expected) < 4 * estimate.tilted.std_error
        assert r.kl.value == pytest.approx(0, abs=1e-9)
        assert estimate.chosen == value(r.text)

    def test_with_a_constraint_alone_the_divergence_is_minus_its_log_evidence(self):
        r = runs(1, constraint=LANGUAGE, n_particles=50)[0]
        assert r.kl.value == pytest.approx(-r.log_evidence)
        assert r.rewards == {}

    def test_a_power_counts_in_the_divergence(self):
        r = runs(1, n_particles=20000, power=2.0, ess_threshold=0.0)[0]
        plain = truth(False, 0.0)
        squared = exact(TARGET, PROMPT, max_tokens=4, power=2.0)
        z = sum(squared.values())
        kl = sum(m / z * math.log(m / z / plain[t]) for t, m in squared.items())
        assert abs(r.kl.value - kl) < 4 * r.kl.std_error

    def test_a_run_of_one_family_has_no_errors_and_is_warned_of(self):
        strong = Tilted(lambda t: t.count("b"), beta=8.0, steers=True)
        found = tilts(tilt=strong, n_particles=8, ess_threshold=1.0, n_runs=40)
        alone = [r for r in found if r.diversity.independent < 2]
        assert alone
        for r in alone:
            assert r.kl.std_error is None and r.rewards["value"].tilted.std_error is None
            assert any("independent ones in effect" in w for w in r.warnings)
        for r in found:
            assert (r.diversity.independent < 2) == any("in effect" in w for w in r.warnings)

    def test_what_is_alike_in_all_particles_has_no_error(self):
        r = tilts(tilt=Tilted(lambda t: 2.0, beta=3.0), n_particles=8, n_runs=1)[0]
        assert r.rewards["value"].tilted == Estimate(2.0, None)
        assert r.kl.value == pytest.approx(0) and r.kl.std_error is None

    def test_one_particle_is_told_that_a_reward_changes_nothing(self):
        out = LM(TARGET).generate("ad", potential=Tilted(), n_particles=1, max_tokens=3, seed=0)
        assert any("with one particle a reward changes nothing" in w for w in out.warnings)

    def test_islands_keep_families_apart(self):
        strong = Tilted(lambda t: t.count("b"), beta=3.0, steers=True)
        options = {"tilt": strong, "n_particles": 16, "ess_threshold": 1.0, "n_runs": 40}
        apart = np.mean([r.diversity.independent for r in tilts(islands=8, **options)])
        together = np.mean([r.diversity.independent for r in tilts(**options)])
        assert apart > together

    def test_the_number_of_ancestors_falls_towards_the_past(self):
        for r in tilts(n_particles=8, ess_threshold=1.0, n_runs=30):
            alive = [p for p in r.particles if p.weight > 0]
            expected = tuple(len({p.ancestors[t] for p in alive}) for t in range(len(r.steps)))
            assert r.diversity.ancestors == expected
            assert list(expected) == sorted(expected)
            texts = Counter()
            for p in alive:
                texts[p.text] += p.weight
            assert r.diversity.distinct == pytest.approx(1 / sum(w**2 for w in texts.values()))

    def test_a_dead_run_has_no_estimates(self):
        out = LM(TARGET).generate(
            "ad",
            potential=Tilted(lambda t: -math.inf),
            max_restarts=0,
            max_tokens=3,
            seed=0,
            n_particles=2,
        )
        assert out.kl is None and out.rewards == {} and out.log_evidence_std_error is None
        assert out.diversity.independent == 0
        assert out.particles[0].rewards == {"value": -math.inf}

    def test_what_a_tilt_says_is_checked(self):
        for bad in (math.nan, math.inf):
            with pytest.raises(PotentialError, match="'value' returned"):
                tilts(tilt=Tilted(lambda t, bad=bad: bad), n_runs=1)
        with pytest.raises(PotentialError, match="raised ZeroDivisionError"):
            tilts(tilt=Tilted(lambda t: 1 / 0), n_runs=1)

    def test_the_result_as_plain_data_has_the_estimates(self):
        plain = tilts(n_runs=1)[0].to_dict()
        assert set(plain["kl"]) == {"value", "std_error"}
        assert set(plain["rewards"]["value"]) == {"tilted", "untilted", "chosen"}
        assert set(plain["diversity"]) == {"ancestors", "independent", "distinct"}


@pytest.mark.model
def test_a_reward_that_no_particle_has_more_of_than_another_is_told_to_change_nothing(lm):
    said = "has changed nothing"
    idle = lm.generate("Say hi.", reward=lambda t: 3.0, beta=2.0, max_tokens=8, seed=0)
    (warning,) = [w for w in idle.warnings if said in w]
    assert "(3 in the end); raise n_particles" in warning
    for options in ({"reward": len}, {"reward": lambda t: 3.0, "beta": 0.0}, {"n_particles": 1}):
        given = {"reward": lambda t: 3.0, "beta": 2.0, "max_tokens": 8, "seed": 0, **options}
        assert not any(said in w for w in lm.generate("Say hi.", **given).warnings)
