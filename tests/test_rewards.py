"""How functions become rewards, and what happens when they misbehave."""

import functools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from guided_smc.errors import OptionError, PotentialError
from guided_smc.potentials import Completion
from guided_smc.rewards import reward
from guided_smc.vocabulary import Vocabulary

VOCABULARY = Vocabulary([b""], eos_ids=[0])


def texts(*given, finished=True):
    return [Completion(f"prompt {i}", (), t, finished, VOCABULARY) for i, t in enumerate(given)]


def batch(completions):
    return [len(c) for c in completions]


def batch_of_trl(prompts, completions, **kwargs):
    assert set(kwargs) == {"completion_ids"}
    return [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]


def batch_by_keyword(*, completions, scale=1):
    return [scale * len(c) for c in completions]


def batch_of_anything(**kwargs):
    assert set(kwargs) == {"prompts", "completions", "completion_ids"}
    return [len(c) for c in kwargs["completions"]]


def per_text(text):
    return len(text)


def per_text_with_options(text, scale=1, *, offset=0, **rest):
    assert not rest
    return scale * len(text) + offset


class PerText:
    def __call__(self, text):
        return len(text)

    def method(self, text):
        return len(text)


class Batch:
    def __call__(self, completions, **kwargs):
        return [len(c) for c in completions]


@pytest.mark.parametrize(
    "fn, convention",
    [
        (batch, "batch"),
        (batch_by_keyword, "batch"),
        (batch_of_anything, "batch"),
        (Batch(), "batch"),
        (functools.partial(batch_by_keyword, scale=1), "batch"),
        (lambda completions: [len(c) for c in completions], "batch"),
        (per_text, "text"),
        (per_text_with_options, "text"),
        (PerText(), "text"),
        (PerText().method, "text"),
        (functools.partial(lambda scale, text: scale * len(text), 1), "text"),
        (lambda t: len(t), "text"),
        (lambda *texts: len(texts[0]), "text"),
        (len, "text"),
    ],
    ids=range(14),
)
def test_the_signature_tells_the_convention(fn, convention):
    scored = reward(fn, beta=0.5)
    assert scored.convention == convention
    assert scored.log_complete(texts("ab", "", "abcd")) == [1.0, 0.0, 2.0]


def test_a_builtin_without_a_signature_is_called_with_a_text():
    assert reward(max, beta=1).convention == "text"
    assert reward(int, beta=2).log_complete(texts("3", "-4")) == [6.0, -8.0]


def test_prompts_are_passed_to_those_who_take_them():
    given = texts("ab", "abc")
    assert reward(batch_of_trl).log_complete(given) == [len("prompt 0") + 2, len("prompt 1") + 3]


@pytest.mark.parametrize(
    "fn",
    [
        lambda prompt, text: 0.0,
        lambda prompts, answers: [0.0],
        lambda text, *, reference: 0.0,
        lambda: 0.0,
        lambda *, text: 0.0,
        "not callable",
        None,
    ],
    ids=range(7),
)
def test_a_signature_that_fits_neither_convention_is_refused_at_once(fn):
    with pytest.raises(OptionError):
        reward(fn)


@pytest.mark.parametrize("beta", [math.inf, math.nan, "1", True, None])
def test_beta_must_be_a_finite_number(beta):
    with pytest.raises(OptionError, match="beta"):
        reward(len, beta=beta)


@pytest.mark.parametrize("on", ["start", "prefix", None, 1])
def test_an_unknown_time_to_speak_is_refused_with_the_known_ones(on):
    with pytest.raises(OptionError, match='"step", "sentence", "line", "field", "end"'):
        reward(len).with_(on=on or "")


def test_only_a_reward_on_prefixes_scores_prefixes():
    given = texts("ab", "abc", finished=False)
    end, prefix = reward(len, beta=2), reward(len, beta=2, on="step")
    assert (end.scores_prefixes, prefix.scores_prefixes) == (False, True)
    assert end.log_prefix(given) == [0.0, 0.0]
    assert prefix.log_prefix(given) == prefix.log_complete(given) == [4.0, 6.0]


def test_names_come_from_the_function():
    assert reward(per_text).name == "per_text"
    assert reward(functools.partial(batch_by_keyword, scale=2)).name == "batch_by_keyword"
    assert reward(PerText()).name == "PerText"
    assert reward(len, name="length").name == "length"


def test_equal_texts_are_scored_once():
    seen = []

    def score(text):
        seen.append(text)
        return float(len(text))

    assert reward(score).log_complete(texts("a", "bb", "a", "a")) == [1.0, 2.0, 1.0, 1.0]
    assert seen == ["a", "bb"]


