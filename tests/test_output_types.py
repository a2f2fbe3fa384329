"""Every output type has one reading, or is refused; values have exactly the annotated type."""

import dataclasses
import datetime
import functools
import random
import re
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NewType, Optional, Union

import outlines.types
import pydantic
import pytest
from languages import accepts, begins, check_masks, in_mask
from outlines.types.dsl import either
from pydantic import AfterValidator, Field
from typing_extensions import NotRequired, TypeAliasType, TypedDict

from guided_smc import LM, TableModel, Vocabulary, reward
from guided_smc.errors import ConstraintError, OutputValidationError, UnsupportedConstraintError
from guided_smc.grammars import choice, from_output_type, json_schema, lark, regex
from guided_smc.potentials import Completion, Intersection


class Colour(Enum):
    RED = "red"
    BLUE = "dark blue"


class Mixed(Enum):
    text = "a"
    number = 2
    nothing = None


class Level(IntEnum):
    low = 1
    high = 10


class Square(pydantic.BaseModel):
    side: int = Field(ge=1, le=9)
    colour: Colour | None = None


class Circle(pydantic.BaseModel):
    radius: float


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Address(TypedDict):
    street: str
    number: NotRequired[int]


UserId = NewType("UserId", int)
Alias = TypeAliasType("Alias", Union[int, None])  # noqa: UP007
Even = Annotated[int, AfterValidator(lambda n: n if n % 2 == 0 else 1 / 0)]


def add(a: int, b: "float" = 1.0, *, colour: Colour = Colour.RED) -> float:
    return a + b


day, moment = datetime.date, datetime.datetime

