"""Steps at fixed shapes, as CUDA graphs need them: the same results, in few shapes.

Without a card the recorded functions are called as they are; all else is as with one.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import torch
from exactness import assert_unbiased, member, score
from support import Language, Score, exact, request, results
from test_device import InTime
from test_exact_transformers import PROMPT, table, tiny

from guided_smc import LM, OptionError, regex
from guided_smc.device_passes import FIXED, CapturedPasses
from guided_smc.device_rows import DeviceRows
from guided_smc.engine import Engine
from guided_smc.models import fixed
from guided_smc.models.capture import ROWS, WIDTHS, Capture, bucket
from guided_smc.models.int8 import Int8Twin
from guided_smc.results import ResultEvent

LANGUAGE = Language(member, 6)
ON_A_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA card")


@functools.cache
def models(device: str = "cpu"):
    made = tiny(), tiny(0.15)
    for model in made:
        model.model.to(device)
    return made


def run(requests, step_on: str, *, device: str = "cpu", max_rows: int = 64):
    """Results of requests, and the engine."""
    target, draft = models(device)
    engine = Engine(target, draft, max_rows=max_rows, step_on=step_on)
    for r in requests:
        engine.add(r)
    events = []
    while engine.busy:
        events += engine.step()
    engine._sessions.target.table.check()
    engine._sessions.draft.table.check()
    return results(events), engine


def some_requests(n: int = 6):
    """Prompts of several lengths with and without constraints, that end at different times."""
    prompts = [PROMPT, (0, 1), (2,), (3, 1, 0, 0, 2, 1, 3), PROMPT, (1, 1, 1)]
    automaton = InTime(regex("(a|bc)*d?"))
    constraints = [None, None, LANGUAGE, automaton, LANGUAGE, None]
    made = []
    for i in range(n):
        r = request(
            table(),
            prompts[i],
            index=i,
            seed=i,
            constraint=constraints[i],
            n_particles=2 + i % 3,
            block_size=(3, 0, 2, 3, 1, 5)[i],
            max_tokens=4 if constraints[i] is automaton else 12,
            ess_threshold=1.0,
        )
        made.append(r)
    return made


def assert_same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert [p.token_ids for p in a.particles] == [p.token_ids for p in b.particles]
        for name in ("log_p", "log_q", "log_weight"):
            mine, theirs = ([getattr(p, name) for p in r.particles] for r in (a, b))
            assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("which", [slice(0, 6), slice(0, 2), slice(3, 4)], ids=str)
def test_fixed_shapes_give_what_passes_as_they_come_give(which):
    found, _ = run(some_requests()[which], "graphs", max_rows=9)
    expected, _ = run(some_requests()[which], "device", max_rows=9)
    assert_same(found, expected)
    where = {where for r in found for where in r.usage.steps_on}
    assert FIXED in where
    assert where <= {FIXED, "device: nothing was read yet"}


@pytest.mark.parametrize("constrained", [False, True])
def test_steps_of_fixed_shapes_are_unbiased(constrained):
    requests = [
        request(
            table(),
            PROMPT,
            index=i,
            seed=i,
            constraint=LANGUAGE if constrained else None,
            potentials=[Score(score, prefixes=True)],
            n_particles=4,
            block_size=2,
            max_tokens=4,
            ess_threshold=1.0,
        )
        for i in range(120)
    ]
    found, _ = run(requests, "graphs", max_rows=10**6)
    assert {where for r in found for where in r.usage.steps_on} == {FIXED}
    expected = exact(
        table(), PROMPT, max_tokens=4, member=member if constrained else None, score=score
    )
    assert_unbiased(found, expected)


def test_few_shapes_serve_all_steps():
    """Nothing is recorded again but where rows or the columns of windows change buckets."""
    requests = [
        request(table(), PROMPT, index=i, seed=i, n_particles=5, block_size=3, max_tokens=40)
        for i in range(9)
    ]
    found, engine = run(requests, "graphs", max_rows=5)
    draws, target, draft = engine._proposer.captured.captures
    steps = sum(r.usage.target_passes for r in found)
    steps += sum(r.usage.steps_in_vain for r in found)
    # Of the draft: what the tokens in front are read in, one token, and blocks that were drafted
    # ahead (whose windows, at first, and whose pages, in the end).
    for capture, per_step, kinds in ((target, 1, 1), (draft, 5, 4)):
        assert sum(capture.calls.values()) <= steps * per_step
        passes = [key for key in capture.calls if key[0] in ("first", "single")]
        rows = {key[-4] for key in passes}
        widths = {key[-3] for key in passes}
        assert rows <= set(ROWS) and len(rows) <= 4
        assert len(capture.calls) <= len(rows) * kinds * max(len(widths), 1)
    assert len(draws.calls) < steps


def test_rows_and_widths_have_buckets():
    assert [bucket(n, ROWS) for n in (1, 3, 8, 9, 65, 129)] == [1, 4, 8, 12, 128, 192]
    assert [bucket(n, WIDTHS) for n in (0, 3, 5, 8)] == [0, 4, 6, 8]


def test_what_moves_is_recorded_again(monkeypatch):
    """Windows grow beyond their columns, and pools beyond their pages."""
    monkeypatch.setattr(fixed, "COLUMNS", (8,))

    def requests():
        return [
            request(table(), PROMPT * n, index=i, n_particles=3, block_size=2, seed=3, max_tokens=9)
            for i, n in enumerate((1, 20, 40))
        ]

    cleared = []
    real = Capture.clear
    monkeypatch.setattr(Capture, "clear", lambda self: (cleared.append(self), real(self)))
    found, engine = run(requests(), "graphs", max_rows=3)
    expected, _ = run(requests(), "device", max_rows=3)
    for capture in engine._proposer.captured.captures[1:]:
        assert cleared.count(capture) >= 3
    assert_same(found, expected)


def test_what_has_no_fixed_shape_runs_uncaptured_and_the_usage_says_why(monkeypatch):
    monkeypatch.setattr(fixed, "IN_PLACE", 1)
    found, _ = run(some_requests(1), "graphs")
    assert set(found[0].usage.steps_on) == {"device: a long prompt is attended to in place"}
    target, _ = models()
    engine = Engine(target, Int8Twin(target), step_on="graphs")
    engine.add(some_requests(1)[0])
    events = []
    while engine.busy:
        events += engine.step()
    (result,) = results(events)
    assert set(result.usage.steps_on) == {"device: the draft follows the target's cache"}


def test_a_failed_recording_leaves_results_and_is_told(monkeypatch):
    """As where a model asks the device something: no graph can hold that."""

    def fails(self, function, changing):
        self.refused = "RuntimeError: operation not permitted when stream is capturing"

    monkeypatch.setattr(Capture, "_record", fails)
    target, draft = models()
    engine = Engine(target, draft, step_on="graphs")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for capture in engine._proposer.captured.captures:
        capture.device = torch.device("cuda")  # as if
    engine.add(some_requests(1)[0])
    events = []
    while engine.busy:
        events += engine.step()
    (result,) = results(events)
    expected, _ = run(some_requests(1), "device")
    assert_same([result], expected)
    assert any("recording a graph failed: RuntimeError" in w for w in result.usage.steps_on)
    assert any("recording a graph failed: RuntimeError" in w for w in result.warnings)


@ON_A_CARD
@pytest.mark.parametrize("which", [slice(0, 6), slice(0, 2), slice(3, 4)], ids=str)
def test_results_are_the_same_with_capture_on_and_off(which):
    found, engine = run(some_requests()[which], "graphs", device="cuda", max_rows=9)
    expected, _ = run(some_requests()[which], "device", device="cuda", max_rows=9)
    assert all(c.refused is None and c._graphs for c in engine._proposer.captured.captures)
    assert_same(found, expected)


@ON_A_CARD
@pytest.mark.parametrize("which", [0, 3], ids=["free", "automaton"])
def test_nothing_in_a_block_waits_for_the_card_but_its_end(which, monkeypatch):
    """Torch raises where an operation does; waiting for the end of a block is none."""
    target, draft = models("cuda")
    engine = Engine(target, draft, step_on="graphs")

    def run_once() -> None:
        engine.add(some_requests()[which])
        while engine.busy:
            list(engine.step())

    run_once()  # records
    for name in ("draft", "target", "run"):
        real = getattr(CapturedPasses, name)

        def strictly(self, *args, real=real):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return real(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(CapturedPasses, name, strictly)
    run_once()


def test_what_a_graph_reads_stays_where_it_is_whatever_is_drawn_without_one():
    """Scores that were cut are float32, whatever the model's are."""
    rows = DeviceRows(2, 1, 6, (4,), torch.device("cpu"))
    recorded, cut = torch.zeros(2, 6, dtype=torch.bfloat16), torch.zeros(2, 6)
    flat = rows._zeros(recorded)
    assert rows._zeros(cut).dtype == cut.dtype
    assert rows._zeros(recorded) is flat


