"""`guided-smc sweep`: what a reward's strength buys, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from guided_smc.cli.common import (
    SETTINGS,
    chat_option,
    debug_option,
    draft_option,
    language_options,
    model_option,
    model_options,
    reward_options,
    rows_option,
)
from guided_smc.cli.interrupts import Interrupted, Interrupts, where_it_stands
from guided_smc.cli.reading import read_prompts
from guided_smc.cli.referents import (
    load_arguments,
    load_language,
    load_model,
    load_tilt,
    refuse_impossible,
)
from guided_smc.cli.sampling import SAMPLING, refuse_no_room, sampling_options, with_flags
from guided_smc.errors import OptionError
from guided_smc.options import make_options

if TYPE_CHECKING:
    from rich.console import Console

    from guided_smc.results import Estimate
    from guided_smc.sweep import Sweep

_OWN = ("method", "select", "n_particles")
_SUFFIXES = (".json", ".png", ".svg", ".pdf")


class _Betas(click.ParamType):
    """Numbers between commas."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[float, ...]:
        """Each once, ascending."""
        if isinstance(value, tuple):
            return value
        from guided_smc.sweep import check_betas

        words = [word.strip() for word in str(value).split(",")]
        try:
            return check_betas(float(word) for word in words)
        except OptionError as error:
            self.fail(str(error), param, context)
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0,0.5,1", param, context)


@click.command(context_settings=SETTINGS, short_help="Find out how strong a reward should be.")
@click.argument("prompts")
@model_option
@draft_option
@reward_options
@click.option(
    "--beta",
    "betas",
    type=_Betas(),
    default="0,0.5,1,2,4",
    show_default=True,
    help="Strengths of the rewards to try.",
)
@click.option(
    "--n-particles",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Particles per prompt, and candidates of best-of-N.",
)
@language_options
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    help="Also write a file: .json, or a plot as .png, .svg or .pdf, which needs "
    "'guided-smc[plot]'. Repeatable.",
)
@sampling_options(*_OWN)
@chat_option
@rows_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@model_options
@click.option("--quiet", is_flag=True, help="No progress or notices.")
@debug_option
def sweep(**given: Any) -> int:
    """Draw the frontier of reward and KL over PROMPTS, with best-of-N on it.

    A reward R of strength β makes the posterior p · exp(β·R). The larger β, the larger R is on
    average, and the further the posterior is from the model: that distance is KL, in nats. PROMPTS
    is a file as generate takes it. Every prompt runs once for each β, and once without any for the
    candidates that best-of-N and soft best-of-N choose from.

    \b
    Columns:
      method        smc (particles), best of N, or soft: a draw by exp(β·reward) among N
      β, N          strength; particles or candidates
      reward        mean reward of the answers, and its standard error
      KL            how far their law is from the model, under the constraint if there is one: of
                    smc that of the posterior, of best of N the bound log N - (N-1)/N
      indep.        effective number of independent answers among the particles
      tokens        drawn from the model for each prompt

    \b
    Examples:
      guided-smc sweep prompts.txt --reward sentiment
      guided-smc sweep prompts.txt --reward length:200 --beta 0,1,4,16 -o frontier.svg
      guided-smc sweep prompts.jsonl --reward scores:politeness --schema reply.json -o points.json

    \b
    Exit codes:
      0    all was measured
      1    some prompts failed (a message says why), or a file could not be written
      2    wrong usage or set-up; nothing ran
      130  Ctrl-C, 143 SIGTERM: what had been measured is printed and written
    """  # noqa: D301 (click's mark is the character, not its escape)
    for path in given["outputs"]:
        if Path(path).suffix.lower() not in _SUFFIXES:
            raise click.UsageError(f"--output {path} must end in {', '.join(_SUFFIXES)}")
        if not Path(path).absolute().parent.is_dir():
            raise click.UsageError(f"--output {path}: there is no such folder")
    plots = [path for path in given["outputs"] if Path(path).suffix.lower() != ".json"]
    if plots:
        from guided_smc.plotting import require_matplotlib

        try:
            require_matplotlib()
        except OptionError as error:
            raise click.UsageError(f"--output {plots[0]}: {error}") from None
    try:
        options = make_options(
            n_particles=given["n_particles"],
            **{n: given[n] for n in SAMPLING if n not in _OWN and given[n] not in (None, ())},
        )
    except OptionError as error:
        raise click.UsageError(with_flags(str(error))) from None
    if given["draft"] is None and options.block_size not in (None, 0, "auto"):
        raise click.UsageError("--block-size needs --draft")
    load = load_arguments(given)
    language = load_language(given)
    if language.option and options.stop:
        raise click.UsageError(
            f"--stop does not go with {language.option}, which says where to end"
        )
    tilt = load_tilt(given, beta=None)
    if tilt.reward is None:
        raise click.UsageError("a sweep needs --reward or --rewards")
    lines = read_prompts(given["prompts"], options)
    for line in lines:
        for name in _OWN:
            if getattr(line.options, name) != getattr(options, name):
                raise click.UsageError(
                    f"{given['prompts']}, line {line.number}: {name} is the sweep's own"
                )

    asked = [line.options for line in lines if line.options is not None]
    refuse_no_room(load["max_total_tokens"], asked)

    from rich.console import Console

    from guided_smc.sweep import Sweep

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    swept = Sweep(tilt.reward.name, given["betas"], given["n_particles"])
    code = 0
    with Interrupts():

        def notify(message: str) -> None:
            if not given["quiet"]:
                console.print(message, soft_wrap=True)

        with where_it_stands("nothing has been measured"):
            lm = load_model(given["model"], load, notify)
        refuse_impossible(lm, language.constraint, asked)
        settings = {"output_type": language.constraint, "chat": given["chat"]}
        try:
            _measure(swept, lm, lines, tilt.reward, settings, given, console)
        except Interrupted as interrupted:
            code = interrupted.exit_code
            click.echo("Interrupted: this is what had been measured.", err=True)
    if not swept.points:
        why = f": {swept.errors[0]}" if swept.errors else "; try one of them with generate"
        raise click.ClickException(f"no prompt had an answer{why}")
    if given["as_json"]:
        click.echo(json.dumps(swept.to_dict(), indent=2, ensure_ascii=False))
    else:
        _print(swept)
    for path in given["outputs"]:
        try:
            swept.save(path)
        except OSError as error:
            raise click.ClickException(f"cannot write to {path}: {error.strerror}") from None
        except OptionError as error:
            raise click.ClickException(str(error)) from None
    if swept.errors and code == 0:
        failed = f"{len(swept.errors)} run(s) failed, the first of them: {swept.errors[0]}"
        raise click.ClickException(failed)
    return code


