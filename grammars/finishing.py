"""Finishing in time: a constraint without the texts that take more than so many tokens.

A constrained text counts only if it ends within the length cap, so a prefix that cannot end in
time has no future. It is refused as soon as that is known: particles then close what they have
opened while there is room, where otherwise they would all die at the cap.

For finite automata and lists of texts the fewest tokens to the end are known exactly. For other
constraints a completion is looked for (`completing`): while one is known that fits, a token is
refused if none is found behind it that still fits. What only a completion that is not found could
finish in time is lost. Where no completion is known, nothing is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from guided_smc.errors import ConstraintError
from guided_smc.grammars.completing import Completions
from guided_smc.grammars.matching import every_byte
from guided_smc.grammars.pieces import Pieces, pieces
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
        ConstraintError: No member is as short as that.
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
    if search.shortest is None:
        return compiled, ()
    if search.shortest.tokens > max_tokens:
        return compiled, (
            f"{constraint.name}: the shortest text that was found has {search.shortest.tokens} "
            f"tokens, more than max_tokens={max_tokens}",
        )
    return Searching(compiled, search, max_tokens), ()


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

    def fill_masks(self, states: Sequence[Within], bitmask: np.ndarray) -> None:
        """Write the tokens that keep each prefix completable in time."""
        inner = [state.inner for state in states]
        if all(state.left > self._compiled.farthest for state in states):
            self._compiled.fill_masks(inner, bitmask)
        else:
            budgets = [state.left for state in states]
            self._compiled.fill_masks_within(inner, budgets, bitmask)


# -- by what is found ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A completion of a text.

    Attributes:
        data: Its bytes.
        tokens: The fewest tokens that spell it.
    """

    data: bytes
    tokens: int


class Search:
    """Plans for the texts of one constraint and vocabulary."""

    def __init__(self, constraint: Constraint, own: Pieces) -> None:
        self.own = own
        self.completions = Completions(
            constraint.compile(every_byte()), (b for b in range(256) if bytes([b]) in own.ids)
        )
        self.start = self.completions.start()
        self.shortest = self._plan(self.completions.shortest(self.start))

    def plan(self, text: Any, near: Plan | None, written: bytes) -> Plan | None:
        """A completion of a text, by one of a text before it if that serves.

        Args:
            text: State over bytes.
            near: A completion of the text before the last bytes.
            written: Those last bytes.
        """
        return self._reuse(text, near, written) or self._plan(self.completions.shortest(text))

    def fits(self, text: Any, near: Plan, written: bytes, room: int) -> bool:
        """Whether some completion is found that takes no more tokens than there is room for."""
        known = self._reuse(text, near, written)
        if known is None or known.tokens > room:
            known = self._plan(self.completions.greedy(text))
        return known is not None and known.tokens <= room

    def _reuse(self, text: Any, near: Plan | None, written: bytes) -> Plan | None:
        if near is None:
            return None
        if near.data.startswith(written):
            return self._plan(near.data[len(written) :])
        return near if self.completions.completes(text, near.data) else None

    def _plan(self, data: bytes | None) -> Plan | None:
        if data is None:
            return None
        tokens = self.own.fewest(data)
        return None if tokens is None else Plan(data, tokens)


@dataclass
class Outlook:
    """A state with what is known of its end.

    Attributes:
        inner: The constraint's own state.
        left: Tokens that may still come.
        text: State over bytes, behind what the plan is for.
        plan: A completion, if one is known.
        planned: `left` when the plan was made.
        written: Bytes since then.
    """

    inner: ConstraintState
    left: int
    text: Any
    plan: Plan | None
    planned: int
    written: bytes
    pieces: Pieces

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a member."""
        return self.inner.accepting

    def fork(self) -> Outlook:
        """An independent copy. States over bytes are never changed, so that they are shared."""
        return replace(self, inner=self.inner.fork())

    def advance(self, token: int) -> bool:
        """Consume one token. False if no member begins like this."""
        self.left -= 1
        self.written += self.pieces.piece(token)
        return self.inner.advance(token)

    def forced(self) -> list[int]:
        """Tokens that are the only way on, whatever the room."""
        return self.inner.forced()


class Searching:
    """A constraint, without texts for which no end in time is found. `Unmasked` near the end."""

    def __init__(self, compiled: CompiledConstraint, search: Search, max_tokens: int) -> None:
        self._compiled = compiled
        self._asked = compiled if isinstance(compiled, Unmasked) else None
        self._search = search
        self._max_tokens = max_tokens
        self.max_rejected = _MAX_REJECTED if self._asked is None else self._asked.max_rejected
        self.remedy = _REMEDY if self._asked is None else self._asked.remedy

    def start(self) -> Outlook:
        """The state before the first token."""
        search, left = self._search, self._max_tokens
        return Outlook(
            self._compiled.start(), left, search.start, search.shortest, left, b"", search.own
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
        assert state.plan is not None
        written = self._search.own.piece(token)
        text = self._search.completions.after(state.text, written)
        if text is None:
            return False
        return self._search.fits(text, state.plan, written, state.left - 1)

    def pull(self, state: Outlook) -> tuple[np.ndarray, float] | None:
        """Tokens to propose more often, as those that begin the known completion."""
        if not self._near(state):
            return None
        assert state.plan is not None
        if not state.plan.data:
            return None
        return self._search.own.by_first_byte[state.plan.data[0]], _PULL

    def known(self, state: Outlook) -> list[int]:
        """The tokens by which the known completion may begin, in time."""
        if self._asked is not None or not self._near(state):
            return []
        assert state.plan is not None
        own, data = self._search.own, state.plan.data
        return [
            token
            for n in range(1, min(len(data), own.longest) + 1)
            if data[:n] in own.ids
            and (rest := own.fewest(data[n:])) is not None
            and rest < state.left
            for token in own.ids[data[:n]]
        ]

    def _near(self, state: Outlook) -> bool:
        """Whether the room is scarce, by a plan that fits. Brings the plan up to date."""
        spent = state.planned - state.left
        tight = state.plan is not None and state.left <= 2 * state.plan.tokens + spent + _ROOM
        if spent and (tight or spent >= max(8, state.left // 8)):
            text = self._search.completions.after(state.text, state.written)
            state.plan = self._search.plan(text, state.plan, state.written) if text else None
            state.text, state.planned, state.written = text or state.text, state.left, b""
            tight = state.plan is not None and state.left <= 2 * state.plan.tokens + _ROOM
        return tight and state.plan is not None and state.plan.tokens <= state.left > 0


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
