"""One door for grammars: what Lark takes means what Lark says, whichever engine it became."""

import itertools
import random
import re

import lark as lark_package
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from languages import check_masks
from lark.indenter import PythonIndenter

from guided_smc import LM, TableModel, Vocabulary
from guided_smc.errors import (
    ConstraintError,
    OptionError,
    OutputValidationError,
    UnsupportedConstraintError,
)
from guided_smc.grammars import Lark, Limits, lark, lark_masks

JSON = """
?start: value
?value: object | array | ESCAPED_STRING | SIGNED_NUMBER | "true" | "false" | "null"
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: ESCAPED_STRING ":" value
%import common (ESCAPED_STRING, SIGNED_NUMBER, WS)
%ignore WS
"""

# grammar, pieces of texts, members, the engine; a text of which llguidance's dialect thinks
# otherwise than Lark, None where it agrees on all, or the reason why it refuses the grammar.
CORPUS = {
    "parentheses": ('start: "(" start ")" | "x"', "(x)", ["x", "((x))"], "llguidance", None),
    "sums": (
        'start: p ("+" p)*\np: "(" start ")" | N   // product\nN: /[0-9]+/',
        "+()1",
        ["1", "11+(1)", "(1+1)+1"],
        "llguidance",
        None,
    ),
    "json": (JSON, ["[", "]", "{", "}", ":", ",", '"\\q"', "1.", "e", "true", " "],
             ['{"\\q": [1.e1 , true]} '], "llguidance", " 1."),
    "strings": ('start: ESCAPED_STRING+\n%import common.ESCAPED_STRING', '"\\a\n',
                ['"a"', '"\\a""\\""'], "llguidance", '"\n"'),
    "ignored": ('start: "a" "b"+\n%ignore / +/\n%ignore /#[^\\n]*\\n/', ["a", "b", " ", "#", "\n"],
                ["ab", " a #b\n b ", "#\nab#a\n"], "llguidance", " ab"),
    "template": ('start: sep{A, ";"}\nsep{x, s}: x (s x)*\nA: "a"', "a;,", ["a", "a;a"],
                 "llguidance", "not supported"),
    "repeated": ('start: "a"~2..3 ["b"] "c"*', "abc", ["aa", "aaabcc"], "llguidance", None),
    "comparisons": ('start: N ("<" | "<=" | "==" | "=") N\nN: /[xy]+/', "<=xy",
                    ["x<y", "x<=xy", "x==y", "x=y"], "llguidance", None),
    "case": ('start: "select"i C ("," C)*\nC: "*" | "x"i\n%ignore " "', ["sElect", "x", "X", "*",
             ",", " "], ["sElect x,*", "sElectX"], "llguidance", " sElectx"),
    "numbers": ('start: INT | HEX | FLOAT\nINT: /[1-9]/ DIGIT*\nHEX: "0x" (DIGIT | "a")+\n'
                'FLOAT: (INT | "0") "." DIGIT+\nDIGIT: "0".."9"', "01.xa", ["10", "0x0a", "0.01"],
                "llguidance", None),
    "characters": ('start: "é" /[à-ü]/ "\\n" | "\\\\" /[^a]/s | "日" "本"?', ["é", "à", "\n", "\\",
                   "日", "本", "a"], ["éà\n", "\\é", "日本"], "llguidance", None),
    "words": ('start: (WORD | INT | ".")*\n%import common (WORD, INT)', "a1. ", ["", "a", "a1.1a"],
              "llguidance", None),
    "empty": ('start: a b*\na: | "x"\nb: "(" start ")"', "x()", ["", "x", "()(x)"],
              "llguidance", None),
    "left": ('start: start "-" t | t\nt: "x" | "-" t', "-x", ["x", "x--x", "--x-x"],
             "llguidance", None),
    "start": ('thing: "a" thing? other\nother: "b"', "abc", ["ab", "aabb"], "llguidance", None),
    # Lark's lexer makes up its mind otherwise than llguidance's.
    "keywords": ('start: ("if" NAME | NAME "=" NAME ";")+\nNAME: /[a-z]+/\n%ignore " "',
                 ["if", "x", "=", " ", ";"], ["if x", "ifx = x;"], "lark",
                 "if=x;"),
    "backwards": ('start: range ("," range)*\nrange: FLOAT | INT | INT ".." INT\n'
                  'FLOAT: /\\d+\\.\\d+/\nINT: /\\d+/', "1.,", ["1", "1.1", "1..1"], "lark", "1..1"),
    "first branch": ('start: A "c" | A "b"\nA: /a|ab/', "abc", ["ac", "ab"], "lark", "abc"),
    "lazy": ('start: C+ "x"\nC: /<.*?>/', "<>x", ["<>x", "<x><<>x"], "lark", "<>x"),
    "order": ('start: A B\nA.2: "a"+\nB: "ab" | "b"', "ab", ["ab", "aab"], "llguidance",
              "not supported"),
    "adjacent": ('start: A B | B\nA: "a"\nB: "ab" "c"?', "abc", ["ab", "aab", "abc"],
                 "llguidance", None),
    "behind": ('start: A B\nA: /a(b*c)?/\nB: /b+/', "abc", ["ab", "abbcb"], "lark", "ab"),
    "looking": ('start: (A | B)+\nA: /a(?=b|a)/\nB: /b/', "ab", ["ab", "aab"], "lark",
                "not supported"),
    "dangling": ('start: s\ns: "i" s ["e" s] | "x" "e"?', "iex", ["ix", "ixe"], "lark", "ixex"),
    "priorities": ('start: (A | B | C)+\nA.2: /a+b?/\nB: "ab" | "b"\nC.3: /aac/', "abc",
                   ["aabaac", "abab"], "lark", "not supported"),
    "shadowed": ('start: INT | HEX\nINT: "0" | /[1-9]/ DIGIT*\nHEX: "0x" DIGIT+\nDIGIT: "0".."1"',
                 "01x", ["0", "10"], "lark", "0x0"),
    "ranked": ('start: a | b\na.2: "x" "y"\nb: "x" "y" | "z"', "xyz", ["xy", "z"], "lark",
               "not supported"),
    "dropped": ('start: "a" S? "b"\nS: " "\n%ignore S', "ab ", ["ab", " a b"], "lark", " ab"),
}  # fmt: skip
OPTIONS = {"start": {"start": "thing"}}


