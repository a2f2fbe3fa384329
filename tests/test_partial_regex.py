"""Patterns beyond regular languages: no beginning of a match is refused, and little else passes."""

from __future__ import annotations

import itertools

import pytest
import regex
from exactness import PROMPT, TARGET, assert_unbiased, runs
from support import exact

from guided_smc import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars import PartialRegex, partial_regex
from guided_smc.vocabulary import Vocabulary

PATTERNS = [
    r"(a|b)c\1",
    r"(a+)b\1",
    r"(?P<x>[ab]{1,2})c(?P=x)*",
    r"(?=.*c)[abc]{2,4}",
    r"(?!ab)[abc]+",
    r"(?!.*ab$)[abc]+",
    r"(?!.*ab\Z)[abc]+",
    r"(?:(?!bb)[abc])*",
    r"[abc]*(?<!a)",
    r"[abc]*(?<=ab)",
    r"\ba+\b ?\bb+",
    r"a\Bb\B?c?",
    r"(?!a\b)[ab]+ ?",
    r"(?!a\B)[ab]+ ?",
    r"\ma+\M b",
    r"a*+b?a",
    r"(?>a|ab)c",
    r"(?>a*)(?<!aaa)b?",
    r"(a)?b(?(1)c|a)",
    r"a(?R)?b",
    r"(?:a|b(?=c))+c?",
    r"(?|(a)|(b))\1+",
    r"(?i)AB+(?!c$)\w?",
    r"a$",
    r"a$\n?",
    r"(?m)(?:a$\n?)+",
    r"(?m)(?!a$)[ab\n]+",
    r"[$\b]a",
    r"(?#a$)a\$",
    r"(?x) a  # with $ and \b in it" + "\n b",
    r"[ab]{2,3}?c??",
    r"a|ab|abc(?!a)",
    r"\pL+ ?\p{Lu}?",
    r"",
]
LETTERS = "abc \n$A"


def texts(pattern: str):
    letters = [x for x in LETTERS if x in "abc" or x in pattern or (x == " " and r"\b" in pattern)]
    if r"\n" in pattern or "$" in pattern:
        letters.append("\n")
    longest = 5 if len(set(letters)) <= 4 else 4
    for n in range(longest + 1):
        yield from map("".join, itertools.product(sorted(set(letters)), repeat=n))


def viable(constraint, text: str) -> bool:
    """Letter by letter, as a particle goes."""
    cursor = constraint.begin()
    for letter in text:
        cursor = constraint.extend(cursor, letter)
        if cursor is None:
            return False
    return True


@pytest.mark.parametrize("pattern", PATTERNS)
def test_members_are_those_of_the_package_and_every_beginning_of_one_is_viable(pattern):
    constraint = PartialRegex(pattern)
    original = regex.compile(pattern)
    members = [t for t in texts(pattern) if original.fullmatch(t)]
    assert members or pattern == r"a$\n?"
    for text in texts(pattern):
        assert constraint.complete(text) == (original.fullmatch(text) is not None), text
    for text in members:
        assert viable(constraint, text), text


@pytest.mark.parametrize(
    ("pattern", "hopeless"),
    [
        (r"(a|b)c\1", ["c", "acb", "acaa"]),
        (r"(?!ab)[abc]+", ["ab", "d"]),
        (r"[abc]{2,4}", ["abca" + "b"]),
        (r"(?P<x>[ab]{1,2})c(?P=x)*", ["aca" + "b", "abcb"]),
        (r"\ba+\b ?\bb+", ["ab", "b", " "]),
    ],
)
def test_what_cannot_become_a_match_is_refused(pattern, hopeless):
    constraint = PartialRegex(pattern)
    for text in hopeless:
        assert not viable(constraint, text), text


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        (r"(?P<word>[a-z]{3,8}), (?P=word)", True),
        (r"\ba+\$ \1\n.[^x\]][\w\s]", True),
        (r"[[:alpha:]]", False),
        (r"\u00e9", False),
        (r"[\xe9]", False),
        (r"\351", False),
        (r"\p{L}", False),
        (r"(?i)k", False),
        (r"é", False),
    ],
)
def test_a_pattern_that_tells_characters_apart_by_kind_alone_is_known(pattern, plain):
    assert partial_regex.tells_kinds_apart(pattern, 0) == plain
    assert not partial_regex.tells_kinds_apart(pattern, regex.IGNORECASE)


