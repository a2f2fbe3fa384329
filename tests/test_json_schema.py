"""What a JSON Schema constraint accepts, refuses, and says."""

import gc
import json
import random
import threading
import weakref
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_smc.errors import (
    ConstraintError,
    OptionError,
    OutputValidationError,
    UnsupportedConstraintError,
)
from guided_smc.grammars import Limits, Relaxed, json_schema
from guided_smc.potentials import Completion
from guided_smc.vocabulary import Vocabulary

# 256 bytes, tokens of several bytes (two of them equal), an end token, padding, a control token.
WORDS = [
    b'{"',
    b'":',
    b'": ',
    b'", "',
    b'"}',
    b"true",
    b"null",
    b"\n  ",
    b"12",
    b"12",
    "é".encode(),
]
TOKENS: list[bytes | None] = [bytes([i]) for i in range(256)] + WORDS
END, CONTROL = len(TOKENS), len(TOKENS) + 2
VOCABULARY = Vocabulary([*TOKENS, b"", None, b'"', None], eos_ids=[END], special_ids=[CONTROL])
assert len(VOCABULARY) % 32 != 0

INTEGER = {"type": "integer"}


def tag(name):
    return {"type": "object", "properties": {"t": {"const": name}}, "required": ["t"]}


def closed(properties, **more):
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def after(constraint, data, vocabulary=VOCABULARY):
    """The state after bytes given one token each, and whether none was refused."""
    state = constraint.compile(vocabulary).start()
    return state, all(state.advance(byte) for byte in data)


def in_mask(constraint, text):
    """Whether the mask alone lets a text pass."""
    state, viable = after(constraint, text.encode())
    return viable and state.accepting


def dies_at(constraint, text):
    """How much of a text the check has seen when it gives up; None if it accepts the text."""
    check = constraint.check()
    for n in range(len(text) + 1):
        if check.log_prefix([Completion("", (), text[:n], False, VOCABULARY)])[0]:
            return n
    return None if check.log_complete([Completion("", (), text, True, VOCABULARY)])[0] == 0 else n


def accepts(constraint, text):
    return in_mask(constraint, text) and dies_at(constraint, text) is None


