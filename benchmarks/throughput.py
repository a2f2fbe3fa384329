"""Tokens per second of transformers, Outlines and guided-smc, in one run.

    python benchmarks/throughput.py

The clock runs from the prompt as text to the answer as text: tokenising and prefill are included
for all, loading the model is not. Outlines compiles the schema beforehand, and how long that took
is reported; ours compiles it in every call, and is timed with it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from contestants import (
    MODEL,
    N_PARTICLES,
    TASKS,
    Answer,
    Contestant,
    load_both,
    ours,
    outlines_generate,
    transformers_generate,
)
from harness import RESULTS, Lap, interleave, machine, ratio, report, spread
from rich.table import Table

# The first is its default for JSON Schema; the second is what masks ours.
OUTLINES_BACKENDS = {"outlines": "outlines_core", "outlines/llguidance": "llguidance"}


@click.command()
@click.option("--quick", is_flag=True, help="Few tokens, one repeat: shows that it runs.")
@click.option("--repeats", default=5, show_default=True, help="Timed rounds.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(quick: bool, repeats: int, out: Path | None) -> None:
    """Compare tokens per second on a real model."""
    found = machine()
    max_tokens, repeats = (2, 1) if quick else (64, repeats)
    lm, peer = load_both()
    results: dict[str, Any] = {
        "benchmark": "throughput",
        "machine": found,
        "settings": {
            "model": MODEL,
            "dtype": str(lm.model.dtype).removeprefix("torch."),
            "device": lm.model.device.type,
            "max_tokens": max_tokens,
            "block_size": 0,
            "repeats": repeats,
            "prefill": "included",
        },
        "compile_seconds": {},
        "tasks": {},
    }
    for name, task in TASKS.items():
        contestants: dict[str, Contestant] = {
            "transformers": transformers_generate(peer, lm, task, max_tokens)
        }
        if task.output_type is not None:
            for label, backend in OUTLINES_BACKENDS.items():
                start = time.perf_counter()
                contestants[label] = outlines_generate(peer, lm, task, max_tokens, backend)
                results["compile_seconds"][label] = time.perf_counter() - start
        peers = list(contestants)
        for n in N_PARTICLES:
            contestants[f"ours N={n}"] = ours(lm, task, n, max_tokens)
        laps = interleave(contestants, repeats=repeats, warm_ups=0 if quick else 1)
        results["tasks"][name] = summarise(laps, peers, schema=task.output_type is not None)
    tables = [table_of(name, rows) for name, rows in results["tasks"].items()]
    compiled = ", ".join(f"{k} {v:.2f} s" for k, v in results["compile_seconds"].items())
    report(
        results,
        tables,
        out or RESULTS / f"throughput-{lm.model.device.type}.json",
        notes=["Medians over rounds, (lowest-highest).", f"Not timed, compiling: {compiled}."],
    )


def summarise(
    laps: dict[str, list[Lap[Answer]]], peers: list[str], *, schema: bool
) -> dict[str, Any]:
    """Per contestant: rates, ratios of the returned tokens/s to each peer, and all laps."""
    returned = {c: [lap.outcome.tokens / lap.seconds for lap in laps[c]] for c in laps}
    sampled = {c: [lap.outcome.sampled / lap.seconds for lap in laps[c]] for c in laps}
    return {
        c: {
            "returned_tokens_per_s": spread(returned[c]),
            "particle_tokens_per_s": spread(sampled[c]),
            "seconds_per_answer": spread([lap.seconds for lap in laps[c]]),
            "cpu_ms_per_token": spread(
                [1e3 * lap.cpu_seconds / lap.outcome.tokens for lap in laps[c]]
            ),
            "tokens_per_answer": spread([lap.outcome.tokens for lap in laps[c]]),
            "answers": len(laps[c]),
            "valid": sum(lap.outcome.valid for lap in laps[c]) if schema else None,
            "ratio_to": {peer: ratio(returned[c], returned[peer]) for peer in peers},
            "laps": [
                {
                    "seconds": lap.seconds,
                    "cpu_seconds": lap.cpu_seconds,
                    "tokens": lap.outcome.tokens,
                    "sampled": lap.outcome.sampled,
                    "text": lap.outcome.text,
                }
                for lap in laps[c]
            ],
        }
        for c in laps
    }


def table_of(task: str, rows: dict[str, Any]) -> Table:
    """The task's table, as it is printed."""
    peers = list(next(iter(rows.values()))["ratio_to"])
    table = Table(title=f"{task}: returned tokens/s", title_justify="left")
    table.add_column("")
    columns = ["returned tok/s", "particle tok/s", "s/answer", "CPU ms/tok", "tok/answer", "valid"]
    for column in columns + [f"× {peer}" for peer in peers]:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        rate = row["returned_tokens_per_s"]
        valid = "" if row["valid"] is None else f"{row['valid']}/{row['answers']}"
        table.add_row(
            name,
            f"{rate['median']:.1f} ({rate['low']:.1f}-{rate['high']:.1f})",
            f"{row['particle_tokens_per_s']['median']:.1f}",
            f"{row['seconds_per_answer']['median']:.2f}",
            f"{row['cpu_ms_per_token']['median']:.0f}",
            f"{row['tokens_per_answer']['median']:.0f}",
            valid,
            *(f"{row['ratio_to'][peer]['ratio']:.2f}" for peer in peers),
        )
    return table


if __name__ == "__main__":
    main()