@pytest.mark.parametrize("pattern", [r"\w+", r"\d+", r"\s", r"[^\w\s]+", r".", r"[^a]", r"[a-z]+"])
def test_the_beginning_of_a_character_is_viable_where_some_such_character_is(pattern):
    constraint = PartialRegex(pattern)
    some: dict[bytes, bool] = {}
    for code in (*range(0x80, 0x3100), *range(0xF900, 0x10000), *range(0x1F000, 0x20000)):
        data = chr(code).encode()
        if len(data) == 3 and data[:1] not in (b"\xe1", b"\xe2"):
            continue  # these blocks are covered as a whole
        if len(data) == 4 and data[:2] != b"\xf0\x9f":
            continue
        fine = regex.fullmatch(pattern, chr(code)) is not None
        for n in range(2 if len(data) == 4 else 1, len(data)):
            some[data[:n]] = some.get(data[:n], False) or fine
    assert len(some) > 200
    for begun, expected in some.items():
        assert constraint.begins("", begun) == expected, begun


def test_a_token_that_begins_a_character_is_refused_where_none_can_follow():
    vocabulary = Vocabulary([b"a", b"\xc3", b"a\xc3", b""], eos_ids=[3])
    for pattern, viable in [("[a-z]+", [True, False, False]), (r"\w+", [True, True, True])]:
        compiled = PartialRegex(pattern).compile(vocabulary)
        assert [compiled.viable(compiled.start(), v) for v in range(3)] == viable


def test_a_backreference_may_ask_for_a_character_of_the_text():
    constraint = PartialRegex(r"(.),\1")
    assert constraint.begins("日,", "日".encode()[:1])
    assert constraint.begins("日,", "日".encode()[:2])
    assert not constraint.begins("日,", "語".encode()[:2])


def test_flags_count():
    assert viable(PartialRegex("ab+", regex.IGNORECASE), "AB")
    assert not viable(PartialRegex("ab+"), "AB")
    assert viable(PartialRegex("a.b", regex.DOTALL), "a\nb")
    constraint = PartialRegex("(?:a$\n?)+", regex.MULTILINE)
    assert viable(constraint, "a\na\n")
    assert constraint.complete("a\na")


@pytest.mark.parametrize("block_size", [0, 2])
def test_the_posterior_under_a_backreference_is_exact(block_size):
    pattern = r"([ab]+)(?!ca)[cd]\1"
    found = runs(1500, constraint=PartialRegex(pattern), block_size=block_size, n_particles=4)

    def member(text):
        return regex.fullmatch(pattern, text) is not None

    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


def test_an_invalid_pattern_is_refused_with_the_reason():
    with pytest.raises(ConstraintError, match=r"missing \).*'\(a'"):
        PartialRegex("(a")


@pytest.mark.parametrize(
    ("pattern", "keyword"),
    [
        (r"\Xa", r"\X"),
        (r"a\R", r"\R"),
        (r"\Ga", r"\G"),
        (r"a\Kb", r"\K"),
        (r"(?:abc){e<=1}", "{e<=1}"),
        (r"(?r)ab", "(?r)"),
        (r"(?V1)ab", "(?V1)"),
        (r"(?if)strasse", "(?if)"),
        (r"(?m:a$)b", "$"),
    ],
)
def test_what_cannot_be_judged_on_prefixes_is_refused_by_name(pattern, keyword):
    with pytest.raises(UnsupportedConstraintError, match="cannot be judged") as error:
        PartialRegex(pattern)
    assert error.value.keyword == keyword


def test_a_flag_that_cannot_be_judged_is_refused():
    with pytest.raises(UnsupportedConstraintError, match="as a flag"):
        PartialRegex("ab", regex.REVERSE)


def test_a_pattern_that_explodes_ends_in_an_error(monkeypatch):
    monkeypatch.setattr(partial_regex, "TIMEOUT_S", 0.05)
    constraint = PartialRegex(r"(?:(a|aa)+)+\1!")
    with pytest.raises(ConstraintError, match=r"more than 0\.05 seconds"):
        constraint.complete("a" * 60 + "d")


@pytest.mark.model
def test_the_real_model_repeats_a_word_that_it_has_chosen(lm):
    pattern = r"(?P<word>[a-z]{3,8}), (?P=word) and (?!(?P=word))[a-z]{3,8}"
    out = lm.generate(
        "Say a word twice, and then another one.",
        output_type=PartialRegex(pattern),
        n_particles=4,
        max_tokens=16,
        seed=0,
    )
    assert regex.fullmatch(pattern, out.value), out.text