# type: ([(text, value)], [refused text])
READ: dict[Any, tuple[list[tuple[str, Any]], list[str]]] = {
    int: ([("5", 5), ("-12", -12), ("6.0", 6)], ["", "+5", "05", "5.5", "5 ", "five", '"5"']),
    float: ([("5", 5.0), ("-1.25", -1.25), ("1e3", 1000.0)], ["", ".5", "NaN", "x"]),
    bool: ([("True", True), ("False", False)], ["true", "1", ""]),
    Literal["a", "ab", 'say "x"']: (
        [("a", "a"), ("ab", "ab"), ('say "x"', 'say "x"')],
        ['"a"', "b", ""],
    ),
    Literal[1, True, None, Colour.RED]: (
        [("1", 1), ("True", True), ("None", None), ("red", Colour.RED)],
        ["null", "true"],
    ),
    Colour: ([("red", Colour.RED), ("dark blue", Colour.BLUE)], ["RED", '"red"']),
    Mixed: ([("a", Mixed.text), ("2", Mixed.number), ("None", Mixed.nothing)], ["null"]),
    Level: ([("1", Level.low), ("10", Level.high)], ["low", "2"]),
    datetime.date: ([("2024-02-29", day(2024, 2, 29))], ["2023-02-29", "2024-2-9", ""]),
    datetime.time: ([("23:59:07", datetime.time(23, 59, 7))], ["24:00:00", "9:00:00", "23:59"]),
    datetime.datetime: (
        [("2024-02-29 08:00:01", moment(2024, 2, 29, 8, 0, 1)),
         ("0001-01-01T00:00:00", moment(1, 1, 1))],
        ["2024-02-30 08:00:01", "2024-02-29"],
    ),
    int | None: ([("5", 5), ("None", None)], ["null", ""]),
    Alias: ([("5", 5), ("None", None)], ["null"]),
    int | float: ([("5", 5), ("5.5", 5.5)], ["None"]),
    int | Literal["many"]: ([("5", 5), ("many", "many")], ['"many"']),
    bool | datetime.date | None: (
        [("True", True), ("None", None), ("2020-01-01", day(2020, 1, 1))],
        ["true", "1"],
    ),
    Colour | Literal["green"] | Level: (
        [("red", Colour.RED), ("green", "green"), ("10", Level.high)],
        ["2"],
    ),
    UserId: ([("7", 7)], ["x"]),
    Annotated[int, Field(ge=0, lt=120)]: ([("0", 0), ("119", 119)], ["-1", "120", "500"]),
    Annotated[int, Field(ge=0, lt=9)] | None: ([("8", 8), ("None", None)], ["9", "-1"]),
    Annotated[str, Field(min_length=1, max_length=3)]: (
        [("é\n😀", "é\n😀"), ("a", "a"), ('"', '"')],
        ["", "abcd"],
    ),
    Square: (
        [('{"side": 3}', Square(side=3)),
         ('{"side":3,"colour":"red"}', Square(side=3, colour="red"))],
        ['{"side": 0}', '{"side": 3, "x": 1}', "3"],
    ),
    Point: ([('{"x": 1, "y": 2}', Point(1, 2)), ('{"x": 1}', Point(1, 0))], ["{}", "[1, 2]"]),
    Address: (
        [('{"street": "a"}', {"street": "a"}),
         ('{"street": "", "number": 2}', {"street": "", "number": 2})],
        ['{"number": 2}', '{"street": "a", "x": 1}'],
    ),
    list[int]: ([("[1, 2]", [1, 2]), ("[]", [])], ['["a"]', "1", "[1 2]"]),
    list[Colour]: ([('["red"]', [Colour.RED])], ["[red]"]),
    tuple[int, str]: ([('[1, "a"]', (1, "a"))], ["[1]", '(1, "a")', '["a", 1]']),
    tuple[int, ...]: ([("[1, 2, 3]", (1, 2, 3))], ['["a"]']),
    dict[str, int]: ([('{"a": 1}', {"a": 1}), ("{}", {})], ['{"a": "b"}']),
    dict[int, bool]: ([('{"7": true, "-1": false}', {7: True, -1: False})], ['{"a": true}']),
    dict[Colour, int]: (
        [('{"dark blue": 1, "red": 2}', {Colour.BLUE: 1, Colour.RED: 2}), ("{}", {})],
        ['{"RED": 1}', '{"blue": 1}'],
    ),
    dict[Level, bool]: ([('{"10": true}', {Level.high: True})], ['{"2": true}', '{"low": true}']),
    dict[Literal['a"', "b"], int]: ([('{"a\\"": 1}', {'a"': 1})], ['{"c": 1}']),
    dict[bool, dict[float, int]]: (
        [('{"true": {"-1.5e3": 1}}', {True: {-1500.0: 1}})],
        ['{"True": {}}', '{"false": {"x": 1}}'],
    ),
    dict[Colour | Literal["x"], int | None]: ([('{"x": null, "red": 1}',
        {"x": None, Colour.RED: 1})], ['{"y": 1}']),
    set[int]: ([("[2, 1]", {1, 2}), ("[]", set())], ['["a"]', "{}"]),
    frozenset[Colour]: ([('["red"]', frozenset({Colour.RED}))], ["[red]", '["green"]']),
    list[set[str]]: ([('[["a", "b"], []]', [{"a", "b"}, set()])], ['["a"]']),
    dict: ([('{"a": [null]}', {"a": [None]})], ["[]"]),
    list: ([('[1, "a"]', [1, "a"])], ["{}"]),
    Square | Circle: (
        [('{"side": 3}', Square(side=3)), ('{"radius": 1.5}', Circle(radius=1.5))],
        ['{"x": 1}'],
    ),
    Square | None: ([('{"side": 3}', Square(side=3)), ("null", None)], ["None"]),
    list[int] | int | None: ([("[1]", [1]), ("1", 1), ("null", None)], ["None"]),
    add: (
        [('{"a": 1}', {"a": 1}),
         ('{"a": 1, "b": 2, "colour": "dark blue"}', {"a": 1, "b": 2.0, "colour": Colour.BLUE})],
        ["{}", '{"a": 1, "c": 2}'],
    ),
    functools.partial(add, colour=Colour.BLUE): ([('{"a": 1}', {"a": 1})], ["{}"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "output_type, texts, refused",
    [(t, texts, refused) for t, (texts, refused) in READ.items()],
    ids=[re.sub(r" at 0x\w+", "", str(t))[:40] for t in READ],
)
def test_a_type_admits_its_texts_and_reads_their_values(output_type, texts, refused):
    constraint = from_output_type(output_type)
    for text, value in texts:
        assert accepts(constraint, text), text
        assert begins(constraint, text)
        found = constraint.parse(text)
        assert found == value and type(found) is type(value), text
        check = constraint.check()
        assert check is None or list(check.log_complete([Text(text)])) == [0.0]
    assert [text for text in refused if accepts(constraint, text)] == []
    assert len({constraint.value_key(text) for text, _ in texts}) == len(texts)
    found = check_masks(constraint, random.Random(0), steps=6)
    assert found is None or accepts(constraint, found.decode())


class Text:
    """As much of a `Completion` as checks look at."""

    def __init__(self, text):
        self.text = text


def test_a_set_has_no_item_twice_and_no_order():
    constraint = from_output_type(set[int])
    scores = constraint.check().log_prefix([written("[1, 2"), written("[1, 1,")])
    assert list(scores) == [0.0, -float("inf")]
    assert constraint.value_key("[1, 2]") == constraint.value_key("[2,1]")
    assert constraint.value_key("[1, 2]") != constraint.value_key("[1]")
    keys = from_output_type(Basket).value_key
    assert keys('{"fruit": [["a", "b"]], "by": {"red": ["c", "d"]}}') == keys(
        '{"fruit": [["b", "a"]], "by": {"red": ["d", "c"]}}'
    )
    assert keys('{"fruit": [["a"], []], "by": {}}') != keys('{"fruit": [[], ["a"]], "by": {}}')
    assert from_output_type(list[int]).value_key("[1, 2]") != from_output_type(list[int]).value_key(
        "[2, 1]"
    )


class Basket(pydantic.BaseModel):
    fruit: list[frozenset[str]]
    by: dict[Colour, set[str]]


def written(text):
    return Completion("", (), text, False, Vocabulary([b"a", b""], [1]))


def test_keys_that_json_cannot_have_are_refused():
    for keys in (Literal[1, 2], Literal[Colour.RED]):
        with pytest.raises(ConstraintError, match="no key of a dict can be"):
            from_output_type(dict[keys, int])
    assert from_output_type(dict[Literal["a", 1], int]).parse('{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    "free", [None, str, Annotated[str, "a note"], Annotated[str, Field(description="x")]]
)
def test_a_str_is_free_text(free):
    assert from_output_type(free) is None
    assert from_output_type(NewType("Name", str)) is None


@pytest.mark.parametrize(
    "mixed, reason",
    [
        (Square | Literal["none"], r"Square\) with bare text \(Literal\['none'\]\)"),
        (list[int] | bool, "writes all of it as JSON"),
        (Square | str, "in quotes"),
        (int | str, "any text is a str"),
        (Optional[str], "any text is a str"),  # noqa: UP045
        (int | Literal["5"], "the text '5' may be"),
        (datetime.date | Literal["2024-01-01"], "the text '2024-01-01' may be"),
        (Colour | Literal["red"], "the text 'red' may be"),
        (Literal[1, "1"], "two choices have the text '1'"),
        (Annotated[str, Field(pattern="a+")], r"use regex\(...\)"),
    ],
)
def test_what_has_no_single_reading_is_refused_and_told_what_to_do(mixed, reason):
    with pytest.raises(ConstraintError, match=reason):
        from_output_type(mixed)


def test_json_schema_reads_any_type_as_json():
    constraint = json_schema(Square | Literal["none"] | str)
    for text, value in [('"none"', "none"), ('"x"', "x"), ('{"side": 1}', Square(side=1))]:
        assert accepts(constraint, text) and constraint.parse(text) == value
    assert constraint.parse(" null ".strip().replace("null", '"y"')) == "y"


def positional(a: int, /) -> None: ...
def unannotated(a) -> None: ...
def starred(*args: int) -> None: ...
def unknown(a: "Nowhere") -> None: ...  # noqa: F821


class Plain:
    pass


@pytest.mark.parametrize(
    "wrong, reason",
    [
        (3, "an output type must be"),
        (True, "an output type must be"),
        ([{"type": "integer"}], "an output type must be"),
        (Square.model_construct(), "an output type must be"),
        (object(), "an output type must be"),
        ("free text", "is not JSON"),
        (Plain, "Plain is no type of data"),
        (list[Plain], "use a pydantic model, a dataclass or a TypedDict"),
        (Callable[[int], int], "use a pydantic model, a dataclass or a TypedDict"),
        (complex, "use tuple[float, float]"),
        (dict[str, complex], "use tuple[float, float]"),
        (Enum("Empty", []), "nothing to choose from"),
        (Enum("Functions", {"f": functools.partial(add)}), "no plain text"),
        (positional, "by keywords alone"),
        (starred, "by keywords alone"),
        (unannotated, "parameter 'a' of unannotated has no annotation"),
        (unknown, "Nowhere"),
        (reward(len), "pass it as potential="),
        (json_schema({}) * reward(len), "pass it as potential="),
    ],
    ids=range(19),
)
def test_other_output_types_are_refused(wrong, reason):
    with pytest.raises(ConstraintError, match=re.escape(reason)) as refused:
        from_output_type(wrong)
    assert "\n" not in str(refused.value)


def test_schemas_patterns_and_constraints_pass_as_they_are():
    given = regex("a") & regex("[ab]")
    assert from_output_type(given) is given
    assert from_output_type(Square).model is Square
    assert from_output_type({"type": "integer"}).schema == {"type": "integer"}
    assert from_output_type('{"type": "integer"}').schema == {"type": "integer"}
    assert accepts(from_output_type(re.compile("a+", re.I)), "aA")


def test_what_a_type_refuses_of_its_language_has_weight_zero():
    later = Annotated[datetime.date, Field(ge=day(2020, 1, 1))]
    for hint, good, bad in [
        (later, "2020-01-01", "2019-12-31"),
        (later | None, "None", "2019-12-31"),
        (Annotated[Colour, AfterValidator(_not_blue)], "red", "dark blue"),
        (Annotated[int | None, AfterValidator(_not_none)], "4", "None"),
        (Annotated[str, AfterValidator(_not_none), AfterValidator(_not_blue)], "a", "dark blue"),
    ]:
        constraint = from_output_type(hint)
        assert in_mask(constraint, good) and in_mask(constraint, bad)
        scores = constraint.check().log_complete([Text(good), Text(bad)])
        assert list(scores) == [0.0, -float("inf")]
        with pytest.raises(OutputValidationError):
            constraint.parse(bad)


def _not_blue(value):
    if value in (Colour.BLUE, "dark blue"):
        raise ValueError("blue")
    return value


def _not_none(value):
    if value is None:
        raise ValueError("none")
    return value


def test_a_strict_date_is_read_all_the_same():
    constraint = from_output_type(Annotated[datetime.date, Field(strict=True)])
    assert constraint.parse("2024-02-29") == day(2024, 2, 29)


TERMS = outlines.types
OUTLINES = {
    "regex": (TERMS.Regex("[ab]+"), ["ab"], ["c", ""]),
    "integer": (TERMS.integer, ["+5", "0"], ["05"]),
    "uuid4": (TERMS.uuid4, ["123e4567-e89b-42d3-a456-426614174000"], ["x"]),
    "sentence": (TERMS.sentence, ["It is so."], ["no"]),
    "email": (TERMS.email, ["a@b.org"], ["a@"]),
    "choice": (TERMS.Choice(["a", 2]), ["a", "2"], ["b"]),
    "cfg": (TERMS.CFG('start: "(" start ")" | "x"'), ["((x))"], ["(x"]),
    "schema": (TERMS.JsonSchema({"type": "integer", "minimum": 3}), ["3"], ["2"]),
    "string": (TERMS.dsl.String("a.b"), ["a.b"], ["axb"]),
    "dsl": (
        "n: " + TERMS.digit.between(1, 2) + either("a|b", TERMS.Choice(["x.", "y"])).optional(),
        ["n: 1", "n: 12a|b", "n: 1x."],
        ["n: ", "n: 123", "n: 1a", "n: 1xy"],
    ),
    "counts": (
        TERMS.dsl.String("a").exactly(2) + TERMS.dsl.String("b").at_least(1)
        + TERMS.dsl.String("c").at_most(1) + TERMS.dsl.String("d").zero_or_more()
        + TERMS.dsl.String("e").one_or_more(),
        ["aabe", "aabbcddee"],
        ["abe", "aae", "aabcce", "aab"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("term, members, others", OUTLINES.values(), ids=OUTLINES)
def test_terms_of_outlines_are_taken(term, members, others):
    constraint = from_output_type(term)
    assert [text for text in members if not accepts(constraint, text)] == []
    assert [text for text in others if accepts(constraint, text)] == []


def test_a_term_with_lookaround_is_judged_on_prefixes():
    constraint = from_output_type(TERMS.isbn)
    assert constraint.engine == "partial"
    assert accepts(constraint, "ISBN 0-306-40615-2") and not accepts(constraint, "ISBN 0-306-40")


def test_a_genson_builder_is_a_schema():
    genson = pytest.importorskip("genson")
    builder = genson.SchemaBuilder()
    builder.add_object({"a": 1})
    assert accepts(from_output_type(builder), '{"a": 2}')


def test_terms_of_outlines_that_would_be_loosened_are_refused():
    with pytest.raises(UnsupportedConstraintError, match="whitespace_pattern"):
        from_output_type(TERMS.JsonSchema({"type": "object"}, whitespace_pattern=r"\s"))
    with pytest.raises(UnsupportedConstraintError, match="JsonSchema"):
        from_output_type("a" + TERMS.JsonSchema({"type": "integer"}))


def test_constraints_intersect():
    both = json_schema({"type": "integer"}) & regex("[0-9]{2}") & choice(["12", "7", "345"])
    assert isinstance(both, Intersection)
    assert [c.name for c in both.constraints] == ["json_schema", "regex '[0-9]{2}'", "choice"]
    assert [t for t in ("12", "7", "345", "34") if accepts(both, t)] == ["12"]
    assert both.parse("12") == 12
    nested = lark('start: "a"+') & (regex("a{2}") & regex("a{2,4}"))
    assert len(nested.constraints) == 3
    assert accepts(nested, "aa") and not accepts(nested, "aaa")


def test_only_constraints_intersect():
    with pytest.raises(TypeError, match="multiply by it"):
        regex("a") & reward(len)
    with pytest.raises(TypeError, match=r"make it one with json_schema"):
        regex("a") & Square


def test_the_value_of_a_result_has_the_output_type():
    letters = sorted(set(b'0123456789-[]":, azTruefalsNo'))
    vocabulary = Vocabulary([*(bytes([b]) for b in letters), b""], [len(letters)])
    lm = LM(TableModel.random(vocabulary, seed=5, eos_probability=0.3))
    settings = {"n_particles": 20, "max_tokens": 12, "seed": 0}
    for output_type, kind in [
        (Annotated[int, Field(ge=0, lt=1000)], int),
        (bool, bool),
        (datetime.date, datetime.date),
        (Literal["a", "or"], str),
        (Annotated[int, Field(ge=0, lt=1000)] | None, (int, type(None))),
        (tuple[int, int], tuple),
        (regex("[a-z]{3}") & regex(".*a.*"), str),
    ]:
        out = lm.generate("a", output_type=output_type, **settings)
        assert isinstance(out.value, kind), (output_type, out.text)
    tilted = regex("[au]") * reward(lambda text: 50.0 * (text == "u"))
    assert lm.generate("a", potential=tilted, **settings).value == "u"
