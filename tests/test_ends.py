"""Ends in time: what is judged completable is, exactly where that can be enumerated."""

from __future__ import annotations

import itertools
import random

import library_texts as texts
import numpy as np
import pytest
from languages import VOCABULARY as WORDS
from languages import masks_of
from support import exact
from test_exact import PROMPT, assert_unbiased
from test_finishing import nested, runs

from guided_smc import LM, TableModel, Vocabulary
from guided_smc.grammars import LarkText, json_schema, lark, library, regex
from guided_smc.grammars.finishing import Searching, within
from guided_smc.potentials import Intersection
from guided_smc.sampling import empty_bitmask, unpack_bitmask

BRACKETS = 'start: "(" (start | "a")* ")"'
LIST = """
start: "[" [item ("," item)*] "]"
item: "a" | start
"""
KEYWORDS = """
start: "if " test " then " value
test: ("not ")* value
value: "x" | "(" value ")"
"""
ARRAYS = {"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "boolean"}]}, "maxItems": 2}


def listed(text: str) -> bool:
    """A nested list, by taking innermost lists for items until one is left."""
    if not text.startswith("["):
        return False
    before = None
    while before != text:
        before = text
        for inner in ("[]", "[a]", "[a,a]", "[a,a,a]", "[a,a,a,a]"):
            text = text.replace(inner, "a")
    return text == "a"


def worded(text: str) -> bool:
    test, then, value = text.partition(" then ")
    if not test.startswith("if ") or not then:
        return False
    test = test.removeprefix("if ")
    while test.startswith("not "):
        test = test.removeprefix("not ")
    return all(
        v.count("x") == 1 and v == "(" * (len(v) // 2) + "x" + ")" * (len(v) // 2)
        for v in (test, value)
    )


def arrays(text: str) -> bool:
    before = None
    while before != text:
        before = text
        for inner in ("[]", "[t]", "[t,t]"):
            text = text.replace("true", "t").replace(inner, "A")
        for inner in ("[A]", "[A,t]", "[t,A]", "[A,A]"):
            text = text.replace(inner, "A")
    return text == "A"


CASES = {
    "brackets": (lark(BRACKETS), nested, ["(", ")", "a", "))", "()", "a)"], 5),
    "lists": (lark(LIST), listed, ["[", "]", ",", "a", "],", "[a", "]]"], 6),
    "lists, by prefixes": (LarkText(LIST), listed, ["[", "]", ",", "a", "]]"], 5),
    "keywords": (
        lark(KEYWORDS, engine="llguidance"),
        worded,
        ["if ", "i", "f ", "not ", " then", " then x", " ", "x", "(", ")", "(x)"],
        5,
    ),
    "schema": (
        json_schema(ARRAYS, whitespace="compact"),
        arrays,
        ["[", "]", "true", ",", "[]", "]]", "tr", "ue"],
        5,
    ),
    "intersection": (
        Intersection(lark(BRACKETS), regex(r".*a\).*a.*", engine="llguidance")),
        lambda text: nested(text) and "a" in text.partition("a)")[2],
        ["(", ")", "a", "))", "a)"],
        5,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_prefixes_are_viable_that_some_text_completes_in_time(name):
    constraint, member, tokens, cap = CASES[name]
    vocabulary = Vocabulary([*(t.encode() for t in tokens), b""], eos_ids=[len(tokens)])
    completable = set()
    for n in range(cap + 1):
        for text in itertools.product(range(len(tokens)), repeat=n):
            if member("".join(tokens[t] for t in text)):
                completable |= {text[:k] for k in range(n + 1)}
    compiled, notes = within(constraint, vocabulary, cap)
    assert isinstance(compiled, Searching) and notes == ()
    found = set()
    waiting = [((), compiled.start())]
    while waiting:
        text, state = waiting.pop()
        found.add(text)
        if len(text) == cap:
            assert state.accepting
            continue
        assert compiled.judges(state)
        bits = empty_bitmask(1, len(vocabulary))
        compiled.fill_masks([state], bits)
        allowed = np.flatnonzero(unpack_bitmask(bits, len(tokens))[0]).tolist()
        viable = [t for t in allowed if compiled.viable(state, t)]
        assert set(compiled.known(state)) <= set(viable)
        assert not compiled.doubted(state)
        for token in viable:
            after = state.fork()
            assert after.advance(token)
            waiting.append(((*text, token), after))
    assert len(found) > 10
    assert found == completable


def test_the_evidence_at_the_cap_is_that_of_the_texts_that_fit():
    constraint, member, tokens, _ = CASES["lists"]
    vocabulary = Vocabulary([*(t.encode() for t in tokens), b""], eos_ids=[len(tokens)])
    target = TableModel.random(vocabulary, seed=5, eos_probability=0.1)
    compiled, _ = within(constraint, vocabulary, 4)
    found = runs(200, compiled, target=target, n_particles=2, ess_threshold=0.0)
    assert_unbiased(found, exact(target, PROMPT, max_tokens=4, member=member))
    assert all(p.finish_reason == "stop" for r in found for p in r.particles)
    assert all(r.warnings == () for r in found)


LIBRARY = {
    "graphql": library.graphql_query(),
    "typed graphql": library.graphql_query(texts.TYPES),
    "sql": library.sql_select(texts.TABLES, joins=texts.JOINS),
    "python": library.python_block(),
    "csv": library.csv(texts.CSV_COLUMNS),
    "plan": library.pddl_plan(**texts.PLAN),
    "schema": json_schema(
        {
            "type": "object",
            "properties": {
                "a": {"type": "string"},
                "b": {"type": "array"},
                "c": {"type": "number"},
            },
            "required": ["a", "b", "c"],
        }
    ),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_a_walk_over_viable_tokens_ends_in_time_whatever_it_takes(name):
    constraint = LIBRARY[name]
    shortest = within(constraint, WORDS, 1000)[0].start().fewest
    ends = 0
    for seed in range(6):
        draw = random.Random(seed)
        cap = shortest + (0, 2, 5, 12, 25, 40)[seed]
        compiled, notes = within(constraint, WORDS, cap)
        assert notes == ()
        state = compiled.start()
        while state.left > 0:
            tokens = np.flatnonzero(masks_of(compiled, [state], WORDS)[0]).tolist()
            draw.shuffle(tokens)
            known = compiled.known(state) if compiled.judges(state) else []
            tries = [*tokens[:20], *known]
            taken = next((t for t in tries if compiled.viable(state, t)), None)
            if taken is None:
                break
            assert state.advance(taken)
        ends += state.accepting
    assert ends == 6


def test_an_end_that_was_perhaps_missed_is_told():
    letters = [bytes([b]) for b in b"abcdefghijklmnopqrstuvwxyz()"]
    vocabulary = Vocabulary([*letters, b""], eos_ids=[28])
    target = TableModel.random(vocabulary, seed=1, eos_probability=0.05)
    words = lark(r'start: "(" (/[a-z]+/ | start)* ")"')
    found = LM(target).generate([0], output_type=words, max_tokens=4, seed=0, n_particles=4)
    assert found.finish_reason == "stop"
    (warning,) = found.warnings
    assert "because no end was found behind them in time" in warning


def test_no_end_at_all_is_told():
    vocabulary = Vocabulary([b"x", b"y", b""], eos_ids=[2])
    compiled, (note,) = within(lark('start: "xyz"'), vocabulary, 4)
    assert not isinstance(compiled, Searching)
    assert "no text was found by looking ahead" in note