def judged(name):
    """Whether Lark itself accepts a text."""
    parser = lark_package.Lark(CORPUS[name][0], parser="lalr", regex=True, **OPTIONS.get(name, {}))

    def accepts(text):
        try:
            parser.parse(text)
        except lark_package.exceptions.LarkError:
            return False
        return True

    return accepts


def walk(constraint, text):
    """How many bytes are viable, and whether the text is a member."""
    compiled = constraint.compile(VOCABULARY)
    state = compiled.start()
    for n, byte in enumerate(text.encode()):
        if not state.advance(byte):
            return n, False
    return len(text.encode()), state.accepting


VOCABULARY = Vocabulary([*(bytes([i]) for i in range(256)), b""], eos_ids=[256])


@pytest.mark.parametrize("name", CORPUS)
def test_both_engines_agree_with_lark_on_all_short_texts(name):
    grammar, pieces, members, engine, _ = CORPUS[name]
    accepts = judged(name)
    options = OPTIONS.get(name, {})
    auto, text_engine = lark(grammar, **options), lark(grammar, engine="lark", **options)
    assert (auto.engine, auto.dialect, text_engine.engine) == (engine, "lark", "lark")
    assert (auto.notes() == ()) == (engine == "llguidance") and text_engine.notes() == ()
    longest = 5 if len(pieces) <= 4 else 4 if len(pieces) <= 5 else 3
    texts = {
        "".join(chosen)
        for n in range(longest + 1)
        for chosen in itertools.product(pieces, repeat=n)
    }
    texts |= {*members, *(m + p for m in members for p in pieces)}
    found = 0
    for text in sorted(texts):
        member, size = accepts(text), len(text.encode())
        found += member
        viable, accepted = walk(auto, text)
        assert accepted == member, text
        other_viable, other_accepted = walk(text_engine, text)
        assert other_accepted == member, text
        assert viable <= other_viable
        assert viable == size or not member
    assert found >= len(members)
    assert all(accepts(text) for text in members)


@pytest.mark.parametrize("name", CORPUS)
def test_llguidances_dialect_agrees_or_is_known_to_differ(name):
    grammar, pieces, members, _, other = CORPUS[name]
    accepts = judged(name)
    options = OPTIONS.get(name, {})
    if other == "not supported":
        with pytest.raises(ConstraintError, match=r"not supported|look-around"):
            lark(grammar, engine="llguidance", **options)
        return
    constraint = lark(grammar, engine="llguidance", **options)
    assert constraint.dialect == "llguidance"
    if other is not None:
        assert walk(constraint, other)[1] != accepts(other)
        return
    for n in range(5):
        for chosen in itertools.product(pieces, repeat=n):
            text = "".join(chosen)
            assert walk(constraint, text)[1] == accepts(text), text
    assert all(walk(constraint, text)[1] for text in members)


# What may stand together in a random grammar: overlapping, lazy, with gaps, cut short, nullable.
TERMINALS = """
    "a" "b" "c" "ab" "bc" "abc" /a+/ /a+b?/ /[ab]+/ /b+c/ /a(b|c)/ /(ab)+/ /c|ca/ /a*b/ /[^a]/
    /b*?c/ /(a|ab)(c|bcd)?/ /a{2,3}/ /ca?/ /(?:a|b)c?/ /[bc]{1,2}/ /a.?/
"""


