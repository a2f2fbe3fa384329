"""Proposals that look at what a reward says of the next token: exact, and of less variance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from exactness import LANGUAGE, PROMPT, TARGET, assert_unbiased, runs
from support import exact
from test_tilts import BETA, Ramp, Tilted, truth, value

from guided_smc import LM
from guided_smc.errors import OptionError, PotentialError
from guided_smc.rewards import from_file, keywords, length, reward, sentiment


def looking(tilt, tokens):
    tilt.lookahead = tokens
    return tilt


def found_by(tokens, *, constrained=False, tilt=None, n_runs=200, **options):
    tilt = looking(tilt or Tilted(steers=True), tokens)
    return runs(
        n_runs,
        constraint=LANGUAGE if constrained else None,
        potentials=[tilt],
        **{"n_particles": 4, **options},
    )


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("block_size", [0, 1])
@pytest.mark.parametrize("tokens", [1, 3, 6])
def test_the_posterior_is_exact_whatever_is_looked_at(tokens, block_size, constrained):
    found = found_by(tokens, constrained=constrained, block_size=block_size)
    assert_unbiased(found, truth(constrained))


@pytest.mark.parametrize(
    "tilt",
    [Ramp(steers=True), Tilted(steers=True, adaptive=True), Tilted(steers=True, beta=-BETA)],
    ids=["ramp", "adaptive", "negative"],
)
def test_it_is_exact_under_schedules(tilt):
    found = found_by(3, tilt=tilt, ess_threshold=0.8)
    assert_unbiased(found, truth(False, tilt.beta))


def test_it_is_exact_under_a_power_a_temperature_and_stop_strings():
    options = {"temperature": 0.7, "top_p": 0.9, "power": 1.5}
    assert_unbiased(found_by(2, **options), truth(False, **options))


def test_it_is_exact_where_a_token_is_forbidden():
    def forbids(text):
        return -math.inf if "c" in text else value(text)

    masses = exact(TARGET, PROMPT, max_tokens=4, score=lambda text: BETA * forbids(text))
    found = found_by(4, tilt=Tilted(forbids, steers=True))
    assert_unbiased(found, {text: mass for text, mass in masses.items() if mass})
    # What the reward forbids is seen and never drawn.
    all_seen = found_by(6, tilt=Tilted(forbids, steers=True), n_runs=20)
    assert all("c" not in p.text for r in all_seen for p in r.particles)


def test_it_is_exact_in_islands_and_with_a_second_reward_that_does_not_look():
    blind = Tilted(lambda text: 0.5 * text.count("a"), beta=1.0, steers=True, name="blind")
    found = runs(300, potentials=[looking(Tilted(steers=True), 6), blind], n_particles=6, islands=2)
    both = exact(TARGET, PROMPT, max_tokens=4, score=lambda t: BETA * value(t) + 0.5 * t.count("a"))
    assert_unbiased(found, both)


def test_the_evidence_varies_less_than_without():
    """Where all tokens are looked at, the weights do not depend on which was drawn."""
    spread = {
        tokens: np.std([r.log_evidence for r in found_by(tokens, ess_threshold=0.5)])
        for tokens in (0, 2, 6)
    }
    assert spread[6] < 0.75 * spread[0]
    assert spread[2] < spread[0]


def test_no_pass_of_the_model_is_added():
    with_, without = found_by(6, n_runs=5), found_by(0, n_runs=5)
    for a, b in zip(with_, without, strict=True):
        longest = max(len(p.token_ids) for p in a.particles)
        assert a.usage.target_passes <= longest + 1
        assert b.usage.draft_passes == a.usage.draft_passes == 0


def test_the_methods_that_do_not_steer_do_not_look():
    for method in ("best_of_n", "soft_best_of_n", "importance"):
        looked = found_by(6, method=method, n_runs=5)
        plain = found_by(0, method=method, n_runs=5)
        assert [r.particles for r in looked] == [r.particles for r in plain]


def test_what_the_reward_raises_of_a_token_ahead_is_told():
    def raises(text):
        if text.count("b") > 1:
            raise RuntimeError("not this one")
        return 0.0

    with pytest.raises(PotentialError, match="not this one"):
        LM(TARGET).generate(
            "a",
            reward=reward(raises, on="step", lookahead=6),
            n_particles=4,
            max_tokens=6,
            seed=0,
        )


@pytest.mark.parametrize(
    "made", [lambda n: length(20, lookahead=n), lambda n: reward(len, on="step", lookahead=n)]
)
@pytest.mark.parametrize("wrong", [-1, 1.5, True, "8"])
def test_a_lookahead_that_cannot_be_is_refused(made, wrong):
    with pytest.raises(OptionError, match="lookahead must be a number of tokens"):
        made(wrong)


def test_a_lookahead_without_prefix_scores_is_refused():
    for make in (
        lambda: reward(len, lookahead=8),
        lambda: length(20, lookahead=8).with_(on="end"),
        lambda: (length(20, on="end") + keywords(["sea"], on="end")).with_(lookahead=8),
    ):
        with pytest.raises(OptionError, match=r'scores unfinished texts.*on="end"'):
            make()


def test_a_lookahead_belongs_to_the_whole(tmp_path):
    with pytest.raises(OptionError, match="lookahead belongs to the whole"):
        length(20, lookahead=8) + sentiment()
    (tmp_path / "r.yaml").write_text("lookahead: 8\nrewards: [length:20, sentiment]\n")
    assert from_file(tmp_path / "r.yaml").lookahead == 8
    assert (length(20) + sentiment()).with_(lookahead=4).lookahead == 4
