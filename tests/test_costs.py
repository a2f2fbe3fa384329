"""The cost model: its form, what is measured, and what is kept."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from support import VOCABULARY
from tiny_models import write_folder

import guided_smc
from guided_smc import CostModel, OptionError, TableModel
from guided_smc import costs as costs_module
from guided_smc.costs import NOMINAL, load_or_measure, measure, setup

pytestmark = pytest.mark.usefixtures("own_caches")

TABLE = TableModel.random(VOCABULARY, seed=1)


class Slow:
    """A table whose passes take 1 ms and a fifth of one per token, and that is not called one."""

    def __init__(self, factor: float = 1.0) -> None:
        self.vocabulary = VOCABULARY
        self.context_length = None
        self.name = f"slow {factor}"
        self.factor = factor
        self.passes = 0

    def start_session(self):
        return SlowSession(self)


class SlowSession:
    kv_cache = "none"
    attention = ""

    def __init__(self, model: Slow) -> None:
        self.model = model
        self.inner = TABLE.start_session()

    def prefill(self, prompts, copies):
        self.inner.prefill(prompts, copies)

    def extend(self, tokens, counts, *, last_only):
        self.model.passes += 1
        time.sleep(self.model.factor * (1e-3 + 2e-4 * tokens.numel()))
        return torch.zeros(*tokens.shape, len(VOCABULARY))[:, -1 if last_only else slice(None)]

    def reorder(self, index):
        self.inner.reorder(index)


# -- the form ------------------------------------------------------------------------------------


def test_seconds_follow_lines_between_the_points():
    costs = CostModel(target=((1, 1.0), (5, 1.0), (9, 3.0)), draft=((2, 0.5), (4, 0.7)))
    assert costs.target_seconds(3) == 1.0
    assert costs.target_seconds(np.array([7, 9, 11])).tolist() == [2.0, 3.0, 4.0]
    assert costs.draft_seconds(1) == 0.5
    assert costs.draft_seconds(6) == pytest.approx(0.9)
    assert costs.step_seconds(4, 1) == pytest.approx(2.5 + 0.7)
    assert costs.step_seconds(4, np.array([0, 1])) == pytest.approx([1.0, 3.2])


def test_one_point_is_a_constant_and_no_draft_can_draft_nothing():
    costs = CostModel(target=((4, 2.0),))
    assert costs.target_seconds(100) == 2.0
    assert costs.step_seconds(3, 0) == 2.0
    with pytest.raises(OptionError, match="knows no draft"):
        costs.step_seconds(3, 1)


@pytest.mark.parametrize(
    "points", [(), ((0, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 0.0),), ((1, float("nan")),)], ids=str
)
def test_points_that_make_no_sense_are_refused(points):
    with pytest.raises(OptionError, match="target: "):
        CostModel(target=points)
    if points:
        with pytest.raises(OptionError, match="draft: "):
            CostModel(target=((1, 1.0),), draft=points)


# -- measuring -----------------------------------------------------------------------------------


def test_passes_of_every_size_are_timed_and_never_fall():
    costs = measure(Slow(), Slow(0.2))
    tokens = [m for m, _ in costs.target]
    assert tokens == [1, 2, 4, 16, 32, 128]
    assert [rows for rows, _ in costs.draft] == [1, 4, 8, 16]
    for points in (costs.target, costs.draft):
        seconds = [s for _, s in points]
        assert seconds == sorted(seconds)
    for m, seconds in costs.target:
        assert seconds > 1e-3 + 2e-4 * m
    assert costs.target_seconds(128) > costs.target_seconds(1) + 0.02


def test_a_target_alone_is_timed_by_its_rows():
    costs = measure(Slow())
    assert [m for m, _ in costs.target] == [1, 4, 8, 16, 32]
    assert costs.draft == ()


def test_a_slow_model_is_timed_fewer_times(monkeypatch):
    quick, slow = Slow(), Slow()
    measure(quick)
    monkeypatch.setattr(costs_module, "_BUDGET_S", 0.0)
    measure(slow)
    assert slow.passes < quick.passes


def test_a_model_of_transformers_and_its_twin_are_timed(tmp_path):
    write_folder(tmp_path / "tiny")
    lm = guided_smc.load(str(tmp_path / "tiny"), draft="int8", dtype="float32", device="cpu")
    costs = lm.costs
    assert costs.target[-1][0] == 128 and costs.draft[-1][0] == 16
    out = lm.generate("a", block_size="auto", max_tokens=16, n_particles=4, seed=0)
    again = lm.generate("a", block_size="auto", max_tokens=16, n_particles=4, seed=0)
    assert [s.block_size for s in out.steps] == [s.block_size for s in again.steps]
    assert out.particles == again.particles


# -- keeping -------------------------------------------------------------------------------------


def cache_files(tmp_path):
    return sorted((tmp_path / "cache" / "costs").iterdir())


def test_what_was_measured_is_kept_and_said_once(tmp_path):
    said = []
    first = load_or_measure(Slow(), Slow(0.2), notify=said.append)
    second = load_or_measure(Slow(), Slow(0.2), notify=said.append)
    assert first == second
    assert len(said) == 1 and "slow 1.0" in said[0]
    (kept,) = cache_files(tmp_path)
    assert json.loads(kept.read_text())["setup"]["target"]["name"] == "slow 1.0"
    third = load_or_measure(Slow(), Slow(0.2), again=True)
    assert third != first
    assert load_or_measure(Slow(), Slow(0.2)) == third


def test_another_draft_or_number_of_threads_is_measured_by_itself(tmp_path):
    load_or_measure(Slow())
    load_or_measure(Slow(), Slow(0.2))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        load_or_measure(Slow())
    finally:
        torch.set_num_threads(threads)
    assert len(cache_files(tmp_path)) == 3


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"target": []}', '{"target": [[1, -1]], "draft": []}', '{"target": 5}', "\0"],
)
def test_a_corrupt_file_is_measured_again(tmp_path, content):
    costs = load_or_measure(Slow())
    (kept,) = cache_files(tmp_path)
    kept.write_text(content)
    again = load_or_measure(Slow())
    assert [m for m, _ in again.target] == [m for m, _ in costs.target]
    assert load_or_measure(Slow()) == again


def test_a_cache_that_cannot_be_written_costs_a_notice(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GUIDED_SMC_CACHE", str(tmp_path / "file"))
    said = []
    costs = load_or_measure(Slow(), notify=said.append)
    assert costs.target
    assert "cannot be kept" in said[1]


def test_tables_are_not_measured(tmp_path):
    assert load_or_measure(TABLE, TABLE) is NOMINAL
    assert not (tmp_path / "cache" / "costs").exists()


def test_the_setup_names_everything_that_changes_the_cost(tmp_path):
    write_folder(tmp_path / "tiny")
    lm = guided_smc.load(str(tmp_path / "tiny"), draft="int8", dtype="float32", device="cpu")
    about = setup(lm.model, lm.draft)
    assert about["target"]["dtype"] == "torch.float32"
    assert about["target"]["device"] == "cpu"
    assert about["target"]["architecture"] == "LlamaForCausalLM"
    assert about["target"]["parameters"] > 0
    assert about["draft"]["kind"] == "Int8Twin"
    assert about["threads"] == torch.get_num_threads()
    assert about["processor"] and about["version"] == guided_smc.__version__
