"""What a call makes of its arguments: what it decides, refuses, and never ignores."""

from __future__ import annotations

import math

import numpy as np
import pydantic
import pytest
from support import VOCABULARY, Language

from guided_smc import LM, reward
from guided_smc.errors import OptionError, PromptError
from guided_smc.models.table import TableModel
from guided_smc.vocabulary import Vocabulary

TARGET = TableModel.random(VOCABULARY, seed=11, eos_probability=0.1)
DRAFT = TableModel.random(VOCABULARY, seed=22, eos_probability=0.1)
ANYTHING = Language(lambda t: True, 4)


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}], ids=str)
def test_a_greedy_target_is_not_drafted_for_and_the_result_says_so(greedy):
    alone = LM(TARGET).generate("a", max_tokens=6, seed=0, **greedy)
    drafted = LM(TARGET, draft=DRAFT).generate("a", max_tokens=6, seed=0, **greedy)
    assert drafted.text == alone.text
    assert drafted.log_evidence == pytest.approx(0.0, abs=1e-4)
    assert any("greedy" in w for w in drafted.warnings)
    assert alone.warnings == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": math.nan}, "beta"),
        ({"beta": 2.0}, "go with reward="),
        ({"reward_on": "prefix"}, "go with reward="),
        ({"potential": reward(len), "beta": 7.0}, "potential has its own"),
        ({"potential": len}, "reward="),
        ({"reward": ANYTHING}, "potential="),
        ({"draft_temperature": 0.5}, "draft model"),
        ({"block_size": 2}, "draft model"),
        ({"options": {"max_tokens": 3}}, "Options"),
        ({"index": 3}, "index"),
        ({"n_particles": True}, "n_particles"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"power": 1e-50}, "power"),
        ({"potential": ANYTHING, "stop": "a"}, "stop strings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_nothing_is_accepted_and_ignored(settings, message):
    with pytest.raises(OptionError, match=message):
        LM(TARGET).generate("a", **settings)


def test_numbers_of_numpy_are_numbers():
    result = LM(TARGET).generate(
        "a", max_tokens=np.int64(3), reward=len, beta=np.float32(0.5), seed=np.int64(3)
    )
    assert len(result.text) <= 3


@pytest.mark.parametrize("prompt", [None, 3, 2.5])
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(PromptError):
        LM(TARGET).generate(prompt)


def test_an_error_of_a_single_prompt_is_raised_and_never_returned():
    with pytest.raises(PromptError):
        LM(TARGET).generate("zz", return_exceptions=True)
    found = LM(TARGET).generate(["zz", "a"], max_tokens=2, return_exceptions=True)
    assert isinstance(found[0], PromptError)


def test_validators_of_a_pydantic_model_are_part_of_the_constraint():
    class Even(pydantic.BaseModel):
        n: int = pydantic.Field(ge=0, le=9)

        @pydantic.field_validator("n")
        @classmethod
        def _even(cls, n):
            if n % 2:
                raise ValueError("odd")
            return n

    vocabulary = Vocabulary([b'{"n":', *(b"%d" % i for i in range(10)), b"}", b""], eos_ids=[12])
    model = TableModel.random(vocabulary, seed=1, eos_probability=0.2)
    result = LM(model).generate(
        [12], output_type=Even, n_particles=64, max_tokens=4, seed=0, ess_threshold=0
    )
    assert {v.value.n for v in result.values} <= {0, 2, 4, 6, 8}
    assert any(p.weight == 0 for p in result.particles)
    mass = sum(
        model.probabilities((12,))[0]
        * model.probabilities((12, 0))[1 + n]
        * model.probabilities((12, 0, 1 + n))[11]
        * model.probabilities((12, 0, 1 + n, 11))[12]
        for n in (0, 2, 4, 6, 8)
    )
    settings = dict(output_type=Even, n_particles=32, max_tokens=4, max_restarts=0)
    found = [
        math.exp(LM(model).generate([12], seed=s, **settings).log_evidence) for s in range(100)
    ]
    assert abs(np.mean(found) - mass) < 4 * np.std(found) / 10
