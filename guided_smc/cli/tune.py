"""`guided-smc tune`: which block size pays, for how many particles, on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from guided_smc.cli.common import (
    SETTINGS,
    chat_option,
    debug_option,
    draft_option,
    language_options,
    model_options,
)
from guided_smc.cli.interrupts import Interrupted, Interrupts, where_it_stands
from guided_smc.cli.reading import read_prompts
from guided_smc.cli.referents import load_arguments, load_language, load_model, refuse_impossible
from guided_smc.cli.sampling import refuse_no_room
from guided_smc.errors import GuidedSMCError, OptionError
from guided_smc.options import BlockSize, make_options

if TYPE_CHECKING:
    from rich.console import Console

    from guided_smc.api import LM
    from guided_smc.tuning import Table


class _Numbers(click.ParamType):
    """Numbers between commas, each once; with `auto` if allowed."""

    def __init__(self, least: int, *, auto: bool = False) -> None:
        self.least = least
        self.auto = auto
        self.name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> list[BlockSize]:
        """In the order given."""
        if isinstance(value, list):
            return value
        found: dict[BlockSize, None] = {}
        for word in str(value).split(","):
            word = word.strip()
            if self.auto and word == "auto":
                found["auto"] = None
            elif word.isdecimal() and int(word) >= self.least:
                found[int(word)] = None
            else:
                wanted = f"a number from {self.least}" + (" or auto" if self.auto else "")
                self.fail(f"{word!r} is not {wanted}", param, context)
        return list(found)


@click.command(context_settings=SETTINGS, short_help="Find out which block size pays.")
@click.argument("model")
@draft_option
@click.option("--prompts", help="File of prompts, as generate takes it.  [default: two of its own]")
@language_options
@click.option(
    "--particles", type=_Numbers(1), default="1,4,8", show_default=True, help="Values of N."
)
@click.option(
    "--block-sizes",
    type=_Numbers(0, auto=True),
    help="Values of K, and auto.  [default: 0,2,4,8,12,auto with --draft, else 0]",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=2), default=32, show_default=True, help="Of a run."
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Rounds of runs."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the runs."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds after which no other run begins.",
)
@chat_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@model_options
@click.option("--quiet", is_flag=True, help="No progress or notices.")
@debug_option
def tune(**given: Any) -> int:
    """Measure MODEL with different numbers of particles and block sizes, and say what pays.

    MODEL is a name, a folder or a file, as generate takes it. With a draft, each step drafts K
    tokens (the block size) for each of N particles before the model checks them. Larger blocks are
    faster, but the weights of the particles spread more, so that fewer of them count: that is the
    effective sample size, ESS.

    First the passes of both models are timed; what is found is kept, and is what generate's
    --block-size auto chooses by. Then every N is run with every K.

    \b
    Columns:
      N, K             particles, and tokens drafted per step
      predicted        tokens/s of the answer, from the times of the passes alone
      tokens/s         the same, measured: the median over the runs, without the prompt's encoding
      ESS/N            share of the particles that count, mean over the steps
      effective        tokens/s · ESS: the best of each N is marked

    \b
    Examples:
      guided-smc tune smollm2-135m --draft int8
      guided-smc tune smollm2-135m --draft int8 --schema person.json --particles 4,8,16
      guided-smc tune Qwen/Qwen2.5-7B --draft Qwen/Qwen2.5-0.5B --json > tuned.json

    \b
    Exit codes:
      0    all was measured, or as much as the time limit let
      1    it broke off (a message says why)
      2    wrong usage or set-up; nothing ran
      130  Ctrl-C, 143 SIGTERM: what had been measured is printed
    """  # noqa: D301 (click's mark is the character, not its escape)
    block_sizes: list[BlockSize] = given["block_sizes"] or (
        [0, 2, 4, 8, 12, "auto"] if given["draft"] else [0]
    )
    if given["draft"] is None and block_sizes != [0]:
        raise click.UsageError("--block-sizes other than 0 need --draft")
    try:
        options = make_options(max_tokens=given["max_tokens"])
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    load = load_arguments(given)
    widest = make_options(options, n_particles=max(given["particles"]))
    refuse_no_room(load["max_total_tokens"], [widest])
    language = load_language(given)
    path = given["prompts"]
    prompts = [line.prompt for line in read_prompts(path, make_options())] if path else []

    from rich.console import Console

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    with Interrupts():
        with where_it_stands("nothing has been measured"):
            lm = _load(given, load, console)
        refuse_impossible(lm, language.constraint, [options])
        from guided_smc.tuning import PROMPTS, Table

        table = Table.of(lm.costs, options, given["particles"], block_sizes)
        settings = {
            "output_type": language.constraint,
            "chat": given["chat"],
            "seed": given["seed"],
        }
        code = 0
        try:
            _measure(table, lm, prompts or list(PROMPTS), given, settings, console)
        except Interrupted as interrupted:
            code = interrupted.exit_code
            click.echo("Interrupted: this is what had been measured.", err=True)
        except GuidedSMCError as error:
            raise click.ClickException(str(error)) from error
    if given["as_json"]:
        click.echo(json.dumps(_as_data(table, lm), indent=2, ensure_ascii=False))
    else:
        _print(table, lm)
    return code


def _load(given: dict[str, Any], load: dict[str, Any], console: Console) -> LM:
    """The model, with costs measured now and kept."""
    import guided_smc
    from guided_smc.costs import load_or_measure

    def notify(message: str) -> None:
        if not given["quiet"]:
            console.print(message, soft_wrap=True)

    lm = load_model(given["model"], load, notify, option="MODEL")
    costs = load_or_measure(lm.model, lm.draft, again=True, notify=notify)
    return guided_smc.LM(lm.model, draft=lm.draft, encoder=lm.encoder, costs=costs)


def _measure(
    table: Table,
    lm: LM,
    prompts: list[Any],
    given: dict[str, Any],
    settings: dict[str, Any],
    console: Console,
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from guided_smc.cli.progress import is_terminal
    from guided_smc.tuning import measure

    total = len(table.settings) * len(prompts) * given["repeats"]
    deadline = time.monotonic() + given["time_limit"]
    with Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=given["quiet"] or not is_terminal(console),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task("", total=total)
        runs = measure(table, lm, prompts, repeats=given["repeats"], **settings)
        for done, setting in enumerate(runs, 1):
            rate = f"{setting.rates[-1]:.3g} tokens/s"
            what = f"N = {setting.n_particles}, K = {setting.block_size}: {rate}"
            progress.update(task, completed=done, description=what)
            if time.monotonic() > deadline and done < total:
                console.print(
                    f"The time limit was reached after {done} of {total} runs.", soft_wrap=True
                )
                return


# -- what is printed -----------------------------------------------------------------------------


def _print(table: Table, lm: LM) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(markup=False, emoji=False, highlight=False)
    shown = RichTable(title=repr(lm), title_justify="left")
    for name in ("N", "K", "predicted", "tokens/s", "ESS/N", "effective"):
        shown.add_column(name, justify="right")
    for n in table.particles:
        best = table.recommended(n)
        for s in (s for s in table.settings if s.n_particles == n):
            shown.add_row(
                str(n),
                str(s.block_size),
                _number(table.predicted_rate(s), ".1f"),
                _number(s.rate, ".1f"),
                _number(s.ess_share, ".2f"),
                _number(s.effective_rate, ".1f") + (" *" if s is best else "  "),
                end_section=s is _last(table, n),
            )
    console.print(shown)
    for line in _lines(table):
        console.print(line, soft_wrap=True)


def _last(table: Table, n_particles: int) -> Any:
    return [s for s in table.settings if s.n_particles == n_particles][-1]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _lines(table: Table) -> Iterator[str]:
    """What the table means, in words."""
    costs = table.costs
    yield f"A pass of the model takes {_points(costs.target, 'token')}."
    if costs.draft:
        yield f"A pass of the draft takes {_points(costs.draft, 'particle')}."
    for n in table.particles:
        best = table.recommended(n)
        said = f"N = {n}: "
        if best is None:
            said += "nothing was measured."
        else:
            said += f"K = {best.block_size} pays best."
        if costs.draft:
            estimate = table.estimate(n)
            found = (
                "before anything is drafted"
                if estimate is None
                else f"at the variance found, {estimate.draft_variance:.2g} per drafted token"
            )
            said += f" auto comes to K = {table.auto_choice(n)} {found}."
        yield said
    if 1 in table.particles and costs.draft:
        yield (
            "With one particle the weights choose nothing, so that a drafted text is the draft's: "
            "what a block costs is taken from how its weight changes over time."
        )


def _points(points: Any, what: str) -> str:
    said = [f"{1000 * s:.0f} ms for {m} {what}{'s' if m > 1 else ''}" for m, s in points]
    return ", ".join(said)


def _as_data(table: Table, lm: LM) -> dict[str, Any]:
    """The same as plain data."""
    settings = [
        {
            "n_particles": s.n_particles,
            "block_size": s.block_size,
            "predicted_tokens_per_s": table.predicted_rate(s),
            "tokens_per_s": s.rate,
            "ess_share": s.ess_share,
            "effective_tokens_per_s": s.effective_rate,
            "mean_block_size": sum(s.block_sizes) / len(s.block_sizes) if s.block_sizes else None,
            "runs": len(s.rates),
        }
        for s in table.settings
    ]
    advice = []
    for n in table.particles:
        best, estimate = table.recommended(n), table.estimate(n)
        advice.append(
            {
                "n_particles": n,
                "block_size": None if best is None else best.block_size,
                "auto_block_size": table.auto_choice(n),
                "draft_variance": None if estimate is None else estimate.draft_variance,
                "bonus_variance": None if estimate is None else estimate.bonus_variance,
            }
        )
    return {
        "model": lm.model.name,
        "draft": lm.draft.name if lm.draft else None,
        "costs": {"target": table.costs.target, "draft": table.costs.draft},
        "settings": settings,
        "recommended": advice,
    }
