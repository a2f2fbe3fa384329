"""What steps tell: any particle's text and weight at any step, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import VOCABULARY, FollowingTable, Language, Score, request, results

from guided_smc import reward
from guided_smc.engine import run
from guided_smc.models.table import TableModel
from guided_smc.options import make_options
from guided_smc.records import details, step_record
from guided_smc.results import StepEvent
from guided_smc.vocabulary import Vocabulary

TARGET = TableModel.random(VOCABULARY, seed=11, eos_probability=0.1)
DRAFT = TableModel.random(VOCABULARY, seed=22, eos_probability=0.1)
EVEN = Language(lambda t: len(t) % 2 == 0 and "dd" not in t, 6)
MANY_A = reward(lambda text: float(text.count("a")), beta=1.5, on="step")

CASES = {
    "plain": dict(),
    "drafts": dict(block_size=3),
    "a constraint": dict(constraint=EVEN, max_tokens=6),
    "a constraint and drafts": dict(constraint=EVEN, max_tokens=6, block_size=2),
    "a power": dict(constraint=EVEN, max_tokens=6, block_size=2, power=2.0),
    "a reward": dict(potentials=[MANY_A], block_size=1),
    "a reward that looks ahead": dict(potentials=[MANY_A.with_(lookahead=3)], block_size=1),
    "islands": dict(potentials=[MANY_A], islands=2, ess_threshold=0.9),
    "as many as count": dict(
        potentials=[MANY_A], target_ess=4, max_particles=12, min_particles=2, ess_threshold=0.9
    ),
    "ends and stops": dict(block_size=3, stop=("ab",), max_tokens=12),
}


def ran(draft=DRAFT, max_restarts=0, seed=0, target=TARGET, step_on="host", **kwargs):
    given = {"n_particles": 6, "max_tokens": 8, **kwargs}
    r = request(target, (0,), seed=seed, **given)
    r.options = make_options(r.options, max_restarts=max_restarts)
    (result,) = results(run(target, [r], draft=draft, step_on=step_on))
    return result


def told(**kwargs):
    """The events of a run's steps, and its result."""
    *steps, last = run(TARGET, [request(TARGET, (0,), **kwargs)])
    return steps, last.result


def last_start(result):
    return [step for step in result.steps if step.start == result.steps[-1].start]


def test_events_tell_every_step_and_then_the_result():
    events, result = told(n_particles=3, max_tokens=5, seed=1)
    assert result.steps == tuple(e.step for e in events)
    assert [s.index for s in result.steps] == list(range(len(events)))
    assert all(0 < s.ess <= 3 + 1e-9 for s in result.steps)
    assert events[-1].texts == tuple(p.text for p in result.particles)
    assert events[-1].step.log_evidence == pytest.approx(result.log_evidence)


@pytest.mark.parametrize("adaptive", [{}, {"target_ess": 3, "max_particles": 12}], ids=str)
def test_ancestors_trace_each_particle_through_the_resampled_steps(adaptive):
    score = Score(lambda t: 2.0 * t.count("b"), prefixes=True)
    settings = {"n_particles": 6, "max_tokens": 6, "ess_threshold": 1, "seed": 5, **adaptive}
    events, result = told(potentials=[score], **settings)
    assert any(s.resampled for s in result.steps)
    numbers = [6, *(len(e.texts) for e in events)]
    assert [len(s.ancestors) for s in result.steps] == numbers[1:]
    assert [len(s.log_weights) for s in result.steps] == numbers[:-1]
    assert len(result.particles) == numbers[-1]
    if adaptive:
        assert min(np.diff(numbers)) < 0 < max(np.diff(numbers))
    for slot, particle in enumerate(result.particles):
        assert len(particle.ancestors) == len(result.steps)
        line = [*particle.ancestors[1:], slot]
        for event, at in zip(events, line, strict=True):
            assert particle.text.startswith(event.texts[at])


