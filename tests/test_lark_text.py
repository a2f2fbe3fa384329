"""Lark's own grammars, prefix by prefix: what Lark accepts, and no beginning of it is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import lark
import pytest
from exactness import PROMPT, TARGET, assert_unbiased, runs
from hypothesis import given, settings
from hypothesis import strategies as st
from lark.indenter import Indenter, PythonIndenter
from support import exact

from guided_smc import ConstraintError, OptionError, UnsupportedConstraintError
from guided_smc.grammars import LarkText

CALCULATOR = r"""
    ?start: sum
    ?sum: product | sum "+" product -> add | sum "-" product -> sub
    ?product: atom | product "*" atom -> mul
    ?atom: NUMBER -> number | "-" atom -> neg | "(" sum ")"
    %import common.NUMBER
    %import common.WS_INLINE
    %ignore WS_INLINE
"""
KEYWORDS = r"""
    start: (statement ";")+
    statement: "if" NAME "then" statement | NAME "=" value | "pass"
    value: NAME | INT | list{value}
    list{item}: "[" [item ("," item)*] "]"
    NAME: /[a-z]+/
    %import common.INT
    %ignore /[ \n]+/
    %ignore /#[^\n]*/
"""
RANGES = r"""
    start: range ("," range)*
    range: FLOAT | INT | INT ".." INT
    FLOAT: /\d+\.\d+(e\d+)?/
    INT: /\d+/
"""
CONTEXTUAL = r"""
    start: "let" NAME "is" WORDS "."
    NAME: /[a-z]+/
    WORDS: /[a-z ]+/
    %ignore " "
"""
PRIORITIES = r"""
    start: (A | B | C)+
    A.2: /a+b?/
    B: "ab" | "b"
    C.3: /aac/
"""
LOOKAHEADS = r"""
    start: (KEY | NAME | ODD | SEP)+
    KEY.2: /if\b/
    NAME: /[a-z]+(?!=)/
    ODD.3: /x(?=y*z)/
    SEP: /[ =;]/
"""
STRINGS = r"""
    start: "[" [ESCAPED_STRING ("," ESCAPED_STRING)*] "]"
    %import common.ESCAPED_STRING
"""
BLOCKS = r"""
    start: (_NEWLINE | statement)*
    statement: simple _NEWLINE | "if" NAME ":" suite
    suite: _NEWLINE _INDENT statement+ _DEDENT
    simple: NAME "=" "(" NAME ("," NAME)* ")" | NAME
    NAME: /[a-z]+/
    LPAR: "("
    RPAR: ")"
    _NEWLINE: /(\r?\n[\t ]*)+/
    %declare _INDENT _DEDENT
    %ignore / +/
