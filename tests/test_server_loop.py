"""The loop around the engine, on a small table: cancelling, turns, deadlines, failures, leaks."""

import threading
import time

import pytest
import torch
import transformers
from support import VOCABULARY, Language, Score, request
from tiny_models import tiny_config, tiny_tokenizer

from guided_smc import TableModel
from guided_smc.engine import Engine
from guided_smc.errors import OutOfPagesError, PotentialError
from guided_smc.models.budget import PAGE, Budget
from guided_smc.models.tokenization import vocabulary_from_tokenizer
from guided_smc.models.transformers import TransformersModel
from guided_smc.results import Result, ResultEvent
from guided_smc.server.errors import ApiError
from guided_smc.server.loop import Deadline, EngineLoop, Job

MODEL = TableModel.random(VOCABULARY, seed=5, eos_probability=0.05)
PROMPT = [0, 1]


class Recorder:
    """A sink that remembers, and may hold the engine's thread in the middle of a step."""

    def __init__(self, gate=None):
        self.events = []
        self.outcome = None
        self.finished = threading.Event()
        self.began = threading.Event()
        self._gate = gate

    def step(self, event):
        self.events.append(event)
        self.began.set()
        if self._gate is not None:
            assert self._gate.wait(20)

    def done(self, outcome):
        self.outcome = outcome
        self.finished.set()


def job(*, gate=None, owner="a", seconds=20.0, seed=0, **options):
    options.setdefault("max_tokens", 4)
    options.setdefault("n_particles", 4)
    recorder = Recorder(gate)
    made = request(MODEL, PROMPT, seed=seed, **options)
    return Job(made, recorder, owner, Deadline.after(seconds)), recorder


@pytest.fixture
def loop():
    engines = []

    def make():
        engines.append(Engine(MODEL, max_rows=8, budget=Budget.of(10_000, "table")))
        return engines[-1]

    made = EngineLoop(make, max_queue=6)
    made.engines = engines
    made.start()
    yield made
    made.stop(20)


def rows_of(loop):
    return len(loop.engines[-1]._sessions.target.rows)


def wait_until(what):
    until = time.monotonic() + 20
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def occupied(loop, gate, **options):
    """A job that runs, with the engine held after its first step."""
    first, recorder = job(gate=gate, max_tokens=30, **options)
    loop.submit([first])
    assert recorder.began.wait(20)
    return first, recorder


def test_results_are_those_of_a_run_alone(loop):
    jobs = [job(seed=seed, n_particles=2) for seed in range(4)]
    loop.submit([one for one, _ in jobs])
    for seed, (_, recorder) in enumerate(jobs):
        assert recorder.finished.wait(20)
        engine = Engine(MODEL)
        engine.add(request(MODEL, PROMPT, seed=seed, n_particles=2, max_tokens=4))
        while engine.busy:
            *_, last = engine.step()
        assert [p.token_ids for p in recorder.outcome.particles] == [
            p.token_ids for p in last.result.particles
        ]


def test_cancelling_frees_the_rows_of_what_runs_and_of_nothing_else(loop):
    gate = threading.Event()
    first, recorder = occupied(loop, gate)
    second, other = job(seed=1)
    loop.submit([second])
    loop.cancel([first])
    gate.set()
    assert other.finished.wait(20)
    assert isinstance(other.outcome, Result)
    wait_until(lambda: not loop._running)
    assert rows_of(loop) == 0
    assert recorder.outcome is None, "nothing is told to who has cancelled"


@pytest.mark.parametrize("drafted", [False, True])
def test_the_engine_goes_on_exactly_as_before_when_a_neighbour_is_cancelled(drafted):
    draft = TableModel.random(VOCABULARY, seed=6, eos_probability=0.05) if drafted else None
    size = 2 if drafted else 0

    def run(with_neighbour):
        engine = Engine(MODEL, draft)
        if with_neighbour:
            engine.add(request(MODEL, [2], index=0, seed=9, max_tokens=20, block_size=size))
        engine.add(
            request(MODEL, PROMPT, index=1, seed=1, max_tokens=6, n_particles=4, block_size=size)
        )
        list(engine.step())
        if with_neighbour:
            assert engine.cancel(0)
            assert not engine.cancel(0)
        while engine.busy:
            *_, last = engine.step()
        return [(p.token_ids, p.log_weight) for p in last.result.particles]

    assert run(True) == run(False)


