"""Converting GGUF, once, to a folder of safetensors in the cache.

transformers reads GGUF slowly, and what comes out is marked as quantised. Each file has an entry in
the cache, a folder that is named after the file's fingerprint. An entry counts only if its marker,
the last file to be written, says that it is complete.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

from guided_smc.errors import ModelError
from guided_smc.models.checks import Notify, first_line, quiet, require_causal

_CACHE_VARIABLE = "GUIDED_SMC_CACHE"
_MARKER = "guided-smc.json"
_READ_WHOLE = 1 << 30  # bytes
_CONVERSION_VERSION = 1
_STALE_AFTER_S = 24 * 3600.0


def cache_folder() -> Path:
    """Where converted models are kept: `$GUIDED_SMC_CACHE`, else the user's cache folder."""
    chosen = os.environ.get(_CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("guided-smc")


def converted(gguf: Path, name: str, notify: Notify | None) -> Path:
    """The folder in the cache that holds `gguf` as safetensors; made if it is not there.

    `name` is what `conversions` will list it by.

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
        _write_marker(unfinished, name)
        _publish(unfinished, entry)
    except OSError as error:
        raise ModelError(
            f"{gguf.name} cannot be converted into {str(entry.parent)!r}: {first_line(error)}. "
            f"Set {_CACHE_VARIABLE} to a folder that can be written and has room"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return entry


def converted_before(gguf: Path) -> Path | None:
    """The folder that `converted` would find; None if it would have to make it."""
    entry = _entry_for(gguf)
    return entry if _read_marker(entry) is not None else None


def conversions() -> list[tuple[str, Path]]:
    """The name and the folder of each converted file, by folder."""
    parent = cache_folder() / "converted"
    if not parent.is_dir():
        return []
    entries = sorted(e for e in parent.iterdir() if e.is_dir() and not e.name.startswith("."))
    markers = [(_read_marker(entry), entry) for entry in entries]
    return [(str(marker["name"]), entry) for marker, entry in markers if marker is not None]


def _entry_for(gguf: Path) -> Path:
    return cache_folder() / "converted" / f"{gguf.stem}-{_fingerprint(gguf)}"


def _fingerprint(gguf: Path) -> str:
    """Tells whether a file is the one that was converted.

    By what it holds, so that the same file in another environment is not converted again; of a
    large one, by its ends and its time.
    """
    stat = gguf.stat()
    digest = hashlib.blake2b(f"{gguf.name}\0{stat.st_size}\0".encode())
    edge = 1 << 20
    with gguf.open("rb") as file:
        if stat.st_size <= _READ_WHOLE:
            while chunk := file.read(edge):
                digest.update(chunk)
        else:
            digest.update(str(stat.st_mtime_ns).encode())
            digest.update(file.read(edge))
            file.seek(max(0, stat.st_size - edge))
            digest.update(file.read(edge))
    return digest.hexdigest()[:16]


def _convert(gguf: Path, target: Path) -> None:
    """Write `gguf` as safetensors, with config and tokenizer.

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
    with quiet(), _without_gguf_bar():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **source)
        except Exception as error:
            raise _gguf_error(gguf, error) from error
        require_causal(str(gguf), config)
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


def _gguf_error(gguf: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{str(gguf)!r} cannot be read: it is corrupt, or transformers does not know its "
        f"architecture ({type(error).__name__}: {first_line(error)})"
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


def _write_marker(folder: Path, name: str) -> None:
    """The last file to be written: what the folder must hold to be complete."""
    marker = {
        "version": _CONVERSION_VERSION,
        "name": name,
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