@pytest.mark.parametrize("step_on", ["host", "device"])
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_of_tokens_add_up_to_those_of_their_particle(case, step_on):
    for seed in range(5):
        result = ran(seed=seed, step_on=step_on, **CASES[case])
        assert any(p.token_log_p for p in result.particles)
        for p in result.particles:
            assert math.fsum(p.token_log_p) == pytest.approx(p.log_p)
            assert math.fsum(p.token_log_q) == pytest.approx(p.log_q)
            assert len(p.token_log_p) == len(p.token_log_q)
            assert 0 <= len(p.token_log_p) - len(p.token_ids) <= 1


@pytest.mark.parametrize("step_on", ["host", "device"])
@pytest.mark.parametrize("case", CASES)
def test_the_tokens_of_the_steps_along_a_lineage_are_those_of_the_particle(case, step_on):
    for seed in range(5):
        result = ran(seed=seed, step_on=step_on, **CASES[case])
        steps = last_start(result)
        for p in result.particles:
            tokens = [t for step, s in zip(steps, p.ancestors, strict=True) for t in step.tokens[s]]
            ended = [t for t in tokens if t in VOCABULARY.eos_ids]
            assert tuple(tokens) == (*p.token_ids, *ended)


@pytest.mark.parametrize("step_on", ["host", "device"])
def test_log_probabilities_of_tokens_are_those_of_the_models(step_on):
    result = ran(block_size=2, seed=3, n_particles=12, step_on=step_on)
    assert max(len(p.token_ids) for p in result.particles) > 3
    for p in result.particles:
        steps = last_start(result)
        tokens = [t for step, s in zip(steps, p.ancestors, strict=True) for t in step.tokens[s]]
        drafted = [
            k < step.block_size
            for step, s in zip(steps, p.ancestors, strict=True)
            for k in range(len(step.tokens[s]))
        ]
        for n, token in enumerate(tokens):
            context = (0, *tokens[:n])
            log_p = math.log(TARGET.probabilities(context)[token])
            log_q = math.log((DRAFT if drafted[n] else TARGET).probabilities(context)[token])
            assert p.token_log_p[n] == pytest.approx(log_p, abs=1e-5)
            assert p.token_log_q[n] == pytest.approx(log_q, abs=1e-5)


def test_weights_before_a_resampling_are_what_tokens_and_scores_add_to_those_after_the_last():
    result = ran(block_size=2, n_particles=8, seed=1, constraint=EVEN, potentials=[MANY_A])
    log_w, log_psi = np.zeros(8), np.zeros(8)
    for step in result.steps:
        (scores,) = (np.array(x) for x in step.log_potentials.values())
        gained = np.array([math.fsum(x) for x in step.token_log_p])
        gained -= np.array([math.fsum(x) for x in step.token_log_q])
        expected = log_w + gained + scores - log_psi
        alive = np.array([s not in ("dead", "dead_at_cap") for s in step.status])
        assert np.array(step.log_weights)[alive] == pytest.approx(expected[alive])
        if step.resampled:
            break
        log_w, log_psi = np.array(step.log_weights), scores
    assert step.resampled


@pytest.mark.parametrize("step_on", ["host", "device"])
def test_steps_tell_how_much_choice_the_constraint_left_and_where_the_text_might_end(step_on):
    result = ran(constraint=EVEN, max_tokens=6, block_size=2, seed=2, step_on=step_on)
    language = EVEN.compile(VOCABULARY)
    for p in result.particles:
        state = language.start()
        at = 0
        for step, s in zip(last_start(result), p.ancestors, strict=True):
            draws = zip(step.tokens[s], step.allowed[s], step.accepting[s], strict=True)
            for token, allowed, accepting in draws:
                assert accepting == state.accepting
                ways_on = language.next.get(state.text, ()) if at < 6 else ()
                assert allowed == len(ways_on) + state.accepting
                at += 1
                if token not in VOCABULARY.eos_ids:
                    state.advance(token)


def test_without_a_constraint_nothing_is_said_of_what_it_allows():
    result = ran(block_size=2)
    assert result.constraint is None
    assert all(x == () for step in result.steps for x in (*step.allowed, *step.accepting))


