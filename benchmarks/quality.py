"""What a draft costs in quality, over block sizes K: log-evidence, and the posterior itself.

    python benchmarks/quality.py

Where the exact values are known, it is they that ours are compared with: free text has log-evidence
0, and the answers to a question with a small enum can be enumerated. Besides, each K is compared
with K = 0 at the same N.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from contestants import MODEL, Models, ess_per_particle
from exact import Exact, divergence, enumerate_posterior, total_variation
from harness import RESULTS, machine, report
from rich.table import Table
from tasks import ANIMALS, ANSWER_TOKENS, QUESTION, TASKS

import guided_smc
from guided_smc import Result

PARTICLES = (4, 8)
BLOCKS: tuple[Any, ...] = (0, 1, 2, 4, 8, 12, "auto")
DRAFT = "int8"

RESAMPLES = 2000
"""Simulated experiments behind a sampling floor."""

Cell = dict[str, Any]
"""What is told of one N and K."""


@click.command()
@click.option("--quick", is_flag=True, help="Few runs, N and K: shows that it runs.")
@click.option("--runs", default=300, show_default=True, help="Answers to the enum question.")
@click.option("--texts", default=20, show_default=True, help="Texts without and with a schema.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(quick: bool, runs: int, texts: int, out: Path | None) -> None:
    """Compare log-evidence and posterior over block sizes on a real model."""
    found = machine()
    runs, texts = (4, 2) if quick else (runs, texts)
    cells = [(n, k) for n in PARTICLES for k in BLOCKS]
    cells = [(n, k) for n, k in cells if not quick or (n == PARTICLES[0] and k in (0, 4))]
    models = Models()
    lm = models.int8
    prompt = lm.encoder.encode(QUESTION, chat=False)
    exact = enumerate_posterior(lm, models.float32, prompt, ANIMALS, max_tokens=ANSWER_TOKENS)
    tokens = {"free": 4, "person": 12} if quick else {"free": 24, "person": 64}
    tasks = {
        "free": {c: free_text(lm, *c, texts, tokens["free"]) for c in cells},
        "person": {c: schema_text(lm, *c, texts, tokens["person"]) for c in cells},
        # A block longer than any answer is no case of its own.
        "enum": {
            (n, k): enum_answers(lm, n, k, runs, exact)
            for n, k in cells
            if k == "auto" or k <= ANSWER_TOKENS
        },
    }
    for each in tasks.values():
        for (n, _), cell in each.items():
            compare(cell, each[n, 0])
    results: dict[str, Any] = {
        "benchmark": "quality",
        "machine": found,
        "settings": {
            "model": MODEL,
            "draft": DRAFT,
            "max_tokens": {**tokens, "enum": ANSWER_TOKENS},
            "texts": texts,
            "runs": runs,
        },
        "exact": {
            "log_evidence": exact.log_evidence,
            "probabilities": exact.probabilities,
            "missed": exact.missed,
        },
        "floor": floor(exact, runs),
        "tasks": {
            task: {f"N={n} K={k}": cell for (n, k), cell in each.items()}
            for task, each in tasks.items()
        },
    }
    tables = [evidence_table(task, each) for task, each in results["tasks"].items()]
    tables.append(posterior_table(results["tasks"]["enum"], results["floor"]))
    notes = [
        "± is a standard error. Z/Z exact is the mean over runs: 1 if the estimate is unbiased.",
        f"The floor is what {runs} exact draws would come to: mean and 95th percentile.",
    ]
    report(results, tables, out or RESULTS / "quality-cpu.json", notes=notes)


# -- runs --------------------------------------------------------------------------------------


def free_text(lm: guided_smc.LM, n: int, k: Any, texts: int, max_tokens: int) -> Cell:
    """Free text, cut at `max_tokens`: the exact log-evidence is 0."""
    prompts = TASKS["free"].prompts
    results = generate(lm, n, k, repeated(prompts, texts), max_tokens=max_tokens)
    return evidence(results, exact=0.0)


def schema_text(lm: guided_smc.LM, n: int, k: Any, texts: int, max_tokens: int) -> Cell:
    """An object of several fields: nobody knows its log-evidence."""
    task = TASKS["person"]
    prompts = repeated(task.prompts, texts)
    return evidence(
        generate(lm, n, k, prompts, max_tokens=max_tokens, output_type=task.schema), exact=None
    )


def enum_answers(lm: guided_smc.LM, n: int, k: Any, runs: int, exact: Exact) -> Cell:
    """One answer a run: draws that should be from the posterior, and are as N grows."""
    results = generate(
        lm, n, k, [QUESTION] * runs, max_tokens=ANSWER_TOKENS, output_type=ANIMALS, chat=False
    )
    answers = Counter(result.text for result in results if result.selected)
    shares = np.array([answers[text] for text in exact.probabilities]) / max(answers.total(), 1)
    return {
        **evidence(results, exact=exact.log_evidence),
        "answers": dict(answers),
        "tv_to_exact": total_variation(shares, probabilities(exact)),
        "kl_to_exact": divergence(shares, probabilities(exact)),
    }


def generate(
    lm: guided_smc.LM, n: int, k: Any, prompts: list[str], **settings: Any
) -> list[Result[Any]]:
    """One run for each prompt, each with a seed of its own, many at a time.

    A run that died does not start again: with that, the evidence would be biased.
    """
    found: list[Result[Any]] = lm.generate(
        prompts, n_particles=n, block_size=k, seed=0, max_restarts=0, **settings
    )
    return found


def repeated(prompts: Sequence[str], count: int) -> list[str]:
    """So many prompts, in turns."""
    return [prompts[i % len(prompts)] for i in range(count)]


# -- numbers -----------------------------------------------------------------------------------


def evidence(results: Sequence[Result[Any]], *, exact: float | None) -> Cell:
    """Log-evidence over runs. Those in which every particle died have none, and are counted."""
    log_z = np.array([result.log_evidence for result in results])
    alive = log_z[np.isfinite(log_z)]
    cell = {
        "runs": len(results),
        "died": len(log_z) - len(alive),
        "ess_per_particle": float(np.mean([ess_per_particle(result) for result in results])),
        "log_evidence": with_error(alive),
        "log_evidence_sd": float(np.std(alive, ddof=1)) if len(alive) > 1 else None,
    }
    if exact is not None:
        cell["gap_to_exact"] = with_error(alive - exact)
        cell["evidence_ratio"] = with_error(np.exp(log_z - exact))
    return cell


def compare(cell: Cell, none: Cell) -> None:
    """Add the differences from K = 0."""
    a, b = cell["log_evidence"], none["log_evidence"]
    if a and b:
        cell["gap_to_no_draft"] = {
            "mean": a["mean"] - b["mean"],
            "error": 0.0 if cell is none else math.hypot(a["error"], b["error"]),
        }
    if "answers" in cell:
        texts = sorted({*cell["answers"], *none["answers"]})
        shares = [
            np.array([each["answers"].get(text, 0) for text in texts])
            / max(sum(each["answers"].values()), 1)
            for each in (cell, none)
        ]
        cell["tv_to_no_draft"] = total_variation(*shares)


def with_error(values: np.ndarray[Any, Any]) -> dict[str, float] | None:
    """Mean and standard error."""
    if len(values) < 2:
        return None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return {"mean": float(np.mean(values)), "error": error}


def probabilities(exact: Exact) -> np.ndarray[Any, Any]:
    """In the order of its texts."""
    return np.array(list(exact.probabilities.values()))


def floor(exact: Exact, runs: int) -> dict[str, dict[str, float]]:
    """What exact draws would come to, for lack of runs alone."""
    rng = np.random.default_rng(0)
    truth = probabilities(exact)
    draws = rng.multinomial(runs, truth, size=(RESAMPLES, 2)) / runs
    found = {
        "tv_to_exact": [total_variation(a, truth) for a, _ in draws],
        "kl_to_exact": [divergence(a, truth) for a, _ in draws],
        "tv_to_no_draft": [total_variation(a, b) for a, b in draws],
    }
    return {
        name: {"mean": float(np.mean(x)), "95%": float(np.quantile(x, 0.95))}
        for name, x in found.items()
    }


# -- tables ------------------------------------------------------------------------------------


def evidence_table(task: str, cells: dict[str, Cell]) -> Table:
    """Log-evidence over N and K."""
    table = Table(title=f"{task}: log-evidence, draft {DRAFT}", title_justify="left")
    table.add_column("")
    columns = ("ESS/N", "log-evidence", "sd", "− K = 0", "− exact", "Z/Z exact", "died")
    for column in columns:
        table.add_column(column, justify="right")
    for name, cell in cells.items():
        sd = cell["log_evidence_sd"]
        table.add_row(
            name,
            f"{cell['ess_per_particle']:.2f}",
            _with_error(cell["log_evidence"]),
            "" if sd is None else f"{sd:.2f}",
            _with_error(cell.get("gap_to_no_draft")),
            _with_error(cell.get("gap_to_exact")),
            _with_error(cell.get("evidence_ratio")),
            f"{cell['died']}/{cell['runs']}",
        )
    return table


def posterior_table(cells: dict[str, Cell], floor: dict[str, Any]) -> Table:
    """The distribution of the answers over N and K."""
    table = Table(title="enum: distribution of the answers", title_justify="left")
    table.add_column("")
    columns = {"tv_to_exact": "TV to exact", "kl_to_exact": "KL", "tv_to_no_draft": "TV to K = 0"}
    for column in columns.values():
        table.add_column(column, justify="right")
    for name, cell in cells.items():
        table.add_row(name, *(f"{cell[key]:.3f}" for key in columns))
    table.add_row(
        "floor", *(f"{floor[key]['mean']:.3f} ({floor[key]['95%']:.3f})" for key in columns)
    )
    return table


def _with_error(found: dict[str, float] | None) -> str:
    return f"{found['mean']:.2f} ± {found['error']:.2f}" if found else ""


if __name__ == "__main__":
    main()
