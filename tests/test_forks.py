"""States fork anywhere: walks with forks at random places equal a fresh replay of their tokens.

In the middle of characters too, for every kind of constraint, over single bytes and over tokens of
several characters and of parts of them; refused tokens and texts that are complete included.
"""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from languages import VOCABULARY, masks

from guided_smc.grammars import LarkText, PartialRegex, choice, json_schema, lark, predicate, regex
from guided_smc.grammars.matching import every_byte
from guided_smc.potentials import Completion, Unmasked

VOCABULARIES = {"bytes": every_byte(), "pieces": VOCABULARY}

RELAXED = {
    "type": "object",
    "properties": {
        "é": {"type": "array", "items": {"type": "string", "maxLength": 2}, "uniqueItems": True},
        "n": {"type": "integer", "not": {"multipleOf": 2}},
    },
    "required": ["é"],
    "propertyNames": {"maxLength": 2},
    "additionalProperties": {"enum": [None, "日本", "é", 12]},
    "maxProperties": 3,
}
SENTENCES = """
    start: NAME? "=" (NAME | "[" [NAME ("," NAME)*] "]") ";"?
    NAME: /[abé日本]+/
    %ignore " "
"""
KINDS = {
    "json": lambda: json_schema(RELAXED, whitespace="line"),
    "regex": lambda: regex("(é|日本?|[a-c]{2,4}😀)+|-?[0-9]+"),
    "lark": lambda: lark('start: (word " "?)+ "."\nword: /[aé]+/ | "日本" | "(" word ")"'),
    "choice": lambda: choice(["é", "éa", "日本", "日", "a😀", "a😁", "-1", "12"]),
    "partial regex": lambda: PartialRegex(r"(é|ab|日)c?\1(?!a).{0,3}"),
    "lark text": lambda: LarkText(SENTENCES),
    "predicate": lambda: predicate(
        lambda text: len(text) <= 5 and "aa" not in text, lambda text: len(text) % 2 == 1
    ),
    "intersection": lambda: regex("[abé日]*") & choice(["é", "éa", "日b", "日本"]),
    "intersection without masks": lambda: (
        regex("[aé日]{1,4}") & predicate(lambda text: text == text.lower() and "éé" not in text)
    ),
}
CONSTRAINTS = {name: make() for name, make in KINDS.items()}


class Walker:
    """A state, the tokens that led there, and whether none was refused."""

    def __init__(self, state, tokens=(), alive=True):
        self.state, self.tokens, self.alive = state, tokens, alive

    def fork(self):
        return Walker(self.state.fork(), self.tokens, self.alive)

    def take(self, token):
        self.tokens = (*self.tokens, token)
        self.alive = self.state.advance(token)


def allowed(constraint, vocabulary, state):
    """Ordinary tokens that the mask lets pass and, where it says too little, that are viable."""
    grammar = constraint.compile(vocabulary)
    words = np.empty((1, -(-len(vocabulary) // 32)), dtype=np.int32)
    grammar.fill_masks([state], words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(vocabulary)]
    tokens = np.flatnonzero(bits.astype(bool) & vocabulary.ordinary).tolist()
    if isinstance(grammar, Unmasked):
        return [token for token in tokens if grammar.viable(state, token)]
    return tokens


def checked(constraint, vocabulary, walker):
    """What the constraint's check says of a text."""
    check = constraint.check()
    if check is None:
        return None
    text = vocabulary.decode(walker.tokens)
    asked = [Completion("", walker.tokens, text, False, vocabulary)]
    return check.log_prefix(asked), check.log_complete(asked)


def looks(constraint, vocabulary, walker):
    """All that can be asked of a state and the text that led there."""
    return {
        "alive": walker.alive,
        "accepting": walker.state.accepting,
        "allowed": allowed(constraint, vocabulary, walker.state),
        "forced": walker.state.forced(),
        "checked": checked(constraint, vocabulary, walker),
    }


@pytest.mark.parametrize("which", VOCABULARIES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_walks_with_forks_equal_a_fresh_replay(kind, which, seed):
    draw = random.Random(seed)
    constraint, vocabulary = CONSTRAINTS[kind], VOCABULARIES[which]
    walkers = [Walker(constraint.compile(vocabulary).start())]
    for _ in range(40):
        walker = draw.choice(walkers)
        if draw.random() < 0.3 and len(walkers) < 6:
            walkers.append(walker.fork())
        if draw.random() < 0.1:  # resampling: one takes the place of another
            walkers[draw.randrange(len(walkers))] = walker.fork()
        if draw.random() < 0.02:
            walker.take(draw.randrange(len(vocabulary)))
            continue
        after = allowed(constraint, vocabulary, walker.state)
        assert walker.alive or not after
        parts = [t for t in after if _is_part(vocabulary.tokens[t])]
        if after:
            walker.take(draw.choice(parts if parts and draw.random() < 0.5 else after))
            assert walker.alive
            checked(constraint, vocabulary, walker)  # as the engine asks: it reads on from there
    fresh = KINDS[kind]()
    for walker in walkers:
        replay = Walker(fresh.compile(vocabulary).start())
        for token in walker.tokens:
            replay.take(token)
        assert looks(constraint, vocabulary, walker) == looks(fresh, vocabulary, replay)


def _is_part(token):
    """Whether a token ends or begins in the middle of a character."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_walks_stand_within_characters_and_come_to_an_end(kind):
    """So that the test above is about what it says."""
    constraint, draw = CONSTRAINTS[kind], random.Random(1)
    within = ended = False
    for _ in range(60):
        walker = Walker(constraint.compile(VOCABULARY).start())
        for _ in range(60):
            after = allowed(constraint, VOCABULARY, walker.state)
            ended |= walker.state.accepting
            within |= _is_part(VOCABULARY.decode_bytes(walker.tokens))
            if not after or (within and ended):
                break
            whole = [token for token in after if not _is_part(VOCABULARY.tokens[token])]
            walker.take(draw.choice(whole if whole and draw.random() < 0.8 else after))
    assert within and ended


@pytest.mark.parametrize("kind", ["json", "regex", "lark", "choice", "intersection"])
def test_a_complete_text_has_no_next_token_and_stays_complete(kind):
    complete = {
        "json": '{"é": []}',
        "regex": None,
        "lark": "é.",
        "choice": "日本",
        "intersection": "日b",
    }[kind]
    if complete is None:
        constraint, complete = regex("é{2}"), "éé"
    else:
        constraint = CONSTRAINTS[kind]
    vocabulary = VOCABULARIES["bytes"]
    state = constraint.compile(vocabulary).start()
    assert all(state.advance(byte) for byte in complete.encode())
    for each in (state, state.fork()):
        assert each.accepting and each.forced() == []
        assert not masks(constraint, [each], vocabulary).any()
        assert each.accepting
    fork = state.fork()
    assert not fork.advance(ord("a"))
    assert not fork.accepting and not masks(constraint, [fork], vocabulary).any()
    assert state.accepting
