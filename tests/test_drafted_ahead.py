"""Blocks that are drafted before the block in front of them was weighed by the host.

Whatever comes of it, results are to the last bit those of blocks that wait for their turn.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import recording
import torch
from exactness import assert_unbiased, score
from support import Score, exact, request, results, untimed
from test_capture import PROMPT, assert_same, models, run
from test_exact_transformers import table

from guided_smc import regex
from guided_smc.device_ahead import Ahead, Weights
from guided_smc.engine import Engine
from guided_smc.errors import OutOfPagesError
from guided_smc.grammars.finishing import within
from guided_smc.models import fixed
from guided_smc.models.capture import Capture
from guided_smc.models.fixed import FixedPasses
from guided_smc.results import ResultEvent

PROMPTS = (PROMPT, (0, 1), (2,), (3, 1, 0))


class InTime:
    """A constraint as the API binds it: without what does not end within so many tokens."""

    def __init__(self, pattern: str, max_tokens: int, *, tables: bool = True) -> None:
        compiled = within(regex(pattern), table().vocabulary, max_tokens)[0]
        self.compiled = compiled if tables else OfTheHost(compiled)

    def compile(self, vocabulary):
        return self.compiled


class AskedNowAndThen(InTime):
    """One whose masks say too little at every fourth place, so that tokens are tested there."""

    def __init__(self, pattern: str, max_tokens: int) -> None:
        super().__init__(pattern, max_tokens, tables=False)
        self.compiled = Asked(self.compiled)


class OfTheHost:
    """A compiled constraint whose masks only the host can make."""

    def __init__(self, compiled) -> None:
        self.start, self.fill_masks = compiled.start, compiled.fill_masks


class Asked:
    """A compiled constraint of letters, whose masks let all of them pass now and then."""

    max_rejected, remedy = 100, ""

    def __init__(self, compiled) -> None:
        self.start, self.exact = compiled.start, compiled.fill_masks

    def fill_masks(self, states, bitmask) -> None:
        self.exact(states, bitmask)
        bitmask[[self.judges(state) for state in states]] = 0b1111

    def judges(self, state) -> bool:
        return state.left % 4 == 3

    def viable(self, state, token) -> bool:
        bitmask = np.zeros((1, 1), dtype=np.int32)
        self.exact([state], bitmask)
        return bool(bitmask[0, 0] >> token & 1)


AUTOMATON = InTime("(a|bc|dd)*", 24)
KINDS = {
    "free": {},
    "of eight": {"n_particles": 8, "block_size": 5},
    "automata": {"constraint": AUTOMATON, "max_tokens": 24},
    "some automata": {"constraint": [None, AUTOMATON, None, AUTOMATON], "max_tokens": 24},
    "masks of the host": {
        "constraint": InTime("(a|bc|dd)*", 24, tables=False),
        "max_tokens": 24,
        "block_size": 2,
    },
    "tested now and then": {
        "constraint": AskedNowAndThen("(a|bc|dd)*", 24),
        "max_tokens": 24,
        "block_size": 1,
        "n_particles": 1,
    },
    "cut": {"top_p": 0.9},
    "stratified": {"resampling": "stratified", "power": 1.5},
    "nothing drafted": {"block_size": 0, "constraint": [AUTOMATON, None, AUTOMATON, None]},
    "nothing drafted, masks of the host": {
        "block_size": 0,
        "constraint": InTime("(a|bc|dd)*", 24, tables=False),
        "max_tokens": 24,
    },
    "not resampled": {"ess_threshold": 0.0},
    "some potentials": {"potentials": [[], [Score(score, prefixes=True)], [], []]},
    "stop strings": {"stop": ("ab",)},
}


def requests(seed: int, **changes):
    """Four prompts that end at different times."""
    made = []
    for i, prompt in enumerate(PROMPTS):
        given = {"n_particles": 4, "block_size": 3 - i % 2, "max_tokens": 40, "ess_threshold": 0.7}
        for name, value in changes.items():
            given[name] = value[i] if isinstance(value, list) else value
        made.append(request(table(), prompt, index=i, seed=10 * seed + i, **given))
    return made


def told(result) -> dict:
    """All of a result but whether it was drafted ahead."""
    record = untimed(result)
    for name in ("steps_ahead", "steps_in_vain"):
        del record["usage"][name]
    for step in record["steps"]:
        # Counted where the host makes the masks, which it does for all prompts or none.
        del step["allowed"], step["accepting"]
    return record


def in_turn(made, monkeypatch) -> list[dict]:
    """Records of requests whose blocks wait for their turn."""
    with monkeypatch.context() as patched:
        patched.setattr(Ahead, "begin", lambda *args: None)
        found, _ = run(made, "graphs", max_rows=24)
    assert all(r.usage.steps_ahead == 0 for r in found)
    return [told(r) for r in found]


def ahead(found) -> tuple[int, int]:
    """Steps drafted ahead, and those in vain."""
    return tuple(sum(getattr(r.usage, f"steps_{x}") for r in found) for x in ("ahead", "in_vain"))


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_blocks_that_wait_for_their_turn(kind, monkeypatch):
    steps, in_vain = 0, 0
    for seed in range(4):
        found, _ = run(requests(seed, **KINDS[kind]), "graphs", max_rows=24)
        assert [told(r) for r in found] == in_turn(requests(seed, **KINDS[kind]), monkeypatch)
        steps += ahead(found)[0]
        in_vain += ahead(found)[1]
    assert steps > 0
    assert in_vain > 0  # some have always ended, so that there are other rows


def test_nor_do_sums_over_columns_show_it_that_only_rows_read_which_have_left(monkeypatch):
    """The longest prompt ends first, and then the others' windows are shorter."""
    monkeypatch.setattr(fixed, "COLUMNS", (8,))

    def made(seed: int):
        prompts = ((2, 1), (0, 3) * 12, (0, 1), (3, 2) * 4)
        return [
            request(
                table(),
                prompt,
                index=i,
                seed=10 * seed + i,
                n_particles=2,
                block_size=3,
                max_tokens=6 if len(prompt) > 8 else 24,
            )
            for i, prompt in enumerate(prompts)
        ]

    for seed in range(8):
        found, _ = run(made(seed), "graphs")
        assert [told(r) for r in found] == in_turn(made(seed), monkeypatch)