def test_a_capture_runs_a_function_once_a_call():
    capture = Capture(torch.device("cpu"))
    counts = np.zeros(1)
    for _ in range(3):
        capture.run("key", lambda: counts.__iadd__(1))
    assert counts[0] == 3 and capture.calls == {"key": 3}


def test_an_engine_that_records_serves_the_next_run_and_two_at_once_have_one_each(monkeypatch):
    made = []
    real = Engine.__init__
    monkeypatch.setattr(
        Engine, "__init__", lambda self, *a, **k: (made.append(self), real(self, *a, **k))[1]
    )
    target, draft = models()
    lm = LM(target, draft=draft, encoder=table(), step_on="graphs")

    def ask():
        return lm.stream("ab", n_particles=3, max_tokens=6, seed=1)

    first = [e.result for e in ask() if isinstance(e, ResultEvent)]
    again = [e.result for e in ask() if isinstance(e, ResultEvent)]
    assert len(made) == 1
    assert_same(again, first)
    one, other = ask(), ask()
    next(one), next(other)
    assert len(made) == 2
    del one, other
    lm.step_on = "host"
    assert len(list(ask())) > 0
    assert len(made) == 3
    lm.step_on = "card"
    with pytest.raises(OptionError, match="step_on must be one of"):
        next(ask())
