"""What a type checker must see of the API: `make lint` runs mypy over this file."""

from typing import Literal

from pydantic import BaseModel
from typing_extensions import assert_type

from guided_smc import LM, Potential, Result, Weighted, choice, json_schema, regex, reward
from guided_smc.rewards import Reward, length


class Person(BaseModel):
    name: str


def check(lm: LM) -> None:
    assert_type(lm.generate("a"), Result[str])
    assert_type(lm.generate("a").value, str)
    assert_type(lm.generate("a", output_type=Person), Result[Person])
    assert_type(lm.generate("a", output_type=Person, n_particles=4).value.name, str)
    assert_type(lm.generate(["a", "b"], output_type=Person), list[Result[Person]])
    assert_type(lm.generate("a", output_type=Person).values, list[Weighted[Person]])
    lm.generate("a", output_type={"type": "integer"}).value + 1
    lm.generate("a", potential=json_schema(Person) * json_schema(Person))
    messages = [{"role": "user", "content": "a"}]
    assert_type(lm.generate(messages, output_type=Person), Result[Person])
    assert_type(lm.generate([messages], output_type=Person), list[Result[Person]])
    assert_type(lm.generate("a", output_type=int).value, int)
    assert_type(lm.generate("a", output_type=list[int]).value, list[int])
    assert_type(lm.generate(["a"], output_type=bool), list[Result[bool]])
    lm.generate("a", output_type=Literal["b"]).value.upper()
    lm.generate("a", output_type=int | None)
    lm.generate("a", output_type=regex("a") & choice(["a", "b"]))
    lm.generate("a", potential=regex("a") * reward(len))
    assert_type(0.7 * length(5) + reward(len) / 2 - 1, Reward)
    assert_type(length(5) * 2, Reward)
    assert_type(length(5) * reward(len), Potential)
    assert_type((length(5) + 1).with_(beta=2), Reward)
    lm.generate("a", reward=-length(5).clip(-1, 0))
