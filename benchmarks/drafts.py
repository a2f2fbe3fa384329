"""What drafts gain: returned tokens/s with each draft against the same N without one.

    python benchmarks/drafts.py

Beside each rate stands what it costs: the mean effective sample size per particle. A draft that
differs from the target spends particles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from contestants import MODEL, TASKS, Task
from harness import RESULTS, Lap, interleave, machine, ratio, report, spread
from rich.table import Table

import guided_smc
from guided_smc import Result

PARTICLES = (1, 4, 8)
BLOCKS = {"int8": (4, 8, 12), "ngram": (4,)}


@click.command()
@click.option("--quick", is_flag=True, help="Few tokens, one repeat: shows that it runs.")
@click.option("--repeats", default=5, show_default=True, help="Timed rounds.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(quick: bool, repeats: int, out: Path | None) -> None:
    """Compare drafts on a real model."""
    found = machine()
    max_tokens, repeats = (4, 1) if quick else (64, repeats)
    particles = PARTICLES[:2] if quick else PARTICLES
    plain = guided_smc.load(MODEL)
    lms = {"": plain} | {name: with_draft(plain, name) for name in BLOCKS}
    results: dict[str, Any] = {
        "benchmark": "drafts",
        "machine": found,
        "settings": {"model": MODEL, "max_tokens": max_tokens, "repeats": repeats},
        "tasks": {},
    }
    for name, task in TASKS.items():
        contestants: dict[str, Callable[[int], Result[Any]]] = {}
        for n in particles:
            contestants[f"N={n}"] = run(lms[""], task, n, 0, max_tokens)
            for draft, blocks in BLOCKS.items():
                for k in blocks[:1] if quick else blocks:
                    contestants[f"N={n} {draft} K={k}"] = run(lms[draft], task, n, k, max_tokens)
        laps = interleave(contestants, repeats=repeats, warm_ups=0 if quick else 1)
        results["tasks"][name] = summarise(laps)
    tables = [table_of(name, rows) for name, rows in results["tasks"].items()]
    notes = ["Medians over rounds, (lowest-highest). Prefill included."]
    report(results, tables, out or RESULTS / "drafts-cpu.json", notes=notes)


def with_draft(lm: guided_smc.LM, name: str) -> guided_smc.LM:
    """The same model with a draft that needs no second one."""
    from guided_smc.models.int8 import Int8Twin
    from guided_smc.models.ngram import NGramModel

    draft = Int8Twin(lm.model) if name == "int8" else NGramModel(lm.model.vocabulary)
    return guided_smc.LM(lm.model, draft=draft, encoder=lm.encoder)


def run(
    lm: guided_smc.LM, task: Task, n_particles: int, block_size: int, max_tokens: int
) -> Callable[[int], Result[Any]]:
    """Answers the prompt of a round."""
    return lambda round_: lm.generate(
        task.prompts[round_ % len(task.prompts)],
        output_type=task.output_type,
        n_particles=n_particles,
        block_size=block_size,
        max_tokens=max_tokens,
        seed=round_,
    )


def summarise(laps: dict[str, list[Lap[Result[Any]]]]) -> dict[str, Any]:
    """Per contestant: rates, the ratio to the same N without a draft, ESS and passes."""
    rates = {c: [len(x.outcome.token_ids) / x.seconds for x in laps[c]] for c in laps}
    return {
        c: {
            "returned_tokens_per_s": spread(rates[c]),
            "ratio_to_no_draft": ratio(rates[c], rates[c.partition(" ")[0]]),
            "ess_per_particle": spread(
                [
                    float(np.mean([s.ess for s in x.outcome.steps])) / len(x.outcome.particles)
                    for x in laps[c]
                ]
            ),
            # null where no particle completed
            "log_evidence": [_finite(x.outcome.log_evidence) for x in laps[c]],
            "draft_ms_per_pass": spread([_per_pass(x.outcome, "draft") for x in laps[c]]),
            "verify_ms_per_pass": spread([_per_pass(x.outcome, "verify") for x in laps[c]]),
            "share_of_grammar_weights_resampling": spread([_share(x.outcome) for x in laps[c]]),
            "completed": sum(bool(x.outcome.selected) for x in laps[c]),
            "answers": len(laps[c]),
        }
        for c in laps
    }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _per_pass(result: Result[Any], phase: str) -> float:
    passes = result.usage.draft_passes if phase == "draft" else result.usage.target_passes
    return 1e3 * result.usage.seconds.get(phase, 0.0) / max(passes, 1)


def _share(result: Result[Any]) -> float:
    seconds = result.usage.seconds
    light = sum(seconds.get(phase, 0.0) for phase in ("mask", "potentials", "resample"))
    return light / (result.usage.total_seconds - seconds["prefill"])


def table_of(task: str, rows: dict[str, Any]) -> Table:
    """The task's table, as it is printed."""
    table = Table(title=f"{task}: drafts", title_justify="left")
    table.add_column("")
    for column in ("returned tok/s", "× no draft", "ESS/N", "draft ms", "verify ms", "masks ... %"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        rate = row["returned_tokens_per_s"]
        table.add_row(
            name,
            f"{rate['median']:.1f} ({rate['low']:.1f}-{rate['high']:.1f})",
            f"{row['ratio_to_no_draft']['ratio']:.2f}",
            f"{row['ess_per_particle']['median']:.2f}",
            f"{row['draft_ms_per_pass']['median']:.0f}",
            f"{row['verify_ms_per_pass']['median']:.0f}",
            f"{100 * row['share_of_grammar_weights_resampling']['median']:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
