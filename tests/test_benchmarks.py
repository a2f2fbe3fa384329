"""The benchmarks run, and their numbers agree with each other. No test of time."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def harness():
    spec = importlib.util.spec_from_file_location("harness", BENCHMARKS / "harness.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["harness"]


def run_quick(script: str, out: Path) -> dict:
    # One thread: with more, two tests on a busy machine wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--quick", "--out", out],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    results = json.loads(text)
    assert {"cpu", "cores", "threads", "memory_gib", "os", "versions"} <= set(results["machine"])
    assert results["machine"]["cpu"] in " ".join(done.stdout.split())
    assert str(BENCHMARKS.parent) not in text
    assert platform.node() not in results["machine"].values()
    return results


def test_contestants_take_turns_and_do_the_same_round(harness):
    calls = []
    contestants = {
        name: lambda round_, name=name: calls.append((name, round_)) or name for name in "ABC"
    }
    ticks = count()
    laps = harness.interleave(contestants, repeats=2, warm_ups=1, clock=lambda: float(next(ticks)))
    one_round = ["A", "B", "C"]
    assert [name for name, _ in calls] == one_round * 3
    assert [round_ for _, round_ in calls] == [0] * 3 + [0] * 3 + [1] * 3
    assert {name: [lap.outcome for lap in each] for name, each in laps.items()} == {
        name: [name] * 2 for name in "ABC"
    }
    assert all(lap.seconds == 1.0 for each in laps.values() for lap in each)
    assert next(ticks) == 12  # the warm-up was not timed


def test_a_ratio_is_that_of_the_medians_and_spreads_over_rounds(harness):
    assert harness.spread([3.0, 1.0, 8.0, 5.0]) == {"median": 4.0, "low": 1.0, "high": 8.0}
    found = harness.ratio([2.0, 6.0, 10.0], [1.0, 4.0, 2.0])
    assert found == {"ratio": 3.0, "low": 1.5, "high": 5.0}


@pytest.mark.model
def test_throughput_numbers_agree(tmp_path):
    results = run_quick("throughput.py", tmp_path / "new" / "throughput.json")
    ours = {"ours N=1", "ours N=4", "ours N=8"}
    assert set(results["tasks"]["free"]) == {"transformers"} | ours
    outlines = {"outlines", "outlines/llguidance"}
    assert set(results["tasks"]["schema"]) == {"transformers"} | outlines | ours
    assert set(results["compile_seconds"]) == outlines
    for task, rows in results["tasks"].items():
        for name, row in rows.items():
            (lap,) = row["laps"]
            rate = row["returned_tokens_per_s"]["median"]
            assert rate == pytest.approx(lap["tokens"] / lap["seconds"])
            assert row["particle_tokens_per_s"]["median"] >= rate
            assert 0 < lap["tokens"] <= results["settings"]["max_tokens"]
            assert row["answers"] == 1
            assert row["valid"] is None if task == "free" else 0 <= row["valid"] <= row["answers"]
            for peer, found in row["ratio_to"].items():
                reference = rows[peer]["returned_tokens_per_s"]["median"]
                assert found["ratio"] == pytest.approx(rate / reference)
                assert peer != name or found["ratio"] == 1.0


@pytest.mark.model
def test_profile_accounts_for_all_of_the_time(tmp_path):
    results = run_quick("profile_step.py", tmp_path / "profile.json")
    cases = results["cases"]
    assert set(cases) == {"free transformers"} | {
        f"{task} N={n}" for task in ("free", "schema") for n in (1, 4, 8)
    }
    for name, case in cases.items():
        per_step = case["ms_per_step"]
        assert per_step["in the model"] + per_step["beyond it"] == pytest.approx(
            per_step["all but prefill"]
        )
        assert all(x > 0 for x in per_step.values())
        if name != "free transformers":
            phases = case["phase_seconds"]
            total = sum(phases.values()) + case["outside_seconds"]
            assert total == pytest.approx(case["wall_seconds"])
            # The passes are part of the phases that they are booked to.
            assert case["pass_seconds"]["decode pass"] < phases["verify"]
            assert case["pass_seconds"]["prefill pass"] < phases["prefill"]
            assert phases["draft"] == 0.0
    assert set(results["operators"]) == {"transformers", "ours N=1", "ours N=8"}
    for found in results["operators"].values():
        shares = [row["share"] for row in found["top"]]
        assert len(shares) == 10 and shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1.0
        for row in found["top"]:
            assert row["ms_per_step"] == pytest.approx(
                row["share"] * found["operators_ms_per_step"]
            )
        regions = found["regions_ms_per_step"].values()
        assert sum(sum(parts.values()) for parts in regions) == pytest.approx(
            found["wall_ms_per_step"], rel=0.05
        )


@pytest.mark.model
def test_draft_numbers_agree(tmp_path):
    results = run_quick("drafts.py", tmp_path / "drafts.json")
    for rows in results["tasks"].values():
        assert set(rows) == {f"N={n}{d}" for n in (1, 4) for d in ("", " int8 K=4", " ngram K=4")}
        for name, row in rows.items():
            reference = rows[name.partition(" ")[0]]["returned_tokens_per_s"]["median"]
            found = row["ratio_to_no_draft"]["ratio"]
            assert found == pytest.approx(row["returned_tokens_per_s"]["median"] / reference)
            assert 0 <= row["ess_per_particle"]["median"] <= 1 + 1e-9
            assert (row["draft_ms_per_pass"]["median"] > 0) == ("K=" in name)
            assert 0 < row["share_of_grammar_weights_resampling"]["median"] < 1
