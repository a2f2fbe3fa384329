"""What the engine does at the edges: ends, caps, stops, zero weights, failures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import VOCABULARY, Language, Score, request, results, untimed

from guided_smc import LM
from guided_smc.engine import Engine, run
from guided_smc.errors import IncompleteOutputError, ModelError, PotentialError
from guided_smc.models.table import TableModel
from guided_smc.options import make_options
from guided_smc.request import Request
from guided_smc.results import ErrorEvent, ResultEvent
from guided_smc.rewards import length
from guided_smc.vocabulary import Vocabulary

TARGET = TableModel.random(VOCABULARY, seed=11, eos_probability=0.1)
DRAFT = TableModel.random(VOCABULARY, seed=22, eos_probability=0.1)
ANYTHING = Language(lambda t: True, 4)


def one(target=TARGET, *, draft=None, max_restarts=0, **kwargs):
    r = request(target, (0,), **kwargs)
    r.options = make_options(r.options, max_restarts=max_restarts)
    (result,) = results(run(target, [r], draft=draft))
    return result


def fixed(*tokens: int, vocabulary=VOCABULARY) -> TableModel:
    """A model that says these tokens after a prompt of one, then ends."""

    def row(context):
        p = np.zeros(len(vocabulary))
        said = len(context) - 1
        p[tokens[said] if said < len(tokens) else vocabulary.eos_ids[0]] = 1.0
        return p

    return TableModel(row, vocabulary)


@pytest.mark.parametrize("block_size", [0, 1, 2, 3, 5])
def test_an_end_token_ends_the_text_wherever_in_a_block_it_falls(block_size):
    model = fixed(1, 2)
    result = one(model, draft=model, block_size=block_size, n_particles=2, max_tokens=9)
    assert result.text == "bc"
    assert result.finish_reason == "stop"
    assert result.usage.particle_tokens == 2 * 3


@pytest.mark.parametrize("block_size", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_without_a_constraint_the_cap_cuts_and_the_reason_is_length(block_size, max_tokens):
    model = fixed(0, 1, 2, 3)
    result = one(model, draft=model, block_size=block_size, n_particles=2, max_tokens=max_tokens)
    assert result.text == "abcd"[:max_tokens]
    assert result.finish_reason == "length"
    assert result.log_evidence == pytest.approx(0.0)


@pytest.mark.parametrize("block_size", [0, 1, 3])
def test_no_text_is_longer_than_the_cap(block_size):
    for seed in range(20):
        for constraint in (None, ANYTHING):
            result = one(
                draft=DRAFT,
                block_size=block_size,
                max_tokens=3,
                seed=seed,
                constraint=constraint,
            )
            assert all(len(p.token_ids) <= 3 for p in result.particles)


@pytest.mark.parametrize("block_size", [0, 1, 2, 3])
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(block_size):
    vocabulary = Vocabulary([b"ab", b"ca", b"c", b"b", b""], eos_ids=[4])
    model = fixed(0, 1, 3, 2, 2, vocabulary=vocabulary)
    result = one(model, draft=model, block_size=block_size, n_particles=1, stop="cab")
    assert result.text == "ab"
    assert result.finish_reason == "stop"
    assert len(result.token_ids) == 3


def test_the_potential_sees_the_text_before_the_stop_string():
    seen = []

    def score(text):
        seen.append(text)
        return 0.0

    one(fixed(0, 1, 2), stop="b", potentials=[Score(score, prefixes=False)], n_particles=1)
    assert seen == ["a"]


def test_all_weights_zero_is_a_result_with_the_partial_text():
    needs_five = Language(lambda t: len(t) == 5, 5)
    result = one(constraint=needs_five, max_tokens=3, max_restarts=2)
    assert result.log_evidence == -math.inf
    assert result.finish_reason == "length"
    assert result.restarts == 2
    assert len(result.text) == 3
    assert result.selected == ()
    assert all(p.weight == 0 for p in result.particles)
    with pytest.raises(IncompleteOutputError, match="max_tokens") as caught:
        _ = result.value
    assert caught.value.text == result.text
    assert result.values == []


def test_a_potential_that_forbids_everything_is_not_a_length_failure():
    result = one(potentials=[Score(lambda t: -math.inf, prefixes=True)])
    assert result.finish_reason == "failed"
    with pytest.raises(IncompleteOutputError, match="weight 0"):
        _ = result.value


def test_a_run_that_died_starts_again_and_says_so():
    lucky = Score(lambda t: 0.0 if t.startswith("b") else -math.inf, prefixes=True)
    restarted = [
        one(potentials=[lucky], n_particles=1, max_restarts=50, seed=seed) for seed in range(10)
    ]
    assert any(r.restarts > 0 for r in restarted)
    assert all(r.text.startswith("b") for r in restarted)
    # The evidence is the average over all starts.
    for r in restarted:
        assert r.log_evidence == pytest.approx(-math.log(1 + r.restarts), abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("prefixes", [False, True])
def test_a_potential_that_gives_nan_or_infinity_is_named_with_its_text(bad, prefixes):
    potential = Score(lambda t: bad if "b" in t else 0.0, prefixes=prefixes, name="my potential")
    with pytest.raises(PotentialError, match="my potential") as caught:
        one(potentials=[potential], n_particles=16, max_tokens=8)
    assert "b" in caught.value.text
    assert caught.value.potential == "my potential"


def test_a_potential_that_raises_or_miscounts_is_named():
    def fails(text):
        raise ZeroDivisionError("oops")

    with pytest.raises(PotentialError, match=r"broken.*ZeroDivisionError: oops"):
        one(potentials=[Score(fails, prefixes=False, name="broken")])

    class Miscounts(Score):
        def log_complete(self, completions):
            return [0.0] * (len(completions) + 1)

    with pytest.raises(PotentialError, match="shape"):
        one(potentials=[Miscounts(len, prefixes=False)])


def test_a_failing_request_does_not_hurt_its_neighbours():
    bad = request(TARGET, (0,), index=1, potentials=[Score(lambda t: math.nan, prefixes=True)])
    good = [request(TARGET, (0,), index=i, seed=i) for i in (0, 2)]
    events = list(run(TARGET, [good[0], bad, good[1]]))
    assert [e.index for e in events if isinstance(e, ErrorEvent)] == [1]
    texts = {e.index: e.result.text for e in events if isinstance(e, ResultEvent)}
    assert texts == {i: one(seed=i).text for i in (0, 2)}


@pytest.mark.parametrize("prefixes", [False, True])
def test_weights_of_minus_1e5_are_ordinary(prefixes):
    score = Score(lambda t: -1e5 - 1000.0 * len(t), prefixes=prefixes)
    result = one(potentials=[score], n_particles=16, max_tokens=4)
    assert math.isfinite(result.log_evidence)
    assert result.log_evidence < -1e5
    assert sum(p.weight for p in result.particles) == pytest.approx(1.0)


def test_padded_ids_are_never_sampled_and_weigh_nothing():
    vocabulary = Vocabulary([b"a", b"", None, None], eos_ids=[1])

    class Padded(TableModel):
        def start_session(self):
            session = super().start_session()
            extend = session.extend

            def with_mass_on_padding(tokens, counts, *, last_only):
                logits = extend(tokens, counts, last_only=last_only)
                logits[..., 2:] = 3.0
                return logits

            session.extend = with_mass_on_padding
            return session

    model = Padded(lambda context: [0.5, 0.5, 0, 0], vocabulary)
    for block_size in (0, 2):
        result = one(model, draft=model, block_size=block_size, n_particles=50)
        assert {t for p in result.particles for t in p.token_ids} <= {0}
        assert result.log_evidence == pytest.approx(0.0, abs=1e-5)


def test_a_draft_with_more_or_fewer_padded_logits_is_aligned():
    narrow = Vocabulary(VOCABULARY.tokens[:5], eos_ids=[4])
    wide = Vocabulary([*VOCABULARY.tokens, None, None], eos_ids=[4], special_ids=[5])
    for vocabulary in (narrow, wide):
        draft = TableModel.random(vocabulary, seed=1, eos_probability=0.1)
        result = one(draft=draft, block_size=2, max_tokens=5)
        assert math.isfinite(result.log_evidence)


def test_special_tokens_are_never_inside_a_constrained_text():
    for seed in range(20):
        result = one(constraint=ANYTHING, seed=seed, draft=DRAFT, block_size=2, max_tokens=4)
        assert all(5 not in p.token_ids for p in result.particles if p.weight > 0)
    unconstrained = [one(seed=seed, max_tokens=8) for seed in range(5)]
    assert any(5 in p.token_ids for r in unconstrained for p in r.particles)


def test_a_model_that_gives_nan_is_an_error():
    class Broken(TableModel):
        def start_session(self):
            session = super().start_session()
            session.extend = lambda tokens, counts, last_only: torch.full(
                (*tokens.shape, 6), float("nan")
            )
            return session

    with pytest.raises(ModelError, match="NaN"):
        one(Broken(lambda context: [1, 0, 0, 0, 0, 0], VOCABULARY, name="broken"))


def test_a_draft_without_mass_on_what_the_mask_allows_proposes_from_the_mask():
    draft = fixed(3, 3, 3, 3)
    only_a = Language(lambda t: t in ("aa", "ab"), 2)
    result = one(draft=draft, block_size=2, constraint=only_a, n_particles=32)
    assert {p.text for p in result.particles if p.weight > 0} == {"aa", "ab"}


def test_forced_tokens_cost_no_draft_pass():
    forced = Language(lambda t: t == "abcd", 4)
    result = one(draft=DRAFT, block_size=3, constraint=forced, max_tokens=8)
    assert result.text == "abcd"
    assert result.usage.draft_passes == 0
    choice = Language(lambda t: t in ("abc", "bca"), 3)
    assert one(draft=DRAFT, block_size=3, constraint=choice).usage.draft_passes == 1


def test_temperature_zero_is_greedy():
    result = one(temperature=0, max_tokens=4)
    text: tuple[int, ...] = ()
    for _ in range(4):
        top = int(TARGET.probabilities((0, *text)).argmax())
        if top == 4:
            break
        text = (*text, top)
    assert {p.token_ids for p in result.particles} == {text}


def test_the_same_seed_gives_the_same_result_and_another_seed_another():
    def run_once(seed):
        return untimed(one(draft=DRAFT, block_size=2, seed=seed, max_tokens=12))

    assert run_once(7) == run_once(7)
    assert run_once(7) != run_once(8)


def test_the_global_random_state_is_neither_used_nor_changed():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = one(seed=3, draft=DRAFT, block_size=1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
    torch.manual_seed(2)
    np.random.seed(2)
    assert one(seed=3, draft=DRAFT, block_size=1).text == first.text


def test_particles_report_their_potentials():
    result = one(potentials=[Score(len, prefixes=True, name="a"), Score(len, prefixes=False)])
    for p in result.particles:
        assert p.log_potentials == {"a": len(p.text), "score": len(p.text)}


def test_more_particles_than_rows_run_alone():
    requests = [request(TARGET, (0,), index=i, seed=i, n_particles=6) for i in range(3)]
    assert [r.text for r in results(run(TARGET, requests, max_rows=4))] == [
        results(run(TARGET, [r]))[0].text for r in requests
    ]


def test_requests_are_pulled_only_when_their_particles_fit():
    pulled = []

    def source():
        for i in range(10):
            pulled.append(i)
            yield request(TARGET, (0,), index=i, seed=i, n_particles=4, max_tokens=6)

    events = run(TARGET, source(), max_rows=8)
    next(events)
    assert len(pulled) <= 3
    rest = list(events)
    assert len([e for e in rest if isinstance(e, ResultEvent)]) == 10


def test_finished_particles_cost_no_rows():
    engine = Engine(TARGET)
    engine.add(request(TARGET, (0,), n_particles=8, max_tokens=20, ess_threshold=0))
    rows = []
    while engine.busy:
        list(engine.step())
        rows.append(len(engine._sessions.target.rows))
    assert rows[-1] == 0
    assert rows == sorted(rows, reverse=True)


def test_text_cut_in_the_middle_of_a_character_is_kept_as_bytes():
    euro = "€".encode()
    vocabulary = Vocabulary([euro[:1], euro[1:2], euro[2:], b""], eos_ids=[3])
    model = fixed(0, 1, 2, vocabulary=vocabulary)
    seen = []

    def score(text):
        seen.append(text)
        return 0.0

    result = one(model, potentials=[Score(score, prefixes=True)], n_particles=1)
    assert result.text == "€"
    assert seen == ["", "", "€", "€"]


def test_requests_are_generic_over_their_value():
    r: Request = request(TARGET, (0,))
    r.parse = len
    (result,) = results(run(TARGET, [r]))
    assert result.value == len(result.text)


@pytest.mark.parametrize("tilt", [{}, {"reward": length(4), "beta": 1.0}], ids=["free", "tilted"])
def test_a_draft_that_misses_the_target_is_told(tilt):
    sure = TableModel(lambda c: [0.001, 0.999, 0, 0, 0, 0], VOCABULARY)
    target = TableModel(lambda c: [0.999, 0.001, 0, 0, 0, 0], VOCABULARY)
    settings = {"max_tokens": 8, "n_particles": 2, "seed": 0, **tilt}
    missed = LM(target, draft=sure).generate("a", **settings)
    assert any("hardly ever says" in w for w in missed.warnings)
    met = LM(target, draft=target).generate("a", **settings)
    assert not any("hardly ever says" in w for w in met.warnings)


def test_nan_in_the_middle_of_a_block_is_an_error():
    class BreaksInside(TableModel):
        def start_session(self):
            session = super().start_session()
            extend = session.extend

            def broken(tokens, counts, *, last_only):
                logits = extend(tokens, counts, last_only=last_only)
                if not last_only:
                    logits[:, 0] = float("nan")
                return logits

            session.extend = broken
            return session

    model = BreaksInside(TARGET.probabilities, VOCABULARY)
    with pytest.raises(ModelError, match="NaN"):
        one(model, draft=DRAFT, block_size=3)


def test_a_constraint_that_raises_fails_its_own_request_alone():
    class Bad(Language):
        def compile(self, vocabulary):
            compiled = super().compile(vocabulary)

            def fill_masks(states, bitmask):
                raise ValueError("mine")

            compiled.fill_masks = fill_masks
            return compiled

    bad = request(TARGET, (0,), index=0, constraint=Bad(lambda t: True, 2))
    good = request(TARGET, (0,), index=1)
    events = list(run(TARGET, [bad, good]))
    (error,) = [e.error for e in events if isinstance(e, ErrorEvent)]
    assert isinstance(error, PotentialError)
    assert "ValueError: mine" in str(error)
    assert [e.index for e in events if isinstance(e, ResultEvent)] == [1]


def test_draft_passes_that_were_not_made_are_not_counted():
    ends = fixed()
    result = one(ends, draft=ends, block_size=4, n_particles=2)
    assert result.usage.draft_passes == 1
    assert result.usage.particle_tokens == 2


def test_texts_of_events_stay_what_they_were():
    events = list(LM(fixed(0, 1, 2)).stream("a", n_particles=1, max_tokens=3, seed=1))
    assert [e.texts for e in events[:-1]] == [("a",), ("ab",), ("abc",)]


def test_a_text_may_be_long():
    endless = TableModel(lambda c: [1.0, 0, 0, 0, 0, 0], VOCABULARY)
    result = one(endless, max_tokens=300, n_particles=2)
    assert result.text == "a" * 300
    assert one(fixed(0, 1), max_tokens=10**12, n_particles=2).text == "ab"


def test_what_runs_does_not_wait_for_requests_that_have_not_come():
    finished = []

    def source():
        yield request(TARGET, (0,), index=0, max_tokens=3)
        while not finished:
            yield None
        yield None
        yield request(TARGET, (0,), index=1, max_tokens=3)

    for event in run(TARGET, source(), max_rows=64):
        if isinstance(event, ResultEvent):
            finished.append(event.index)
    assert finished == [0, 1]


# -- a number of particles that adapts -------------------------------------------------------------


def test_rows_are_kept_for_as_many_particles_as_a_request_may_come_to():
    adaptive = {"n_particles": 2, "target_ess": 3, "max_particles": 6, "ess_threshold": 1}
    requests = [
        request(TARGET, (0,), index=i, seed=i, max_tokens=6, draft_temperature=3, **adaptive)
        for i in range(4)
    ]
    engine = Engine(TARGET, max_rows=12)
    for r in requests:
        engine.add(r)
    assert engine.free_rows < 0
    most, events = 0, []
    while engine.busy:
        events += engine.step()
        most = max(most, len(engine._sessions.target.rows))
        assert len(engine._running) <= 2
    assert most <= 12
    alone = [results(run(TARGET, [r]))[0].particles for r in requests]
    assert [r.particles for r in results(events)] == alone


def test_a_restart_begins_with_the_number_asked_for():
    never = Score(lambda t: -math.inf if len(t) > 2 else t.count("b"), prefixes=True)
    letters = Vocabulary([b"a", b"b", b""], eos_ids=[2])
    endless = TableModel.random(letters, seed=1, eos_probability=1e-9)
    adaptive = {"n_particles": 4, "target_ess": 2, "ess_threshold": 1}
    r = request(endless, (0,), potentials=[never], max_tokens=5, seed=3, **adaptive)
    r.options = make_options(r.options, max_restarts=2)
    (result,) = results(run(endless, [r]))
    assert result.restarts == 2
    assert [len(s.log_weights) for s in result.steps if not s.index % 3] == [4, 4, 4]
    assert min(len(s.log_weights) for s in result.steps) < 4
