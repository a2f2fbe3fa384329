"""Triton kernels of `page_tables`. Imported only where triton is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS = 256
"""Of a history, copied at a time."""

PAGES = 1024
"""Of the pool, looked at together for free ones."""


def launch(
    table: torch.Tensor,
    tail: torch.Tensor,
    references: torch.Tensor,
    tokens: torch.Tensor,
    ancestors: torch.Tensor,
    append: torch.Tensor,
    page: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`resample_pages` of contiguous tensors."""
    n_rows, width = table.shape
    new_table, new_tail, new_tokens = (torch.empty_like(x) for x in (table, tail, tokens))
    counts = references.clone()
    copied = table.new_full((n_rows, 2), -1)
    missing = table.new_zeros(1)
    if n_rows:
        last, copies, first = table.new_empty(3, n_rows)
        most = max(1, min(len(references), n_rows * (width + 1)))
        free = table.new_full((most,), -1)
        columns = triton.next_power_of_2(width)
        follow[(n_rows,)](
            *(table, tail, tokens, ancestors, append, counts, new_table, new_tail, new_tokens),
            *(last, width, tokens.shape[1], page),
            COLUMNS=columns,
            TOKENS=TOKENS,
        )
        plan[(1,)](
            *(new_tail, append, ancestors, counts, last, copies, first, free, missing),
            *(n_rows, width, len(references), most, page),
            ROWS=triton.next_power_of_2(n_rows),
            PAGES=PAGES,
        )
        assign[(n_rows,)](
            *(new_tail, append, ancestors, counts, last, copies, first, free),
            *(new_table, copied, width, most, page),
            COLUMNS=columns,
        )
    return new_table, new_tail, counts, new_tokens, copied, missing