def masks(constraint, states, vocabulary=VOCABULARY):
    """Bool [n, V]."""
    words = torch.full((len(states), -(-len(vocabulary) // 32)), 7, dtype=torch.int32)
    constraint.compile(vocabulary).fill_masks(states, words)
    bits = (words[:, :, None] >> torch.arange(32)) & 1
    flat = bits.reshape(len(states), -1).bool()
    assert not flat[:, len(vocabulary) :].any()
    return flat[:, : len(vocabulary)]


def walk(constraint, draw, longest=200):
    """A random walk through the masks: the token ids, or None if it did not end in time."""
    state, tokens = constraint.compile(VOCABULARY).start(), []
    closing = [ord(c) for c in '"}]'] + [256 + WORDS.index(b'"}')]
    while len(tokens) < longest:
        allowed = masks(constraint, [state])[0].nonzero().flatten().tolist()
        if state.accepting and (not allowed or draw.random() < 0.5):
            return tokens
        assert allowed, f"nothing to say after {VOCABULARY.decode(tokens)!r}"
        ends = [t for t in allowed if t in closing]
        ascii_only = [t for t in allowed if 32 <= t < 127 or t >= 256]
        tokens.append(draw.choice(ends if ends and draw.random() < 0.4 else ascii_only or allowed))
        assert state.advance(tokens[-1])
    return None


def is_valid(schema, value):
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value)


ENFORCED = {
    "type": ({"type": ["integer", "null"]}, ["1", "-7", "null"], ["1.5", '"1"', "true", "01", ""]),
    "const": ({"const": {"a": [1, "x", None]}}, ['{"a": [1, "x", null]}'], ['{"a":[1,"x"]}', "{}"]),
    "enum": ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "true", "2"]),
    "minimum": ({"type": "integer", "minimum": -3}, ["-3", "0", "99"], ["-4", "-30"]),
    "maximum": ({"type": "number", "maximum": 2.5}, ["2.5", "-9", "2.49"], ["2.51", "3", "25"]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, ["4"], ["3", "-4"]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 0}, ["-0.1"], ["0", "0.0", "1"]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, ["0", "-7", "49"], ["1", "48"]),
    "minLength": ({"type": "string", "minLength": 2}, ['"é😀"', '"\\n\\""'], ['"é"', '""']),
    "maxLength": ({"type": "string", "maxLength": 2}, ['"é😀"', '""'], ['"abc"', '"\\n\\n\\n"']),
    "pattern": ({"type": "string", "pattern": "b+c"}, ['"abbcd"', '"bc"'], ['"b"', '"ac"']),
    "pattern and maxLength": (
        {"type": "string", "pattern": "^a", "maxLength": 3},
        ['"abc"'],
        ['"abcd"', '"ba"'],
    ),
    "items": ({"type": "array", "items": INTEGER}, ["[]", "[1, 2]"], ['["a"]', "[1,]", "[1.5]"]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "string"}], "items": INTEGER},
        ['["a", 1]', "[]"],
        ["[1]", '["a", "b"]'],
    ),
    "minItems": ({"type": "array", "minItems": 2}, ["[1, null]"], ["[1]", "[]"]),
    "maxItems": ({"type": "array", "maxItems": 1}, ["[1]", "[]"], ["[1, 2]"]),
    "properties": (closed({"a": INTEGER, "b": {}}), ['{"a": 1}', "{}"], ['{"a": "x"}', '{"c": 1}']),
    "required": (closed({"a": {}}, required=["a"]), ['{"a": 1}'], ["{}", '{"b": 1}']),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": INTEGER},
        ['{"a": "x", "b": 1}', '{"b": 1}'],
        ['{"b": "x"}'],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n": INTEGER}, "additionalProperties": False},
        ['{"n1": 1}', "{}"],
        ['{"n1": "x"}', '{"m": 1}'],
    ),
    "minProperties": (closed({"a": {}, "b": {}}, minProperties=1), ['{"a": 1}'], ["{}"]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ['{"a": 1}'], ['{"a":1,"b":2}']),
    "anyOf": ({"anyOf": [INTEGER, {"const": "x"}]}, ["1", '"x"'], ['"y"', "null"]),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ["3"], ["2", '"x"']),
    "oneOf": (
        {"oneOf": [tag("a"), tag("b"), {"type": "null"}]},
        ['{"t": "a"}', "null"],
        ['{"t": "c"}', "{}"],
    ),
    "oneOf and $ref": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
         "$defs": {"a": tag("a"), "b": tag("b")}},
        ['{"t": "a"}', '{"t": "b"}'],
        ['{"t": "c"}', "{}"],
    ),
    "oneOf and required": (
        {"type": "object", "oneOf": [
            closed({"a": {}}, required=["a"]), closed({"b": {}}, required=["b"])]},
        ['{"a": 1}', '{"b": 1}'],
        ["{}", '{"a": 1, "b": 1}'],
    ),
    "$ref": (
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        ["[]", "[[[]]]"],
        ["[1]", "[[], []]"],
    ),
    "$ref and others": (
        {"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer", "minimum": 3}}},
        ["3", "5"],
        ["2", "6"],
    ),
    "$anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, ["null"], ["1"]),
    "true": (True, ["1", '{"a": [null]}'], ["", "nul"]),
    "date": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"'],
        ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"', '"2024-13-01"', '"0000-01-01"', '"x"'],
    ),
    "time": (
        {"type": "string", "format": "time"},
        ['"23:59:59Z"', '"23:59:60Z"', '"08:30:00.25+05:30"'],
        ['"24:00:00Z"', '"22:59:60Z"', '"08:30:00"', '"8:30:00Z"'],
    ),
    "date-time": (
        {"type": "string", "format": "date-time"},
        ['"2024-02-29T12:00:00Z"'],
        ['"2023-02-29T12:00:00Z"', '"2024-02-29 12:00:00Z"', '"2024-02-29"'],
    ),
    "duration": ({"type": "string", "format": "duration"}, ['"P1DT2H"'], ['"P"', '"1D"']),
    "email": ({"type": "string", "format": "email"}, ['"a.b@c.org"'], ['"a"', '"a@"', '"@c"']),
    "hostname": ({"type": "string", "format": "hostname"}, ['"a-b.org"'], ['"-a"', '"a_b"', '""']),
    "ipv4": ({"type": "string", "format": "ipv4"}, ['"10.0.0.255"'], ['"10.0.0.256"', '"1.2.3"']),
    "ipv6": ({"type": "string", "format": "ipv6"}, ['"::1"', '"fe80::a:1"'], ['"1:2"', '":::"']),
    "uuid": (
        {"type": "string", "format": "uuid"},
        ['"123e4567-e89b-12d3-a456-426614174000"'],
        ['"123e4567e89b12d3a456426614174000"', '"x"'],
    ),
    "uri": ({"type": "string", "format": "uri"}, ['"http://a.org/b?c#d"'], ['"a"', '"//a"']),
    "int32": (
        {"type": "integer", "format": "int32"},
        ["2147483647", "-2147483648"],
        ["2147483648", "-2147483649"],
    ),
    "int64": (
        {"type": "integer", "format": "int64"},
        ["9223372036854774784", "-9223372036854774784", "0"],
        ["9223372036854775808", "-9223372036854775809", "99999999999999999999"],
    ),
    "control characters": (
        {"enum": ["a\u0001b", "c\u007fd", "\n"]},
        [r'"a\u0001b"', r'"\n"'],
        ['"ab"', '"cd"', '"b"', '""'],
    ),
    "control characters in a pattern": (
        {"type": "string", "pattern": "^a\u0001b\\x02?$"},
        [r'"a\u0001b"', r'"a\u0001b\u0002"'],
        ['"ab"'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("schema, valid, invalid", ENFORCED.values(), ids=ENFORCED)
def test_a_supported_keyword_admits_valid_texts_and_no_invalid_ones(schema, valid, invalid):
    constraint = json_schema(schema)
    assert [text for text in valid if not accepts(constraint, text)] == []
    assert [text for text in invalid if accepts(constraint, text)] == []


# What the mask does not know: schema, keyword and path that the constraint names, valid texts, and
# invalid ones with as much of them as is read before the check gives up (None: the mask refuses).
CHECKED = {
    "not": ({"not": INTEGER}, "not", "$.not", ['"a"', "1.5"], {"12": 2}),
    "if": (
        {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}},
        "if", "$.if", ["3", "6"], {"7": 1},
    ),
    "uniqueItems": (
        {"properties": {"a": {"items": {}, "uniqueItems": True}}},
        "uniqueItems", "$.properties.a.uniqueItems",
        ['{"a": [1, 2, true, "1", [1], [true]]}'],
        {'{"a": [1, 1]}': 12, '{"a": [{"b": 1}, {"b": 1.0}, 3]}': 27, '{"a": [1, 1.00, 2]}': 15},
    ),
    "contains": (
        {"type": "array", "contains": INTEGER, "minContains": 2},
        "contains", "$.contains", ['[1, "a", 2]'], {'["a", 1]': 8, "[1]": None},
    ),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        "dependentRequired", "$.dependentRequired",
        ['{"a": 1, "b": 2}', '{"c": 1}'], {'{"a": 1}': 8},
    ),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"maxProperties": 1}}},
        "dependentSchemas", "$.dependentSchemas", ['{"a": 1}'], {'{"a": 1, "b": 2}': 16},
    ),
    "dependencies": (
        {"type": "object", "dependencies": {"a": ["b"]}},
        "dependencies", "$.dependencies", ['{"b": 1}'], {'{"a": 1}': 8},
    ),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False, "type": "object"},
        "unevaluatedProperties", "$.unevaluatedProperties", ['{"a": 1}'], {'{"b": 1}': 8},
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [{}], "unevaluatedItems": False},
        "unevaluatedItems", "$.unevaluatedItems", ["[1]"], {"[1, 2]": 6},
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"maxLength": 3}},
        "propertyNames", "$.propertyNames", ['{"abc": 1}'], {'{"abcd": 1}': 7},
    ),
    "$dynamicRef": (
        {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "integer"}}},
        "$dynamicRef", "$.$dynamicRef", ["1"], {'"a"': 3},
    ),
    "format": (
        {"items": {"type": "string", "format": "regex"}, "type": "array"},
        "format", "$.items.format", ['["^a$"]'], {'["(", "a"]': 4},
    ),
    "oneOf": (
        {"oneOf": [INTEGER, {"type": "number", "minimum": 3}]},
        "oneOf", "$.oneOf", ["2", "3.5"], {"4": 1},
    ),
    "oneOf in branches": (
        {"type": "object", "required": ["t", "l"], "oneOf": [
            {"properties": {"t": {"const": "a"}, "l": {"items": INTEGER, "uniqueItems": True}}},
            {"properties": {"t": {"const": "b"}, "l": {"type": "null"}}}]},
        "uniqueItems", "$.oneOf[0].properties.l.uniqueItems",
        ['{"t": "a", "l": [1, 2]}', '{"t": "b", "l": null}'],
        {'{"t": "a", "l": [1, 1]}': 22},
    ),
    "minProperties": (
        {"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}}},
        "minProperties", "$.minProperties", ['{"a": 1, "c": 2}'], {'{"a": 1}': 8},
    ),
    "maxProperties": (
        {"properties": {"a": {"type": "object", "maxProperties": 2, "properties": {"b": {}}}}},
        "maxProperties", "$.properties.a.maxProperties",
        ['{"a": {"b": 1, "c": 2}}'],
        {'{"a": {"b": 1, "c": 2, "d": 3}}': 26},
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"a": {"minimum": 2}, "b": INTEGER}},
        "patternProperties", "$.patternProperties",
        ['{"ab": 2, "a": 2.5, "c": null}'],
        {'{"ab": 1, "c": 1}': 9, '{"b": 1.5}': 10},
    ),
    "look-ahead": (
        {"properties": {"a.b": {"type": "string", "pattern": "^(?=a).b"}}},
        "pattern", '$.properties["a.b"].pattern', ['{"a.b": "ab"}'], {'{"a.b": "bb"}': 12},
    ),
    "back-reference": (
        {"type": "string", "pattern": r"^(a|b)\1$"}, "pattern", "$.pattern", ['"aa"'], {'"ab"': 4},
    ),
    "large bounds": (
        {"type": "integer", "maximum": 2**60},
        "maximum", "$.maximum", [f"{2**60}"], {f"{2**60 + 1}": 19},
    ),
    "large constants": (
        {"const": [2**53 + 1]}, "const", "$.const", [f"[{2**53 + 1}]"], {f"[{2**53}]": 18},
    ),
    "large multiples": (
        {"type": "integer", "multipleOf": 10**20}, "multipleOf", "$.multipleOf",
        [f"{10**21}", "0"], {f"{10**20 + 1}": 21},
    ),
    "recursion with siblings": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {
            "t": {"$ref": "#/$defs/t", "maxProperties": 1}}}}},
        "maxProperties", "$.$defs.t.properties.t.maxProperties",
        ['{"t": {"t": {}}}', '{"a": 1, "b": 2}'],
        {'{"t": {"a": 1, "b": 2}}': 18},
    ),
}  # fmt: skip


