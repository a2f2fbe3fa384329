"""The table model: texts as prompts, distributions as rows, and its own law by enumeration."""

import itertools

import pytest
from support import VOCABULARY

from guided_smc.errors import ModelError, PromptError
from guided_smc.models.table import TableModel

TARGET = TableModel.random(VOCABULARY, seed=11, eos_probability=0.1)


def test_table_models_encode_texts_and_refuse_what_they_cannot_spell():
    assert TARGET.encode("abd") == [0, 1, 3]
    assert TARGET.encode("") == [4]
    assert TARGET.encode([1, 2]) == [1, 2]
    with pytest.raises(PromptError):
        TARGET.encode("xyz")
    with pytest.raises(PromptError):
        TARGET.encode([9])


def test_a_table_whose_row_is_no_distribution_is_refused():
    for row in ([0.5, 0.1, 0, 0, 0, 0], [1.5, -0.5, 0, 0, 0, 0], [1.0]):
        model = TableModel(lambda context, row=row: row, VOCABULARY)
        with pytest.raises(ModelError, match="row of context"):
            model.probabilities((0,))


def test_table_models_enumerate_their_own_law():
    model = TableModel.random(VOCABULARY, seed=9, eos_probability=0.5)
    law = model.enumerate((0,), 6)
    assert sum(law.values()) == pytest.approx(1 - 0.5**7, rel=1e-6)
    for text in itertools.islice(law, 50):
        p = 1.0
        for i, token in enumerate(text):
            p *= model.probabilities((0, *text[:i]))[token]
        assert law[text] == pytest.approx(p * 0.5, rel=1e-6)
