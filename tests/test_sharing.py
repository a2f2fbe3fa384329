"""Intersections of languages that share no text are refused where that is known, by name."""

from __future__ import annotations

import datetime
import random
import re

import pytest

from guided_smc import LM, TableModel, Vocabulary
from guided_smc.errors import ConstraintError, IncompleteOutputError
from guided_smc.grammars import choice, from_output_type, json_schema, lark, predicate, regex
from guided_smc.grammars.sharing import refuse_disjoint

VOCABULARY = Vocabulary([b"a", b"b", b"c", b""], eos_ids=[3])
TARGET = TableModel.random(VOCABULARY, seed=1, eos_probability=0.3)
DATE = from_output_type(datetime.date)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (regex("[a-z]+"), regex("[0-9]+")),
        (regex("(aa)+"), regex("a(aa)*")),
        (regex("é+"), regex("è+")),  # which begin with the same byte
        (choice(["ab", "b"]), regex("a+")),
        (choice(["a", "b"]), choice(["c", "ab"])),
        (choice(["a", "b"]), json_schema({"type": "integer"})),
        (lark('start: "x" start | "x"'), choice(["xy", ""])),
        (DATE, regex("x.*")),
    ],
)
def test_two_languages_that_share_no_text_are_refused_by_name(one, other):
    for both in (one & other, other & one, regex("(?s:.*)") & one & other):
        with pytest.raises(ConstraintError, match="no text satisfies both") as refused:
            refuse_disjoint(both)
        assert one.name in str(refused.value) and other.name in str(refused.value)
    with pytest.raises(ConstraintError, match="no text satisfies both"):
        LM(TARGET).request([0], output_type=one, potential=other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (regex("a{1000}"), regex("a+")),
        (choice(["a", "2"]), json_schema({"type": "integer"})),
        (DATE, regex("1999.*")),
        (lark('start: "a"'), lark('start: "b"')),  # not known
        (choice(["a"]), predicate(lambda text: text == "b")),  # not asked
        (regex("[ab]{0,300}a[ab]{300}"), regex("[ab]{900}")),  # too many states
    ],
)
def test_what_may_share_a_text_is_not_refused(one, other):
    refuse_disjoint(one & other)
    refuse_disjoint(one)


def test_random_patterns_share_a_text_exactly_if_one_of_the_short_texts_is_in_both():
    draw = random.Random(0)
    texts = [""]
    for _ in range(6):
        texts += [t + c for t in texts if len(t) == len(texts[-1]) for c in "ab"]
    seen = {True: 0, False: 0}
    for _ in range(300):
        patterns = ["".join(draw.choices(["a", "b", "a?", "b?", "[ab]"], k=4)) for _ in range(2)]
        share = any(all(re.fullmatch(p, text) for p in patterns) for text in texts)
        seen[share] += 1
        try:
            refuse_disjoint(regex(patterns[0]) & regex(patterns[1]))
            assert share, patterns
        except ConstraintError:
            assert not share, patterns
    assert min(seen.values()) > 20


def test_a_run_that_fails_under_an_intersection_names_its_languages():
    nothing = lark('start: "a" | "b"') & lark('start: "c"')
    with pytest.raises(ConstraintError, match="grammar & grammar: there is no text that it allows"):
        LM(TARGET).generate([0], output_type=nothing, max_tokens=3, seed=0)
    # With too many beginnings to try them all.
    both = lark("start: /[abcd]+a/") & lark("start: /[abcd]+b/")
    found = LM(TARGET).generate([0], output_type=both, max_tokens=3, seed=0)
    assert found.finish_reason == "length"
    assert any("every particle died under grammar & grammar" in w for w in found.warnings)
    with pytest.raises(IncompleteOutputError, match="perhaps no text satisfies all of them"):
        _ = found.value
    fine = LM(TARGET).generate([0], output_type=regex("a") & regex("."), max_tokens=3, seed=0)
    assert fine.value == "a" and fine.warnings == ()
