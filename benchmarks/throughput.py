"""The table: tokens per second of transformers, Outlines, genlm-control and guided-smc, in one run.

    python benchmarks/throughput.py

The clock runs from the prompt as text to the answer as text: tokenising and prefill are included
for all, loading the model is not. Outlines and genlm-control compile the schema beforehand, and how
long that took is reported; ours compiles it in every call, and is timed with it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from contestants import (
    DENSE,
    MODEL,
    N_PARTICLES,
    OWN,
    Answer,
    Contestant,
    Models,
    Row,
    encode,
    rows,
)
from genlm_process import InstallError, WorkerError, install
from harness import RESULTS, Lap, interleave, machine, ratio, report, spread
from memory import peak_bytes
from rich.table import Table
from tasks import SHORT, TASKS, Task

REFERENCES = ("transformers", "outlines")
PARTICLE_REFERENCE = f"genlm N={max(N_PARTICLES)}"
QUICK_TASKS = ("free", "person")
MEMORY_TASKS = ("person", "free")
"""What is answered where peak memory is taken: the first that a row takes part in."""


@click.command()
@click.option("--quick", is_flag=True, help="Few tokens, rows and repeats: shows that it runs.")
@click.option("--repeats", default=5, show_default=True, help="Timed rounds.")
@click.option("--only", metavar="PATTERN", help="Rows whose name this regular expression finds.")
@click.option("--tasks", "names", metavar="NAMES", help=f"Of {', '.join(TASKS)}; comma-separated.")
@click.option("--genlm/--no-genlm", default=True, help="Install and run genlm-control.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
@click.option("--memory-of", hidden=True, help="Print peak memory of these rows, a JSON list.")
def main(
    quick: bool,
    repeats: int,
    only: str | None,
    names: str | None,
    genlm: bool,
    out: Path | None,
    memory_of: str | None,
) -> None:
    """Compare tokens per second on a real model."""
    if memory_of is not None:
        print(json.dumps(memory_in_this_process(json.loads(memory_of))))
        return
    chosen_tasks = names.split(",") if names else list(QUICK_TASKS if quick else TASKS)
    if unknown := set(chosen_tasks) - set(TASKS):
        raise click.BadParameter(f"unknown {sorted(unknown)}; there are {', '.join(TASKS)}")
    tasks = {name: TASKS[name] for name in chosen_tasks}
    found = machine()
    models = Models()
    chosen = [row for row in rows() if re.search(only or "", row.name)]
    if quick:
        repeats = 1
        chosen = [row for row in chosen if is_quick(row)]
        tasks = {name: replace(task, max_tokens=task.few_tokens) for name, task in tasks.items()}
    left_out = why_no_genlm(models, genlm and not quick, chosen)
    if left_out is not None:
        chosen = [row for row in chosen if row.family != "genlm"]
    peaks = peak_memory([row for row in chosen if not quick or row.family == "ours"])
    require_same_prompts(models, tasks, chosen)
    compiled: dict[str, dict[str, float]] = {}
    measured = {}
    for name, task in tasks.items():
        contestants, compiled[name] = make(models, task, chosen)
        at_most = {row.name: row.rounds for row in chosen if row.rounds is not None}
        laps = take_turns(contestants, task, repeats, at_most, warm_up=not quick)
        measured[name] = summarise(laps, chosen, task)
    results = {
        "benchmark": "throughput",
        "machine": found,
        "settings": {
            "model": MODEL,
            "max_tokens": {name: task.max_tokens for name, task in tasks.items()},
            "repeats": repeats,
        },
        "genlm": left_out or models.genlm.versions,
        "peak_memory_mib": peaks,
        "compile_seconds": compiled,
        "tasks": measured,
    }
    tables = [table_of(name, each, peaks) for name, each in measured.items()]
    tables += [parts_table(name, each) for name, each in measured.items()]
    notes = ["Medians over rounds, (lowest-highest)."]
    notes += [f"genlm-control was left out: {left_out}."] if left_out else []
    report(results, tables, out or RESULTS / "throughput-cpu.json", notes=notes)


def is_quick(row: Row) -> bool:
    """Whether a row is among the few that show that all kinds run."""
    return not re.search(r"N=8|K=8|K=12|K=auto|N=4 (ngram|dense)", row.name)


def why_no_genlm(models: Models, wanted: bool, chosen: Sequence[Row]) -> str | None:
    """What keeps genlm-control from taking part; None if it is ready."""
    if not wanted or all(row.family != "genlm" for row in chosen):
        return "it was not asked for"
    try:
        install(torch.__version__.partition("+")[0])
        models.genlm  # noqa: B018  # loads it
    except InstallError as error:
        return f"it could not be installed ({error})"
    except WorkerError as error:
        return f"it could not be started ({error})"
    return None


def require_same_prompts(models: Models, tasks: Mapping[str, Task], chosen: Sequence[Row]) -> None:
    """All are asked the same, token by token.

    Raises:
        RuntimeError: They are not.
    """
    for task in tasks.values():
        for prompt in task.prompts:
            ids = encode(models.float32, prompt)
            encoded = [models.plain.encoder.encode(prompt)]
            if any(row.family == "genlm" for row in chosen):
                encoded.append(models.genlm.ask("encode", prompt=prompt)["ids"])
            if any(other != ids for other in encoded):
                raise RuntimeError(f"the contestants encode {prompt!r} in different ways")


def make(
    models: Models, task: Task, chosen: Sequence[Row]
) -> tuple[dict[str, Contestant], dict[str, float]]:
    """The contestants of a task, and how long those took to make that compile a schema."""
    contestants, compiled = {}, {}
    for row in chosen:
        if row.does(task):
            model = row.model(models)
            start = time.perf_counter()
            contestants[row.name] = row.make(model, task)
            if row.compiles and task.schema is not None:
                compiled[row.name] = time.perf_counter() - start
    return contestants, compiled


def take_turns(
    contestants: Mapping[str, Contestant],
    task: Task,
    repeats: int,
    at_most: Mapping[str, int],
    *,
    warm_up: bool,
) -> dict[str, list[Lap[Answer]]]:
    """Time all of them on the task's questions."""
    if warm_up:
        # Another seed than the rounds', so that nothing is answered from a cache.
        for contestant in contestants.values():
            contestant(task.ask(repeats, SHORT))
    turns: dict[str, Callable[[int], Answer]] = {
        name: partial(_answer_round, contestant, task) for name, contestant in contestants.items()
    }
    return interleave(turns, repeats=repeats, warm_ups=0, at_most=at_most)


