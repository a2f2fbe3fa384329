"""Whether two lexers part a text alike: that of the `lark` package, and that of llguidance.

Lark's lexer takes the first terminal in its order that matches, as long as that pattern makes it,
and never looks back. llguidance's follows all terminals that the parser takes here at once, as long
as any of them goes on, and never looks back either: where the longest one fails later, it has
failed. So the same grammar may have different texts. They are the same if, for the terminals that
Lark's parser takes at one place,

1. no text belongs to two of them,
2. Lark's lexer goes on as long as any of them could, and
3. where a terminal is complete and a next character could belong to a longer one instead, the
   parser takes nothing behind it that begins with that character. The exception is a longer text of
   the same terminal that is complete with that character: both take it.

With 3, no other division of the text could be parsed, whatever a lexer makes of it, so it does not
matter that llguidance's parser may take fewer terminals than Lark's tables say. What follows is
decided on automata: that of Lark's lexer keeps the order in which a backtracking engine would try
things, the other does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from guided_smc.grammars.patterns import MAX_REPEAT, Parsed, Ranges, characters, group_flags, named

_MOST_STATES = 20_000
"""Of the automaton of all terminals."""

_MOST_PLACES = 4_000
"""That are looked at for one grammar."""


class Differs(Exception):
    """The lexers differ, or may; the message says where."""


class Lexers:
    """Compares the lexers of a grammar.

    Args:
        terminals: Their patterns.
        follow: The terminals that may stand behind each.

    Raises:
        Differs: A pattern is not a plain regular expression, or too large.
    """

    def __init__(
        self, terminals: Mapping[str, Parsed], follow: Mapping[str, Collection[str]]
    ) -> None:
        self._automaton = _Automaton(terminals)
        self._follow = {
            name: _union(self._automaton.first(other) for other in follow[name])
            for name in terminals
        }
        self._places = 0

    def compare(self, order: Sequence[str], ignored: Collection[str]) -> None:
        """Compare them where the parser takes these terminals.

        Args:
            order: The terminals, those that are ignored too, in the order in which Lark tries them.
            ignored: Those behind which the parser is where it was.

        Raises:
            Differs: They differ, or may.
        """
        automaton = self._automaton
        here = _union(automaton.first(name) for name in order)
        start = automaton.ordered(automaton.starts[name] for name in order)
        found = {(start, frozenset(automaton.unordered(automaton.starts[n] for n in order)))}
        waiting = list(found)
        while waiting:
            tried, all_of_them = waiting.pop()
            self._places += 1
            if self._places > _MOST_PLACES:
                raise Differs("its terminals are too many to compare the lexers")
            complete = automaton.complete(all_of_them)
            if len(complete) > 1:
                first, second = sorted(complete)[:2]
                raise Differs(f"a text may be {first} or {second}")
            if complete and not automaton.complete(tried):
                raise Differs(f"Lark's lexer may stop before a longer {next(iter(complete))}")
            for symbol in _bits(automaton.next_symbols(all_of_them)):
                after = automaton.step(tried, symbol)
                all_after = frozenset(automaton.unordered(automaton.moved(all_of_them, symbol)))
                going_on = automaton.terminals_of(all_after)
                if not after:
                    raise Differs(f"Lark's lexer may stop before a longer {min(going_on)}")
                for name in complete:
                    if going_on == {name} and automaton.complete(all_after):
                        continue
                    behind = self._follow[name] | (here if name in ignored else 0)
                    if behind >> symbol & 1:
                        raise Differs(
                            f"behind {name} may stand what could be part of a longer "
                            f"{min(going_on - {name} or going_on)}"
                        )
                place = (after, all_after)
                if place not in found:
                    found.add(place)
                    waiting.append(place)


class _Automaton:
    """All terminals of a grammar, with the order in which a backtracking engine tries things.

    A state reads one character (`_reads`), goes on elsewhere (`_ways`, in order), or completes its
    terminal. Characters that no pattern tells apart are one symbol.
    """

    def __init__(self, terminals: Mapping[str, Parsed]) -> None:
        self._names: list[str] = []
        self._reads: list[tuple[Ranges, int] | None] = []
        self._ways: list[tuple[int, ...]] = []
        self._completes: set[int] = set()
        self.starts: dict[str, int] = {}
        for name, parsed in terminals.items():
            self._name = name
            self._parsed = parsed
            end = self._state()
            self._completes.add(end)
            self.starts[name] = self._sequence(parsed.items, parsed.flags, end)
        self._symbols = _symbols(read[0] for read in self._reads if read is not None)

    def first(self, name: str) -> int:
        """Symbols that a terminal may begin with, as bits."""
        return self.next_symbols(self.unordered([self.starts[name]]))

    def complete(self, states: Collection[int]) -> set[str]:
        """The terminals that are complete in these states."""
        return {self._names[s] for s in states if s in self._completes}

    def terminals_of(self, states: Collection[int]) -> set[str]:
        """The terminals that these states belong to."""
        return {self._names[s] for s in states}

    def next_symbols(self, states: Collection[int]) -> int:
        """Symbols that go on from these states, as bits."""
        return _union(self._symbols[read[0]] for s in states if (read := self._reads[s]))

    def moved(self, states: Collection[int], symbol: int) -> list[int]:
        """Where a symbol leads, in order."""
        return [
            read[1]
            for s in states
            if (read := self._reads[s]) is not None and self._symbols[read[0]] >> symbol & 1
        ]

    def step(self, states: tuple[int, ...], symbol: int) -> tuple[int, ...]:
        """Where a symbol leads in Lark's lexer."""
        return self.ordered(self.moved(states, symbol))

    def ordered(self, states: Any) -> tuple[int, ...]:
        """The states reached without a character, up to the first that is complete.

        What would be tried after that is never tried.
        """
        reached: list[int] = []
        for state in self._closure(states):
            reached.append(state)
            if state in self._completes:
                break
        return tuple(reached)

    def unordered(self, states: Any) -> list[int]:
        """The states reached without a character."""
        return list(self._closure(states))

    def _closure(self, states: Any) -> Iterator[int]:
        waiting = list(states)[::-1]
        seen = set()
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            if self._ways[state]:
                waiting += self._ways[state][::-1]
            else:
                yield state

    def _state(self, read: tuple[Ranges, int] | None = None, ways: tuple[int, ...] = ()) -> int:
        if len(self._names) >= _MOST_STATES:
            raise Differs("its terminals are too large to compare the lexers")
        self._names.append(self._name)
        self._reads.append(read)
        self._ways.append(ways)
        return len(self._names) - 1

    def _sequence(self, items: Sequence[Any], flags: int, then: int) -> int:
        for item in reversed(items):
            then = self._item(item, flags, then)
        return then

    def _item(self, item: Any, flags: int, then: int) -> int:
        ranges = characters(item, flags, self._parsed.module)
        if ranges is not None:
            return self._state(read=(ranges, then))
        op, argument = item
        match op.name:
            case "BRANCH":
                branches = [self._sequence(list(branch), flags, then) for branch in argument[1]]
                return self._state(ways=tuple(branches))
            case "SUBPATTERN":
                return self._sequence(list(argument[3]), group_flags(argument, flags), then)
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, body = argument
                return self._repeated(low, high, body, op.name == "MAX_REPEAT", flags, then)
        what = named(argument.name if op.name == "AT" else op.name)
        raise Differs(f"{self._name} has {'an' if what[0] in 'aeiou' else 'a'} {what}")

    def _repeated(self, low: int, high: Any, body: Any, greedy: bool, flags: int, then: int) -> int:
        items = list(body)

        def either(on: int, out: int) -> tuple[int, int]:
            return (on, out) if greedy else (out, on)

        if high == MAX_REPEAT:
            if body.getwidth()[0] == 0:
                raise Differs(f"{self._name} repeats what may be empty")
            loop = self._state()
            self._ways[loop] = either(self._sequence(items, flags, loop), then)
            entry = loop
        else:
            entry = then
            for _ in range(high - low):
                entry = self._state(ways=either(self._sequence(items, flags, entry), then))
        for _ in range(low):
            entry = self._sequence(items, flags, entry)
        return entry


def _symbols(classes: Any) -> dict[Ranges, int]:
    """Which symbols each class of characters has, as bits."""
    distinct = list(dict.fromkeys(classes))
    changes: dict[int, int] = {}
    for i, ranges in enumerate(distinct):
        for low, high in ranges:
            changes[low] = changes.get(low, 0) ^ (1 << i)
            changes[high + 1] = changes.get(high + 1, 0) ^ (1 << i)
    numbers: dict[int, int] = {}
    current = 0
    for place in sorted(changes):
        current ^= changes[place]
        if current:
            numbers.setdefault(current, len(numbers))
    symbols = dict.fromkeys(distinct, 0)
    for members, number in numbers.items():
        for i in _bits(members):
            symbols[distinct[i]] |= 1 << number
    return symbols


def _union(parts: Any) -> int:
    every = 0
    for part in parts:
        every |= part
    return every


def _bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low
