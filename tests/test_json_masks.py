"""Masks and states of a JSON Schema constraint, token by token."""

import gc
import json
import random
import weakref

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from languages import CONTROL, END, INTEGER, VOCABULARY, WORDS, accepts, after, closed, masks

from guided_smc.grammars import json_schema
from guided_smc.potentials import Completion
from guided_smc.vocabulary import Vocabulary


def walk(constraint, draw, longest=200):
    """A random walk through the masks: the token ids, or None if it did not end in time."""
    state, tokens = constraint.compile(VOCABULARY).start(), []
    closing = [ord(c) for c in '"}]'] + [256 + WORDS.index(b'"}')]
    while len(tokens) < longest:
        allowed = masks(constraint, [state])[0].nonzero().flatten().tolist()
        if state.accepting and (not allowed or draw.random() < 0.5):
            return tokens
        assert allowed, f"nothing to say after {VOCABULARY.decode(tokens)!r}"
        ends = [t for t in allowed if t in closing]
        ascii_only = [t for t in allowed if 32 <= t < 127 or t >= 256]
        tokens.append(draw.choice(ends if ends and draw.random() < 0.4 else ascii_only or allowed))
        assert state.advance(tokens[-1])
    return None


def is_valid(schema, value):
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value)


WALKED = {
    "object": closed(
        {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 150},
         "tags": {"type": "array", "items": {"enum": ["a", "b\u00e9"]}, "maxItems": 3}},
        required=["name", "tags"],
    ),
    "open": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"],
             "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "recursive": {"$ref": "#/$defs/tree", "$defs": {"tree": {"anyOf": [
        {"type": "null"}, closed({"v": INTEGER, "left": {"$ref": "#/$defs/tree"}}, required=["v"])
    ]}}},
    "tagged": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
        "a": closed({"t": {"const": "a"}, "d": {"type": "string", "format": "date"}},
                    required=["t", "d"]),
        "b": closed({"t": {"const": "b"}, "n": {"type": "number", "minimum": -1, "maximum": 1}},
                    required=["t", "n"])}},
    "anything": {"type": ["object", "array", "number", "string"]},
}  # fmt: skip


CONSTRAINTS = {name: json_schema(schema) for name, schema in WALKED.items()}


each_walk = given(name=st.sampled_from(sorted(WALKED)), seed=st.integers(0, 2**32))


@settings(max_examples=60, deadline=None)
@each_walk
def test_a_walk_through_the_masks_ends_in_valid_json(name, seed):
    tokens = walk(CONSTRAINTS[name], random.Random(seed))
    if tokens is not None:
        text = VOCABULARY.decode_bytes(tokens).decode("utf-8")
        assert is_valid(WALKED[name], json.loads(text)), text


@settings(max_examples=40, deadline=None)
@each_walk
def test_a_mask_holds_exactly_the_tokens_that_can_be_taken(name, seed):
    draw = random.Random(seed)
    constraint = CONSTRAINTS[name]
    tokens = walk(constraint, draw) or []
    state, _ = after(constraint, tokens[: draw.randint(0, len(tokens))])
    taken = [state.fork().advance(token) for token in range(len(VOCABULARY))]
    assert masks(constraint, [state])[0].tolist() == taken


@settings(max_examples=40, deadline=None)
@each_walk
def test_a_fork_equals_a_fresh_replay_and_leaves_its_origin_alone(name, seed):
    draw = random.Random(seed)
    constraint = CONSTRAINTS[name]
    tokens = walk(constraint, draw) or []
    cut = draw.randint(0, len(tokens))
    origin, _ = after(constraint, tokens[:cut])
    before = masks(constraint, [origin]), origin.accepting
    fork = origin.fork()
    assert all(fork.advance(token) for token in tokens[cut:])
    replay, _ = after(constraint, tokens)
    assert fork.accepting == replay.accepting
    assert torch.equal(*masks(constraint, [fork, replay]).unbind())
    assert torch.equal(masks(constraint, [origin]), before[0])
    assert origin.accepting == before[1]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(WALKED)),
    seed=st.integers(0, 2**32),
    noise=st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=3),
)
def test_a_prefix_of_weight_zero_has_only_extensions_of_weight_zero(name, seed, noise):
    draw = random.Random(seed)
    constraint = CONSTRAINTS[name]
    tokens = walk(constraint, draw) or []
    cut = draw.randint(0, len(tokens))
    tokens = tokens[:cut] + noise + tokens[cut:]
    texts = [
        Completion("", tuple(tokens[:n]), VOCABULARY.decode(tokens[:n]), False, VOCABULARY)
        for n in range(len(tokens) + 1)
    ]
    prefix, complete = constraint.log_prefix(texts), constraint.log_complete(texts)
    assert set(prefix) | set(complete) <= {0.0, -float("inf")}
    assert list(prefix) == sorted(prefix, reverse=True)
    assert all(whole <= part for whole, part in zip(complete, prefix, strict=True))


def test_forced_text_may_be_split_into_tokens_in_every_way():
    constraint = json_schema({"const": "true"})
    state, _ = after(constraint, b'"')
    allowed = {VOCABULARY.tokens[i] for i in masks(constraint, [state])[0].nonzero()}
    assert allowed == {b"t", b"true", b"\\"}  # "\\u0074rue" is another spelling


