"""The ready rewards that read texts, against numbers worked out by hand."""

import math
import sys

import pytest
from reward_texts import completion, completions, unfinished

from guided_smc.errors import OptionError, PotentialError
from guided_smc.rewards import field, keywords, length, matches, readability, sentiment
from guided_smc.rewards.texts import readability_of


def value(r, text):
    (found,) = r.rewards(completions(text))
    return found


def prefix_value(r, text):
    (found,) = r.prefix_rewards(unfinished(text))
    return found


# -- length ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, whole, begun",
    [(0, -1.0, 0.0), (5, -0.5, 0.0), (10, 0.0, 0.0), (12, -0.2, -0.2), (30, -2.0, -2.0)],
)
def test_length_counts_both_ways_at_the_end_and_too_much_before(n, whole, begun):
    assert value(length(10), "x" * n) == pytest.approx(whole)
    assert prefix_value(length(10), "x" * n) == pytest.approx(begun)


def test_length_within_its_band_is_zero():
    banded = length(10, band=3)
    assert [value(banded, "x" * n) for n in (6, 7, 10, 13, 15)] == pytest.approx(
        [-0.1, 0, 0, 0, -0.2]
    )


def test_length_counts_words_or_tokens():
    assert value(length(4, unit="words"), "one two  three\n") == -0.25
    assert value(length(4, unit="tokens"), "abcde") == -0.25
    assert length(4, beta=2, on="end").log_complete(completions("ab")) == [-1.0]


# -- keywords and patterns -------------------------------------------------------------------


def test_keywords_are_whole_words_in_any_case():
    both = keywords(["sea", "blue whale"])
    assert value(both, "The Sea, the SEA") == 0.5
    assert value(both, "seaside and blue  \n whale") == 0.5
    assert value(both, "a blue whale at sea.") == 1.0
    assert value(keywords(["C++", "sea", "Sea "]), "c++, not c") == pytest.approx(1 / 3)


def test_a_word_that_may_still_grow_does_not_count_yet():
    sea = keywords(["sea"])
    assert [prefix_value(sea, t) for t in ("the sea", "the seaside", "the sea ")] == [0, 0, 1]
    assert value(sea, "the sea") == 1.0


def test_patterns_are_present_or_counted():
    assert value(matches(r"\d+"), "a 12 b 3") == 1.0
    assert value(matches(r"\d+"), "none") == 0.0
    assert value(matches(r"\d+", count=True), "a 12 b 3") == 2.0
    assert matches("a").normalised().bounds == (0.0, 1.0)


# -- readability -----------------------------------------------------------------------------

# 6 + 8 words in 2 sentences, 6 + 17 syllables, 17 + 43 letters.
PROSE = "The cat sat on the mat. Every morning, a curious animal explored the garden."


@pytest.mark.parametrize(
    "metric, expected",
    [
        ("flesch_kincaid_grade", 0.39 * 14 / 2 + 11.8 * 23 / 14 - 15.59),
        ("flesch_reading_ease", 206.835 - 1.015 * 14 / 2 - 84.6 * 23 / 14),
        ("automated_readability_index", 4.71 * 60 / 14 + 0.5 * 14 / 2 - 21.43),
        ("coleman_liau_index", 5.88 * 60 / 14 - 29.6 * 2 / 14 - 15.8),
    ],
)
def test_readability_is_the_formula_over_counts_made_by_hand(metric, expected):
    assert readability_of(PROSE, metric) == pytest.approx(expected)
    assert value(readability(5, metric=metric), PROSE) == pytest.approx(-abs(expected - 5))


def test_readability_of_odd_texts():
    assert readability_of("") == readability_of("...") == 0.0
    assert readability_of("Word") == pytest.approx(0.39 + 11.8 - 15.59)
    # No sentence ends at an initial or a decimal point; numbers are words of one syllable.
    one = readability_of("J. R. paid 3.50 today", "automated_readability_index")
    assert one == pytest.approx(4.71 * 14 / 6 + 0.5 * 6 - 21.43)


def test_readability_is_held_until_a_sentence_ends():
    r = readability(5)
    assert prefix_value(r, "The cat sat on") == 0.0
    assert prefix_value(r, "The cat sat. Every") == value(r, "The cat sat.")


# -- sentiment -------------------------------------------------------------------------------


def test_sentiment_orders_texts_and_stays_within_its_bounds():
    s = sentiment()
    texts = ["I hate this horrible thing.", "This is a table.", "What a lovely, happy day!"]
    bad, plain, good = (value(s, t) for t in texts)
    assert -1 <= bad < -0.3 < plain == 0.0 < 0.3 < good <= 1
    assert s.bounds == (-1.0, 1.0)
    assert prefix_value(s, "What a lovely, happy day! And") == good
    assert prefix_value(s, "What a lovely, happy day") == 0.0