def _answer_round(contestant: Contestant, task: Task, round_: int) -> Answer:
    return contestant(task.ask(round_))


# -- peak memory -------------------------------------------------------------------------------


def peak_memory(chosen: Sequence[Row]) -> dict[str, float]:
    """MiB by row, each family in a process of its own that does nothing else."""
    peaks: dict[str, float] = {}
    for family in dict.fromkeys(row.family for row in chosen):
        names = [row.name for row in chosen if row.family == family]
        done = subprocess.run(
            [sys.executable, __file__, "--memory-of", json.dumps(names)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        peaks |= json.loads(done.stdout)
    return peaks


def memory_in_this_process(names: Sequence[str]) -> dict[str, float]:
    """Load, answer one question for each row, and tell the mark after each."""
    models = Models()
    peaks = {}
    for row in rows():
        if row.name in names:
            task = next(TASKS[name] for name in MEMORY_TASKS if row.does(TASKS[name]))
            row.make(row.model(models), task)(task.ask(0))
            genlm = row.family == "genlm"
            peak = models.genlm.ask("peak")["bytes"] if genlm else peak_bytes()
            peaks[row.name] = peak / 2**20
    return peaks


# -- numbers -----------------------------------------------------------------------------------


def summarise(
    laps: dict[str, list[Lap[Answer]]], chosen: Sequence[Row], task: Task
) -> dict[str, Any]:
    """Per row: rates, their ratios to others' in the run, what its answers tell, and all laps."""
    returned = {c: [lap.outcome.tokens / lap.seconds for lap in laps[c]] for c in laps}
    sampled = {c: [lap.outcome.sampled / lap.seconds for lap in laps[c]] for c in laps}
    against = {row.name: row.against for row in chosen}
    found = {}
    for c, each in laps.items():
        to = {other: ratio(returned[c], returned[other]) for other in REFERENCES if other in laps}
        for what, other in against[c].items():
            if other in laps:
                to[what] = ratio(returned[c], returned[other])
        found[c] = {
            "returned_tokens_per_s": spread(returned[c]),
            "particle_tokens_per_s": spread(sampled[c]),
            "seconds_per_answer": spread([lap.seconds for lap in each]),
            "cpu_ms_per_token": spread(
                [1e3 * cpu_seconds(lap) / max(lap.outcome.tokens, 1) for lap in each]
            ),
            "tokens_per_answer": spread([lap.outcome.tokens for lap in each]),
            "answers": len(each),
            "valid": sum(task.accepts(lap.outcome.text) for lap in each) if task.schema else None,
            "ratio_to": to,
            "particle_ratio_to": {
                other: ratio(sampled[c], sampled[other])
                for other in (PARTICLE_REFERENCE,)
                if other in laps
            },
            **{
                detail: spread([lap.outcome.details[detail] for lap in each])
                for detail in each[0].outcome.details
            },
            "laps": [
                {
                    "seconds": lap.seconds,
                    "cpu_seconds": cpu_seconds(lap),
                    "tokens": lap.outcome.tokens,
                    "sampled": lap.outcome.sampled,
                    "text": lap.outcome.text,
                }
                for lap in each
            ],
        }
    return found


def cpu_seconds(lap: Lap[Answer]) -> float:
    """Of this process and the one that answered."""
    return lap.cpu_seconds + lap.outcome.cpu_seconds_elsewhere


# -- tables ------------------------------------------------------------------------------------


def table_of(task: str, found: dict[str, Any], peaks: dict[str, float]) -> Table:
    """What a user gets, for what."""
    table = Table(title=f"{task}", title_justify="left")
    table.add_column("", no_wrap=True)
    columns = ("returned tok/s", "particle tok/s", "s/answer", "tok/answer", "ESS/N", "valid")
    ratios = (*REFERENCES, OWN, DENSE)
    for column in (*columns, "peak MiB", *(f"× {other}" for other in ratios), "p. × genlm"):
        table.add_column(column, justify="right")
    for name, row in found.items():
        rate = row["returned_tokens_per_s"]
        table.add_row(
            name,
            f"{rate['median']:.1f} ({rate['low']:.1f}-{rate['high']:.1f})",
            _median(row, "particle_tokens_per_s", 1),
            _median(row, "seconds_per_answer", 2),
            _median(row, "tokens_per_answer", 0),
            _median(row, "ess_per_particle", 2),
            "" if row["valid"] is None else f"{row['valid']}/{row['answers']}",
            f"{peaks[name]:.0f}" if name in peaks else "",
            *(_ratio(row["ratio_to"], other) for other in ratios),
            _ratio(row["particle_ratio_to"], PARTICLE_REFERENCE),
        )
    return table


def parts_table(task: str, found: dict[str, Any]) -> Table:
    """What it costs: passes, and what is done around them."""
    table = Table(title=f"{task}: what it costs", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("CPU ms/tok", "draft ms", "verify ms", "masks, weights, resampling %"):
        table.add_column(column, justify="right")
    for name, row in found.items():
        share = row.get("share_of_masks_weights_resampling")
        table.add_row(
            name,
            _median(row, "cpu_ms_per_token", 0),
            _median(row, "draft_ms_per_pass", 0),
            _median(row, "verify_ms_per_pass", 0),
            f"{100 * share['median']:.1f}" if share else "",
        )
    return table


def _median(row: dict[str, Any], key: str, digits: int) -> str:
    return f"{row[key]['median']:.{digits}f}" if key in row else ""


def _ratio(found: dict[str, Any], other: str) -> str:
    return f"{found[other]['ratio']:.2f}" if other in found else ""


if __name__ == "__main__":
    main()
