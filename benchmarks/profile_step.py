"""Where our time goes: phases of the engine, and operators of a step beside transformers' own.

    python benchmarks/profile_step.py

Phases are the engine's own accounts (`Result.usage.seconds`), taken without a profiler. How much
of them is the model's forward pass is taken by hooks on the model. Only the operator tables come
from torch's profiler, which slows small operators down: their shares say more than their times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
from contestants import MODEL, N_PARTICLES, Models, transformers_generate
from harness import RESULTS, interleave, machine, report
from rich.table import Table
from tasks import TASKS, Task
from torch.profiler import ProfilerActivity, profile, record_function

import guided_smc
from guided_smc.blocks import Phases

PHASES = ("prefill", "draft", "mask", "verify", "potentials", "resample")
PREFILL_PASS, DECODE_PASS, OUTSIDE = "prefill pass", "decode pass", "outside"
TOP = 10
PROFILED = {name: TASKS[name] for name in ("free", "person")}


@click.command()
@click.option("--quick", is_flag=True, help="Few tokens, one repeat: shows that it runs.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(quick: bool, out: Path | None) -> None:
    """Show where the time of a step goes."""
    found = machine()
    max_tokens, repeats = (None, 1) if quick else (32, 3)
    lm, peer = Models().plain, Models().float32
    passes = {"ours": Passes(), "transformers": Passes()}
    passes["ours"].watch(lm.model.model)
    passes["transformers"].watch(peer.model)

    runs = {
        f"{name} N={n}": account(lm, task, n, max_tokens, passes["ours"])
        for name, task in PROFILED.items()
        for n in N_PARTICLES
    }
    generate = transformers_generate(peer, TASKS["free"])

    def generate_run(round_: int) -> Run:
        passes["transformers"].clear()
        generate(TASKS["free"].ask(round_, max_tokens or TASKS["free"].few_tokens))
        return Run({}, dict(passes["transformers"].seconds), passes["transformers"].steps)

    runs["free transformers"] = generate_run
    laps = interleave(runs, repeats=repeats, warm_ups=0 if quick else 1)
    cases = {
        name: account_of(sum(x.seconds for x in each), [x.outcome for x in each])
        for name, each in laps.items()
    }

    operators = {}
    for name, case in {
        "transformers": lambda: generate_run(0),
        "ours N=1": lambda: runs["free N=1"](0),
        "ours N=8": lambda: runs["free N=8"](0),
    }.items():
        operators[name] = operators_of(case)

    results = {
        "benchmark": "profile_step",
        "machine": found,
        "settings": {
            "model": MODEL,
            "dtype": str(lm.model.dtype).removeprefix("torch."),
            "device": lm.model.device.type,
            "max_tokens": max_tokens,
            "block_size": 0,
            "repeats": repeats,
        },
        "cases": cases,
        "operators": operators,
    }
    tables = [phase_table(cases), pass_table(cases), region_table(operators)]
    tables += [operator_table(name, found) for name, found in operators.items()]
    report(results, tables, out or RESULTS / f"profile-{lm.model.device.type}.json")


# -- without a profiler ------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The accounts of one call.

    A step is a pass of one token a row. The first token of `generate` comes from its pass over
    the prompt, so that it has a step less than it has tokens; ours holds the prompt's last token
    back for the first step.
    """

    phases: dict[str, float]
    """Seconds by phase of the engine; empty for a peer."""
    passes: dict[str, float]
    """Seconds in forward passes of the model, by kind."""
    steps: int


@dataclass
class Passes:
    """Times the forward passes of a model: those over a prompt, and those of one token a row."""

    seconds: Counter[str] = field(default_factory=Counter)
    steps: int = 0

    def watch(self, model: torch.nn.Module) -> None:
        """Hook on; each pass is a range of the profiler too."""
        started: list[tuple[str, float, Any]] = []

        def before(module: Any, args: Any, kwargs: Any) -> None:
            kind = DECODE_PASS if kwargs["input_ids"].shape[1] == 1 else PREFILL_PASS
            range_ = record_function(kind)
            range_.__enter__()
            started.append((kind, perf_counter(), range_))

        def after(module: Any, args: Any, output: Any) -> None:
            kind, start, range_ = started.pop()
            self.seconds[kind] += perf_counter() - start
            self.steps += kind == DECODE_PASS
            range_.__exit__(None, None, None)

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after)

    def clear(self) -> None:
        """Forget."""
        self.seconds.clear()
        self.steps = 0


def account(
    lm: guided_smc.LM, task: Task, n_particles: int, max_tokens: int | None, passes: Passes
) -> Callable[[int], Run]:
    """One prompt a call, with the engine's accounts."""

    def run(round_: int) -> Run:
        passes.clear()
        ask = task.ask(round_, max_tokens or task.few_tokens)
        result = lm.generate(
            ask.prompt,
            output_type=task.schema,
            n_particles=n_particles,
            max_tokens=ask.max_tokens,
            block_size=0,
            seed=ask.seed,
        )
        return Run(result.usage.seconds, dict(passes.seconds), passes.steps)

    return run


