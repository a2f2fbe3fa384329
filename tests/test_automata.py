"""Automata: the same language as the constraint's own states, byte by byte and token by token."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from languages import VOCABULARY, masks

from guided_smc import Vocabulary
from guided_smc.grammars import choice, regex
from guided_smc.grammars.automata import FAR, Automaton, ByteAutomaton
from guided_smc.grammars.byte_regex import as_python, automaton_of, utf8_ranges
from guided_smc.grammars.pieces import pieces

PATTERNS = [
    r"[a-z]{2,5}(foo|é+)?1",
    r"-?(0|[1-9]\d{0,3})(\.\d+)?",
    r"(ab|a|b)*c",
    r"(yes|no|None)\n ?",
    r"(?i)straße|STRASSE",
    r".{1,3}\Z",
    r"[^\W\d]+",
    r"[\U0001F600-\U0001F64F]{2}",
    r"(|a|bc)(x?){3}",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tables_say_what_the_constraints_own_states_say(pattern):
    constraint = regex(pattern)
    tables = constraint.automaton(VOCABULARY)
    draw = random.Random(0)
    compared = 0
    for _ in range(30):
        state, number = constraint.compile(VOCABULARY).start(), 0
        for _ in range(8):
            allowed = masks(constraint, [state])[0]
            bits = (tables.masks[number][:, None] >> torch.arange(32)) & 1
            assert torch.equal(bits.flatten().bool()[: len(VOCABULARY)], allowed)
            assert torch.equal(tables.transitions[number] >= 0, allowed)
            assert bool(tables.accepting[number]) == state.accepting
            assert (int(tables.distances[number]) == 0) == state.accepting
            compared += 1
            tokens = allowed.nonzero().flatten().tolist()
            if not tokens:
                break
            token = draw.choice(tokens)
            state.advance(token)
            number = int(tables.transitions[number, token])
    assert compared >= 30


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bytes_are_accepted_as_the_re_module_accepts_texts(pattern):
    automaton = automaton_of(as_python(regex(pattern)._translated), 4096)
    draw = random.Random(1)
    texts = ["", "abfoo1", "-12.5", "0", "00", "ababc", "yes\n", "no\n ", "STRASSE", "StraSSe"]
    texts += ["straße", "STRAßE", "aé", "abéé1", "😀😁", "😀", "xxx", "bcxx", "été", "\n", "a\nb"]
    texts += ["".join(draw.choices("abcfox01.-é\n😀ß", k=draw.randrange(6))) for _ in range(300)]
    for text in texts:
        state = automaton.advance(0, text.encode())
        assert automaton.accepting[state] == (re.fullmatch(pattern, text) is not None), text


def test_every_character_and_no_other_bytes_are_in_its_ranges():
    spans = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
    total = 0
    for low, high in spans:
        for sequence in utf8_ranges(low, high):
            total += int(np.prod([last - first + 1 for first, last in sequence]))
            for edge in (0, 1):
                bytes(pair[edge] for pair in sequence).decode()
    assert total == 0x110000 - 0x800


def test_a_pattern_that_needs_too_many_states_has_no_tables_and_still_works():
    constraint = regex(r"[ab]*a[ab]{17}")
    assert constraint.automaton(VOCABULARY) is None
    state = constraint.compile(VOCABULARY).start()
    assert all(state.advance(byte) for byte in b"a" + b"b" * 17) and state.accepting
    assert automaton_of("(?:[a-z]{1,100}){1,100}", 4096) is None


def test_choices_have_tables_too():
    constraint = choice(["no", "none", "yes", "été"])
    tables = constraint.automaton(VOCABULARY)
    state, number = constraint.compile(VOCABULARY).start(), 0
    for token in [VOCABULARY.tokens.index(b"no"), ord("n"), ord("e")]:
        allowed = masks(constraint, [state])[0]
        assert torch.equal(tables.transitions[number] >= 0, allowed)
        number = int(tables.transitions[number, token])
        state.advance(token)
    assert bool(tables.accepting[number]) and state.accepting
    assert choice([str(i) for i in range(100_000)]).automaton(VOCABULARY) is None


def test_distances_are_the_fewest_tokens_of_the_vocabulary():
    texts = [b"abcabc", b"b"]
    automaton = ByteAutomaton.of_texts(texts, 100)
    own = pieces(Vocabulary([b"a", b"b", b"c", b"abc", b"bc", b""], eos_ids=[5]))
    tables = Automaton.over_tokens(automaton, own)
    after = {text: automaton.advance(0, text) for text in (b"", b"a", b"ab", b"abca", b"abcabc")}
    found = {text: int(tables.distances[state]) for text, state in after.items()}
    assert found == {b"": 1, b"a": 2, b"ab": 2, b"abca": 1, b"abcabc": 0}
    without_c = pieces(Vocabulary([b"a", b"b", b""], eos_ids=[2]))
    tables = Automaton.over_tokens(automaton, without_c)
    assert int(tables.distances[after[b"ab"]]) == FAR
    assert tables.transitions[0].tolist() == [-1, automaton.advance(0, b"b"), -1]
    assert Automaton.over_tokens(automaton, own, max_entries=10) is None
    assert tables.to("cpu").transitions.equal(tables.transitions)
