"""Options that say which texts are allowed, as every command takes them."""

from __future__ import annotations

import json

import click
import pytest
from languages import accepts

from guided_smc.cli.referents import load_language

TYPES = """
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Literal
import pydantic
from guided_smc import json_schema, lark, regex

class Colour(Enum):
    RED = "red"

@dataclass
class Point:
    x: int

class Paint(pydantic.BaseModel):
    colour: Colour

def paint(colour: Colour, coats: int = 1): ...

mixed = int | Literal["many"]
colours = set[Colour]
shares = dict[Colour, int]
schema = {"type": "integer"}
word = regex("[a-z]+") & regex(".{3}")
sums = lark('start: N ("+" N)*\\nN: /[0-9]/')
"""
TEXTS = {
    "Colour": "red",
    "Point": '{"x": 1}',
    "Paint": '{"colour": "red"}',
    "paint": '{"colour": "red"}',
    "mixed": "many",
    "colours": '["red"]',
    "shares": '{"red": 1}',
    "schema": "7",
    "date": "2024-02-29",
    "word": "abc",
    "sums": "1+2",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "language_types.py").write_text(TYPES)
    return tmp_path


def load(**given):
    return load_language(
        {"schema": None, "regex": None, "grammar": None, "whitespace": None, **given}
    )


def test_a_schema_may_be_anything_that_an_output_type_may_be(folder):
    settings = []
    for name, text in TEXTS.items():
        language = load(schema=f"language_types:{name}")
        assert language.option == "--schema" and accepts(language.constraint, text), name
        assert load(schema=f"language_types:{name}").settings == language.settings
        settings.append(json.dumps(language.settings, sort_keys=True))
    assert len(set(settings)) == len(settings)
    assert "0x" not in "".join(settings)  # no addresses: another process says the same


def test_settings_are_what_runs_from_before_were_made_with(folder):
    import language_types

    (folder / "s.json").write_text('{"type": "integer"}')
    (folder / "g.lark").write_text('start: "a"')
    assert load().settings == {"schema": None} and load().constraint is None
    assert load(schema="s.json").settings == {"schema": {"type": "integer"}}
    assert load(schema="language_types:schema").settings == {"schema": {"type": "integer"}}
    paint = language_types.Paint.model_json_schema()
    assert load(schema="language_types:Paint").settings == {"schema": paint}
    assert load(regex="a+").settings == {"schema": None, "regex": "a+"}
    assert load(grammar="g.lark").settings == {"schema": None, "grammar": 'start: "a"'}


def test_a_pattern_and_a_grammar_become_what_they_can(folder):
    (folder / "words.lark").write_text("WORD: /[a-z]+/")
    (folder / "g.lark").write_text("%import words.WORD\nstart: WORD")
    assert load(regex=r"(a|b)c\1").constraint.engine == "partial"
    assert load(regex="a+").constraint.engine == "llguidance"
    assert accepts(load(grammar=str(folder / "g.lark")).constraint, "ab")
    (folder / "g.lark").write_text('start: %json {"type": "integer"}')
    assert load(grammar="g.lark").constraint.dialect == "llguidance"


def test_whitespace_is_that_of_json(folder):
    (folder / "s.json").write_text('{"type": "array"}')
    for schema, value in [("s.json", "[\n  1\n]"), ("language_types:Point", '{\n  "x": 1\n}')]:
        language = load(schema=schema, whitespace="indented")
        assert accepts(language.constraint, value)
        assert not accepts(language.constraint, value.replace("\n  ", ""))
        assert language.settings == {**load(schema=schema).settings, "whitespace": "indented"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schema": "builtins:str"}, "allows any text"),
        ({"schema": "builtins:len"}, "schema builtins:len: "),
        ({"schema": "language_types:schema.keys"}, "schema language_types:schema.keys: "),
        ({"schema": "a.json", "regex": "a", "grammar": "g"}, "--schema and --regex and --grammar"),
        ({"regex": "(a"}, "--regex: '\\(a' is not a regular expression"),
        ({"whitespace": "any"}, "--whitespace needs --schema"),
        ({"schema": "language_types:word", "whitespace": "any"}, "--whitespace needs JSON"),
        ({"grammar": "none.lark"}, "grammar file not found"),
    ],
)
def test_what_cannot_be_a_language_is_told(folder, given, message):
    with pytest.raises(click.UsageError, match=message):
        load(**given)
