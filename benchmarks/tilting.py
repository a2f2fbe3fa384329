"""What a tilt buys at equal target tokens, beside best-of-N and soft best-of-N.

    python benchmarks/tilting.py --plots docs

Four tasks with real rewards, over 40 subjects each. Every prompt runs with N particles for
each β, and once without a tilt for the N candidates of the baselines. What is compared is the
largest β whose posterior is no further from the model than best-of-N: that is log N − (N−1)/N and,
under a schema, what token masking adds.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from contestants import MODEL
from harness import RESULTS, machine, report
from rich.table import Table

import guided_smc
from guided_smc import LM, Sweep, rewards
from guided_smc.sweep import best_of, candidates, expected_reward, measure, soft_best_of

PARTICLES = 16
PROMPTS = 40
THRESHOLD = 0.8
"""Resampling often and mildly: a tilt that grows along a text is best followed as it grows."""

LOOKAHEAD = 32
"""Of the rewards that are fast to ask."""

SUBJECTS = Path(__file__).with_name("subjects.txt")

GOAL = "The old lighthouse keeper watched the storm roll in over the dark sea."

SENTENCE = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 100}},
    "required": ["text"],
    "additionalProperties": False,
}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def age(text: str) -> float:
    """The age in a finished text, in centuries."""
    return int(re.findall(r'"age"\s*:\s*(\d+)', text)[0]) / 100


def age_so_far(text: str) -> float:
    """A guess at it from its first digit: that a second one follows, as a rule."""
    digits = re.findall(r'"age"\s*:\s*(\d*)', text)
    if not digits or not digits[0]:
        return 0.4  # of nobody in particular
    return (10 * int(digits[0]) + 5) / 100 if len(digits[0]) == 1 else int(digits[0]) / 100


@dataclass(frozen=True)
class Task:
    """Prompts, a reward, and the values of β to try."""

    prompt: str
    subjects: Sequence[str]
    reward: Any
    betas: tuple[float, ...]
    max_tokens: int
    settings: dict[str, Any] = field(default_factory=dict)


def subjects(kind: str) -> list[str]:
    """The subjects of a kind: the lines below its name."""
    _, found, rest = SUBJECTS.read_text(encoding="utf-8").partition(f"{kind}:\n")
    assert found, kind
    return [line.strip() for line in itertools.takewhile(_is_subject, rest.splitlines())]


def _is_subject(line: str) -> bool:
    return line.startswith("  ")


def tasks() -> dict[str, Task]:
    """By name."""
    return {
        "sentiment": Task(
            "Write one sentence about {}.",
            subjects("gloomy"),
            rewards.sentiment(on="step", schedule="linear", lookahead=LOOKAHEAD),
            (6.0, 7.0, 8.0),
            32,
        ),
        "sentiment in JSON": Task(
            "Write one sentence about {}, as JSON with the key text.",
            subjects("gloomy"),
            rewards.sentiment(on="step", schedule="linear", lookahead=LOOKAHEAD),
            (8.0, 12.0),
            40,
            {"output_type": guided_smc.json_schema(SENTENCE, whitespace="line")},
        ),
        "similarity": Task(
            "Write one sentence about {}.",
            subjects("neutral"),
            rewards.similarity(GOAL, on="step", schedule="linear"),
            (14.0, 26.0, 30.0),
            32,
        ),
        "age": Task(
            "Invent a {}, as JSON with name and age.",
            subjects("people"),
            rewards.reward(age, prefix=age_so_far, lookahead=LOOKAHEAD, name="age"),
            (18.0, 26.0),
            40,
            {"output_type": guided_smc.json_schema(PERSON, whitespace="line")},
        ),
    }


@click.command()
@click.option("--quick", is_flag=True, help="Few prompts and particles: shows that it runs.")
@click.option("--only", help="Tasks, between commas.")
@click.option("--plots", type=click.Path(path_type=Path), help="Folder for the frontiers, as SVG.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(quick: bool, only: str | None, plots: Path | None, out: Path | None) -> None:
    """Compare tilted decoding with best-of-N and soft best-of-N at equal target tokens."""
    found = machine()
    n_prompts, n = (2, 4) if quick else (PROMPTS, PARTICLES)
    lm = guided_smc.load(MODEL)
    chosen = {k: t for k, t in tasks().items() if only is None or k in only.split(",")}
    cells: dict[str, Any] = {}
    for name, task in chosen.items():
        max_tokens = 20 if quick else task.max_tokens
        prompts = [task.prompt.format(s) for s in task.subjects[:n_prompts]]
        start = time.perf_counter()
        swept = run(lm, task, prompts, n, max_tokens)
        cells[name] = {"seconds": time.perf_counter() - start, **summary(swept, n)}
        if plots:
            swept.save(plots / f"frontier-{name.replace(' ', '-')}.svg")
    results = {
        "benchmark": "tilting",
        "machine": found,
        "settings": {
            "model": MODEL,
            "n_particles": n,
            "prompts": n_prompts,
            "ess_threshold": THRESHOLD,
        },
        "tasks": cells,
    }
    report(results, [table(cells)], out or RESULTS / "tilting-cpu.json")


def run(lm: LM, task: Task, prompts: list[str], n: int, max_tokens: int) -> Sweep:
    """All runs of a task."""
    swept = Sweep(task.reward.name, task.betas, n)
    settings = {"max_tokens": max_tokens, "seed": 0, "ess_threshold": THRESHOLD, **task.settings}
    for _ in measure(swept, lm, prompts, task.reward, **settings):
        pass
    return swept


def summary(swept: Sweep, n: int) -> dict[str, Any]:
    """The frontier, and paired differences at a KL that is no larger than best-of-N's."""
    (best_of_n,) = [p for p in swept.points if p.method == "best_of_n" and p.n == n]
    bound = best_of_n.kl.value
    points = {p.beta: p for p in swept.points if p.method == "smc"}
    within = [beta for beta, p in points.items() if beta is not None and p.kl.value <= bound]
    beta = max(within, default=min(swept.betas))
    pools = swept.results[None]
    runs = {i: r for i, r in swept.results[beta].items() if i in pools}
    smc = np.array([expected_reward(r) for r in runs.values()])
    rewards_of = [candidates(pools[i]).rewards for i in runs]
    best = np.array([best_of(r, n) @ r for r in rewards_of])
    soft = np.array([soft_best_of(r, beta)[0] @ r for r in rewards_of])
    return {
        "beta": beta,
        "kl": asdict(points[beta].kl),
        "kl_best_of_n": bound,
        "within": bool(within),
        "smc": float(smc.mean()),
        "best_of_n": float(best.mean()),
        "soft_best_of_n": float(soft.mean()),
        "untilted": float(np.mean([r.mean() for r in rewards_of])),
        "tokens": points[beta].target_tokens,
        "tokens_best_of_n": float(np.mean([pools[i].usage.particle_tokens for i in runs])),
        "above_best_of_n": paired(smc - best),
        "above_soft_best_of_n": paired(smc - soft),
        "prompts": len(runs),
        "sweep": swept.to_dict(),
    }


def paired(differences: np.ndarray) -> dict[str, float]:
    """Mean over prompts with its 95 % confidence interval."""
    half = 1.96 * float(differences.std(ddof=1)) / math.sqrt(len(differences))
    mean = float(differences.mean())
    return {"mean": mean, "low": mean - half, "high": mean + half}


def table(cells: dict[str, Any]) -> Table:
    """Mean rewards, and how far ours is above."""
    shown = Table(title="mean reward at equal target tokens", title_justify="left")
    for column in (
        *("task", "model", "best of N", "soft best of N", "ours", "β"),
        *("KL (best of N)", "above best of N", "above soft"),
    ):
        shown.add_column(column, justify="left" if column == "task" else "right")
    for name, c in cells.items():
        shown.add_row(
            name,
            *(f"{c[key]:.3f}" for key in ("untilted", "best_of_n", "soft_best_of_n", "smc")),
            f"{c['beta']:g}",
            f"{c['kl']['value']:.2f} ({c['kl_best_of_n']:.2f})",
            *(interval(c[key]) for key in ("above_best_of_n", "above_soft_best_of_n")),
        )
    return shown


def interval(found: dict[str, float]) -> str:
    """With its confidence interval."""
    return f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


if __name__ == "__main__":
    main()
