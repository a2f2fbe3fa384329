"""What holds for every model, wherever it comes from: what is refused, and in what words.

This is what loading a folder, the hub and the conversion of GGUF share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging as transformers_logging

from guided_smc.errors import ModelError

Notify = Callable[[str], None]

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

WHAT_NAMES = (
    "A model is named by 'smollm2-135m', a local folder, a .gguf file, or a hub id such as "
    "'owner/model'"
)


def require_causal(name: str, config: Any) -> None:
    """Refuse models that do not give the probability of the next token from those before it."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
    )

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{name!r} ({kind}) is an encoder-decoder model; only causal (decoder-only) language "
            "models can be used"
        )
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    decodes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if not has_own_code and (kind not in CAUSAL or (kind in MASKED and not decodes)):
        raise ModelError(
            f"{name!r} ({kind}) is not a causal language model: it cannot give the probability of "
            "the next token. Use a decoder-only model (Llama, Qwen, Gemma, GPT-2, ...)"
        )


def is_safe_weights(file: str) -> bool:
    """Whether a file of a model's own folder holds its weights; an adapter's alone are no model."""
    return file.startswith("model") and file.endswith(".safetensors") and "/" not in file


def pickle_only(name: str) -> str:
    """Why pickled weights are refused."""
    return (
        f"{name!r} has its weights as pickle files only, which can run code when they are loaded. "
        "Use a version with *.safetensors, or pass allow_pickle=True if you trust it"
    )


def first_line(error: BaseException) -> str:
    """What an error of another library adds to a sentence of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back transformers' warnings and progress bars, and restore them after.

    transformers switches the hub's bars together with its own.
    """
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
            if not hub_bars:
                disable_progress_bars()
