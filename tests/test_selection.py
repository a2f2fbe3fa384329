"""How the answer is taken from the final particles."""

from __future__ import annotations

import pytest
from support import VOCABULARY, Score, request, results

from guided_smc.engine import run
from guided_smc.models.table import TableModel


def selected(select, **kwargs):
    model = TableModel(
        lambda context: [0.3, 0.25, 0.45, 0, 0, 0] if len(context) == 1 else [0, 0, 0, 0, 1, 0],
        VOCABULARY,
    )
    r = request(model, (0,), select=select, n_particles=64, ess_threshold=0, **kwargs)
    r.value_key = lambda text: text if text == "c" else "a or b"
    (result,) = results(run(model, [r]))
    return result


def test_best_is_the_particle_of_largest_weight():
    score = Score(lambda t: 1.0 if t == "b" else 0.0, prefixes=False)
    assert selected("best", potentials=[score]).text == "b"


def test_vote_adds_the_weights_of_equal_values():
    assert selected("vote").text in ("a", "b")


def test_sample_follows_the_weights_under_different_seeds():
    drawn = [selected("sample", seed=s).text for s in range(100)]
    assert 20 <= drawn.count("c") <= 70
    assert set(drawn) == {"a", "b", "c"}


def test_all_selects_each_distinct_value_heaviest_first():
    result = selected("all")
    keys = ["c" if result.particles[s].text == "c" else "ab" for s in result.selected]
    assert sorted(keys) == ["ab", "c"]
    assert [v.weight for v in result.values] == sorted(
        (v.weight for v in result.values), reverse=True
    )
    assert sum(v.weight for v in result.values) == pytest.approx(1.0)


def test_the_way_of_selection_does_not_change_the_particles():
    particles = [selected(s).particles for s in ("sample", "best", "vote", "all")]
    assert all(p == particles[0] for p in particles)
