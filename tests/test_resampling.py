"""The resampling schemes: how many offspring each particle gets, and where they go."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_smc.resampling import SCHEMES, keep_in_place, normalise

# Far enough from 0 and from each other for a midpoint to lie inside every piece.
weights = st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 40]), min_size=1, max_size=6).filter(any)
numbers = st.integers(1, 9)


def expected_offspring(scheme, w: np.ndarray, n_offspring: int) -> np.ndarray:
    """`E[#{i : ancestors[i] = n}]` over uniform randomness, float64 `[N]`.

    Every scheme's counts are a sum over its uniforms, each a step function of one of them. So it
    does no harm to the mean to let all of them be the same, and to go through the pieces.
    """
    expected = n_offspring * w
    certain = np.floor(expected * (1 + 1e-12))
    rest = np.cumsum(np.maximum(expected - certain, 0.0))
    cdf = np.cumsum(w)
    shifts = n_offspring * cdf[:, None] - np.arange(n_offspring)
    cuts = [cdf, rest / max(rest[-1], 1e-300), shifts.ravel()]
    edges = np.unique(np.clip(np.concatenate([[0.0, 1.0], *cuts]), 0, 1))
    found = np.zeros(len(w))
    for low, high in itertools.pairwise(edges):
        ancestors = SCHEMES[scheme](w, np.full(n_offspring, (low + high) / 2))
        found += (high - low) * np.bincount(ancestors, minlength=len(w))
    return found


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@given(weights=weights, n_offspring=numbers)
def test_the_expected_offspring_of_a_particle_is_its_weight_times_their_number(
    scheme, weights, n_offspring
):
    w = np.array(weights) / np.sum(weights)
    found = expected_offspring(scheme, w, n_offspring)
    assert found == pytest.approx(n_offspring * w, abs=1e-9)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@given(weights=weights, n_offspring=numbers, seed=st.integers(0, 99))
def test_every_scheme_gives_the_number_asked_for_and_none_to_weight_zero(
    scheme, weights, n_offspring, seed
):
    w = np.array(weights) / np.sum(weights)
    ancestors = SCHEMES[scheme](w, np.random.default_rng(seed).random(n_offspring))
    assert ancestors.shape == (n_offspring,)
    assert np.all(w[ancestors] > 0)


@pytest.mark.parametrize("scheme", ["systematic", "stratified", "residual"])
@given(weights=weights, n_offspring=numbers, seed=st.integers(0, 99))
def test_no_particle_loses_more_than_the_scheme_says(scheme, weights, n_offspring, seed):
    w = np.array(weights) / np.sum(weights)
    ancestors = SCHEMES[scheme](w, np.random.default_rng(seed).random(n_offspring))
    counts = np.bincount(ancestors, minlength=len(w))
    least = np.floor(n_offspring * w * (1 + 1e-12)) - (scheme == "stratified")
    assert np.all(counts >= least)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12))
def test_survivors_keep_their_slots_as_far_as_these_are_left(ancestors):
    placed = keep_in_place(np.array(ancestors))
    assert sorted(placed) == sorted(ancestors)
    for slot in set(ancestors):
        assert slot >= len(ancestors) or placed[slot] == slot


def test_log_weights_of_any_size_are_normalised():
    assert normalise(np.array([-1e5, -1e5, -np.inf])).tolist() == [0.5, 0.5, 0.0]
