"""What became of a constraint of each kind."""

from __future__ import annotations

from datetime import date
from typing import Literal

import pytest

from guided_smc.grammars import (
    LarkText,
    PartialRegex,
    choice,
    describe,
    from_output_type,
    json_schema,
    lark,
    predicate,
    regex,
)

ASSIGNMENT = 'start: NAME "=" INT\n%import common.INT\n%import common.CNAME -> NAME\n'


@pytest.mark.parametrize(
    ("constraint", "engine", "sizes"),
    [
        (json_schema({"items": {}}), "llguidance's masks", {"source_bytes": 13, "subschemas": 2}),
        (
            json_schema({"uniqueItems": True}),
            "llguidance's masks, and a check of closed values",
            {"source_bytes": 21, "subschemas": 1},
        ),
        (json_schema({"contentEncoding": "x"}), "llguidance's masks", {"subschemas": 1}),
        (regex("aé"), "llguidance's masks", {"source_bytes": 3}),
        (lark('start: "a" | start "b"'), "llguidance's masks", {"source_bytes": 22}),
        (PartialRegex(r"(a)\1"), "partial matches of the regex package, by rejection", {}),
        (LarkText(ASSIGNMENT), "lark's LALR parser, by rejection", {"rules": 1, "terminals": 3}),
        (choice(["a", "bc"]), "a sorted list", {"texts": 2, "source_bytes": 3}),
        (predicate(str.isdigit, name="digits"), "Predicate, by rejection", {}),
        (regex("a") & choice(["a"]), "llguidance's masks & a sorted list", {"source_bytes": 2}),
        (from_output_type(date), "llguidance's masks", {}),
        (from_output_type(int | Literal["x"]), "llguidance's masks | a sorted list", {"texts": 1}),
    ],
)
def test_the_engine_and_the_sizes_are_told(constraint, engine, sizes):
    described = describe(constraint)
    assert described.engine == engine
    assert sizes.items() <= described.sizes.items()
    if "masks" in engine:
        assert described.sizes["grammar_bytes"] > 40
    assert described.notes == constraint.notes()


def test_what_the_mask_does_not_know_is_listed():
    both = json_schema({"uniqueItems": True}) & json_schema({"contentEncoding": "x"})
    relaxed = describe(both).relaxed
    assert [(r.keyword, r.enforced) for r in relaxed] == [
        ("uniqueItems", True),
        ("contentEncoding", False),
    ]
