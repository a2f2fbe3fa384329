"""Each kernel's time against the time that its memory takes, and its error against its reference.

Between calls the caches are swept, as a pass of the model sweeps them. On a CPU the references run
in the kernels' places: that shows that the lines run, and says nothing of speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from guided_smc.kernels import automata, page_tables, sampling, verification, weighing, windows

ROWS = 8
DRAFTED = 8
WRONG = 1e30
"""A difference that JSON can hold, where one of two is NaN or infinite."""

_SWEEP = 2**28  # bytes, more than any card's cache holds


def measure_kernels(
    device: torch.device, bytes_per_s: float, vocabulary: int, quick: bool
) -> dict[str, Any]:
    """For each kernel: seconds, the floor of its bytes, and the largest difference.

    Args:
        device: Where they run.
        bytes_per_s: What memory gives.
        vocabulary: V.
        quick: Few calls.
    """
    return {
        name: measure(*made, bytes_per_s=bytes_per_s, quick=quick)
        for name, made in calls(device, vocabulary).items()
    }


Call = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], int | None]
"""A kernel, its reference, their arguments, and the bytes that it has to read and write, where
these are not all of the arguments' and results'."""


def calls(device: torch.device, vocabulary: int) -> dict[str, Call]:
    """Of each kernel: itself, its reference, and arguments."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    def whole(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=random).to(device, dtype)

    def same(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    words = -(-vocabulary // 32)
    bits = whole(2**31, ROWS, words, dtype=torch.int32)
    seed, counter = whole(2**40, ROWS), whole(100, ROWS)
    one, active = same(1.0, torch.float32, ROWS), same(1, torch.bool, ROWS)
    drafted = whole(vocabulary, ROWS, DRAFTED)
    groups, n = 8, 8
    n_states, n_classes = 16, 12
    tables = (
        whole(n_classes, 1, vocabulary, dtype=torch.int32),
        whole(n_states, n_states, n_classes, dtype=torch.int32),
        whole(9, n_states, n_classes, dtype=torch.int32),
        same(0, torch.int32, n_states),
    )
    classes, following, reach, owner = tables
    state, left = whole(n_states, ROWS, dtype=torch.int32), whole(9, ROWS, dtype=torch.int32)
    pages = torch.arange(ROWS * 8, device=device, dtype=torch.int32).view(ROWS, 8)
    windows_of = normal(ROWS, 8, 512, 64)
    all_bytes: dict[str, tuple[Any, ...]] = {
        "sample_masked": (
            sampling.sample_masked,
            sampling.sample_masked_reference,
            (normal(ROWS, vocabulary), bits, one, seed, counter, active),
        ),
        "sample_masked, no mask": (
            sampling.sample_masked,
            sampling.sample_masked_reference,
            (normal(ROWS, vocabulary), None, one, seed, counter, active),
        ),
        "verify": (
            verification.verify,
            verification.verify_reference,
            (
                normal(ROWS, DRAFTED + 1, vocabulary),
                *(drafted, same(DRAFTED, torch.int64, ROWS), bits, one),
                *(same(1.0, torch.float64, ROWS), seed, counter, active),
            ),
        ),
        "weigh_resample": (
            weighing.weigh_resample,
            weighing.weigh_resample_reference,
            (
                *(normal(groups, n, dtype=torch.float64) for _ in range(2)),
                None,
                same(0.5, torch.float64, groups),
                same(0.3, torch.float64, groups, n),
                "systematic",
            ),
        ),
        "resample_pages": (
            page_tables.resample_pages,
            page_tables.resample_pages_reference,
            (
                pages,
                same(100, torch.int64, ROWS),
                torch.ones(2 * ROWS * 8, dtype=torch.int32, device=device)
                * (torch.arange(2 * ROWS * 8, device=device) < ROWS * 8),
                whole(vocabulary, ROWS, 256),
                whole(ROWS, ROWS).sort().values,
                same(DRAFTED + 1, torch.int64, ROWS),
                16,
            ),
        ),
        "automaton_masks": (
            automata.automaton_masks,
            automata.automaton_masks_reference,
            (state, left, classes, reach, owner),
        ),
        "automaton_step": (
            automata.automaton_step,
            automata.automaton_step_reference,
            (state, whole(vocabulary, ROWS), classes, following, owner),
        ),
    }
    move = (
        windows.move_rows,
        windows.move_rows_reference,
        (windows_of, torch.arange(ROWS, device=device) // 2 * 2, 512),
        windows_of.nbytes,  # every other row is read, and the one behind it is written
    )
    return {**{name: (*made, None) for name, made in all_bytes.items()}, "move_rows": move}


def measure(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: tuple[Any, ...],
    moved: int | None,
    *,
    bytes_per_s: float,
    quick: bool,
) -> dict[str, Any]:
    found, expected = (tensors(results(call, arguments)) for call in (kernel, reference))
    device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
    seconds = timed(lambda: kernel(*arguments), device, quick)
    if moved is None:
        moved = sum(x.nbytes for x in (*tensors(arguments), *found))
    floor = moved / bytes_per_s
    return {
        "seconds": seconds,
        "floor_seconds": floor,
        "share_of_floor": floor / seconds,
        **differences(found, expected),
    }


def results(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What a kernel returns; if that is nothing, what it has made of its first argument."""
    given = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    found = call(*given)
    return given[0] if found is None else found


def tensors(of: Any) -> list[torch.Tensor]:
    return [x for x in (of if isinstance(of, tuple) else (of,)) if isinstance(x, torch.Tensor)]


def differences(found: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, float]:
    """Of whole numbers the share that differs, of others the largest difference."""
    whole, real = 0.0, 0.0
    for a, b in zip(found, expected, strict=True):
        if a.is_floating_point():
            same = (a == b) | (a.isnan() & b.isnan())
            off = torch.where(same, torch.zeros_like(a), (a - b).abs())
            # Where one is no number and the other is, no difference is large enough.
            real = max(real, float(off.nan_to_num(nan=WRONG, posinf=WRONG).max()))
        else:
            whole = max(whole, float((a != b).double().mean()))
    return {"share_of_integers_that_differ": whole, "largest_difference": real}


def timed(run: Callable[[], Any], device: torch.device, quick: bool) -> float:
    """Seconds of one call: the median of several, the caches swept before each."""
    repeats = 3 if quick else 50
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
        return sorted(found)[len(found) // 2]
    sweep = torch.empty(_SWEEP, dtype=torch.uint8, device=device)
    for _ in range(3):
        run()
    # As a graph: what launching takes the host is not the kernel's time.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        sweep.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    found = sorted(begin.elapsed_time(end) / 1e3 for begin, end in events)
    return found[len(found) // 2]


def kernel_table(kernels: dict[str, Any]) -> Table:
    table = Table(title="Kernels")
    for column in ("", "µs", "floor µs", "share", "integers off", "largest difference"):
        table.add_column(column, justify="left" if not column else "right")
    for name, each in kernels.items():
        table.add_row(
            name,
            f"{1e6 * each['seconds']:.1f}",
            f"{1e6 * each['floor_seconds']:.2f}",
            f"{each['share_of_floor']:.0%}",
            f"{each['share_of_integers_that_differ']:.2g}",
            f"{each['largest_difference']:.2g}",
        )
    return table
