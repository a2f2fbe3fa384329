"""The page table against a naive model: who reads what, who counts what, and that nothing leaks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_smc.models.budget import PAGE
from guided_smc.models.pages import PageTable, Pool

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.integers(0, 3 * PAGE), st.integers(1, 4)),
        st.tuples(st.just("extend"), st.integers(0, 2**31), st.integers(1, PAGE + 3)),
        st.tuples(st.just("resample"), st.integers(0, 2**31), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 2**31), st.just(0)),
        st.tuples(st.just("grow"), st.integers(0, 2**31), st.just(0)),
    ),
    max_size=25,
)


class Naive:
    """Each row as the list of its tokens; pages hold tokens in the place of K/V."""

    def __init__(self) -> None:
        self.table = PageTable()
        self.pool = Pool(torch.zeros(1, 1, 1))
        self.rows: list[tuple[int, list[float]]] = []  # prompt's number, tail
        self.prompts: dict[int, list[float]] = {}
        self.next = 1.0

    def tokens(self, n: int) -> list[float]:
        """New ones, all different."""
        self.next += n
        return [self.next - n + i for i in range(n)]

    def write(self, slots: np.ndarray, tokens: list[float]) -> None:
        self.pool.reserve(self.table.capacity)
        if len(slots):
            self.pool.write(torch.from_numpy(slots), torch.tensor(tokens).view(1, -1, 1))

    def prompt(self, length: int, rows: int) -> None:
        number = self.table.add_prompt(length, rows)
        self.prompts[number] = self.tokens(length)
        self.write(self.table.prompt_start(number) + np.arange(length), self.prompts[number])
        self.rows += [(number, []) for _ in range(rows)]

    def extend(self, counts: np.ndarray) -> None:
        extension = self.table.extend(counts)
        self.pool.reserve(self.table.capacity)
        if len(extension.copied):
            self.pool.copy_pages(torch.from_numpy(extension.copied))
        new = [self.tokens(int(n)) for n in counts]
        self.write(extension.slots, [t for row in new for t in row])
        self.rows = [(p, [*tail, *more]) for (p, tail), more in zip(self.rows, new, strict=True)]

    def reorder(self, index: np.ndarray) -> None:
        old = self.rows
        common = self.table.reorder(index)
        self.rows = [old[i] for i in index]
        for r, n in enumerate(common.tolist()):
            if n >= 0:
                assert old[r][0] == self.rows[r][0]
                assert old[r][1][:n] == self.rows[r][1][:n]

    def check(self) -> None:
        """Every row reads its own tokens, and the counts are right."""
        self.table.check()
        lengths = [len(self.prompts[p]) + len(tail) for p, tail in self.rows]
        assert self.table.lengths.tolist() == lengths
        data = self.pool.data.flatten()
        for r, (number, tail) in enumerate(self.rows):
            start, n = self.table.prompt_start(number), len(self.prompts[number])
            assert data[start : start + n].tolist() == self.prompts[number]
            slots = self.table.slots(np.array([r]), 0, len(tail))[0]
            assert data[slots].tolist() == tail

    def run(self, step: tuple[str, int, int]) -> None:
        kind, a, b = step
        rng = np.random.default_rng(a)
        n = len(self.rows)
        if kind == "prompt":
            self.prompt(a, b)
        elif kind == "extend" and n:
            self.extend(rng.integers(0, b + 1, n))
        elif kind == "resample" and n:
            self.reorder(np.sort(rng.integers(0, n, n)))
        elif kind == "finish":
            self.reorder(np.flatnonzero(rng.random(n) < 0.6))
        elif kind == "grow" and n:
            self.reorder(rng.integers(0, n, n + 2))


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_any_sequence_of_operations_leaves_counts_and_contents_right(steps):
    naive = Naive()
    for step in steps:
        naive.run(step)
        naive.check()
    naive.reorder(np.zeros(0, dtype=np.int64))
    naive.check()
    assert naive.table.used == 0


def test_nothing_leaks_after_ten_thousand_operations():
    naive = Naive()
    rng = np.random.default_rng(0)
    kinds = ["prompt", "extend", "extend", "resample", "finish"]
    for i in range(10_000):
        kind = kinds[rng.integers(len(kinds))]
        if kind == "prompt" and len(naive.rows) > 12:
            kind = "finish"
        if max((len(tail) for _, tail in naive.rows), default=0) > 200:
            naive.reorder(np.zeros(0, dtype=np.int64))
        size = int(rng.integers(0, 40)) if kind == "prompt" else i
        naive.run((kind, size, int(rng.integers(1, 5))))
        if i % 500 == 0:
            naive.check()
    naive.check()
    assert naive.table.capacity < 600  # freed pages were used again
    naive.reorder(np.zeros(0, dtype=np.int64))
    naive.table.check()
    assert naive.table.used == 0


def test_a_prompt_is_held_once_and_resampling_takes_no_page():
    table = PageTable()
    table.add_prompt(10 * PAGE, 32)
    assert table.used == 10
    table.extend(np.full(32, 5))
    assert table.used == 10 + 32
    table.reorder(np.zeros(32, dtype=np.int64))
    assert table.used == 10 + 1  # all read the page of the one that survived


def test_of_rows_that_all_write_a_shared_page_one_keeps_it():
    table = PageTable()
    table.add_prompt(4, 3)
    table.extend(np.array([2, 2, 2]))
    table.reorder(np.array([1, 1, 1]))
    extension = table.extend(np.array([1, 1, 1]))
    assert len(extension.copied) == 2
    assert table.used == 1 + 3


def test_a_shared_page_is_copied_for_the_row_that_writes_it_alone():
    table = PageTable()
    table.add_prompt(4, 2)
    table.extend(np.array([2, 2]))
    table.reorder(np.array([0, 0]))
    extension = table.extend(np.array([0, 1]))
    assert len(extension.copied) == 1
    table.check()


def test_a_prompt_takes_the_first_run_of_free_pages_that_is_long_enough():
    table = PageTable()
    for rows in (1, 1, 1):
        table.add_prompt(2 * PAGE, rows)
    table.reorder(np.array([0, 2]))
    assert table.prompt_start(table.add_prompt(3 * PAGE, 1)) == 6 * PAGE
    assert table.prompt_start(table.add_prompt(2 * PAGE, 1)) == 2 * PAGE
