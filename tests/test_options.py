"""Options that cannot be are refused by name."""

from __future__ import annotations

import math

import pytest

from guided_smc.errors import OptionError
from guided_smc.options import make_options


@pytest.mark.parametrize(
    "option",
    [
        {"max_tokens": 0},
        {"n_particles": 0},
        {"n_particles": -3},
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_p": 0},
        {"top_p": 1.5},
        {"power": 0},
        {"block_size": -1},
        {"ess_threshold": 2},
        {"resampling": "magic"},
        {"select": "worst"},
        {"seed": -1},
        {"stop": ""},
        {"max_tokenz": 5},
    ],
    ids=str,
)
def test_an_impossible_option_is_named(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        make_options(None, **option)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_particles": 4}, "max_particles: needs target_ess"),
        ({"min_particles": 4}, "min_particles: needs target_ess"),
        ({"target_ess": 9}, "target_ess: must be at most max_particles=8, got 9"),
        ({"target_ess": 2, "n_particles": 1}, "n_particles: must be from min_particles=2"),
        ({"target_ess": 2, "max_particles": 6}, "to max_particles=6 .*got 8"),
        ({"target_ess": 2, "min_particles": 1}, "min_particles: .*got 1"),
        ({"target_ess": 0}, "target_ess: .*got 0"),
        ({"target_ess": 2, "ess_threshold": 0}, "target_ess: acts where .*ess_threshold=0"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        make_options(None, **options)
