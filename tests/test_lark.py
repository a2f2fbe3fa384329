"""Context-free grammars in llguidance's dialect, and what is refused of it."""

import functools
import random

import pytest
from languages import accepts, after, begins, check_masks, masks

from guided_smc.errors import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars import Limits
from guided_smc.grammars import lark as any_lark

lark = functools.partial(any_lark, engine="llguidance")

SUMS = """
// sums of numbers, in parentheses or not
start: sum
sum: product ("+" product)*
product: "(" sum ")" | NUMBER   # a comment with <|brackets|> and "quotes
NUMBER: /[0-9]+/
"""

GRAMMARS = {
    "sums": (SUMS, ["1", "1+20", "(1+(2))+3", "((12))"], ["", "1+", "(1", "1)", "a", "()"]),
    "ignored space": ('%ignore " "\nstart: "a" "b"', ["ab", "a b", "a   b"], ["a", "ba", "a\nb"]),
    "repeated": ('start: "a"{2,3} ["é"]', ["aa", "aaaé"], ["a", "aaaa", "aaéé"]),
    "empty": ('start: "a"*', ["", "aaa"], ["b"]),
    "import": ("%import common.INT\nstart: INT", ["7", "42"], ["", "-7", "x"]),
    "case": ('start: "ab"i /c/i', ["ABc", "aBC"], ["ab"]),
    "slashes": ('start: /a\\/b/ "//" /[^"<>]/', ["a/b//c"], ["a/b", "a/b//<"]),
    "schema": (
        'start: "so: " answer "."\nanswer: %json {\n  "enum": ["<a>", 1],\n  "title": "x"\n}',
        ['so: "<a>".', "so: 1."],
        ["so: 1", 'so: "b".', "1"],
    ),
    "negation": ("start: T\nT: /[ab]*/ & ~/.*bb.*/", ["", "abab"], ["abb", "c"]),
    "lazy": ('start: head "x"\nhead[lazy]: /[^;]*;/', [";x", "ab;x"], ["ab;;x", "x"]),
    "suffix": ('start: head "x"\nhead[suffix=";"]: /[^;]*/', [";x", "ab;x"], ["x", "a"]),
    "captured": ('start: a\na[capture="b"]: /a+/', ["aa"], [""]),
    "own options": ('%llguidance {"no_forcing": false}\nstart: "abc"', ["abc"], ["ab"]),
}


@pytest.mark.parametrize("grammar, members, others", GRAMMARS.values(), ids=GRAMMARS)
def test_a_grammar_admits_its_texts_and_no_others(grammar, members, others):
    constraint = lark(grammar)
    assert [text for text in members if not accepts(constraint, text)] == []
    assert [text for text in others if accepts(constraint, text)] == []
    assert all(begins(constraint, text) for text in members)
    for seed in range(4):
        found = check_masks(constraint, random.Random(seed), steps=12)
        assert found is None or accepts(constraint, found.decode())


def test_forced_text_may_be_split_into_tokens_in_every_way():
    constraint = lark('%llguidance {"no_forcing": false}\nstart: "abc"')
    allowed = masks(constraint, [after(constraint, b"")[0]])[0]
    assert allowed.sum() == 2  # a, ab


def test_any_rule_can_be_the_start():
    assert accepts(lark(SUMS.replace("start: sum", ""), start="product"), "(1+2)")
    assert not accepts(lark(SUMS.replace("start: sum", ""), start="product"), "1+2")
    with pytest.raises(ConstraintError, match="rename that"):
        lark(SUMS, start="product")
    with pytest.raises(ConstraintError, match=r"no rule 'total' .found: NUMBER, product, start"):
        lark(SUMS, start="total")
    with pytest.raises(ConstraintError, match="no rule 'start'"):
        lark('a: "b"')
    with pytest.raises(ConstraintError, match="lower case"):
        lark(SUMS, start="NUMBER\nstart: sum")


