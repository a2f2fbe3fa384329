"""Bringing a model of the Hugging Face hub to this machine.

The hub is asked once what a repository holds, so that an unknown name, missing rights or pickled
weights are known before anything is fetched; then only the files that are needed are fetched, into
the hub's own cache. Without the network, what that cache holds is used.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from guided_smc.errors import ModelError
from guided_smc.models.checks import (
    PICKLE_SUFFIXES,
    WHAT_NAMES,
    Notify,
    first_line,
    is_safe_weights,
    pickle_only,
)

_HUB_TIMEOUT_S = 10.0
_HUB_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


def download(
    name: str, *, trust_remote_code: bool, allow_pickle: bool, notify: Notify | None
) -> Path:
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
            f"name; for a private model log in with `hf auth login`. {WHAT_NAMES}"
        ) from error
    except Exception as error:
        # No network, a proxy, a time-out, offline mode: each HTTP library has its own errors.
        return _downloaded_before(name, error)

    files = [s.rfilename for s in info.siblings or []]
    patterns = [*_HUB_PATTERNS, *_weight_patterns(name, files, allow_pickle=allow_pickle)]
    if trust_remote_code:
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
            f"{name!r} could not be downloaded from the hub: {first_line(error)}. Try again; "
            "what has arrived is kept"
        ) from error
    return Path(folder)


def downloaded_models() -> list[huggingface_hub.CachedRepoInfo]:
    """The models in the hub's cache, by name."""
    cache = Path(hub_constants.HF_HUB_CACHE)
    if not cache.is_dir():
        return []
    repositories = huggingface_hub.scan_cache_dir(cache).repos
    return sorted((r for r in repositories if r.repo_type == "model"), key=lambda r: r.repo_id)


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
        reason = f"the hub answered {error.response.status_code}: {first_line(error)}"
    else:
        reason = f"the hub could not be reached ({type(error).__name__}: {first_line(error)})"
    raise ModelError(
        f"{name!r} is not a file or folder here, it was not downloaded before, and {reason}. "
        f"Check the name and the network. {WHAT_NAMES}"
    ) from error


def _cached_config(name: str) -> Path | None:
    found = huggingface_hub.try_to_load_from_cache(
        name, "config.json", cache_dir=hub_constants.HF_HUB_CACHE
    )
    return Path(found) if isinstance(found, str) else None


def _weight_patterns(name: str, files: list[str], *, allow_pickle: bool) -> list[str]:
    """Which weight files to fetch; none but the model's own (repositories hold copies)."""
    if any(is_safe_weights(f) for f in files):
        # Some repositories hold the same weights twice, as `consolidated`, or in subfolders.
        return ["model*.safetensors"]
    if any("/" not in f and f.endswith(PICKLE_SUFFIXES) for f in files):
        if not allow_pickle:
            raise ModelError(pickle_only(name))
        return ["pytorch_model*.bin"]
    if any(f.lower().endswith(".gguf") for f in files):
        raise ModelError(
            f"the hub repository {name!r} holds GGUF files only: download one of them and give "
            "its path"
        )
    raise ModelError(f"the hub repository {name!r} holds no model (no model*.safetensors)")