def random_grammar(draw):
    terminals = TERMINALS.split()
    names = "ABCDE"[: draw.randint(2, 5)]

    def body(least):
        parts = []
        for _ in range(draw.randint(least, 3)):
            one, other = draw.choice(names), draw.choice([*names, "x", "y"])
            parts.append(draw.choice([one, one, other, f"({one} | {other}){draw.choice('*+?')}"]))
        return " ".join(parts)

    lines = [f"start: {body(1)} | {body(1)}", f"x: {body(0)} | {body(0)}", f"y: {body(0)} | A"]
    for name in names:
        lines.append(f"{name}{draw.choice(['', '', '.2'])}: {draw.choice(terminals)}")
    ignored = draw.choice(["", "", '%ignore "d"', "%ignore /cd*/", f"%ignore {names[-1]}"])
    return "\n".join([*lines, ignored, ""])


def test_masks_of_random_grammars_mean_what_lark_says():
    """Where they are claimed to, that is: the comparison of the lexers is what is on trial."""
    texts = ["".join(t) for n in range(6) for t in itertools.product("abcd", repeat=n)]
    masked, members = 0, 0
    for seed in range(150):
        draw = random.Random(seed)
        grammar = random_grammar(draw)
        try:
            parser = lark_package.Lark(grammar, parser="lalr", regex=True)
            constraint = lark(grammar, engine="auto")
        except (lark_package.exceptions.LarkError, ConstraintError):
            continue
        if constraint.engine != "llguidance":
            continue
        masked += 1
        for text in draw.sample(texts, 300):
            try:
                parser.parse(text)
                member = True
            except lark_package.exceptions.LarkError:
                member = False
            members += member
            assert walk(constraint, text)[1] == member, (grammar, text)
    assert masked > 15 and members > 120


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from('"\\\\a\n'), max_size=9))
def test_escaped_strings_end_where_larks_do(text):
    found = [
        match and match[0]
        for pattern in (lark_masks._STRING, lark_masks._STRING_FORWARDS)
        for match in [re.match(pattern, text)]
    ]
    assert found[0] == found[1]


def test_masks_of_a_lark_grammar_are_exact_over_parts_of_characters():
    for name in ("json", "characters", "ignored"):
        constraint = lark(CORPUS[name][0])
        for seed in range(3):
            found = check_masks(constraint, random.Random(seed), steps=12)
            assert found is None or judged(name)(found.decode())


ALIASES = """
?start: sum
?sum: product | sum "+" product -> add
?product: N -> number | "(" sum ")"
N: /[0-9]+/
%ignore " "
"""
AMBIGUOUS = 'start: a | b\na: "x" | "y"\nb: "x" "z"?\n'


class Compute(lark_package.Transformer):
    def number(self, children):
        return int(children[0])

    def add(self, children):
        return {"sum": sum(c["sum"] if isinstance(c, dict) else c for c in children)}


@pytest.mark.parametrize("engine", ["auto", "lark", "llguidance"])
def test_the_tree_and_what_is_made_of_it_are_there_on_request(engine):
    assert lark(ALIASES, engine=engine).parse("1 +2") == "1 +2"
    constraint = lark(ALIASES, engine=engine, tree=True)
    tree = constraint.parse("1 +2")
    assert isinstance(tree, lark_package.Tree) and tree.data == "add"
    assert constraint.value_key("1+2") == constraint.value_key("1 +2")
    assert len({constraint.value_key(t) for t in ("1+2", "(1)+2", "2+1", "1+2+3")}) == 3
    computed = lark(ALIASES, engine=engine, transformer=Compute())
    assert computed.parse("1+(2+3)") == {"sum": 6}
    assert computed.value_key("(1) + 2") == computed.value_key("1+2")  # of trees: hashable


def test_a_grammar_beyond_lalr_has_earleys_tree():
    constraint = lark(AMBIGUOUS, tree=True)
    assert (constraint.engine, constraint.dialect) == ("llguidance", "llguidance")
    assert constraint.parse("xz").children[0].data == "b"
    with pytest.raises(ConstraintError, match="tree=True needs a grammar that the lark package"):
        lark('start: "a"{2,3}', tree=True)


