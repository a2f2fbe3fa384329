"""What is added to logits is part of the target: exactly, whatever the draft and the neighbours."""

import numpy as np
import pytest
from exactness import DRAFT, LANGUAGE, PROMPT, TARGET, assert_unbiased, member
from support import exact, request, results

from guided_smc import LM, OptionError, TableModel
from guided_smc.engine import Engine

BIAS = {0: 1.5, 2: -0.7, 4: 0.4, 5: -100.0}


def biased(context):
    """The target as a table that has the bias in it."""
    p = TARGET.probabilities(context) * np.exp([BIAS.get(v, 0.0) for v in range(6)])
    return p / p.sum()


BIASED = TableModel(biased, TARGET.vocabulary)


def runs(n, *, constraint=None, neighbours=False, **options):
    engine = Engine(TARGET, DRAFT if options.get("block_size") else None, max_rows=10**6)
    for i in range(n):
        made = request(
            TARGET, PROMPT, index=i, seed=i, max_tokens=4, constraint=constraint, **options
        )
        made.logit_bias = BIAS
        engine.add(made)
        if neighbours:
            engine.add(request(TARGET, PROMPT, index=n + i, seed=i, max_tokens=4, **options))
    found = []
    while engine.busy:
        found += engine.step()
    return results(found)


@pytest.mark.parametrize("block_size", [0, 2])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("transform", [{}, {"temperature": 0.7, "top_p": 0.95}], ids=str)
def test_the_target_with_a_bias_is_the_target(block_size, constrained, transform):
    found = runs(
        300,
        constraint=LANGUAGE if constrained else None,
        n_particles=4,
        block_size=block_size,
        **transform,
    )
    law = exact(BIASED, PROMPT, max_tokens=4, member=member if constrained else None, **transform)
    assert_unbiased(found, law)


def test_the_prompts_beside_it_are_not_biased():
    found = runs(300, neighbours=True, n_particles=4, block_size=2)
    assert_unbiased(found[:300], exact(BIASED, PROMPT, max_tokens=4))
    assert_unbiased(found[300:], exact(TARGET, PROMPT, max_tokens=4))


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        ({6: 1.0}, "no token 6"),
        ({"0": 1.0}, "whole numbers"),
        ({0: float("inf")}, "finite"),
        ({0: "much"}, "a number"),
    ],
)
def test_a_bias_that_cannot_be_is_refused(bias, said):
    with pytest.raises(OptionError, match=said):
        LM(TARGET).request("ab", logit_bias=bias)