@pytest.mark.parametrize(
    "make, module, package",
    [
        (sentiment, "vaderSentiment.vaderSentiment", "vaderSentiment"),
        (lambda: readability(5), "syllapy", "syllapy"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, make, module, package):
    from guided_smc.rewards.texts import _sentiment_analyzer

    _sentiment_analyzer.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(OptionError, match=rf"pip install {package}"):
        make()


def test_metrics_without_syllables_need_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "syllapy", None)
    assert value(readability(5, metric="coleman_liau_index"), PROSE) < 0


# -- fields ----------------------------------------------------------------------------------


def test_a_field_speaks_from_when_it_is_closed():
    adult = field(lambda person: person.age >= 18)
    text = '{"name": "Ann", "age": 120, "at": {"x": 1}}'
    said = [prefix_value(adult, text[:n]) for n in range(len(text))]
    closes = text.index("120") + 3
    assert said == [0.0] * (closes + 1) + [1.0] * (len(text) - closes - 1)
    assert value(adult, text) == 1.0
    as_it_grows = field(lambda person: person["age"] >= 18, on="step")
    assert [prefix_value(as_it_grows, text[:n]) for n in range(len(text))] == said


def test_a_number_that_may_grow_is_never_judged():
    seen = []
    age = field(lambda person: seen.append(person.age) or 0, on="step")
    text = '{"age": 120, "x": 1}'
    for n in range(len(text) + 1):
        prefix_value(age, text[:n])
    assert set(seen) == {120}


def test_what_depends_on_an_open_list_waits_for_its_end():
    total = field(lambda order: sum(item.price for item in order["items"]))
    text = '{"items": [{"price": 2}, {"price": 3}], "paid": true}'
    closes = text.index("]")
    said = [prefix_value(total, text[:n]) for n in range(len(text))]
    assert said == [0.0] * (closes + 1) + [5.0] * (len(text) - closes - 1)
    first = field(lambda order: order["items"][0].price)
    assert prefix_value(first, text[: closes - 5]) == 2.0


def test_a_missing_field_is_silence_before_the_end_and_an_error_there():
    age = field(lambda person: person.at.age, name="age")
    assert prefix_value(age, '{"at": {"x": 1}, ') == 0.0
    with pytest.raises(PotentialError, match=r"'age' got a text that lacks a field.*'age'"):
        value(age, '{"at": {"x": 1}}')
    with pytest.raises(PotentialError, match="no JSON"):
        value(age, '{"at": ')
    lenient = field(lambda person: person.age, default=-1)
    for text in ("{}", "no json", '{"age": ', "3", '"text"', "null"):
        assert value(lenient, text) == -1.0
        assert prefix_value(lenient, text + " ") == 0.0
    first = field(lambda order: order["items"][0], default=7)
    assert value(first, '{"items": []}') == 7.0
    assert value(field(lambda n: n > 2), "3") == 1.0


def test_an_error_in_the_predicate_is_no_silence():
    broken = field(lambda person: person.name + 1)
    for ask in (broken.rewards, broken.prefix_rewards):
        with pytest.raises(PotentialError, match="TypeError"):
            ask(completions('{"name": "Ann", "age": 1}'))
    nothing = field(lambda person: None)
    for ask in (nothing.rewards, nothing.prefix_rewards):
        with pytest.raises(PotentialError, match="None"):
            ask(completions('{"name": "Ann", "age": 1}'))
    wrong = field(lambda person: person.name.age)
    with pytest.raises(PotentialError, match="AttributeError"):
        wrong.rewards([completion('{"name": "Ann"}')])


# -- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: length(0),
        lambda: length(2.5),
        lambda: length(True),
        lambda: length(5, band=-1),
        lambda: length(5, unit="lines"),
        lambda: keywords([]),
        lambda: keywords(["a", " "]),
        lambda: keywords([1]),
        lambda: matches("("),
        lambda: matches(b"a"),
        lambda: matches(3),
        lambda: readability(5, metric="smog"),
        lambda: readability("easy"),
        lambda: readability(math.inf),
        lambda: field("age"),
        lambda: field(len, default="x"),
        lambda: length(5, on="often"),
        lambda: sentiment(beta=math.inf),
    ],
)
def test_arguments_out_of_range_are_refused(make):
    with pytest.raises(OptionError):
        make()


def test_ready_rewards_say_their_names():
    made = [length(5), keywords("a"), matches("a"), readability(5), sentiment(), field(len)]
    names = ["length", "keywords", "matches", "readability", "sentiment", "field"]
    assert [r.name for r in made] == names
    assert length(5, name="short").name == "short"
    assert (0.7 * length(5) + 0.3 * sentiment()).name == "0.7*length + 0.3*sentiment"


@pytest.mark.parametrize("make", [lambda k: length(20, **k), lambda k: sentiment(**k)])
def test_a_misspelt_setting_names_the_reward_it_was_given_to(make):
    with pytest.raises(TypeError, match=r"^(length|sentiment)\(\) got .* 'betta' .*beta, on"):
        make({"betta": 2})
