"""`guided-smc tune`: the table, what it recommends, and the command as a process."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess

import pytest
from support import VOCABULARY
from test_cli import COMMAND, call, read_terminal
from tiny_models import write_folder

from guided_smc import LM, CostModel, Options, TableModel
from guided_smc.adaptive import DraftEstimate
from guided_smc.tuning import Setting, Table, measure

TARGET = TableModel.random(VOCABULARY, seed=11, eos_probability=0.02)
DRAFT = TableModel.random(VOCABULARY, seed=22, eos_probability=0.02)
COSTS = CostModel(target=((1, 0.1), (100, 0.2)), draft=((1, 0.01),))
OPTIONS = Options(max_tokens=20)


def table(particles=(1, 4), block_sizes=(0, 4, "auto"), costs=COSTS) -> Table:
    return Table.of(costs, OPTIONS, particles, block_sizes)


def setting(n, k, *, rate, share=1.0, variance=None) -> Setting:
    estimates = [] if variance is None else [DraftEstimate(variance)]
    return Setting(n, k, [rate], [share], estimates)


# -- the table -----------------------------------------------------------------------------------


def test_every_setting_is_run_on_every_prompt_in_turn():
    t = table()
    lm = LM(TARGET, draft=DRAFT, costs=COSTS)
    order = list(measure(t, lm, ["ab", "c"], repeats=2, seed=0))
    assert order == list(t.settings) * 4
    for s in t.settings:
        assert len(s.rates) == len(s.ess_shares) == 4
        assert s.rate > 0
        assert 0 < s.ess_share <= 1
        assert s.effective_rate == pytest.approx(s.rate * s.ess_share * s.n_particles)
        assert len(s.estimates) == (0 if s.block_size == 0 else 4)
        assert s.block_size == "auto" or max(s.block_sizes) == s.block_size


def test_rates_are_predicted_from_costs():
    settings = (setting(4, 0, rate=9.0), setting(4, 4, rate=30.0))
    t = Table(COSTS, OPTIONS, settings)
    assert t.predicted_rate(settings[0]) == pytest.approx(1 / COSTS.target_seconds(4))
    assert t.predicted_rate(settings[1]) == pytest.approx(5 / (COSTS.target_seconds(20) + 0.04))
    assert t.predicted_rate(Setting(4, "auto")) is None


def test_the_most_effective_setting_is_recommended_and_not_the_fastest():
    settings = (
        setting(4, 0, rate=10.0),
        setting(4, 4, rate=25.0, share=0.7, variance=0.1),
        setting(4, 12, rate=30.0, share=0.4, variance=0.1),
    )
    assert Table(COSTS, OPTIONS, settings).recommended(4) is settings[1]


def test_one_particle_is_advised_by_its_variance_and_not_by_its_speed():
    def best(variance):
        settings = (
            setting(1, 0, rate=10.0),
            setting(1, 4, rate=40.0, variance=variance),
            setting(1, 12, rate=90.0, variance=variance),
        )
        return Table(COSTS, OPTIONS, settings).recommended(1).block_size

    assert best(0.01) == 12
    assert best(3.0) == 0


def test_nothing_measured_is_nothing_recommended():
    t = table()
    assert t.recommended(4) is None
    assert t.estimate(4) is None
    assert t.auto_choice(4) > 0
    assert table(costs=CostModel(target=((1, 1.0),)), block_sizes=(0,)).auto_choice(4) == 0


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The folder of a tiny model, with a cache of its own beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GUIDED_SMC_CACHE", str(tmp_path / "cache"))
    write_folder(tmp_path / "tiny")
    return tmp_path


SMALL = "--particles 1,2 --block-sizes 0,2,auto --max-tokens 6 --device cpu --dtype float32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tune", "Missing argument 'MODEL'."),
        ("tune m --block-sizes 0,2", "--block-sizes other than 0 need --draft"),
        ("tune m --particles 0,2", "'0' is not a number from 1"),
        ("tune m --particles 2,auto", "'auto' is not a number from 1"),
        ("tune m --draft int8 --block-sizes x", "'x' is not a number from 0 or auto"),
        ("tune m --max-tokens 1", "Invalid value for '--max-tokens'"),
        ("tune m --time-limit 0", "Invalid value for '--time-limit'"),
        ("tune m --schema none.json", "schema file not found: none.json"),
        ("tune m --schema a.json --regex a", "--schema and --regex exclude each other"),
        ("tune m --prompts none.txt", "prompt file not found: none.txt"),
        ("tune m --prompts empty.txt", "empty.txt holds no prompts"),
        ("tune m --prompts bad.jsonl", "bad.jsonl: line 1: not valid JSON"),
        ("tune m --device cpu --device-map auto", "exclude each other"),
        ("tune ./nowhere", "no such file or folder: './nowhere'"),
    ],
)
def test_what_cannot_run_is_told_in_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text("{\n")
    done = call(arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("Error: ") and message in line


def test_a_table_and_advice_for_every_number_of_particles(tiny):
    done = call(f"tune tiny --draft int8 {SMALL}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode()
    for word in ("predicted", "tokens/s", "ESS/N", "effective", "auto", "ms for 1 token"):
        assert word in said
    assert said.count(" *") == 2
    for n in (1, 2):
        assert f"N = {n}: K = " in said
    assert said.count("auto comes to K = ") == 2
    assert b"Measuring what a pass of tiny costs" in done.stderr
    (kept,) = (tiny / "cache" / "costs").iterdir()
    before = json.loads(kept.read_text())
    (tiny / "p.txt").write_text("a\nb\n")
    done = call(f"tune tiny --draft int8 {SMALL} --prompts p.txt --repeats 2 --json --quiet")
    assert (done.returncode, done.stderr) == (0, b"")
    data = json.loads(done.stdout)
    assert [(s["n_particles"], s["block_size"]) for s in data["settings"]] == [
        (n, k) for n in (1, 2) for k in (0, 2, "auto")
    ]
    for s in data["settings"]:
        assert s["runs"] == 4
        assert s["tokens_per_s"] > 0 and 0 < s["ess_share"] <= 1
        assert (s["predicted_tokens_per_s"] is None) == (s["block_size"] == "auto")
    for advice in data["recommended"]:
        assert advice["block_size"] in (0, 2, "auto")
        assert 0 <= advice["auto_block_size"] <= 5
        assert advice["draft_variance"] >= 0
    (kept,) = (tiny / "cache" / "costs").iterdir()
    assert json.loads(kept.read_text()) != before  # measured anew


def test_without_a_draft_the_particles_are_compared(tiny):
    (tiny / "words.lark").write_text('start: "ab" | "abc"')
    (tiny / "p.txt").write_text("a\n")
    done = call(
        "tune tiny --particles 1,3 --prompts p.txt --max-tokens 8 --grammar words.lark "
        "--device cpu --json --quiet"
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [s["block_size"] for s in data["settings"]] == [0, 0]
    assert data["draft"] is None and data["costs"]["draft"] == []


def test_a_time_limit_ends_it_with_what_there_is(tiny):
    done = call(f"tune tiny --draft int8 {SMALL} --time-limit 0.000001")
    assert done.returncode == 0
    assert b"The time limit was reached after 1 of 12 runs." in done.stderr
    assert "N = 2: nothing was measured." in done.stdout.decode()


def test_an_interrupt_prints_what_there_is(tiny):
    terminal, behind = pty.openpty()
    arguments = f"tune tiny --draft int8 {SMALL} --repeats 100000 --time-limit 600"
    process = subprocess.Popen(
        [*COMMAND, *arguments.split()],
        stdout=subprocess.PIPE,
        stderr=behind,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "140"},
    )
    os.close(behind)
    shown = b""
    with os.fdopen(os.dup(terminal), "rb", buffering=0) as file:
        while b"tokens/s" not in shown:
            shown += file.read(4096)
    process.send_signal(signal.SIGINT)
    said = read_terminal(terminal)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted: this is what had been measured." in said
    assert "effective" in out.decode()


def test_generate_chooses_block_sizes_by_what_was_measured(tiny):
    (tiny / "p.txt").write_text("a\nb\n")
    command = (
        "generate p.txt --model tiny --draft int8 --block-size auto --max-tokens 16 --seed 1 "
        "--n-particles 3 --target-ess 2 --device cpu --full"
    )
    first = call(command)
    assert first.returncode == 0, first.stderr
    assert first.stderr.count(b"Measuring what a pass of tiny costs") == 1
    (kept,) = (tiny / "cache" / "costs").iterdir()
    costs = json.loads(kept.read_text())
    kept.write_text(json.dumps({**costs, "target": [[1, 1.0]], "draft": [[1, 0.01]]}))
    runs = [call(command) for _ in range(2)]
    for record, other in zip(*(done.stdout.splitlines() for done in runs), strict=True):
        one, two = json.loads(record), json.loads(other)
        assert max(step["block_size"] for step in one["steps"]) > 0
        assert one["usage"]["draft_variance"] >= 0
        for step in (*one["steps"], *two["steps"]):
            del step["seconds"]
        assert (one["text"], one["steps"]) == (two["text"], two["steps"])
    assert all(b"Measuring" not in done.stderr for done in runs)
