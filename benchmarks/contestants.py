"""Who takes part: the rows of the table, and the models that they run on.

All sample at temperature 1 from the whole vocabulary, one prompt at a time, with the same weights,
threads and chat template. Peers run on a model of their own, with the attention that transformers
chooses.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from genlm_process import Worker
from tasks import Ask, Task
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import guided_smc
from guided_smc import Result
from guided_smc.models.gguf import converted
from guided_smc.models.int8 import Int8Twin
from guided_smc.models.linears import Int8, replace_linears
from guided_smc.models.loading import LoadedModel, load_pretrained, small_model_status
from guided_smc.models.ngram import NGramModel
from guided_smc.models.transformers import TransformersModel

MODEL = "smollm2-135m"
N_PARTICLES = (1, 4, 8)
BLOCKS: dict[str, tuple[Any, ...]] = {"int8": (4, 8, 12, "auto"), "ngram": (4,)}
"""Block sizes of ours, by draft."""
ASSISTED_BLOCKS = (4, 8)
OWN, DENSE = "own K=0", "dense K=0"
"""What rows without a draft, and without packed linears, are to the others of the same N."""
GENLM_ROUNDS = 3
"""It computes all of an answer again for every token: up to a minute for one answer."""

# Neither library's defaults: the generation config of a model may cut the distribution.
_SAMPLING = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)


@dataclass(frozen=True)
class Answer:
    """One answer."""

    text: str
    tokens: int
    """Of the answer, without the end token."""
    sampled: int
    """Tokens drawn for it: of all particles, end tokens included."""
    details: Mapping[str, float] = field(default_factory=dict)
    """What else there is to tell, of contestants that have it."""
    cpu_seconds_elsewhere: float = 0.0
    """CPU time in another process."""


Contestant = Callable[[Ask], Answer]


# -- models --------------------------------------------------------------------------------------


class Models:
    """Each is loaded when it is first wanted."""

    @cached_property
    def plain(self) -> guided_smc.LM:
        """Ours without a draft."""
        return guided_smc.load(MODEL)

    @cached_property
    def dense(self) -> guided_smc.LM:
        """Ours with torch's own linears, as the peers have them."""
        loaded = load_pretrained(MODEL, dtype="float32", device="cpu")
        vocabulary = self.plain.model.vocabulary
        model = TransformersModel(loaded.model, vocabulary, name=MODEL, pack=False)
        return guided_smc.LM(model, encoder=self.plain.encoder)

    @cached_property
    def int8(self) -> guided_smc.LM:
        """Ours with its own weights quantised as the draft."""
        return self._with_draft(Int8Twin(self.plain.model))

    @cached_property
    def ngram(self) -> guided_smc.LM:
        """Ours with a draft that copies."""
        return self._with_draft(NGramModel(self.plain.model.vocabulary))

    def _with_draft(self, draft: Any) -> guided_smc.LM:
        return guided_smc.LM(self.plain.model, draft=draft, encoder=self.plain.encoder)

    @cached_property
    def float32(self) -> LoadedModel:
        """A plain model of transformers."""
        return load_pretrained(MODEL, dtype="float32", device="cpu")

    @cached_property
    def bfloat16(self) -> LoadedModel:
        """Another, in half the precision."""
        return load_pretrained(MODEL, dtype="bfloat16", device="cpu")

    @cached_property
    def assisted(self) -> tuple[LoadedModel, PreTrainedModel]:
        """The plain model, and the same draft as ours to assist it."""
        return self.float32, assistant(self.float32.model)

    @cached_property
    def genlm(self) -> Worker:
        """Another process, with its own environment.

        Raises:
            WorkerError: It could not load the model.
        """
        gguf = small_model_status().gguf
        assert gguf is not None, "`make model` fetches it"
        worker = Worker()
        worker.ask("load", folder=str(converted(gguf, MODEL, None)))
        return worker


def assistant(target: PreTrainedModel) -> PreTrainedModel:
    """A quantised copy that stands alone, for `generate(assistant_model=...)`.

    Our own twin reads our cache. What both have in common is that the prompt is encoded in float:
    one activation scale for a whole prompt is spoiled by the outliers of its first tokens.
    """
    shared = [*target.parameters(), *target.buffers()]
    twin = copy.deepcopy(target, memo={id(tensor): tensor for tensor in shared})
    replace_linears(twin, Int8)
    quantised = twin.forward

    @functools.wraps(quantised)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # After the prompt it is fed one token a pass, or two where all of a block was accepted.
        prefill = kwargs["input_ids"].shape[1] > 2
        return (target.forward if prefill else quantised)(*args, **kwargs)

    twin.forward = forward
    return twin


