"""Texts end in time: what cannot is refused while there is a way out, with the weights right."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from exactness import PROMPT, assert_unbiased
from languages import masks_of
from support import exact, request, results

from guided_smc import LM, ConstraintError, TableModel, Vocabulary
from guided_smc.engine import Engine
from guided_smc.grammars import LarkText, choice, lark, predicate, regex
from guided_smc.grammars.completing import Completions
from guided_smc.grammars.finishing import Finishing, Searching, look_ahead, within
from guided_smc.grammars.matching import every_byte
from guided_smc.potentials import Intersection

TOKENS = [b"(", b")", b"a", b"b", b"()", b""]
VOCABULARY = Vocabulary(TOKENS, eos_ids=[5])
TARGET = TableModel.random(VOCABULARY, seed=3, eos_probability=0.1)
DRAFT = TableModel.random(VOCABULARY, seed=4, eos_probability=0.1)
CAP = 4

NESTED = 'start: "(" (start | "a")* ")"'


def nested(text: str) -> bool:
    depth = 0
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter not in "()a" or depth < 0 or (depth == 0 and i < len(text) - 1):
            return False
    return depth == 0 and text[:1] == "("


REGEX = r"(a|\(){1,4}b(aa)*\)"
TEXTS = ["(a)", "((a))", "aab", "(()()())", "bbbbbb", "()ab"]


@cache
def expected(name: str):
    return exact(TARGET, PROMPT, max_tokens=CAP, member=CASES[name][1])


def matches(pattern: str):
    return lambda text: re.fullmatch(pattern, text) is not None


CASES = {
    "regex": (regex(REGEX), matches(REGEX), Finishing),
    "choice": (choice(TEXTS), TEXTS.__contains__, Finishing),
    "lark": (lark(NESTED), nested, Searching),
    "lark, by prefixes": (LarkText(NESTED), nested, Searching),
    "intersection": (
        Intersection(lark(NESTED), regex(r".*\)a.*")),
        lambda text: nested(text) and ")a" in text,
        Searching,
    ),
}


def runs(n_runs: int, compiled, *, target=TARGET, **options):
    requests = [
        request(target, PROMPT, index=i, seed=i, max_tokens=CAP, **options) for i in range(n_runs)
    ]
    draft = DRAFT if target is TARGET else None
    engine = Engine(target, draft, max_rows=10**6)
    for each in requests:
        each.constraint = compiled
        engine.add(each)
    events = []
    while engine.busy:
        events += engine.step()
    return results(events)


@pytest.mark.parametrize(
    ("name", "block_size"), [("regex", 0), ("choice", 0), ("lark", 0), *((n, 2) for n in CASES)]
)
def test_every_text_that_ends_in_time_has_its_mass_and_no_particle_is_lost(name, block_size):
    constraint, _, kind = CASES[name]
    compiled, notes = within(constraint, VOCABULARY, CAP)
    assert isinstance(compiled, kind) and notes == ()
    n_runs = 400 if kind is Finishing else 200  # a search takes longer
    found = runs(n_runs, compiled, n_particles=2, block_size=block_size, ess_threshold=0.0)
    assert_unbiased(found, expected(name))
    dead = sum(p.finish_reason != "stop" for r in found for p in r.particles)
    before = runs(100, constraint.compile(VOCABULARY), n_particles=2, block_size=block_size)
    dead_before = sum(p.finish_reason == "length" for r in before for p in r.particles)
    assert dead == 0
    if name != "choice":
        assert dead_before > 5


@pytest.mark.parametrize("name", ["regex", "choice"])
def test_masks_hold_exactly_the_tokens_behind_which_an_end_fits(name):
    constraint, _, _ = CASES[name]

    def fewest(state, at_most: int) -> bool:
        """Whether a member is reached with at most so many tokens."""
        if state.accepting:
            return True
        return at_most > 0 and any(
            fewest(after, at_most - 1)
            for token in range(len(TOKENS))
            if (after := state.fork()).advance(token)
        )

    generator = np.random.default_rng(0)
    looked_at = 0
    for cap in (3, 4, 6):
        compiled, _ = within(constraint, VOCABULARY, cap)
        for _ in range(20):
            state, plain = compiled.start(), constraint.compile(VOCABULARY).start()
            for left in range(cap, 0, -1):
                mask = masks_of(compiled, [state], VOCABULARY)[0].tolist()
                expected = []
                for token in range(len(TOKENS)):
                    after = plain.fork()
                    expected.append(after.advance(token) and fewest(after, left - 1))
                assert mask == expected
                looked_at += 1
                if not any(mask):
                    break
                token = int(generator.choice(np.flatnonzero(mask)))
                state.advance(token)
                plain.advance(token)
    assert looked_at > 100


def test_a_cap_below_the_shortest_text_is_an_error_where_that_is_known():
    with pytest.raises(ConstraintError, match=r"max_tokens=2 is too small.* has 3 tokens"):
        within(regex(r"a{3}"), VOCABULARY, 2)
    with pytest.raises(ConstraintError, match=r"choice: max_tokens=1 is too small.* has 3 tokens"):
        LM(TARGET).generate([0], output_type=choice(["aaa", "aab"]), max_tokens=1)


def test_a_cap_below_every_text_is_an_error_where_all_can_be_tried():
    for make in (lark, LarkText):
        with pytest.raises(ConstraintError, match=r"max_tokens=2 is too small.* has 3 tokens"):
            LM(TARGET).generate([0], output_type=make('start: "aa" ("a" | "b")+'), max_tokens=2)


def test_a_language_without_texts_is_an_error_where_all_can_be_tried():
    for pattern in ("a(?=b)c", "(?=b)a+", "a(?=b)b(?<!b)"):
        with pytest.raises(ConstraintError, match="there is no text that it allows"):
            within(regex(pattern), VOCABULARY, 5)
    within(regex("a(?=b)b"), VOCABULARY, 5)


def test_a_cap_below_the_shortest_text_that_is_found_is_told_where_not_all_can_be_tried(
    monkeypatch,
):
    monkeypatch.setattr(Completions, "none_within", lambda *_: False)
    _, notes = within(lark('start: "a" "a" "a"'), VOCABULARY, 2)
    assert notes == (
        "grammar: the shortest text that was found has 3 tokens, more than max_tokens=2",
    )
    found = LM(TARGET).generate([0], output_type=lark('start: "a" "a" "a"'), max_tokens=2)
    assert notes[0] in found.warnings and found.finish_reason == "length"


def test_only_a_run_that_lost_a_text_to_the_cap_tells_that_its_end_was_not_foreseen(monkeypatch):
    def unforeseen(constraint, vocabulary, max_tokens):
        return constraint.compile(vocabulary), ("nothing was known",)

    monkeypatch.setattr("guided_smc.api.within", unforeseen)
    for language, lost in (('start: "a" | "b"', False), ('start: ("b" "b")+', True)):
        found = LM(TARGET).generate(
            [0], output_type=lark(language), max_tokens=3, n_particles=20, seed=0
        )
        assert found.finish_reason == "stop"
        assert found.warnings == (("nothing was known",) if lost else ())


def test_how_a_language_ends_is_explored_only_when_the_room_gets_scarce():
    compiled, _ = within(lark(NESTED), VOCABULARY, 28)
    state = compiled.start()
    explored = []
    for _ in range(7):
        compiled.judges(state)
        explored.append("_map" in vars(compiled._search.completions))
        state.advance(TOKENS.index(b"("))
    assert not any(explored[:3]) and explored[-1]
    assert compiled.judges(state)


def test_a_users_function_is_not_asked_for_completions():
    asked = []

    def viable(text):
        asked.append(text)
        return set(text) <= {"a"}

    constraint = predicate(viable)
    compiled, _ = within(constraint, VOCABULARY, CAP)
    assert not isinstance(compiled, Searching) and asked == []


def test_a_vocabulary_that_spells_no_member_refuses_nothing():
    compiled, _ = within(lark('start: "x"'), VOCABULARY, CAP)
    assert not isinstance(compiled, Searching)
    found = LM(TARGET).generate([0], output_type=regex("x"), max_tokens=3)
    assert found.finish_reason == "failed"


def test_looking_ahead_gives_up_in_time_and_changes_nothing_else():
    slow = regex("[^a]*(a[^b]*b){0,60}(c|d[^e]{300})")
    with pytest.raises(ConstraintError, match="takes more than the limit"):
        look_ahead(slow, every_byte(), 0.02)
    usual = regex("[a-z ]*[.]")  # searched without a limit, and as if nothing had been tried
    bound, notes = within(usual, every_byte(), 5)
    look_ahead(usual, every_byte(), 60.0)
    assert notes == () and bound.start().advance(ord("a"))
