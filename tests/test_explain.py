"""Where a text dies, what was allowed there, and which value a check refuses."""

from __future__ import annotations

import random
from dataclasses import astuple

import pydantic
import pytest
from languages import accepts

from guided_smc.errors import OptionError
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

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "uniqueItems": True},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASSIGNMENT = 'start: NAME "=" INT\n%import common.INT\n%import common.CNAME -> NAME\n%ignore " "\n'
LETTERS = predicate(lambda text: len(text) < 3 and text.isalpha(), name="two", ascii_only=True)


class Named(pydantic.BaseModel):
    name: str

    @pydantic.field_validator("name")
    @classmethod
    def is_x(cls, value):
        if value != "x":
            raise ValueError("must be x")
        return value


@pytest.mark.parametrize(
    ("constraint", "text", "offset", "allowed"),
    [
        (json_schema(PERSON), '{"name": "Ada", "age": "x"}', 23, 'digits or "-"'),
        (json_schema(PERSON), '{"nome": 1}', 3, "'ame\"'"),
        (json_schema(PERSON), '{"name": "A", "age": 1} ', 23, "the end"),
        (json_schema(PERSON), '{"name": "A\n"}', 11,
         "any character but a tab a line break a carriage return"),
        (regex("[a-f0-9]{3}é?"), "a0gz", 2, 'digits or "a" to "f"'),
        (regex("[a-f0-9]{3}é?"), "a0fè", 3, '"é" or the end'),
        (regex("[a-f0-9]{3}é?"), "a0fé.", 4, "the end"),
        (regex(r"\w"), "?", 0, 'letters, digits, "_" or others outside ASCII such as "ª"'),
        (regex("[ -~]x"), "\t", 0,
         "any ASCII character but a tab a line break a carriage return"),
        (regex(r"[\\\"' ]"), "x", 0, "a space, '\"', \"'\" or \"\\\""),
        (regex("é"), "a", 0, '"é"'),
        (choice(["yes", "no"]), "na", 1, '"o"'),
        (PartialRegex(r"(a+)b\1"), "aabb", 3, '"a"'),
        (LarkText(ASSIGNMENT), "abc = x", 6, "digits or a space"),
        (lark('start: "a" start | "b"'), "aac", 2, '"a" or "b"'),
        (LETTERS, "abc", 2, "the end"),
        (LETTERS & regex("[a-b]*"), "ac", 1, '"a", "b" or the end'),
    ],
)  # fmt: skip
def test_a_refused_text_dies_at_its_first_impossible_character(constraint, text, offset, allowed):
    found = explain(constraint, text)
    assert (found.verdict, found.offset, str(found.allowed)) == ("refused", offset, allowed)
    assert not found.checked
    assert found.byte_offset == len(text[:offset].encode())
    assert explain(constraint, text[:offset]).verdict in ("accepted", "incomplete")
    assert explain(constraint, text[: offset + 1]).verdict == "refused"


def test_where_the_parts_of_an_intersection_meet_nowhere_nothing_is_allowed():
    found = explain(regex("[a-z]+ü") & regex(".{2}"), "abü")
    assert (found.verdict, found.offset, str(found.allowed)) == ("refused", 2, "nothing")
    found = explain(regex("ab") & regex("ac"), "a")
    assert (found.verdict, found.reason) == ("refused", "no member begins like this")


@pytest.mark.parametrize(
    ("constraint", "text", "go_on"),
    [
        (json_schema(PERSON), '{"name": "Ada", "a', "'ge\"'"),
        (json_schema(PERSON), "", '"{"'),
        (choice(["yes", "yellow"]), "ye", '"l" or "s"'),
        (PartialRegex(r"(a+)b\1"), "aab", '"a"'),
        (LarkText(ASSIGNMENT), "abc = ", "digits or a space"),
        (regex("a{2}") & regex("a*"), "a", '"a"'),
    ],
)
def test_a_beginning_of_members_is_incomplete_and_says_how_it_could_go_on(constraint, text, go_on):
    found = explain(constraint, text)
    assert (found.verdict, found.offset, found.checked) == ("incomplete", len(text), False)
    assert found.reason.endswith(f"ends too early; it could go on with {go_on}")