@pytest.mark.parametrize("schema, keyword, path, valid, invalid", CHECKED.values(), ids=CHECKED)
def test_what_the_mask_does_not_know_is_checked_as_soon_as_it_is_closed(
    schema, keyword, path, valid, invalid
):
    constraint = json_schema(schema)
    assert Relaxed(keyword, path) in constraint.relaxed
    assert f"{keyword} ({path})" in constraint.notes()[0]
    assert [text for text in valid if not accepts(constraint, text)] == []
    for text, where in invalid.items():
        if where is None:
            assert not in_mask(constraint, text)
        else:
            assert in_mask(constraint, text)
            assert dies_at(constraint, text) == where


@pytest.mark.parametrize(
    "schema, keyword, path",
    [
        ({"items": {"format": "unknown"}}, "format", "$.items.format"),
        ({"contentEncoding": "base64"}, "contentEncoding", "$.contentEncoding"),
        ({"contentMediaType": "application/json"}, "contentMediaType", "$.contentMediaType"),
    ],
)
def test_what_nothing_enforces_is_said(schema, keyword, path):
    constraint = json_schema(schema)
    assert constraint.relaxed == (Relaxed(keyword, path, enforced=False),)
    assert constraint.notes() == (f"nothing is checked for {keyword} ({path}): an annotation here",)


