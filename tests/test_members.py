"""Random members of a language, drawn without a model."""

from __future__ import annotations

import json

import jsonschema
import pytest

from guided_smc.errors import ConstraintError, OptionError
from guided_smc.grammars import (
    LarkText,
    PartialRegex,
    choice,
    explain,
    json_schema,
    lark,
    predicate,
    regex,
    sample_members,
)

TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "left": {"$ref": "#/$defs/tree"},
                "rest": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["rest"],
            "additionalProperties": False,
        }
    },
}
SET = {
    "type": "array",
    "items": {"enum": [1, 2, 3]},
    "contains": {"const": 3},
    "uniqueItems": True,
    "minItems": 2,
}
LONG = {"type": "object", "properties": {"a": {"type": "string", "minLength": 200}}}


@pytest.mark.parametrize(
    "constraint",
    [
        json_schema({}),
        json_schema(TREE),
        json_schema(SET),
        json_schema({**LONG, "required": ["a"]}),
        lark('start: "a" start start start | "b"'),  # grows without end unless it is led
        lark('start: e\ne: e "+" e | "(" e ")" | /[0-9]+/'),
        regex(r"[A-Z][a-z]+, \d{1,3}é"),
        regex("[a-z]+") & regex(".{5}"),
        choice(["yes", "no", "maybe"]),
        PartialRegex(r"(\w+) is \1"),
        PartialRegex(r"(?=.*\d)(?=.*[A-Z])\w{8,12}"),
        LarkText('start: NAME "=" INT\n%import common.INT\n%import common.CNAME -> NAME\n'),
        predicate(lambda t: t.count("(") >= t.count(")"), lambda t: t[-1:] == ")", name="closed"),
    ],
)
def test_every_member_is_one_and_ends_in_time(constraint):
    members = sample_members(constraint, 3, seed=3)
    assert len(members) == 3
    for member in members:
        assert len(member) <= 2000
        assert explain(constraint, member).accepted


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "contains": {"const": "x"}, "minContains": 2, "maxContains": 3},
        {"type": "array", "contains": {"$ref": "#/$defs/k"}, "$defs": {"k": {"enum": [["yes"]]}}},
        {"items": {"contains": {"contains": {"const": None}}}, "type": "array", "minItems": 2},
        {
            "properties": {"a": {"type": "array", "contains": {"properties": {"k": {"const": 1}},
                                                               "required": ["k"],
                                                               "type": "object"}}},
            "required": ["a"],
            "type": "object",
        },
        {"type": "object", "propertyNames": {"pattern": "^k[0-9]$"}, "minProperties": 2},
        {"type": "array", "not": {"not": {"contains": {"const": "rare"}}}},
        {
            "type": "object",
            "if": {"not": {"required": ["kind"], "properties": {"kind": {"const": "a"}}}},
            "then": False,
        },
    ],
)  # fmt: skip
def test_what_only_the_check_wants_is_suggested(schema):
    members = sample_members(json_schema(schema), 2, seed=0)
    validator = jsonschema.Draft202012Validator(schema)
    assert all(validator.is_valid(json.loads(member)) for member in members)
    both = json_schema(schema) & json_schema({"type": ["array", "object"]})
    assert explain(both, sample_members(both, 1, seed=1)[0]).accepted


def test_where_a_check_refuses_every_try_its_reason_is_told():
    nothing = json_schema({"type": "array", "contains": {"const": 1}, "not": {"minItems": 1}})
    with pytest.raises(ConstraintError, match="with 1 values of its subschemas as sugg") as e:
        sample_members(nothing, 1, seed=0, max_characters=40)
    assert "; of the last one the check says: " in str(e.value)


def test_the_same_seed_gives_the_same_members():
    assert sample_members(regex(".*"), 9, seed=1) == sample_members(regex(".*"), 9, seed=1)
    assert sample_members(regex(".*"), 9, seed=1) != sample_members(regex(".*"), 9, seed=2)


def test_members_of_a_schema_are_valid_and_differ():
    members = sample_members(json_schema(TREE), 10, seed=0)
    validator = jsonschema.Draft202012Validator(TREE)
    assert all(validator.is_valid(json.loads(member)) for member in members)
    assert len(set(members)) > 5
    assert {len(m) for m in sample_members(json_schema(SET), 20, seed=0)} != {6}


def test_short_languages_are_covered_and_lengths_are_kept():
    assert set(sample_members(choice(["a", "b", "cd"]), 60, seed=0)) == {"a", "b", "cd"}
    assert set(sample_members(regex("a{0,2}"), 60, seed=0)) == {"", "a", "aa"}
    assert all(len(m) <= 7 for m in sample_members(regex("a{3,}"), 30, seed=0, max_characters=7))
    assert sample_members(regex("a"), 0) == []


@pytest.mark.parametrize(
    ("constraint", "longest"),
    [
        (regex("a{50}"), "a" * 10),
        (regex("ab") & regex("ac"), "a"),
        (predicate(lambda text: "b" not in text, lambda text: "b" in text, name="never"), None),
    ],
)
def test_where_none_is_found_the_error_says_so(constraint, longest):
    with pytest.raises(ConstraintError, match="no member of up to 10 characters") as caught:
        sample_members(constraint, 1, seed=0, max_characters=10)
    if longest is not None:
        assert f"the longest beginning: {longest!r}" in str(caught.value)


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(OptionError, match="n must be at least 0, got -1"):
        sample_members(regex("a"), -1)
    with pytest.raises(OptionError, match="max_characters must be at least 0"):
        sample_members(regex("a"), 1, max_characters=-1)
