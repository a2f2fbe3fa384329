"""Records out: the form of one line, whatever the result holds."""

from __future__ import annotations

import json
import math
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any

import lark
import pydantic
import pytest

from guided_smc.cli.reading import PromptLine
from guided_smc.cli.records import FIELDS, encode, error_record, result_record
from guided_smc.errors import OutputValidationError, PotentialError
from guided_smc.options import Options
from guided_smc.results import Diversity, Estimate, Particle, Result, RewardEstimate, Step, Usage

INF = math.inf


def a_line(**changes: Any) -> PromptLine:
    values = {"index": 4, "number": 5, "digest": "d", "prompt": "x", "options": Options()}
    return PromptLine(**{**values, **changes})


def a_result(texts: dict[str, float], parse: Any = str, **changes: Any) -> Result[Any]:
    """A result whose particles have these texts and weights; the first is selected."""
    particles = tuple(
        Particle(
            text=text,
            token_ids=tuple(range(len(text))),
            finish_reason="stop",
            log_weight=math.log(weight) if weight else -INF,
            weight=weight,
            share=weight,
            log_p=-1.0,
            log_q=-INF,
            log_potentials={"reward": -INF},
            rewards={},
            ancestors=(0,),
        )
        for text, weight in texts.items()
    )
    values: dict[str, Any] = {
        "index": 4,
        "text": next(iter(texts)),
        "token_ids": (1, 2, 3),
        "finish_reason": "stop",
        "log_evidence": -2.5,
        "log_evidence_std_error": None,
        "kl": None,
        "rewards": {},
        "diversity": Diversity((1,), 1.0, 1.0),
        "particles": particles,
        "selected": (0,),
        "steps": (Step(0, 0, 1, 1.0, -2.5, (-INF,), False, (0,)),),
        "usage": Usage(prompt_tokens=3, particle_tokens=9, seconds={"verify": 0.5}),
        "seed": 11,
        "restarts": 0,
        "warnings": (),
        "_parse": parse,
        "_key": str,
    }
    return Result(**{**values, **changes})


def test_a_reward_and_the_divergence_are_in_the_record():
    estimate = RewardEstimate(Estimate(1.5, None), Estimate(-INF, None), 2.0)
    result = a_result({"abc": 1.0}, rewards={"taste": estimate}, kl=Estimate(0.25, 0.5))
    record = written(result_record(a_line(), result, "f"))
    assert record["rewards"] == {
        "taste": {
            "tilted": {"value": 1.5, "std_error": None},
            "untilted": {"value": None, "std_error": None},
            "chosen": 2.0,
        }
    }
    assert record["kl"] == {"value": 0.25, "std_error": 0.5}


def written(record: dict[str, Any]) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = encode(record)
    assert line.endswith(b"\n")
    assert len(line.decode().splitlines()) == 1
    return json.loads(line, parse_constant=refuse)


def test_the_record_of_a_plain_result():
    record = result_record(a_line(), a_result({"abc": 1.0}), "f")
    assert written(record) == {
        "index": 4,
        "text": "abc",
        "value": "abc",
        "finish_reason": "stop",
        "log_evidence": -2.5,
        "n_tokens": 3,
        "seed": 11,
        "fingerprint": "f",
    }


def test_restarts_and_warnings_stand_in_the_record_where_there_are_any():
    result = a_result({"a": 1.0}, restarts=2, warnings=("w",))
    record = written(result_record(a_line(), result, "f"))
    assert (record["restarts"], record["warnings"]) == (2, ["w"])


def test_a_pydantic_value_is_written_as_the_json_that_its_schema_describes():
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(alias="fullName")
        height: float
        home: Path = Path("x")

    text = '{"fullName": "Ann", "height": 1.5}'
    result = a_result({text: 1.0}, Person.model_validate_json)
    record = written(result_record(a_line(), result, "f"))
    assert record["value"] == {"fullName": "Ann", "height": 1.5, "home": "x"}


