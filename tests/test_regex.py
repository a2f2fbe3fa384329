"""Regular expressions mean what Python's `re.fullmatch` means, or are refused."""

import random
import re
import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from languages import VOCABULARY, accepts, after, begins, check_masks, masks
from support import VOCABULARY as LETTERS
from support import exact, request, results, unnormalised

from guided_smc.engine import run
from guided_smc.errors import ConstraintError, OptionError, UnsupportedConstraintError
from guided_smc.grammars import Limits, regex
from guided_smc.models.table import TableModel

PATTERNS = [
    "",
    "a",
    "a*",
    "a|ab",
    "(a|b)*c",
    "^abc$",
    "^a$|^b+$",
    r"\Aab\Z",
    "(^a|b)c$",
    "(?:^)?a",
    "a+?b??",
    "[a-c]{2,3}",
    "[^a]",
    "[^a-z\\d]+",
    ".",
    "(?s).",
    "(?s:.)*x",
    r"\d+",
    r"\w",
    r"\s",
    r"\W\S\D",
    r"(?a)\w+|\s",
    r"(?a:\d)\d",
    r"(?i)straße",
    "(?i)k",
    "(?i)[i-k]ſ",
    "(?i)[^k]",
    "(?i:a)b",
    "(?i)(?-i:a)b",
    r"(?ai)k",
    r"(?x) a  b # a comment",
    r"(?m)^a$",
    "é+[à-ü]?",
    "😀{1,2}",
    r"\x00|\u00e9|\t|\N{BULLET}",
    r"[\]\-\\^/]+/",
    "(?P<name>a)(b)?",
    "(a*)*b",
    "(|a)b",
    "x{0}y",
    "(?u:é)",
    r"[\w.+-]+@[\w-]+\.\w+",
]
CONSTRAINTS = {pattern: regex(pattern) for pattern in PATTERNS}
# Where the dialects part: case folding, other digits, marks, exotic spaces, joiners, surrogates'
# neighbours.
CHARACTERS = (
    "aAbBcikKsSxyz019_-^$/\\.@ \t\n\r\x0b\x0c\x1c\x1f\x00\x85\xa0éÉßẞſKıİ²½٣৩\u0301\u200d\u2028"
    "\u2029\ufeff中Ⅷ😀\ud7ff\ue000\U0010ffff"
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(PATTERNS),
    st.one_of(
        st.text(st.sampled_from(CHARACTERS), max_size=6),
        st.text(st.sampled_from("abcxyk19_ \n"), max_size=5),
        st.text(max_size=2),
    ),
)
def test_a_text_is_accepted_if_and_only_if_fullmatch_finds_a_match(pattern, text):
    assert accepts(CONSTRAINTS[pattern], text) == bool(re.fullmatch(pattern, text))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PATTERNS), st.data())
def test_what_a_pattern_generates_is_accepted_whole_and_viable_in_every_part(pattern, data):
    text = data.draw(st.from_regex(re.compile(pattern), fullmatch=True).filter(_is_text))
    assert accepts(CONSTRAINTS[pattern], text)
    assert begins(CONSTRAINTS[pattern], text)


def _is_text(text):
    return not any(unicodedata.category(c) == "Cs" for c in text)


@pytest.mark.parametrize("kind", [r"\d", r"\w", r"\s", "(?i)k", "(?i)s", "(?a)\\w", "."])
def test_a_class_holds_exactly_the_characters_that_re_says(kind):
    constraint = regex(kind)
    draw = random.Random(0)
    every = [chr(c) for c in range(0x3000) if not 0xD800 <= c < 0xE000]
    every += [chr(draw.randrange(0x3000, 0xD800)) for _ in range(500)]
    every += [chr(draw.randrange(0xE000, 0x110000)) for _ in range(500)]
    wrong = [c for c in every if accepts(constraint, c) != bool(re.fullmatch(kind, c))]
    assert wrong == []


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_exact_over_tokens_that_are_parts_of_characters(pattern):
    for seed in range(3):
        found = check_masks(CONSTRAINTS[pattern], random.Random(seed), steps=8)
        if found is not None:
            assert re.fullmatch(pattern, found.decode())


@pytest.mark.parametrize(
    "pattern, shortest, longest", [("a{1,129}", 1, 129), ("[ab]{1,1000}", 1, 1000), (".{3,}", 3, 0)]
)
def test_repetitions_are_counted(pattern, shortest, longest):
    constraint = regex(pattern)
    assert not accepts(constraint, "a" * (shortest - 1))
    assert accepts(constraint, "a" * shortest)
    assert accepts(constraint, "a" * (longest or 2000))
    assert longest == 0 or not begins(constraint, "a" * (longest + 1))


