"""How β grows with an unfinished text. Finished texts always have the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from guided_smc.errors import OptionError, PotentialError
from guided_smc.potentials import Completion
from guided_smc.rewards.scoring import shorten

Schedule: TypeAlias = "str | int | Callable[[int], float]"

NAMES = ("constant", "linear", "adaptive")


def check_schedule(schedule: Any) -> Schedule:
    """A schedule as it was given.

    Raises:
        OptionError: It is none; a function is tried at 0 tokens.
    """
    if isinstance(schedule, str) and schedule in NAMES:
        return schedule
    if isinstance(schedule, int) and not isinstance(schedule, bool) and schedule >= 1:
        return schedule
    if callable(schedule):
        try:
            first = schedule(0)
        except Exception as error:
            raise OptionError(
                f"schedule raised {type(error).__name__} at 0 tokens: {error}; it takes a number "
                "of tokens and returns a fraction from 0 to 1"
            ) from error
        if not _is_fraction(first):
            raise OptionError(f"schedule returned {shorten(first)} at 0 tokens, not from 0 to 1")
        return schedule
    known = ", ".join(f'"{name}"' for name in NAMES)
    raise OptionError(
        f"schedule must be one of {known}, a number of tokens (at least 1), or a function of it "
        f"to a fraction; got {shorten(repr(schedule))}"
    )


def fraction(schedule: Schedule, completion: Completion, name: str) -> float:
    """Which part of β an unfinished text has, from 0 to 1. Of an adaptive one: all of it.

    Raises:
        PotentialError: The schedule says something else, or needs the length cap and there is none.
    """
    if schedule in ("constant", "adaptive"):
        return 1.0
    n = len(completion.token_ids)
    if isinstance(schedule, int):
        return min(1.0, n / schedule)
    if schedule == "linear":
        if completion.max_tokens is None:
            raise _error(
                name, completion, 'needs max_tokens for schedule="linear"; give a number of tokens'
            )
        return min(1.0, n / completion.max_tokens)
    assert not isinstance(schedule, str)
    try:
        found = schedule(n)
    except Exception as error:
        what = f"has a schedule that raised {type(error).__name__} at {n} tokens: {error}"
        raise _error(name, completion, what) from error
    if not _is_fraction(found):
        what = f"has a schedule that returned {shorten(repr(found))} at {n} tokens, not from 0 to 1"
        raise _error(name, completion, what)
    return float(found)


def _is_fraction(value: Any) -> bool:
    try:
        return bool(0.0 <= float(value) <= 1.0)
    except (TypeError, ValueError):
        return False


def _error(name: str, completion: Completion, what: str) -> PotentialError:
    return PotentialError(f"the reward {name!r} {what}", potential=name, text=completion.text)
