"""Regular expressions as automata over bytes, as far as they stay small.

The textbook's way: an automaton with choices (Thompson), and the sets of its states as states of a
deterministic one. It stops at a limit, because a short pattern may need millions of them; libraries
that compile patterns to tables do not stop.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from guided_smc.grammars.automata import ByteAutomaton

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_MOST_CHOICES = 50_000
"""States of the automaton with choices."""

_MOST_WORK = 500_000
"""Members of sets, before it is given up: about 0.2 seconds."""

Ranges = list[tuple[int, int]]


class _TooLarge(Exception):
    pass


def automaton_of(pattern: str, max_states: int) -> ByteAutomaton | None:
    r"""The automaton of the texts that a pattern matches as a whole.

    Args:
        pattern: Of literal characters, `\U00000041`, explicit classes, groups, alternatives and
            repetitions alone: what means the same in every dialect.
        max_states: Give up beyond.

    Returns:
        None if it has no match, or would have more states.
    """
    try:
        choices = _Choices()
        start, end = choices.state(), choices.state()
        choices.add(list(_parser.parse(pattern)), start, end)
        return _determined(choices, start, end, max_states)
    except _TooLarge:
        return None


class _Choices:
    """An automaton with choices.

    Attributes:
        free: For each state, those that it may turn into without reading.
        reads: For each state, bytes and where they lead: first byte, last byte, state.
        work: Members of the sets that have been made.
    """

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.reads: list[list[tuple[int, int, int]]] = []
        self.work = 0

    def state(self) -> int:
        """A new state."""
        if len(self.free) >= _MOST_CHOICES:
            raise _TooLarge
        self.free.append([])
        self.reads.append([])
        return len(self.free) - 1

    def add(self, items: Any, start: int, end: int) -> None:
        """Lead from one state to another by a sequence of parts."""
        here = start
        for op, argument in items:
            here = self._add(op.name, argument, here)
        self.free[here].append(end)

    def _add(self, op: str, argument: Any, here: int) -> int:
        """Lead from a state by one part; returns where to."""
        end = self.state()
        match op:
            case "LITERAL":
                self._characters([(argument, argument)], here, end)
            case "IN":
                pairs = [a if o.name == "RANGE" else (a, a) for o, a in argument]
                self._characters(pairs, here, end)
            case "BRANCH":
                for branch in argument[1]:
                    self.add(branch, here, end)
            case "SUBPATTERN":
                self.add(argument[3], here, end)
            case "MAX_REPEAT":
                low, high, items = argument
                self._repeat(low, high, items, here, end)
            case _:
                raise ValueError(f"{op} in a pattern of plain parts")
        return end

    def _repeat(self, low: int, high: Any, items: Any, here: int, end: int) -> None:
        for _ in range(low):
            after = self.state()
            self.add(items, here, after)
            here = after
        if high == _parser.MAXREPEAT:
            again = self.state()
            self.free[here].append(again)
            self.add(items, again, again)
            here = again
        else:
            for _ in range(int(high) - low):
                self.free[here].append(end)
                after = self.state()
                self.add(items, here, after)
                here = after
        self.free[here].append(end)

    def _characters(self, ranges: Ranges, here: int, end: int) -> None:
        rests: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for low, high in ranges:
            for sequence in utf8_ranges(low, high):
                after = end
                for i in range(len(sequence) - 1, 0, -1):
                    rest = tuple(sequence[i:])
                    if rest not in rests:
                        rests[rest] = self.state()
                        self.reads[rests[rest]].append((*sequence[i], after))
                    after = rests[rest]
                self.reads[here].append((*sequence[0], after))

    def closure(self, states: set[int]) -> frozenset[int]:
        """With all that they may turn into without reading."""
        found, new = set(states), list(states)
        while new:
            for state in self.free[new.pop()]:
                if state not in found:
                    found.add(state)
                    new.append(state)
        self.work += len(found)
        if self.work > _MOST_WORK:
            raise _TooLarge
        # States that only turn into others say nothing but whether the end is among them.
        return frozenset(s for s in found if self.reads[s] or not self.free[s])


def _determined(choices: _Choices, start: int, end: int, max_states: int) -> ByteAutomaton | None:
    numbers = {choices.closure({start}): 0}
    edges: dict[int, dict[int, int]] = {}
    new = list(numbers)
    while new:
        states = new.pop()
        row = edges[numbers[states]] = {}
        reads = [read for state in states for read in choices.reads[state]]
        cuts = sorted({cut for first, last, _ in reads for cut in (first, last + 1)})
        place = {cut: i for i, cut in enumerate(cuts)}
        between: list[set[int]] = [set() for _ in cuts]
        for first, last, to in reads:
            for i in range(place[first], place[last + 1]):
                between[i].add(to)
            choices.work += place[last + 1] - place[first]
        targets: dict[frozenset[int], frozenset[int]] = {}
        for low, beyond, here in zip(cuts, cuts[1:], between, strict=False):
            reached = frozenset(here)
            if not reached:
                continue
            if reached not in targets:
                targets[reached] = choices.closure(set(reached))
            after = targets[reached]
            if after not in numbers:
                if len(numbers) >= max_states:
                    raise _TooLarge
                numbers[after] = len(numbers)
                new.append(after)
            for byte in range(low, beyond):
                row[byte] = numbers[after]
    final = {number for states, number in numbers.items() if end in states}
    return ByteAutomaton.of_edges(0, edges, final)


_LIMITS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)


def utf8_ranges(low: int, high: int) -> Iterator[Ranges]:
    """The UTF-8 of the characters `low..high`, as sequences of ranges of bytes.

    Args:
        low: First code point.
        high: Last code point; no surrogates lie between.
    """
    for limit in _LIMITS:
        if low <= limit < high:
            yield from utf8_ranges(low, limit)
            low = limit + 1
    if high <= 0x7F:
        yield [(low, high)]
        return
    # Where the last bytes do not run from first to last, what is over is split off.
    for place in (1, 2, 3):
        mask = (1 << 6 * place) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                yield from utf8_ranges(low, low | mask)
                yield from utf8_ranges((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from utf8_ranges(low, (high & ~mask) - 1)
                yield from utf8_ranges(high & ~mask, high)
                return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))


def as_python(pattern: str) -> str:
    r"""A pattern of plain parts with `\x{41}` written as `\U00000041`."""
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", pattern)
