"""Bounds and multiples of numbers, against exact arithmetic."""

import itertools
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from languages import accepts, in_mask

from guided_smc.errors import ConstraintError
from guided_smc.grammars import json_schema
from guided_smc.grammars.schema.numbers import BOUNDS, alternatives

WHOLE = (0, 1, 2, 3, 7, 9, 10, 11, 25)
FRACTIONS = ("", ".1", ".2", ".25", ".3", ".5", ".75", ".125", ".01", ".05", ".99", ".001")
NUMBERS = [
    f"{sign}{whole}{fraction}"
    for sign, whole, fraction in itertools.product(("", "-"), WHOLE, FRACTIONS)
    if (sign, whole, fraction) != ("-", 0, "")
]

steps = st.none() | st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.25, 0.5, 0.75, 1.5, 2.5, 2, 3, 7])
bounds = st.sampled_from([-10, -3, -0.5, -0.25, 0, 0.1, 0.25, 0.3, 0.125, 1, 2.5, 3, 10])


def exact(number):
    return Decimal(repr(number))


def satisfies(schema, text):
    value = Decimal(text)
    return (
        (schema["type"] == "number" or value == int(value))
        and ("multipleOf" not in schema or value % exact(schema["multipleOf"]) == 0)
        and ("minimum" not in schema or value >= exact(schema["minimum"]))
        and ("maximum" not in schema or value <= exact(schema["maximum"]))
        and ("exclusiveMinimum" not in schema or value > exact(schema["exclusiveMinimum"]))
        and ("exclusiveMaximum" not in schema or value < exact(schema["exclusiveMaximum"]))
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["number", "number", "integer"]),
    step=steps,
    limits=st.dictionaries(st.sampled_from(BOUNDS), bounds, max_size=3),
)
def test_numbers_are_accepted_if_and_only_if_they_satisfy(kind, step, limits):
    schema = {"type": kind, **limits, **({"multipleOf": step} if step else {})}
    try:
        constraint = json_schema(schema)
    except ConstraintError:
        assert not any(satisfies(schema, text) for text in NUMBERS), schema
        return
    for text in NUMBERS:
        if kind == "number" or "." not in text:  # integers are spelt without a fraction
            assert accepts(constraint, text) == satisfies(schema, text), (schema, text)


@pytest.mark.parametrize(
    "schema, yes, no",
    [
        ({"maximum": 0.25}, ["0.2", "0.25", "0.249", "-7.3"], ["0.3", "0.26", "1"]),
        ({"multipleOf": 0.25}, ["2.5", "2.50", "-1.5", "0.75", "3"], ["0.1", "2.6", "0.125"]),
        ({"multipleOf": 0.1, "exclusiveMinimum": 0}, ["0.1", "1"], ["0", "0.0", "0.15", "-0.1"]),
    ],
)
def test_no_number_is_lost_to_its_decimal_places(schema, yes, no):
    constraint = json_schema({"type": "number", **schema})
    assert constraint.relaxed == ()
    assert [text for text in yes if not in_mask(constraint, text)] == []
    assert [text for text in no if in_mask(constraint, text)] == []


def test_what_needs_no_other_words_stays_as_it_is():
    for said in ({}, {"minimum": 0.5}, {"multipleOf": 0.1}, {"exclusiveMaximum": 3, "minimum": 1}):
        assert alternatives(said) == [said]
    assert alternatives({"maximum": 0.125}) == [
        {"maximum": 0.125},
        {"maximum": 0.1},
        {"maximum": 0.12},
    ]
    assert alternatives({"multipleOf": 2, "exclusiveMinimum": 4}) == [
        {"multipleOf": 2, "minimum": 6}
    ]
