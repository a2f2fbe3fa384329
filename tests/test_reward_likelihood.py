"""Likelihoods under other models and prompts, against tables and plain forward passes."""

import functools
import math

import numpy as np
import pytest
import torch
from exactness import assert_unbiased, member
from support import VOCABULARY, Language, exact, request, results
from test_exact_transformers import tiny

import guided_smc
from guided_smc.engine import Engine
from guided_smc.errors import ModelError, OptionError, PotentialError
from guided_smc.models.table import TableModel
from guided_smc.potentials import Completion
from guided_smc.rewards import language_model
from guided_smc.rewards.likelihood import PrefixReader
from guided_smc.vocabulary import Vocabulary

PROMPT = (0, 3)
EXPERT = TableModel.random(VOCABULARY, seed=5, eos_probability=0.3)
AMATEUR = TableModel.random(VOCABULARY, seed=6, eos_probability=0.2)
TARGET = TableModel.random(VOCABULARY, seed=11, eos_probability=0.2)


def lm(model):
    return guided_smc.LM(model, encoder=None if isinstance(model, TableModel) else EXPERT)


def given(ids, *, finished=True, prompt=PROMPT, max_tokens=None, vocabulary=VOCABULARY):
    ids = tuple(ids)
    text = vocabulary.decode(ids)
    return Completion(prompt, ids, text, finished, vocabulary, max_tokens=max_tokens)


def table_log_p(table, prompt, ids, *, end):
    total, context = 0.0, tuple(prompt)
    for token in ids:
        total += math.log(table.probabilities(context)[token])
        context += (token,)
    return total + (math.log(table.probabilities(context)[4]) if end else 0.0)


TEXTS = [(), (0,), (0, 1), (0, 1, 2), (2, 2), (0, 1, 2, 3, 0, 1)]


def test_it_is_the_log_probability_of_the_tokens_and_of_the_end():
    r = language_model(lm(EXPERT))
    expected = [table_log_p(EXPERT, PROMPT, ids, end=True) for ids in TEXTS]
    assert r.rewards([given(ids) for ids in TEXTS]) == pytest.approx(expected, abs=1e-5)
    expected = [table_log_p(EXPERT, PROMPT, ids, end=False) for ids in TEXTS]
    begun = [given(ids, finished=False) for ids in TEXTS]
    assert r.prefix_rewards(begun) == pytest.approx(expected, abs=1e-5)
    assert r.on == "step"


def test_the_end_counts_if_asked_and_if_the_text_was_not_cut():
    ids = (0, 1)
    one = language_model(lm(EXPERT))
    with_end = table_log_p(EXPERT, PROMPT, ids, end=True)
    without = table_log_p(EXPERT, PROMPT, ids, end=False)
    for settings, max_tokens, expected in (
        ({}, None, with_end),
        ({}, 3, with_end),
        ({}, 2, without),
        ({"end": False}, 3, without),
    ):
        r = language_model(lm(EXPERT), **settings) if settings else one
        assert r.rewards([given(ids, max_tokens=max_tokens)]) == pytest.approx([expected], abs=1e-5)


def test_the_text_may_go_on_from_another_prompt():
    ids, other = (0, 1), (2, 2, 1)
    expected = [table_log_p(EXPERT, other, ids, end=True)]
    for prompt in (
        "ccb",
        lambda prompt: list(other),
        lambda prompt: other if prompt == PROMPT else 1,
    ):
        r = language_model(lm(EXPERT), prompt=prompt)
        assert r.rewards([given(ids)]) == pytest.approx(expected, abs=1e-5)


def test_weights_and_means_over_tokens():
    ids = (0, 1, 2)
    total = table_log_p(EXPERT, PROMPT, ids, end=True)
    begun = table_log_p(EXPERT, PROMPT, ids, end=False)
    r = language_model(lm(EXPERT), per_token=True, weight=-2)
    assert r.rewards([given(ids)]) == pytest.approx([-2 * total / 4], abs=1e-5)
    assert r.prefix_rewards([given(ids, finished=False)]) == pytest.approx(
        [-2 * begun / 3], abs=1e-5
    )
    assert r.prefix_rewards([given((), finished=False)]) == [0.0]


def test_what_cannot_be_has_minus_infinity():
    never_a = TableModel(lambda context: [0, 0.5, 0, 0, 0.5, 0], VOCABULARY)
    r = language_model(lm(never_a))
    assert r.rewards([given((0,)), given((1,))]) == [-math.inf, pytest.approx(2 * math.log(0.5))]
    assert r.log_prefix([given((0,), finished=False)]) == [-math.inf]
    with pytest.raises(PotentialError, match="infinite"):
        (-r).log_complete([given((0,))])


