"""Finishing in time: a constraint without the texts that take more than so many tokens.

A constrained text counts only if it ends within the length cap, so a prefix that cannot end in
time has no future. It is refused as soon as that is known: particles then close what they have
opened while there is room, where otherwise they would all die at the cap.

For finite automata and lists of texts the fewest tokens to the end are known exactly. For other
constraints completions are looked for (`plans`): while one is known that fits, a token is refused
if none is found behind it that still fits. What only a completion that is not found could finish in
time is lost, and the result's warnings tell. Where no completion is known, nothing is refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from guided_smc.errors import ConstraintError
from guided_smc.grammars.automata import Automaton
from guided_smc.grammars.completing import OutOfPatienceError, patience
from guided_smc.grammars.pieces import Pieces, pieces
from guided_smc.grammars.plans import Plan, Search, Text
from guided_smc.potentials import (
    CompiledConstraint,
    Constraint,
    ConstraintState,
    Intersection,
    Unmasked,
)
from guided_smc.vocabulary import Vocabulary

_ROOM = 16
"""Tokens beyond twice a known completion: with less room, every token is looked at."""

_PULL = 1e-3
"""How much less often the tokens are proposed that do not begin like the known completion, where
the model's favourite no longer fits. The weights make up for it."""

_MAX_REJECTED = 200

_HINTS = 4
"""Last bytes of what was written that are tried as hints."""

_REMEDY = "raise max_tokens, which is so near that nearly nothing fits"


@runtime_checkable
class Measured(CompiledConstraint, Protocol):
    """A compiled constraint that knows the fewest tokens from each state to the end.

    Attributes:
        farthest: A bound: with more tokens left than that, everything ends in time.
    """

    farthest: int

    def distance(self, state: Any) -> int | None:
        """The fewest tokens to a member; None if this vocabulary spells none."""

    def fill_masks_within(
        self, states: Sequence[Any], budgets: Sequence[int], bitmask: np.ndarray
    ) -> None:
        """`fill_masks`, without tokens behind which a member takes more than the budget's rest."""


def within(
    constraint: Constraint, vocabulary: Vocabulary, max_tokens: int
) -> tuple[CompiledConstraint, tuple[str, ...]]:
    """A constraint bound to a vocabulary, without what takes more than `max_tokens`.

    Args:
        constraint: The language.
        vocabulary: The model's tokens.
        max_tokens: Of a text, its end token not counted.

    Returns:
        The compiled constraint, and what users should know of it if texts do not end in time.

    Raises:
        ConstraintError: No member is as short as that, or there is none at all, as far as all can
            be tried.
    """
    compiled = constraint.compile(vocabulary)
    if isinstance(compiled, Measured):
        if max_tokens < compiled.farthest:
            least = compiled.distance(compiled.start())
            if least is not None and least > max_tokens:
                raise ConstraintError(
                    f"{constraint.name}: max_tokens={max_tokens} is too small; the shortest text "
                    f"has {least} tokens"
                )
        return Finishing(compiled, max_tokens), ()
    if not _can_be_searched(constraint):
        return compiled, ()
    search = _search(constraint, vocabulary)
    if search.quick is not None and search.quick.tokens <= _enough(max_tokens):
        return Searching(compiled, search, max_tokens, (search.quick,)), ()
    if not search.first:
        if search.none_within(None):
            raise ConstraintError(
                f"{constraint.name}: there is no text that it allows; look for what contradicts "
                "itself in it"
            )
        return compiled, (
            f"{constraint.name}: no text was found by looking ahead, so that nothing is known of "
            "how to end in time",
        )
    shortest = search.first[0].tokens
    if shortest > max_tokens:
        if search.none_within(max_tokens):
            raise ConstraintError(
                f"{constraint.name}: max_tokens={max_tokens} is too small; the shortest text that "
                f"was found has {shortest} tokens"
            )
        return compiled, (
            f"{constraint.name}: the shortest text that was found has {shortest} tokens, more "
            f"than max_tokens={max_tokens}",
        )
    return Searching(compiled, search, max_tokens, search.first), ()


def look_ahead(constraint: Constraint, vocabulary: Vocabulary, seconds: float) -> None:
    """Do what `within`, and runs near the cap, would do later: bind it and draw its map.

    Args:
        constraint: The language.
        vocabulary: The model's tokens.
        seconds: That this may take by the clock: what takes longer once, runs wait for too.

    Raises:
        ConstraintError: It takes longer.
    """
    until = time.monotonic() + seconds
    compiled = constraint.compile(vocabulary)
    if isinstance(compiled, Measured) or not _can_be_searched(constraint):
        return
    try:
        with patience(until - time.monotonic()):
            _ = _search(constraint, vocabulary).first
    except OutOfPatienceError:
        raise ConstraintError(
            f"{constraint.name}: looking for how its texts can end takes more than the limit of "
            f"{seconds:.3g} seconds; simplify it",
            limit="max_compile_seconds",
        ) from None