@pytest.mark.parametrize(
    "schema, keyword, path",
    [
        ({"$ref": "https://example.com/a.json"}, "$ref", "$.$ref"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, "$ref", "$.$ref"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema", "$.$schema"),
        ({"items": {"not": {"$ref": "other.json"}}}, "$ref", "$.items.not.$ref"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_and_place(schema, keyword, path):
    with pytest.raises(UnsupportedConstraintError) as refused:
        json_schema(schema)
    assert (refused.value.keyword, refused.value.path) == (keyword, path)
    assert path in str(refused.value)


@pytest.mark.parametrize(
    "harmless",
    [
        {"title": "T", "description": "d", "default": "x", "examples": [1], "$comment": "c"},
        {"readOnly": True, "writeOnly": False, "deprecated": True, "x-vendor": {"not": 1}},
        {"uniqueItems": False, "not": False, "propertyNames": True, "dependencies": {}},
        {"then": {"minimum": 9}, "minContains": 3, "unevaluatedItems": True},
        {"format": "password", "contentMediaType": "text/plain", "minProperties": 0},
        {"$defs": {"unused": {"not": {}, "format": "nonsense"}}},
        {"x-guidance": {"lenient": True, "whitespace_flexible": False}},
    ],
    ids=lambda h: next(iter(h)),
)
def test_what_says_nothing_is_no_reason_to_refuse(harmless):
    constraint = json_schema({"type": "array", "items": INTEGER, **harmless})
    assert accepts(constraint, "[1, 2]")
    assert not accepts(constraint, '["a"]')


@pytest.mark.parametrize(
    "schema, path, reason",
    [
        ({"properties": {"age": {"type": "int"}}}, "$.properties.age.type", "'int'"),
        ({"anyOf": [{}, {"minLength": -1}]}, "$.anyOf[1].minLength", "-1"),
        ({"required": "name"}, "$.required", "'name'"),
        ({"pattern": "["}, "$.pattern", "regular expression"),
        ({"$ref": "#/$defs/missing"}, "$.$ref", "leads to no schema"),
        ({"$ref": "#/odd/place", "odd": {"place": {"type": 3}}}, "$.odd.place.type", "3"),
        (False, "$", "requires `false`"),
        ({"$ref": "#"}, "$", "without end"),
        (closed({"next": {"$ref": "#"}}, required=["next"]), "$", "without end"),
    ],
)
def test_an_invalid_schema_is_refused_with_place_and_reason(schema, path, reason):
    with pytest.raises(ConstraintError, match="(?s).*" + reason.replace("$", r"\$")) as refused:
        json_schema(schema)
    assert refused.value.path == path
    assert not isinstance(refused.value, UnsupportedConstraintError)


@pytest.mark.parametrize(
    "schema",
    [
        "{not json",
        "[1]",
        '"string"',
        '{"const": NaN}',
        {"const": float("inf")},
        {"const": object()},
        42,
        "[" * 100_000,
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        closed({"a": False}, required=["a"]),
    ],
    ids=range(11),
)
def test_what_is_no_satisfiable_schema_is_a_constraint_error(schema):
    with pytest.raises(ConstraintError):
        json_schema(schema)


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


def test_an_enum_of_ten_thousand_values_is_exact():
    constraint = json_schema({"type": "array", "items": {"enum": [f"v{i}" for i in range(10_000)]}})
    assert accepts(constraint, '["v9999", "v0"]')
    assert not accepts(constraint, '["v10000"]')


def test_a_pattern_that_backtracks_for_years_is_an_error_and_no_hang():
    constraint = json_schema({"type": "string", "pattern": "^(?=(a|aa)+$)"})
    with pytest.raises(ValueError, match="takes more than 1 s"):
        dies_at(constraint, '"' + "a" * 40 + '!"')


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


WALKED = {
    "object": closed(
        {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 150},
         "tags": {"type": "array", "items": {"enum": ["a", "b\u00e9"]}, "maxItems": 3}},
        required=["name", "tags"],
    ),
    "open": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"],
             "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "recursive": {"$ref": "#/$defs/tree", "$defs": {"tree": {"anyOf": [
        {"type": "null"}, closed({"v": INTEGER, "left": {"$ref": "#/$defs/tree"}}, required=["v"])
    ]}}},
    "tagged": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
        "a": closed({"t": {"const": "a"}, "d": {"type": "string", "format": "date"}},
                    required=["t", "d"]),
        "b": closed({"t": {"const": "b"}, "n": {"type": "number", "minimum": -1, "maximum": 1}},
                    required=["t", "n"])}},
    "anything": {"type": ["object", "array", "number", "string"]},
}  # fmt: skip
CONSTRAINTS = {name: json_schema(schema) for name, schema in WALKED.items()}
each_walk = given(name=st.sampled_from(sorted(WALKED)), seed=st.integers(0, 2**32))