@pytest.mark.parametrize(
    ("schema", "text", "verdict", "offset", "refusal"),
    [
        (PERSON, '{"name": "A", "age": 1, "tags": [1, [], 1.0]}', "refused", 43,
         ("$.tags[2]", "uniqueItems", "an equal item came before")),
        ({}, '{"a": {"b": 1, "b": 2}}', "refused", 17, ("$.a", None, 'the key "b" comes twice')),
        ({"type": "integer", "not": {"const": 14}}, "14", "incomplete", 2, ("$", "not", None)),
        ({"not": {"type": "object"}}, '{"a": 1}', "refused", 7, ("$", "not", None)),
        ({"propertyNames": {"pattern": "^a"}}, '{"b": 1}', "refused", 3,
         ("$.b", "propertyNames", "'b' is no name for a property")),
        ({"type": "object", "maxProperties": 1, "not": {"required": ["b"]}}, '{"a": 1, "b"',
         "refused", 7, None),
        ({"items": {"contains": {"const": 1}}}, "[[2], [1, 3], [2]]", "refused", 3,
         ("$[0]", "contains", None)),
        ({"items": {"if": {"required": ["k"]}, "then": {"properties": {"v": {"type": "null"}}}}},
         '[{"v": 1}, {"k": 1, "v": 2}]', "refused", 26, ("$[1].v", "type", None)),
        (Named, '{"name":"y"}', "refused", 12, ("$.name", None, "Value error, must be x")),
        ({"$defs": {"n": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}},
          "properties": {"n": {"$ref": "#/$defs/n"}}}, '{"n": 6}', "refused", 7,
         ("$.n", "oneOf", None)),
    ],
)  # fmt: skip
def test_what_only_the_check_refuses_is_told_by_value_and_keyword(
    schema, text, verdict, offset, refusal
):
    found = explain(json_schema(schema), text)
    assert (found.verdict, found.offset) == (verdict, offset)
    if refusal is None:  # the mask knows it
        assert not found.checked
        return
    assert found.checked
    path, keyword, reason = astuple(found.refusal)
    assert (path, keyword) == refusal[:2]
    assert refusal[2] in (None, reason)
    assert f"at {path}: {reason}" in found.reason


def test_the_check_of_one_part_of_an_intersection_is_told_too():
    both = json_schema({"type": "array", "uniqueItems": True}) & regex(".{1,9}")
    found = explain(both, "[1, 1]")
    assert (found.verdict, found.offset, found.refusal.keyword) == ("refused", 5, "uniqueItems")
    assert explain(both, "[1, 2]").accepted
    found = explain(both, "[1, 2, 3, 4]")
    assert (found.offset, found.refused_by) == (9, (both.constraints[1].name,))


def test_the_place_is_shown_by_line_and_column_with_a_mark():
    text = '{"name": "Ä\\n",\n\t"age": x}'
    assert str(explain(json_schema(PERSON), text)).splitlines() == [
        "refused at line 2, column 9 (character 24, byte 25)",
        '  \t"age": x}',
        "  \t       ^",
        '"x" is not allowed here; allowed: digits or "-"',
    ]
    far = str(explain(regex("a*"), "a" * 300 + "b" + "a" * 300)).splitlines()
    assert far[1] == "  ... " + "a" * 50 + "b" + "a" * 49 + " ..."
    assert far[2] == "  " + " " * 54 + "^"
    assert str(explain(regex("a"), "a")) == "accepted"


def test_the_verdict_is_that_of_the_language_on_members_and_their_neighbours():
    schema = json_schema({"items": {"enum": ["é", 1, None]}, "uniqueItems": True, "type": "array"})
    draw = random.Random(0)
    for constraint in (schema, regex("(é|[ab]+,){2}"), LarkText(ASSIGNMENT)):
        for member in sample_members(constraint, 10, seed=1):
            for _ in range(5):
                at = draw.randrange(len(member) + 1)
                text = member[:at] + draw.choice(["", "x", "é", ",", "]"]) + member[at + 1 :]
                check = constraint.check()
                found = explain(constraint, text)
                if check is None:
                    assert found.accepted == accepts(constraint, text)
                elif found.accepted:
                    assert accepts(constraint, text)
            assert explain(constraint, member).accepted


def test_half_a_surrogate_pair_is_no_text():
    with pytest.raises(OptionError, match="at character 1"):
        explain(regex(".*"), "a\ud800")