@triton.jit
def follow(
    table_ptr,
    tail_ptr,
    tokens_ptr,
    ancestors_ptr,
    append_ptr,
    counts_ptr,
    new_table_ptr,
    new_tail_ptr,
    new_tokens_ptr,
    last_ptr,
    width,
    n_tokens,
    page,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One row goes on with what its ancestor has; `last` is the page in which it will append."""
    row = tl.program_id(0).to(tl.int64)
    ancestor = tl.load(ancestors_ptr + row)
    here = ancestor >= 0
    old = tl.maximum(ancestor, 0)
    tail = tl.where(here, tl.load(tail_ptr + old), 0)
    tl.store(new_tail_ptr + row, tail)

    column = tl.arange(0, COLUMNS)
    there = column < width
    mine = tl.load(table_ptr + row * width + column, mask=there, other=-1)
    tl.atomic_add(counts_ptr + mine, -1, mask=mine >= 0)
    taken = column < (tail + page - 1) // page
    pages = tl.load(table_ptr + old * width + column, mask=there & taken, other=-1)
    tl.atomic_add(counts_ptr + pages, 1, mask=pages >= 0)
    tl.store(new_table_ptr + row * width + column, pages, mask=there)

    append = tl.load(append_ptr + row)
    writes = here & (append > 0) & (tail % page > 0)
    at = tl.sum(tl.where(column == tail // page, pages, 0), axis=0)
    tl.store(last_ptr + row, tl.where(writes, at, -1))

    for start in range(0, n_tokens, TOKENS):
        place = start + tl.arange(0, TOKENS)
        token = tl.load(tokens_ptr + old * n_tokens + place, mask=place < n_tokens, other=0)
        token = tl.where(here, token, 0)
        tl.store(new_tokens_ptr + row * n_tokens + place, token, mask=place < n_tokens)


@triton.jit
def wanted_pages(tail, append, here, width, page):
    """Pages held, pages to take, and pages for which the table has no room."""
    held = (tail + page - 1) // page
    wanted = tl.where(here & (append > 0), (tail + append + page - 1) // page, held)
    new = tl.minimum(wanted, width) - held
    return held, new, wanted - held - new


@triton.jit
def plan(
    tail_ptr,
    append_ptr,
    ancestors_ptr,
    counts_ptr,
    last_ptr,
    copies_ptr,
    first_ptr,
    free_ptr,
    missing_ptr,
    n_rows,
    width,
    n_pages,
    most,
    page,
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """For each row the place in the list of free pages of its copy (−1: none) and of what is new.

    One program: rows are few, and their places depend on each other.
    """
    row = tl.arange(0, ROWS)
    there = row < n_rows
    last = tl.load(last_ptr + row, mask=there, other=-1)
    holders = tl.load(counts_ptr + last, mask=last >= 0, other=0)
    writers = tl.zeros([ROWS], dtype=tl.int32)
    earlier = tl.zeros([ROWS], dtype=tl.int32)
    for other in range(0, n_rows):
        same = (last == tl.load(last_ptr + other)).to(tl.int32)
        writers += same
        earlier += tl.where(row > other, same, 0)
    keeps = (writers == holders) & (earlier == 0)
    copies = ((last >= 0) & (holders > 1) & ~keeps).to(tl.int32)
    tl.store(copies_ptr + row, tl.where(copies > 0, tl.cumsum(copies, axis=0) - 1, -1), mask=there)

    tail = tl.load(tail_ptr + row, mask=there, other=0)
    append = tl.load(append_ptr + row, mask=there, other=0)
    here = tl.load(ancestors_ptr + row, mask=there, other=-1) >= 0
    _, new, lost = wanted_pages(tail, append, here, width, page)
    new = tl.where(there, new, 0).to(tl.int32)
    n_copies = tl.sum(copies, axis=0)
    tl.store(first_ptr + row, n_copies + tl.cumsum(new, axis=0) - new, mask=there)

    wanted = n_copies + tl.sum(new, axis=0)
    found = n_copies * 0
    start = n_copies * 0
    while (start < n_pages) & (found < wanted):
        at = start + tl.arange(0, PAGES)
        is_free = (tl.load(counts_ptr + at, mask=at < n_pages, other=1) == 0).to(tl.int32)
        rank = found + tl.cumsum(is_free, axis=0) - 1
        tl.store(free_ptr + rank, at, mask=(is_free > 0) & (rank < most))
        found += tl.sum(is_free, axis=0)
        start += PAGES
    lacking = tl.maximum(wanted - found, 0)
    lost = tl.sum(tl.where(there, lost, 0).to(tl.int32), axis=0)
    tl.store(missing_ptr, lacking + lost)


@triton.jit
def assign(
    tail_ptr,
    append_ptr,
    ancestors_ptr,
    counts_ptr,
    last_ptr,
    copies_ptr,
    first_ptr,
    free_ptr,
    table_ptr,
    copied_ptr,
    width,
    most,
    page,
    COLUMNS: tl.constexpr,
):
    """Hand one row its pages."""
    row = tl.program_id(0).to(tl.int64)
    tail = tl.load(tail_ptr + row)
    append = tl.load(append_ptr + row)
    here = tl.load(ancestors_ptr + row) >= 0
    held, new, _ = wanted_pages(tail, append, here, width, page)

    column = tl.arange(0, COLUMNS)
    is_new = (column >= held) & (column < held + new)
    place = tl.load(first_ptr + row) + column - held
    pages = tl.load(free_ptr + place, mask=is_new & (place < most), other=-1)
    tl.store(table_ptr + row * width + column, pages, mask=is_new)
    tl.store(counts_ptr + pages, tl.full([COLUMNS], 1, tl.int32), mask=is_new & (pages >= 0))

    copy = tl.load(copies_ptr + row)
    if copy >= 0:
        source = tl.load(last_ptr + row)
        target = tl.load(free_ptr + copy, mask=copy < most, other=-1)
        tl.atomic_add(counts_ptr + source, -1)
        tl.store(counts_ptr + target, 1, mask=target >= 0)
        tl.store(table_ptr + row * width + tail // page, target)
        tl.store(copied_ptr + row * 2, source)
        tl.store(copied_ptr + row * 2 + 1, target)
