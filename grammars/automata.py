"""Finite automata: over bytes, and over the tokens of a vocabulary as tables.

With tables, a mask is one row and a step one entry, so that both can stay on the device, and the
fewest tokens to the end of a text are known for every state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from guided_smc.grammars.pieces import Pieces
from guided_smc.potentials import CompiledConstraint, ConstraintState

if TYPE_CHECKING:
    import torch

MAX_ENTRIES = 2**25
"""Transitions of a table: 128 MiB."""

MAX_STATES = 4096

FAR = np.iinfo(np.int32).max
"""Distance of a state that cannot be reached from, or of no state at all."""


Compiled = TypeVar("Compiled", bound=CompiledConstraint)


@dataclass(frozen=True)
class ByteAutomaton:
    """A deterministic automaton over bytes, in which every state can reach the end.

    Attributes:
        transitions: int32 `[S + 1, 256]`; S stands for "refused" and goes to itself. 0 is the
            start.
        accepting: bool `[S + 1]`.
        distances: int32 `[S + 1]`, the fewest bytes to a member.
    """

    transitions: np.ndarray
    accepting: np.ndarray
    distances: np.ndarray

    @property
    def refused(self) -> int:
        """The state of texts that no member begins with."""
        return len(self.transitions) - 1

    def advance(self, state: int, data: bytes) -> int:
        """The state after bytes."""
        for byte in data:
            state = int(self.transitions[state, byte])
        return state

    @classmethod
    def of_texts(cls, texts: Sequence[bytes], max_states: int) -> ByteAutomaton | None:
        """The automaton of a list of texts.

        Args:
            texts: At least one.
            max_states: Give up beyond.

        Returns:
            None if it has too many states.
        """
        edges: dict[int, dict[int, int]] = {0: {}}
        final: set[int] = set()
        for text in texts:
            state = 0
            for byte in text:
                if byte not in edges[state]:
                    if len(edges) >= max_states:
                        return None
                    edges[state][byte] = len(edges)
                    edges[len(edges)] = {}
                state = edges[state][byte]
            final.add(state)
        return cls.of_edges(0, edges, final)

    @classmethod
    def of_edges(
        cls, start: int, edges: dict[int, dict[int, int]], final: set[int]
    ) -> ByteAutomaton | None:
        """From transitions by byte, keeping the states that lead from the start to the end.

        Args:
            start: The first state.
            edges: For each state, where each byte leads; what is no byte is left out.
            final: States in which a text may end.
        """
        into: dict[int, list[int]] = {}
        for state, row in edges.items():
            for byte, after in row.items():
                if byte < 256:
                    into.setdefault(after, []).append(state)
        distance = dict.fromkeys(final, 0)
        frontier = list(final)
        while frontier:
            reached = [s for after in frontier for s in into.get(after, ())]
            frontier = [s for s in dict.fromkeys(reached) if s not in distance]
            for state in frontier:
                distance[state] = 1 + min(
                    distance[after]
                    for byte, after in edges[state].items()
                    if byte < 256 and after in distance
                )
        if start not in distance:
            return None
        order = [start, *sorted(s for s in distance if s != start)]
        number = {state: i for i, state in enumerate(order)}
        transitions = np.full((len(order) + 1, 256), len(order), dtype=np.int32)
        for state in order:
            for byte, after in edges.get(state, {}).items():
                if byte < 256 and after in number:
                    transitions[number[state], byte] = number[after]
        accepting = np.array([*(s in final for s in order), False])
        distances = np.array([*(distance[s] for s in order), FAR], dtype=np.int32)
        return cls(transitions, accepting, distances)


@dataclass(frozen=True)
class Automaton:
    """A constraint over the tokens of a vocabulary, as tensors.

    State 0 is the start. What `transitions` names −1 is refused; end tokens are in no mask and have
    no transition: they are allowed where `accepting` says so.

    Attributes:
        masks: int32 `[S, ceil(V / 32)]`; bit `v % 32` of word `v // 32` is token v. Every token
            after which some text of tokens still ends in a member.
        transitions: int32 `[S, V]`, the state after each token.
        accepting: bool `[S]`: whether the text may end here.
        distances: int32 `[S]`, the fewest tokens to a member; `FAR` where this vocabulary spells
            none.
    """

    masks: torch.Tensor
    transitions: torch.Tensor
    accepting: torch.Tensor
    distances: torch.Tensor

    def to(self, device: torch.device | str) -> Automaton:
        """The same on another device."""
        return Automaton(
            *(t.to(device) for t in (self.masks, self.transitions, self.accepting, self.distances))
        )

    @classmethod
    def over_tokens(
        cls, automaton: ByteAutomaton, own: Pieces, *, max_entries: int = MAX_ENTRIES
    ) -> Automaton | None:
        """The tables of an automaton over bytes; states keep their numbers.

        Args:
            automaton: Over bytes.
            own: The model's tokens.
            max_entries: Of the table of transitions.

        Returns:
            None if the table would be larger.
        """
        import torch  # here, since it takes seconds, and `guided-smc check` needs no tensors

        n_states = automaton.refused
        if n_states * len(own) > max_entries:
            return None
        transitions = _over_tokens(automaton, own)
        distances = _distances(transitions, automaton.accepting[:-1])
        reached = np.append(distances, FAR)[transitions]  # −1 is the last
        allowed = reached < FAR
        transitions[~allowed] = -1
        return cls(
            torch.from_numpy(own.pack(allowed)),
            torch.from_numpy(transitions),
            torch.from_numpy(automaton.accepting[:-1].copy()),
            torch.from_numpy(distances),
        )


class CompiledFinite:
    """A compiled constraint beside its automaton, which knows how far its states are from the end.

    Args:
        compiled: Gives states and masks.
        states: The automaton of the same language.
        own: The model's tokens.
    """

    def __init__(self, compiled: CompiledConstraint, states: ByteAutomaton, own: Pieces) -> None:
        self._compiled = compiled
        self._states = states
        self._own = own
        self.farthest = int(states.distances[:-1].max())

    def start(self) -> FiniteState:
        """The state before the first token."""
        return FiniteState(self._compiled.start(), self._states, self._own, 0)

    def fill_masks(self, states: Sequence[FiniteState], bitmask: np.ndarray) -> None:
        """Write the tokens that keep each prefix completable."""
        self._compiled.fill_masks([state.inner for state in states], bitmask)

    @cached_property
    def tables(self) -> Automaton | None:
        """The automaton over tokens; None if it would be too large."""
        return Automaton.over_tokens(self._states, self._own)

    def distance(self, state: FiniteState) -> int | None:
        """The fewest tokens to a member; None if this vocabulary spells none."""
        assert self.tables is not None
        if state.number == self._states.refused:
            return None
        distance = int(self.tables.distances[state.number])
        return None if distance == FAR else distance

    def fill_masks_within(
        self, states: Sequence[FiniteState], budgets: Sequence[int], bitmask: np.ndarray
    ) -> None:
        """`fill_masks`, without tokens behind which a member takes more than the budget's rest."""
        assert self.tables is not None
        bitmask.fill(0)
        distances = np.append(self.tables.distances.numpy(), FAR)  # −1 is the last
        for i, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            if state.number != self._states.refused:
                row = self.tables.transitions[state.number].numpy()
                bitmask[i] = self._own.pack(distances[row] < budget)


