"""Converting GGUF once, exactly, and safely among other processes."""

from __future__ import annotations

import os
import shutil
import time

import pytest
import torch
import transformers
from tiny_models import write_gguf

from guided_smc.errors import ModelError
from guided_smc.models import gguf
from guided_smc.models.loading import cached_models, load_pretrained

pytestmark = pytest.mark.usefixtures("own_caches")


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


def test_the_same_file_in_another_place_and_time_is_not_converted_again(tmp_path, no_hub):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    load_pretrained(path, device="cpu")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copied = shutil.copyfile(path, elsewhere / "tiny.gguf")
    os.utime(copied, (1, 1))
    told = []
    load_pretrained(copied, device="cpu", notify=told.append)
    assert told == []


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
        patch.setattr(gguf, "_write_marker", killed)
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
    convert = gguf._convert

    def slower_than_another_process(source, target):
        convert(source, target)
        monkeypatch.setattr(gguf, "_convert", convert)
        load_pretrained(path, device="cpu")
        entry = gguf._entry_for(path)
        (entry / "first").touch()

    monkeypatch.setattr(gguf, "_convert", slower_than_another_process)
    load_pretrained(path, device="cpu")
    assert (gguf._entry_for(path) / "first").exists()
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