def test_what_waits_can_be_cancelled(loop):
    gate = threading.Event()
    _, running = occupied(loop, gate, n_particles=8)
    waiting, recorder = job()
    loop.submit([waiting])
    loop.cancel([waiting])
    assert loop.waiting == 0
    gate.set()
    assert running.finished.wait(20)
    assert recorder.outcome is None


def test_owners_take_turns(loop):
    gate = threading.Event()
    occupied(loop, gate, n_particles=8)
    order = []
    recorders = []
    for i, owner in enumerate("aaab"):
        one, recorder = job(owner=owner, n_particles=8, seed=i)
        recorder.done = lambda outcome, r=recorder, o=owner: (order.append(o), r.finished.set())
        loop.submit([one])
        recorders.append(recorder)
    gate.set()
    assert all(recorder.finished.wait(20) for recorder in recorders)
    assert order == ["a", "b", "a", "a"]


def test_a_large_job_is_not_overtaken_by_small_ones_that_would_fit(loop):
    gate = threading.Event()
    occupied(loop, gate, n_particles=4)
    large, recorder = job(n_particles=8, owner="b")
    small, other = job(n_particles=2, owner="c")
    loop.submit([large])
    loop.submit([small])
    began = []
    recorder.step = lambda event: began.append("large")
    other.step = lambda event: began.append("small")
    gate.set()
    assert recorder.finished.wait(20) and other.finished.wait(20)
    assert began[0] == "large"


def test_a_full_queue_refuses_and_says_when_to_come_back(loop):
    gate = threading.Event()
    occupied(loop, gate, n_particles=8)
    loop.submit([job()[0] for _ in range(6)])
    with pytest.raises(ApiError) as refused:
        loop.submit([job()[0]])
    assert refused.value.status == 429
    assert int(refused.value.headers["Retry-After"]) >= 1
    assert loop.waiting == 6
    gate.set()


def test_a_deadline_ends_what_waits_and_what_runs(loop):
    gate = threading.Event()
    _, running = occupied(loop, gate, n_particles=8, seconds=0.05)
    waiting, recorder = job(seconds=0.05)
    loop.submit([waiting])
    time.sleep(0.1)
    gate.set()
    for one in (running, recorder):
        assert one.finished.wait(20)
        assert one.outcome.status == 504
    wait_until(lambda: not loop._running)
    assert rows_of(loop) == 0


def test_a_failing_request_does_not_hurt_its_neighbours(loop):
    def broken(text):
        raise ZeroDivisionError("by hand")

    bad, failing = job(potentials=[Score(broken, prefixes=True)])
    good, fine = job(seed=3)
    loop.submit([bad, good])
    assert failing.finished.wait(20) and fine.finished.wait(20)
    assert isinstance(failing.outcome, PotentialError)
    assert isinstance(fine.outcome, Result)
    assert rows_of(loop) == 0


def test_a_step_that_breaks_down_costs_what_runs_and_the_loop_goes_on(loop):
    gate = threading.Event()
    _, running = occupied(loop, gate)
    loop.engines[-1]._sessions.target.extend = None
    gate.set()
    assert running.finished.wait(20)
    assert isinstance(running.outcome, RuntimeError)
    after, recorder = job()
    loop.submit([after])
    assert recorder.finished.wait(20)
    assert isinstance(recorder.outcome, Result)
    assert len(loop.engines) == 2


def test_draining_refuses_what_waits_and_finishes_what_runs(loop):
    gate = threading.Event()
    _, running = occupied(loop, gate, n_particles=8)
    waiting, recorder = job()
    loop.submit([waiting])
    loop.drain(20)
    assert not loop.alive
    gate.set()
    assert running.finished.wait(20) and recorder.finished.wait(20)
    assert isinstance(running.outcome, Result)
    assert recorder.outcome.status == 503
    with pytest.raises(ApiError, match="shutting down"):
        loop.submit([job()[0]])


def test_what_runs_longer_than_the_grace_is_told_so(loop):
    gate = threading.Event()
    _, running = occupied(loop, gate)
    loop.drain(0.0)
    gate.set()
    assert running.finished.wait(20)
    assert running.outcome.status == 503


