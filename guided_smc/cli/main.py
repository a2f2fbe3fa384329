"""The entry point: the group of commands, and what becomes of their errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from guided_smc import __version__
from guided_smc.cli.check import check
from guided_smc.cli.common import SETTINGS, State, say_error, show_traceback
from guided_smc.cli.generate import generate
from guided_smc.cli.models import models
from guided_smc.cli.serve import serve
from guided_smc.cli.sweep import sweep
from guided_smc.cli.tune import tune
from guided_smc.cli.view import view
from guided_smc.errors import GuidedSMCError


@click.group(context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(__version__, message="guided-smc %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Constrained and reward-guided text generation by Sequential Monte Carlo.

    \b
    Examples:
      guided-smc generate prompts.txt
      guided-smc generate prompts.jsonl --schema person.json -o out.jsonl
      guided-smc check --schema person.json --sample 3
      guided-smc models
      guided-smc serve smollm2-135m
      guided-smc sweep prompts.txt --reward length:200
      guided-smc tune smollm2-135m --draft int8
      guided-smc view out.jsonl --open
    """  # noqa: D301 (click's mark is the character, not its escape)
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


cli.add_command(check)
cli.add_command(generate)
cli.add_command(models)
cli.add_command(serve)
cli.add_command(sweep)
cli.add_command(tune)
cli.add_command(view)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: Without the program's name; None for those of the process.
    """
    state = State()
    try:
        code = cli.main(arguments, prog_name="guided-smc", standalone_mode=False, obj=state)
    except click.ClickException as error:
        code = error.exit_code
        hint = ""
        if type(error) is not click.UsageError and isinstance(error, click.UsageError):
            command = error.ctx.command_path if error.ctx else "guided-smc"
            hint = f" (see {command} --help)"
        _report(error, error.format_message() + hint, state)
    except GuidedSMCError as error:
        code = 2
        _report(error, str(error), state)
    except (KeyboardInterrupt, click.Abort) as error:
        interrupted = error.__cause__ if isinstance(error, click.Abort) else error  # click's own
        code = getattr(interrupted, "exit_code", 130)
        told = getattr(interrupted, "told", None)
        click.echo(f"Interrupted: {told}." if told else "Interrupted.", err=True)
    except Exception as error:
        code = 1
        hint = "" if state.debug else " (--debug shows the traceback)"
        _report(error, f"internal error: {type(error).__name__}: {error}{hint}", state)
    sys.exit(code)


def _report(error: Exception, message: str, state: State) -> None:
    if state.debug:
        show_traceback(error)
    say_error(message)
