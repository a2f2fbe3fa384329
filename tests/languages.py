"""Walking constraints over bytes and over tokens of several bytes."""

from __future__ import annotations

import random

import numpy as np
import torch

from guided_smc.grammars.matching import every_byte
from guided_smc.potentials import Completion
from guided_smc.vocabulary import Vocabulary

WORDS = [b"ab", b"bc", b"12", b"20", b"-0", b"yes", b"no", b"None", b"\n ", "é".encode()]
WORDS += [b"\xc3\xa9a", b"a\xc3", b"\xf0\x9f", b"12"]  # parts of characters; twice the same
WORDS += [b'{"', b'":', b'": ', b'", "', b'"}', b"true", b"null", b"\n  "]
TOKENS: list[bytes | None] = [bytes([i]) for i in range(256)] + WORDS
# An end token, padding, and a control token that is spelt like an ordinary one.
END, CONTROL = len(TOKENS), len(TOKENS) + 2
VOCABULARY = Vocabulary([*TOKENS, b"", None, b'"', None], eos_ids=[END], special_ids=[CONTROL])
assert len(VOCABULARY) % 32 != 0

INTEGER = {"type": "integer"}


def closed(properties, **more):
    """The schema of an object without further properties."""
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def after(constraint, data, vocabulary=VOCABULARY):
    """The state after bytes given one token each, and whether none was refused."""
    state = constraint.compile(vocabulary).start()
    return state, all(state.advance(byte) for byte in data)


def in_mask(constraint, text):
    """Whether the mask alone lets a text pass."""
    state, viable = after(constraint, text.encode())
    return viable and state.accepting


def dies_at(constraint, text):
    """How much of a text the check has seen when it gives up; None if it accepts the text."""
    check = constraint.check()
    if check is None:
        return None
    for n in range(len(text) + 1):
        if check.log_prefix([Completion("", (), text[:n], False, VOCABULARY)])[0]:
            return n
    return None if check.log_complete([Completion("", (), text, True, VOCABULARY)])[0] == 0 else n


def accepts(constraint, text):
    """Whether the mask and the check let a text pass."""
    return in_mask(constraint, text) and dies_at(constraint, text) is None


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
    words = np.full((len(states), -(-len(vocabulary) // 32)), 7, dtype=np.int32)
    compiled.fill_masks(states, words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    flat = torch.from_numpy(bits).bool()
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


_CLOSING = b"\"')]}>; \n"


def random_members(constraint, seed, count, words="", longest=160):
    """Texts drawn at random from a language: walks over bytes and words, those that ended in time.

    Past a random place they prefer what closes something, and to end.
    """
    pieces = [bytes([i]) for i in range(256)] + [word.encode() for word in words.split("|") if word]
    vocabulary = Vocabulary([*pieces, b""], eos_ids=[len(pieces)])
    weights = [_weight(piece) for piece in pieces]
    rng, compiled, found = random.Random(seed), constraint.compile(vocabulary), set()
    words_of_mask = np.empty((1, -(-len(vocabulary) // 32)), dtype=np.int32)
    check = constraint.check()
    for _ in range(20 * count):
        state, text = compiled.start(), b""
        hurried = rng.randrange(longest // 2)
        while len(text) < longest:
            late = len(text) > hurried
            if state.accepting and rng.random() < (0.5 if late else 0.05):
                break
            compiled.fill_masks([state], words_of_mask)
            bits = np.unpackbits(words_of_mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if not allowed:
                break
            closing = [t for t in allowed if pieces[t] in _CLOSING] if late else []
            pool = closing if closing and rng.random() < 0.7 else allowed
            token = rng.choices(pool, [weights[t] for t in pool])[0]
            assert state.advance(token), (text, pieces[token])
            text += pieces[token]
        if not state.accepting:
            continue
        member = text.decode()
        if check is None or check.log_complete([completion(member)])[0] == 0.0:
            found.add(member)
        if len(found) == count:
            break
    return sorted(found)


def _weight(piece):
    if len(piece) > 1:
        return 3.0
    if piece.isalnum():
        return 0.1
    return 1.0 if piece.decode("latin-1").isprintable() and piece.isascii() else 0.01


def completion(text):
    """A finished text, as potentials are asked about it."""
    tokens = tuple(text.encode())
    return Completion("", tokens, text, finished=True, vocabulary=every_byte())


def is_member(constraint, text):
    """Whether a text is in the language, and passes what the mask cannot say."""
    check = constraint.check()
    passes = check is None or check.log_complete([completion(text)])[0] == 0.0
    return accepts(constraint, text) and passes
