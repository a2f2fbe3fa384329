"""Blocks drawn on the device: the sampling contract again, on enumerable models.

On a CPU the device is the CPU: all is the same but the kernels, whose references run.
"""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from exactness import DRAFT, LANGUAGE, PROMPT, TARGET, assert_unbiased, member, runs, score
from support import (
    VOCABULARY,
    FollowingTable,
    Language,
    Score,
    exact,
    request,
    results,
    untimed,
)
from test_rejection import Asked

from guided_smc import choice, device_rows, kernels, regex
from guided_smc.engine import Engine, run
from guided_smc.grammars.finishing import within
from guided_smc.models.ngram import NGramModel
from guided_smc.models.table import TableModel
from guided_smc.proposing import Proposer
from guided_smc.results import ErrorEvent, ResultEvent
from guided_smc.vocabulary import Vocabulary

device = functools.partial(Engine, step_on="device")


def assert_on_device(found) -> None:
    assert {where for r in found for where in r.usage.steps_on} == {"device"}


CASES = [
    (0, False, {}),
    (0, True, {"power": 2.0}),
    (1, True, {}),
    (3, False, {}),
    (3, True, {"power": 2.0}),
    (2, False, {"temperature": 1.7, "power": 0.5}),
    (2, True, {"top_p": 0.8}),
    (2, False, {"top_k": 3}),
    (0, True, {"min_p": 0.3}),
]


@pytest.mark.parametrize(("block_size", "constrained", "options"), CASES, ids=str)
def test_evidence_and_every_text_are_unbiased(block_size, constrained, options):
    found = runs(
        300,
        engine=device,
        constraint=LANGUAGE if constrained else None,
        potentials=[Score(score, prefixes=True)],
        block_size=block_size,
        n_particles=4,
        ess_threshold=0.9,
        **options,
    )
    assert_on_device(found)
    expected = exact(
        TARGET,
        PROMPT,
        max_tokens=4,
        member=member if constrained else None,
        score=score,
        **options,
    )
    assert_unbiased(found, expected)


class InTime:
    """A constraint as the API binds it: without what does not end within four tokens."""

    def __init__(self, constraint) -> None:
        self.constraint = constraint

    def compile(self, vocabulary):
        return within(self.constraint, vocabulary, 4)[0]


AUTOMATA = {
    "regex": (regex("(a|bc)*d?"), re.compile("(a|bc)*d?")),
    "choice": (choice(["ab", "abcd", "d"]), re.compile("ab|abcd|d")),
}


@pytest.mark.parametrize("name", AUTOMATA)
@pytest.mark.parametrize("block_size", [0, 3])
def test_masks_of_automata_are_exact_up_to_the_cap_and_no_state_is_asked(
    name, block_size, monkeypatch
):
    constraint, pattern = AUTOMATA[name]

    def no_mask(*args):
        raise AssertionError("the host was asked for a mask")

    monkeypatch.setattr(Proposer, "bitmask", no_mask)
    found = runs(
        300, engine=device, constraint=InTime(constraint), block_size=block_size, n_particles=4
    )
    assert_on_device(found)
    member = lambda text: pattern.fullmatch(text) is not None  # noqa: E731
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


class AskedLate(Asked):
    """A language that has a mask for the first token and keeps it secret later."""

    def compile(self, vocabulary):
        compiled = super().compile(vocabulary)
        masks = compiled.compiled.fill_masks

        def fill_masks(states, bitmask):
            masks(states, bitmask)
            bitmask[[bool(state.text) for state in states]] = -1

        compiled.fill_masks = fill_masks
        compiled.judges = lambda state: bool(state.text)
        return compiled


@pytest.mark.parametrize("block_size", [1, 3])
def test_tokens_that_have_to_be_tested_from_the_middle_of_a_block_on_are_drawn_by_the_host(
    block_size,
):
    found = runs(
        250,
        engine=device,
        constraint=AskedLate(LANGUAGE),
        block_size=block_size,
        n_particles=4,
    )
    steps = [r.usage.steps_on for r in found]
    assert all("device" in where for where in steps)
    late = "host: a constraint has to be asked about tokens one by one"
    assert block_size == 3 or any(late in where for where in steps)
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


def test_a_stop_string_ends_a_text_within_a_block_and_nothing_behind_it_counts():
    found = runs(300, engine=device, block_size=3, n_particles=4, max_tokens=5, stop=("ba", "c"))
    expected: dict = {}

    def visit(text, p):
        spelt = VOCABULARY.decode(text)
        if "ba" in spelt or "c" in spelt or len(text) == 5:
            expected[text] = p
            return
        row = TARGET.probabilities((*PROMPT, *text))
        expected[text] = p * row[4]
        for v in (0, 1, 2, 3, 5):
            visit((*text, v), p * row[v])

    visit((), 1.0)
    assert_unbiased(found, expected)


