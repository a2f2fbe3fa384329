"""A choice between texts: the answer is one of them, letter for letter.

The texts are kept sorted, so that those which begin alike stand side by side, and a state is the
range of those that are left. Nothing is compiled, and the number of texts hardly matters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Literal, get_args, get_origin
from weakref import WeakKeyDictionary

import numpy as np

from guided_smc.errors import ConstraintError, OutputValidationError
from guided_smc.grammars.automata import MAX_STATES, Automaton, ByteAutomaton
from guided_smc.grammars.pieces import pieces
from guided_smc.grammars.schema.keywords import shorten
from guided_smc.potentials import Constraint
from guided_smc.vocabulary import Vocabulary

_MOST_MASKS = 1024
"""Masks that a compiled choice keeps: one for each place where texts part."""

_MOST_FORCED = 64
"""Tokens that one call of `forced` looks ahead at most."""


def choice(values: Iterable[Any] | type[Enum]) -> Choice:
    """A constraint to one of several texts.

    Args:
        values: Texts, or values that are written as Python's `str` writes them (numbers, True,
            None); the members of an Enum by their values. Also an Enum class or a `Literal`.

    Raises:
        ConstraintError: There is no value, two have the same text, or one has no plain text.
    """
    return Choice(values)


class Choice(Constraint):
    """One of several texts. See `choice` for the arguments.

    Attributes:
        texts: The value of each text, in the given order.
    """

    def __init__(self, values: Iterable[Any] | type[Enum]) -> None:
        self.name = values.__name__ if isinstance(values, type) else "choice"
        if get_origin(values) is Literal:
            values = get_args(values)
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise ConstraintError(
                f"choices are a list of texts, an Enum or a Literal, got {shorten(repr(values))}"
            )
        self.texts: dict[str, Any] = {}
        for value in values:
            text = _text(value)
            if text in self.texts:
                raise ConstraintError(
                    f"two choices have the text {shorten(text)!r}: {self.texts[text]!r} and "
                    f"{value!r}"
                )
            self.texts[text] = value
        if not self.texts:
            raise ConstraintError("there is nothing to choose from: no value was given")
        self._sorted = sorted(text.encode() for text in self.texts)
        self._compiled: WeakKeyDictionary[Vocabulary, CompiledChoice] = WeakKeyDictionary()

    def automaton(self, vocabulary: Vocabulary) -> Automaton | None:
        """The language over the tokens of a vocabulary as tables, for masks on a device.

        Returns:
            None if they would be too large (see `automata.MAX_STATES` and `MAX_ENTRIES`).
        """
        return self.compile(vocabulary).tables

    @cached_property
    def over_bytes(self) -> ByteAutomaton | None:
        """The language over bytes; None if it has too many states."""
        return ByteAutomaton.of_texts(self._sorted, MAX_STATES)

    def compile(self, vocabulary: Vocabulary) -> CompiledChoice:
        """Bind to a vocabulary; done once for each."""
        if vocabulary not in self._compiled:
            self._compiled[vocabulary] = CompiledChoice(self._sorted, vocabulary)
        return self._compiled[vocabulary]

    def parse(self, text: str) -> Any:
        """The value that was given, for its text.

        Raises:
            OutputValidationError: The text is not among them.
        """
        try:
            return self.texts[text]
        except KeyError:
            raise OutputValidationError(
                f"{shorten(text)!r} is none of the choices", text=text, finish_reason="stop"
            ) from None

    def value_key(self, text: str) -> Hashable:
        """The text: different values have different ones."""
        return text


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        plain = value.value
        if not isinstance(plain, str | int | float | None):
            raise ConstraintError(
                f"the value of {value} is {shorten(repr(plain))}, which has no plain text"
            )
        return _text(plain)
    if not isinstance(value, str | int | float | None):
        raise ConstraintError(
            "a choice is a text, a number, True, False, None or an Enum member, got "
            f"{shorten(repr(value))}"
        )
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConstraintError(f"the choice {value!r} holds half of a surrogate pair") from None
    return text


class CompiledChoice:
    """Sorted texts bound to a vocabulary.

    Args:
        texts: Sorted and distinct.
        vocabulary: The model's tokens.
    """

    def __init__(self, texts: Sequence[bytes], vocabulary: Vocabulary) -> None:
        self.texts = texts
        self.pieces = pieces(vocabulary)
        self._masks: dict[tuple[int, int], np.ndarray] = {}
        self._ways: dict[bytes, list[int | None]] = {}
        self.farthest = max(map(len, texts))  # a token has a byte at least

    def start(self) -> ChoiceState:
        """The state before the first token."""
        return ChoiceState(self, 0, len(self.texts), 0)

    def fill_masks(self, states: Sequence[ChoiceState], bitmask: np.ndarray) -> None:
        """Write the tokens that keep each prefix completable; none for a dead or complete one.

        Args:
            states: States of this choice.
            bitmask: int32 array `[len(states), ceil(V / 32)]`, overwritten. Bits of special
                and padded ids are always 0.
        """
        if bitmask.shape != (len(states), self.pieces.words) or bitmask.dtype != np.int32:
            raise ValueError(
                f"bitmask must be int32 of shape {(len(states), self.pieces.words)}, "
                f"got {bitmask.dtype} of shape {tuple(bitmask.shape)}"
            )
        for row, state in enumerate(states):
            bitmask[row] = self._mask(state)

    def _mask(self, state: ChoiceState) -> np.ndarray:
        place = (state.low, state.depth) if state.alive else (-1, 0)
        if place not in self._masks:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            self._masks[place] = self.pieces.mask(self.next_tokens(state))
        return self._masks[place]

    @cached_property
    def tables(self) -> Automaton | None:
        """The automaton over tokens; None if it would be too large."""
        states = ByteAutomaton.of_texts(self.texts, MAX_STATES)
        return None if states is None else Automaton.over_tokens(states, self.pieces)

    def distance(self, state: ChoiceState) -> int | None:
        """The fewest tokens to one of the texts; None if this vocabulary spells none."""
        if not state.alive:
            return None
        ways = [self._ways_on(text)[state.depth] for text in self.texts[state.low : state.high]]
        return min((way for way in ways if way is not None), default=None)

    def _ways_on(self, text: bytes) -> list[int | None]:
        if text not in self._ways:
            self._ways[text] = self.pieces.fewest_from(text)
        return self._ways[text]

    def fill_masks_within(
        self, states: Sequence[ChoiceState], budgets: Sequence[int], bitmask: np.ndarray
    ) -> None:
        """`fill_masks`, without tokens behind which every text takes more than the budget's rest.

        Args:
            states: States of this choice.
            budgets: Tokens that may still come, for each.
            bitmask: As for `fill_masks`.
        """
        for row, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            tokens: dict[bytes, bool] = {}
            for token in self.next_tokens(state):
                piece = self.pieces.piece(token)
                if piece not in tokens:
                    after = state.fork()
                    after.advance(token)
                    distance = self.distance(after)
                    tokens[piece] = distance is not None and distance < budget
            near = [token for p, fits in tokens.items() if fits for token in self.pieces.ids[p]]
            bitmask[row] = self.pieces.mask(near)

    def next_tokens(self, state: ChoiceState) -> list[int]:
        """Tokens that continue one of the texts that are left, or complete it."""
        tokens: list[int] = []
        before = b""
        for text in self.texts[state.low : state.high] if state.alive else ():
            rest = text[state.depth : state.depth + self.pieces.longest]
            known = _shared(before, rest)
            for end in range(known + 1, len(rest) + 1):
                tokens += self.pieces.ids.get(rest[:end], ())
            before = rest
        return tokens


class ChoiceState:
    """Where one particle stands: the texts `low..high` are left, and `depth` bytes are written."""

    __slots__ = ("_choice", "alive", "depth", "high", "low")

    def __init__(
        self, choice: CompiledChoice, low: int, high: int, depth: int, alive: bool = True
    ) -> None:
        self._choice = choice
        self.low = low
        self.high = high
        self.depth = depth
        self.alive = alive

    @property
    def accepting(self) -> bool:
        """Whether the text so far is one of the choices."""
        # The shortest of those that begin alike is the first.
        return self.alive and len(self._choice.texts[self.low]) == self.depth

    def fork(self) -> ChoiceState:
        """An independent copy."""
        return ChoiceState(self._choice, self.low, self.high, self.depth, self.alive)

    def advance(self, token: int) -> bool:
        """Consume one ordinary token. False if no choice begins like this."""
        piece = self._choice.pieces.piece(token)
        if not self.alive or not piece:
            self.alive = False
            return False
        texts, depth, end = self._choice.texts, self.depth, self.depth + len(piece)
        low = bisect_left(texts, piece, self.low, self.high, key=lambda text: text[depth:])
        high = bisect_right(texts, piece, low, self.high, key=lambda text: text[depth:end])
        if low == high:
            self.alive = False
        else:
            self.low, self.high, self.depth = low, high, end
        return self.alive

    def forced(self) -> list[int]:
        """The tokens that are the only way on, as far as there is no choice and no end."""
        ahead = self.fork()
        forced: list[int] = []
        while len(forced) < _MOST_FORCED and ahead.alive and not ahead.accepting:
            tokens = self._choice.next_tokens(ahead)
            if len(tokens) != 1:
                break
            forced += tokens
            ahead.advance(tokens[0])
        return forced


def _shared(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