@settings(max_examples=60, deadline=None)
@each_walk
def test_a_walk_through_the_masks_ends_in_valid_json(name, seed):
    tokens = walk(CONSTRAINTS[name], random.Random(seed))
    if tokens is not None:
        text = VOCABULARY.decode_bytes(tokens).decode("utf-8")
        assert is_valid(WALKED[name], json.loads(text)), text


@settings(max_examples=40, deadline=None)
@each_walk
def test_a_mask_holds_exactly_the_tokens_that_can_be_taken(name, seed):
    draw = random.Random(seed)
    constraint = CONSTRAINTS[name]
    tokens = walk(constraint, draw) or []
    state, _ = after(constraint, tokens[: draw.randint(0, len(tokens))])
    taken = [state.fork().advance(token) for token in range(len(VOCABULARY))]
    assert masks(constraint, [state])[0].tolist() == taken


@settings(max_examples=40, deadline=None)
@each_walk
def test_a_fork_equals_a_fresh_replay_and_leaves_its_origin_alone(name, seed):
    draw = random.Random(seed)
    constraint = CONSTRAINTS[name]
    tokens = walk(constraint, draw) or []
    cut = draw.randint(0, len(tokens))
    origin, _ = after(constraint, tokens[:cut])
    before = masks(constraint, [origin]), origin.accepting
    fork = origin.fork()
    assert all(fork.advance(token) for token in tokens[cut:])
    replay, _ = after(constraint, tokens)
    assert fork.accepting == replay.accepting
    assert torch.equal(*masks(constraint, [fork, replay]).unbind())
    assert torch.equal(masks(constraint, [origin]), before[0])
    assert origin.accepting == before[1]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(WALKED)),
    seed=st.integers(0, 2**32),
    noise=st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=3),
)
def test_a_prefix_of_weight_zero_has_only_extensions_of_weight_zero(name, seed, noise):
    draw = random.Random(seed)
    constraint = CONSTRAINTS[name]
    tokens = walk(constraint, draw) or []
    cut = draw.randint(0, len(tokens))
    tokens = tokens[:cut] + noise + tokens[cut:]
    texts = [
        Completion("", tuple(tokens[:n]), VOCABULARY.decode(tokens[:n]), False, VOCABULARY)
        for n in range(len(tokens) + 1)
    ]
    prefix, complete = constraint.log_prefix(texts), constraint.log_complete(texts)
    assert set(prefix) | set(complete) <= {0.0, -float("inf")}
    assert list(prefix) == sorted(prefix, reverse=True)
    assert all(whole <= part for whole, part in zip(complete, prefix, strict=True))


