"""What the benchmarks run: the tasks, and who does them.

All sample at temperature 1 from the whole vocabulary, one prompt at a time, with the same weights,
dtype, threads and chat template. Peers run on a model of their own, with the attention that
transformers chooses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import StoppingCriteria, StoppingCriteriaList

import guided_smc
from guided_smc.models.loading import LoadedModel, load_pretrained

MODEL = "smollm2-135m"
N_PARTICLES = (1, 4, 8)

# Neither library's defaults: the generation config of a model may cut the distribution.
_SAMPLING = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)


class Person(BaseModel):
    """A small flat object whose every field is bounded."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=20)
    age: int = Field(ge=0, le=120)
    city: Literal["Cairo", "Lima", "Paris", "Rome"]


SCHEMA = Person.model_json_schema()


@dataclass(frozen=True)
class Task:
    """What is asked for: prompts, one a round, and the type of the answer (None is free text)."""

    prompts: tuple[str, ...]
    output_type: type[BaseModel] | None


TASKS = {
    "free": Task(
        (
            "Tell me a long story about a lighthouse keeper and a storm.",
            "Explain in detail how bread is made, from the field to the table.",
            "Describe a walk through a big city at night, street by street.",
            "Write a long letter to a friend about a journey by train.",
            "Explain in detail how the seasons come about.",
        ),
        None,
    ),
    "schema": Task(
        (
            "Invent a person who likes music. Answer in JSON with name, age and city.",
            "Invent a retired teacher. Answer in JSON with name, age and city.",
            "Invent a young doctor. Answer in JSON with name, age and city.",
            "Invent a person who sails. Answer in JSON with name, age and city.",
            "Invent a painter. Answer in JSON with name, age and city.",
        ),
        Person,
    ),
}


@dataclass(frozen=True)
class Answer:
    """One answer."""

    text: str
    tokens: int
    """Of the answer, without the end token."""
    sampled: int
    """Tokens drawn for it: of all particles, end tokens included."""

    @property
    def valid(self) -> bool:
        """Whether it is JSON that the schema accepts."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return False
        return jsonschema.Draft202012Validator(SCHEMA).is_valid(value)


Contestant = Callable[[int], Answer]
"""Answers the prompt of a round."""


class _Ids(StoppingCriteria):
    """Keeps the token ids, which Outlines does not return; stops nothing."""

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        self.ids = input_ids
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def load_both() -> tuple[guided_smc.LM, LoadedModel]:
    """Ours, and a plain model of transformers with the same weights."""
    lm = guided_smc.load(MODEL)
    peer = load_pretrained(MODEL, dtype=lm.model.dtype, device=lm.model.device)
    return lm, peer


def ours(lm: guided_smc.LM, task: Task, n_particles: int, max_tokens: int) -> Contestant:
    """Plain SMC steering (K = 0) with `n_particles`."""

    def run(round_: int) -> Answer:
        result = lm.generate(
            task.prompts[round_ % len(task.prompts)],
            output_type=task.output_type,
            n_particles=n_particles,
            max_tokens=max_tokens,
            block_size=0,
            seed=round_,
        )
        return Answer(result.text, len(result.token_ids), result.usage.particle_tokens)

    return run


def transformers_generate(
    peer: LoadedModel, lm: guided_smc.LM, task: Task, max_tokens: int
) -> Contestant:
    """`generate` of transformers, with no constraint; free text is forced to full length."""
    forced = dict(min_new_tokens=max_tokens) if task.output_type is None else {}

    def run(round_: int) -> Answer:
        torch.manual_seed(round_)
        # What ours does in its own call, so it is done here and not before.
        prompt = lm.encoder.encode(task.prompts[round_ % len(task.prompts)])
        ids = torch.tensor([prompt], device=peer.model.device)
        out = peer.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            pad_token_id=peer.tokenizer.eos_token_id,
            **_SAMPLING,
            **forced,
        )
        return _answer(peer, out[0, len(prompt) :])

    return run


def outlines_generate(
    peer: LoadedModel, lm: guided_smc.LM, task: Task, max_tokens: int, backend: str
) -> Contestant:
    """Outlines on transformers, its mask compiled here, beforehand."""
    import outlines

    model = outlines.from_transformers(peer.model, peer.tokenizer)
    generator = outlines.Generator(model, task.output_type, backend=backend)
    encoded = [lm.encoder.encode(prompt) for prompt in task.prompts]

    def run(round_: int) -> Answer:
        torch.manual_seed(round_)
        seen = _Ids()
        generator(
            task.prompts[round_ % len(task.prompts)],
            max_new_tokens=max_tokens,
            pad_token_id=peer.tokenizer.eos_token_id,
            stopping_criteria=StoppingCriteriaList([seen]),
            **_SAMPLING,
        )
        prompt = encoded[round_ % len(encoded)]
        if seen.ids[0, : len(prompt)].tolist() != prompt:
            raise RuntimeError("Outlines encodes the prompt in another way than ours")
        return _answer(peer, seen.ids[0, len(prompt) :])

    return run


def _answer(peer: LoadedModel, ids: torch.Tensor) -> Answer:
    text = peer.tokenizer.decode(ids, skip_special_tokens=True)
    ended = int(ids[-1]) in _end_ids(peer)
    return Answer(text, len(ids) - ended, len(ids))


def _end_ids(peer: LoadedModel) -> set[int]:
    ids = peer.model.generation_config.eos_token_id
    return {ids} if isinstance(ids, int) else set(ids)
