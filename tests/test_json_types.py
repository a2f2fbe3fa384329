"""Types that pydantic knows, as JSON Schema constraints."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pytest
from languages import accepts, in_mask

from guided_smc.errors import ConstraintError, OutputValidationError
from guided_smc.grammars import json_schema


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


def test_a_model_without_a_json_schema_is_refused():
    class Odd(pydantic.BaseModel):
        f: type(lambda: None)

        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    with pytest.raises(ConstraintError, match="Odd"):
        json_schema(Odd)
