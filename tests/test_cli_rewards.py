"""Rewards on the command line, and `guided-smc sweep`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from test_cli import COMMAND, call, read_terminal

from guided_smc.cli.progress import ScoringColumn
from guided_smc.rewards.scoring import scoring

PLUGIN = """
import time

def has(completions, answer):
    return [float(a in c) for a, c in zip(answer, completions)]

def hangs(text):
    while True:
        pass

def slow(text):
    time.sleep(3)
    return 0.0

def bad(text):
    return "good"

NUMBER = 5
"""

REWARDS = """
beta: 3
schedule: linear
rewards:
  - reward: length
    target: 40
    weight: 0.5
  - reward: plugin:has
    on: step
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "rewards.yaml").write_text(REWARDS)
    (tmp_path / "bad.toml").write_text('rewards = [{reward = "length", taget = 3}]')
    lines = [{"prompt": "Name a colour.", "answer": "re"}, {"prompt": "A tone?", "answer": "o"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate p.jsonl --reward length:0", "target"),
        ("generate p.jsonl --reward lenght:9", "length"),
        ("generate p.jsonl --reward length:9 --beta nan", "--beta must be a finite number"),
        ("generate p.jsonl --reward length:9 --reward-schedule up", "--reward-schedule must be"),
        ("generate p.jsonl --reward length:9 --reward-timeout 0", "--reward-timeout"),
        ("generate p.jsonl --reward length:9 --reward-on word", "--reward-on"),
        ("generate p.jsonl --reward length:9 --rewards rewards.yaml", "exclude each other"),
        ("generate p.jsonl --rewards none.yaml", "none.yaml"),
        ("generate p.jsonl --rewards bad.toml", "taget"),
        ("generate p.jsonl --rewards p.jsonl", ".yaml, .yml or .toml"),
        ("generate p.jsonl --reward plugin:NUMBER", "plugin:NUMBER"),
        ("generate p.jsonl --reward-schedule linear --beta 2", "--beta and --reward-schedule need"),
        ("generate p.jsonl --method importance --islands 2", "--islands: nothing is resampled"),
        ("sweep p.jsonl", "needs --reward or --rewards"),
        ("sweep p.jsonl --reward length:9 --beta 1,x", "'1,x' is not a list of numbers"),
        ("sweep p.jsonl --reward length:9 --beta inf", "beta must be a finite number"),
        ("sweep p.jsonl --reward length:9 -o out.txt", "out.txt must end in .json, .png"),
        ("sweep p.jsonl --reward length:9 -o no/out.png", "no/out.png: there is no such folder"),
        ("sweep p.jsonl --reward length:9 --max-tokens 0", "--max-tokens: Input should be"),
        ("sweep none.jsonl --reward length:9", "prompt file not found: none.jsonl"),
        ("sweep p.jsonl --reward length:9 --stop . --regex a", "--stop does not go with --regex"),
        ("sweep own.jsonl --reward length:9", "own.jsonl, line 1: n_particles is the sweep's own"),
    ],
)
def test_what_cannot_run_is_told_in_one_line_before_a_model_loads(folder, arguments, message):
    (folder / "own.jsonl").write_text('{"prompt": "a", "n_particles": 3}\n')
    done = call(arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert message in line


@pytest.mark.model
def test_a_file_of_rewards_sees_the_columns_and_the_record_tells_what_became_of_them(folder):
    done = call("generate p.jsonl --rewards rewards.yaml --max-tokens 8 --seed 0 --quiet")
    assert done.returncode == 0, done.stderr
    for record in map(json.loads, done.stdout.splitlines()):
        (name,) = record["rewards"]
        assert name == "0.5*length + has"
        length = max(-1.0, -abs(len(record["text"]) - 40) / 40)
        expected = 0.5 * length + (record["answer"] in record["text"])
        assert record["rewards"][name]["chosen"] == pytest.approx(expected)
        assert record["kl"]["value"] > -0.5


@pytest.mark.model
def test_a_reward_that_fails_costs_its_line_and_one_that_hangs_is_stopped(folder):
    done = call("generate p.jsonl --reward plugin:bad --max-tokens 2 --quiet")
    assert done.returncode == 1
    for record in map(json.loads, done.stdout.splitlines()):
        assert "returned 'good' (str), not a number" in record["error"]["message"]
        assert record["error"]["potential"] == "bad"

    done = call("generate p.jsonl --reward plugin:hangs --reward-timeout 0.3 --max-tokens 2")
    assert done.returncode == 1
    for record in map(json.loads, done.stdout.splitlines()):
        assert "'hangs' took longer than timeout=0.3 seconds" in record["error"]["message"]


@pytest.mark.model
def test_on_a_terminal_a_slow_reward_is_named_while_it_scores(folder):
    terminal, behind = pty.openpty()
    process = subprocess.Popen(
        [
            *COMMAND,
            *[
                "generate",
                "p.jsonl",
                "--reward",
                "plugin:slow",
                "--n-particles",
                "1",
                "--max-tokens",
                "2",
                "-o",
                "o",
            ],
        ],
        stderr=behind,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160"},
    )
    os.close(behind)
    said = read_terminal(terminal)
    assert process.wait(timeout=300) == 0, said
    assert "slow has been scoring for 2 s" in said


def test_a_reward_is_named_only_once_it_takes_long(monkeypatch):
    column = ScoringColumn()
    with Progress(column, console=Console(quiet=True)) as progress:
        progress.add_task("")
        (task,) = progress.tasks
        assert str(column.render(task)) == ""
        with scoring("taste", 4):
            assert str(column.render(task)) == ""
            monkeypatch.setattr("guided_smc.cli.progress._PATIENCE_S", 0.0)
            assert str(column.render(task)) == "taste has been scoring for 0 s"


@pytest.mark.model
def test_a_prompt_that_fails_does_not_take_the_sweep_with_it(folder):
    (folder / "two.jsonl").write_text('{"prompt": "a", "answer": "x"}\n{"prompt": "b"}\n')
    settings = "--max-tokens 2 --n-particles 2 --beta 1 -o f.json --quiet"
    done = call(f"sweep two.jsonl --reward plugin:has {settings}")
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert "2 run(s) failed" in line and "needs 'answer'" in line
    assert b"best of N" in done.stdout
    points = json.loads((folder / "f.json").read_text())["points"]
    assert {p["prompts"] for p in points} == {1}


@pytest.mark.model
def test_a_sweep_prints_the_frontier_and_writes_its_files(folder):
    settings = "--max-tokens 6 --n-particles 4 --seed 0 --beta 0,4"
    done = call(f"sweep p.jsonl --reward length:20 {settings} -o f.svg -o f.json --quiet")
    assert done.returncode == 0, done.stderr
    table = done.stdout.decode()
    assert "reward length" in table and "best of N" in table and "soft" in table
    assert all(len(line) <= 80 for line in table.splitlines() if line[:1] in "┃│")
    data = json.loads((folder / "f.json").read_text())
    assert data["reward"] == "length" and data["betas"] == [0.0, 4.0]
    smc = {p["beta"]: p for p in data["points"] if p["method"] == "smc"}
    assert smc[0.0]["kl"]["value"] == pytest.approx(0, abs=1e-6)
    assert smc[4.0]["kl"]["value"] > 0
    assert (folder / "f.svg").read_text().count("<svg") == 1

    again = call(f"sweep p.jsonl --reward length:20 {settings} --json --quiet")
    assert json.loads(again.stdout) == data
