"""What all rewards share: when they speak, how β grows, arithmetic, bounds."""

import math

import numpy as np
import pytest
from reward_texts import completion, completions, unfinished

from guided_smc.errors import OptionError, PotentialError
from guided_smc.rewards import Reward, reward
from guided_smc.rewards.boundaries import CUTS


class Letters(Reward):
    """Counts a letter, and remembers what it was asked."""

    def __init__(self, letter: str, **settings) -> None:
        super().__init__(**{"name": letter, **settings})
        self.letter = letter
        self.asked: list[str] = []

    def score(self, given):
        self.asked += [c.text for c in given]
        return [c.text.count(self.letter) for c in given]


class Lookahead(Letters):
    natural_on = "step"

    def estimate(self, given):
        return [10 + v for v in self.score(given)]


def test_a_class_that_only_scores_is_a_reward():
    a = Letters("a", beta=2)
    assert a.rewards(completions("banana", "b")) == [3.0, 0.0]
    assert a.log_complete(completions("banana")) == [6.0]
    assert not a.scores_prefixes
    assert a.prefix_rewards(unfinished("banana")) == [0.0]


def test_an_estimate_replaces_the_score_of_unfinished_texts_only():
    a = Lookahead("a")
    assert a.prefix_rewards(unfinished("banana")) == [13.0]
    assert a.rewards(completions("banana")) == [3.0]


def test_errors_of_a_class_name_it_and_the_text():
    class Bad(Reward):
        def score(self, given):
            return [self.what] * len(given)

    for what, message in ((math.nan, "nan"), ("1", "'1'"), (None, "None"), (2.5, "bounds")):
        bad = Bad(name="bad one", bounds=(0, 1))
        bad.what = what
        with pytest.raises(PotentialError, match=rf"'bad one'.*{message}.*'the text'") as failed:
            bad.rewards(completions("the text"))
        assert (failed.value.potential, failed.value.text) == ("bad one", "the text")


def test_a_wrong_number_of_scores_is_an_error():
    class Bad(Reward):
        def score(self, given):
            return [1.0]

    with pytest.raises(PotentialError, match="1 scores for 2 texts"):
        Bad().rewards(completions("a", "b"))


# -- when it speaks --------------------------------------------------------------------------


SENTENCES = [
    ("", None),
    ("He said", None),
    ("He said.", None),  # more dots, or a digit, may follow
    ("He said. ", "He said."),
    ("He said. And then", "He said."),
    ("Really?! ", "Really?!"),
    ('"Really?" she', '"Really?"'),
    ("(He did.) So", "(He did.)"),
    ("It is 3.14 m long", None),
    ("J. R. R. Tolkien wrote. Then", "J. R. R. Tolkien wrote."),
    ("Mr. Smith and Dr. No", None),
    ("We saw e.g. ships, i.e. boats", None),
    ("1. First\n2. Second", None),
    ("1. First it rained. Then\n2. It", "1. First it rained."),
    ("Wait… what", "Wait…"),
    ("Wait... what", "Wait..."),
    ("海は広い。大きい", "海は広い。"),
    ("「広い。」と", "「広い。」"),
    ("A heading\n\nText", "A heading"),
    ("visit example.com now", None),
    ("One. Two! Three? four", "One. Two! Three?"),
]


@pytest.mark.parametrize("text, cut", SENTENCES)
def test_sentences_end_where_readers_would_say(text, cut):
    end = CUTS["sentence"](text)
    assert (None if end is None else text[:end]) == cut


@pytest.mark.parametrize(
    "text, cut",
    [
        ("one", None),
        ("one\n", "one"),
        ("one\ntwo", "one"),
        ("one\n\ntw", "one"),
        ("\n\nx", None),
        ("one\ntwo\n", "one\ntwo"),
    ],
)
def test_lines_end_at_their_breaks(text, cut):
    end = CUTS["line"](text)
    assert (None if end is None else text[:end]) == cut


@pytest.mark.parametrize("on", ["sentence", "line", "field"])
def test_a_cut_never_moves_back_as_the_text_grows(on):
    texts = [t for t, _ in SENTENCES] + [
        '{"a": [1, {"b": "x. y\\n"}], "c": 120}\n and on',
        "a\nb\n",
    ]
    for text in texts:
        ends = [CUTS[on](text[:n]) or 0 for n in range(len(text) + 1)]
        assert ends == sorted(ends), text


def test_between_boundaries_the_score_is_held_and_not_asked_for_again():
    a = Letters("a", on="sentence")
    text = "A banana. Another apple. And an"
    values = [a.prefix_rewards(unfinished(text[:n]))[0] for n in range(len(text) + 1)]
    assert values == [0.0] * 10 + [3.0] * 15 + [4.0] * 7
    assert a.asked == ["A banana.", "A banana. Another apple."]
    assert a.rewards(completions(text)) == [5.0]


