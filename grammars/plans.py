"""Plans: completions of the texts of one constraint, counted in the tokens of one vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from guided_smc.grammars.completing import Completions
from guided_smc.grammars.matching import every_byte
from guided_smc.grammars.pieces import Pieces
from guided_smc.potentials import Constraint

_LOOKED_AT = 64
"""Texts that are looked at behind each token, for a shorter plan."""

_LOOKED_AT_FIRST = 400
"""The same where no plan is known."""

_ALL = 2000
"""The same where there are so few bytes that all can be tried."""

_QUICK = 16
"""Tokens of a completion that is looked for without a map."""

_FAR = 10**6
"""Tokens: more than any text has."""

_WANTED = 8
"""Plans that are kept."""

_MEMBERS = 16
"""Members whose ends are tried everywhere."""

_TAILS, _LONGEST_TAIL = 24, 16
"""Ends of plans that are tried behind what comes next, and their bytes."""


@dataclass(frozen=True)
class Plan:
    """A completion of a text.

    Attributes:
        data: Its bytes.
        tokens: The fewest tokens that spell it.
    """

    data: bytes
    tokens: int


@dataclass(frozen=True)
class Text:
    """A text, equal to another with the same bytes.

    Attributes:
        data: Its bytes.
        state: Over bytes; never changed.
    """

    data: bytes
    state: Any = field(compare=False)


class Search:
    """Plans for the texts of one constraint and vocabulary.

    Every answer depends on its arguments alone, and not on what was asked before: a seed has to
    give the same text again.

    Attributes:
        own: The model's tokens.
        completions: The search over bytes.
        start: The empty text.
        quick: Some member, found without a map of the language; None if that found none.
    """

    def __init__(self, constraint: Constraint, own: Pieces) -> None:
        self.own = own
        self.completions = Completions(constraint.compile(every_byte()), own)
        self.start = Text(b"", self.completions.start())
        self.plans = lru_cache(256)(self._plans)
        self.fits = lru_cache(4096)(self._fits)
        quick = self.completions.quick
        self.quick = None if quick is None else self._plan(quick)

    @cached_property
    def members(self) -> tuple[bytes, ...]:
        """Some short members that the model's tokens spell."""
        return tuple(m for m in self.completions.members[:_MEMBERS] if self._plan(m))

    @cached_property
    def tails(self) -> tuple[Plan, ...]:
        """Ends of short members, which may serve everywhere."""
        return self.tails_of([Plan(m, self.own.fewest(m) or 0) for m in self.members])

    @cached_property
    def first(self) -> tuple[Plan, ...]:
        """Members, those with the fewest tokens first."""
        return self.plans(self.start, _FAR, (), self.members)

    def none_within(self, room: int | None) -> bool:
        """Whether it is certain that no member takes so few tokens; None is any number of them."""
        return self.completions.none_within(room, _ALL)

    def after(self, text: Text, data: bytes) -> Text | None:
        """A text after more bytes; None if no member begins like this."""
        state = self.completions.after(text.state, data)
        return None if state is None else Text(text.data + data, state)

    def _plans(
        self,
        text: Text,
        room: int,
        tails: tuple[Plan, ...],
        more: tuple[bytes, ...],
        hints: bytes = b"",
        enough: int = -1,
    ) -> tuple[Plan, ...]:
        """Completions of a text, those with the fewest tokens first.

        Args:
            text: The text.
            room: Tokens that may still come.
            tails: Completions that may be some of this text.
            more: Completions of this text that are known.
            hints: Bytes that may help to complete it.
            enough: With a completion of so many tokens that is found at once, no other is looked
                for.
        """
        if enough >= 0 and self.quick is not None:  # else it is no use anywhere
            quick = self._quickly(text, min(enough, _QUICK))
            if quick is not None and quick.tokens <= enough:
                return self._ranked([*more, quick.data])
        every = self._with_own(tails)
        known = [*more, *(t.data for t in every if self.completions.completes(text.state, t.data))]
        if (greedy := self.completions.greedy(text.state)) is not None:
            known.append(greedy)
        plans = self._ranked(known)
        fewest = plans[0].tokens if plans else room + 1
        if fewest > 0:
            small = self.completions.small
            found = self.completions.search(
                text.state,
                room=min(room, fewest - 1 if small else fewest),
                at_most=_ALL if small else (_LOOKED_AT if plans else _LOOKED_AT_FIRST),
                wanted=_WANTED,
                tails=[plan.data for plan in (plans or every)[:2]],
                hints=hints,
            )
            plans = self._ranked([*known, *found.ends])
        return plans

    def _quickly(self, text: Text, room: int) -> Plan | None:
        data = self.completions.greedy(text.state, room, mapped=False)
        return None if data is None else self._plan(data)

    def _with_own(self, tails: tuple[Plan, ...]) -> tuple[Plan, ...]:
        """Ends of plans, and this language's own ends."""
        known = {tail.data for tail in tails}
        return (*tails, *(tail for tail in self.tails if tail.data not in known))

    def _ranked(self, known: Sequence[bytes]) -> tuple[Plan, ...]:
        plans = [plan for data in dict.fromkeys(known) if (plan := self._plan(data))]
        return tuple(sorted(plans, key=lambda plan: (plan.tokens, len(plan.data)))[:_WANTED])

    def tails_of(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """How completions end, those with the fewest tokens first."""
        found: dict[bytes, Plan] = {}
        for plan in plans:
            if plan.data:
                found[plan.data] = plan
            for place in range(max(1, len(plan.data) - _LONGEST_TAIL), len(plan.data)):
                if (tail := self._plan(plan.data[place:])) is not None:
                    found.setdefault(tail.data, tail)
        return tuple(
            sorted(found.values(), key=lambda plan: (plan.tokens, len(plan.data)))[:_TAILS]
        )

    def _fits(self, text: Text, written: bytes, tails: tuple[Plan, ...], room: int) -> bool | None:
        """Whether some completion takes no more tokens than there is room for.

        Args:
            text: The text.
            written: What is to be added to it first.
            tails: Completions that may serve.
            room: Tokens that a completion may take.

        Returns:
            None if none was found, though not all were tried.
        """
        looking = self.completions
        after = looking.after(text.state, written)
        if after is None or room == 0:
            return after is not None and bool(after.accepting)
        if after.accepting:
            return True
        allowed = looking.allowed(after)
        for tail in self._with_own(tails):
            starts = tail.tokens <= room and allowed >> tail.data[0] & 1
            if starts and looking.completes(after, tail.data):
                return True
        greedy = looking.greedy(after, room)
        if greedy is not None and (plan := self._plan(greedy)) and plan.tokens <= room:
            return True
        if not looking.small:
            return None
        found = looking.search(after, room=room, at_most=_ALL, wanted=1)
        return True if found.ends else (False if found.complete else None)

    def _plan(self, data: bytes) -> Plan | None:
        tokens = self.own.fewest(data)
        return None if tokens is None else Plan(data, tokens)