"""


class Columns(Indenter):
    NL_type = "_NEWLINE"
    OPEN_PAREN_types = ("LPAR",)
    CLOSE_PAREN_types = ("RPAR",)
    INDENT_type = "_INDENT"
    DEDENT_type = "_DEDENT"
    tab_len = 4


GRAMMARS = {
    "calculator": (CALCULATOR, None, "1.5+(-) *e2"),
    "keywords": (KEYWORDS, None, ["if", "then", "pass", "x", "=", "[", ",", "]", ";", " ", "#\n"]),
    "ranges": (RANGES, None, "12.,e"),
    "contextual": (CONTEXTUAL, None, ["let", "is", " ", "a", "s", "."]),
    "priorities": (PRIORITIES, None, "abc"),
    "lookaheads": (LOOKAHEADS, None, "ifxyz= "),
    "strings": (STRINGS, None, '[]",\\a'),
    "blocks": (BLOCKS, Columns, ["if", "a", ":", "\n", " ", "  ", "\t", "(", ")", ",", "="]),
}
ACCEPTED = {
    "calculator": ["1", "-1", "(1.5 + 2)*-3", "1e5-1.e5", " 2 * ( 3 - 4 ) "],
    "keywords": [
        "x=1;",
        "iffy = thenx;",
        "if x then y = [a, [1, 2], []];pass;",
        "passing=p;",
        "a=1;#note; if\nb=2;",
    ],
    "ranges": ["1", "1.5", "1..5", "1.5,1..5,15", "1.5e10"],
    "contextual": ["let is is is let.", "let a is a b c."],
    "priorities": ["a", "aab", "aac", "aabaac", "bab", "abab"],
    "lookaheads": ["if", "iffy", "if x", "xyz", "xyyz", "ab ="],
    "strings": ["[]", '["a"]', r'["a\"b","\\"]'],
    "blocks": [
        "",
        "a\n",
        "if a:\n  b\n  if c:\n    d\ne\n",
        "x = (a,\n b)\n",
        "if a:\n\tb\n    c\n",
        "if a:\n  b\n\n\n  c\n",
    ],
}


def make(name: str, **options) -> LarkText:
    grammar, postlex, _ = GRAMMARS[name]
    return LarkText(grammar, postlex=postlex and postlex(), **options)


def reference(name: str) -> lark.Lark:
    grammar, postlex, _ = GRAMMARS[name]
    return lark.Lark(grammar, parser="lalr", regex=True, postlex=postlex and postlex())


def accepts(parser: lark.Lark, text: str) -> bool:
    try:
        parser.parse(text)
    except (lark.exceptions.LarkError, AssertionError, IndexError):
        return False
    return True


def read(constraint: LarkText, text: str, pieces=None):
    """The cursor after the text, one character or one piece at a time."""
    cursor = constraint.begin()
    for piece in pieces or text:
        cursor = constraint.extend(cursor, piece)
        if cursor is None:
            return None
    return cursor


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_beginning_of_an_accepted_text_is_viable(name):
    constraint, parser = make(name), reference(name)
    for text in ACCEPTED[name]:
        assert accepts(parser, text), text
        cursor = read(constraint, text)
        assert cursor is not None, text
        assert constraint.complete(cursor), text
        whole = constraint.extend(constraint.begin(), text) if text else cursor
        assert whole == cursor


@pytest.mark.parametrize("name", GRAMMARS)
def test_all_short_texts_are_judged_as_lark_judges_them(name):
    constraint, parser = make(name), reference(name)
    alphabet = GRAMMARS[name][2]
    longest = 5 if len(alphabet) <= 3 else 4 if len(alphabet) <= 7 else 3
    members = 0
    for n in range(longest + 1):
        for pieces in itertools.product(alphabet, repeat=n):
            text = "".join(pieces)
            cursor = read(constraint, text, pieces)
            if accepts(parser, text):
                members += 1
                assert cursor is not None, text
                assert constraint.complete(cursor), text
            else:
                assert cursor is None or not constraint.complete(cursor), text
    assert members > 3 or name in ("contextual", "strings")  # theirs are longer


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(GRAMMARS)))
def test_long_texts_are_judged_as_lark_judges_them(data, name):
    constraint, parser = _cached(name)
    pieces = data.draw(st.lists(st.sampled_from([*GRAMMARS[name][2], *ACCEPTED[name]]), max_size=9))
    pieces = [p for p in pieces if p]
    text = "".join(pieces)
    cursor = read(constraint, text, pieces)
    assert accepts(parser, text) == (cursor is not None and constraint.complete(cursor))
    if cursor is not None:
        assert constraint.extend(constraint.begin(), text) == cursor if text else True
        assert read(constraint, text) is not None


_made: dict = {}


def _cached(name):
    if name not in _made:
        _made[name] = make(name), reference(name)
    return _made[name]


@pytest.mark.parametrize(
    ("name", "hopeless"),
    [
        ("calculator", [")", "1)", "1 2", "(1))", "1+*", "a", "1..", "1ea"]),
        ("keywords", ["=", "if x y", "x=1 2", "[", "x=[1,,", "if then x", "pass=", "X"]),
        ("ranges", ["a", "1...", "1.5.", "1..5.", ",", "1,,"]),
        ("contextual", ["is", "let a b", "let a is ."]),
        ("priorities", ["c", "bc", "aad"]),
        ("strings", ['["a"b', "a", "[,", '[""]x']),
        ("blocks", ["  if a:\nb", "if a:\n  b\n c", "if a:\nb", "a b", "x=(a)\n  b", "=", "if :"]),
    ],
)
def test_hopeless_texts_are_refused(name, hopeless):
    constraint = make(name)
    for text in hopeless:
        assert read(constraint, text) is None, text


def test_the_tree_is_there_on_request():
    assert make("calculator").parse("1+2") == "1+2"
    tree = make("calculator", tree=True).parse("1+2")
    assert isinstance(tree, lark.Tree)
    assert tree.data == "add"
    assert len({tree, make("calculator", tree=True).parse("1 + 2")}) == 1


def test_votes_join_texts_with_one_tree():
    constraint = make("calculator", tree=True)
    assert constraint.value_key("1+2") == constraint.value_key("1 + 2")
    assert constraint.value_key("1+2") != constraint.value_key("1+3")
    assert make("calculator").value_key("1+2") != make("calculator").value_key("1 + 2")


def test_the_start_rule_and_imports_are_the_users(tmp_path):
    (tmp_path / "words.lark").write_text('WORD: /[a-z]+/\nthing: WORD "!"\n')
    constraint = LarkText(
        "%import words.thing\nother: thing+", start="other", import_paths=[str(tmp_path)]
    )
    cursor = read(constraint, "abc!d!")
    assert constraint.complete(cursor)
    assert not constraint.complete(read(constraint, "abc"))


def test_python_itself_can_be_followed():
    """Lark's own grammar of Python: hundreds of rules, keywords, indentation, lookaheads."""
    source = (
        "class A(B, metaclass=C):\n"
        "    '''Doc.'''\n"
        "    def f(self, *, x: int = 0x1F, **kw) -> 'str':\n"
        "        if x and not kw:  # note\n"
        "            return [i ** 2 for i in range(10) if i % 2 == 0]\n"
        "\n"
        "        async_ = lambda y: (y,\n"
        "   1e5, f'a')\n"
        "        return async_\n"
        "print(A().f(x=1), \"it's\", 'a\\'b', not_a_keyword, 1.5j)\n"
    )
    grammar = (Path(lark.__file__).parent / "grammars" / "python.lark").read_text()
    constraint = LarkText(grammar, start="file_input", postlex=PythonIndenter())
    cursor = read(constraint, source)
    assert cursor is not None
    assert constraint.complete(cursor)
    assert len(cursor.text) - cursor.settled.at < 10
    for broken in ("def f(:", "class 1", "x = = 2\n", "if x:\ny", "x = )", "return 1 2"):
        assert read(constraint, broken) is None, broken


