"""Finite automata over tokens on the device: a mask and a step without asking the host.

`DeviceAutomaton` holds the automata of a batch as tables, in the compressed form that a mask needs:
tokens which lead every state to the same place are one *class*, so that a table has a column for
each class and not for each token. `reach` says how many tokens a member still takes behind a
token; a token is allowed if they fit into what the length cap leaves. So one comparison is the
mask of a state, the cap's included, and no mask is stored.

- `automaton_masks(state [R], left [R], tables) -> bitmask [R, W]`: what each row may draw;
- `automaton_step(state [R], token [R], tables) -> state [R]`: where it then stands.

Bits are those of every mask here: bit `v % 32` of int32 word `v // 32` is token v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from guided_smc.kernels.dispatch import on_device_of, operator, runs_kernel

FAR = np.iinfo(np.int32).max
"""`reach` of a token behind which nothing ends, and `left` of a row without a length cap."""


@dataclass(frozen=True)
class DeviceAutomaton:
    """Automata side by side, states numbered through.

    Each has one more state than it had, behind its own: the dead one, which allows nothing.

    Attributes:
        classes: int32 `[A, V]`, the class of each token in each automaton.
        following: int32 `[S, C]`, the state behind a token of each class.
        reach: int32 `[S, C]`, the fewest tokens to the end behind such a token, `FAR` where there
            is no end; of end tokens −1 where the text may end.
        owner: int32 `[S]`, the automaton of each state.
        starts: Where each automaton begins; its state s is `starts[a] + s`.
    """

    classes: torch.Tensor
    following: torch.Tensor
    reach: torch.Tensor
    owner: torch.Tensor
    starts: tuple[int, ...]

    @classmethod
    def of(
        cls,
        transitions: torch.Tensor,
        accepting: torch.Tensor,
        distances: torch.Tensor,
        eos_ids: Sequence[int],
    ) -> DeviceAutomaton:
        """One automaton, from tables such as those of `guided_smc.grammars.automata.Automaton`.

        Args:
            transitions: int32 `[S, V]`, the state after each token, −1 where it is refused.
            accepting: bool `[S]`, whether a text may end.
            distances: int32 `[S]`, the fewest tokens to the end, `FAR` where there is none.
            eos_ids: All end tokens.
        """
        n_states = len(transitions)
        table = np.full((n_states + 1, transitions.shape[1]), n_states, dtype=np.int32)
        table[:-1] = transitions.cpu().numpy()
        table[table < 0] = n_states
        classes, first = _alike(table)
        following = table[:, first]
        reach = np.append(distances.cpu().numpy(), FAR)[following]
        # End tokens are a class of their own: allowed by the state, whatever the room.
        classes[list(eos_ids)] = len(first)
        ends = np.append(accepting.cpu().numpy(), False)
        states = np.arange(n_states + 1)
        following = np.c_[following, np.where(ends, states, n_states)]
        reach = np.c_[reach, np.where(ends, -1, FAR)]
        return cls(
            torch.from_numpy(classes).unsqueeze(0),
            torch.from_numpy(np.ascontiguousarray(following, dtype=np.int32)),
            torch.from_numpy(np.ascontiguousarray(reach, dtype=np.int32)),
            torch.zeros(n_states + 1, dtype=torch.int32),
            (0,),
        )

    @classmethod
    def free(cls, real: torch.Tensor, eos_ids: Sequence[int]) -> DeviceAutomaton:
        """The automaton of rows without a constraint: every token but padding, bool `[V]`."""
        transitions = torch.where(real, 0, -1).to(torch.int32).unsqueeze(0)
        anywhere = torch.zeros(1, dtype=torch.int32)
        return cls.of(transitions, torch.ones(1, dtype=torch.bool), anywhere - 1, eos_ids)

    @classmethod
    def joined(cls, parts: Sequence[DeviceAutomaton]) -> DeviceAutomaton:
        """Several over one vocabulary and on one device, in this order."""
        sizes = [len(part.owner) for part in parts]
        offsets = [0, *accumulate(sizes)]
        width = max(part.following.shape[1] for part in parts)
        following, reach, owner = [], [], []
        automata = 0
        for part, offset in zip(parts, offsets, strict=False):
            more = (0, width - part.following.shape[1])
            following.append(torch.nn.functional.pad(part.following + offset, more))
            reach.append(torch.nn.functional.pad(part.reach, more, value=FAR))
            owner.append(part.owner + automata)
            automata += len(part.starts)
        starts = [s + o for part, o in zip(parts, offsets, strict=False) for s in part.starts]
        return cls(
            torch.cat([part.classes for part in parts]),
            torch.cat(following),
            torch.cat(reach),
            torch.cat(owner),
            tuple(starts),
        )

    def to(self, device: torch.device | str) -> DeviceAutomaton:
        """The same on another device."""
        return DeviceAutomaton(
            self.classes.to(device),
            self.following.to(device),
            self.reach.to(device),
            self.owner.to(device),
            self.starts,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        tensors = (self.classes, self.following, self.reach, self.owner)
        return sum(t.nbytes for t in tensors)

    def after(self, automaton: int, tokens: Sequence[int]) -> int:
        """The state of an automaton behind tokens: for rows that join, on the host."""
        state = self.starts[automaton]
        for token in tokens:
            state = int(self.following[state, self.classes[automaton, token]])
        return state

    def masks(self, state: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """int32 `[R, ceil(V / 32)]`: see `automaton_masks`."""
        return automaton_masks(state, left, self.classes, self.reach, self.owner)

    def step(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """int32 `[R]`: see `automaton_step`."""
        return automaton_step(state, token, self.classes, self.following, self.owner)


def _alike(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns that are the same: the class of each, int32 `[V]`, and the first of each class."""
    rng = np.random.default_rng(0)
    while True:
        # By a hash of the columns, since sorting them takes seconds; shown to be right below.
        factors = rng.integers(1, 2**63, size=len(table), dtype=np.uint64) | np.uint64(1)
        keys = np.zeros(table.shape[1], dtype=np.uint64)
        for row, factor in zip(table, factors, strict=True):
            keys += row.astype(np.uint64) * factor
        _, first, classes = np.unique(keys, return_index=True, return_inverse=True)
        if all(np.array_equal(row[first][classes], row) for row in table):
            return classes.astype(np.int32), first