def test_equal_tokens_are_all_allowed():
    allowed = masks(json_schema({"const": 12}), [after(json_schema({"const": 12}), b"")[0]])[0]
    assert [i for i, t in enumerate(VOCABULARY.tokens) if t == b"12"] == [
        i for i in allowed.nonzero().flatten().tolist() if i >= 256
    ]


def test_no_mask_holds_special_or_padded_ids_even_inside_a_string():
    constraint = json_schema({"type": "string"})
    state, _ = after(constraint, b'"ab')
    mask = masks(constraint, [state])[0]
    assert mask[ord("x")] and mask[ord('"')]
    assert not mask[torch.from_numpy(~VOCABULARY.ordinary)].any()
    for token in (END, CONTROL, CONTROL + 1, len(VOCABULARY), -1):
        assert not state.fork().advance(token)


def test_a_refused_token_kills_the_state_and_not_the_forks_made_before():
    constraint = json_schema({"type": "integer"})
    state, _ = after(constraint, b"1")
    fork = state.fork()
    assert not state.advance(ord("x"))
    assert not state.accepting and not state.advance(ord("2")) and state.forced() == []
    assert not state.fork().accepting
    assert not masks(constraint, [state]).any()
    assert fork.accepting and fork.advance(ord("2"))


def test_a_complete_text_has_an_empty_mask_and_is_accepting():
    constraint = json_schema({"type": "object"})
    done, _ = after(constraint, b"{}")
    half, _ = after(constraint, b"{")
    rows = masks(constraint, [done, half, done])
    assert done.accepting and done.forced() == []
    assert rows.any(1).tolist() == [False, True, False]
    assert not done.advance(ord(" "))


def test_forced_tokens_are_those_without_an_alternative():
    tiny = Vocabulary([b"", *(bytes([c]) for c in b'"abc1')], eos_ids=[0])
    state = json_schema({"enum": ["abca", "abcb"]}).compile(tiny).start()
    assert tiny.decode(state.forced()) == '"abc'
    assert all(state.advance(token) for token in state.forced())
    assert state.forced() == []
    assert state.advance(2) and tiny.decode(state.forced()) == '"'
    number = json_schema({"enum": [1, 11]}).compile(tiny).start()
    assert tiny.decode(number.forced()) == "1"
    assert not number.accepting


def test_a_vocabulary_of_five_tokens_works_and_its_dead_ends_are_empty_masks():
    tiny = Vocabulary([b"", b"0", b"1", b"{", b"}"], eos_ids=[0])
    constraint = json_schema({"enum": [0, 10, 1002]})
    state = constraint.compile(tiny).start()
    assert masks(constraint, [state], tiny)[0].tolist() == [False, True, True, False, False]
    assert all(state.advance(token) for token in (2, 1, 1))
    assert not state.accepting
    assert not masks(constraint, [state], tiny).any()
    assert not state.advance(1) and not state.fork().advance(2)


def test_rows_of_a_strided_bitmask_are_filled():
    constraint = json_schema({"type": "integer"})
    states = [after(constraint, text)[0] for text in (b"", b"-", b"3")]
    words = -(-len(VOCABULARY) // 32)
    wide = np.full((3, 2 * words), -1, dtype=np.int32)
    constraint.compile(VOCABULARY).fill_masks(states, wide[:, ::2])
    plain = np.empty((3, words), dtype=np.int32)
    constraint.compile(VOCABULARY).fill_masks(states, plain)
    assert np.array_equal(wide[:, ::2], plain)
    assert (wide[:, 1::2] == -1).all()
    with pytest.raises(ValueError, match="shape"):
        constraint.compile(VOCABULARY).fill_masks(states, plain[:2])


def test_a_constraint_is_compiled_once_for_a_vocabulary_and_does_not_keep_it_alive():
    constraint = json_schema(INTEGER)
    vocabulary = Vocabulary([bytes([i]) for i in range(256)] + [b""], eos_ids=[256])
    compiled = constraint.compile(vocabulary)
    assert constraint.compile(vocabulary) is compiled
    assert json_schema({}).compile(vocabulary).tokens is compiled.tokens
    alive = weakref.ref(vocabulary)
    del vocabulary, compiled
    gc.collect()
    assert alive() is None


def test_a_pattern_that_looks_ahead_keeps_the_mask_of_its_regular_parts():
    constraint = json_schema({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4,8}$"})
    assert [relaxed.keyword for relaxed in constraint.relaxed] == ["pattern"]
    state, viable = after(constraint, b'"ab')
    mask = masks(constraint, [state])[0]
    assert viable and mask[ord("1")] and not mask[ord("A")] and not mask[ord('"')]
    assert accepts(constraint, '"abc1"')
    assert not accepts(constraint, '"abcd"') and not accepts(constraint, '"abcdefgh1"')
    found = json_schema({"type": "string", "pattern": "a(?!b)"})  # anywhere in the text
    assert accepts(found, '"xxay"') and not accepts(found, '"xxab"')
