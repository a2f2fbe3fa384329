"""A choice accepts its texts and no others, and gives back the values."""

import random
from enum import Enum, IntEnum
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from languages import CONTROL, END, VOCABULARY, accepts, after, check_masks, masks
from support import VOCABULARY as LETTERS
from support import exact, request, results, unnormalised

from guided_smc.engine import run
from guided_smc.errors import ConstraintError, OutputValidationError
from guided_smc.grammars import choice
from guided_smc.models.table import TableModel
from guided_smc.vocabulary import Vocabulary


class Mixed(Enum):
    text = "a"
    number = 2
    real = 1.5
    nothing = None
    yes = True


class Level(IntEnum):
    low = 1
    high = 10


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.text("abé12\n\"'", max_size=5), min_size=1, max_size=8, unique=True),
    st.integers(0, 2**32),
)
def test_masks_are_exact_and_walks_end_in_a_choice(texts, seed):
    constraint = choice(texts)
    assert all(accepts(constraint, text) for text in texts)
    found = check_masks(constraint, random.Random(seed))
    assert found.decode() in texts
    for text in ("a", "ab", "éé", texts[0] + "a", texts[-1][:-1]):
        assert accepts(constraint, text) == (text in texts)


def test_a_choice_that_begins_another_may_end_or_go_on():
    constraint = choice(["no", "none", "not"])
    state, viable = after(constraint, b"no")
    assert viable and state.accepting
    allowed = {VOCABULARY.tokens[i] for i in masks(constraint, [state])[0].nonzero()}
    assert allowed == {b"n", b"t"}
    assert state.forced() == []
    assert state.advance(ord("n")) and not state.accepting
    assert state.forced() == [ord("e")]
    assert state.advance(ord("e")) and state.accepting and state.forced() == []
    assert not masks(constraint, [state]).any()
    assert not state.advance(ord("x")) and not state.accepting and not state.advance(ord("e"))
    assert not masks(constraint, [state, state.fork()]).any()


def test_special_and_padded_tokens_are_never_taken():
    state = choice(["<x>"]).compile(VOCABULARY).start()
    for token in (END, CONTROL, CONTROL + 1, len(VOCABULARY), -1):
        assert not state.fork().advance(token)


def test_ten_thousand_choices_are_no_matter():
    draw = random.Random(1)
    texts = sorted({f"{draw.randrange(10**9)}, {draw.randrange(100)}" for _ in range(10_000)})
    constraint = choice(texts)
    for text in draw.sample(texts, 20):
        assert accepts(constraint, text) and not accepts(constraint, text + "0")
    found = check_masks(constraint, random.Random(2))
    assert found.decode() in constraint.texts


@pytest.mark.parametrize(
    "values, texts",
    [
        (["yes", "no", "yes!"], ["yes", "no", "yes!"]),
        ([1, 2.5, True, None, "é"], ["1", "2.5", "True", "None", "é"]),
        (Mixed, ["a", "2", "1.5", "None", "True"]),
        (Level, ["1", "10"]),
        (Literal["a b", 3, None, Level.high], ["a b", "3", "None", "10"]),
        ((text for text in ("x", "")), ["x", ""]),
        (['say "hi"', "it's"], ['say "hi"', "it's"]),
    ],
)
def test_values_are_those_given(values, texts):
    constraint = choice(values)
    assert list(constraint.texts) == texts
    assert all(accepts(constraint, text) for text in texts)
    if isinstance(values, type):
        assert [constraint.parse(text) for text in texts] == list(values)
        assert all(isinstance(constraint.parse(text), values) for text in texts)
    assert [type(constraint.parse(t)) for t in texts] == [
        type(v) for v in constraint.texts.values()
    ]
    assert len({constraint.value_key(text) for text in texts}) == len(texts)


def test_the_types_of_values_are_kept():
    assert choice([True, 1]).parse("True") is True
    assert choice([True, 1]).parse("1") == 1 and choice([True, 1]).parse("1") is not True
    with pytest.raises(OutputValidationError):
        choice(["a"]).parse("b")


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ([], "nothing to choose from"),
        (Enum("Empty", []), "nothing to choose from"),
        (["a", "b", "a"], "two choices have the text 'a'"),
        ([1, "1"], "two choices have the text '1'"),
        (["a", ["b"]], "a choice is a text"),
        (["a", b"b"], "a choice is a text"),
        ("abc", "a list of texts"),
        (5, "a list of texts"),
        (["\ud800"], "surrogate"),
        (Enum("Odd", {"a": (1, 2)}), "no plain text"),
    ],
    ids=range(10),
)
def test_what_is_no_choice_is_refused(wrong, reason):
    with pytest.raises(ConstraintError, match=reason):
        choice(wrong)


def test_a_vocabulary_without_the_needed_tokens_has_an_empty_mask():
    tiny = Vocabulary([b"a", b"b", b""], eos_ids=[2])
    constraint = choice(["abc", "b"])
    state, viable = after(constraint, [0, 1], tiny)
    assert viable and not masks(constraint, [state], tiny).any()
    wrong = np.empty((2, 1), dtype=np.int32)
    with pytest.raises(ValueError, match="shape"):
        constraint.compile(tiny).fill_masks([state], wrong)


@pytest.mark.parametrize("block_size", [0, 2])
def test_the_posterior_of_a_choice_is_exact(block_size):
    texts = {"a", "ab", "abc", "cd", "dddd", "ba"}
    target = TableModel.random(LETTERS, seed=3, eos_probability=0.2)
    draft = TableModel.random(LETTERS, seed=4, eos_probability=0.2)
    truth = exact(target, (0,), max_tokens=4, member=texts.__contains__)
    total = sum(truth.values())
    options = {"max_tokens": 4, "n_particles": 4000, "block_size": block_size}
    made = [
        request(target, (0,), index=i, constraint=choice(texts), seed=i, **options)
        for i in range(8)
    ]
    each = [unnormalised(r) for r in results(run(target, made, draft=draft, max_rows=32000))]
    assert all(found.keys() <= truth.keys() for found in each)
    for text, mass in truth.items():
        found = np.mean([one.get(text, 0.0) for one in each])
        assert found == pytest.approx(mass, abs=0.03 * total)
    z = np.array([sum(one.values()) for one in each])
    assert z.mean() == pytest.approx(total, abs=4 * z.std(ddof=1) / np.sqrt(len(z)))
    assert z.std() < 0.05 * total
