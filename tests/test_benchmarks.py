"""The benchmarks run, and their numbers agree with each other. No test of time."""

from __future__ import annotations

import json
import platform
from itertools import count
from pathlib import Path

import pytest
from starting import run_script

import guided_smc
from guided_smc.device_passes import FIXED

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def harness(load):
    return load("harness")


def run_quick(script: str, out: Path, *more: str) -> dict:
    done = run_script(BENCHMARKS / script, ["--quick", "--out", out, *more], timeout=300)
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    results = json.loads(text)
    assert {"cpu", "cores", "threads", "memory_gib", "os", "versions"} <= set(results["machine"])
    assert results["machine"]["cpu"] in " ".join(done.stdout.split())
    assert str(BENCHMARKS.parent) not in text
    assert platform.node() not in results["machine"].values()
    return results, done.stdout


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


def test_who_takes_long_takes_part_in_the_first_rounds(harness):
    laps = harness.interleave(
        {"A": lambda round_: round_, "B": lambda round_: round_},
        repeats=3,
        warm_ups=0,
        at_most={"B": 2},
    )
    assert [lap.outcome for lap in laps["A"]] == [0, 1, 2]
    assert [lap.outcome for lap in laps["B"]] == [0, 1]


def test_a_ratio_is_that_of_the_medians_and_spreads_over_rounds(harness):
    assert harness.spread([3.0, 1.0, 8.0, 5.0]) == {"median": 4.0, "low": 1.0, "high": 8.0}
    found = harness.ratio([2.0, 6.0, 10.0], [1.0, 4.0, 2.0])
    assert found == {"ratio": 3.0, "low": 1.5, "high": 5.0}
    assert harness.ratio([2.0, 6.0, 10.0], [1.0]) == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    found = harness.ratio([2.0, 6.0, 10.0], [1.0, 0.0, 2.0])
    assert found == {"ratio": 6.0, "low": 2.0, "high": 5.0}


def test_every_task_says_what_it_accepts(load):
    tasks = load("tasks").TASKS
    for name in ("person", "friends", "mood"):
        guided_smc.json_schema(tasks[name].schema)  # every keyword can be enforced
    assert tasks["person"].accepts('{"name": "Ada", "age": 36, "city": "Rome"}')
    assert not tasks["person"].accepts('{"name": "Ada", "age": 136, "city": "Rome"}')
    assert tasks["friends"].accepts('{"friends": [{"name": "Ada", "years": 3}]}')
    assert not tasks["friends"].accepts('{"friends": []}')
    assert tasks["mood"].accepts('"in love"')
    assert not tasks["mood"].accepts("in love")
    first, again = tasks["free"].ask(0), tasks["free"].ask(len(tasks["free"].prompts), 8)
    assert first.prompt == again.prompt
    assert (again.max_tokens, again.seed) == (8, len(tasks["free"].prompts))


@pytest.mark.model
def test_throughput_numbers_agree(tmp_path):
    results, said = run_quick("throughput.py", tmp_path / "new" / "throughput.json")
    ours = {f"ours N={n}{d}" for n in (1, 4) for d in ("", " int8 K=4")}
    ours |= {"ours N=1 ngram K=4", "ours N=1 dense"}
    unconstrained = {"transformers bfloat16", "transformers assisted int8 K=4"}
    outlines = {"outlines", "outlines/llguidance"}
    assert set(results["tasks"]) == {"free", "person"}
    assert set(results["tasks"]["free"]) == {"transformers"} | unconstrained | ours
    assert set(results["tasks"]["person"]) == {"transformers"} | outlines | ours
    assert results["compile_seconds"]["free"] == {}
    assert set(results["compile_seconds"]["person"]) == outlines
    assert results["genlm"] == "it was not asked for"
    assert "genlm-control was left out: it was not asked for" in said
    assert set(results["peak_memory_mib"]) == {"ours N=1", "ours N=4"}
    assert 0 < results["peak_memory_mib"]["ours N=1"] <= results["peak_memory_mib"]["ours N=4"]
    for task, rows in results["tasks"].items():
        for name, row in rows.items():
            (lap,) = row["laps"]
            rate = row["returned_tokens_per_s"]["median"]
            assert rate == pytest.approx(lap["tokens"] / lap["seconds"])
            assert row["particle_tokens_per_s"]["median"] >= rate
            assert 0 < lap["tokens"] <= results["settings"]["max_tokens"][task]
            assert row["answers"] == 1
            assert row["valid"] is None if task == "free" else 0 <= row["valid"] <= row["answers"]
            references = {other: other for other in ("transformers", "outlines") if other in rows}
            if name in ours:
                dense = name.endswith("dense")
                if not dense:
                    references["own K=0"] = " ".join(name.split()[:2])
                if not dense and "N=1" in name:
                    references["dense K=0"] = "ours N=1 dense"
                assert 0 <= row["ess_per_particle"]["median"] <= 1 + 1e-9
                assert (row["draft_ms_per_pass"]["median"] > 0) == ("K=" in name)
                assert 0 < row["share_of_masks_weights_resampling"]["median"] < 1
            assert set(row["ratio_to"]) == set(references)
            for label, other in references.items():
                reference = rows[other]["returned_tokens_per_s"]["median"]
                assert row["ratio_to"][label]["ratio"] == pytest.approx(rate / reference)
                assert other != name or row["ratio_to"][label]["ratio"] == 1.0
            assert row["particle_ratio_to"] == {}