def test_what_is_cut_has_the_tokens_that_lie_in_it():
    class Tokens(Reward):
        natural_on = "line"

        def score(self, given):
            return [len(c.token_ids) for c in given]

    assert Tokens().prefix_rewards(unfinished("one\ntwo")) == [3.0]


def test_texts_of_other_prompts_or_columns_are_not_confused():
    by_prompt = reward(lambda completions, prompts, **_: map(len, prompts), on="line")
    for prompt in ("a", "bb", "a"):
        assert by_prompt.prefix_rewards(unfinished("x\n", prompt=prompt)) == [len(prompt)]
    by_column = reward(lambda completions, answer: answer, on="line")
    for answer in (1, 2, 1):
        given = unfinished("x\n", columns={"answer": answer})
        assert by_column.prefix_rewards(given) == [answer]


def test_an_unknown_time_is_an_error():
    with pytest.raises(OptionError, match='"sentence"'):
        Letters("a", on="word")


# -- schedules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [2.0, 2.0, 2.0]),
        ("adaptive", [2.0, 2.0, 2.0]),
        ("linear", [0.0, 1.0, 2.0]),
        (2, [0.0, 2.0, 2.0]),
        (8, [0.0, 0.5, 1.0]),
        (lambda n: n / 10, [0.0, 0.4, 0.8]),
        (lambda n: np.float32(0.5), [1.0, 1.0, 1.0]),
    ],
    ids=["constant", "adaptive", "linear", "2", "8", "function", "float32"],
)
def test_beta_grows_with_the_tokens(schedule, expected):
    a = Letters("a", beta=2, schedule=schedule)
    given = unfinished("", "ab", "abcd", max_tokens=4)
    assert [a.prefix_beta(c) for c in given] == pytest.approx(expected)
    assert a.log_complete(completions("aaa", max_tokens=4)) == [6.0]
    assert a.adaptive == (schedule == "adaptive")


@pytest.mark.parametrize(
    "schedule", ["slow", 0, -3, True, 2.5, None, lambda n: 2.0, lambda n: "x", lambda: 1, [1]]
)
def test_a_schedule_that_cannot_be_is_refused(schedule):
    with pytest.raises(OptionError, match="schedule"):
        Letters("a", schedule=schedule)


def test_a_schedule_that_goes_wrong_later_is_an_error_with_the_place():
    late = Letters("late", schedule=lambda n: float(n))
    with pytest.raises(PotentialError, match=r"'late'.*returned 2.0 at 2 tokens"):
        late.prefix_beta(completion("ab", finished=False))
    fails = Letters("fails", schedule=lambda n: 1 / (1 - n) if n else 0.0)
    with pytest.raises(PotentialError, match=r"'fails'.*ZeroDivisionError at 1 tokens"):
        fails.prefix_beta(completion("a", finished=False))


def test_linear_without_a_length_cap_is_an_error():
    with pytest.raises(PotentialError, match="max_tokens"):
        Letters("a", schedule="linear").prefix_beta(completion("a", finished=False))


# -- copies ----------------------------------------------------------------------------------


def test_a_copy_has_what_was_changed_and_the_original_stays():
    a = Letters("a")
    b = a.with_(beta=3, on="step", schedule=5, name="b")
    assert (b.beta, b.on, b.schedule, b.name, b.letter) == (3.0, "step", 5, "b", "a")
    assert (a.beta, a.on, a.schedule, a.name) == (1.0, "end", "constant", "a")
    assert b.with_(beta=2).on == "step"
    assert a.with_(schedule="adaptive").adaptive
    assert not a.with_(schedule="adaptive").with_(schedule="constant").adaptive
    for wrong in ({"beta": math.inf}, {"on": "never"}, {"schedule": 0}):
        with pytest.raises(OptionError):
            a.with_(**wrong)


# -- arithmetic ------------------------------------------------------------------------------


def value(r: Reward, text: str) -> float:
    (found,) = r.rewards(completions(text))
    return found


def test_arithmetic_is_that_of_the_scores():
    a, b = Letters("a"), Letters("b")
    text = "aab"
    assert value(0.7 * a + 0.3 * b, text) == pytest.approx(1.7)
    assert value(a - b, text) == 1.0
    assert value(-a, text) == -2.0
    assert value(a / 4, text) == 0.5
    assert value(a * 2, text) == value(np.float64(2) * a, text) == 4.0
    assert value(1 - a, text) == -1.0
    assert value(a + 3, text) == 5.0
    assert value(sum([a, b]), text) == 3.0
    assert value((a + b).clip(0, 1), text) == 1.0
    assert value(a.clip(low=5), text) == 5.0
    assert value(a.standardised(1, 4), text) == 0.25
    assert value(2 * (a - b) - (a - b), text) == 1.0


