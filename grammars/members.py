"""Random members of a constraint's language, without a model: to see what a schema lets through.

A text grows character by character, of kinds that make texts people would write, and after a
random length it turns to whatever closes it: quotes, brackets, the end. Which characters close most
eagerly is drawn anew for each text, since that depends on the grammar. A text that comes to a dead
end, or grows too long, is given up and another one begun, with more patience each few times.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

from guided_smc.errors import ConstraintError, OptionError
from guided_smc.grammars.characters import next_bytes
from guided_smc.grammars.keywords import shorten
from guided_smc.grammars.matching import every_byte
from guided_smc.potentials import Completion, Constraint

MAX_CHARACTERS = 2000
"""Of a member, unless something else is asked for."""

_TRIES_EACH = 8
_PATIENCE = tuple(
    p for p in (20, 40, 80, 160, 320, 640, 1280, math.inf) for _ in range(_TRIES_EACH)
)
"""Characters that each try for one member may take beyond its turn."""

_GROWTH = 30.0
"""Characters after which a text turns to its end, on average."""

_KINDS: tuple[tuple[str, float, float], ...] = (
    (string.ascii_letters, 6.0, 2.0),
    (string.digits, 3.0, 2.0),
    ("\"'`", 2.0, 0.0),
    (")]}>", 2.0, 1.0),
    ("([{<", 1.5, 4.0),
    (",:;=.-", 2.0, 3.0),
    ("\\", 0.1, 5.0),
    (" ", 0.4, 3.5),
    ("\n", 0.1, 4.0),
    ("".join(map(chr, range(32))) + "\x7f", 0.01, 5.0),
)
"""Characters, how much of a growing text they make, and how late they come when it closes."""

_OTHER = (1.0, 2.5)
_BEYOND_ASCII = (0.2, 4.0)


def _table() -> tuple[list[int], list[float], list[float]]:
    """Kind, share and rank of each byte."""
    kinds, shares, ranks = [], [], []
    for byte in range(256):
        kind, share, rank = len(_KINDS), *_OTHER
        if byte >= 128:
            kind, share, rank = len(_KINDS) + 1, *_BEYOND_ASCII
        for i, (characters, *numbers) in enumerate(_KINDS):
            if chr(byte) in characters and kind >= len(_KINDS):
                kind, (share, rank) = i, numbers
        kinds.append(kind)
        shares.append(share)
        ranks.append(rank)
    return kinds, shares, ranks


_KIND, _SHARE, _RANK = _table()


def sample_members(
    constraint: Constraint,
    n: int,
    *,
    seed: int | None = None,
    max_characters: int = MAX_CHARACTERS,
) -> list[str]:
    """Random members of a constraint's language; they may repeat.

    Every member can come up, but with no probability worth naming: this shows what a constraint
    allows, not what a model would say.

    Args:
        constraint: Of any kind, whose check is asked too.
        n: How many.
        seed: The same seed gives the same members; None draws one.
        max_characters: Of each member at most. About 30 characters after its beginning a member
            turns to what closes it.

    Raises:
        OptionError: A number is too small.
        ConstraintError: No member was found in some tries, or the constraint's limits were
            exceeded.
    """
    if n < 0:
        raise OptionError(f"n must be at least 0, got {n}")
    if max_characters < 0:
        raise OptionError(f"max_characters must be at least 0, got {max_characters}")
    draw = random.Random(seed)
    members: list[str] = []
    first = 0  # what was far too little for the last member will be for the next
    for _ in range(n):
        member, tries = _member(constraint, draw, max_characters, first)
        members.append(member)
        first = max(0, tries - tries % _TRIES_EACH - _TRIES_EACH)
    return members


def _member(constraint: Constraint, draw: random.Random, most: int, first: int) -> tuple[str, int]:
    """A member, and which try it was; the first one is that of a number."""
    longest = ""
    for i, patience in enumerate(_PATIENCE[first:], first):
        walk = _Walk(constraint, draw, most, patience)
        if walk.go():
            return walk.text, i
        longest = max(longest, walk.text, key=len)
    raise ConstraintError(
        f"{shorten(constraint.name)}: no member of up to {most} characters was found in "
        f"{len(_PATIENCE) - first} tries (the longest beginning: {shorten(longest)!r}); allow "
        "longer ones, or look whether there are any"
    )


class _Walk:
    """One try.

    Args:
        constraint: The language.
        draw: Random numbers.
        most: Characters at most.
        patience: Characters at most after the turn to the end.

    Attributes:
        text: So far.
    """

    def __init__(
        self, constraint: Constraint, draw: random.Random, most: int, patience: float
    ) -> None:
        self._compiled: Any = constraint.compile(every_byte())
        self._check = constraint.check()
        self._draw = draw
        self._turn = min(draw.expovariate(1 / _GROWTH), most / 4)
        self._most = min(most, self._turn + patience)
        # Mostly in the order of the ranks; sometimes quite another one, for odd grammars.
        spread = 0.9 if draw.random() < 0.7 else 4.0
        self._eager = [rank + spread * draw.random() for rank in _RANK]
        self._liking = [draw.lognormvariate(0.0, 0.7) for _ in range(len(_KINDS) + 2)]
        if draw.random() < 0.3:
            self._liking[:2] = [20.0, 20.0]  # letters and digits: words and numbers
        self.text = ""

    def go(self) -> bool:
        """Whether a member was reached."""
        state = self._compiled.start()
        while True:
            closing = len(self.text) >= self._turn
            if state.accepting and (closing or self._draw.random() < 0.2) and self._is_member():
                return True
            after = self._step(state, closing) if len(self.text) < self._most else None
            if after is None:
                return bool(state.accepting) and self._is_member()
            state = after

    def _step(self, state: Any, closing: bool) -> Any:
        """The state after one more character; None at a dead end."""
        for byte in self._order(next_bytes(self._compiled, state), closing):
            after = state.fork()
            if not after.advance(byte):
                continue
            data = bytes([byte]) if byte < 128 else self._finished(bytes([byte]), after)
            if data is None:
                continue
            longer = self.text + data.decode()
            if self._may_go_on(longer):
                self.text = longer
                return after
        return None

    def _finished(self, data: bytes, state: Any) -> bytes | None:
        """A whole character from its first byte on; None if none was found."""
        while True:
            try:
                data.decode()
                return data
            except UnicodeDecodeError:
                pass
            allowed = next_bytes(self._compiled, state)
            self._draw.shuffle(allowed)
            for byte in allowed:
                after = state.fork()
                if 0x80 <= byte < 0xC0 and after.advance(byte):
                    data += bytes([byte])
                    state.advance(byte)
                    break
            else:
                return None

    def _order(self, allowed: Sequence[int], closing: bool) -> Iterator[int]:
        """Bytes in the order in which they are tried."""
        # What comes again and again closes nothing.
        stuck = len(self.text) >= 6 and len(set(self.text[-6:])) == 1
        if closing and not stuck and self._draw.random() < 0.9:
            yield from sorted(allowed, key=self._eager.__getitem__)
            return
        by_kind: dict[int, list[int]] = {}
        for byte in allowed:
            by_kind.setdefault(_KIND[byte], []).append(byte)
        while by_kind:
            kinds = list(by_kind)
            weights = [_SHARE[by_kind[kind][0]] * self._liking[kind] for kind in kinds]
            (kind,) = self._draw.choices(kinds, weights)
            members = by_kind[kind]
            yield members.pop(self._draw.randrange(len(members)))
            if not members:
                del by_kind[kind]

    def _may_go_on(self, text: str) -> bool:
        if self._check is None or not self._check.scores_prefixes:
            return True
        return self._check.log_prefix([_completion(text, False)])[0] > -math.inf

    def _is_member(self) -> bool:
        if self._check is None:
            return True
        return self._check.log_complete([_completion(self.text, True)])[0] > -math.inf


def _completion(text: str, finished: bool) -> Completion:
    return Completion("", tuple(text.encode()), text, finished, every_byte())
