"""Triton kernels of `automata`. Imported only where triton is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS = 64
"""Words of a mask that one program makes: 2048 tokens, so that eight rows of a vocabulary of 128k
are 500 programs, and a program still reads long runs."""

ROWS = 128
"""Rows that step in one program."""


def launch_masks(
    state: torch.Tensor,
    left: torch.Tensor,
    classes: torch.Tensor,
    reach: torch.Tensor,
    owner: torch.Tensor,
) -> torch.Tensor:
    """`automaton_masks` of contiguous tensors."""
    width = classes.shape[1]
    words = -(-width // 32)
    bitmask = torch.empty(len(state), words, dtype=torch.int32, device=state.device)
    if len(state):
        masks[len(state), triton.cdiv(words, WORDS)](
            *(state, left, classes, reach, owner, bitmask),
            *(width, words, reach.shape[1]),
            WORDS=WORDS,
        )
    return bitmask


def launch_step(
    state: torch.Tensor,
    token: torch.Tensor,
    classes: torch.Tensor,
    following: torch.Tensor,
    owner: torch.Tensor,
) -> torch.Tensor:
    """`automaton_step` of contiguous tensors."""
    after = torch.empty_like(state)
    if len(state):
        step[(triton.cdiv(len(state), ROWS),)](
            *(state, token, classes, following, owner, after),
            *(len(state), classes.shape[1], following.shape[1]),
            ROWS=ROWS,
        )
    return after


@triton.jit
def masks(
    state_ptr,
    left_ptr,
    classes_ptr,
    reach_ptr,
    owner_ptr,
    bitmask_ptr,
    width,
    words,
    n_classes,
    WORDS: tl.constexpr,
):
    """Words of one row's mask: programs `(row, block of words)`.

    The row of `reach` is a few kilobytes and stays in the cache; the classes of the tokens are
    read once, in order, and by all rows of a constraint alike.
    """
    row = tl.program_id(0)
    state = tl.load(state_ptr + row).to(tl.int64)
    left = tl.load(left_ptr + row)
    owner = tl.load(owner_ptr + state).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    place = tl.arange(0, 32)
    token = word[:, None] * 32 + place[None, :]
    there = token < width
    mine = tl.load(classes_ptr + owner * width + token, mask=there, other=0)
    reach = tl.load(reach_ptr + state * n_classes + mine, mask=there, other=2147483647)
    bits = (there & (reach < left)).to(tl.int32) << place[None, :]
    # No two bits of a word are the same, so that their sum is their union.
    tl.store(bitmask_ptr + row * words + word, tl.sum(bits, axis=1), mask=word < words)


@triton.jit
def step(
    state_ptr,
    token_ptr,
    classes_ptr,
    following_ptr,
    owner_ptr,
    after_ptr,
    n_rows,
    width,
    n_classes,
    ROWS: tl.constexpr,
):
    """The states of `ROWS` rows behind a token each."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < n_rows
    state = tl.load(state_ptr + row, mask=there, other=0)
    token = tl.load(token_ptr + row, mask=there, other=-1)
    drawn = token >= 0
    owner = tl.load(owner_ptr + state, mask=drawn, other=0).to(tl.int64)
    mine = tl.load(classes_ptr + owner * width + token, mask=drawn, other=0)
    after = tl.load(following_ptr + state.to(tl.int64) * n_classes + mine, mask=drawn, other=0)
    tl.store(after_ptr + row, tl.where(drawn, after, state), mask=there)
