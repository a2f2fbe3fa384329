"""Products and intersections of potentials."""

import itertools
import math

import numpy as np
import pytest

from guided_smc.grammars import json_schema
from guided_smc.potentials import Completion, Intersection, Potential, Product
from guided_smc.vocabulary import Vocabulary

DIGITS = Vocabulary([b"", *(b"%d" % d for d in range(10)), b"-"], eos_ids=[0])
NUMBERS = range(-130, 131)


class Length(Potential):
    """`Ψ = e^-n` for a text of n characters."""

    name = "length"

    def log_complete(self, completions):
        return [-float(len(c.text)) for c in completions]


class No(Potential):
    """Weight 0 for texts with a given character, as soon as it appears."""

    def __init__(self, character):
        self.name = f"no {character}"
        self.character = character

    def log_complete(self, completions):
        return [-math.inf if self.character in c.text else 0.0 for c in completions]

    def log_prefix(self, completions):
        return self.log_complete(completions)


def tokens_of(text):
    return tuple(DIGITS.tokens.index(bytes([byte])) for byte in text.encode())


def completions(*texts, finished=True):
    return [Completion("", tokens_of(t), t, finished, DIGITS) for t in texts]


def between(low, high):
    return json_schema({"type": "integer", "minimum": low, "maximum": high})


def test_a_product_adds_log_scores_and_keeps_zero_weight():
    product = Length() * No("3") * No("7")
    assert product.log_complete(completions("12", "37", "")) == [-2.0, -math.inf, 0.0]
    assert product.log_prefix(completions("12", "37", finished=False)) == [0.0, -math.inf]


def test_products_are_flat_and_keep_their_order():
    a, b, c = Length(), No("3"), No("7")
    assert (a * (b * c)).factors() == ((a * b) * c).factors() == (a, b, c)
    assert (a * b * c).name == "length * no 3 * no 7"
    assert a.factors() == (a,)


def test_a_product_scores_prefixes_if_a_factor_does():
    assert not Length().scores_prefixes
    assert No("3").scores_prefixes
    assert (Length() * No("3")).scores_prefixes
    assert not (Length() * Length()).scores_prefixes


def test_only_potentials_multiply():
    with pytest.raises(TypeError):
        Length() * 2
    assert isinstance(Length() * between(0, 9), Product)


def test_a_potential_without_prefix_scores_says_nothing_of_prefixes():
    assert Length().log_prefix(completions("1", "22")) == [0.0, 0.0]


def test_a_constraint_is_the_indicator_of_its_language():
    texts = completions(*map(str, NUMBERS))
    expected = [0.0 if -5 <= n <= 120 else -math.inf for n in NUMBERS]
    assert between(-5, 120).log_complete(texts) == expected


def test_the_prefix_score_of_a_constraint_is_whether_a_member_begins_so():
    constraint = between(-5, 120)
    members = [str(n) for n in range(-5, 121)]
    alphabet = [t.decode() for t in DIGITS.tokens if t]
    prefixes = ["".join(p) for n in range(4) for p in itertools.product(alphabet, repeat=n)]
    # JSON numbers may be spelt "-0", which is 0.
    expected = [
        0.0 if any(m.startswith(p) for m in [*members, "-0"]) else -math.inf for p in prefixes
    ]
    assert constraint.log_prefix(completions(*prefixes, finished=False)) == expected


def test_an_intersection_holds_what_all_of_its_languages_hold():
    both = Intersection(between(-20, 50), between(30, 900), between(0, 44))
    texts = completions(*map(str, NUMBERS))
    assert both.log_complete(texts) == [0.0 if 30 <= n <= 44 else -math.inf for n in NUMBERS]


def test_the_mask_of_an_intersection_is_the_intersection_of_the_masks():
    parts = between(-20, 50), between(30, 900)
    both = Intersection(*parts)
    for prefix in ("", "3", "5", "50", "-"):
        rows = []
        for constraint in (*parts, both):
            compiled = constraint.compile(DIGITS)
            state = compiled.start()
            for token in tokens_of(prefix):
                state.advance(token)
            row = np.full((1, 1), -1, dtype=np.int32)
            compiled.fill_masks([state], row)
            rows.append(int(row[0, 0]))
        assert rows[2] == rows[0] & rows[1]


def test_a_fork_of_an_intersection_is_independent():
    compiled = Intersection(between(0, 50), between(3, 5)).compile(DIGITS)
    state = compiled.start()
    fork = state.fork()
    assert fork.advance(DIGITS.tokens.index(b"4")) and fork.accepting
    assert not state.accepting
    assert not state.advance(DIGITS.tokens.index(b"7"))
    assert fork.accepting


def test_the_values_of_an_intersection_are_those_of_its_first_constraint():
    both = Intersection(between(0, 50), between(3, 5))
    assert both.parse("4") == 4
    assert both.value_key("4") == between(0, 50).value_key("4.0")