@pytest.mark.parametrize(
    "draft",
    [
        FollowingTable(DRAFT.probabilities, VOCABULARY),
        NGramModel(VOCABULARY),
        TableModel(lambda context: np.eye(6)[5], VOCABULARY),  # nothing that LANGUAGE allows
    ],
    ids=["following", "n-gram", "without mass"],
)
def test_every_kind_of_draft_is_unbiased(draft):
    found = runs(250, engine=device, draft=draft, constraint=LANGUAGE, block_size=2, n_particles=4)
    assert sum(r.usage.draft_passes for r in found) > 0
    assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))


@pytest.mark.parametrize("constrained", [False, True])
def test_temperature_zero_is_greedy(constrained):
    (found,) = runs(
        1,
        engine=device,
        constraint=LANGUAGE if constrained else None,
        temperature=0.0,
        n_particles=3,
        max_tokens=4,
    )
    text: tuple = ()
    while len(text) < 4:
        row = TARGET.probabilities((*PROMPT, *text)).copy()
        if constrained:
            state = functools.reduce(
                lambda state, t: state.advance(t) and state,
                text,
                LANGUAGE.compile(VOCABULARY).start(),
            )
            allowed = [*LANGUAGE.compile(VOCABULARY).next.get(text, ()), *([4] * state.accepting)]
            row[np.setdiff1d(np.arange(6), allowed)] = 0
        if row.argmax() == 4:
            break
        text = (*text, int(row.argmax()))
    assert {p.token_ids for p in found.particles} == {text}


def test_a_model_as_its_own_draft_gives_weights_zero():
    for result in runs(20, engine=device, draft=TARGET, block_size=3, n_particles=4):
        assert np.allclose([p.log_weight for p in result.particles], 0, atol=1e-6)


def test_without_a_draft_and_a_constraint_weights_are_exactly_one():
    assert {p.log_weight for r in runs(50, engine=device) for p in r.particles} == {0.0}


def test_a_batch_of_different_prompts_gives_each_its_own_result():
    """Tables, masks of the host and none; ragged prompts, joining late; what each gives alone."""
    prompts = [(0,), (1, 2, 3), (3, 3), (2, 0, 1, 0, 2), (1,)]
    options = [
        dict(block_size=k, n_particles=n, max_tokens=t, ess_threshold=1.0)
        for k, n, t in [(0, 3, 5), (2, 4, 4), (3, 2, 6), (1, 5, 4), (3, 3, 4)]
    ]
    automata = [InTime(c) for c, _ in AUTOMATA.values()]
    for constraints in (
        [None, *automata, None, automata[0]],
        [None, LANGUAGE, automata[0], automata[1], None],
    ):

        def make(i, constraints=constraints):
            return request(
                TARGET, prompts[i], index=i, seed=i, constraint=constraints[i], **options[i]
            )

        def plain(result):
            record = untimed(result)
            for step in record["steps"]:
                # Counted where the host makes the masks, which it does for all prompts or none.
                del step["allowed"], step["accepting"]
            return record

        requests = [make(i) for i in range(5)]
        together = results(run(TARGET, requests, draft=DRAFT, max_rows=8, step_on="device"))
        for i, result in enumerate(together):
            (alone,) = results(run(TARGET, [make(i)], draft=DRAFT, step_on="device"))
            assert plain(result) == plain(alone)


def test_nan_of_either_model_is_an_error_of_its_own_prompt():
    class Breaks(TableModel):
        def probabilities(self, context):
            row = super().probabilities(context).copy()
            return row * np.nan if context[0] == 1 and len(context) > 2 else row

    broken = Breaks(TARGET.probabilities, VOCABULARY, name="broken")
    for target, draft in ((broken, DRAFT), (TARGET, broken)):
        good, bad = (request(TARGET, (g,), index=g, block_size=2, max_tokens=6) for g in (0, 1))
        events = list(run(target, [good, bad], draft=draft, step_on="device"))
        assert [e.index for e in events if isinstance(e, ResultEvent)] == [0]
        (error,) = [e for e in events if isinstance(e, ErrorEvent)]
        assert error.index == 1 and "'broken' gave logits that are NaN" in str(error.error)


def test_padded_ids_are_never_drawn_and_end_tokens_all_count():
    vocabulary = Vocabulary([b"a", b"b", b"", b"", None], eos_ids=[2, 3])
    models = [TableModel.random(vocabulary, seed=seed) for seed in (5, 6)]
    language = Language(lambda t: t.count("a") == 1, 3)
    found = runs(
        300,
        engine=device,
        target=models[0],
        draft=models[1],
        constraint=language,
        block_size=2,
        max_tokens=3,
        n_particles=4,
    )
    assert_unbiased(found, exact(models[0], PROMPT, max_tokens=3, member=language.member))


def test_the_checks_catch_a_mask_whose_normaliser_is_forgotten(monkeypatch):
    real = kernels.sample_masked

    def forgetful(*args):
        token, log_q, log_z = real(*args)
        return token, log_q + log_z, log_z

    monkeypatch.setattr(device_rows.kernels, "sample_masked", forgetful)
    found = runs(300, engine=device, constraint=LANGUAGE, block_size=2, n_particles=4)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(found, exact(TARGET, PROMPT, max_tokens=4, member=member))
