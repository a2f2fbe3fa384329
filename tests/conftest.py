from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

LONGEST = (
    *("exact", "benchmarks", "examples", "cli", "tilts", "readme", "real_model", "viewer"),
    *("rejection", "server_process", "cli_rewards", "exact_transformers", "rewards_doc"),
)
"""Files that take a minute or more, the longest first: a long one that comes last runs alone."""


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session")
def lm():
    """The small real model."""
    import guided_smc

    return guided_smc.load("smollm2-135m")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny Llama with its tokenizer, in bfloat16."""
    from tiny_models import write_folder

    path = tmp_path / "tiny"
    write_folder(path)
    return path


@pytest.fixture
def own_caches(request, tmp_path, monkeypatch):
    """Caches of the test's own, and a hub that nobody answers for."""
    if "model" in request.keywords:
        return
    import huggingface_hub

    monkeypatch.setenv("GUIDED_SMC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def no_hub(monkeypatch):
    """Fails the test if the hub is asked."""
    import huggingface_hub

    def asked(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", asked)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)


@pytest.fixture(scope="module")
def load():
    """Imports a file of the benchmarks; they find each other as scripts do."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def needs_triton() -> None:
    from guided_smc.kernels.dispatch import has_triton

    if not has_triton():
        pytest.skip("Triton has no release for this machine")


@pytest.fixture(scope="session")
def interpreted():
    """`interpreted(function, *args)` runs kernels on CPU tensors in Triton's interpreter."""
    needs_triton()
    from elsewhere import interpreting

    yield from interpreting()


@pytest.fixture(scope="module")
def compiled():
    """`compiled(kernels_compiled, capability, launch, *args)`: see `elsewhere`."""
    needs_triton()
    from elsewhere import compiling

    yield from compiling()
