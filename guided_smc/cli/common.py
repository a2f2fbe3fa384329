"""What the commands share: errors of one line, and their traceback on request."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from guided_smc.models.budget import PAGE

Command = TypeVar("Command", bound=Callable[..., Any])

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@dataclass
class State:
    """Of one call of the command line."""

    debug: bool = False


def debug_option(command: Command) -> Command:
    """Add `--debug` to a command."""

    def remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        context.ensure_object(State).debug = value

    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        # Before the others, so that it also holds for errors in these.
        is_eager=True,
        callback=remember,
        help="Show the traceback of an error.",
    )(command)


model_option = click.option(
    "--model", default="smollm2-135m", show_default=True, help="Name, folder or file."
)
draft_option = click.option(
    "--draft", help="Proposes tokens: a smaller model with the same tokenizer, int8, or ngram."
)
chat_option = click.option("--chat/--no-chat", default=None, help="Use the chat template, or not.")
rows_option = click.option(
    "--batch-rows",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Most particles, of all prompts together, in one batch.",
)


tp_plan_option = click.option(
    "--tp-plan",
    help="Passed on to transformers, to split the model over the processes of torchrun: auto.",
)


def model_options(command: Command) -> Command:
    """Add how a model is loaded to a command."""
    for option in reversed(
        (
            click.option("--dtype", help="float32, bfloat16, float16 or auto."),
            click.option("--device", help="cpu, cuda, cuda:1, ..."),
            click.option(
                "--device-map", help="Passed on to transformers: auto, ... or a JSON object."
            ),
            click.option(
                "--max-total-tokens",
                type=click.IntRange(min=PAGE),
                help="Most tokens whose K/V is held at once; prompts that do not fit yet wait.",
            ),
            click.option(
                "--trust-remote-code", is_flag=True, help="Run code that comes with the model."
            ),
            click.option(
                "--allow-pickle", is_flag=True, help="Load pickled weights if there are no others."
            ),
        )
    ):
        command = option(command)
    return command


def language_options(command: Command) -> Command:
    """Add what says which texts are allowed to a command."""
    for option in reversed(
        (
            click.option(
                "--schema",
                help="JSON Schema file, or module:name of what a text stands for: a pydantic "
                "model, another type, a schema, a constraint.",
            ),
            click.option(
                "--whitespace",
                type=click.Choice(["compact", "line", "indented", "flexible", "any"]),
                help="Of JSON under --schema.  [default: flexible]",
            ),
            click.option("--regex", help="Pattern that a whole output matches, as in Python."),
            click.option(
                "--grammar",
                help="Lark file that an output follows, as Lark reads it or in llguidance's "
                "dialect; or library:NAME, a ready grammar.",
            ),
        )
    ):
        command = option(command)
    return command


def reward_options(command: Command) -> Command:
    """Add what texts are scored by to a command."""
    for option in reversed(
        (
            click.option(
                "--reward",
                multiple=True,
                metavar="[WEIGHT*]REWARD",
                help="Score texts: module:function, hf:MODEL (a sequence classifier), or a ready "
                "one, such as length:200. Repeatable: the scores are added.",
            ),
            click.option("--rewards", help="YAML or TOML file of rewards."),
            click.option(
                "--reward-on",
                type=click.Choice(["end", "step", "sentence", "line", "field"]),
                help="Score finished texts only, or unfinished ones too, whenever one of these is "
                "closed.  [default: what suits the reward]",
            ),
            click.option(
                "--reward-schedule",
                metavar="constant|linear|adaptive|TOKENS",
                help="How strength grows along unfinished texts.  [default: constant]",
            ),
            click.option(
                "--reward-lookahead",
                type=click.IntRange(min=0),
                metavar="TOKENS",
                help="Score so many of the likeliest next tokens before one is drawn.  "
                "[default: 0]",
            ),
            click.option(
                "--reward-timeout",
                type=click.FloatRange(min=0, min_open=True),
                help="Seconds that one call of a reward may take.",
            ),
        )
    ):
        command = option(command)
    return command


def say_error(message: str) -> None:
    """An error in one line, whatever line breaks its message has."""
    click.echo(f"Error: {' '.join(message.split())}", err=True)


def show_traceback(error: BaseException) -> None:
    """For `--debug`."""
    click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