def account_of(wall: float, runs: list[Run]) -> dict[str, Any]:
    """Seconds, summed over runs, and milliseconds per step."""
    phases = {p: sum(run.phases.get(p, 0.0) for run in runs) for p in PHASES}
    passes = {p: sum(run.passes.get(p, 0.0) for run in runs) for p in (PREFILL_PASS, DECODE_PASS)}
    steps = sum(run.steps for run in runs)
    decoding = wall - passes[PREFILL_PASS]
    return {
        "steps": steps,
        "wall_seconds": wall,
        "phase_seconds": phases if any(phases.values()) else None,
        "outside_seconds": wall - sum(phases.values()) if any(phases.values()) else None,
        "pass_seconds": passes,
        "ms_per_step": {
            "all but prefill": 1e3 * decoding / steps,
            "in the model": 1e3 * passes[DECODE_PASS] / steps,
            "beyond it": 1e3 * (decoding - passes[DECODE_PASS]) / steps,
        },
    }


# -- with a profiler ---------------------------------------------------------------------------


@contextmanager
def phases_as_ranges() -> Iterator[None]:
    """Make the engine's phases ranges of the profiler."""
    timed = Phases.timed

    @contextmanager
    def ranged(self: Phases, phase: str) -> Iterator[None]:
        with timed(self, phase), record_function(phase):
            yield

    Phases.timed = ranged  # type: ignore[method-assign]
    try:
        yield
    finally:
        Phases.timed = timed  # type: ignore[method-assign]


def operators_of(case: Callable[[], Run]) -> dict[str, Any]:
    """Self CPU time by operator, and by the innermost range that it ran in.

    What a range spends in no operator is Python: the code of the modules, of the library, of the
    engine.
    """
    with phases_as_ranges(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = perf_counter()
        run = case()
        wall_us = 1e6 * (perf_counter() - start)
    ranges = {*PHASES, PREFILL_PASS, DECODE_PASS}
    regions: dict[str, dict[str, float]] = defaultdict(lambda: {"operators": 0.0, "python": 0.0})
    calls: Counter[str] = Counter()
    self_us: Counter[str] = Counter()
    for event in profiler.events():
        if event.name in ranges:
            regions[event.name]["python"] += event.self_cpu_time_total
            continue
        parent = event.cpu_parent
        while parent is not None and parent.name not in ranges:
            parent = parent.cpu_parent
        region = parent.name if parent is not None else OUTSIDE
        regions[region]["operators"] += event.self_cpu_time_total
        # A step of transformers is all but its prefill; of ours, what is booked as verify.
        if region in ("verify", DECODE_PASS) or (region == OUTSIDE and not run.phases):
            calls[event.name] += 1
            self_us[event.name] += event.self_cpu_time_total
    seen = sum(sum(parts.values()) for parts in regions.values())
    regions[OUTSIDE]["python"] += max(0.0, wall_us - seen)
    steps = run.steps
    total = sum(self_us.values())
    return {
        "steps": steps,
        "wall_ms_per_step": wall_us / 1e3 / steps,
        "regions_ms_per_step": {
            region: {part: us / 1e3 / steps for part, us in parts.items()}
            for region, parts in sorted(regions.items())
        },
        "operators_ms_per_step": total / 1e3 / steps,
        "top": [
            {
                "operator": name,
                "calls_per_step": calls[name] / steps,
                "ms_per_step": us / 1e3 / steps,
                "share": us / total,
            }
            for name, us in self_us.most_common(TOP)
        ],
    }


# -- tables ------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def phase_table(cases: dict[str, Any]) -> Table:
    """Shares of the wall time by phase."""
    table = _table("share of wall time by phase", "s", *PHASES, "outside")
    for name, case in cases.items():
        if case["phase_seconds"] is not None:
            parts = [*case["phase_seconds"].values(), case["outside_seconds"]]
            shares = [f"{x / case['wall_seconds']:.1%}" for x in parts]
            table.add_row(name, f"{case['wall_seconds']:.2f}", *shares)
    return table


def pass_table(cases: dict[str, Any]) -> Table:
    """What a step takes beyond the model's forward pass."""
    columns = ("all but prefill", "in the model", "beyond it")
    table = _table("ms per step, no profiler", "steps", *columns)
    for name, case in cases.items():
        times = [f"{case['ms_per_step'][c]:.1f}" for c in columns]
        table.add_row(name, str(case["steps"]), *times)
    return table


def region_table(operators: dict[str, Any]) -> Table:
    """Operators and Python by region."""
    table = _table("ms per step under the profiler, in operators + in Python", *operators)
    regions = sorted({r for found in operators.values() for r in found["regions_ms_per_step"]})
    for region in regions:
        cells = []
        for found in operators.values():
            parts = found["regions_ms_per_step"].get(region)
            cells.append(f"{parts['operators']:.1f} + {parts['python']:.1f}" if parts else "")
        table.add_row(region, *cells)
    return table


def operator_table(name: str, found: dict[str, Any]) -> Table:
    """The operators that take most of a step."""
    where = "generate but prefill" if name == "transformers" else "verify"
    table = _table(f"{name}: top operators ({where})", "calls/step", "ms/step", "share")
    for row in found["top"]:
        table.add_row(
            row["operator"],
            f"{row['calls_per_step']:.1f}",
            f"{row['ms_per_step']:.2f}",
            f"{row['share']:.1%}",
        )
    return table


if __name__ == "__main__":
    main()