@pytest.mark.model
def test_attention_is_timed_in_three_ways(tmp_path):
    results, _ = run_quick("attention.py", tmp_path / "attention.json")
    (case,) = results["cases"].values()
    assert set(case) == {"windows", "gathered", "in place"}
    assert all(found["ms"]["median"] > 0 for found in case.values())
    assert case["in place"]["kv_mib"] < case["windows"]["kv_mib"] == case["gathered"]["kv_mib"]


@pytest.mark.model
def test_quality_numbers_agree(tmp_path):
    results, _ = run_quick("quality.py", tmp_path / "quality.json")
    exact = results["exact"]
    assert sum(exact["probabilities"].values()) == pytest.approx(1)
    assert set(exact["probabilities"]) == {'"cat"', '"dog"', '"catfish"', '"dogfish"'}
    assert exact["log_evidence"] < 0
    assert 0 <= exact["missed"] < 1e-3
    assert set(results["tasks"]) == {"free", "person", "enum"}
    for task, cells in results["tasks"].items():
        assert set(cells) == {"N=4 K=0", "N=4 K=4"}
        none = cells["N=4 K=0"]
        for cell in cells.values():
            assert cell["runs"] == results["settings"]["runs" if task == "enum" else "texts"]
            assert 0 <= cell["died"] <= cell["runs"]
            assert 0 < cell["ess_per_particle"] <= 1 + 1e-9
            assert ("gap_to_exact" in cell) == (task != "person")
            if cell["log_evidence"] and none["log_evidence"]:
                gap = cell["log_evidence"]["mean"] - none["log_evidence"]["mean"]
                assert cell["gap_to_no_draft"]["mean"] == pytest.approx(gap)
    assert results["tasks"]["free"]["N=4 K=0"]["gap_to_exact"] == {"mean": 0.0, "error": 0.0}
    for cell in results["tasks"]["enum"].values():
        assert sum(cell["answers"].values()) == cell["runs"] - cell["died"]
        assert set(cell["answers"]) <= set(exact["probabilities"])
        assert 0 <= cell["tv_to_exact"] <= 1
        assert cell["kl_to_exact"] >= 0
    assert results["tasks"]["enum"]["N=4 K=0"]["tv_to_no_draft"] == 0
    for each in results["floor"].values():
        assert 0 < each["mean"] < each["95%"]


@pytest.mark.model
def test_finishing_in_time_returns_what_the_cap_would_lose(tmp_path):
    results, said = run_quick("finishing.py", tmp_path / "finishing.json")
    assert "answers within the cap" in said
    for cell in results["cells"].values():
        assert cell["with"]["returned"] == cell["with"]["answers"]
        assert cell["with"]["returned"] >= cell["without"]["returned"]
        assert cell["with"]["particles_lost"] == 0


@pytest.mark.model
def test_tilts_are_compared_at_a_kl_and_on_the_prompts_of_best_of_n(tmp_path):
    results, said = run_quick(
        "tilting.py", tmp_path / "t.json", "--only", "age", "--plots", tmp_path
    )
    assert "mean reward at equal target tokens" in said
    (cell,) = results["tasks"].values()
    assert cell["within"] == (cell["kl"]["value"] <= cell["kl_best_of_n"])
    assert cell["above_best_of_n"]["mean"] == pytest.approx(cell["smc"] - cell["best_of_n"])
    assert cell["best_of_n"] >= cell["soft_best_of_n"] >= cell["untilted"]
    assert (tmp_path / "frontier-age.svg").read_text().count("<svg") == 1


@pytest.mark.model
def test_distortion_numbers_agree(tmp_path):
    results, said = run_quick("distortion.py", tmp_path / "distortion.json")
    cases = results["cases"]
    assert len(cases) == 5 and "shared beginnings" in said
    for case in cases.values():
        exact, masking = case["probabilities"], case["masking"]
        for probabilities in (exact, masking["probabilities"]):
            assert sum(probabilities.values()) == pytest.approx(1)
        assert set(masking["probabilities"]) <= set(exact)
        assert 0 <= case["missed"] < 1e-3 and -1e-9 < masking["missed"] < 0.05
        assert 0 < masking["tv"] <= 1
        for cell in case["ours"].values():
            assert sum(cell["probabilities"].values()) == pytest.approx(1)
            assert cell["smaller"] == pytest.approx(masking["kl"] / cell["kl"])
            assert cell["floor"] > 0 and cell["died"] <= cell["runs"]


