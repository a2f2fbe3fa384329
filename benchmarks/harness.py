"""A small harness: interleaved repeats, medians with their spread, the machine, JSON out.

Contestants take turns (A B C, A B C, ...), so that a machine that slows down or is shared slows
all of them alike. What is reported of two contestants is a ratio within one run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from rich.table import Table

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"

_PACKAGES = ("torch", "transformers", "outlines", "outlines_core", "llguidance", "guided-smc")


@dataclass(frozen=True)
class Lap(Generic[T]):
    """One timed call.

    Attributes are its wall time, the CPU time of all threads of this process (less than the wall
    time times the threads tells of a machine shared with others), and what it returned.
    """

    seconds: float
    cpu_seconds: float
    outcome: T


def interleave(
    contestants: Mapping[str, Callable[[int], T]],
    *,
    repeats: int,
    warm_ups: int = 1,
    at_most: Mapping[str, int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[Lap[T]]]:
    """Time every contestant `repeats` times, in turns.

    Each is called with the number of the round, so that all can do the same work in a round.
    Warm-up rounds come first, have the numbers `0..warm_ups - 1` too, and are not timed. Who takes
    long may take part in the first rounds only, `at_most` so many.
    """
    at_most = at_most or {}
    for round_ in range(warm_ups):
        for run in contestants.values():
            run(round_)
    laps: dict[str, list[Lap[T]]] = {name: [] for name in contestants}
    for round_ in range(repeats):
        for name, run in contestants.items():
            if round_ >= at_most.get(name, repeats):
                continue
            start, cpu_start = clock(), time.process_time()
            outcome = run(round_)
            laps[name].append(Lap(clock() - start, time.process_time() - cpu_start, outcome))
    return laps


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratio(values: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """The ratio of the medians, and the lowest and highest ratio within a round.

    Only the rounds that both took part in count, and a round in which the reference said nothing
    has no ratio.
    """
    both = min(len(values), len(reference))
    values, reference = values[:both], reference[:both]
    rounds = [a / b for a, b in zip(values, reference, strict=True) if b > 0]
    median = statistics.median(values) / statistics.median(reference)
    return {"ratio": median, "low": min(rounds), "high": max(rounds)}


def machine() -> dict[str, Any]:
    """What the numbers depend on. Call it before the run: the load is that of others."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": _os_name(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def machine_line(found: Mapping[str, Any]) -> str:
    """One line of it, to stand under a table."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    gpu = f"{found['gpu']}, " if "gpu" in found else ""
    return (
        f"{gpu}{found['cpu']}, {found['cores']} cores, {found['threads']} threads, "
        f"{found['memory_gib']} GiB, {found['os']}; load before {found['load_before']}; {versions}"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def report(
    results: Mapping[str, Any], tables: Sequence[Table], out: Path, *, notes: Sequence[str] = ()
) -> None:
    """Print the tables with the machine under them, and write the results as JSON."""
    # Tables keep their columns when the output is a file.
    console = Console() if Console().is_terminal else Console(width=160)
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    console.print(machine_line(results["machine"]), style="dim", highlight=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