OTHER = Vocabulary([b"ab", b"a", b"b", b"c", b"d", b""], eos_ids=[5])


def test_a_model_with_other_tokens_reads_the_text():
    table = TableModel.random(OTHER, seed=3)
    r = language_model(lm(table))
    # "dabb" is d, ab, b there; the prompt (0, 3) is "ad", that is a, d.
    context, total = (1, 4), 0.0
    for token in (4, 0, 2, 5):
        total += math.log(table.probabilities(context)[token])
        context += (token,)
    assert r.rewards([given((3, 0, 1, 1))]) == pytest.approx([total], abs=1e-5)
    assert r.prefix_rewards([given((), finished=False)]) == [0.0]


# -- what is kept ----------------------------------------------------------------------------


def grown(rng, texts, n):
    """As a run would have it: some texts go on, some twice, some not at all."""
    parents = [texts[i] for i in rng.integers(0, len(texts), n)]
    return [(*p, *rng.integers(0, 4, rng.integers(0, 4)).tolist()) for p in parents]


@functools.cache
def llama():
    return tiny()


def plain_log_p(model, prompt, ids, *, end):
    tokens = torch.tensor([[*prompt, *ids]])
    session = model.start_session()
    session.prefill([()], [1])
    logits = session.extend(tokens, torch.tensor([tokens.shape[1]]), last_only=False)[0].double()
    log_p = logits.log_softmax(-1)[len(prompt) - 1 :]
    total = sum(float(log_p[i, token]) for i, token in enumerate(ids))
    return total + (float(log_p[len(ids), 4]) if end else 0.0)


@pytest.mark.parametrize("kind", ["table", "llama"])
def test_texts_that_grow_by_chance_have_the_values_of_a_fresh_reading(kind):
    model = EXPERT if kind == "table" else llama()
    reader = PrefixReader(model, PROMPT)
    rng = np.random.default_rng(0)
    texts = [()] * 6
    for step in range(12):
        texts = grown(rng, texts, 6) if step != 6 else grown(rng, [(), (1, 1)], 6)
        asked = [(t, False) for t in texts]
        if step % 3 == 2:
            # As the engine does: first those that go on, then those that have ended.
            found = reader.log_p(asked[:4]) + reader.log_p([(t, True) for t in texts[4:]])
            ends = [False] * 4 + [True] * 2
        else:
            found, ends = reader.log_p(asked), [False] * 6
        for text, end, value in zip(texts, ends, found, strict=True):
            if kind == "table":
                expected = table_log_p(EXPERT, PROMPT, text, end=end)
            else:
                expected = plain_log_p(model, PROMPT, text, end=end)
            assert value == pytest.approx(expected, abs=1e-4), (step, text)
        texts = texts[:4]


def test_a_text_that_grows_costs_its_new_tokens():
    reader = PrefixReader(llama(), (0, 3, 1, 0, 3))
    reader.log_p([((0, 1), False), ((2, 2), False)])
    assert reader.fed == 4 + 2 * 2  # all of the prompt but its last token, then two for each
    reader.log_p([((0, 1, 3), False), ((0, 1, 0, 0), False), ((2, 2), False)])
    assert reader.fed == 8 + 1 + 2 + 0
    # One that was left out of a call is still there in the next.
    reader.log_p([((0, 1, 3, 1), False)])
    reader.log_p([((0, 1, 0, 0), True)])
    assert reader.fed == 11 + 1 + 1
    # And then it is not.
    reader.log_p([((0, 1, 0, 0, 1), False)])
    assert reader.fed == 13 + 4 + 5


def test_nothing_is_kept_of_texts_that_have_all_ended():
    reader = PrefixReader(llama(), PROMPT)
    reader.log_p([((0, 1), False), ((2, 2), False)])
    reader.log_p([((0, 1, 1), True), ((2, 2, 3), True)])
    assert reader._session is None


def test_long_texts_are_read_in_pieces():
    ids = tuple(int(i) for i in np.random.default_rng(1).integers(0, 4, 50))
    found = PrefixReader(llama(), PROMPT).log_p([(ids, True), (ids[:33], False)])
    expected = [
        plain_log_p(llama(), PROMPT, ids, end=True),
        plain_log_p(llama(), PROMPT, ids[:33], end=False),
    ]
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_session_that_cannot_be_ragged_is_read_anew(monkeypatch):
    from guided_smc.models.groups import GroupSession

    model = llama()
    model.model.set_attn_implementation("eager")
    monkeypatch.setattr(type(model), "start_session", lambda self: GroupSession(self))
    monkeypatch.setattr(model, "_traced", None)
    try:
        reader = PrefixReader(model, PROMPT)
        first = reader.log_p([((0, 1), False), ((2, 2, 1, 1), True), ((3,), False)])
        second = reader.log_p([((0, 1, 2), False)])
    finally:
        model.model.set_attn_implementation("guided_smc_particles")
        monkeypatch.undo()
    texts = [((0, 1), False), ((2, 2, 1, 1), True), ((3,), False), ((0, 1, 2), False)]
    expected = [plain_log_p(model, PROMPT, ids, end=end) for ids, end in texts]
    assert first + second == pytest.approx(expected, abs=1e-4)