@pytest.mark.parametrize(
    "pattern, what",
    [
        ("(?=a)b", "lookaround"),
        ("a(?!b)", "lookaround"),
        ("(?<=a)b", "lookaround"),
        ("(?!)", "lookaround"),
        (r"(a)\1", "backreference"),
        ("(?P<x>a)(?P=x)", "backreference"),
        ("(a)?(?(1)b|c)", "conditional group"),
        (r"\ba", "word boundary"),
        (r"a\B", "word boundary"),
        ("a^b", "anchor in the middle"),
        ("a$b", "anchor in the middle"),
        ("(^a)*b", "anchor in the middle"),
        ("a*^b", "anchor in the middle"),
        ("(?m)a$\n^b", "anchor in the middle"),
    ],
)
def test_what_masks_do_not_know_is_named(pattern, what):
    with pytest.raises(UnsupportedConstraintError) as refused:
        regex(pattern, engine="llguidance")
    assert refused.value.keyword == what
    assert repr(pattern) in str(refused.value) and what in str(refused.value)
    constraint = regex(pattern)
    assert constraint.engine == "partial"
    assert what in constraint.notes()[0] and "rejection" in constraint.notes()[0]
    assert regex(pattern, engine="partial").notes() == ()


@pytest.mark.skipif(not hasattr(re, "NOFLAG"), reason="new in Python 3.11")
@pytest.mark.parametrize("pattern", ["a++b", "(?>a*)b"])
def test_what_forbids_backtracking_is_judged_on_prefixes(pattern):
    with pytest.raises(UnsupportedConstraintError):
        regex(pattern, engine="llguidance")
    constraint = regex(pattern)
    assert constraint.engine == "partial"
    for text in ("b", "ab", "aab", "a", "abb"):
        assert accepts(constraint, text) == bool(re.fullmatch(pattern, text))


BEYOND = [
    r"(a|b)c\1",
    r"(?P<x>.)(?P=x)\w?",
    r"(?=.*k)\w{2,4}",
    r"\b\w+\b\W\B.?",
    r"(?a)\b\w+\b.",
    r"(?m)a$\n?^b?|(?:^.$\n?)+",
    "a^b|[^a]$(?!b)",
    "(?i)(?<=a)b|k(?!S)|(?<!a)ß",
    r"(a)?b(?(1)c|x)",
    r"(?s).(?<!\s)\Z\n?",
    r"\B|\b|(?=a)",
    r"(?!)|a{0,2}?(?=b)\w",
]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([*PATTERNS, *BEYOND]),
    st.one_of(
        st.text(st.sampled_from(CHARACTERS), max_size=5),
        st.text(st.sampled_from("abcxk_ \n"), max_size=5),
    ),
)
def test_the_other_engine_accepts_the_same_texts(pattern, text):
    constraint = regex(pattern, engine="partial")
    state, viable = after(constraint, text.encode())
    member = bool(re.fullmatch(pattern, text))
    assert (viable and state.accepting) == member
    assert viable or not member
    if pattern not in BEYOND:
        assert viable or not begins(CONSTRAINTS[pattern], text)


@pytest.mark.parametrize("pattern", [r"[^\W\d]+(?!a)", r"\s(?!a)", r"(?!a)\w", r"[^\w\s](?=a)a"])
def test_the_beginning_of_a_character_that_re_takes_is_viable(pattern):
    constraint = regex(pattern)
    for code in (*range(0x80, 0x3100), *range(0x1D000, 0x1E000)):
        data = chr(code).encode()
        if re.fullmatch(pattern, chr(code)) or re.fullmatch(pattern, chr(code) + "a"):
            assert all(constraint.begins("", data[:n]) for n in range(1, len(data)))


def test_what_only_the_regex_package_takes_means_what_it_says_there():
    constraint = regex(r"\p{Lu}\p{Ll}*")
    assert (constraint.engine, accepts(constraint, "Éa")) == ("partial", True)
    assert not accepts(constraint, "ab")
    assert "only the `regex` package" in constraint.notes()[0]
    with pytest.raises(ConstraintError, match="is not a regular expression"):
        regex(r"\p{Lu}", engine="llguidance")


def test_a_language_is_regular_wherever_it_can_be():
    assert regex("a|b$").engine == "llguidance" and regex("a|b$").notes() == ()
    with pytest.raises(OptionError, match="engine must be one of"):
        regex("a", engine="outlines")