def _enough(left: int) -> int:
    """Tokens of a known completion with which the room is not scarce yet."""
    return (left - _ROOM - 1) // 2


# -- exactly -------------------------------------------------------------------------------------


class Within:
    """A state with the number of tokens that may still come."""

    __slots__ = ("inner", "left")

    def __init__(self, inner: ConstraintState, left: int) -> None:
        self.inner = inner
        self.left = left

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a member."""
        return self.inner.accepting

    def fork(self) -> Within:
        """An independent copy."""
        return Within(self.inner.fork(), self.left)

    def advance(self, token: int) -> bool:
        """Consume one token. False if no member begins like this."""
        self.left -= 1
        return self.inner.advance(token)

    def forced(self) -> list[int]:
        """Tokens that are the only way on, whatever the room."""
        return self.inner.forced()


class Finishing:
    """A measured constraint, without what takes more than so many tokens."""

    def __init__(self, compiled: Measured, max_tokens: int) -> None:
        self._compiled = compiled
        self._max_tokens = max_tokens

    def start(self) -> Within:
        """The state before the first token."""
        return Within(self._compiled.start(), self._max_tokens)

    @property
    def tables(self) -> Automaton | None:
        """The constraint as tables over tokens; None if they would be too large."""
        return getattr(self._compiled, "tables", None)

    def fill_masks(self, states: Sequence[Within], bitmask: np.ndarray) -> None:
        """Write the tokens that keep each prefix completable in time."""
        inner = [state.inner for state in states]
        if all(state.left > self._compiled.farthest for state in states):
            self._compiled.fill_masks(inner, bitmask)
        else:
            budgets = [state.left for state in states]
            self._compiled.fill_masks_within(inner, budgets, bitmask)


# -- by what is found ----------------------------------------------------------------------------


@dataclass
class Outlook:
    """A state with what is known of its end.

    Attributes:
        inner: The constraint's own state.
        left: Tokens that may still come.
        text: What the plans complete.
        plans: Completions, those with the fewest tokens first.
        tails: Completions that may be those of what comes next.
        planned: `left` when the plans were made.
        written: Bytes since then.
        pieces: The model's tokens.
        doubted: Tokens that were refused here, though not every end behind them was tried.
    """

    inner: ConstraintState
    left: int
    text: Text
    plans: tuple[Plan, ...]
    tails: tuple[Plan, ...]
    planned: int
    written: bytes
    pieces: Pieces
    doubted: list[int]

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a member."""
        return self.inner.accepting

    @property
    def fewest(self) -> int | None:
        """Tokens to the end, by the best plan."""
        return self.plans[0].tokens if self.plans else None

    def fork(self) -> Outlook:
        """An independent copy. States over bytes are never changed, so that they are shared."""
        return replace(self, inner=self.inner.fork(), doubted=[])

    def advance(self, token: int) -> bool:
        """Consume one token. False if no member begins like this."""
        self.left -= 1
        self.written += self.pieces.piece(token)
        self.doubted = []
        return self.inner.advance(token)

    def forced(self) -> list[int]:
        """Tokens that are the only way on, whatever the room."""
        return self.inner.forced()


