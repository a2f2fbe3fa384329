"""Walking constraints over bytes and over tokens of several bytes."""

from __future__ import annotations

import torch

from guided_smc.vocabulary import Vocabulary

WORDS = [b"ab", b"bc", b"12", b"20", b"-0", b"yes", b"no", b"None", b"\n ", "é".encode()]
WORDS += [b"\xc3\xa9a", b"a\xc3", b"\xf0\x9f", b"12"]  # parts of characters; twice the same
TOKENS: list[bytes | None] = [bytes([i]) for i in range(256)] + WORDS
END, CONTROL = len(TOKENS), len(TOKENS) + 1
VOCABULARY = Vocabulary([*TOKENS, b"", b"<x>", None], eos_ids=[END], special_ids=[CONTROL])


def after(constraint, data, vocabulary=VOCABULARY):
    """The state after bytes given one token each, and whether none was refused."""
    state = constraint.compile(vocabulary).start()
    return state, all(state.advance(byte) for byte in data)


def accepts(constraint, text):
    state, viable = after(constraint, text.encode())
    return viable and state.accepting


def begins(constraint, text):
    """Whether some member of the language begins with the text, and the mask says so too."""
    data = text.encode()
    state = constraint.compile(VOCABULARY).start()
    for byte in data:
        allowed = bool(masks(constraint, [state])[0][byte])
        assert state.advance(byte) == allowed
        if not allowed:
            return False
    return True


def masks(constraint, states, vocabulary=VOCABULARY):
    """Bool [n, V]."""
    return masks_of(constraint.compile(vocabulary), states, vocabulary)


def masks_of(compiled, states, vocabulary=VOCABULARY):
    """Bool [n, V]."""
    words = torch.full((len(states), -(-len(vocabulary) // 32)), 7, dtype=torch.int32)
    compiled.fill_masks(states, words)
    bits = (words[:, :, None] >> torch.arange(32)) & 1
    flat = bits.reshape(len(states), -1).bool()
    assert not flat[:, len(vocabulary) :].any()
    return flat[:, : len(vocabulary)]


def check_masks(constraint, draw, steps=40):
    """A random walk along which every mask holds exactly the tokens that can be taken.

    Returns the bytes if the walk ended in a member, else None.
    """
    state, tokens = constraint.compile(VOCABULARY).start(), []
    for _ in range(steps):
        mask = masks(constraint, [state])[0]
        assert mask.tolist() == [state.fork().advance(t) for t in range(len(VOCABULARY))]
        allowed = mask.nonzero().flatten().tolist()
        assert allowed or state.accepting, VOCABULARY.decode_bytes(tokens)
        if not allowed or (state.accepting and draw.random() < 0.3):
            return VOCABULARY.decode_bytes(tokens)
        tokens.append(draw.choice(allowed))
        assert state.advance(tokens[-1])
    return None
