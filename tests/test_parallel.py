"""A model split over processes: they draw alike, and as one does. What cannot be, is said."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from tiny_models import tiny_config, tiny_tokenizer

import guided_smc
from guided_smc.cli.main import cli
from guided_smc.errors import ModelError, OptionError
from guided_smc.models import parallel
from guided_smc.models.pages import PageTable
from guided_smc.models.passes import Commit, Pass

PROGRAM = """
import json, sys
import guided_smc

lm = guided_smc.load(sys.argv[1], tp_plan="auto" if sys.argv[2] == "split" else None, draft="ngram")
settings = dict(n_particles=4, max_tokens=10, output_type=guided_smc.regex("[a-z ]{3,9}"))
known = lm.generate(["ab", "hello there"], block_size=2, seed=3, **settings)
session = lm.model.start_session()
session.prefill([[1, 2, 3]], [1])
told = {
    "texts": [[p.text for p in r.particles] for r in known],
    "evidence": [r.log_evidence for r in known],
    "heads": session.cache.stores[0].key_pool.data.shape[0],
}
if sys.argv[2] == "split":
    told["drawn"] = lm.request("ab", **settings).seed
    try:
        lm.request("ab", block_size="auto", **settings)
    except guided_smc.OptionError as error:
        told["refused"] = str(error)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = tiny_config(num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def run(folder, kind: str, rank: int | None, port: int) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if rank is not None:  # as torchrun says it
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), kind],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one device is not two"
)
def test_the_processes_of_a_split_model_draw_alike_and_as_one_does(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [run(folder, "split", rank, port) for rank in (0, 1)] + [run(folder, "", None, 0)]
    told = []
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
        told.append(json.loads(out.splitlines()[-1]))
    first, second, alone = told
    assert first == second
    assert (first["heads"], alone["heads"]) == (1, 2)  # each holds its part of the K/V
    assert first["texts"] == alone["texts"]
    assert first["evidence"] == pytest.approx(alone["evidence"], abs=1e-3)
    assert "give load() the same costs=" in first["refused"]


def test_a_split_needs_several_processes(folder, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ModelError, match=r"torchrun --nproc-per-node=N.*device_map='auto'"):
        guided_smc.load(str(folder), tp_plan="auto")


@pytest.mark.parametrize("other", [{"device": "cpu"}, {"device_map": "auto"}])
def test_a_split_goes_with_no_other_placement(folder, other):
    with pytest.raises(OptionError, match=f"give `tp_plan` or `{next(iter(other))}`, not both"):
        guided_smc.load(str(folder), tp_plan="auto", **other)


def test_a_split_model_has_no_quantised_twin(folder):
    with pytest.raises(OptionError, match="draft='int8' and tp_plan exclude each other"):
        guided_smc.load(str(folder), tp_plan="auto", draft="int8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cpu"], "--device and --tp-plan exclude each other"),
        (["--device-map", "auto"], "--device_map and --tp-plan exclude each other"),
        (["--block-size", "auto", "--draft", "ngram"], "--block-size auto and --tp-plan exclude"),
        (["--resume", "-o", "out.jsonl"], "--resume and --tp-plan exclude each other"),
    ],
)
def test_the_command_says_what_does_not_go_with_a_split(options, said, tmp_path):
    (tmp_path / "prompts.txt").write_text("Hi\n")
    options = [str(tmp_path / o) if o.endswith(".jsonl") else o for o in options]
    command = ["generate", str(tmp_path / "prompts.txt"), "--tp-plan", "auto", *options]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 2
    assert said.replace("_", "-") in result.stderr


def test_the_command_needs_a_file_that_every_process_can_read():
    result = CliRunner().invoke(cli, ["generate", "-", "--tp-plan", "auto"], input="Hi\n")
    assert result.exit_code == 2
    assert "--tp-plan needs a prompt file" in result.stderr


def test_one_process_alone_writes_the_records(folder, tmp_path, monkeypatch):
    # With the plan left out of the loading, so that one process can play another's part.
    load = guided_smc.load
    monkeypatch.setattr(guided_smc, "load", lambda *a, tp_plan, **k: load(*a, **k))
    (tmp_path / "prompts.txt").write_text("Hi\n")
    output = tmp_path / "out.jsonl"
    command = ["generate", str(tmp_path / "prompts.txt"), "--model", str(folder)]
    command += ["--tp-plan", "auto", "--max-tokens", "3", "-o", str(output)]
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(cli, command)
    assert (result.exit_code, result.output) == (0, "")
    assert not output.exists()
    monkeypatch.setenv("RANK", "0")
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert len(output.read_text().splitlines()) == 1


def test_a_pass_goes_to_the_device_of_each_layer():
    elsewhere, here = torch.device("meta"), torch.device("cpu")
    table = PageTable()
    table.add_prompt(3, 2)
    table.extend(np.array([2, 2]))
    table.reorder(np.array([0, 0]))
    extension = table.extend(np.array([1, 2]))
    commit = Commit.of(extension, np.array([1, 2]), 2, here)
    refresh = (torch.arange(2), 0, torch.zeros(2, 3, dtype=torch.int64))
    columns = torch.zeros(2, 2, dtype=torch.int64)
    now = Pass(columns.clone(), table.capacity, columns, 2, None, refresh, commit)
    moved = now.on(elsewhere)
    assert now.on(here) is now
    assert now.on(elsewhere) is moved
    assert commit.chosen is not None and commit.copied is not None
    tensors = [moved.columns, *moved.refresh[::2]]
    tensors += [moved.commit.chosen, moved.commit.slots, moved.commit.copied]
    assert {tensor.device for tensor in tensors} == {elsewhere}


def test_the_first_process_is_the_one_that_speaks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert parallel.is_first()
    monkeypatch.setenv("RANK", "2")
    assert not parallel.is_first()
