"""How many pages of K/V there may be, and who fits into them.

With a budget, a prompt joins the batch only if its particles fit even if each grows to
`max_tokens` and shares nothing: then nothing runs out of memory later, and whoever does not fit
yet waits. A page that particles share is counted for each of them here, though it is held once.

Attention that reads no pages has windows beside them: a copy of each row, all as wide as the
widest. A budget may count these too, and then they hold at most as many tokens as the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from guided_smc.errors import OptionError, OutOfPagesError

if TYPE_CHECKING:
    import torch

PAGE = 16
"""Tokens in a page. Here and not with the pages, so that a budget is checked without torch."""


@dataclass(frozen=True)
class Need:
    """What one prompt may come to hold.

    Attributes:
        prompt: Tokens that are prefilled.
        rows: The most particles that there may be.
        tail: The most tokens that each appends.
    """

    prompt: int
    rows: int
    tail: int

    @classmethod
    def of(cls, prompt_ids: int, rows: int, max_tokens: int) -> Need:
        """Of a request: the prompt's last token is the first that each particle appends."""
        return cls(prompt_ids - 1, rows, max_tokens + 1)

    @property
    def pages(self) -> int:
        """Pages, if the particles share nothing but the prompt."""
        return pages_of(self.prompt) + self.rows * pages_of(self.tail)

    def columns(self, in_place_from: int) -> int:
        """The most columns of a row's window: all but a prompt that is long for its rows."""
        return self.tail + min(self.prompt, in_place_from // self.rows)


@dataclass(frozen=True)
class Budget:
    """The pages that a session of a model may hold.

    Attributes:
        pages: So many.
        name: Of the model, for messages.
        in_place_from: Where windows are counted too: tokens of a prompt, times its rows, from which
            on it is in none.
    """

    pages: int
    name: str
    in_place_from: int | None = None

    @classmethod
    def of(cls, max_total_tokens: Any, name: str, in_place_from: int | None = None) -> Budget:
        """From a number of tokens.

        Raises:
            OptionError: Not a whole number, or less than a page.
        """
        number = isinstance(max_total_tokens, int) and not isinstance(max_total_tokens, bool)
        if not number or max_total_tokens < PAGE:
            raise OptionError(
                f"max_total_tokens must be a whole number from {PAGE} (a page of K/V), got "
                f"{max_total_tokens!r}"
            )
        return cls(max_total_tokens // PAGE, name, in_place_from)

    @property
    def tokens(self) -> int:
        """Tokens in all of the pages."""
        return self.pages * PAGE

    def size(self, needs: Sequence[Need]) -> int:
        """Pages that all of these may come to hold, or that their windows would take, if more."""
        pages = sum(need.pages for need in needs)
        if self.in_place_from is None or not needs:
            return pages
        widest = max(need.columns(self.in_place_from) for need in needs)
        return max(pages, pages_of(widest * sum(need.rows for need in needs)))

    def holds(self, needs: Sequence[Need]) -> bool:
        """Whether all of these fit at once."""
        return self.size(needs) <= self.pages

    def require(self, need: Need) -> None:
        """Refuse what does not fit even alone.

        Raises:
            OutOfPagesError: With what would fit.
        """
        if self.holds([need]):
            return
        left = self.pages - pages_of(need.prompt)
        rows, tail = left // pages_of(need.tail), (left // need.rows) * PAGE
        if self.in_place_from is not None:
            beside = need.columns(self.in_place_from) - need.tail
            tail = min(tail, self.tokens // need.rows - beside)
            rows = min(rows, need.rows - 1, self.tokens // need.tail)
            while rows > 0 and not self.holds([replace(need, rows=rows)]):
                rows -= 1
        needed = self.size([need])
        fits = [f"{particles(rows)} with max_tokens={need.tail - 1}"] if rows > 0 else []
        if tail > 1:
            fits.append(f"{particles(need.rows)} with max_tokens={tail - 1}")
        if not fits and left > 0:
            fits.append(f"{particles(1)} with max_tokens={left * PAGE - 1}")
        would = f"{' or '.join(fits)} would fit" if fits else "a shorter prompt could fit"
        tokens = f"{need.prompt + 1} token{'s' if need.prompt else ''}"
        raise OutOfPagesError(
            f"{particles(need.rows)} with max_tokens={need.tail - 1} behind a prompt of {tokens} "
            f"may need {needed} pages of {PAGE} tokens of K/V, and "
            f"{self.name} may hold {self.pages} (max_total_tokens={self.tokens}): {would}, or "
            f"set max_total_tokens={needed * PAGE}",
            needed=needed,
            fit=self.pages,
            allows=would,
        )


def particles(n: int) -> str:
    """So many of them, in words."""
    return f"{n} particle{'s' if n != 1 else ''}"


def pages_of(tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // PAGE)


def out_of_memory(
    name: str,
    device: torch.device,
    *,
    wanted: int,
    held: int,
    page_bytes: int,
    rows: int,
    longest: int,
    budget: Budget | None,
) -> OutOfPagesError:
    """The error of a device on which pages cannot be allocated.

    Args:
        name: Of the model.
        device: Where there is no memory left.
        wanted: Pages that there should be.
        held: Pages that there are.
        page_bytes: Bytes of a page in all layers, keys and values.
        rows: Particles now.
        longest: Tokens of the longest of them, prompt included.
        budget: Of the model, if it has one.
    """
    fit = held + free_bytes(device) // page_bytes
    rows, longest = max(rows, 1), max(longest, 1)
    allows = [
        f"{fit // pages_of(longest)} particles of the present {longest} tokens",
        f"{rows} particles with a context of {fit // rows * PAGE} tokens",
    ]
    allows = [way for way in allows if not way.startswith("0 ") and " of 0 " not in way]
    todo = "lower n_particles, max_tokens or max_rows"
    if fit > 0 and (budget is None or fit < budget.pages):
        todo += f", or set max_total_tokens={fit * PAGE}, with which requests wait for room"
    return OutOfPagesError(
        f"{name}: {device} has no memory for {wanted} pages of K/V ({PAGE} tokens and "
        f"{page_bytes / 2**20:.3g} MiB each). About {fit} fit beside the model: "
        f"{' or '.join(allows) or 'not one particle'} that share nothing. Use a smaller dtype, "
        f"{todo}",
        needed=wanted,
        fit=fit,
    )


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be had on a CUDA device; 0 where that is not known."""
    if device.type != "cuda":
        return 0
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)