class Searching:
    """A constraint, without texts for which no end in time is found. `Unmasked` near the end."""

    def __init__(
        self,
        compiled: CompiledConstraint,
        search: Search,
        max_tokens: int,
        first: tuple[Plan, ...],
    ) -> None:
        self._compiled = compiled
        self._first = first
        self._asked = compiled if isinstance(compiled, Unmasked) else None
        self._search = search
        self._max_tokens = max_tokens
        self.max_rejected = _MAX_REJECTED if self._asked is None else self._asked.max_rejected
        self.remedy = _REMEDY if self._asked is None else self._asked.remedy

    def start(self) -> Outlook:
        """The state before the first token."""
        search = self._search
        return Outlook(
            inner=self._compiled.start(),
            left=self._max_tokens,
            text=search.start,
            plans=self._first,
            tails=search.tails_of(self._first),
            planned=self._max_tokens,
            written=b"",
            pieces=search.own,
            doubted=[],
        )

    def fill_masks(self, states: Sequence[Outlook], bitmask: np.ndarray) -> None:
        """Write what the constraint allows, whatever the room."""
        self._compiled.fill_masks([state.inner for state in states], bitmask)

    def judges(self, state: Outlook) -> bool:
        """Whether `viable` may refuse what the mask allows."""
        return self._near(state) or (self._asked is not None and self._asked.judges(state.inner))

    def viable(self, state: Outlook, token: int) -> bool:
        """Whether the constraint allows a token, and an end in time is found behind it."""
        if self._asked is not None and not self._asked.viable(state.inner, token):
            return False
        if not self._near(state):
            return True
        written, room = self._search.own.piece(token), state.left - 1
        if any(self._begins(plan, written, room) for plan in state.plans):
            return True
        fits = self._search.fits(state.text, written, state.tails, room)
        if fits is None:
            state.doubted.append(token)
        return bool(fits)

    def pull(self, state: Outlook) -> tuple[np.ndarray, float] | None:
        """Tokens to propose more often, as those that begin the known completions."""
        if not self._near(state):
            return None
        firsts = {plan.data[0] for plan in state.plans if plan.data and plan.tokens <= state.left}
        if not firsts:
            return None
        chosen = [self._search.own.by_first_byte[byte] for byte in sorted(firsts)]
        return np.concatenate(chosen), _PULL

    def known(self, state: Outlook) -> list[int]:
        """The tokens by which the known completions may begin, in time."""
        if self._asked is not None or not self._near(state):
            return []
        own = self._search.own
        beginnings = {
            plan.data[:n]
            for plan in state.plans
            for n in range(1, min(len(plan.data), own.longest) + 1)
            if plan.data[:n] in own.ids and self._begins(plan, plan.data[:n], state.left - 1)
        }
        return sorted(token for data in beginnings for token in own.ids[data])

    def doubted(self, state: Outlook) -> list[int] | None:
        """Tokens that were refused at a state, though not every end behind them was tried.

        Returns:
            None if there is no room for any end that was found, so that the text is at a loss.
        """
        if not state.accepting and state.left < (state.fewest or 0):
            return None
        return state.doubted

    def _begins(self, plan: Plan, written: bytes, room: int) -> bool:
        """Whether a plan goes on like this, with room for the rest."""
        if not plan.data.startswith(written):
            return False
        rest = self._search.own.fewest(plan.data[len(written) :])
        return rest is not None and rest <= room

    def _near(self, state: Outlook) -> bool:
        """Whether the room is scarce, by a plan that fits. Brings the plans up to date."""
        spent = state.planned - state.left
        fewest = state.fewest
        tight = fewest is None or state.left <= 2 * fewest + spent + _ROOM
        if spent and (tight or spent >= max(8, state.left // 8)):
            self._look_ahead(state)
            fewest = state.fewest
            tight = fewest is not None and state.left <= 2 * fewest + _ROOM
        return tight and fewest is not None and fewest <= state.left > 0

    def _look_ahead(self, state: Outlook) -> None:
        """Make the plans those of the text as it is now."""
        if not self._follow(state, state.written):
            # One byte at a time opens less than all of them, and is closed more easily.
            for byte in state.written:
                if not self._follow(state, bytes([byte]), although_none=True):
                    break
        state.planned, state.written = state.left, b""

    def _follow(self, state: Outlook, written: bytes, although_none: bool = False) -> bool:
        """Go on to the text behind some bytes, if plans are found for that."""
        search = self._search
        text = search.after(state.text, written)
        if text is None:  # the constraint's own state is dead, too
            return False
        rests = [p.data[len(written) :] for p in state.plans if p.data.startswith(written)]
        plans = search.plans(
            text,
            state.left,
            state.tails,
            tuple(rests),
            written[-_HINTS:],
            max(-1, _enough(state.left)),
        )
        if plans or although_none:
            state.text, state.plans = text, plans
            state.tails = search.tails_of(plans) if plans else state.tails
        return bool(plans) or although_none


_searches: WeakKeyDictionary[Constraint, WeakKeyDictionary[Vocabulary, Search]] = (
    WeakKeyDictionary()
)


def _search(constraint: Constraint, vocabulary: Vocabulary) -> Search:
    known = _searches.setdefault(constraint, WeakKeyDictionary())
    if vocabulary not in known:
        known[vocabulary] = Search(constraint, pieces(vocabulary))
    return known[vocabulary]


def _can_be_searched(constraint: Constraint) -> bool:
    if isinstance(constraint, Intersection):
        return all(map(_can_be_searched, constraint.constraints))
    return constraint.shows_ends
