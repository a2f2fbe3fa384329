"""The frontier of reward and KL, and best-of-N beside it."""

from __future__ import annotations

import itertools
import json
import math
import sys

import click
import numpy as np
import pytest
from click.testing import CliRunner
from exactness import LANGUAGE, TARGET
from support import VOCABULARY
from test_tilts import masked_law, moments, truth, value

from guided_smc import LM
from guided_smc.cli.main import cli
from guided_smc.errors import GuidedSMCError, OptionError, PotentialError
from guided_smc.sweep import best_of, soft_best_of

BETAS = (0.0, 1.0, 3.0)


def sweep(n_particles=1000, prompts="ad", **settings):
    settings = {"reward": value, "betas": BETAS, "max_tokens": 4, "seed": 0, **settings}
    return LM(TARGET).sweep(prompts, n_particles=n_particles, **settings)


def points(sweep, method):
    return {p.n if p.beta is None else p.beta: p for p in sweep.points if p.method == method}


def near(estimate, expected) -> bool:
    return abs(estimate.value - expected) <= 4 * estimate.std_error + 1e-9


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("on", ["end", "step"])
def test_the_frontier_is_the_exact_one(constrained, on):
    potential = LANGUAGE if constrained else None
    found = points(sweep(potential=potential, reward_on=on), "smc")
    log_z0 = math.log(sum(truth(constrained, 0.0).values()))
    for beta, point in found.items():
        mean, _, kl = moments(constrained, beta)
        assert near(point.tilted, mean), beta
        # From the model under the constraint, which alone has a KL of -log Z0 from the model.
        assert abs(point.kl.value - (kl + log_z0)) < 4 * point.kl.std_error + 0.1, beta
        assert point.reward.value == pytest.approx(point.tilted.value)
    assert sorted(found) == sorted(BETAS)


def test_best_of_n_is_the_mean_over_all_choices_of_n():
    rewards = np.array([0.3, -1.0, 2.0, 0.3, 5.0])
    for n in range(1, 6):
        every = [max(c) for c in itertools.combinations(rewards, n)]
        assert best_of(rewards, n) @ rewards == pytest.approx(np.mean(every))


def test_best_of_n_is_unbiased_on_an_exact_model():
    law = truth(False, 0.0)
    pairs = itertools.product(law.items(), repeat=2)
    expected = sum(
        p * q * max(value(VOCABULARY.decode(x)), value(VOCABULARY.decode(y)))
        for (x, p), (y, q) in pairs
    )
    found = points(sweep(n_particles=8, prompts=["ad"] * 150, betas=[0.0]), "best_of_n")
    assert near(found[2].reward, expected)
    assert found[2].kl.value == pytest.approx(math.log(2) - 1 / 2)
    assert found[2].target_tokens == pytest.approx(found[8].target_tokens / 4)
    assert sorted(found) == [1, 2, 4, 8]


def test_under_a_constraint_the_kl_of_candidates_counts_what_token_masking_adds():
    """Exactly: of one candidate, KL of the law of token masking from the constrained model."""
    members = truth(True, 0.0)
    z = sum(members.values())
    masked = masked_law()
    expected = sum(q * math.log(q / (members[t] / z)) for t, q in masked.items())
    found = points(sweep(betas=[0.0], potential=LANGUAGE, n_particles=4000), "best_of_n")
    assert found[1].kl.value == pytest.approx(expected, abs=0.05)
    assert expected > 0.1


def test_soft_best_of_many_is_the_tilted_posterior():
    rewards = [p.rewards["value"] for p in sweep(betas=[0.0]).results[None][0].particles]
    for beta in (0.5, 2.0):
        share, kl = soft_best_of(np.array(rewards), beta, seed=1)
        expected = moments(False, beta)
        assert share @ rewards == pytest.approx(expected[0], abs=0.06)
        assert kl == pytest.approx(expected[2], abs=0.06)


def test_soft_best_of_two_is_exact_where_both_candidates_are_known():
    """Each is chosen by the tilt beside the other."""
    share, kl = soft_best_of(np.array([0.0, 1.0]), 1.0)
    s = 1 / (1 + math.e)
    density = np.array([2 * s, 2 * (1 - s)])
    assert share[1] == pytest.approx(1 - s)
    assert kl == pytest.approx(np.mean(density * np.log(density)))
    assert soft_best_of(np.array([3.0]), 1.0)[1] == 0


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_the_kl_of_soft_best_of_n_is_that_of_its_law(beta):
    """Over runs with eight candidates, beside the density of the law from many."""
    rng = np.random.default_rng(3)
    found = [soft_best_of(rng.normal(size=8), beta)[1] for _ in range(400)]
    tilt, others = np.exp(beta * rng.normal(size=3000)), rng.normal(size=(3000, 7))
    rest = np.exp(beta * others).sum(axis=1)
    density = np.array([np.mean(8 * own / (own + rest)) for own in tilt])
    density /= density.mean()
    assert np.mean(found) == pytest.approx(np.mean(density * np.log(density)), rel=0.2)