@pytest.mark.model
def test_enumeration_agrees_with_many_particles(load, lm):
    from guided_smc.models.loading import load_pretrained

    colours = ["red", "green", "blue", "yellow", "black"]
    question = f"Colors: {json.dumps(colours)}. Pick one at random. Answer:"
    prompt = lm.encoder.encode(question, chat=False)
    schema = {"enum": colours}
    peer = load_pretrained("smollm2-135m", dtype="float32")
    exact = load("exact").enumerate_posterior(lm, peer, prompt, schema, max_tokens=8)
    runs = lm.generate(
        [question] * 8, chat=False, output_type=schema, n_particles=32, max_tokens=8, seed=0
    )
    for run in runs:
        assert run.log_evidence == pytest.approx(exact.log_evidence, abs=0.2)
    shares = [{value.text: value.weight for value in run.values} for run in runs]
    for text, probability in exact.probabilities.items():
        found = sum(each.get(text, 0.0) for each in shares) / len(runs)
        assert found == pytest.approx(probability, abs=0.15)


@pytest.mark.model
def test_the_worker_of_genlm_control_answers_line_by_line(load, lm):
    genlm = load("genlm_process")
    if not genlm.installed():
        pytest.skip("genlm-control's environment is not there: `make bench` makes it")
    schema = {"enum": ["yes", "no"]}
    prompt = "Is a tomato a fruit? Answer with a JSON string."
    worker = load("contestants").Models().genlm
    try:
        assert "genlm-control" in worker.versions
        assert worker.ask("encode", prompt=prompt)["ids"] == lm.encoder.encode(prompt)
        with pytest.raises(genlm.WorkerError, match="KeyError"):
            worker.ask("sing")
        worker.ask("constrain", schema=schema)
        asked = dict(prompt=prompt, n_particles=2, max_tokens=8, seed=1)
        answer = worker.ask("answer", schema=schema, **asked)
        assert answer["text"] in ('"yes"', '"no"')
        assert 0 < answer["tokens"] < answer["sampled"]
        assert 0 < answer["ess_per_particle"] <= 1 + 1e-9
        again = worker.ask("answer", schema=schema, **asked)
        assert again | {"cpu_seconds": 0} == answer | {"cpu_seconds": 0}
        assert worker.ask("answer", schema=None, **asked)["tokens"] <= 8
        assert worker.ask("peak")["bytes"] > 2**28
    finally:
        worker.close()


@pytest.mark.model
def test_profile_accounts_for_all_of_the_time(tmp_path):
    results, _ = run_quick("profile_step.py", tmp_path / "profile.json")
    cases = results["cases"]
    assert set(cases) == {"free transformers"} | {
        f"{task} N={n}" for task in ("free", "person") for n in (1, 4, 8)
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


def test_the_gpu_script_runs_every_line_of_it_that_a_cpu_can_run(tmp_path):
    results, _ = run_quick("gpu.py", tmp_path / "gpu.json")
    cases = results["cases"]
    kinds = ("", " schema", " regex", " device", " host")
    assert set(cases) == {"N=1 K=0", "N=2 K=0", *(f"N=2 K=2{kind}" for kind in kinds)}
    for name, case in cases.items():
        where = "device" if "device" in name else FIXED
        assert set(case["steps_on"]) == (set() if "host" in name else {where})
        assert case["seconds_per_step"]["low"] > 0
        k = int(name.split("K=")[1].split()[0])
        assert case["tokens_per_s"] == pytest.approx((k + 1) / case["seconds_per_step"]["median"])
        assert 0 < case["share_of_roofline"] < 1
        assert (case["draft_variance"] is None) == (k == 0)
        assert (case["steps_ahead"] > 0) == (where == FIXED and "host" not in name)
        assert case["steps_in_vain"] == 0
        assert k == 0 or 0 < case["draft_variance"] < 1
    assert cases["N=2 K=2 regex"]["of_free"] == pytest.approx(
        cases["N=2 K=2 regex"]["tokens_per_s"] / cases["N=2 K=2"]["tokens_per_s"]
    )
    assert len(results["kernels"]) == 8
    for kernel in results["kernels"].values():
        assert kernel["share_of_integers_that_differ"] == kernel["largest_difference"] == 0
        assert 0 < kernel["floor_seconds"] < kernel["seconds"]
    assert set(results["peers"]) == {"transformers N=1"}
    assert results["left_out"] == []
    assert "There is no card" in results["without_a_card"]


def test_the_gpu_script_says_when_there_is_no_card(tmp_path):
    out = tmp_path / "gpu.json"
    done = run_script(BENCHMARKS / "gpu.py", ["--out", out], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "there is no CUDA card here" in done.stderr


@pytest.mark.model
def test_a_server_is_loaded_and_left_empty(tmp_path):
    results, shown = run_quick("serving.py", tmp_path / "serving.json")
    (speed,), (crowd,) = results["throughput"], results["crowd"]
    assert speed["same_number_of_tokens"]
    assert all(spread["median"] > 0 for spread in speed["tokens_per_second"].values())
    assert sum(crowd["told"].values()) == crowd["requests"]
    assert set(crowd["left_behind"].values()) == {0.0}
    assert crowd["engine_failures"] == 0 and results["exit_code"] == 0
    assert "at once" in shown
