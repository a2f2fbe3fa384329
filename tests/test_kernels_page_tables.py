"""Pages resampled on the device against the page table of the host, operation by operation.

By the torch reference, and by the kernel in Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from guided_smc.kernels.page_tables import resample_pages, resample_pages_reference
from guided_smc.models.budget import PAGE
from guided_smc.models.pages import PageTable


@pytest.fixture(params=["reference", "kernel"])
def way(request):
    """Calls a function of tensors, in this process or where it runs as a kernel."""
    if request.param == "reference":
        return lambda function, *args: function(*args)
    return request.getfixturevalue("interpreted")


class Both:
    """The same rows in a page table and in tensors; rows that have left are empty in the latter."""

    def __init__(self, rng: np.random.Generator, n_rows: int, width: int, pages: int, way) -> None:
        self.rng = rng
        self.way = way
        self.host = PageTable()
        self.host._grow(pages)
        self.host.add_prompt(int(rng.integers(0, 3 * PAGE)), n_rows)
        self.alive = np.arange(n_rows)
        self.table = torch.full((n_rows, width), -1, dtype=torch.int32)
        self.tail = torch.zeros(n_rows, dtype=torch.int64)
        self.references = torch.from_numpy(self.host.references.copy())
        self.tokens = torch.from_numpy(rng.integers(0, 1000, (n_rows, 2 * PAGE + 3)))

    def step(self, ancestors: np.ndarray, append: np.ndarray) -> torch.Tensor:
        """Resample and append on both sides; returns how many pages the device lacked."""
        n_rows = len(ancestors)
        row_of = {int(r): i for i, r in enumerate(self.alive)}
        self.alive = np.flatnonzero(ancestors >= 0)
        index = np.array([row_of[int(a)] for a in ancestors[self.alive]], dtype=np.int64)
        self.host.reorder(index)
        extension = self.host.extend(append[self.alive])
        before = self.tokens
        found = self.way(
            resample_pages,
            *(self.table, self.tail, self.references, before),
            *(torch.from_numpy(ancestors), torch.from_numpy(append), PAGE),
        )
        self.table, self.tail, self.references, self.tokens, copied, missing = found
        old = torch.from_numpy(np.maximum(ancestors, 0))
        here = torch.from_numpy(ancestors >= 0)
        assert torch.equal(self.tokens, torch.where(here[:, None], before[old], 0))
        made = copied[copied[:, 0] >= 0]
        assert made.tolist() == extension.copied.tolist()
        self.tail = self.tail + torch.from_numpy(np.where(ancestors >= 0, append, 0))
        assert n_rows == len(self.table)
        return missing

    def check(self) -> None:
        """The same pages in the same rows, counted alike."""
        assert self.tail[self.alive].tolist() == self.host.tail.tolist()
        width = self.host._pages.shape[1]
        assert self.table[self.alive, :width].tolist() == self.host._pages.tolist()
        assert (self.table[self.alive, width:] == -1).all()
        gone = np.setdiff1d(np.arange(len(self.table)), self.alive)
        assert (self.table[gone] == -1).all() and (self.tail[gone] == 0).all()
        assert self.references.tolist() == self.host.references.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_tables_counts_and_copies_are_those_of_the_page_table(seed, way):
    rng = np.random.default_rng(seed)
    n_rows = (1, 33, 7, 20)[seed]
    both = Both(rng, n_rows, width=6, pages=6 * n_rows + 6, way=way)
    for _ in range(6):
        alive = both.alive
        ancestors = np.full(n_rows, -1)
        stay = alive[rng.random(len(alive)) < 0.95]
        stay = stay if len(stay) else alive  # with the last row the host drops the prompt
        ancestors[stay] = np.sort(rng.choice(alive, len(stay)))
        append = rng.integers(0, PAGE + 3, n_rows) * (rng.random(n_rows) < 0.8)
        append = np.minimum(append, 4 * PAGE - int(both.tail.max()))  # within 6 pages
        missing = both.step(ancestors, np.maximum(append, 0))
        assert missing.tolist() == [0]
        both.check()


def test_all_who_hold_a_page_and_append_leave_it_to_the_first_of_them(way):
    both = Both(np.random.default_rng(0), 3, width=2, pages=12, way=way)
    both.step(np.arange(3), np.array([2, 2, 2]))
    both.step(np.array([1, 1, 1]), np.array([1, 1, 1]))
    both.check()
    both.step(np.array([0, 0, 1]), np.array([0, 1, 1]))
    both.check()


def test_pages_behind_a_shorter_tail_are_given_back(way):
    both = Both(np.random.default_rng(0), 2, width=4, pages=12, way=way)
    both.step(np.arange(2), np.array([3 * PAGE, 3 * PAGE]))
    assert int((both.table >= 0).sum()) == 6
    tail = torch.tensor([PAGE + 1, 0])  # less was appended than there was room for
    nothing = torch.zeros(2, dtype=torch.int64)
    table, *_, missing = way(
        resample_pages,
        *(both.table, tail, both.references, both.tokens, torch.arange(2), nothing, PAGE),
    )
    assert (table >= 0).sum(dim=1).tolist() == [2, 0]
    assert missing.tolist() == [0]


@pytest.mark.parametrize(("pages", "width", "lacking"), [(3, 4, 3), (8, 2, 2), (2, 1, 4)])
def test_what_lacks_is_counted(pages, width, lacking, way):
    # Two rows want three pages each.
    found = way(
        resample_pages,
        torch.full((2, width), -1, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(pages, dtype=torch.int32),
        torch.zeros(2, 1, dtype=torch.int64),
        torch.arange(2),
        torch.full((2,), 3 * PAGE),
        PAGE,
    )
    assert found[5].tolist() == [lacking]
    assert int(found[2].sum()) == 6 - lacking == int((found[0] >= 0).sum())


def test_no_row_is_possible(way):
    no_rows = way(
        resample_pages,
        torch.zeros(0, 3, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
        torch.ones(5, dtype=torch.int32),
        torch.zeros(0, 4, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        PAGE,
    )
    assert no_rows[0].shape == (0, 3)
    assert no_rows[2].tolist() == [1] * 5


def random_call(seed: int, rows: int = 6) -> tuple[torch.Tensor | int, ...]:
    rng = np.random.default_rng(seed)

    def here(function, *args):
        return function(*args)

    both = Both(rng, rows, width=5, pages=6 * rows, way=here)
    both.step(np.arange(rows), rng.integers(0, 2 * PAGE, rows))
    ancestors = torch.from_numpy(rng.integers(-1, rows, rows))
    append = torch.from_numpy(rng.integers(0, PAGE, rows))
    return both.table, both.tail, both.references, both.tokens, ancestors, append, PAGE


@pytest.mark.parametrize("rows", [1, 2, 6, 64])
def test_the_kernel_gives_what_the_reference_gives(rows, interpreted):
    call = random_call(rows, rows)
    expected = resample_pages_reference(*call)
    for found, one in zip(interpreted(resample_pages, *call), expected, strict=True):
        assert found.dtype == one.dtype
        assert torch.equal(found, one)
