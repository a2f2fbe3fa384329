"""The same engine on a real model: every output fits its schema, seeds repeat, weights hold."""

from __future__ import annotations

import math

import jsonschema
import numpy as np
import pytest
import torch
from pydantic import BaseModel, Field
from support import untimed

import guided_smc
from guided_smc import IncompleteOutputError, PromptError, TokenizerMismatchError
from guided_smc.models.transformers import TransformersModel

pytestmark = pytest.mark.model

SUBJECTS = [
    *("a sailor", "a baker", "an astronomer", "a violinist", "a nurse", "a spy", "a farmer"),
    *("a king", "a ghost", "a robot", "a détective", "a poet", "a miner", "a clown", "a judge"),
    *("a diver", "a monk", "a thief", "a pilot", "a cook", "a painter", "a tailor", "a hunter"),
    *("a wizard", "an athlete", "a plumber", "a 忍者", "a teacher", "a beekeeper", "a drummer"),
]
FLAT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "alive": {"type": "boolean"},
        "height": {"type": ["number", "null"], "minimum": 0, "maximum": 3},
    },
    "required": ["name", "age", "alive"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "friends": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "years": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["name", "years"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["friends"],
    "additionalProperties": False,
}
MOOD = {"enum": ["happy", "sad", "angry", "très content", 42, None, {"mixed": True}]}


@pytest.mark.parametrize(
    ("ask", "schema", "max_tokens"),
    [
        ("Describe {} in JSON with name, age, alive and height.", FLAT, 80),
        ("List the friends of {} in JSON, each with name and years.", NESTED, 110),
        ("What mood is {} in? Answer with a JSON value.", MOOD, 12),
    ],
    ids=["flat object", "nested array of objects", "enum"],
)
def test_every_output_of_thirty_prompts_fits_its_schema(lm, ask, schema, max_tokens):
    prompts = [ask.format(s) for s in SUBJECTS]
    assert len(prompts) == 30
    found = lm.generate(
        prompts, output_type=schema, n_particles=2, max_tokens=max_tokens, seed=1, max_rows=60
    )
    check = jsonschema.validators.validator_for(schema)(schema)
    for result in found:
        value = result.value
        assert check.is_valid(value), (value, list(check.iter_errors(value)))
        assert math.isfinite(result.log_evidence)
        assert result.log_evidence < 0


def test_the_same_seed_gives_the_same_bytes(lm):
    def once():
        result = lm.generate(
            "Invent a person as JSON.", output_type=FLAT, n_particles=4, max_tokens=60, seed=5
        )
        return untimed(result)

    assert once() == once()


def test_a_model_as_its_own_draft_gives_weights_zero(lm):
    with_draft = guided_smc.LM(lm.model, draft=lm.model, encoder=lm.encoder)
    for block_size in (1, 4):
        result = with_draft.generate(
            "Tell me about whales.", block_size=block_size, n_particles=4, max_tokens=20, seed=2
        )
        assert np.allclose([p.log_weight for p in result.particles], 0, atol=1e-3)
        assert result.usage.draft_passes > 0
    alone = lm.generate("Tell me about whales.", n_particles=4, max_tokens=20, seed=2)
    assert alone.usage.draft_passes == 0


def test_a_draft_under_a_schema_leaves_the_answer_valid(lm):
    with_draft = guided_smc.LM(lm.model, draft=lm.model, encoder=lm.encoder)
    result = with_draft.generate(
        "Describe a cat in JSON.", output_type=FLAT, n_particles=4, max_tokens=60, seed=3
    )
    jsonschema.validate(result.value, FLAT)
    assert max(s.block_size for s in result.steps) == 4


@torch.no_grad()
def test_log_p_of_a_particle_is_that_of_a_plain_forward_pass(lm):
    prompt = lm.encoder.encode("What is the capital of France?")
    result = lm.generate(prompt, n_particles=3, max_tokens=16, temperature=0.7, seed=4)
    hf = lm.model.model
    ours = hf.config._attn_implementation
    hf.set_attn_implementation(lm.model.own_attention)
    try:
        # Of a particle that ended, the end token is not known here: the model has two.
        cut = [p for p in result.particles if p.finish_reason == "length"]
        assert cut
        for particle in cut:
            ids = [*prompt, *particle.token_ids]
            logits = hf(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].double()
            log_p = (logits / 0.7).log_softmax(-1)
            chosen = log_p[torch.arange(len(particle.token_ids)), list(particle.token_ids)]
            assert particle.log_p == pytest.approx(float(chosen.sum()), abs=1e-2)
    finally:
        hf.set_attn_implementation(ours)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def test_a_pydantic_model_gives_typed_values_and_votes(lm):
    result = lm.generate(
        "Describe Ada Lovelace in JSON with name and age.",
        output_type=Person,
        n_particles=6,
        max_tokens=48,
        select="vote",
        seed=6,
    )
    assert isinstance(result.value, Person)
    assert all(isinstance(v.value, Person) for v in result.values)
    assert result.value == result.values[0].value


def test_a_reward_shifts_what_is_sampled(lm):
    ask = "Is a tomato a fruit? Answer yes or no."
    schema = {"enum": ["yes", "no"]}

    def share(beta):
        result = lm.generate(
            ask,
            output_type=schema,
            n_particles=64,
            max_tokens=6,
            seed=7,
            reward=lambda text: float("yes" in text),
            beta=beta,
        )
        return sum(v.weight for v in result.values if v.value == "yes")

    low, middle, high = share(-6.0), share(0.0), share(6.0)
    assert low < middle < high


def test_an_output_that_cannot_be_completed_keeps_its_partial_text(lm):
    result = lm.generate("Describe a cat.", output_type=FLAT, n_particles=2, max_tokens=4, seed=0)
    assert result.finish_reason == "length"
    assert result.log_evidence == -math.inf
    assert result.restarts == 1
    with pytest.raises(IncompleteOutputError) as caught:
        _ = result.value
    assert caught.value.text == result.text
    assert result.text.lstrip().startswith("{")


def test_a_stop_string_stops(lm):
    result = lm.generate("Count from one to ten.", stop=[",", "\n"], max_tokens=40, seed=1)
    stopped = [p for p in result.particles if p.finish_reason == "stop"]
    assert stopped
    for p in stopped:
        assert not {",", "\n"} & set(p.text)
        said = lm.model.vocabulary.decode(p.token_ids)
        assert said.startswith(p.text)
        assert len(p.token_ids) < 40
    assert any(len(lm.model.vocabulary.decode(p.token_ids)) > len(p.text) for p in stopped)


def test_a_prompt_longer_than_the_context_is_refused_by_its_number(lm):
    with pytest.raises(PromptError, match=r"prompt 1: .* 8192"):
        lm.generate(["short", "long " * 9000], max_tokens=4)
    with pytest.raises(PromptError, match="together"):
        lm.generate("short", max_tokens=8190)


def test_one_bad_prompt_of_many_can_be_told_in_its_place(lm):
    found = lm.generate(
        ["Hi", "long " * 9000, "Hello"], max_tokens=3, n_particles=1, return_exceptions=True
    )
    assert isinstance(found[1], PromptError)
    assert found[0].index == 0
    assert found[2].index == 2


def test_a_draft_with_another_tokenizer_is_refused(lm):
    tokens = list(lm.model.vocabulary.tokens)
    tokens[300], tokens[301] = tokens[301], tokens[300]
    old = lm.model.vocabulary
    vocabulary = guided_smc.Vocabulary(tokens, old.eos_ids, old.special_ids)
    swapped = TransformersModel(lm.model.model, vocabulary, name="swapped")
    with pytest.raises(TokenizerMismatchError, match="300"):
        guided_smc.load("smollm2-135m", draft=guided_smc.LM(swapped, encoder=lm.encoder))


def test_chat_messages_and_the_plain_prompt_they_stand_for_are_the_same(lm):
    plain = lm.generate("Hi!", max_tokens=8, n_particles=1, seed=3)
    messages = lm.generate(
        [{"role": "user", "content": "Hi!"}], max_tokens=8, n_particles=1, seed=3
    )
    raw = lm.generate("Hi!", chat=False, max_tokens=8, n_particles=1, seed=3)
    assert plain.text == messages.text
    assert raw.usage.prompt_tokens < plain.usage.prompt_tokens


def test_streaming_yields_steps_and_then_the_result_that_generate_gives(lm):
    settings = dict(n_particles=3, max_tokens=10, seed=8)
    events = list(lm.stream("Name a colour.", **settings))
    assert isinstance(events[-1], guided_smc.ResultEvent)
    steps = events[:-1]
    assert all(isinstance(e, guided_smc.StepEvent) for e in steps)
    assert events[-1].result.text == lm.generate("Name a colour.", **settings).text
