"""The sampling options of the command line: every field of `Options`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, get_args

import click

from guided_smc.errors import OutOfPagesError
from guided_smc.models.budget import PAGE, Budget, Need, particles
from guided_smc.options import BlockSize, Method, Options, ResamplingScheme, Selection

Command = TypeVar("Command", bound=Callable[..., Any])


class _BlockSize(click.ParamType):
    """A number of tokens, or `auto`."""

    name = "integer|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> BlockSize:
        """The value as `Options` wants it."""
        if value == "auto":
            return "auto"
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor auto", param, context)


SAMPLING: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "Most tokens of an output."),
    "temperature": (float, "Of the model; 0 is greedy."),
    "top_p": (float, "Nucleus of the model, in (0, 1]; 1 is off."),
    "top_k": (int, "Most likely tokens that are kept; 0 is off."),
    "min_p": (float, "Cut tokens below this fraction of the most likely one; 0 is off."),
    "power": (float, "α of the power target p^α."),
    "stop": (str, "End an output before this string. Repeatable; not with a constraint."),
    "seed": (int, "Of the run; each prompt derives its own. Random if not given."),
    "method": (
        click.Choice(get_args(Method)),
        "smc, or a baseline: none of them resamples, and rewards speak at the end only.",
    ),
    "n_particles": (int, "Particles per prompt."),
    "target_ess": (float, "Resample to as many particles as make about so many count."),
    "min_particles": (int, "Fewest with --target-ess.  [default: 2]"),
    "max_particles": (int, "Most with --target-ess.  [default: --n-particles]"),
    "block_size": (
        _BlockSize(),
        "Tokens drafted per step; auto chooses.  [default: 4 with --draft, else 0]",
    ),
    "islands": (int, "Independent populations that the particles are divided into."),
    "ess_threshold": (float, "Resample when ESS < threshold · particles, in [0, 1]."),
    "resampling": (click.Choice(get_args(ResamplingScheme)), "Resampling scheme."),
    "draft_temperature": (float, "Of the draft.  [default: that of the model / α, from 0.2]"),
    "select": (click.Choice(get_args(Selection)), "How the answer is taken from the particles."),
    "max_restarts": (int, "Fresh starts when all particles have died."),
}
"""Type and help of every field of `Options`; the defaults stand there."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def sampling_options(*without: str) -> Callable[[Command], Command]:
    """Add the fields of `Options` to a command, but for some of them."""

    def add(command: Command) -> Command:
        for name, (kind, text) in reversed(SAMPLING.items()):
            if name in without:
                continue
            default = Options.model_fields[name].default
            shown = f"  [default: {default}]" if default not in (None, ()) else ""
            command = click.option(
                _flag(name), type=kind, multiple=name == "stop", default=None, help=text + shown
            )(command)
        return command

    return add


def refuse_no_room(max_total_tokens: int | None, asked: Iterable[Options]) -> None:
    """Refuse a budget into which none of these fits, however short its prompt.

    Args:
        max_total_tokens: As given.
        asked: The options of each prompt; nothing is refused where there are none.

    Raises:
        click.UsageError: None of them does.
    """
    if max_total_tokens is None:
        return
    budget = Budget.of(max_total_tokens, "the model")
    least: Need | None = None
    for options in asked:
        need = Need.of(1, options.particle_range[1], options.max_tokens)
        if budget.holds([need]):
            return
        least = need if least is None or need.pages < least.pages else least
    if least is None:
        return
    try:
        budget.require(least)
    except OutOfPagesError as error:
        raise click.UsageError(
            f"--max-total-tokens {max_total_tokens} has room for no prompt: behind one of a single "
            f"token, {particles(least.rows)} with --max-tokens {least.tail - 1} may need "
            f"{error.needed * PAGE} tokens of K/V; {error.allows}"
        ) from None


def with_flags(message: str) -> str:
    """The message with options named as they are typed."""
    names = "|".join(SAMPLING)
    return re.sub(rf"\b(({names})(?=: |=)|^beta)", lambda found: _flag(found[0]), message)