def test_other_values_are_written_as_json_too():
    class Colour(Enum):
        RED = "red"

    tree = lark.Tree("sum", [lark.Token("N", "1"), lark.Tree("empty", [])])
    for value, plain in [
        ({Colour.RED: {date(2024, 2, 29)}}, {"red": ["2024-02-29"]}),
        ([frozenset({1}), (2, None)], [[1], [2, None]]),
        (10**40, 10**40),
        (tree, {"rule": "sum", "children": ["1", {"rule": "empty", "children": []}]}),
    ]:
        result = a_result({"a": 1.0}, lambda text, value=value: value)
        assert written(result_record(a_line(), result, "f"))["value"] == plain


def test_all_values_are_parallel_lists_heaviest_first():
    result = a_result({"aa": 0.25, "b": 0.75, "dead": 0.0}, parse=len)
    record = written(result_record(a_line(options=Options(select="all")), result, "f"))
    assert record["text"] == ["b", "aa"]
    assert record["value"] == [1, 2]
    assert record["weights"] == [0.75, 0.25]
    assert record["n_tokens"] == [1, 2]


@pytest.mark.parametrize("select", ["sample", "all"])
def test_an_output_that_was_not_completed_is_an_error_that_keeps_the_partial_text(select):
    result = a_result({'{"na': 0.0}, log_evidence=-INF, selected=(), finish_reason="length")
    record = written(result_record(a_line(options=Options(select=select)), result, "f"))
    assert record["text"] == '{"na'
    assert record["value"] is None
    assert record["finish_reason"] == "length"
    assert record["log_evidence"] is None
    assert record["error"]["type"] == "IncompleteOutputError"
    assert "max_tokens" in record["error"]["message"]


def test_a_value_that_its_type_refuses_is_an_error():
    def refuse(text: str) -> None:
        raise OutputValidationError("no", text=text, finish_reason="stop")

    record = written(result_record(a_line(), a_result({"abc": 1.0}, refuse), "f"))
    assert record["error"] == {"type": "OutputValidationError", "message": "no", "line": 5}
    assert (record["text"], record["value"]) == ("abc", None)


def test_the_full_record_holds_particles_steps_and_usage_with_infinities_as_null():
    record = written(result_record(a_line(), a_result({"abc": 1.0, "x": 0.0}), "f", full=True))
    assert [p["text"] for p in record["particles"]] == ["abc", "x"]
    assert record["particles"][1]["log_weight"] is None
    assert record["particles"][0]["log_potentials"] == {"reward": None}
    assert record["steps"][0]["log_weights"] == [None]
    assert record["usage"]["seconds"] == {"verify": 0.5}
    assert record["selected"] == [0]


def test_a_failed_potential_is_recorded_with_its_name_and_text():
    error = PotentialError("raised", potential="mine", text="abc")
    record = written(error_record(a_line(), error, "f", seed=5))
    assert record == {
        "index": 4,
        "text": None,
        "value": None,
        "finish_reason": None,
        "log_evidence": None,
        "error": {
            "type": "PotentialError",
            "message": "raised",
            "line": 5,
            "potential": "mine",
            "text": "abc",
        },
        "seed": 5,
        "fingerprint": "f",
    }


def test_carried_fields_stand_in_the_record_and_under_input_where_the_name_is_taken():
    carried = {"id": "a", **dict.fromkeys(FIELDS, "theirs")}
    line = a_line(carried=carried)
    for record in (
        written(result_record(line, a_result({"abc": 1.0}), "f")),
        written(error_record(line, ValueError("x"), "f")),
    ):
        assert record["id"] == "a"
        assert record["input"] == dict.fromkeys(FIELDS, "theirs")
        assert (record["index"], record["fingerprint"]) == (4, "f")


def test_every_field_of_a_record_is_reserved():
    line = a_line(options=Options(select="all"), carried={"text": 1})
    tilted = {"taste": RewardEstimate(Estimate(1.0, None), Estimate(1.0, None), 1.0)}
    result = a_result({"a": 1.0}, restarts=1, warnings=("w",), rewards=tilted)
    names = set(result_record(line, result, "f", full=True))
    names |= set(error_record(line, ValueError("x"), "f", seed=1))
    assert names == set(FIELDS)


def test_text_that_json_readers_trip_over_is_escaped():
    awkward = "a\x85b\u2028c\nd\x1e"
    assert written({"text": awkward}) == {"text": awkward}
    assert "é" in encode({"text": "é"}).decode()
    assert written({"text": "\ud800"}) == {"text": "\ud800"}
