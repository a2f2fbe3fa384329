"""Whatever steers a reward on the way, the posterior is `p · exp(β·R)`, by enumeration."""

import json

import numpy as np
import pytest
from exactness import assert_unbiased
from support import exact, request, results

from guided_smc.engine import Engine
from guided_smc.models.table import TableModel
from guided_smc.rewards import field, keywords, length, matches, reward
from guided_smc.vocabulary import Vocabulary

PROMPT = (0,)
PROSE = Vocabulary([b"a", b"b", b". ", b"\n", b""], eos_ids=[4])
TARGET = TableModel.random(PROSE, seed=1, eos_probability=0.2)
BETA = 1.5


def taste(text: str) -> float:
    return text.count("a") - 0.5 * text.count("ab") + 0.3 * (text[-1:] == "b")


def posterior(potential, score, *, target=TARGET, n_runs=300, max_tokens=4, **options):
    """Runs of a potential agree with the enumeration of what it means."""
    engine = Engine(target, None, max_rows=10**6)
    for i in range(n_runs):
        engine.add(
            request(
                target,
                PROMPT,
                index=i,
                seed=i,
                max_tokens=max_tokens,
                n_particles=4,
                potentials=[potential],
                **options,
            )
        )
    events = []
    while engine.busy:
        events += engine.step()
    expected = exact(target, PROMPT, max_tokens=max_tokens, score=score)
    assert_unbiased(results(events), expected)


@pytest.mark.parametrize("on", ["step", "sentence", "line", "end"])
def test_whenever_it_speaks(on):
    posterior(reward(taste, beta=BETA, on=on), lambda t: BETA * taste(t))


@pytest.mark.parametrize(
    "schedule", ["linear", "adaptive", 2, 7, lambda n: float(n % 2)], ids=range(5)
)
def test_however_beta_grows(schedule):
    r = reward(taste, beta=BETA, on="step", schedule=schedule)
    posterior(r, lambda t: BETA * taste(t))


def test_whatever_is_expected_of_unfinished_texts():
    r = reward(taste, beta=BETA, prefix=lambda text: 0.3 * len(text) - text.count("b"))
    posterior(r, lambda t: BETA * taste(t))


def test_however_rewards_are_put_together():
    a = reward(taste, on="sentence", bounds=(-10, 10), name="taste")
    whole = 0.7 * a.normalised() + 0.3 * length(3) - keywords("ab").clip(0, 0.5) + 0.25
    whole = whole.with_(beta=BETA, schedule=3)

    def score(text: str) -> float:
        near = -abs(len(text) - 3) / 3
        found = "ab" in text.replace(".", " ").split()
        return BETA * (0.7 * (taste(text) + 10) / 20 + 0.3 * near - 0.5 * found + 0.25)

    posterior(whole, score)


def test_rewards_of_their_own_beta_multiply():
    product = reward(taste, beta=BETA, on="step") * matches("b", beta=-1.0) * length(2, beta=0.5)

    def score(text: str) -> float:
        return BETA * taste(text) - ("b" in text) - 0.5 * abs(len(text) - 2) / 2

    posterior(product, score)


JSON = Vocabulary([b'{"x": ', b"1", b"2", b"}", b""], eos_ids=[4])


def test_fields_that_close_on_the_way():
    def row(context):
        p = np.full(5, 0.02)
        follows = {0: (1, 2), 1: (1, 3), 2: (2, 3), 3: (4,)}
        p[list(follows[context[-1]] if len(context) > 1 else (0,))] += 0.5
        return p / p.sum()

    target = TableModel(row, JSON)

    def tenth(x) -> float:
        return x / 10 if isinstance(x, int) else -1.0

    def score(text: str) -> float:
        try:
            return BETA * tenth(json.loads(text)["x"])
        except (ValueError, KeyError, TypeError):
            return BETA * -0.5

    x = field(lambda value: tenth(value.x), default=-0.5, beta=BETA)
    posterior(x, score, target=target, max_tokens=5)