def test_forced_text_may_be_split_into_tokens_in_every_way():
    constraint = json_schema({"const": "true"})
    state, _ = after(constraint, b'"')
    allowed = {VOCABULARY.tokens[i] for i in masks(constraint, [state])[0].nonzero()}
    assert allowed == {b"t", b"true"}


def test_equal_tokens_are_all_allowed():
    allowed = masks(json_schema({"const": 12}), [after(json_schema({"const": 12}), b"")[0]])[0]
    assert [i for i, t in enumerate(VOCABULARY.tokens) if t == b"12"] == [
        i for i in allowed.nonzero().flatten().tolist() if i >= 256
    ]


def test_no_mask_holds_special_or_padded_ids_even_inside_a_string():
    constraint = json_schema({"type": "string"})
    state, _ = after(constraint, b'"ab')
    mask = masks(constraint, [state])[0]
    assert mask[ord("x")] and mask[ord('"')]
    assert not mask[torch.from_numpy(~VOCABULARY.ordinary)].any()
    for token in (END, CONTROL, CONTROL + 1, len(VOCABULARY), -1):
        assert not state.fork().advance(token)


def test_a_refused_token_kills_the_state_and_not_the_forks_made_before():
    constraint = json_schema({"type": "integer"})
    state, _ = after(constraint, b"1")
    fork = state.fork()
    assert not state.advance(ord("x"))
    assert not state.accepting and not state.advance(ord("2")) and state.forced() == []
    assert not state.fork().accepting
    assert not masks(constraint, [state]).any()
    assert fork.accepting and fork.advance(ord("2"))