@pytest.mark.parametrize(
    "grammar, line, what",
    [
        ('start: "a" <|eot|>', 1, "<|eot|>"),
        ('start: "a"\n | <[1-20]>', 2, "<[1-20]>"),
        ("start: @other", 1, "@other"),
        ('a[max_tokens=3]: /a+/\nstart: a "b"', 1, "max_tokens"),
        ("start: a\na[temperature=0.5]: /a+/", 2, "temperature"),
        ('start: a\n\n\na[capture, stop="x"]: /a+/', 4, "stop"),
        ('start: a\na: %json {\n"not": {}}', 2, "$.not"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', 1, "allow_invalid_utf8"),
    ],
)
def test_what_is_not_a_set_of_texts_is_refused_with_its_line(grammar, line, what):
    with pytest.raises(UnsupportedConstraintError) as refused:
        lark(grammar)
    assert f"line {line}: " in str(refused.value) and what in str(refused.value)


def test_attributes_name_nothing_elsewhere():
    constraint = lark('start: [stop] max_tokens\nstop: "s"\nmax_tokens: "m"')
    assert accepts(constraint, "sm") and accepts(constraint, "m")


@pytest.mark.parametrize(
    "grammar, line, reason",
    [
        ("start: a", 1, "unknown name"),
        ('start: "a"\nother: (', 2, ""),
        ('start: "a"\nstart: "b"', 2, "duplicate rule"),
        ("start: A\nA: /(?=a)b/", 2, "look-around"),
        ("start: A\nA: A", None, "no finite text"),
        ('start: "a"\nb: %json {"type": 3}', 2, "$.type"),
        ('start: "a"\nb: %json {"type": ', 2, "not JSON"),
        ('start: "a"\nb: %json {"type": "null", "type": "null"}', 2, "comes twice in one object"),
        ('start: "a\n', 1, ""),
        ("%import nothing.INT\nstart: INT", 1, ""),
        ('%declare X\nstart: "a"', 1, "declare"),
    ],
)
def test_what_is_no_grammar_is_an_error_with_its_line(grammar, line, reason):
    with pytest.raises(ConstraintError) as refused:
        lark(grammar)
    if line:
        assert f"line {line}: " in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "grammar", ['start: "a"', 'start: %json {"const": "a"} | "a"', "start: /a(?=b)b?|a/"]
)
@pytest.mark.parametrize("engine", ["auto", "lark", "llguidance"])
def test_a_byte_order_mark_in_front_of_a_grammar_is_not_read(grammar, engine):
    def reads(source):
        try:
            return lark(source, engine=engine).engine
        except ConstraintError as error:
            return str(error)

    assert reads("\ufeff" + grammar) == reads(grammar)


@pytest.mark.parametrize("empty", ["", " \n\t", "\ufeff\n"])
def test_an_empty_grammar_is_refused_as_empty(empty):
    with pytest.raises(ConstraintError, match="the grammar is empty: it needs a rule 'start'"):
        lark(empty)
    with pytest.raises(ConstraintError, match="found: none"):
        lark("// nothing\n")


@pytest.mark.parametrize("wrong", [None, 3, b"start: A", "\ud800"])
def test_what_is_no_text_of_a_grammar_is_refused(wrong):
    with pytest.raises(ConstraintError):
        lark(wrong)


@pytest.mark.parametrize(
    "grammar, endless",
    [
        ('start: "a" start', "start"),
        ('start: "x" | a\na: b "y"\nb: ("z" | "w"?) (a | b+)', "b"),
        ('start: a{2} | "x"\n!a: "b" [c] a -> start', "a"),
    ],
)
def test_a_rule_that_no_finite_text_satisfies_is_refused(grammar, endless):
    with pytest.raises(ConstraintError, match=f"the rule '[{endless}a]"):
        lark(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start | "b"',
        'start: "a" start?',
        'start: "b" a\n?a: a*b\nb: "c"? b?',
        'start: "a" (start | "b")',
        'start: "a" [start]',
        'start: "a" start{0,2}',
        'start: "a" start~0..2',
        'start: a -> start\n | start "x"\na: "b"\n%ignore / /',
    ],
)
def test_recursion_that_can_end_is_none(grammar):
    assert lark(grammar)


def test_limits_are_kept():
    with pytest.raises(ConstraintError, match="bytes"):
        lark('start: "' + "a" * 200 + '"', limits=Limits(max_bytes=100))
    with pytest.raises(ConstraintError, match="nested"):
        lark("start: " + "(" * 100_000 + '"a"' + ")" * 100_000)
    chain = "".join(f'r{i}: "(" r{i + 1} ")" | "x"\n' for i in range(3000))
    assert accepts(lark(f'start: r0\n{chain}r3000: "y"\n'), "((x))")


def test_the_value_is_the_text():
    constraint = lark(SUMS)
    assert constraint.parse("1+2") == constraint.value_key("1+2") == "1+2"
