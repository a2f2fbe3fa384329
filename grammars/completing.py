"""Short completions: what a text may still need to become a member of a constraint's language.

A search over bytes, by the constraint's own masks: it needs no model, and what is found is counted
in the fewest tokens that spell it. The grammar behind the masks is not known. So the language is
explored once: places where the same bytes may follow, behind places where the same bytes might,
are taken for one (a *view*), and the shortest ways between views say where the end is likely to be
(`_Map`). By that map the search goes greedily (`greedy`) and best first (`search`). What is found
is a completion, though not always the shortest. Only a search that has tried everything can say
that there is none: that takes a small alphabet, or few texts (`none_within`).
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from guided_smc.errors import ConstraintError
from guided_smc.grammars.characters import usual_masks
from guided_smc.grammars.matching import GrammarState
from guided_smc.grammars.pieces import Pieces
from guided_smc.grammars.schema.spelt import SpeltState
from guided_smc.potentials import CompiledConstraint, Unmasked

_KINDS = b"}])>\"'`0;.,:aA_=/+-*{[(<\n \\#$%&!?@^|~"
"""One byte of each kind; first what ends something."""

_KINDS_IN_TEXT = b"\"'`.;\n}])> 0,:aA_=/+-*{[(<\\#$%&!?@^|~"
"""The same where nearly everything is allowed, as in a string."""

_IN_TEXT = 64
"""So many next bytes are nearly everything."""

_FEW = 16
"""So many next bytes are all tried; of more, only those that differ in kind."""

_LONGEST_GREEDY = 512

_EXPLORED = 1000
_EXPLORED_FOR_AN_END = 4000
"""Texts that are looked at to make the map; more as long as no member is among them."""

_BYTE = 0.05
"""What a byte costs, in tokens."""

_AGAIN = 1.0
"""What it costs, in tokens, that a text has a view which was seen before."""

_NOVELTY = 0.25
"""What a token costs when the map is made, where a view that was seen before costs 1."""

_FOLLOWED = 10
"""So many next bytes are followed at each place, unless all can be tried."""

_LOOPS = 2
"""Ways that lead from a view to itself, as those of the letters of a string, that are followed."""

_HINTED = 1.0
"""How much nearer to the end, in tokens, a byte is thought to be that was hinted at."""

_UNSEEN = 1.0
"""Cost of the way to the end from a view that is not on the map."""


class _Patience(threading.local):
    """Until when this thread may search, on the monotonic clock."""

    until = float("inf")


_patience = _Patience()


class OutOfPatienceError(Exception):
    """A search has taken longer than it may."""


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Searches of this thread raise `OutOfPatienceError` after so many seconds."""
    _patience.until = time.monotonic() + seconds
    try:
        yield
    finally:
        _patience.until = float("inf")


