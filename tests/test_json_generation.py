"""JSON through the engine: end tokens, special tokens, parts of characters, and a poor draft."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from support import exact, request, results, unnormalised

from guided_smc.engine import run
from guided_smc.grammars import json_schema
from guided_smc.models.table import TableModel
from guided_smc.vocabulary import Vocabulary

# A quote, letters, the two bytes of "é" and the first of them behind a letter, a piece of several
# letters, two end tokens of which one has a text, padding, and a control token spelt like a quote.
TOKENS = [b'"', b"a", b"b", b"\xc3", b"\xa9", b"a\xc3", b"ab", b"", b"</s>", None, b'"']
END, SECOND_END, PADDING, CONTROL = 7, 8, 9, 10
VOCABULARY = Vocabulary(TOKENS, eos_ids=[END, SECOND_END], special_ids=[CONTROL])
LONGEST = 5
SCHEMA = {"type": "string", "maxLength": 2}
WEIGHTS = [3, 2, 1, 2, 2, 1, 1, 2, 6, 0, 6]  # by token: the second end token and the control token


def likes(weights):
    """A model that says the same whatever comes before."""
    p = np.array(weights, dtype=float) / sum(weights)
    return TableModel(lambda context: p, VOCABULARY)


TARGET = likes(WEIGHTS)
DRAFTS = {
    "none": (None, 0),
    "the same": (TARGET, 3),
    # Nearly all of its mass is on what the grammar refuses, and on ends in the middle of a block.
    "refused": (likes([1, 1, 1, 1, 1, 1, 1, 300, 300, 0, 300]), 3),
    "parts": (likes([1, 1, 1, 300, 1, 300, 1, 1, 1, 0, 1]), 3),
}


def member(text):
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, str) and len(value) <= 2 and "\ufffd" not in value


@pytest.fixture(scope="module")
def by_text():
    """The unnormalised posterior, a text's tokenisations together."""
    found = Counter()
    for text, mass in exact(TARGET, [END], max_tokens=LONGEST, member=member).items():
        found[VOCABULARY.decode(text)] += mass
    assert found['"é"'] > 0 and found['"aé"'] > 0
    return found


@pytest.mark.parametrize("name", DRAFTS)
def test_ends_special_tokens_and_parts_of_characters_leave_the_posterior_exact(name, by_text):
    draft, block_size = DRAFTS[name]
    runs = 60
    requests = [
        request(
            TARGET,
            [END],
            index=i,
            constraint=json_schema(SCHEMA),
            seed=i,
            block_size=block_size,
            n_particles=16,
            max_tokens=LONGEST,
        )
        for i in range(runs)
    ]
    estimate, evidence = Counter(), []
    for result in results(run(TARGET, requests, draft=draft, max_rows=512)):
        for particle in result.particles:
            assert particle.weight == 0 or member(particle.text), particle.text
            assert not {END, SECOND_END, PADDING, CONTROL} & set(particle.token_ids)
        for text, mass in unnormalised(result).items():
            estimate[VOCABULARY.decode(text)] += mass / runs
        evidence.append(math.exp(result.log_evidence))
    error = np.std(evidence) / math.sqrt(runs)
    assert sum(by_text.values()) == pytest.approx(np.mean(evidence), abs=4 * error)
    for text, mass in by_text.items():
        assert estimate[text] == pytest.approx(mass, abs=6 * error + 0.02 * sum(by_text.values()))
