"""Resampling rows whose K/V is in windows, on the device: those that are replaced are overwritten.

    move_rows(data [R, heads, columns, head_dim], source [B], columns)

On the card a program takes a part of one row's head and ends at once where the row stays as it is,
as most do: a survivor keeps its place.
"""

from __future__ import annotations

import torch

from guided_smc.kernels.dispatch import check, on_device_of, operator, runs_kernel


def _fake(data: torch.Tensor, source: torch.Tensor, columns: int) -> None:
    return None


@operator(_fake, changes=("data",))
def move_rows(data: torch.Tensor, source: torch.Tensor, columns: int) -> None:
    """Make each of the first B rows what row `source` of it was, in place.

    Args:
        data: `[R, heads, C, head_dim]`, contiguous, R at least B.
        source: int64 `[B]`, in 0..R-1. Who is the source of another row is its own:
            `source[source] == source`, as `weigh_resample` has it, so that nothing is read that is
            being overwritten.
        columns: How many of the C columns are of interest; those behind stay as they are.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check("move_rows", "data", data, data.dtype, (None,) * 4, data)
    check("move_rows", "source", source, torch.int64, (None,), data)
    if not data.is_contiguous() or len(source) > len(data) or columns > data.shape[2]:
        raise ValueError(
            "move_rows: data must be contiguous, with a row for each source and all of the "
            f"columns; got {list(data.shape)}, {len(source)} sources and {columns} columns"
        )
    if runs_kernel(data):
        from guided_smc.kernels import windows_triton

        with on_device_of(data):
            windows_triton.launch(data, source, columns)
    else:
        move_rows_reference(data, source, columns)


def move_rows_reference(data: torch.Tensor, source: torch.Tensor, columns: int) -> None:
    """`move_rows` in torch: what it means."""
    data[: len(source), :, :columns] = data.index_select(0, source)[:, :, :columns]