def _measure(
    swept: Sweep,
    lm: Any,
    lines: list[Any],
    reward: Any,
    settings: dict[str, Any],
    given: dict[str, Any],
    console: Console,
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from guided_smc.cli.progress import ScoringColumn, is_terminal
    from guided_smc.sweep import measure

    with Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        ScoringColumn(),
        console=console,
        disable=given["quiet"] or not is_terminal(console),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task("", total=len(lines) * (1 + len(swept.betas)))
        for _ in measure(
            swept,
            lm,
            [line.prompt for line in lines],
            reward,
            each=[
                {"columns": line.carried, "options": line.options, "exact_seed": line.own_seed}
                for line in lines
            ],
            max_rows=given["batch_rows"],
            **settings,
        ):
            progress.advance(task)


def _print(swept: Sweep) -> None:
    from rich.console import Console
    from rich.table import Table

    from guided_smc.diagnostics import FEWEST_FAMILIES

    shown = Table(title=f"reward {swept.name}", title_justify="left")
    for name in ("method", "β", "N", "reward", "KL", "indep.", "tokens"):
        shown.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    points = swept.points
    for point, after in zip(points, [*points[1:], None], strict=True):
        shown.add_row(
            {"best_of_n": "best of N", "soft_best_of_n": "soft"}.get(point.method, point.method),
            "-" if point.beta is None else f"{point.beta:g}",
            str(point.n),
            _estimate(point.reward),
            _estimate(point.kl),
            "-" if point.independent is None else f"{point.independent:.1f}",
            f"{point.target_tokens:.0f}",
            end_section=after is None or after.method != point.method,
        )
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(shown)
    for failed in swept.to_dict()["failed"]:
        what = "candidates" if failed["beta"] is None else f"β = {failed['beta']:g}"
        console.print(f"{what}: {failed['prompts']} prompt(s) without an answer", soft_wrap=True)
    few = [p for p in points if p.independent is not None and p.independent < FEWEST_FAMILIES]
    for point in few if swept.n_particles > 1 else []:
        console.print(
            f"β = {point.beta:g}: {point.independent:.1f} independent answers in effect: too few "
            "to tell how far the particles are from the posterior",
            soft_wrap=True,
        )


def _estimate(estimate: Estimate) -> str:
    error = "" if not estimate.std_error else f" ± {estimate.std_error:.2g}"
    return f"{estimate.value:.3g}{error}"
