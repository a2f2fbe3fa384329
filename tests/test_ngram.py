"""The n-gram draft: copies what came before, is a proper distribution, and has no zeros."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exactness import LANGUAGE, PROMPT, TARGET, assert_unbiased, member, runs
from hypothesis import given
from hypothesis import strategies as st
from support import VOCABULARY, Language, exact

from guided_smc.models.ngram import NGramModel
from guided_smc.vocabulary import Vocabulary

MODEL = NGramModel(VOCABULARY)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_every_context_has_a_proper_distribution_without_zeros(context):
    q = MODEL.probabilities(np.array(context, dtype=np.int64))
    assert q.sum() == pytest.approx(1.0)
    assert (q > 0).all()


def test_the_longest_context_that_recurs_decides_what_is_copied():
    # After "ab" came c, after a lone "b" d as well: the longer context wins.
    q = MODEL.probabilities(np.array([0, 1, 2, 3, 1, 3, 0, 1]))
    assert q.argmax() == 2
    assert q[2] > 0.75


def test_padding_is_never_proposed():
    model = NGramModel(Vocabulary([b"a", b"", None], eos_ids=[1]))
    assert model.probabilities(np.array([0, 0]))[2] == 0


def test_a_session_follows_its_rows():
    session = MODEL.start_session()
    session.prefill([[0, 1], [2]], [2, 1])
    tokens = torch.tensor([[2, 0], [3, 0], [2, 2]])
    session.extend(tokens, torch.tensor([2, 1, 2]), last_only=False)
    session.reorder(torch.tensor([1, 0]))
    logits = session.extend(torch.tensor([[0], [1]]), torch.tensor([1, 1]), last_only=True)
    for row, context in zip(logits, ([0, 1, 3, 0], [0, 1, 2, 0, 1]), strict=True):
        expected = np.log(MODEL.probabilities(np.array(context)))
        assert np.allclose(row.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("constraint", [None, LANGUAGE], ids=["free", "constrained"])
def test_the_posterior_is_that_of_any_other_draft(block_size, constraint: Language | None):
    found = runs(800, draft=MODEL, constraint=constraint, block_size=block_size, n_particles=4)
    expected = exact(TARGET, PROMPT, max_tokens=4, member=member if constraint else None)
    assert_unbiased(found, expected)