def test_a_complete_text_has_an_empty_mask_and_is_accepting():
    constraint = json_schema({"type": "object"})
    done, _ = after(constraint, b"{}")
    half, _ = after(constraint, b"{")
    rows = masks(constraint, [done, half, done])
    assert done.accepting and done.forced() == []
    assert rows.any(1).tolist() == [False, True, False]
    assert not done.advance(ord(" "))


def test_forced_tokens_are_those_without_an_alternative():
    tiny = Vocabulary([b"", *(bytes([c]) for c in b'"abc1')], eos_ids=[0])
    state = json_schema({"enum": ["abca", "abcb"]}).compile(tiny).start()
    assert tiny.decode(state.forced()) == '"abc'
    assert all(state.advance(token) for token in state.forced())
    assert state.forced() == []
    assert state.advance(2) and tiny.decode(state.forced()) == '"'
    number = json_schema({"enum": [1, 11]}).compile(tiny).start()
    assert tiny.decode(number.forced()) == "1"
    assert not number.accepting


def test_a_vocabulary_of_five_tokens_works_and_its_dead_ends_are_empty_masks():
    tiny = Vocabulary([b"", b"0", b"1", b"{", b"}"], eos_ids=[0])
    constraint = json_schema({"enum": [0, 10, 1002]})
    state = constraint.compile(tiny).start()
    assert masks(constraint, [state], tiny)[0].tolist() == [False, True, True, False, False]
    assert all(state.advance(token) for token in (2, 1, 1))
    assert not state.accepting
    assert not masks(constraint, [state], tiny).any()
    assert not state.advance(1) and not state.fork().advance(2)


