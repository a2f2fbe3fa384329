"""The Triton kernel of `windows`. Imported only where triton is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Numbers that one program copies."""


def launch(data: torch.Tensor, source: torch.Tensor, columns: int) -> None:
    """`move_rows` of a contiguous tensor."""
    _, heads, all_columns, head_dim = data.shape
    part = columns * head_dim
    if len(source) and heads and part:
        grid = (len(source) * heads, triton.cdiv(part, BLOCK))
        move[grid](*(data, source.contiguous(), heads, all_columns * head_dim, part), BLOCK=BLOCK)


@triton.jit
def move(data_ptr, source_ptr, heads, size, part, BLOCK: tl.constexpr):
    """Copy a block of `part` numbers of one head; a head has `size`."""
    row = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    source = tl.load(source_ptr + row)
    if source == row:
        return
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < part
    start = (source * heads + head) * size
    found = tl.load(data_ptr + start + place, mask=there)
    start = (row.to(tl.int64) * heads + head) * size
    tl.store(data_ptr + start + place, found, mask=there)