@pytest.mark.parametrize("block_size", [0, 2])
def test_the_posterior_under_a_grammar_is_exact(block_size):
    grammar = 'start: "a" start "b" | word | "d"\nword: WORD\nWORD: /c+/'
    found = runs(1500, constraint=LarkText(grammar), block_size=block_size, n_particles=4)
    parser = lark.Lark(grammar, parser="lalr")
    expected = exact(TARGET, PROMPT, max_tokens=4, member=lambda t: accepts(parser, t))
    assert len(expected) > 6
    assert_unbiased(found, expected)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: A", "A"),
        ('start: "a" | b', "b"),
        ('start: x | y\nx: "a"\ny: "a"', "Reduce/Reduce"),
        ("start: A\nA: /(/", "A"),
        ("start: A\nA: /a*/", "zero-width"),
        ("%import nowhere.THING\nstart: THING", "nowhere"),
    ],
)
def test_what_lark_refuses_is_refused_with_its_reason(grammar, said):
    with pytest.raises(ConstraintError, match=said):
        LarkText(grammar, name="mine")


def test_what_cannot_be_followed_is_refused_by_name():
    class Other(Columns):
        def handle_NL(self, token):
            yield token

    with pytest.raises(UnsupportedConstraintError, match="post-lexer Other") as error:
        LarkText(BLOCKS, postlex=Other())
    assert error.value.keyword == "postlex"
    with pytest.raises(OptionError, match=r"is a class: pass an instance, postlex=Other\(\)"):
        LarkText(BLOCKS, postlex=Other)
    with pytest.raises(UnsupportedConstraintError, match="nothing makes the terminal _") as error:
        LarkText(BLOCKS)
    assert error.value.keyword == "%declare"
    with pytest.raises(UnsupportedConstraintError, match=r"terminal A: .*\\X") as error:
        LarkText(r"start: A" + "\n" + r"A: /a\X/")
    assert error.value.keyword == r"\X"


@pytest.mark.model
def test_the_real_model_computes(lm):
    out = lm.generate(
        "Write an arithmetic expression.",
        output_type=make("calculator", tree=True),
        n_particles=4,
        max_tokens=12,
        seed=0,
    )
    assert isinstance(out.value, lark.Tree)
    assert out.usage.constraint_calls < 30 * out.usage.particle_tokens


def test_only_the_lexers_that_a_text_reaches_are_made():
    constraint = LarkText(BLOCKS, postlex=GRAMMARS["blocks"][1]())
    assert constraint._lexers == {}
    assert constraint.extend(constraint.begin(), "if a") is not None
    made = len(constraint._lexers)
    assert 0 < made < len({id(lexer) for lexer in constraint._contextual.values()})
    assert constraint.extend(constraint.begin(), "if a") is not None
    assert len(constraint._lexers) == made