def encode(peer: LoadedModel, prompt: str) -> list[int]:
    """The prompt in the model's chat template, as a user of transformers writes it."""
    ids: list[int] = peer.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    return ids


# -- contestants ---------------------------------------------------------------------------------


def ours(lm: guided_smc.LM, task: Task, n_particles: int, block_size: Any = 0) -> Contestant:
    """SMC with `n_particles`; one of them is returned."""

    def run(ask: Ask) -> Answer:
        result = lm.generate(
            ask.prompt,
            output_type=task.schema,
            n_particles=n_particles,
            max_tokens=ask.max_tokens,
            block_size=block_size,
            seed=ask.seed,
        )
        return Answer(
            result.text,
            len(result.token_ids),
            result.usage.particle_tokens,
            {
                "ess_per_particle": ess_per_particle(result),
                "draft_ms_per_pass": _per_pass(result, "draft", result.usage.draft_passes),
                "verify_ms_per_pass": _per_pass(result, "verify", result.usage.target_passes),
                "share_of_masks_weights_resampling": _share(result),
            },
        )

    return run


def transformers_generate(peer: LoadedModel, task: Task, **settings: Any) -> Contestant:
    """`generate` of transformers, with no constraint; free text is forced to full length."""

    def run(ask: Ask) -> Answer:
        torch.manual_seed(ask.seed)
        prompt = encode(peer, ask.prompt)
        ids = torch.tensor([prompt])
        forced = {} if task.schema else {"min_new_tokens": ask.max_tokens}
        out = peer.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ask.max_tokens,
            pad_token_id=peer.tokenizer.eos_token_id,
            **_SAMPLING,
            **forced,
            **settings,
        )
        return _answer(peer, out[0, len(prompt) :])

    return run


def transformers_assisted(
    models: tuple[LoadedModel, PreTrainedModel], task: Task, block_size: int
) -> Contestant:
    """The same with an assistant that drafts: speculative sampling, with the same distribution."""
    peer, draft = models
    generate = transformers_generate(peer, task, assistant_model=draft)

    def run(ask: Ask) -> Answer:
        config = draft.generation_config
        config.num_assistant_tokens = block_size
        # Its defaults end a block early, or make the next one longer.
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        return generate(ask)

    return run


class _Ids(StoppingCriteria):
    """Keeps the token ids, which Outlines does not return; stops nothing."""

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        self.ids = input_ids
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def outlines_generate(peer: LoadedModel, task: Task, backend: str) -> Contestant:
    """Outlines on transformers, its mask compiled here, beforehand."""
    import outlines
    from outlines.types import JsonSchema

    model = outlines.from_transformers(peer.model, peer.tokenizer)
    generator = outlines.Generator(model, JsonSchema(task.schema), backend=backend)

    def run(ask: Ask) -> Answer:
        torch.manual_seed(ask.seed)
        seen = _Ids()
        generator(
            ask.prompt,
            max_new_tokens=ask.max_tokens,
            pad_token_id=peer.tokenizer.eos_token_id,
            stopping_criteria=StoppingCriteriaList([seen]),
            **_SAMPLING,
        )
        prompt = encode(peer, ask.prompt)
        if seen.ids[0, : len(prompt)].tolist() != prompt:
            raise RuntimeError("Outlines encodes the prompt in another way than the others")
        return _answer(peer, seen.ids[0, len(prompt) :])

    return run


def genlm_smc(worker: Worker, task: Task, n_particles: int) -> Contestant:
    """SMC of genlm-control, its constraint compiled here, beforehand."""
    if task.schema is not None:
        worker.ask("constrain", schema=task.schema)

    def run(ask: Ask) -> Answer:
        found = worker.ask(
            "answer",
            prompt=ask.prompt,
            schema=task.schema,
            n_particles=n_particles,
            max_tokens=ask.max_tokens,
            seed=ask.seed,
        )
        return Answer(
            found["text"],
            found["tokens"],
            found["sampled"],
            {"ess_per_particle": found["ess_per_particle"]},
            found["cpu_seconds"],
        )

    return run


