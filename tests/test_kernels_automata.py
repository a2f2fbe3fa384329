"""Automata on the device against the constraints' own states: the same masks, the same steps.

By the torch references, and by the kernels in Triton's interpreter.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from kernel_cases import automaton_case

from guided_smc.grammars import choice, regex
from guided_smc.grammars.finishing import within
from guided_smc.kernels.automata import (
    FAR,
    DeviceAutomaton,
    automaton_masks,
    automaton_masks_reference,
    automaton_step,
    automaton_step_reference,
)
from guided_smc.vocabulary import Vocabulary

WORDS = ["a", "b", "c", "1", "2", "12", "ab", "abc", "-", " ", "é", "00", "cat", "dog", "do", "t"]


@cache
def vocabulary(width: int = 77) -> Vocabulary:
    """Words, all bytes of them, an end token with a text of its own, and padding."""
    tokens: list[bytes | None] = [w.encode() for w in WORDS]
    tokens += [bytes([b]) for b in sorted(set("".join(WORDS).encode()))]
    tokens += [b"</s>", b"<|end|>", b"<tool>"]
    eos = [len(tokens) - 3, len(tokens) - 2]
    special = [*eos, len(tokens) - 1]
    tokens += [None] * (width - len(tokens))
    return Vocabulary(tokens, eos_ids=eos, special_ids=special)


CONSTRAINTS = {
    "number": lambda: regex(r"-?[12]{1,3}(\.00)?"),
    "words": lambda: regex(r"(cat|dog|é)( (cat|dog|do)){0,4}"),
    "choice": lambda: choice(["cat", "cat dog", "do", "dog", "é", "abc"]),
    "empty": lambda: regex(r"(ab)*"),
}


def tables(name: str) -> DeviceAutomaton:
    words = vocabulary()
    compiled, _ = within(CONSTRAINTS[name](), words, 7)
    automaton = compiled.tables
    return DeviceAutomaton.of(
        automaton.transitions, automaton.accepting, automaton.distances, words.eos_ids
    )


def engine_mask(compiled, state, words: Vocabulary, at_cap: bool) -> np.ndarray:
    """What the engine lets a state draw, bool `[V]`."""
    bits = np.zeros((1, -(-len(words) // 32)), dtype=np.int32)
    compiled.fill_masks([state], bits)
    mask = unpacked(torch.from_numpy(bits), len(words))[0] & words.ordinary
    if at_cap:
        mask[:] = False
    mask[list(words.eos_ids)] = state.accepting
    return mask


def unpacked(bitmask: torch.Tensor, width: int) -> np.ndarray:
    bits = bitmask.numpy().view(np.uint8)
    return np.unpackbits(bits, axis=-1, count=width, bitorder="little").astype(bool)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_and_steps_are_those_of_the_constraint_up_to_the_length_cap(name):
    words, own = vocabulary(), tables(name)
    rng = np.random.default_rng(0)
    n_rows, max_tokens = 12, 7
    compiled, _ = within(CONSTRAINTS[name](), words, max_tokens)
    states = [compiled.start() for _ in range(n_rows)]
    state = torch.zeros(n_rows, dtype=torch.int32)
    ended = np.zeros(n_rows, dtype=bool)
    for t in range(max_tokens + 1):
        left = torch.full((n_rows,), max_tokens - t, dtype=torch.int32)
        found = unpacked(own.masks(state, left), len(words))
        token = np.full(n_rows, -1)
        for r in np.flatnonzero(~ended):
            expected = engine_mask(compiled, states[r], words, at_cap=t == max_tokens)
            assert found[r].tolist() == expected.tolist()
            assert expected.any()  # refused in time: no particle gets stuck
            token[r] = rng.choice(np.flatnonzero(expected))
            if token[r] in words.eos_ids:
                ended[r] = True
            else:
                assert states[r].advance(int(token[r]))
        state = own.step(state, torch.from_numpy(token))
    assert ended.all()


def test_without_a_cap_the_mask_is_that_of_the_bare_constraint():
    words, own = vocabulary(), tables("words")
    compiled = CONSTRAINTS["words"]().compile(words)
    states = [compiled.start() for _ in range(3)]
    texts: list[list[int]] = [[], [words.tokens.index(b"cat")], [words.tokens.index(b"d")]]
    for state, text in zip(states, texts, strict=True):
        for token in text:
            assert state.advance(token)
    numbers = torch.tensor([own.after(0, text) for text in texts], dtype=torch.int32)
    found = unpacked(own.masks(numbers, torch.full((3,), FAR, dtype=torch.int32)), len(words))
    for row, state in zip(found, states, strict=True):
        assert row.tolist() == engine_mask(compiled, state, words, at_cap=False).tolist()


def test_a_refused_token_leads_where_nothing_is_allowed():
    words, own = vocabulary(), tables("number")
    dog, padding = words.tokens.index(b"dog"), len(words) - 1
    state = own.step(torch.zeros(2, dtype=torch.int32), torch.tensor([dog, padding]))
    assert own.masks(state, torch.full((2,), FAR, dtype=torch.int32)).tolist() == [[0] * 3] * 2
    assert own.step(state, torch.tensor([0, words.eos_ids[0]])).tolist() == state.tolist()


def test_constraints_and_rows_without_one_share_a_batch():
    words = vocabulary()
    real = torch.from_numpy(words.real)
    parts = [tables(name) for name in CONSTRAINTS]
    parts.append(DeviceAutomaton.free(real, words.eos_ids))
    joined = DeviceAutomaton.joined(parts)
    rng = np.random.default_rng(0)
    state = torch.tensor(joined.starts, dtype=torch.int32)
    alone = [torch.zeros(1, dtype=torch.int32) for _ in parts]
    left = torch.full((len(parts),), 9, dtype=torch.int32)
    for _ in range(6):
        masks = joined.masks(state, left)
        for row, part, own in zip(masks, parts, alone, strict=True):
            assert row.tolist() == part.masks(own, left[:1])[0].tolist()
        assert unpacked(masks[-1:], len(words))[0].tolist() == real.tolist()
        token = torch.tensor([rng.choice(np.flatnonzero(m)) for m in unpacked(masks, len(words))])
        state = joined.step(state, token)
        drawn = token.split(1)
        alone = [p.step(s, t) for p, s, t in zip(parts, alone, drawn, strict=True)]


def test_tokens_that_are_alike_share_a_column():
    words = vocabulary()
    automaton = CONSTRAINTS["number"]().automaton(words)
    own = tables("number")
    assert own.following.shape[1] < 12 < automaton.transitions.shape[1]
    states = np.arange(len(automaton.transitions))
    expected = automaton.transitions.numpy()
    columns = own.following.numpy()[:-1, own.classes[0].numpy()]
    columns[columns == len(states)] = -1
    plain = [v for v in range(len(words)) if v not in words.eos_ids]
    assert (columns[:, plain] == expected[:, plain]).all()


@pytest.mark.parametrize("width", [1, 32, 97, 4099])
def test_the_kernels_give_what_the_references_give(width, interpreted):
    mask, step = automaton_case(width, 11, width)
    (_, _, classes, reach, owner), (_, token, _, following, _) = mask, step
    assert torch.equal(interpreted(automaton_masks, *mask), automaton_masks_reference(*mask))
    assert torch.equal(interpreted(automaton_step, *step), automaton_step_reference(*step))
    none = torch.zeros(0, dtype=torch.int32)
    masks = interpreted(automaton_masks, none, none, classes, reach, owner)
    assert masks.shape == (0, -(-width // 32))
    assert interpreted(automaton_step, none, token[:0], classes, following, owner).shape == (0,)


@pytest.mark.parametrize("name", ["number", "choice"])
def test_the_kernels_follow_a_constraint_as_the_references_do(name, interpreted):
    own = tables(name)
    # A view, not laid out row by row, as a caller may have it.
    reach = own.reach.T.contiguous().T
    state = torch.arange(len(own.owner), dtype=torch.int32)
    for left in (0, 1, 2, FAR):
        room = torch.full_like(state, left)
        found = interpreted(automaton_masks, state, room, own.classes, reach, own.owner)
        assert torch.equal(found, own.masks(state, room))
