"""Blocks that begin on a device before the one in front of them is told of."""

from __future__ import annotations

import pytest
from exactness import LANGUAGE, member, score
from support import VOCABULARY, Language, Score, request, results, untimed
from test_capture import models

from guided_smc import reward
from guided_smc.device import DeviceProposer
from guided_smc.engine import Engine, run
from guided_smc.errors import ModelError
from guided_smc.models.table import TableModel
from guided_smc.options import make_options
from guided_smc.results import ErrorEvent, ResultEvent, StepEvent

TARGET = TableModel.random(VOCABULARY, seed=11, eos_probability=0.1)
DRAFT = TableModel.random(VOCABULARY, seed=22, eos_probability=0.1)
EVEN = Language(member, 6)


def asked(i: int, **changes):
    """One of many kinds of requests."""
    kinds = [
        {},
        {"constraint": EVEN, "max_tokens": 6},
        {"potentials": [Score(score, prefixes=True)], "ess_threshold": 1.0},
        {"stop": ("ab",), "islands": 2},
        {"constraint": LANGUAGE, "max_tokens": 4, "power": 2.0},
        {"target_ess": 3.0, "max_particles": 6, "potentials": [Score(score, prefixes=True)]},
    ]
    kind = kinds[i % len(kinds)]
    given = {"n_particles": 4, "max_tokens": 14, "block_size": (2, 0, 3)[i % 3], **kind, **changes}
    made = request(TARGET, (0, i % 4), index=i, seed=i, **given)
    made.options = make_options(made.options, max_restarts=2)
    return made


def start() -> Engine:
    return Engine(TARGET, DRAFT, max_rows=12, step_on="device")


def drained(engine: Engine) -> list:
    events = []
    while engine.busy:
        events += engine.step()
    return events


def test_results_and_records_are_those_of_blocks_that_wait_for_their_turn(monkeypatch):
    early = results(run(TARGET, map(asked, range(18)), draft=DRAFT, max_rows=12, step_on="device"))
    monkeypatch.setattr(DeviceProposer, "ahead", False)
    late = results(run(TARGET, map(asked, range(18)), draft=DRAFT, max_rows=12, step_on="device"))
    assert [untimed(r) for r in early] == [untimed(r) for r in late]
    assert sum(r.usage.resamplings for r in early) > 10


def test_the_next_block_has_begun_when_a_step_is_told(monkeypatch):
    said = []
    begin = DeviceProposer.start
    monkeypatch.setattr(DeviceProposer, "start", lambda *args: said.append("begun") or begin(*args))
    engine = start()
    engine.add(asked(0, max_tokens=9, block_size=2))
    while engine.busy:
        for event in engine.step():
            said.append(type(event).__name__)
    steps = said.count("StepEvent")
    assert steps > 1
    assert said == ["begun", *["begun", "StepEvent"] * (steps - 1), "StepEvent", "ResultEvent"]


def test_what_is_cancelled_in_the_middle_of_a_block_says_nothing_more_and_hurts_nobody():
    alone = {i: untimed(results(run(TARGET, [asked(i)], draft=DRAFT, step_on="device"))[0])
             for i in (0, 2)}  # fmt: skip
    engine = start()
    for i in (0, 1, 2):
        engine.add(asked(i))
    list(engine.step())
    rows = engine.rows
    assert engine.cancel(1)
    assert engine.rows < rows
    assert not engine.cancel(1)
    events = drained(engine)
    assert {e.index for e in events} == {0, 2}
    assert {e.index: untimed(e.result) for e in events if isinstance(e, ResultEvent)} == alone


def test_after_the_last_was_cancelled_nothing_is_to_do_and_the_next_request_runs_as_ever():
    engine = start()
    engine.add(asked(2))
    list(engine.step())
    assert engine.cancel(2)
    assert (engine.busy, engine.rows) == (False, 0)
    engine.add(asked(0))
    (found,) = results(drained(engine))
    (alone,) = results(run(TARGET, [asked(0)], draft=DRAFT, step_on="device"))
    assert untimed(found) == untimed(alone)


def test_pages_of_what_was_cancelled_are_free_again():
    engine = Engine(*models(), step_on="graphs")
    for i in (0, 2):
        engine.add(asked(i, max_tokens=20))
    list(engine.step())
    engine.cancel(0)
    drained(engine)
    for session in engine._sessions.with_rows:
        session.table.check()
        assert session.table.used == 0


def test_a_block_that_cannot_begin_hides_nothing_of_the_one_in_front_of_it(monkeypatch):
    engine = start()
    engine.add(asked(0, max_tokens=3, block_size=2))
    engine.add(asked(2, max_tokens=14, block_size=2))
    monkeypatch.setattr(engine._sessions.draft, "extend", FailsAt(engine._sessions.draft.extend, 3))
    events = list(engine.step())
    assert {e.index for e in events if isinstance(e, StepEvent)} == {0, 2}
    assert [e.index for e in events if isinstance(e, ResultEvent)] == [0]
    with pytest.raises(ModelError, match="broken now"):
        list(engine.step())


class FailsAt:
    def __init__(self, call, number: int) -> None:
        self.call = call
        self.left = number

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise ModelError("broken now")
        return self.call(*args, **kwargs)


def breaks(text: str) -> float:
    if len(text) > 6:
        raise ValueError("no more")
    return 0.0


def test_an_error_of_one_request_ends_it_alone():
    engine = start()
    engine.add(asked(0, potentials=[reward(breaks, on="step")], block_size=2))
    engine.add(asked(2))
    events = drained(engine)
    assert [e.index for e in events if isinstance(e, ErrorEvent)] == [0]
    (found,) = [e.result for e in events if isinstance(e, ResultEvent)]
    (alone,) = results(run(TARGET, [asked(2)], draft=DRAFT, step_on="device"))
    assert untimed(found) == untimed(alone)


def test_a_request_is_at_hand_when_the_next_block_begins():
    """Whoever is asked for requests is asked for one more than fits, and only for one."""
    pulled = []

    def requests():
        for i in range(4):
            pulled.append(i)
            yield asked(0, max_tokens=12, block_size=2) if i == 0 else asked(i)

    events = run(TARGET, requests(), draft=DRAFT, max_rows=4, step_on="device")
    next(events)
    assert pulled == [0]  # it runs, and is not done
    next(events)
    assert pulled == [0, 1]
    assert sum(isinstance(e, ResultEvent) for e in events) == 4