def test_rows_of_a_strided_bitmask_are_filled():
    constraint = json_schema({"type": "integer"})
    states = [after(constraint, text)[0] for text in (b"", b"-", b"3")]
    words = -(-len(VOCABULARY) // 32)
    wide = torch.full((3, 2 * words), -1, dtype=torch.int32)
    constraint.compile(VOCABULARY).fill_masks(states, wide[:, ::2])
    plain = torch.empty((3, words), dtype=torch.int32)
    constraint.compile(VOCABULARY).fill_masks(states, plain)
    assert torch.equal(wide[:, ::2], plain)
    assert (wide[:, 1::2] == -1).all()
    with pytest.raises(ValueError, match="shape"):
        constraint.compile(VOCABULARY).fill_masks(states, plain[:2])


def test_a_mask_beyond_the_limits_is_an_error_and_neither_empty_nor_full():
    schema = {"type": "string", "pattern": "^x(.*a.{30}|.*b.{30})$"}
    easy, hard = json_schema(schema), json_schema(schema, limits=Limits(max_mask_fuel=400))
    state, viable = after(easy, b'"xab')
    assert viable and masks(easy, [state]).any()
    with pytest.raises(ConstraintError, match="raise its `limits`"):
        masks(hard, [after(hard, b'"x')[0]])


def test_limits_on_an_untrusted_schema_are_kept():
    deep = {}
    for _ in range(70):
        deep = {"items": deep}
    with pytest.raises(ConstraintError, match="nested"):
        json_schema(deep)
    with pytest.raises(ConstraintError, match="bytes"):
        json_schema({"description": "x" * 2_000_000})
    with pytest.raises(ConstraintError, match="bytes"):
        json_schema('{"description": "' + "x" * 2_000_000 + '"}')
    with pytest.raises(ConstraintError):
        json_schema({"enum": [f"{i}" * 9 for i in range(300)]}, limits=Limits(max_lexer_fuel=100))
    assert json_schema({"description": "x" * 2_000_000}, limits=Limits(max_bytes=3_000_000))


def test_a_long_chain_of_references_does_not_overflow_the_stack():
    chain = {f"d{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}]}
             for i in range(1500)}  # fmt: skip
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": INTEGER}}
    found = []
    thread = threading.Thread(target=lambda: found.append(json_schema(schema)))
    thread.start()
    thread.join()
    assert accepts(found[0], "[[]]") and not accepts(found[0], "[1]")


def test_a_constraint_is_compiled_once_for_a_vocabulary_and_does_not_keep_it_alive():
    constraint = json_schema(INTEGER)
    vocabulary = Vocabulary([bytes([i]) for i in range(256)] + [b""], eos_ids=[256])
    compiled = constraint.compile(vocabulary)
    assert constraint.compile(vocabulary) is compiled
    assert json_schema({}).compile(vocabulary).tokens is compiled.tokens
    alive = weakref.ref(vocabulary)
    del vocabulary, compiled
    gc.collect()
    assert alive() is None


def test_the_given_schema_is_neither_changed_nor_shared():
    schema = {"type": "string", "format": "date", "not": False}
    constraint = json_schema(schema)
    schema["type"] = "integer"
    assert constraint.schema == {"type": "string", "format": "date", "not": False}


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Circle(pydantic.BaseModel):
    kind: Literal["circle"]
    radius: Annotated[float, pydantic.Field(gt=0)]


class Square(pydantic.BaseModel):
    kind: Literal["square"]
    side: int
    colour: Colour | None = None


class Drawing(pydantic.BaseModel):
    shape: Circle | Square = pydantic.Field(discriminator="kind")
    path: Path = Path()

    @pydantic.model_validator(mode="after")
    def _not_unit(self):
        if isinstance(self.shape, Square) and self.shape.side == 1:
            raise ValueError("no unit squares")
        return self


def test_a_pydantic_model_constrains_and_parses():
    constraint = json_schema(Drawing)
    text = '{"shape": {"kind": "square", "side": 3, "colour": "blue"}, "path": "a/b"}'
    assert accepts(constraint, text)
    assert constraint.parse(text) == Drawing(
        shape=Square(kind="square", side=3, colour=Colour.BLUE), path="a/b"
    )
    assert not accepts(constraint, '{"shape": {"kind": "circle", "side": 3}}')
    assert not accepts(constraint, '{"shape": {"kind": "circle", "radius": 0}}')
    assert not accepts(constraint, '{"shape": {"kind": "circle", "radius": 1}, "more": 1}')


def test_a_pydantic_model_that_allows_extra_properties_gets_them():
    class Open(pydantic.BaseModel, extra="allow"):
        a: int

    assert accepts(json_schema(Open), '{"a": 1, "b": "x"}')


def test_a_validator_that_the_schema_does_not_show_is_an_output_error():
    text = '{"shape": {"kind": "square", "side": 1}}'
    constraint = json_schema(Drawing)
    assert in_mask(constraint, text) and not accepts(constraint, text)
    with pytest.raises(OutputValidationError, match="no unit squares") as refused:
        constraint.parse(text)
    assert (refused.value.text, refused.value.finish_reason) == (text, "stop")
    assert isinstance(refused.value.__cause__, pydantic.ValidationError)


def test_a_number_that_python_does_not_read_is_an_output_error():
    with pytest.raises(OutputValidationError):
        json_schema(INTEGER).parse("1" * 5000)


def test_a_model_without_a_json_schema_is_refused():
    class Odd(pydantic.BaseModel):
        f: type(lambda: None)

        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    with pytest.raises(ConstraintError, match="Odd"):
        json_schema(Odd)


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