def test_masks_of_the_host_hide_no_tokens_that_are_left(monkeypatch):
    """The host has appended drafted tokens by then; K of the last block still fits the cap."""
    constraint = InTime("(a|b|c|d)*dddddddd", 24, tables=False)
    made = request(
        table(), PROMPT, constraint=constraint, max_tokens=24, block_size=4, n_particles=1
    )
    (found,), _ = run([made], "graphs")
    assert ahead([found]) == (found.usage.target_passes - 1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_and_replayed_gives_the_same(kind, monkeypatch):
    """Windows grow into other buckets of columns on the way, and pools beyond their pages."""
    monkeypatch.setattr(fixed, "COLUMNS", (16, 32, 64))
    plain, _ = run(requests(6, **KINDS[kind]), "graphs", max_rows=8)
    monkeypatch.setattr(Capture, "run", recording.run)
    found, engine = run(requests(6, **KINDS[kind]), "graphs", max_rows=8)
    assert [told(r) for r in found] == [told(r) for r in plain]
    draws, *_ = engine._proposer.captured.captures
    assert sum(draws.calls.values()) > len(draws._graphs) > 0


def test_a_device_that_is_wrong_now_and_then_leaves_no_trace_in_windows(monkeypatch):
    """What it has moved where nobody goes on from is read from the pages again."""
    long = {"max_tokens": 30, "block_size": 2, "n_particles": 4, "ess_threshold": 1.0}
    expected = in_turn(requests(5, **long), monkeypatch)
    count = itertools.count()

    def somebody_else(self, state):
        state.source.fill_(next(count) % 2)

    monkeypatch.setattr(Weights, "resample", somebody_else)
    found, _ = run(requests(5, **long), "graphs", max_rows=24)
    assert [told(r) for r in found] == expected
    assert ahead(found)[1] > 3


def test_without_a_draft_the_target_begins(monkeypatch):
    target, _ = models()

    def alone():
        engine = Engine(target, step_on="graphs")
        for made in requests(0, block_size=0):
            engine.add(made)
        events = []
        while engine.busy:
            events += engine.step()
        return results(events)

    found = alone()
    monkeypatch.setattr(Ahead, "begin", lambda *args: None)
    assert [told(r) for r in found] == [told(r) for r in alone()]
    assert ahead(found)[0] > 10


def test_the_device_comes_to_the_ancestors_of_the_host(monkeypatch):
    compared = []
    take = Ahead.take

    def comparing(self, batch, wanted, **given):
        if self._begun is not None and batch.rows == self._begun.batch.rows:
            source = self._begun.drawing.state.sources()
            compared.append(source[: len(batch.rows)].tolist() == batch.sources.tolist())
        return take(self, batch, wanted, **given)

    monkeypatch.setattr(Ahead, "take", comparing)
    found, _ = run(requests(0, n_particles=8, max_tokens=80), "graphs")
    assert len(compared) > 3 and all(compared)
    assert sum(r.usage.resamplings for r in found) > 3


def test_a_device_that_comes_to_something_else_changes_nothing(monkeypatch):
    expected = in_turn(requests(1), monkeypatch)

    def nobody_moves(self, state):
        state.source.copy_(torch.arange(len(state.source)))

    monkeypatch.setattr(Weights, "resample", nobody_moves)
    found, _ = run(requests(1), "graphs", max_rows=24)
    assert [told(r) for r in found] == expected
    assert ahead(found)[1] > 0


def test_what_was_drafted_ahead_is_in_the_pages(monkeypatch):
    """Windows are thrown away behind every block, so that all is read from the pages."""
    expected, _ = run(requests(2), "graphs", max_rows=24)
    keep = FixedPasses.keep

    def forgetting(self, *args):
        keep(self, *args)
        self.session.invalidate()

    monkeypatch.setattr(FixedPasses, "keep", forgetting)
    found, _ = run(requests(2), "graphs", max_rows=24)
    assert ahead(found)[0] > 0
    assert_same(found, expected)


@pytest.mark.parametrize("masks", [None, "tables", "of the host"])
def test_texts_that_are_drafted_ahead_are_unbiased(masks):
    pattern = "([abc]d?)*"
    max_tokens = 5 if masks is None else 6
    constraint = None if masks is None else InTime(pattern, 6, tables=masks == "tables")
    made = [
        request(
            table(),
            PROMPT,
            index=i,
            seed=i,
            constraint=constraint,
            n_particles=4,
            block_size=1,
            max_tokens=max_tokens,
            ess_threshold=1.0,
        )
        for i in range(120)
    ]
    found = [r for i in range(0, 120, 2) for r in run(made[i : i + 2], "graphs")[0]]
    assert ahead(found)[0] > 10

    def member(text: str) -> bool:
        return re.fullmatch(pattern, text) is not None

    expected = exact(
        table(), PROMPT, max_tokens=max_tokens, member=None if masks is None else member
    )
    assert_unbiased(found, expected)


def test_what_is_cancelled_or_joins_meanwhile_hurts_nobody(monkeypatch):
    expected = in_turn(requests(3)[:1], monkeypatch)
    target, draft = models()
    engine = Engine(target, draft, step_on="graphs")
    first, second, third, _ = requests(3)
    engine.add(first)
    engine.add(second)
    events = list(engine.step())
    engine.cancel(second.index)
    events += engine.step()
    engine.add(third)
    while engine.busy:
        events += engine.step()
    ended = {e.index: e.result for e in events if isinstance(e, ResultEvent)}
    assert set(ended) == {first.index, third.index}
    alone = expected[0]
    assert [p.token_ids for p in ended[0].particles] == [
        tuple(p["token_ids"]) for p in alone["particles"]
    ]
    assert ended[0].usage.steps_in_vain > 0
    for session in engine._sessions.with_rows:
        session.table.check()
        assert session.table.used == 0


def test_where_there_is_no_room_to_look_ahead_blocks_wait_for_their_turn(monkeypatch):
    expected = in_turn(requests(0), monkeypatch)

    def full(self, *args, **given):
        self.session._stale(self.session.table.lengths - self.session._base)
        raise OutOfPagesError("no", needed=2, fit=1)

    monkeypatch.setattr(FixedPasses, "plan_ahead", full)
    found, _ = run(requests(0), "graphs", max_rows=24)
    assert [told(r) for r in found] == expected
    assert ahead(found) == (0, 0)


def test_after_misses_it_is_tried_less_often(monkeypatch):
    tries = []
    look_ahead = FixedPasses.plan_ahead
    monkeypatch.setattr(
        FixedPasses, "plan_ahead", lambda *a, **k: (tries.append(0), look_ahead(*a, **k))[1]
    )

    def somebody_else(self, state):
        state.source.copy_(torch.arange(len(state.source)).flip(0))
        state.source[0] = 1  # never right

    monkeypatch.setattr(Weights, "resample", somebody_else)
    monkeypatch.setattr("guided_smc.kernels.move_rows", lambda *args: None)
    long = {"max_tokens": 300, "block_size": 2, "n_particles": 4, "stop": ()}
    found, _ = run(requests(5, **long)[:1], "graphs")
    steps = found[0].usage.target_passes
    assert len(tries) <= 2 + np.log2(max(steps, 1)) + steps / 16


def test_a_result_that_was_told_changes_no_more():
    target, draft = models()
    engine = Engine(target, draft, step_on="graphs")

    def ended(made) -> dict:
        engine.add(made)
        events = []
        while engine.busy:
            events += engine.step()
        (found,) = results(events)
        return found

    first = ended(requests(0)[0])
    record = untimed(first)
    ended(requests(1)[0])
    assert untimed(first) == record