def test_what_never_fits_is_refused_at_once(loop):
    with pytest.raises(ApiError, match="9 particles"):
        loop.submit([job(n_particles=9)[0]])
    with pytest.raises(OutOfPagesError, match="4 particles with max_tokens=2495 would fit"):
        loop.submit([job(max_tokens=100_000)[0]])


def test_what_was_dropped_from_a_block_that_has_begun_keeps_nobody_out():
    first, second = (job(max_tokens=30, n_particles=8)[0].request for _ in range(2))
    first.index, second.index = 0, 1
    engine = Engine(MODEL, max_rows=8, step_on="device", budget=Budget(first.need.pages, "table"))
    engine.add(first)
    list(engine.step())
    assert engine._flight is not None and not engine.has_room(second)
    assert engine.cancel(0)
    assert engine.reserved == 0 and not engine.busy and engine.has_room(second)
    engine.add(second)
    seen = []
    while engine.busy:
        seen += engine.step()
    assert {event.index for event in seen} == {1} and isinstance(seen[-1], ResultEvent)


@pytest.mark.parametrize("lacking", [0, 1])
def test_jobs_wait_until_the_cache_has_room(lacking):
    second, recorder = job(max_tokens=40, n_particles=2)
    needs = [job(max_tokens=30, n_particles=2)[0].request.need, second.request.need]
    room = Budget(sum(need.pages for need in needs) - lacking, "table")
    loop = EngineLoop(lambda: Engine(MODEL, max_rows=8, budget=room), max_queue=6)
    loop.start()
    try:
        gate = threading.Event()
        _, running = occupied(loop, gate, n_particles=2)
        assert loop._engine.reserved == PAGE * needs[0].pages
        after_it = []
        recorder.step = lambda event: after_it.append(running.finished.is_set())
        loop.submit([second])
        gate.set()
        assert recorder.finished.wait(20) and isinstance(recorder.outcome, Result)
        assert all(after_it) == bool(lacking)
        wait_until(lambda: not loop._running)
        assert loop._engine.reserved == 0
    finally:
        loop.stop(20)


def test_a_dead_start_is_repeated_without_a_place_of_its_own(loop):
    """A population that starts again keeps its reservation: nobody takes its rows meanwhile."""
    never = Score(lambda text: float("-inf"), prefixes=True)
    made, recorder = job(potentials=[never], n_particles=8)
    made.request.options = made.request.options.model_copy(update={"max_restarts": 3})
    other, fine = job(n_particles=8)
    loop.submit([made, other])
    assert recorder.finished.wait(20) and fine.finished.wait(20)
    assert recorder.outcome.restarts == 3
    assert recorder.outcome.finish_reason == "failed"


def test_a_constraint_that_runs_out_of_length_is_a_result(loop):
    never_ends = Language(lambda text: len(text) == 6, longest=6)
    made, recorder = job(constraint=never_ends, max_tokens=3)
    loop.submit([made])
    assert recorder.finished.wait(20)
    assert recorder.outcome.finish_reason == "length"


def test_a_cancelled_group_gives_its_pages_back_and_leaves_the_others_alone():
    torch.manual_seed(0)
    hf = transformers.LlamaForCausalLM(tiny_config()).eval()
    vocabulary = vocabulary_from_tokenizer(tiny_tokenizer(), width=257, config=hf.config)

    def run(with_neighbours):
        model = TransformersModel(hf, vocabulary, name="tiny")
        engine = Engine(model)
        table = engine._sessions.target.table

        def add(index, prompt, tokens):
            engine.add(
                request(model, prompt, index=index, seed=index, n_particles=3, max_tokens=tokens)
            )

        if with_neighbours:
            add(0, [5] * 20, 30)
        add(1, [7, 8, 9], 20)
        if with_neighbours:
            add(2, [5] * 3, 30)
        for _ in range(4):
            list(engine.step())
        if with_neighbours:
            before = table.used
            assert engine.cancel(0) and engine.cancel(2)
            table.check()
            assert table.used < before and engine.rows == 3
        while engine.busy:
            *_, last = engine.step()
        assert table.used == 0 and len(table) == 0
        return [p.token_ids for p in last.result.particles]

    assert run(True) == run(False)