def test_a_sweep_says_what_it_used_and_is_the_same_again():
    first, again = (sweep(n_particles=8, prompts=["ad", "a"], reward_on="step") for _ in range(2))
    assert first.points == again.points
    for point in first.points:
        assert point.target_tokens > 0 and point.prompts == 2
    assert all(p.independent >= 1 for p in first.points if p.method == "smc")


def test_the_data_and_the_plots_are_saved(tmp_path):
    found = sweep(n_particles=4, prompts=["ad", "a"])
    for name, start in {"f.json": b"{", "f.png": b"\x89PNG", "f.svg": b"<?xml"}.items():
        found.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    data = json.loads((tmp_path / "f.json").read_text())
    assert data["betas"] == list(BETAS)
    assert {p["method"] for p in data["points"]} == {"smc", "best_of_n", "soft_best_of_n"}
    with pytest.raises(OptionError, match="must end in"):
        found.save(tmp_path / "f.txt")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    found = sweep(n_particles=2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match="pip install matplotlib"):
        found.save(tmp_path / "f.png")


def test_a_plot_that_cannot_be_drawn_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    prompts = tmp_path / "p.txt"
    prompts.write_text("a\n")
    command = ["sweep", str(prompts), "--model", "./nowhere", "--reward", "length:5"]
    with pytest.raises(click.UsageError, match=r"f\.svg: a plot needs .*'guided-smc\[plot\]'"):
        CliRunner().invoke(
            cli,
            [*command, "-o", "f.json", "-o", str(tmp_path / "f.svg")],
            standalone_mode=False,
            catch_exceptions=False,
        )


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"betas": [math.inf]}, "beta must be a finite number"),
        ({"betas": []}, "betas must name at least one"),
        ({"prompts": []}, "at least one prompt"),
        ({"beta": 1.0}, "beta is the sweep's own"),
        ({"method": "importance"}, "method is the sweep's own"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_swept_is_refused(settings, message):
    with pytest.raises(OptionError, match=message):
        sweep(n_particles=2, **settings)


def test_a_prompt_of_token_ids_is_one_prompt():
    (point,) = [
        p
        for p in sweep(n_particles=2, prompts=[0, 3]).points
        if p.beta == 1.0 and p.method == "smc"
    ]
    assert point.prompts == 1


def test_a_reward_that_fails_ends_the_sweep():
    with pytest.raises(PotentialError, match="ZeroDivisionError"):
        sweep(n_particles=2, reward=lambda text: 1 / 0)


def test_the_columns_of_a_prompt_go_with_it():
    seen = []

    def noted(completions, answer):
        seen.extend(answer)
        return [0.0] * len(completions)

    lm = LM(TARGET)
    lm.sweep(
        ["ad", "a"],
        reward=noted,
        betas=[1.0],
        n_particles=2,
        max_tokens=2,
        columns=[{"answer": 1}, {"answer": 2}],
    )
    assert set(seen) == {1, 2}
    seen.clear()
    lm.generate(["ad", "a"], reward=noted, max_tokens=2, columns=[{"answer": 3}, {"answer": 4}])
    assert set(seen) == {3, 4}
    for wrong in ({"answer": [1, 2]}, [{"answer": 1}], [1, 2]):
        with pytest.raises(OptionError, match="columns"):
            lm.generate(["ad", "a"], reward=noted, max_tokens=2, columns=wrong)
    with pytest.raises(OptionError, match="columns must be a mapping"):
        lm.generate("ad", reward=noted, max_tokens=2, columns=[{"answer": 1}])


def test_prompts_without_an_answer_are_counted_and_none_at_all_is_an_error():
    def refuses(text):
        return -math.inf if text else 1.0

    found = sweep(n_particles=2, prompts=["ad"] * 20, reward=refuses, max_restarts=0)
    failed = {f["beta"]: f["prompts"] for f in found.to_dict()["failed"]}
    assert all(failed[b] + len(found.results[b]) == 20 for b in failed)
    assert failed[1.0] > 0
    with pytest.raises(GuidedSMCError, match="no prompt of the sweep had an answer"):
        sweep(n_particles=2, potential=LANGUAGE, max_tokens=1, temperature=0, top_k=1)