def test_a_dead_end_shows_as_a_draw_from_nothing():
    result = ran(constraint=Language(lambda t: len(t) == 5, 5), max_tokens=3, block_size=3)
    (step,) = result.steps
    assert set(step.status) == {"dead_at_cap"}
    for tokens, allowed in zip(step.tokens, step.allowed, strict=True):
        assert len(allowed) == len(tokens) + 1 and allowed[-1] == 0


def test_a_potential_that_forbids_a_text_is_told_by_its_name():
    no_b = Score(lambda t: -math.inf if "b" in t else 0.0, prefixes=True, name="no b")
    result = ran(potentials=[no_b], block_size=1, seed=4)
    dead = [(step, s) for step in result.steps for s in range(6) if step.status[s] == "dead"]
    assert dead
    assert all(step.log_potentials["no b"][s] == -math.inf for step, s in dead)


def test_rewards_are_told_along_the_text_if_they_steer_and_else_at_its_end():
    result = ran(potentials=[MANY_A], seed=1)
    assert all(r is not None for step in result.steps for r in step.rewards[MANY_A.name])
    late = reward(lambda text: float(text.count("a")), beta=1.0, on="end")
    result = ran(potentials=[late], seed=1)
    for step in result.steps:
        told = zip(step.status, step.rewards[late.name], strict=True)
        assert all((r is None) == (status == "live") for status, r in told)


def test_steps_of_a_run_that_starts_again_say_which_start_they_belong_to():
    rare = Score(lambda t: 0.0 if t.startswith("dd") else -math.inf, prefixes=False)
    for seed in range(40):
        result = ran(potentials=[rare], max_restarts=3, seed=seed, n_particles=3, max_tokens=4)
        if result.restarts and result.selected:
            break
    starts = [step.start for step in result.steps]
    assert starts == sorted(starts) and set(starts) == set(range(result.restarts + 1))
    for p in result.particles:
        assert math.fsum(p.token_log_p) == pytest.approx(p.log_p)
        assert len(p.ancestors) == starts.count(result.restarts)


def test_the_seconds_of_all_steps_and_the_prefill_are_those_of_the_run():
    result = ran(block_size=2, constraint=EVEN)
    for phase, seconds in result.usage.seconds.items():
        if phase != "prefill":
            assert sum(s.seconds[phase] for s in result.steps) == pytest.approx(seconds)
    assert all("prefill" not in step.seconds for step in result.steps)


def test_a_draft_that_follows_the_target_tells_the_same():
    draft = FollowingTable.random(VOCABULARY, seed=22, eos_probability=0.1)
    assert ran(draft=draft, block_size=2).particles == ran(block_size=2).particles


def test_records_hold_the_text_of_every_token_bytes_where_it_is_no_text_alone():
    vocabulary = Vocabulary([b"a", b"\xc3", b"\xa9", b""], eos_ids=[3])
    model = TableModel(lambda context: [0.3, 0.3, 0.3, 0.1], vocabulary)
    r = request(model, (0,), n_particles=6, max_tokens=8)
    events = list(run(model, [r]))
    (result,) = results(events)
    record = details(result, prompt="a", options=r.options)
    texts = {"0": "a", "1": [0xC3], "2": [0xA9], "3": ""}
    assert record["token_texts"] == texts
    assert record["sampling"]["n_particles"] == 6
    for event in (e for e in events if isinstance(e, StepEvent)):
        told = step_record(event.step, vocabulary, event.texts)
        assert told["texts"] == event.texts
        drawn = {str(t) for tokens in event.step.tokens for t in tokens}
        assert told["token_texts"] == {t: texts[t] for t in texts if t in drawn}
        assert told["token_log_p"] == [[round(x, 6) for x in row] for row in event.step.token_log_p]


def test_a_record_says_by_which_constraint_it_was_held():
    from guided_smc import LM, regex

    out = LM(TARGET).generate("a", output_type=regex("[a-d]{2}"), max_tokens=4, n_particles=2)
    assert out.constraint == "regex '[a-d]{2}'"
    assert details(out, prompt="a", options=None)["constraint"] == out.constraint
