"""Resampling rows whose K/V is in pages, on the device: lists of pages move, and no K/V does.

    resample_pages(table [R, P], tail [R], references [pages], tokens [R, T],
                   ancestors [R], append [R], page)
        -> (table, tail, references, tokens, copied [R, 2], missing [1])

That is `PageTable.reorder` of `guided_smc.models.pages` and then the pages of `PageTable.extend`,
which stay the specification: what a row must append next finds its place before the next pass
begins, with nothing asked of the host and with sizes that never change.

On the card these are three launches: follow the ancestors and count (one program a row); find who
copies and which pages are free (one program); hand them out (one program a row). Counts are whole
numbers, so the order of atomic additions does not matter.
"""

from __future__ import annotations

import torch

from guided_smc.kernels.dispatch import on_device_of, operator, runs_kernel

NONE = -1
"""No page, in a table; no copy, in `copied`."""

Pages = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(
    table: torch.Tensor,
    tail: torch.Tensor,
    references: torch.Tensor,
    tokens: torch.Tensor,
    ancestors: torch.Tensor,
    append: torch.Tensor,
    page: int,
) -> Pages:
    same = [torch.empty_like(x) for x in (table, tail, references, tokens)]
    new_table, new_tail, counts, new_tokens = same
    copied = table.new_empty(table.shape[0], 2)
    return new_table, new_tail, counts, new_tokens, copied, table.new_empty(1)


@operator(_fake)
def resample_pages(
    table: torch.Tensor,
    tail: torch.Tensor,
    references: torch.Tensor,
    tokens: torch.Tensor,
    ancestors: torch.Tensor,
    append: torch.Tensor,
    page: int,
) -> Pages:
    """Row i becomes the old row `ancestors[i]` and gets pages for what it appends next.

    Pages that a row held behind its tail, since it appended less than it had room for, are given
    back. The page in which a tail ends is copied for each row that will append to it while another
    row holds it; where all who hold it will append, the first of them keeps it.

    Args:
        table: int32 `[R, P]`, the pages of each row's tail in order; −1 is none.
        tail: int64 `[R]`, tokens in each row's tail.
        references: int32 `[pages]`, how often each page is held, by rows and by what else the
            caller counts there (prompts); 0 is free.
        tokens: int64 `[R, T]`, what follows the ancestors besides: the texts so far.
        ancestors: int64 `[R]`; −1 leaves a row without an ancestor: it is empty then.
        append: int64 `[R]`, the most tokens that each new row will append before the next call.
        page: Tokens in a page.

    Returns:
        `table`, `tail`, `references` and `tokens` of the new rows; `copied` int32 `[R, 2]`, the
        pages whose K/V each row has to copy first, from and to (−1 for none); `missing` int32
        `[1]`: pages that there were too few of, or that P has no room for. Unless it is 0, some
        rows have −1 where they need a page.
    """
    if not runs_kernel(table):
        return resample_pages_reference(table, tail, references, tokens, ancestors, append, page)
    from guided_smc.kernels import page_tables_triton

    with on_device_of(table):
        return page_tables_triton.launch(
            table.contiguous(),
            tail.contiguous(),
            references.contiguous(),
            tokens.contiguous(),
            ancestors.contiguous(),
            append.contiguous(),
            page,
        )


def resample_pages_reference(
    table: torch.Tensor,
    tail: torch.Tensor,
    references: torch.Tensor,
    tokens: torch.Tensor,
    ancestors: torch.Tensor,
    append: torch.Tensor,
    page: int,
) -> Pages:
    """What `resample_pages` is to give, in torch: its specification, and the way on the CPU."""
    n_rows, width = table.shape
    n_pages = len(references)
    here = ancestors >= 0
    old = ancestors.clamp(min=0)
    tail = torch.where(here, tail[old], 0)
    column = torch.arange(width, device=table.device)
    held = -(-tail // page)
    rows = torch.where(column < held.unsqueeze(1), table[old], NONE)
    counts = _add(references, table, -1)
    counts = _add(counts, rows, 1)

    # Who copies the page in which its tail ends.
    writes = here & (append > 0) & (tail % page > 0)
    ends_in = (tail // page).clamp(max=max(width - 1, 0)).unsqueeze(1)
    last = torch.where(writes, rows.gather(1, ends_in).squeeze(1), NONE)
    same = writes.unsqueeze(1) & (last.unsqueeze(1) == last)
    holders = torch.nn.functional.pad(counts, (0, 1))[last.long()]  # −1 is the last
    row = torch.arange(n_rows, device=table.device)
    first_of_all = (same.sum(dim=1) == holders) & ~(same & (row < row.unsqueeze(1))).any(dim=1)
    copies = writes & (holders > 1) & ~first_of_all

    # Free pages, lowest first: for copies, then for what is new.
    wanted = torch.where(here & (append > 0), -(-(tail + append) // page), held)
    new = wanted.clamp(max=width) - held
    starts = copies.sum() + new.cumsum(0) - new
    is_free = counts == 0
    rank = torch.where(is_free, is_free.cumsum(0) - 1, n_pages)
    free = torch.full((n_pages + 1 + n_rows * (width + 1),), NONE, device=table.device)
    free[rank] = torch.arange(n_pages, device=table.device)
    free[n_pages] = NONE
    copied_to = torch.where(copies, free[copies.cumsum(0) - 1], NONE)
    is_new = (column >= held.unsqueeze(1)) & (column < (held + new).unsqueeze(1))
    place = (starts - held).unsqueeze(1) + column
    rows = torch.where(is_new, free[place.clamp(min=0)].to(rows.dtype), rows)
    ends_here = copies.unsqueeze(1) & (column == ends_in)
    rows = torch.where(ends_here, copied_to.unsqueeze(1).to(rows.dtype), rows)

    counts = _add(counts, torch.where(copies, last, NONE), -1)
    counts = _add(counts, torch.where(is_new | ends_here, rows, NONE), 1)
    copied = torch.stack([torch.where(copies, last, NONE), copied_to.to(last.dtype)], dim=1)
    lacking = (copies.sum() + new.sum() - is_free.sum()).clamp(min=0)
    missing = (lacking + (wanted - held - new).sum()).to(table.dtype).reshape(1)
    kept = torch.where(here.unsqueeze(1), tokens[old], 0)
    return rows, tail, counts, kept, copied, missing


def _add(counts: torch.Tensor, pages: torch.Tensor, by: int) -> torch.Tensor:
    """`counts` plus `by` for each of the pages; −1 is none."""
    padded = torch.nn.functional.pad(counts, (0, 1))
    at = pages.flatten().long()
    at = torch.where(at < 0, len(counts), at)
    return padded.index_add(0, at, torch.full_like(at, by, dtype=counts.dtype))[:-1].clone()