def ess_per_particle(result: Result[Any]) -> float:
    """ESS before resampling over the number of particles, mean over steps."""
    return float(np.mean([step.ess / len(step.log_weights) for step in result.steps]))


def _per_pass(result: Result[Any], phase: str, passes: int) -> float:
    return 1e3 * result.usage.seconds.get(phase, 0.0) / max(passes, 1)


def _share(result: Result[Any]) -> float:
    seconds = result.usage.seconds
    light = sum(seconds.get(phase, 0.0) for phase in ("mask", "potentials", "resample"))
    return light / (result.usage.total_seconds - seconds["prefill"])


def _answer(peer: LoadedModel, ids: torch.Tensor) -> Answer:
    text = peer.tokenizer.decode(ids, skip_special_tokens=True)
    ended = int(ids[-1]) in _end_ids(peer)
    return Answer(text, len(ids) - ended, len(ids))


def _end_ids(peer: LoadedModel) -> set[int]:
    ids = peer.model.generation_config.eos_token_id
    return {ids} if isinstance(ids, int) else set(ids)


# -- the table's rows ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    family: str
    """Rows whose peak memory is taken in one process."""
    model: Callable[[Models], Any]
    make: Callable[[Any, Task], Contestant]
    """Called with the model and the task; does what is not timed."""
    free: bool = True
    schemas: bool = True
    compiles: bool = False
    """Whether it compiles the schema when it is made."""
    rounds: int | None = None
    """The first so many only, of who takes long."""
    against: Mapping[str, str] = field(default_factory=dict)
    """Names of other rows by what they are to this one."""

    def does(self, task: Task) -> bool:
        """Whether it takes part in a task."""
        return self.free if task.schema is None else self.schemas


def rows() -> list[Row]:
    """All rows, peers first."""
    return [*_transformers_rows(), *_outlines_rows(), *_genlm_rows(), *_our_rows()]


def _transformers_rows() -> list[Row]:
    # No constraint: what a second dtype and a draft are worth shows in free text.
    found = [
        Row("transformers", "transformers", lambda m: m.float32, transformers_generate),
        Row(
            "transformers bfloat16",
            "transformers bfloat16",
            lambda m: m.bfloat16,
            transformers_generate,
            schemas=False,
        ),
    ]
    for k in ASSISTED_BLOCKS:
        make = functools.partial(transformers_assisted, block_size=k)
        name = f"transformers assisted int8 K={k}"
        found.append(Row(name, "transformers assisted", lambda m: m.assisted, make, schemas=False))
    return found


def _outlines_rows() -> list[Row]:
    # The first is its default for JSON Schema; the second is what masks ours.
    backends = {"outlines": "outlines_core", "outlines/llguidance": "llguidance"}
    return [
        Row(
            name,
            name,
            lambda m: m.float32,
            functools.partial(outlines_generate, backend=backend),
            free=False,
            compiles=True,
        )
        for name, backend in backends.items()
    ]


def _genlm_rows() -> list[Row]:
    return [
        Row(
            f"genlm N={n}",
            "genlm",
            lambda m: m.genlm,
            functools.partial(genlm_smc, n_particles=n),
            free=n == max(N_PARTICLES),
            compiles=True,
            rounds=GENLM_ROUNDS,
        )
        for n in N_PARTICLES
    ]


def _our_rows() -> list[Row]:
    found = []
    for n in N_PARTICLES:
        own, dense = f"ours N={n}", f"ours N={n} dense"
        make = functools.partial(ours, n_particles=n)
        found.append(Row(dense, "ours dense", lambda m: m.dense, make))
        against = {OWN: own, DENSE: dense}
        found.append(Row(own, "ours", lambda m: m.plain, make, against=against))
        for draft, blocks in BLOCKS.items():
            for k in blocks:
                make = functools.partial(ours, n_particles=n, block_size=k)
                name = f"{own} {draft} K={k}"
                model = functools.partial(_draft_of, draft)
                found.append(Row(name, f"ours {draft}", model, make, against=against))
    return found


def _draft_of(draft: str, models: Models) -> guided_smc.LM:
    lm: guided_smc.LM = getattr(models, draft)
    return lm
