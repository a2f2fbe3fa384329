"""How far from the posterior: token masking, and ours over N.

    python benchmarks/distortion.py

Four small models given as tables (`traps.py`), and a question to the real one whose answer is an
enum. All posteriors are exact, by enumeration (`exact.py`), and so is what token masking draws
from, as Outlines, XGrammar and others do: `p·m / Z` at each step, and no weight. The distribution
of our answer is the expectation of the weighted particles of a run, since the answer is a draw from
them. It is estimated by the mean over runs, which spreads less than the answers drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from exact import (
    Exact,
    NextTokens,
    divergence,
    enumerate_language,
    enumerate_posterior,
    total_variation,
)
from harness import RESULTS, machine, report
from rich.table import Table
from tasks import ANIMALS, ANSWER_TOKENS, QUESTION
from traps import MAX_TOKENS, TRAPS, VOCABULARY, Trap

import guided_smc
from guided_smc import Result, TableModel

RUNS = {8: 1000, 32: 600, 128: 300}
"""Runs on each table, by N."""
REAL_RUNS = {8: 300, 32: 100, 128: 40}
REAL = "the real model, an enum"
ROWS = 1024
"""Particles at once on a table."""

TABLE_LOG_CUT = -25.0
"""Texts of a table that are less probable are not followed."""

Found = dict[str, Any]


@click.command()
@click.option("--quick", is_flag=True, help="Few runs, small N: shows that it runs.")
@click.option("--tables-only", is_flag=True, help="Leave the real model out.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(quick: bool, tables_only: bool, out: Path | None) -> None:
    """Compare distributions of answers with the exact posterior."""
    found = machine()
    runs = {8: 60} if quick else RUNS
    real_runs = {8: 4} if quick else REAL_RUNS
    cases = {name: on_table(trap, runs) for name, trap in TRAPS.items()}
    if not tables_only:
        cases[REAL] = on_real_model(real_runs)
    results: Found = {
        "benchmark": "distortion",
        "machine": found,
        "settings": {"runs": runs, "real_runs": real_runs},
        "cases": cases,
    }
    notes = [
        "KL(answers ‖ posterior) in nats; × is how many times smaller than token masking's.",
        "In brackets: what the KL of exact answers would come to, for lack of runs alone.",
    ]
    report(results, [table(cases)], out or RESULTS / "distortion-cpu.json", notes=notes)


# -- cases -------------------------------------------------------------------------------------


def on_table(trap: Trap, runs: Mapping[int, int]) -> Found:
    """Masking and ours on a model given as a table."""
    exact = exact_on_table(trap)
    return compare(
        exact,
        {
            n: trap.lm().generate(
                [""] * count,
                output_type=trap.constraint,
                n_particles=n,
                max_tokens=MAX_TOKENS,
                max_rows=ROWS,
                seed=0,
            )
            for n, count in runs.items()
        },
    )


def exact_on_table(trap: Trap) -> Exact:
    """Its posterior, and what masking draws."""
    return enumerate_language(
        VOCABULARY,
        next_tokens(trap.model()),
        trap.constraint,
        max_tokens=MAX_TOKENS,
        log_cut=TABLE_LOG_CUT,
    )


def next_tokens(model: TableModel) -> NextTokens:
    """What a table says after an empty prompt."""
    prompt = model.encode("")

    def ask(texts: Sequence[Sequence[int]]) -> torch.Tensor:
        rows = np.stack([model.probabilities((*prompt, *text)) for text in texts])
        return torch.from_numpy(rows).log()

    return ask


def on_real_model(runs: Mapping[int, int]) -> Found:
    """Masking and ours on the question that `quality.py` asks."""
    from contestants import Models  # slow to import, and not needed for tables

    models = Models()
    lm = models.plain
    prompt = lm.encoder.encode(QUESTION, chat=False)
    exact = enumerate_posterior(lm, models.float32, prompt, ANIMALS, max_tokens=ANSWER_TOKENS)
    del models.float32
    return compare(exact, {n: answers(lm, n, count) for n, count in runs.items()})


def answers(lm: guided_smc.LM, n: int, count: int) -> list[Result[Any]]:
    """Runs of the real model without a draft."""
    found: list[Result[Any]] = lm.generate(
        [QUESTION] * count,
        output_type=ANIMALS,
        n_particles=n,
        max_tokens=MAX_TOKENS,
        max_rows=128,
        chat=False,
        seed=0,
    )
    return found


# -- numbers -----------------------------------------------------------------------------------


def compare(exact: Exact, ours: Mapping[int, list[Result[Any]]]) -> Found:
    """How far masking and ours are from the posterior."""
    truth = np.array(list(exact.probabilities.values()))
    masked = np.array([exact.masked.get(text, 0.0) for text in exact.probabilities])
    masked_kl = divergence(masked, truth)
    found: Found = {
        "log_evidence": exact.log_evidence,
        "probabilities": exact.probabilities,
        "missed": exact.missed,
        "masking": {
            "probabilities": exact.masked,
            "missed": exact.masked_missed,
            "kl": masked_kl,
            "tv": total_variation(masked, truth),
        },
        "ours": {},
    }
    for n, results in ours.items():
        runs = [shares(result) for result in results if result.selected]
        each = np.array([[run.get(text, 0.0) for text in exact.probabilities] for run in runs])
        mean = each.mean(axis=0)
        kl = divergence(mean, truth)
        found["ours"][str(n)] = {
            "runs": len(results),
            "died": len(results) - len(runs),
            "probabilities": dict(zip(exact.probabilities, mean.tolist(), strict=True)),
            "kl": kl,
            "tv": total_variation(mean, truth),
            # The expectation of KL for a mean that scatters about the truth, to second order.
            "floor": float((each.var(axis=0, ddof=1) / len(runs) / truth).sum() / 2),
            "smaller": masked_kl / kl,
        }
    return found


def shares(result: Result[Any]) -> dict[str, float]:
    """The weight of each text among the particles of a run."""
    found: dict[str, float] = defaultdict(float)
    for particle in result.particles:
        found[particle.text] += particle.weight
    return found


# -- table -------------------------------------------------------------------------------------


def table(cases: Mapping[str, Found]) -> Table:
    """KL over cases and N."""
    made = Table(title="KL to the exact posterior", title_justify="left")
    made.add_column("")
    made.add_column("token masking", justify="right")
    for n in next(iter(cases.values()))["ours"]:
        made.add_column(f"ours N={n}", justify="right")
    for name, case in cases.items():
        cells = [
            f"{cell['kl']:.1e} ({cell['floor']:.0e}) × {_rough(cell['smaller'])}"
            for cell in case["ours"].values()
        ]
        made.add_row(name, f"{case['masking']['kl']:.3f}", *cells)
    return made


def _rough(factor: float) -> str:
    return f"{factor:.0f}" if factor >= 10 else f"{factor:.1f}"


if __name__ == "__main__":
    main()