def test_prompts_are_kept_apart_and_the_oldest_forgotten():
    r = language_model(lm(EXPERT))
    prompts = [(i % 4, i // 4 % 4, i // 16) for i in range(20)]
    for _ in range(2):
        for prompt in prompts:
            expected = table_log_p(EXPERT, prompt, (1, 2), end=True)
            found = r.rewards([given((1, 2), prompt=prompt)])
            assert found == pytest.approx([expected], abs=1e-5)
    assert len(r._readers) == 16


def test_an_interrupted_reading_leaves_nothing_behind(monkeypatch):
    r = language_model(lm(llama()))
    r.prefix_rewards([given((0,), finished=False)])

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(llama()), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            r.prefix_rewards([given((0, 1), finished=False)])
    expected = plain_log_p(llama(), PROMPT, (0, 1, 2), end=False)
    assert r.prefix_rewards([given((0, 1, 2), finished=False)]) == pytest.approx(
        [expected], abs=1e-4
    )


def test_out_of_memory_says_what_to_do(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(type(llama()), "forward", full)
    with pytest.raises(PotentialError, match="ran out of memory with 1 texts"):
        language_model(lm(llama())).rewards([given((0,))])


def test_what_is_longer_than_the_context_is_an_error():
    with pytest.raises(PotentialError, match=r"2 tokens of prompt and 63 of text.*64"):
        language_model(lm(llama())).rewards([given((1,) * 63)])


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: language_model(EXPERT), OptionError),
        (lambda: language_model(3), OptionError),
        (lambda: language_model("./nowhere"), ModelError),
        (lambda: language_model(lm(EXPERT), prompt=3), OptionError),
        (lambda: language_model(lm(EXPERT), weight=math.inf), OptionError),
        (lambda: language_model(lm(EXPERT), on="never"), OptionError),
    ],
)
def test_arguments_that_cannot_be_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_a_prompt_that_the_model_cannot_read_is_an_error_with_the_reason():
    r = language_model(lm(EXPERT), prompt="xyz")
    with pytest.raises(PotentialError, match=r"PromptError.*no token"):
        r.rewards([given((0,))])


def test_under_the_model_that_generates_it_is_what_the_run_itself_has_added_up():
    """Also of texts that are cut at the length cap, and while texts grow."""
    for model in (TARGET, llama()):
        made = language_model(lm(model), beta=0.3, name="own")
        request_ = request(model, PROMPT, seed=1, max_tokens=5, n_particles=8, potentials=[made])
        engine = Engine(model, None, max_rows=10**6)
        engine.add(request_)
        events = []
        while engine.busy:
            events += engine.step()
        (result,) = results(events)
        assert {p.finish_reason for p in result.particles} == {"stop", "length"}
        for particle in result.particles:
            assert particle.rewards["own"] == pytest.approx(particle.log_p, abs=1e-4)


# -- the posterior ---------------------------------------------------------------------------


SHORT = Language(member, 3)
BETA = 0.7


def contrast(text: str) -> float:
    ids = ["abcd".index(letter) for letter in text]
    return BETA * (
        table_log_p(EXPERT, PROMPT, ids, end=True) - table_log_p(AMATEUR, PROMPT, ids, end=True)
    )


@pytest.mark.parametrize("on", ["step", "end"])
def test_the_contrastive_posterior_equals_enumeration(on):
    reward = (language_model(lm(EXPERT)) - language_model(lm(AMATEUR))).with_(beta=BETA, on=on)
    engine = Engine(TARGET, None, max_rows=10**6)
    compiled = SHORT.compile(VOCABULARY)
    for i in range(400):
        r = request(
            TARGET, PROMPT, index=i, seed=i, max_tokens=4, n_particles=4, potentials=[reward]
        )
        r.constraint = compiled
        engine.add(r)
    events = []
    while engine.busy:
        events += engine.step()
    expected = exact(TARGET, PROMPT, max_tokens=4, member=SHORT.member, score=contrast)
    longest = {t: p for t, p in expected.items() if len(t) <= 3}
    assert_unbiased(results(events), longest)
