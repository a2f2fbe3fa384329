"""How many answers are lost to the length cap, with and without an eye on the end.

    python benchmarks/finishing.py

Nothing bounds what the model says, so that it rambles. Without, a particle that has not finished at
the cap is worth nothing, and an answer is lost when all are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from contestants import MODEL
from harness import RESULTS, machine, report
from rich.table import Table

import guided_smc
from guided_smc import LM, Constraint, Result, ResultEvent
from guided_smc.grammars import json_schema, lark, library, regex

PARTICLES = 4

BIOGRAPHY = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "biography": {"type": "string"},
        "hobbies": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "biography", "hobbies"],
}

CALLS = """
start: call
call: NAME "(" [argument (", " argument)*] ")"
argument: call | NUMBER | NAME | STRING | "[" [argument (", " argument)*] "]"
NAME: /[a-z_]+/
NUMBER: /[0-9]+/
STRING: /"[^"\\n]*"/
"""

TABLES = {"people": ["name", "hobby", "age", "city_id"], "cities": ["id", "name"]}

TASKS: dict[str, tuple[str, Constraint, tuple[int, ...]]] = {
    "biography (JSON Schema)": (
        "Invent a person who {}. Answer in JSON with name, a long biography and hobbies.",
        json_schema(BIOGRAPHY),
        (24, 64),
    ),
    "sentence (regex)": (
        "Tell me in one long sentence about somebody who {}.",
        regex(r"[A-Z][^.\n]*\."),
        (24, 64),
    ),
    "calls (Lark)": (
        "Call functions that draw somebody who {}, with nested arguments.",
        lark(CALLS),
        (8, 16),
    ),
    "query (GraphQL)": (
        "Write a GraphQL query for the friends of somebody who {}.",
        library.graphql_query(),
        (12, 24),
    ),
    "query (SQL)": (
        "Who {}? Answer in SQL.",
        library.sql_select(TABLES, joins=[("people.city_id", "cities.id")]),
        (12, 20),
    ),
}
WHO = ("likes music", "sails", "paints", "teaches", "is a doctor", "bakes", "climbs", "writes")


@click.command()
@click.option("--quick", is_flag=True, help="Few answers and one cap: shows that it runs.")
@click.option("--answers", default=16, show_default=True, help="Of each task and cap.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(quick: bool, answers: int, out: Path | None) -> None:
    """Count answers that are lost to the length cap."""
    found = machine()
    answers = 2 if quick else answers
    lm = guided_smc.load(MODEL)
    cells: dict[str, Any] = {}
    for task, (prompt, constraint, caps) in TASKS.items():
        prompts = [prompt.format(WHO[i % len(WHO)]) for i in range(answers)]
        for cap in caps[:1] if quick else caps:
            cells[f"{task}, {cap} tokens"] = {
                "without": cell(lm, prompts, constraint, cap, in_time=False),
                "with": cell(lm, prompts, constraint, cap, in_time=True),
            }
    results = {
        "benchmark": "finishing",
        "machine": found,
        "settings": {"model": MODEL, "n_particles": PARTICLES, "answers": answers},
        "cells": cells,
    }
    report(results, [table(cells)], out or RESULTS / "finishing-cpu.json")


def cell(
    lm: LM, prompts: Sequence[str], constraint: Constraint, cap: int, *, in_time: bool
) -> dict[str, Any]:
    """Answers under one cap; none starts again."""
    requests = [
        lm.request(
            prompt,
            index=i,
            output_type=constraint,
            max_tokens=cap,
            n_particles=PARTICLES,
            seed=0,
            max_restarts=0,
        )
        for i, prompt in enumerate(prompts)
    ]
    if not in_time:
        plain = constraint.compile(lm.model.vocabulary)
        requests = [replace(request, constraint=plain) for request in requests]
    start = time.perf_counter()
    events = lm.run(requests)
    results: list[Result[Any]] = [e.result for e in events if isinstance(e, ResultEvent)]
    seconds = time.perf_counter() - start
    particles = [particle for result in results for particle in result.particles]
    tokens = sum(result.usage.particle_tokens for result in results)
    return {
        "answers": len(results),
        "returned": sum(bool(result.selected) for result in results),
        "particles_lost": sum(p.finish_reason != "stop" for p in particles) / len(particles),
        "mean_log_evidence": _mean([r.log_evidence for r in results if r.selected]),
        "mask_seconds_per_token": sum(r.usage.seconds["mask"] for r in results) / tokens,
        "seconds_per_token": seconds / tokens,
        "gave_up": sum(any("gave up" in w for w in r.warnings) for r in results),
        "doubtful": sum(any("not every end" in w for w in r.warnings) for r in results),
    }


def table(cells: dict[str, Any]) -> Table:
    """Answers returned, and what looking at the end costs."""
    shown = Table(title="answers within the cap", title_justify="left")
    shown.add_column("")
    for column in ("returned", "particles lost", "log-evidence", "mask ms/token", "ms/token"):
        shown.add_column(f"{column}:\nwithout", justify="right")
        shown.add_column("\nwith", justify="right")
    for name, pair in cells.items():
        both = (pair["without"], pair["with"])
        shown.add_row(
            name,
            *(f"{c['returned']}/{c['answers']}" for c in both),
            *(f"{c['particles_lost']:.0%}" for c in both),
            *("" if (z := c["mean_log_evidence"]) is None else f"{z:.1f}" for c in both),
            *(f"{1000 * c['mask_seconds_per_token']:.2f}" for c in both),
            *(f"{1000 * c['seconds_per_token']:.1f}" for c in both),
        )
    return shown


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


if __name__ == "__main__":
    main()