def test_a_text_without_a_tree_or_value_is_an_error_with_the_text():
    constraint = lark('start: W\nW: /[a-z]+/ | " "\n%ignore W', engine="llguidance", tree=True)
    with pytest.raises(OutputValidationError, match="finds no tree") as error:
        constraint.parse("ab")
    assert error.value.text == "ab" and constraint.value_key("ab") == "ab"

    class Picky(lark_package.Transformer):
        def number(self, children):
            raise ValueError("odd")

    with pytest.raises(OutputValidationError, match=r"'1'.*ValueError\('odd'\)"):
        lark(ALIASES, transformer=Picky()).parse("1")
    for wrong in (Compute, int, "x"):
        with pytest.raises(OptionError, match=r"instance of lark\.Transformer"):
            lark(ALIASES, transformer=wrong)


def test_votes_add_up_over_trees():
    letters = b"12+() "
    vocabulary = Vocabulary([*(bytes([b]) for b in letters), b""], [len(letters)])
    lm = LM(TableModel.random(vocabulary, seed=2, eos_probability=0.4))
    constraint = lark(ALIASES, transformer=Compute())
    out = lm.generate(
        "1", output_type=constraint, n_particles=60, max_tokens=5, seed=0, select="vote"
    )
    tree = constraint.value_key(out.text)
    assert out.value == constraint.parse(out.text)
    alike = {p.text for p in out.particles if constraint.value_key(p.text) == tree}
    assert len(alike) > 1


def test_what_only_one_dialect_has_is_read_in_it():
    for own in (
        'start: %json {"type": "integer"}',
        "start: T\nT: /[ab]+/ & ~/a/",
        "start: a\na[lazy]: /a+b/",
        '%llguidance {"no_forcing": true}\nstart: "a"',
    ):
        constraint = lark(own)
        assert (constraint.engine, constraint.dialect) == ("llguidance", "llguidance")
        assert constraint.notes() == () and isinstance(constraint, Lark)
    assert "Reduce/Reduce" in lark(AMBIGUOUS).notes()[0]
    assert lark(AMBIGUOUS, engine="llguidance").notes() == ()


@pytest.mark.parametrize(
    "grammar, reasons",
    [
        ("start: a", ["line 1: unknown name", "lark package: ", "a"]),
        ('start: "a', ["line 1: ", "lark package: "]),
        ('start: "a" start', ["no finite text", "lark package: no finite text"]),
        ('start: x %json {"not": {}}\nx: "a"', ["$.not", "'not' is more than a grammar can say"]),
        ("%import nothing.INT\nstart: INT", ["line 1", "No such file"]),
        ("start: A\nA: /a\\X/", ["line 2", "cannot be judged"]),
        ("start: " + "(" * 1200 + '"a"' + ")" * 1200, ["nested", "nested too deeply"]),
    ],
)
def test_what_both_refuse_is_an_error_with_both_reasons(grammar, reasons):
    with pytest.raises(ConstraintError) as refused:
        lark(grammar)
    message = str(refused.value)
    assert all(reason in message for reason in reasons), message
    assert "\n" not in message and len(message) < 500
    if "$.not" in reasons:
        assert isinstance(refused.value, UnsupportedConstraintError)
        assert (refused.value.keyword, refused.value.path) == ("not", "$.not")
        assert "make the whole text JSON" in message and "lark package" not in message


def test_options_of_lark_go_to_lark(tmp_path):
    grammar = 'start: (NAME ":" _NL _IN NAME _NL _OUT)+\nNAME: /[a-z]+/\n_NL: /\\n */\n'

    class Blocks(PythonIndenter):
        NL_type, INDENT_type, DEDENT_type = "_NL", "_IN", "_OUT"

    constraint = lark(grammar + "%declare _IN _OUT", postlex=Blocks())
    assert (constraint.engine, constraint.notes()) == ("lark", ())
    assert walk(constraint, "a:\n b\nc:\n  d\n")[1] and not walk(constraint, "a:\nb\n")[1]
    (tmp_path / "words.lark").write_text("WORD: /[a-z]+/")
    constraint = lark("%import words.WORD\nstart: WORD", import_paths=[str(tmp_path)])
    assert constraint.engine == "llguidance" and walk(constraint, "ab")[1]
    with pytest.raises(ConstraintError, match="not defined"):
        lark("start: WORD", import_paths=[str(tmp_path)])
    with pytest.raises(OptionError, match="need its engine"):
        lark('start: "a"', engine="llguidance", postlex=Blocks())
    with pytest.raises(OptionError, match="engine must be one of"):
        lark('start: "a"', engine="earley")


def test_limits_hold_for_both_engines():
    for engine in ("auto", "lark", "llguidance"):
        with pytest.raises(ConstraintError, match="bytes"):
            lark('start: "' + "a" * 200 + '"', engine=engine, limits=Limits(max_bytes=100))
    # Beyond the limits of masks, the other engine is left.
    constraint = lark("start: W\nW: /(\\w+ ){1,200}/", limits=Limits(max_lexer_fuel=100))
    assert constraint.engine == "lark" and walk(constraint, "a bc ")[1]
