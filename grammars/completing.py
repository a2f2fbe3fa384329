"""Short completions: what a text may still need to become a member of a constraint's language.

A search over bytes, by the constraint's own masks: it needs no model, and what is found is counted
in the fewest tokens that spell it. First greedily, by bytes that tend to end things; then best
first, over a limited number of texts. What is found is a completion, though not always the
shortest; where nothing is found, nothing is said.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

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
_MOST_TEXTS = 400


class Completions:
    """Looks for completions in a language.

    Args:
        compiled: The constraint bound to `matching.every_byte()`, where token b is byte b.
        alphabet: Bytes to use.
    """

    def __init__(self, compiled: CompiledConstraint, alphabet: Iterable[int]) -> None:
        self._compiled = compiled
        self._alphabet = sum(1 << byte for byte in alphabet)
        self._viable = compiled.viable if isinstance(compiled, Unmasked) else None
        self._words = np.empty((1, 9), dtype=np.int32)

    def start(self) -> Any:
        """The state in front of every text."""
        return self._compiled.start()

    def after(self, state: Any, data: bytes) -> Any | None:
        """The state after more bytes; None if no member begins like this."""
        state = state.fork()
        for byte in data:
            if self._viable is not None and not self._viable(state, byte):
                return None
            if not state.advance(byte):
                return None
        return state

    def completes(self, state: Any, data: bytes) -> bool:
        """Whether the text becomes a member by these bytes."""
        end = self.after(state, data)
        return end is not None and bool(end.accepting)

    def greedy(self, state: Any) -> bytes | None:
        """A completion, found by taking at each place the byte that tends to end things."""
        state, found = state.fork(), bytearray()
        before, skipped = 0, 0
        while len(found) <= _LONGEST_GREEDY:
            if state.accepting:
                return bytes(found)
            allowed = self._allowed(state)
            # Some loop, such as that of an identifier or of spaces: leave by another way.
            skipped = skipped + 1 if allowed == before else 0
            before, left, taken = allowed, skipped, None
            for byte in _ranked(allowed):
                if self._viable is not None and not self._viable(state, byte):
                    continue
                taken = byte
                if left == 0:
                    break
                left -= 1
            if taken is None or not state.advance(taken):
                return None
            found.append(taken)
        return None

    def shortest(self, state: Any) -> bytes | None:
        """A completion, found by trying the shortest texts first, or greedily if they get many."""
        known = self.greedy(state)
        queue: list[tuple[int, int, bytes, Any]] = [(0, 0, b"", state.fork())]
        count = 0
        while queue and count < _MOST_TEXTS:
            _, _, data, place = heapq.heappop(queue)
            if place.accepting:
                return data
            if known is not None and len(data) + 1 >= len(known):
                continue
            allowed = self._allowed(place)
            for byte in _representatives(allowed):
                if self._viable is not None and not self._viable(place, byte):
                    continue
                after = place.fork()
                if after.advance(byte):
                    count += 1
                    longer = data + bytes([byte])
                    heapq.heappush(queue, (len(longer), count, longer, after))
        return known

    def _allowed(self, state: Any) -> int:
        """The next bytes, as the bits of a number."""
        self._compiled.fill_masks([state], self._words)
        bits = int.from_bytes(self._words.tobytes(), "little")
        return bits & self._alphabet


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