def finite(
    compiled: Compiled, states: ByteAutomaton | None, own: Pieces
) -> CompiledFinite | Compiled:
    """A compiled constraint beside its automaton, if that is small enough for tables."""
    if states is None or states.refused * len(own) > MAX_ENTRIES:
        return compiled
    return CompiledFinite(compiled, states, own)


class FiniteState:
    """A constraint's own state with the number of the automaton's."""

    __slots__ = ("_own", "_states", "inner", "number")

    def __init__(
        self, inner: ConstraintState, states: ByteAutomaton, own: Pieces, number: int
    ) -> None:
        self.inner = inner
        self._states = states
        self._own = own
        self.number = number

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a member."""
        return self.inner.accepting

    def fork(self) -> FiniteState:
        """An independent copy."""
        return FiniteState(self.inner.fork(), self._states, self._own, self.number)

    def advance(self, token: int) -> bool:
        """Consume one ordinary token. False if no member begins like this."""
        viable = self.inner.advance(token)
        piece = self._own.piece(token) if viable else b""
        self.number = self._states.advance(self.number, piece) if piece else self._states.refused
        return viable

    def forced(self) -> list[int]:
        """Tokens that are the only way on."""
        return self.inner.forced()


def _over_tokens(automaton: ByteAutomaton, own: Pieces) -> np.ndarray:
    """Transitions by token, int32 `[S, V]`; −1 where they are refused."""
    order, columns = own.by_position
    n_states = automaton.refused
    sorted_by_length = np.repeat(np.arange(n_states, dtype=np.int32)[:, None], len(own), axis=1)
    for column in columns:
        here = sorted_by_length[:, : len(column)]
        here[...] = automaton.transitions[here, column]
    sorted_by_length[sorted_by_length == automaton.refused] = -1
    if columns:
        sorted_by_length[:, len(columns[0]) :] = -1  # tokens without text
    transitions = np.empty_like(sorted_by_length)
    transitions[:, order] = sorted_by_length
    return transitions


def _distances(transitions: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """The fewest tokens from each state to an accepting one, int32 `[S]`."""
    n_states = len(transitions)
    leads_to = np.zeros((n_states, n_states + 1), dtype=bool)
    for state, row in enumerate(transitions):
        leads_to[state, row] = True  # −1 is the last column
    leads_to = leads_to[:, :-1]
    distances = np.where(accepting, 0, FAR).astype(np.int32)
    for steps in range(1, n_states + 1):
        near = distances == steps - 1
        found = (distances == FAR) & leads_to[:, near].any(axis=1)
        if not found.any():
            break
        distances[found] = steps
    return distances
