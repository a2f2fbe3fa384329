"""Constraints that answer about texts: what they are asked, and what a wrong answer does."""

from __future__ import annotations

import numpy as np
import pytest
from exactness import PROMPT, TARGET, assert_unbiased, member, runs
from support import exact, request, results, unnormalised

import guided_smc
from guided_smc import LM, OptionError, PotentialError, json_schema
from guided_smc.engine import run
from guided_smc.grammars import PrefixConstraint, predicate
from guided_smc.models.table import TableModel
from guided_smc.potentials import Completion, Unmasked
from guided_smc.vocabulary import Vocabulary

BYTES = Vocabulary([bytes([b]) for b in range(256)] + ["é".encode(), "日本".encode(), b""], [258])


def viable(text: str) -> bool:
    """Says too much at times: a text of four letters may be as hopeless as one of five."""
    return len(text) <= 4 and "cc" not in text and "ab" not in text


@pytest.mark.parametrize("block_size", [0, 2])
def test_users_functions_are_a_constraint_like_any_other(block_size):
    found = runs(800, constraint=predicate(viable, member), block_size=block_size, n_particles=4)
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


def test_without_a_second_function_every_viable_text_is_a_member():
    found = runs(600, constraint=predicate(viable), n_particles=4)
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=viable))


def test_it_is_asked_about_whole_characters_and_once_about_each():
    asked = []

    def note(text):
        asked.append(text)
        return "x" not in text

    compiled = predicate(note).compile(BYTES)
    assert isinstance(compiled, Unmasked)
    state = compiled.start()
    data = "é日".encode()
    for byte in data:
        assert compiled.viable(state, byte)
        assert state.advance(byte)
        assert not compiled.viable(state.fork(), ord("x"))
    assert asked == ["é", "éx", "é日", "é日x"]
    assert state.accepting


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"\x80",
        b"\xc3\x28",
        b"\xe0\x80",
        b"\xed\xa0",
        b"\xf5",
        b"\xf4\x90",
        b"\xf0\x80",
        b"\xc3\xc3",
    ],
)
def test_what_is_no_beginning_of_utf8_is_refused(data):
    compiled = predicate(lambda text: True).compile(BYTES)
    state = compiled.start()
    assert not all([state.advance(byte) for byte in data])
    assert not state.accepting


def test_a_text_may_not_end_within_a_character():
    state = predicate(lambda text: True).compile(BYTES).start()
    assert state.accepting
    assert state.advance(0xC3)
    assert not state.accepting
    assert state.advance(0xA9)
    assert state.accepting


def test_a_refused_token_kills_the_state_and_not_its_forks():
    compiled = predicate(lambda text: text in ("a", "ab")).compile(BYTES)
    state = compiled.start()
    assert state.advance(ord("a"))
    fork = state.fork()
    assert not state.advance(ord("c"))
    assert not state.advance(ord("b"))
    assert not compiled.viable(state, ord("b"))
    assert fork.advance(ord("b"))
    assert fork.forced() == []


def test_special_padded_and_empty_tokens_are_never_viable():
    vocabulary = Vocabulary([b"a", None, b"", b"", b""], eos_ids=[3], special_ids=[4])
    compiled = predicate(lambda text: True).compile(vocabulary)
    assert [compiled.viable(compiled.start(), v) for v in range(5)] == [True, *[False] * 4]
    mask = np.zeros((1, 1), dtype=np.int32)
    compiled.fill_masks([compiled.start()], mask)
    assert mask.item() == -1


@pytest.mark.parametrize("answer", [None, 1, "yes", np.float64(1.0)])
def test_an_answer_that_is_not_true_or_false_is_an_error_with_the_text(answer):
    constraint = predicate(lambda text: answer, name="odd")
    r = request(TARGET, PROMPT, constraint=constraint, max_tokens=3)
    with pytest.raises(PotentialError, match=r"'odd' answered .* `complete` .*True or False") as e:
        results(run(TARGET, [r]))
    assert (e.value.potential, e.value.text) == ("odd", "")


def test_numpys_answers_count():
    found = runs(20, constraint=predicate(lambda text: np.bool_(len(text) < 3)))
    assert all(r.finish_reason == "stop" for r in found)


def test_what_a_function_raises_is_told_with_the_text():
    def parse(text):
        raise KeyError("lost")

    r = request(TARGET, PROMPT, constraint=predicate(parse, lambda t: False), max_tokens=3)
    with pytest.raises(PotentialError, match=r"'parse' raised KeyError.*`viable` was asked") as e:
        results(run(TARGET, [r]))
    assert e.value.potential == "parse"
    assert len(e.value.text) == 1


def test_wrong_arguments_are_refused():
    with pytest.raises(OptionError, match="`viable` must be a function"):
        predicate(None)
    with pytest.raises(OptionError, match="`complete` must be a function"):
        predicate(viable, "text")
    with pytest.raises(OptionError, match="max_rejected"):
        predicate(viable, max_rejected=0)


def test_a_predicate_judges_texts_outside_the_engine_as_well():
    constraint = predicate(lambda t: len(t) <= 2, lambda t: len(t) == 2)
    texts = [
        Completion(prompt="", token_ids=tuple(t.encode()), text=t, finished=True, vocabulary=BYTES)
        for t in ("", "a", "ab", "abc")
    ]
    assert constraint.log_complete(texts) == [-np.inf, -np.inf, 0.0, -np.inf]
    assert constraint.log_prefix(texts) == [0.0, 0.0, 0.0, -np.inf]


def test_a_predicate_narrows_a_schema():
    """Masks come first: of what they let through, the function is asked."""
    tokens = [b'"', b"a", b"b", b"c", b""]
    vocabulary = Vocabulary(tokens, eos_ids=[4])
    model = TableModel.random(vocabulary, seed=2, eos_probability=0.3)
    asked = []

    def no_double(text):
        asked.append(text)
        return not any(2 * letter in text for letter in "abc")

    schema = json_schema({"type": "string", "maxLength": 3})
    lm = LM(model)
    out = lm.generate(
        "a", output_type=schema, potential=predicate(no_double), n_particles=64, max_tokens=5,
        seed=0,
    )  # fmt: skip
    assert len(out.values) > 5
    for particle in out.particles:
        assert no_double(particle.text)
        assert len(particle.text) <= 5
    assert all(text.startswith('"') for text in asked if text)


def test_the_cursor_of_a_constraint_of_ones_own_may_be_anything():
    """A counter of brackets: it reads each character once, whatever the length."""

    class Balanced(PrefixConstraint):
        name = "balanced"

        def begin(self):
            return 0

        def extend(self, cursor, text):
            for letter in text:
                cursor += (letter == "a") - (letter == "b")
                if cursor < 0 or letter in "cd":
                    return None
            return cursor

        def complete(self, cursor):
            return cursor == 0

    def balanced(text):
        return Balanced().extend(0, text) == 0

    found = runs(800, constraint=Balanced(), n_particles=4)
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=balanced))
    assert any(len(text) == 4 for r in found for text in unnormalised(r))


@pytest.mark.model
def test_a_predicate_steers_the_real_model(lm):
    out = lm.generate(
        "Name a fruit.",
        potential=guided_smc.predicate(lambda text: "e" not in text),
        n_particles=4,
        max_tokens=12,
        seed=0,
    )
    assert "e" not in out.text
    assert out.warnings == ()
    assert out.usage.constraint_calls < 20 * out.usage.particle_tokens
