"""Windows of K/V that follow the ancestors of their rows, by the reference and by the kernel."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import moving_case

from guided_smc.kernels import move_rows


def moved(data: torch.Tensor, source: torch.Tensor, columns: int) -> torch.Tensor:
    """What has become of the data; elsewhere it is a copy."""
    move_rows(data, source, columns)
    return data


@pytest.fixture(params=["reference", "kernel"])
def way(request):
    """Calls a function of tensors, in this process or where it runs as a kernel."""
    if request.param == "reference":
        return lambda function, *args: function(*args)
    return request.getfixturevalue("interpreted")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "columns", "size"),
    [(1, 1, 1, 1), (5, 3, 7, 5), (9, 2, 1, 64), (33, 1, 70, 128), (4, 2, 0, 8)],
)
def test_rows_are_what_their_sources_were_and_all_else_stays(
    rows, heads, columns, size, dtype, way
):
    data, source, columns = moving_case(rows, rows, heads, columns, size, dtype)
    before = data.clone()
    after = way(moved, data, source, columns)
    for r in range(len(data)):
        of = int(source[r]) if r < rows else r
        assert torch.equal(after[r, :, :columns], before[of, :, :columns])
        assert torch.equal(after[r, :, columns:], before[r, :, columns:])
    assert rows == 1 or (source != torch.arange(rows)).any()


def test_what_does_not_fit_is_told():
    data, source, _ = moving_case(0, 3, 2, 5, 4)
    with pytest.raises(ValueError, match="data must be contiguous, with a row for each source"):
        move_rows(data.transpose(1, 2), source, 1)
    with pytest.raises(ValueError, match="3 sources and 99 columns"):
        move_rows(data, source, 99)
    with pytest.raises(ValueError, match="source must be int64"):
        move_rows(data, source.int(), 1)