# -- masks ---------------------------------------------------------------------------------------


def automaton_masks_reference(
    state: torch.Tensor,
    left: torch.Tensor,
    classes: torch.Tensor,
    reach: torch.Tensor,
    owner: torch.Tensor,
) -> torch.Tensor:
    """What `automaton_masks` is to give, in torch: its specification, and the way on the CPU."""
    state = state.long()
    width = classes.shape[1]
    mine = classes[owner[state].long()].long()
    allowed = reach[state].gather(1, mine) < left.unsqueeze(1)
    words = -(-width // 32)
    bits = torch.nn.functional.pad(allowed, (0, words * 32 - width)).view(len(state), words, 32)
    places = torch.arange(32, device=state.device, dtype=torch.int32)
    return (bits.to(torch.int32) << places).sum(dim=-1, dtype=torch.int32)


def _fake_masks(
    state: torch.Tensor,
    left: torch.Tensor,
    classes: torch.Tensor,
    reach: torch.Tensor,
    owner: torch.Tensor,
) -> torch.Tensor:
    return state.new_empty(state.shape[0], (classes.shape[1] + 31) // 32, dtype=torch.int32)


@operator(_fake_masks)
def automaton_masks(
    state: torch.Tensor,
    left: torch.Tensor,
    classes: torch.Tensor,
    reach: torch.Tensor,
    owner: torch.Tensor,
) -> torch.Tensor:
    """The tokens that each row may draw.

    Args:
        state: int32 `[R]`, by the numbers of `DeviceAutomaton`.
        left: int32 `[R]`, tokens that may still come before the end token; `FAR` for no cap. At 0
            only an end token is allowed, where the text may end.
        classes: See `DeviceAutomaton`, as for the others.
        reach: int32 `[S, C]`.
        owner: int32 `[S]`.

    Returns:
        int32 `[R, ceil(V / 32)]`.
    """
    if not runs_kernel(state):
        return automaton_masks_reference(state, left, classes, reach, owner)
    from guided_smc.kernels import automata_triton

    with on_device_of(state):
        return automata_triton.launch_masks(
            *(x.contiguous() for x in (state, left, classes, reach, owner))
        )


# -- steps ---------------------------------------------------------------------------------------


def automaton_step_reference(
    state: torch.Tensor,
    token: torch.Tensor,
    classes: torch.Tensor,
    following: torch.Tensor,
    owner: torch.Tensor,
) -> torch.Tensor:
    """What `automaton_step` is to give, in torch: its specification, and the way on the CPU."""
    at = state.long()
    mine = classes[owner[at].long(), token.clamp(min=0)].long()
    return torch.where(token < 0, state, following[at, mine])


def _fake_step(
    state: torch.Tensor,
    token: torch.Tensor,
    classes: torch.Tensor,
    following: torch.Tensor,
    owner: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(state)


@operator(_fake_step)
def automaton_step(
    state: torch.Tensor,
    token: torch.Tensor,
    classes: torch.Tensor,
    following: torch.Tensor,
    owner: torch.Tensor,
) -> torch.Tensor:
    """The state of each row behind one more token.

    A refused token leads to the dead state; an end token leaves a state in which the text may end.

    Args:
        state: int32 `[R]`.
        token: int64 `[R]`; −1 draws nothing and leaves the state.
        classes: See `DeviceAutomaton`, as for the others.
        following: int32 `[S, C]`.
        owner: int32 `[S]`.

    Returns:
        int32 `[R]`.
    """
    if not runs_kernel(state):
        return automaton_step_reference(state, token, classes, following, owner)
    from guided_smc.kernels import automata_triton

    with on_device_of(state):
        return automata_triton.launch_step(
            *(x.contiguous() for x in (state, token, classes, following, owner))
        )