def test_a_backreference_that_ignores_case_is_refused_by_every_engine():
    for engine in ("auto", "partial"):
        with pytest.raises(UnsupportedConstraintError, match="ignores case"):
            regex(r"(?i)(a)\1", engine=engine)


@pytest.mark.parametrize("wrong", ["(a", "[a", "a**", "(?P<1>a)", "a{3,2}", r"\q", "a(?i)b("])
def test_what_is_no_regular_expression_is_an_error(wrong):
    with pytest.raises(ConstraintError, match="is not a regular expression"):
        regex(wrong)


@pytest.mark.parametrize(
    "wrong", [3, None, b"a", re.compile(b"a"), r"[^\s\S]", "\ud800", "(" * 3000 + ")" * 3000]
)
def test_what_can_match_no_text_is_an_error(wrong):
    with pytest.raises(ConstraintError):
        regex(wrong)


def test_limits_are_kept():
    with pytest.raises(ConstraintError, match="bytes"):
        regex("a" * 200, limits=Limits(max_bytes=100))
    with pytest.raises(ConstraintError, match="limits"):
        regex(r"(\w+ ){1,500}", limits=Limits(max_lexer_fuel=100))


def test_a_compiled_pattern_keeps_its_flags():
    constraint = regex(re.compile("a.", re.IGNORECASE | re.DOTALL))
    assert accepts(constraint, "A\n")
    assert not accepts(constraint, "A")


def test_the_value_is_the_text():
    constraint = regex("a+")
    assert constraint.parse("aa") == constraint.value_key("aa") == "aa"
    assert constraint.check() is None


def test_an_empty_text_may_be_all_there_is():
    for pattern in ("", "a?", "^$"):
        constraint = regex(pattern)
        state = constraint.compile(VOCABULARY).start()
        assert state.accepting
        assert masks(constraint, [state]).any() == (pattern == "a?")


@pytest.mark.parametrize("block_size", [0, 2])
def test_the_posterior_under_a_pattern_is_exact(block_size):
    pattern = "(?:a|bc)*d?|c{2,3}"
    target = TableModel.random(LETTERS, seed=3, eos_probability=0.2)
    draft = TableModel.random(LETTERS, seed=4, eos_probability=0.2)
    truth = exact(target, (0,), max_tokens=4, member=lambda t: bool(re.fullmatch(pattern, t)))
    total = sum(truth.values())
    options = {"max_tokens": 4, "n_particles": 4000, "block_size": block_size}
    made = request(target, (0,), constraint=regex(pattern), seed=1, **options)
    found = unnormalised(results(run(target, [made], draft=draft, max_rows=4000))[0])
    assert found.keys() <= truth.keys()
    for text, mass in truth.items():
        assert found.get(text, 0.0) == pytest.approx(mass, abs=0.03 * total)
    assert torch.tensor(list(found.values())).sum() == pytest.approx(total, rel=0.05)


@pytest.mark.parametrize(
    ("pattern", "text", "dies_at"),
    [
        (r"(?=.*\d)[a-z0-9]{4,8}", "THIS", 0),
        (r"(?=.*\d)[a-z0-9]{4,8}", "abcdefghi", 8),
        (r"(?=.*7)\d{3}", "I'm", 0),
        (r"\bsea\b.*", "bee", 0),
        (r"(?>ab|a)c(?!d)[x-z]", "abcw", 3),
        (r"([ab]+)-\1", "ab-c", 3),
        (r"(a)?b(?(1)c|d)", "be", 1),
    ],
)
def test_the_regular_parts_of_a_pattern_are_a_mask_whatever_looks_ahead(pattern, text, dies_at):
    constraint = regex(pattern)
    assert constraint.engine == "partial"
    state = constraint.compile(VOCABULARY).start()
    for byte in text[:dies_at].encode():
        assert masks(constraint, [state])[0][byte]
        assert state.advance(byte)
    assert not masks(constraint, [state])[0][ord(text[dies_at])]


def test_the_mask_of_a_pattern_that_looks_ahead_holds_all_its_matches():
    draw = random.Random(0)
    for pattern in (r"(?=.*b)[ab]{1,4}", r"(a|b)\1?(?<!bb)", r"(?>a+|b)a?", r"\Ba\B|\b[ab]\b"):
        constraint = regex(pattern)
        for text in {"".join(draw.choices("ab", k=draw.randrange(5))) for _ in range(60)}:
            assert accepts(constraint, text) == (re.fullmatch(pattern, text) is not None), text
