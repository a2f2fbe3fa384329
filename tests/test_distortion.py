"""Token masking distorts, and weighted particles undo it: on models made for masking to fail."""

from collections import Counter

import pytest

MASKING_DRAWS = 400
RUNS, N = 60, 32


@pytest.fixture(scope="module")
def distortion(load):
    return load("distortion")


@pytest.fixture(scope="module")
def traps(load):
    return load("traps").TRAPS


def test_ours_is_ten_times_closer_to_the_posterior_than_masking(distortion, traps):
    for name, trap in traps.items():
        case = distortion.on_table(trap, {N: RUNS})
        assert case["masking"]["kl"] > 0.5, name
        assert case["ours"][str(N)]["smaller"] > 10, name
        assert case["ours"][str(N)]["died"] == 0


def test_what_masking_draws_is_one_particle_without_its_weight(distortion, traps):
    trap = traps["shared beginnings"]
    exact = distortion.exact_on_table(trap)
    drawn = Counter(
        result.text
        for result in trap.lm().generate(
            [""] * MASKING_DRAWS,
            output_type=trap.constraint,
            n_particles=1,
            max_tokens=distortion.MAX_TOKENS,
            seed=0,
        )
    )
    for text, share in exact.masked.items():
        assert drawn[text] / MASKING_DRAWS == pytest.approx(share, abs=0.08)
        assert exact.probabilities[text] != pytest.approx(share, abs=0.008)


def test_the_posterior_is_what_the_model_says_of_members(distortion, traps):
    trap = traps["shared beginnings"]
    members = {text: often for text, often in trap.says.items() if text != '"cow"'}
    exact = distortion.exact_on_table(trap)
    for text, often in members.items():
        said = often / sum(members.values())
        assert exact.probabilities[text] == pytest.approx(said, abs=0.02)