def test_beta_zero_is_weight_one_and_the_reward_is_still_told():
    scored = reward(len, beta=0, on="step")
    assert scored.rewards(texts("a", "bb")) == [1.0, 2.0]
    assert scored.log_complete(texts("a", "bb")) == [0.0, 0.0]
    assert scored.log_prefix(texts("a", finished=False)) == [0.0]
    impossible = reward(lambda text: -math.inf, beta=0)
    assert impossible.rewards(texts("a")) == [-math.inf]
    assert impossible.log_complete(texts("a")) == [0.0]


def test_no_texts_are_no_call():
    def never(completions):
        raise AssertionError

    assert reward(never).log_complete([]) == []


@pytest.mark.parametrize(
    "value, expected",
    [
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
        (-math.inf, -math.inf),
        (-(10**400), -math.inf),
    ],
    ids=str,
)
def test_every_kind_of_real_number_is_a_score(value, expected):
    assert reward(lambda text: value).log_complete(texts("a")) == [expected]
    assert reward(lambda completions: [value]).log_complete(texts("a")) == [expected]


@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, torch.tensor, iter, lambda v: torch.tensor(v, dtype=torch.bfloat16)],
    ids=["list", "tuple", "numpy", "torch", "iterator", "bfloat16"],
)
def test_every_kind_of_sequence_holds_the_scores_of_a_batch(make):
    scored = reward(lambda completions: make([0.5, -2.0]), beta=2)
    assert scored.log_complete(texts("a", "b")) == [1.0, -4.0]


@pytest.mark.parametrize(
    "value", ["0.5", 1j, [0.5], (0.5,), np.array([0.5]), torch.ones(1), {}, b"1", object()]
)
def test_what_is_no_number_is_an_error_that_shows_it(value):
    for fn in (lambda text: value, lambda completions: [value] * len(completions)):
        with pytest.raises(PotentialError, match="not a number") as failed:
            reward(fn, name="odd").log_complete(texts("the text"))
        assert type(value).__name__ in str(failed.value)
        assert (failed.value.potential, failed.value.text) == ("odd", "the text")


@pytest.mark.parametrize(
    "value, beta",
    [(math.nan, 1), (math.inf, 1), (-math.inf, -1), (1e308, 100.0), (10**400, 1), (math.nan, -1)],
)
def test_nan_and_infinite_weights_are_errors(value, beta):
    def fn(text):
        return value if text == "bad" else 0.0

    with pytest.raises(PotentialError, match=r"fn.*returned.*bad") as failed:
        reward(fn, beta=beta).log_complete(texts("good", "bad"))
    assert failed.value.text == "bad"


def test_an_exception_is_named_with_the_text_and_chained():
    def picky(text):
        if text == "bad":
            raise KeyError("missing")
        return 0.0

    with pytest.raises(PotentialError, match=r"picky.*KeyError.*missing.*'bad'") as failed:
        reward(picky).log_complete(texts("good", "bad"))
    assert failed.value.text == "bad"
    assert isinstance(failed.value.__cause__, KeyError)


def test_an_exception_in_a_batch_names_a_text_if_there_is_one():
    def fails(completions):
        raise RuntimeError("no")

    def fails_late(completions):
        yield 1.0
        raise RuntimeError("no")

    for fn in (fails, fails_late):
        with pytest.raises(PotentialError, match=r"2 texts.*'a'") as failed:
            reward(fn).log_complete(texts("a", "b"))
        assert failed.value.text == "a"
        with pytest.raises(PotentialError, match="RuntimeError: no") as failed:
            reward(fn).log_complete(texts("a", "a"))
        assert failed.value.text == "a"


def test_a_keyboard_interrupt_is_not_an_error_of_the_reward():
    def interrupted(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reward(interrupted).log_complete(texts("a"))


@pytest.mark.parametrize("returned", [[0.5], [0.5] * 3, [], np.zeros(5)])
def test_a_wrong_number_of_scores_is_an_error_with_both_numbers(returned):
    with pytest.raises(PotentialError, match=f"returned {len(returned)} scores for 2 texts"):
        reward(lambda completions: returned).log_complete(texts("a", "b"))


@pytest.mark.parametrize("returned", [0.5, np.float64(0.5), torch.tensor(0.5), None, "ab", {1: 2}])
def test_a_batch_function_must_return_a_sequence(returned):
    with pytest.raises(PotentialError, match=r"batch convention, because.*`completions`"):
        reward(lambda completions: returned).log_complete(texts("a", "b"))


def test_a_text_function_that_returns_a_list_is_told_its_convention():
    with pytest.raises(PotentialError, match=r"text convention, because.*one positional"):
        reward(lambda samples: [0.0 for _ in samples]).log_complete(texts("ab"))


def test_a_long_text_is_shortened_in_the_message_and_whole_in_the_attribute():
    with pytest.raises(PotentialError) as failed:
        reward(lambda text: None).log_complete(texts("x" * 10_000))
    assert len(str(failed.value)) < 600
    assert failed.value.text == "x" * 10_000
