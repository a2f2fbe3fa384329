"""How particles best read their K/V on this machine: windows, pages gathered, prompts in place.

    python benchmarks/attention.py

One pass of the int8 twin (so that attention is a large share of it) over rows that continue one
prompt. *windows*: each row's columns side by side, refreshed where resampling changed them.
*gathered*: the same columns, taken from the pages in every pass. *in place*: the prompt where it
is, once for all rows, and windows for the tails.

Besides, the K/V that N particles hold behind a long prompt, as the session itself decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from contestants import MODEL, Models
from harness import RESULTS, interleave, machine, report, spread
from rich.table import Table

import guided_smc
from guided_smc.models import particles
from guided_smc.models.particles import ParticleSession

CASES = ((1, 50, 32), (4, 50, 32), (8, 50, 32), (8, 200, 64), (8, 1000, 64), (32, 1000, 64))
"""Rows, tokens of their prompt, tokens of their tails."""
WAYS = {"windows": 10**9, "gathered": 10**9, "in place": 1}
"""From how many tokens on a prompt is attended to in place."""

LONG_PROMPT = 1000
SHARING = (1, 8, 32)


@click.command()
@click.option("--quick", is_flag=True, help="Few cases and repeats: shows that it runs.")
@click.option("--repeats", default=15, show_default=True, help="Timed passes.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(quick: bool, repeats: int, out: Path | None) -> None:
    """Compare ways to attend, on a real model."""
    found = machine()
    lm = Models().int8
    cases = {}
    for rows, prompt, tail in CASES[1:2] if quick else CASES:
        ways: dict[str, Callable[[int], None]] = {}
        held = {}
        for way in WAYS:
            session = begin(lm, way, rows, prompt, tail)
            ways[way] = partial(one_pass, lm, session, way)
            held[way] = session.cache.nbytes / 2**20
        laps = interleave(ways, repeats=2 if quick else repeats, warm_ups=2)
        cases[f"N={rows}, prompt {prompt}, tail {tail}"] = {
            way: {"ms": spread([1e3 * x.seconds for x in laps[way]]), "kv_mib": held[way]}
            for way in WAYS
        }
    length = LONG_PROMPT // 5 if quick else LONG_PROMPT
    results = {
        "benchmark": "attention",
        "machine": found,
        "settings": {"model": MODEL, "repeats": repeats, "in_place_from": particles.IN_PLACE},
        "cases": cases,
        "long_prompt": {"tokens": length, "kv": shared_prompt(lm, length)},
    }
    report(
        results,
        [table_of(cases), memory_table(results["long_prompt"])],
        out or RESULTS / "attention-cpu.json",
    )


def begin(lm: guided_smc.LM, way: str, rows: int, prompt: int, tail: int) -> ParticleSession:
    """Rows with a prompt and tails."""
    session: ParticleSession = lm.model.start_session()
    session.in_place_from = WAYS[way]
    session.prefill([[100 + i % 500 for i in range(prompt)]], [rows])
    tokens = torch.randint(100, 600, (rows, tail), generator=torch.Generator().manual_seed(0))
    session.extend(tokens, torch.full((rows,), tail), last_only=True)
    return session


def shared_prompt(lm: guided_smc.LM, length: int) -> dict[str, dict[str, float]]:
    """MiB of K/V behind a long prompt, before tails and after one token of each particle."""
    found = {}
    for rows in SHARING:
        session: ParticleSession = lm.model.start_session()
        session.prefill([[100 + i % 500 for i in range(length)]], [rows])
        before = session.cache.nbytes
        tokens, ones = torch.full((rows, 1), 100), torch.ones(rows, dtype=torch.int64)
        session.extend(tokens, ones, last_only=True)
        found[f"N={rows}"] = {
            "before_tails": before / 2**20,
            "after_a_token": session.cache.nbytes / 2**20,
        }
    for cell in found.values():
        cell["ratio_before_tails"] = cell["before_tails"] / found["N=1"]["before_tails"]
        cell["ratio_after_a_token"] = cell["after_a_token"] / found["N=1"]["after_a_token"]
    return found


def one_pass(lm: guided_smc.LM, session: ParticleSession, way: str, round_: int) -> None:
    """A draft pass of one token a row."""
    if way == "gathered":
        session.invalidate()
    following = lm.draft.follow(session)
    following.begin_block()
    rows = len(session.table)
    following.extend(
        torch.full((rows, 1), 100 + round_), torch.ones(rows, dtype=torch.int64), last_only=True
    )


def table_of(cases: dict[str, Any]) -> Table:
    """Milliseconds and K/V of each way."""
    table = Table(title="a draft pass, ms (K/V, MiB)", title_justify="left")
    table.add_column("")
    for way in WAYS:
        table.add_column(way, justify="right")
    for name, found in cases.items():
        cells = [f"{found[way]['ms']['median']:.1f} ({found[way]['kv_mib']:.0f})" for way in WAYS]
        table.add_row(name, *cells)
    return table


def memory_table(long_prompt: dict[str, Any]) -> Table:
    """K/V of more particles behind one prompt."""
    title = f"K/V behind a prompt of {long_prompt['tokens']} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("", "before tails", "x N=1", "after a token each", "x N=1"):
        table.add_column(column, justify="right")
    for name, cell in long_prompt["kv"].items():
        table.add_row(
            name,
            f"{cell['before_tails']:.1f} MiB",
            f"{cell['ratio_before_tails']:.2f}",
            f"{cell['after_a_token']:.1f} MiB",
            f"{cell['ratio_after_a_token']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
