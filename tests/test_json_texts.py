"""How JSON may be spelt, how texts are read as they grow, and when two values are equal."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from languages import INTEGER, VOCABULARY, accepts, dies_at, in_mask

from guided_smc.errors import OptionError, OutputValidationError
from guided_smc.grammars import json_schema
from guided_smc.potentials import Completion


def test_an_escaped_spelling_of_a_property_does_not_evade_its_schema():
    constraint = json_schema({"type": "object", "properties": {"a": INTEGER}})
    assert accepts(constraint, '{"b": "x"}')
    assert not accepts(constraint, r'{"\u0061": "x"}')
    assert not accepts(constraint, '{"a": 1, "a": "x"}')


@pytest.mark.parametrize(
    "text", ['{"b": 1, "b": 1}', r'{"b": 1, "\u0062": 2}', '{"a":{"b":1,"b":2}}']
)
def test_a_repeated_key_ends_a_text(text):
    constraint = json_schema({"type": "object", "properties": {"a": {}}})
    assert in_mask(constraint, text)
    assert dies_at(constraint, text) == text.rindex(":")


@pytest.mark.parametrize(
    "text, valid",
    [
        (r'"\u00e9\ud83d\ude00"', True),
        ('"é😀"', True),
        (r'"\ud83d"', False),
        (r'"\ude00\ud83d"', False),
        (r'{"\u0022": 1, "\"a": {}, "": []}', True),
        ("1e5", True),
        ("-0.0e-10", True),
        ("1" * 5000, True),
        ("[" * 50 + "]" * 50, True),
    ],
)
def test_json_is_accepted_in_its_many_spellings(text, valid):
    assert accepts(json_schema({}), text) == valid
    assert dies_at(json_schema({}), text) is None or not valid


@settings(max_examples=100, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    indent=st.sampled_from([None, 1]),
    ensure_ascii=st.booleans(),
    damage=st.none() | st.tuples(st.integers(0, 200), st.sampled_from('{}[],:"1e-.\\ux tn')),
)
def test_the_check_reads_json_as_json_is_read(value, indent, ensure_ascii, damage):
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
        text.encode()
    except UnicodeEncodeError:
        return
    if damage is not None:
        at, char = damage
        text = text[:at] + char + text[at + 1 :]
    try:
        pairs = json.loads(text, object_pairs_hook=lambda p: p, parse_constant=lambda _: 1 / 0)
        valid = not _repeats(pairs) and not any(
            "\ud800" <= c <= "\udfff" for c in json.dumps(pairs, ensure_ascii=False)
        )
    except (ValueError, ZeroDivisionError):
        valid = False
    assert (dies_at(json_schema({}), text) is None) == valid


def _repeats(pairs):
    """Whether an object, read as a list of pairs, has a key twice."""
    if not isinstance(pairs, list):
        return False
    if pairs and all(type(p) is tuple for p in pairs):
        keys = [key for key, _ in pairs]
        return len(set(keys)) < len(keys) or any(_repeats(value) for _, value in pairs)
    return any(_repeats(part) for part in pairs)


def test_texts_that_fork_are_checked_apart_and_at_the_cost_of_what_is_new():
    constraint = json_schema({"items": {"type": "string"}, "uniqueItems": True})
    check = constraint.check()
    words = [f'"{i}"' for i in range(300)]
    texts = ["[" + ", ".join(words[:n]) for n in range(1, 301)]
    for text in texts:
        forks = [f"{text}, {word}," for word in ('"new"', '"0"')]
        scores = check.log_prefix([Completion("", (), t, False, VOCABULARY) for t in forks])
        assert scores == [0.0, -float("inf")]


@pytest.mark.parametrize(
    "style", [{"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}]
)
def test_the_usual_styles_of_json_are_accepted(style):
    value = {"a": [1, {"b": [], "c": "x"}], "d": {"e": None}}
    assert accepts(json_schema(True), json.dumps(value, **style))
    one_line = "indent" not in style
    assert accepts(json_schema(True, whitespace="line"), json.dumps(value, **style)) == one_line
    assert accepts(json_schema(True, whitespace="any"), json.dumps(value, **style))


@pytest.mark.parametrize("text", ["{  }", "{ \n}", "{\n\n}", " {}", "{} ", "{\n" + 41 * " " + "}"])
def test_whitespace_cannot_go_on_and_on(text):
    assert accepts(json_schema({"type": "object"}), "".join(text.split()))
    assert not accepts(json_schema({"type": "object"}), text)


def test_an_unknown_whitespace_is_refused():
    with pytest.raises(OptionError, match="compact"):
        json_schema({}, whitespace="none")
    for indent in (-1, 41, "  ", None):
        with pytest.raises(OptionError, match="from 0 to 40"):
            json_schema({}, whitespace="indented", indent=indent)


def test_a_number_that_python_does_not_read_is_an_output_error():
    with pytest.raises(OutputValidationError):
        json_schema(INTEGER).parse("1" * 5000)


def test_plain_data_is_parsed_from_a_schema():
    assert json_schema({}).parse('{"a": [1, null]}') == {"a": [1, None]}


def test_equal_values_have_equal_keys_and_others_do_not():
    key = json_schema({}).value_key
    same = [
        ['{"a": 1, "b": [2]}', '{"b":[2.0],"a":1e0}', '{"b": [20e-1], "a": 1.000}'],
        ["0", "-0", "0.0", "0e5"],
        ["1e400", "10e399"],
        ["9007199254740993", "9007199254740993.0"],
        ['"é"', r'"\u00e9"'],
        ["-1.50", "-15e-1"],
    ]
    for group in same:
        assert len({key(text) for text in group}) == 1
    others = ["1", "true", '"1"', "[1]", "null", "false", "-1", "9007199254740992", "10", "0.1"]
    others += ['{"number": "1e0"}', '"1e0"', "1e9999999999999999999"]
    keys = [key(group[0]) for group in same] + [key(text) for text in others]
    assert len(set(keys)) == len(keys)