class View(NamedTuple):
    """What can be seen of a text's state.

    Attributes:
        allowed: The next bytes, as the bits of a number.
        before: Those at the last place where there was a choice.
        accepting: Whether the text is a member.
    """

    allowed: int
    before: int
    accepting: bool

    @property
    def choice(self) -> int:
        """The bytes at the last place where there was a choice, seen from the next place."""
        return self.allowed if self.width > 1 else self.before

    @property
    def width(self) -> int:
        """How many bytes may come next."""
        return self.allowed.bit_count()


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        ends: Completions, those with the fewest tokens first.
        complete: Whether everything was tried: then no other end needs fewer tokens.
    """

    ends: tuple[bytes, ...]
    complete: bool


class Completions:
    """Looks for completions in a language.

    Args:
        compiled: The constraint bound to `matching.every_byte()`, where token b is byte b.
        own: The model's tokens, which have to spell what is found.

    Attributes:
        small: Whether there are so few bytes that a search can try them all.
    """

    def __init__(self, compiled: CompiledConstraint, own: Pieces) -> None:
        self._compiled = compiled
        self.own = own
        self._alphabet = sum(1 << byte for byte in own.alphabet)
        self._viable = compiled.viable if isinstance(compiled, Unmasked) else None
        self._fill = usual_masks(compiled)
        self._words = np.empty((1, 9), dtype=np.int32)
        self.small = len(own.alphabet) <= _FEW
        self._unmapped = _Map()

    @cached_property
    def _map(self) -> _Map:
        """Made when it is needed: it takes a tenth of a second and more."""
        found = _Map()
        if self.quick is not None:
            found.learn(self, self.quick)
        found.explore(self)
        known = self._greedy(self.start(), None, found)
        if known is not None:
            found.learn(self, known)
        return found

    @cached_property
    def quick(self) -> bytes | None:
        """A member that is found without the map, if one is."""
        return self.greedy(self.start(), mapped=False)

    @property
    def members(self) -> list[bytes]:
        """Some short members of the language."""
        return self._map.members

    def start(self) -> Any:
        """The state in front of every text."""
        return self._compiled.start()

    def after(self, state: Any, data: bytes) -> Any | None:
        """The state after more bytes; None if no member begins like this, or if asking that goes
        beyond the limits.
        """
        state = state.fork()
        try:
            for byte in data:
                if self._viable is not None and not self._viable(state, byte):
                    return None
                if not state.advance(byte):
                    return None
        except ConstraintError:
            return None
        return state

    def completes(self, state: Any, data: bytes) -> bool:
        """Whether the text becomes a member by these bytes."""
        if isinstance(state, GrammarState | SpeltState):
            try:
                return state.completed_by(data)
            except ConstraintError:
                return False
        end = self.after(state, data)
        return end is not None and bool(end.accepting)

    def greedy(self, state: Any, room: int | None = None, *, mapped: bool = True) -> bytes | None:
        """A completion, found by taking at each place the byte that leads to the end on the map.

        Args:
            state: Of the text.
            room: Tokens that it may take.
            mapped: False does without the map, and takes bytes that tend to end things.
        """
        return self._greedy(state, room, self._map if mapped else self._unmapped)

    def _greedy(self, state: Any, room: int | None, by: _Map) -> bytes | None:
        found = bytearray()
        longest = _LONGEST_GREEDY if room is None else min(_LONGEST_GREEDY, 16 + 8 * room)
        last, before, skipped = 0, 0, 0
        while len(found) <= longest:
            if state.accepting:
                return bytes(found)
            view = View(self.allowed(state), before, False)
            # Some loop, such as that of an identifier or of spaces: leave by another way.
            skipped = skipped + 1 if view.allowed == last else 0
            last, before, left, taken = view.allowed, view.choice, skipped, None
            for byte in by.order(view):
                if self._viable is not None and not self._viable(state, byte):
                    continue
                taken = byte
                if left == 0:
                    break
                left -= 1
            after = None if taken is None else self.after(state, bytes([taken]))
            if taken is None or after is None:
                return None
            state = after
            found.append(taken)
        return None

    def search(
        self,
        state: Any,
        *,
        room: int | None,
        at_most: int,
        wanted: int,
        tails: Sequence[bytes] = (),
        hints: bytes = b"",
    ) -> Found:
        """Completions, best first by the map.

        Args:
            state: Of the text.
            room: Tokens that a completion may take.
            at_most: Texts that are looked at.
            wanted: Stop when so many completions that fit are found.
            tails: Completions of other texts, which may serve here too.
            hints: Bytes to try first: what was opened is often closed by the same.
        """
        ends: dict[bytes, int] = {}
        seen: Counter[View] = Counter()
        count = 0

        def keep(data: bytes) -> None:
            tokens = self.own.fewest(data)
            if tokens is not None and (room is None or tokens <= room):
                ends[data] = tokens

        first = Reached(state, b"", self.view(state, 0), (0,), (0,))
        queue: list[tuple[float, int, Reached]] = [(0.0, 0, first)]
        while queue and len(ends) < wanted:
            place = heapq.heappop(queue)[2]
            if place.view.accepting:
                keep(place.data)
                if not self.small:
                    continue  # what goes on is longer
            for tail in tails:
                if tail and place.view.allowed >> tail[0] & 1 and self.completes(place.state, tail):
                    keep(place.data + tail)
            if count >= at_most:
                heapq.heappush(queue, (0.0, -1, place))
                break
            seen[place.view] += 1
            followed = self._map.order(place.view)
            if not self.small:
                hinted = [byte for byte in dict.fromkeys(hints) if place.view.allowed >> byte & 1]
                others = [byte for byte in followed[:_FOLLOWED] if byte not in hinted]
                followed = (*hinted, *others)
            for after in self.next(place, followed, room):
                estimate = after.cost + self._map.distance(after.view)
                estimate += _AGAIN * seen[after.view] - _HINTED * (after.data[-1] in hints)
                heapq.heappush(queue, (estimate, count, after))
                count += 1
        found = sorted(ends, key=lambda data: (ends[data], len(data)))
        return Found(tuple(found), self.small and not queue)

    def none_within(self, room: int | None, at_most: int) -> bool:
        """Whether it is certain that no member takes so few tokens: all texts have been tried.

        Args:
            room: Tokens that a member may take; None for any, and for texts that none spell too.
            at_most: Texts that are looked at, in every spelling, before nothing is certain.
        """
        places = [Reached(self.start(), b"", View(0, 0, False), (0,), (0,))]
        count = 0
        try:
            while places:
                place = places.pop()
                spelt, fewest = (place.best, place.open), place.best[-1]
                fits = room is None or (fewest is not None and fewest <= room)
                if fits and place.state.accepting:
                    return False
                self._compiled.fill_masks([place.state], self._words)
                for byte in _ranked(int.from_bytes(self._words.tobytes(), "little")):
                    if room is not None:
                        begun = place.spelt(byte, self.own)
                        if begun is None or _fewest(*begun) > room:
                            continue
                        spelt = begun
                    if self._viable is not None and not self._viable(place.state, byte):
                        continue
                    after = place.state.fork()
                    if not after.advance(byte):
                        continue
                    count += 1
                    if count > at_most:
                        return False
                    data = place.data + bytes([byte])
                    places.append(Reached(after, data, place.view, *spelt))
        except ConstraintError:  # beyond the limits
            return False
        return True

    def next(
        self, place: Reached, followed: Sequence[int], room: int | None = None
    ) -> Iterator[Reached]:
        """The texts with one more byte that tokens can spell, as many as there is room for."""
        loops = 0
        for byte in followed:
            spelt = place.spelt(byte, self.own)
            if spelt is None or (room is not None and _fewest(*spelt) > room):
                continue
            after = self.after(place.state, bytes([byte]))
            if after is None:
                continue
            view = self.view(after, place.view.choice)
            if view == place.view and not self.small:
                loops += 1
                if loops > _LOOPS:
                    continue
            yield Reached(after, place.data + bytes([byte]), view, *spelt)

    def view(self, state: Any, before: int) -> View:
        """What can be seen of a state."""
        return View(self.allowed(state), before, bool(state.accepting))

    def allowed(self, state: Any) -> int:
        """The next bytes, as the bits of a number."""
        if time.monotonic() > _patience.until:
            raise OutOfPatienceError
        try:
            if isinstance(state, GrammarState | SpeltState):
                return state.allowed_bits() & self._alphabet
            self._fill([state], self._words)
        except ConstraintError:
            return 0
        bits = int.from_bytes(self._words.tobytes(), "little")
        return bits & self._alphabet


_Spelt: TypeAlias = tuple[tuple["int | None", ...], tuple[int, ...]]


class Reached(NamedTuple):
    """A text that is looked at.

    Attributes:
        state: Over bytes.
        data: What was added.
        view: Of the state.
        best: The fewest tokens that spell each beginning of `data`; None where none do.
        open: The places at which a token may begin that goes on behind `data`.
    """

    state: Any
    data: bytes
    view: View
    best: tuple[int | None, ...]
    open: tuple[int, ...]

    @property
    def cost(self) -> float:
        """Of getting there: tokens that are begun, and a little for each byte."""
        return _fewest(self.best, self.open) + _BYTE * len(self.data)

    def spelt(self, byte: int, own: Pieces) -> _Spelt | None:
        """`best` and `open` with one more byte; None if no tokens begin like that."""
        data = self.data + bytes([byte])
        going = tuple(place for place in self.open if own.begins(data[place:]))
        if not going:
            return None
        ways = [self.best[place] for place in going if data[place:] in own.ids]
        fewest = min((way for way in ways if way is not None), default=None)
        best = (*self.best, None if fewest is None else fewest + 1)
        return best, going if fewest is None else (*going, len(data))


def _fewest(best: tuple[int | None, ...], places: tuple[int, ...]) -> int:
    """The fewest tokens with which a text may begin."""
    return min((best[place] or 0) + (place < len(best) - 1) for place in places)


class _Map:
    """The views of a language, and the cheapest ways between them that were seen.

    Attributes:
        members: Some members.
    """

    def __init__(self) -> None:
        self._ways: dict[View, dict[View, tuple[float, int]]] = defaultdict(dict)
        self.members: list[bytes] = []
        self.order = lru_cache(4096)(self._order)
        self._measure()

    def distance(self, view: View) -> float:
        """The cost of getting to the end, as far as the map tells."""
        if view.accepting:
            return 0.0
        known = self._distance.get(view)
        return self._by_bytes.get(view.allowed, _UNSEEN) if known is None else known

    def _order(self, view: View) -> tuple[int, ...]:
        """The next bytes, those that lead to the end first."""
        first = self._first.get(view) or self._first_by_bytes.get(view.allowed, ())
        return (*first, *(b for b in _ranked(view.allowed) if b not in first))

    def explore(self, completions: Completions) -> None:
        """Look at cheap texts, later at those whose view has been seen before."""
        seen: Counter[View] = Counter()
        state = completions.start()
        first = Reached(state, b"", completions.view(state, 0), (0,), (0,))
        queue: list[tuple[float, int, Reached]] = [(0.0, 0, first)]
        count = 0
        while queue:
            if count >= (_EXPLORED if self.members else _EXPLORED_FOR_AN_END):
                break
            cost, number, place = heapq.heappop(queue)
            if cost < (now := _NOVELTY * place.cost + seen[place.view]):
                heapq.heappush(queue, (now, number, place))
                continue
            seen[place.view] += 1
            if place.view.accepting:
                self.members.append(place.data)
            for after in completions.next(place, _representatives(place.view.allowed)):
                byte = after.data[-1]
                while after.view.width == 1 and not after.view.accepting:
                    count += 1
                    only = after.view.allowed.bit_length() - 1
                    forced = next(completions.next(after, [only]), None)
                    if forced is None:
                        break
                    after = forced
                count += 1
                ways, way = self._ways[place.view], after.cost - place.cost
                if after.view not in ways or way < ways[after.view][0]:
                    ways[after.view] = (way, byte)
                novelty = _NOVELTY * after.cost + seen[after.view]
                heapq.heappush(queue, (novelty, count, after))
        self._measure()

    def learn(self, completions: Completions, member: bytes) -> None:
        """Draw the way of a member."""
        state = completions.start()
        place = Reached(state, b"", completions.view(state, 0), (0,), (0,))
        for byte in member:
            spelt = place.spelt(byte, completions.own)
            state = completions.after(state, bytes([byte]))
            if spelt is None or state is None:
                return
            view = completions.view(state, place.view.choice)
            after = Reached(state, place.data + bytes([byte]), view, *spelt)
            self._ways[place.view].setdefault(view, (after.cost - place.cost, byte))
            place = after
        self.members.append(member)
        self._measure()

    def _measure(self) -> None:
        """The distance of each view to the end, and the byte by which the way begins."""
        into: dict[View, list[tuple[View, float, int]]] = defaultdict(list)
        views = set(self._ways)
        for view, ways in self._ways.items():
            for after, (length, byte) in ways.items():
                into[after].append((view, length, byte))
                views.add(after)
        distance: dict[View, float] = {}
        queue: list[tuple[float, int, View, View | None, int]] = [
            (0.0, i, view, None, 0) for i, view in enumerate(views) if view.accepting
        ]
        heapq.heapify(queue)
        count = len(queue)
        first: dict[View, list[int]] = {}
        while queue:
            far, _, view, _, byte = heapq.heappop(queue)
            if view in distance:
                if byte and len(first[view]) < _FEW and byte not in first[view]:
                    first[view].append(byte)
                continue
            distance[view], first[view] = far, [byte] if byte else []
            for before, length, start in into[view]:
                count += 1
                heapq.heappush(queue, (far + length, count, before, view, start))
        self.order.cache_clear()
        self._distance = distance
        self._first = {view: tuple(order) for view, order in first.items()}
        self._by_bytes: dict[int, float] = {}
        self._first_by_bytes: dict[int, tuple[int, ...]] = {}
        for view, far in distance.items():
            if not view.accepting and far < self._by_bytes.get(view.allowed, float("inf")):
                self._by_bytes[view.allowed] = far
                self._first_by_bytes[view.allowed] = self._first[view]


@lru_cache(4096)
def _representatives(allowed: int) -> tuple[int, ...]:
    """Bytes of a mask: one of each kind if they are many."""
    every = [byte for byte in range(256) if allowed >> byte & 1]
    kinds = [b for b in (_KINDS_IN_TEXT if len(every) > _IN_TEXT else _KINDS) if b in every]
    rest = [byte for byte in every if byte not in kinds]
    if len(every) > _FEW:
        rest = rest[: _FEW - len(kinds)] if len(kinds) < _FEW else []
    return (*kinds, *rest)


@lru_cache(4096)
def _ranked(allowed: int) -> tuple[int, ...]:
    """The bytes of a mask, those that tend to end things first."""
    first = _representatives(allowed)
    return (*first, *(b for b in range(256) if allowed >> b & 1 and b not in first))