def test_names_show_the_arithmetic():
    a, b = Letters("a"), Letters("b")
    assert (0.7 * a + 0.3 * b).name == "0.7*a + 0.3*b"
    assert (a - 2 * b).name == "a - 2*b"
    assert (-a).name == "-a"
    assert (a / 2 + 1).name == "0.5*a + 1"
    assert (2 * (a + b)).name == "2*a + 2*b"
    assert (a - (a - b)).name == "a - a + b"
    assert a.clip(0, 1).name == "clip(a, 0, 1)"
    assert ((a + b).clip(high=1) * 2).name == "2*clip(a + b, -inf, 1)"
    style = (a + b).with_(name="style")
    assert (2 * style - a).name == "2*style - a"


def test_a_product_of_rewards_is_a_product_of_potentials():
    a, b = Letters("a", beta=2), Letters("b")
    product = a * b
    assert product.factors() == (a, b)
    assert product.log_complete(completions("aab")) == [5.0]


def test_bounds_follow_the_arithmetic():
    a, b = Letters("a", bounds=(0, 10)), Letters("b", bounds=(-1, 1))
    assert (2 * a - b).bounds == (-1.0, 21.0)
    assert (a / 2 + 1).bounds == (1.0, 6.0)
    assert (a + Letters("c")).bounds is None
    assert a.clip(2, 5).bounds == (2.0, 5.0)
    assert a.clip(12, 15).bounds == (12.0, 12.0)
    assert a.clip(high=3).bounds == (0.0, 3.0)
    assert a.normalised().bounds == (0.0, 1.0)
    assert value(a.normalised(), "aab") == 0.2
    assert a.standardised(5, 5).bounds == (-1.0, 1.0)
    assert Letters("c").clip(0, 4).normalised().bounds == (0.0, 1.0)


def test_what_cannot_be_normalised_or_clipped_says_why():
    a = Letters("a")
    for make, message in (
        (a.normalised, "bounds of 'a' are not known"),
        (Letters("a", bounds=(1, 1)).normalised, "not finite and apart"),
        (Letters("a", bounds=(0, math.inf)).normalised, "not finite and apart"),
        (lambda: a.clip(2, 1), "clip takes"),
        (lambda: a.clip("0"), "clip takes"),
        (lambda: a.standardised(0, 0), "standardised takes"),
        (lambda: a / 0, "divided by 0"),
        (lambda: math.inf * a, "finite"),
        (lambda: a + math.nan, "finite"),
        (lambda: Letters("a", bounds=(2, 1)), "bounds"),
        (lambda: Letters("a", bounds=3), "bounds"),
    ):
        with pytest.raises(OptionError, match=message):
            make()
    with pytest.raises(TypeError):
        a + "b"


@pytest.mark.parametrize(
    "part, what",
    [(Letters("part", beta=2), "beta=2"), (Letters("part", schedule="linear"), "schedule")],
)
def test_beta_and_schedule_belong_to_the_whole(part, what):
    b = Letters("b")
    for make in (
        lambda: part + b,
        lambda: 0.5 * part,
        lambda: -part,
        lambda: part.clip(0, 1),
        lambda: b - part,
    ):
        with pytest.raises(OptionError, match=rf"'part' has {what}.*belongs to the whole"):
            make()
    whole = (b + Letters("part")).with_(beta=2, schedule="linear")
    assert whole.log_complete(completions("b")) == [2.0]


def test_every_part_of_a_sum_keeps_its_own_time_and_a_silent_one_adds_nothing():
    a = Letters("a", bounds=(-100, 100), on="sentence")
    b = Lookahead("b")
    end = Letters("c")
    whole = a.normalised() + b + end + 100
    assert whole.scores_prefixes
    text = "ab. cab"
    assert whole.prefix_rewards(unfinished("a", "ab. ca")) == [
        pytest.approx(100 + 10),
        pytest.approx(100 + 11 + 101 / 200),
    ]
    assert whole.rewards(completions(text)) == [pytest.approx(100 + 102 / 200 + 2 + 1)]
    silent = a + 100
    assert silent.prefix_rewards(unfinished("aaa")) == [0.0]
    assert not (end + 1).scores_prefixes


def test_a_time_given_to_a_sum_is_that_of_all_its_parts():
    whole = (Letters("a") + Letters("b", on="line")).with_(on="step")
    assert whole.on == "step"
    assert whole.prefix_rewards(unfinished("ab")) == [2.0]
    assert (Letters("a") + Letters("b", on="line")).on is None


def test_a_part_that_occurs_twice_is_asked_once():
    a = Letters("a")
    whole = a + a.clip(0, 1) - 0.5 * a
    assert whole.rewards(completions("aa", "b")) == [2.0, 0.0]
    assert a.asked == ["aa", "b"]


def test_infinities_are_kept_or_named():
    never = reward(lambda text: -math.inf, name="never")
    a = Letters("a")
    assert (a + never).log_complete(completions("a")) == [-math.inf]
    assert (a + 0 * never).log_complete(completions("a")) == [1.0]
    with pytest.raises(PotentialError, match="infinite"):
        (a - never).log_complete(completions("a"))
    with pytest.raises(PotentialError, match="infinity minus infinity"):
        (never - reward(lambda text: -math.inf)).rewards(completions("a"))
