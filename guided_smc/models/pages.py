"""Pages of K/V and who holds them.

A prompt is stored once for all rows that continue it, in a run of pages side by side. What a row
has appended since (its tail) is a list of pages of its own or shared with rows of the same
ancestry. A page that rows share is never written: a row that must append to a partly filled one
gets a copy first. Resampling rewrites the lists of pages.

`PageTable` is the one owner of every reference count and holds no K/V; `Pool` is the K/V of one
layer and counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from guided_smc.models.budget import PAGE

_NONE = -1


@dataclass(frozen=True)
class Extension:
    """What appending does to the pages.

    Attributes:
        slots: int64 `[sum(counts)]`, where each new token goes, row by row: page · PAGE + offset.
        copied: int64 `[C, 2]`, pages to copy before that (from, to): partly filled shared ones.
    """

    slots: np.ndarray
    copied: np.ndarray


class PageTable:
    """The pages of the rows of a batch, with their reference counts.

    Attributes:
        references: int32 `[pages]`; a page of 0 is free. A prompt holds each of its pages once,
            as long as a row continues it; a row holds each page of its tail once.
        prompt: int64 `[R]`, the prompt of each row, by number.
        prompt_lengths: int64 `[R]`, tokens of each row's prompt.
        tail: int64 `[R]`, tokens that each row has appended.
    """

    def __init__(self) -> None:
        self.references = np.zeros(0, dtype=np.int32)
        self.prompt = np.zeros(0, dtype=np.int64)
        self.prompt_lengths = np.zeros(0, dtype=np.int64)
        self.tail = np.zeros(0, dtype=np.int64)
        self._pages = np.zeros((0, 0), dtype=np.int64)  # of the tails, _NONE behind their ends
        self._prompts: dict[int, tuple[int, int]] = {}  # number to first page and tokens
        self._next_prompt = 0

    def __len__(self) -> int:
        """Rows."""
        return len(self.prompt)

    @property
    def capacity(self) -> int:
        """Pages there must be room for."""
        return len(self.references)

    @property
    def used(self) -> int:
        """Pages that are held."""
        return int(np.count_nonzero(self.references))

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[R]`, tokens of each row, its prompt included."""
        return self.prompt_lengths + self.tail

    def prompt_start(self, number: int) -> int:
        """The slot of a prompt's first token; the others follow it."""
        return self._prompts[number][0] * PAGE

    def prompt_length(self, number: int) -> int:
        """Tokens of a prompt."""
        return self._prompts[number][1]

    def prompt_pages(self, number: int) -> np.ndarray:
        """int64, the pages of a prompt, in order."""
        first, length = self._prompts[number]
        return np.arange(first, first - (-length // PAGE))

    @property
    def pages(self) -> np.ndarray:
        """int64 `[R, ...]`, the pages of each row's tail, in order; −1 behind them."""
        return self._pages

    def add_prompt(self, length: int, rows: int) -> int:
        """Append `rows` rows with empty tails that continue a new prompt; returns its number."""
        number, n_pages = self._next_prompt, -(-length // PAGE)
        self._next_prompt += 1
        first = self._take_run(n_pages)
        self._prompts[number] = (first, length)
        self.prompt = np.append(self.prompt, np.full(rows, number))
        self.prompt_lengths = np.append(self.prompt_lengths, np.full(rows, length))
        self.tail = np.append(self.tail, np.zeros(rows, dtype=np.int64))
        self._pages = np.pad(self._pages, ((0, rows), (0, 0)), constant_values=_NONE)
        if not rows:
            self._drop_prompts()
        return number

    def has_runs(self, lengths: Sequence[int], limit: int) -> bool:
        """Whether prompts of these lengths find pages side by side, within `limit` pages in all."""
        taken = np.zeros(limit, dtype=bool)
        taken[: self.capacity] = self.references > 0
        for length in lengths:
            n_pages = -(-length // PAGE)
            first = _first_run(~taken, n_pages)
            if first + n_pages > limit:
                return False
            taken[first : first + n_pages] = True
        return True

    def extend(self, counts: np.ndarray) -> Extension:
        """Append `counts` `[R]` tokens to the rows' tails."""
        rows = np.arange(len(self))
        filled = -(-self.tail // PAGE)
        needed = -(-(self.tail + counts) // PAGE)
        if needed.max(initial=0) > self._pages.shape[1]:
            more = int(needed.max()) - self._pages.shape[1]
            self._pages = np.pad(self._pages, ((0, 0), (0, more)), constant_values=_NONE)
        copied = self._copy_on_write(rows[(self.tail % PAGE > 0) & (counts > 0)])
        new = needed - filled
        owner = np.repeat(rows, new)
        place = np.repeat(filled, new) + _within(new)
        pages = self._take(len(owner))
        self._pages[owner, place] = pages
        owner = np.repeat(rows, counts)
        position = np.repeat(self.tail, counts) + _within(counts)
        self.tail = self.tail + counts
        return Extension(self._pages[owner, position // PAGE] * PAGE + position % PAGE, copied)

    def reorder(self, index: np.ndarray) -> np.ndarray:
        """Row i becomes the old row `index[i]`; what no row holds any more is free.

        Returns int64 `[len(index)]`: the leading tokens of the tail that the new row and the old
        one in its place have in common: on the same pages, both continuing one prompt (-1 if they
        do not, or if there was none).
        """
        before = len(self)
        old, old_prompt = self._pages, self.prompt
        self._pages = old[index]
        self.prompt, self.tail = old_prompt[index], self.tail[index]
        self.prompt_lengths = self.prompt_lengths[index]
        self._count(old, -1)
        self._count(self._pages, 1)
        self._drop_prompts()
        common = np.full(len(index), -1, dtype=np.int64)
        n = min(before, len(index))
        differ = np.pad(self._pages[:n] != old[:n], ((0, 0), (0, 1)), constant_values=True)
        agree = differ.argmax(axis=1)
        common[:n] = np.minimum(agree * PAGE, self.tail[:n])
        common[:n][self.prompt[:n] != old_prompt[:n]] = -1
        return common

    def slots(self, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
        """int64 `[len(rows), stop - start]`, where the tails' tokens from `start` to `stop` are.

        Behind a row's end stands some slot.
        """
        position = np.arange(start, stop)
        if not self._pages.shape[1]:
            return np.zeros((len(rows), stop - start), dtype=np.int64)
        place = np.minimum(position // PAGE, self._pages.shape[1] - 1)
        pages = np.maximum(self._pages[rows][:, place], 0)
        return np.asarray(pages * PAGE + position % PAGE)

    def check(self) -> None:
        """Raise AssertionError unless counts and holders agree: for tests."""
        expected = np.zeros_like(self.references)
        for number, (first, length) in self._prompts.items():
            assert np.any(self.prompt == number), f"prompt {number} is held by no row"
            expected[first : first + -(-length // PAGE)] += 1
        for r in range(len(self)):
            n = -(-int(self.tail[r]) // PAGE)
            assert np.all(self._pages[r, :n] != _NONE) and np.all(self._pages[r, n:] == _NONE)
            np.add.at(expected, self._pages[r, :n], 1)
        assert np.array_equal(expected, self.references), "reference counts are wrong"

    # -- counting --------------------------------------------------------------------------------

    def _copy_on_write(self, rows: np.ndarray) -> np.ndarray:
        """Give each of `rows` its last page for itself; returns the copies made.

        Where all holders of a page are about to write, one of them keeps it.
        """
        last = self.tail[rows] // PAGE
        pages = self._pages[rows, last]
        if np.all(self.references[pages] == 1):
            return np.zeros((0, 2), dtype=np.int64)  # as it mostly is
        _, first, inverse, writers = np.unique(
            pages, return_index=True, return_inverse=True, return_counts=True
        )
        all_write = (writers == self.references[pages[first]])[inverse]
        keeps = all_write & (first[inverse] == np.arange(len(rows)))
        copies = (self.references[pages] > 1) & ~keeps
        new = self._take(int(copies.sum()))
        self._pages[rows[copies], last[copies]] = new
        np.subtract.at(self.references, pages[copies], 1)
        return np.stack([pages[copies], new], axis=1)

    def _take(self, n: int) -> np.ndarray:
        """N free pages, held once."""
        free = np.flatnonzero(self.references == 0)[:n]
        if len(free) < n:
            more = n - len(free)
            free = np.append(free, np.arange(self.capacity, self.capacity + more))
            self._grow(self.capacity + more)
        self.references[free] = 1
        return free

    def _take_run(self, n: int) -> int:
        """N pages side by side, held once; returns the first."""
        if not n:
            return 0
        first = _first_run(self.references == 0, n)
        self._grow(max(self.capacity, first + n))
        self.references[first : first + n] = 1
        return first

    def _grow(self, capacity: int) -> None:
        self.references = np.pad(self.references, (0, capacity - self.capacity))

    def _count(self, pages: np.ndarray, by: int) -> None:
        held = pages[pages != _NONE]
        self.references += (by * np.bincount(held, minlength=self.capacity)).astype(np.int32)

    def _drop_prompts(self) -> None:
        """Free the prompts that no row continues."""
        held = set(self.prompt.tolist())
        for number in [p for p in self._prompts if p not in held]:
            first, length = self._prompts.pop(number)
            self.references[first : first + -(-length // PAGE)] -= 1


class NoMemoryError(Exception):
    """A device has no memory for so many pages."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.pages = pages


class Pool:
    """Keys or values of one layer, by slot: `[heads, pages · PAGE, head_dim]`.

    The last page is nobody's: what is written there leaves no trace.
    """

    def __init__(self, like: torch.Tensor, limit: int | None = None) -> None:
        """Like keys or values `[..., heads, tokens, head_dim]`, of at most `limit` pages."""
        self.data = like.new_zeros(like.shape[-3], 0, like.shape[-1])
        self.limit = limit
        self.moves = 0  # how often the data has moved

    @property
    def pages(self) -> torch.Tensor:
        """The same as `[pages, heads, PAGE, head_dim]`: a view, as kernels over pages take it."""
        heads, _, head_dim = self.data.shape
        return self.data.view(heads, -1, PAGE, head_dim).transpose(0, 1)

    @property
    def room(self) -> int:
        """Pages there is room for."""
        return max(self.data.shape[1] // PAGE - 1, 0)

    @property
    def spare(self) -> int:
        """A slot of the page that is nobody's."""
        return self.data.shape[1] - 1

    def reserve(self, pages: int) -> None:
        """Make room for so many pages, with some to spare.

        On CUDA a pool with a limit gets all of its pages at once: to grow takes room for the old
        and the new ones, and a captured graph needs them to stay where they are.

        Raises:
            NoMemoryError: There is no memory for them.
        """
        have = self.room
        if pages <= have:
            return
        size = max(pages, have + have // 4)
        if self.limit is not None:
            if pages > self.limit:
                raise NoMemoryError(pages)
            size = self.limit if self.data.is_cuda else min(size, self.limit)
        new = self._allocate(size, pages)
        new[:, : self.data.shape[1]] = self.data
        self.data = new
        self.moves += 1

    def _allocate(self, *sizes: int) -> torch.Tensor:
        """Zeros for the first of these numbers of pages for which there is memory."""
        heads, _, head_dim = self.data.shape
        for pages in sizes:
            try:
                return self.data.new_zeros(heads, (pages + 1) * PAGE, head_dim)
            except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's is plain
                refused = error
        raise NoMemoryError(sizes[-1]) from refused

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Put `[heads, n, head_dim]` at `n` slots."""
        self.data.index_copy_(1, slots, values)

    def copy_pages(self, copied: torch.Tensor) -> None:
        """Copy whole pages, `[n, 2]` from and to."""
        pages = self.data.view(self.data.shape[0], -1, PAGE, self.data.shape[2])
        pages.index_copy_(1, copied[:, 1], pages.index_select(1, copied[:, 0]))


def _within(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... counts[0] − 1, 0, 1, ... counts[1] − 1, ..."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)


def _first_run(free: np.ndarray, n: int) -> int:
    """Where the first `n` free pages side by side begin; else where those at the end do."""
    ends = np.flatnonzero(~np.append(free, False))
    starts = np.append(0, ends[:-1] + 1)
    fits = np.flatnonzero(ends - starts >= n)
    return int(starts[fits[0]]) if len(fits) else int(starts[-1])
