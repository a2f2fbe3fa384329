"""The sampling contract over the particle cache: a transformers model with every kind of draft.

The model is so small that its own plain forward passes give the exact posterior.
"""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from exactness import assert_unbiased, member, score
from support import VOCABULARY, Language, Score, exact, request, results
from test_transformers_models import plain_logits

from guided_smc.costs import CostModel
from guided_smc.engine import Engine
from guided_smc.models import particles, traced
from guided_smc.models.int8 import Int8Twin
from guided_smc.models.ngram import NGramModel
from guided_smc.models.table import TableModel
from guided_smc.models.transformers import TransformersModel

PROMPT = (0, 3, 1, 0, 3)
LANGUAGE = Language(member, 4)
COSTS = CostModel(target=((1, 1.0), (8, 1.1), (16, 6.0)), draft=((1, 0.2),))


def tiny(noise: float = 0.0) -> TransformersModel:
    """A Llama whose distributions are far from flat, with some noise in its weights."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.6,
        bos_token_id=0,
        eos_token_id=4,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn_like(weight)
    return TransformersModel(model, VOCABULARY, name=f"tiny, noise {noise}")


@functools.cache
def target() -> TransformersModel:
    return tiny()


@functools.cache
def table() -> TableModel:
    """The same model as a table."""
    return TableModel(
        lambda context: plain_logits(target(), list(context))[-1].double().softmax(-1).numpy(),
        VOCABULARY,
    )


@functools.cache
def draft(kind: str):
    drafts = {
        "none": lambda: None,
        "int8": lambda: Int8Twin(target()),
        "ngram": lambda: NGramModel(VOCABULARY),
        "another": lambda: tiny(0.15),
    }
    return drafts[kind]()


def runs(n_runs: int, kind: str, *, constrained: bool, **options):
    """Independent runs in one batch, under seeds 0, 1, 2, ..."""
    engine = Engine(target(), draft(kind), max_rows=10**6)
    compiled = LANGUAGE.compile(VOCABULARY) if constrained else None
    for i in range(n_runs):
        r = request(table(), PROMPT, index=i, seed=i, max_tokens=4, n_particles=4, **options)
        r.constraint = compiled
        engine.add(r)
    events = []
    while engine.busy:
        events += engine.step()
    return results(events)


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
@pytest.mark.parametrize("in_place", [1, particles.IN_PLACE], ids=["in place", "in windows"])
@pytest.mark.parametrize(
    ("kind", "block_size"),
    [
        ("none", 0),
        ("int8", 1),
        ("int8", 3),
        ("int8", "auto"),
        ("ngram", 2),
        ("ngram", "auto"),
        ("another", 2),
    ],
)
def test_every_draft_is_unbiased_over_the_particle_cache(
    kind, block_size, in_place, constrained, monkeypatch
):
    monkeypatch.setattr(particles, "IN_PLACE", in_place)
    # What an n-gram proposes is so far from a law of peaks that 300 runs would not see the weights
    # that make up for it.
    temperature = 6.0 if kind == "ngram" else 1.0
    found = runs(
        300,
        kind,
        constrained=constrained,
        block_size=block_size,
        temperature=temperature,
        costs=COSTS,
        potentials=[Score(score, prefixes=True)],
        ess_threshold=1.0,
    )
    # With K = 3 a text of at most four tokens is one step.
    assert block_size == 3 or any(s.resampled for r in found for s in r.steps)
    assert (sum(r.usage.draft_passes for r in found) > 0) == (kind != "none")
    expected = exact(
        table(),
        PROMPT,
        max_tokens=4,
        member=member if constrained else None,
        score=score,
        temperature=temperature,
    )
    assert_unbiased(found, expected)


def test_graphs_of_both_models_are_unbiased(monkeypatch):
    monkeypatch.setattr(traced, "AFTER", 1)
    monkeypatch.setattr(traced, "SMALL", 10**6)
    model = tiny()
    engine = Engine(model, Int8Twin(model), max_rows=10**6)
    for i in range(300):
        r = request(table(), PROMPT, index=i, seed=i, max_tokens=4, n_particles=4, block_size=1)
        engine.add(r)
    events = []
    while engine.busy:
        events += engine.step()
    assert model._traced._graph is not None
    assert_unbiased(results(events), exact(table(), PROMPT, max_tokens=4))
