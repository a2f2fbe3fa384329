"""What options refer to: schemas, grammars, rewards, device maps. All raise `click.UsageError`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

import click
from pydantic import BaseModel

from guided_smc.cli.sampling import with_flags
from guided_smc.errors import ConstraintError, ModelError, OptionError
from guided_smc.options import Options, check_beta

if TYPE_CHECKING:
    from guided_smc.api import LM
    from guided_smc.grammars import Limits
    from guided_smc.potentials import Constraint
    from guided_smc.rewards import Reward

Made = TypeVar("Made")


def load_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `guided_smc.load` from those of a command."""
    exclusive = [name for name in ("device", "device_map", "tp_plan") if given.get(name)]
    if len(exclusive) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in exclusive)
        raise click.UsageError(f"{flags} exclude each other")
    names = ("draft", "dtype", "device", "max_total_tokens", "trust_remote_code", "allow_pickle")
    device_map = _parse_device_map(given["device_map"])
    return {
        **{name: given[name] for name in names},
        "device_map": device_map,
        "tp_plan": given.get("tp_plan"),
    }


def load_model(
    name: str, load: dict[str, Any], notify: Callable[[str], None], *, option: str = "--model"
) -> LM:
    """The model.

    Args:
        name: As it was given.
        load: As of `load_arguments`.
        notify: Called with a sentence before something that takes long.
        option: By which it was given.

    Raises:
        click.UsageError: There is no such model or draft, or it cannot be loaded.
        GuidedSMCError: Something else is wrong with how it is to be loaded.
    """
    import guided_smc

    try:
        return guided_smc.load(name, notify=notify, **load)
    except ModelError as error:
        if type(error) is not ModelError:
            raise
        said = str(error)
        of_draft = said.startswith("draft: ")
        raise click.UsageError(f"--{said}" if of_draft else f"{option}: {said}") from error


def _parse_device_map(text: str | None) -> Any:
    """A name, or the mapping that JSON says."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--device-map is not valid JSON: {error}") from None


@dataclass(frozen=True)
class Tilting:
    """What texts are scored by.

    Attributes:
        reward: None if by nothing.
        settings: What tells whether it is the same as before, as JSON data.
    """

    reward: Reward | None
    settings: dict[str, Any]


def load_tilt(given: dict[str, Any], *, beta: float | None) -> Tilting:
    """The sum of the rewards that are given.

    Args:
        given: The command's options.
        beta: Their strength; None for that of a file of rewards, or 1.

    Raises:
        click.UsageError: One of them, or how they are to be used, cannot be.
    """
    named, file = list(given["reward"]), given["rewards"]
    if named and file:
        raise click.UsageError("--reward and --rewards exclude each other")
    how = {name: given[f"reward_{name}"] for name in ("on", "schedule", "lookahead", "timeout")}
    if not named and not file:
        extra = ["--beta"] if beta is not None else []
        extra += [f"--reward-{name}" for name, value in how.items() if value is not None]
        if extra:
            raise click.UsageError(f"{' and '.join(extra)} need --reward or --rewards")
        return Tilting(None, {"reward": None})
    from guided_smc.rewards import specs

    try:
        check_beta(1.0 if beta is None else beta)
        if file:
            reward = specs.from_file(file)
        else:
            parts = [specs.parse(spec) for spec in named]
            reward = sum(parts[1:], parts[0])
        schedule = how["schedule"]
        if schedule is not None and schedule.isdecimal():
            how["schedule"] = int(schedule)
        reward = reward.with_(beta=beta, **how)
    except OptionError as error:
        raise click.UsageError(_as_typed(str(error))) from None
    said = read_text(file, "rewards") if file else named
    return Tilting(
        reward, {"reward": said, "beta": beta, **{f"reward_{n}": v for n, v in how.items()}}
    )


def _as_typed(message: str) -> str:
    """The message with options named as they are typed."""
    if message.startswith("beta "):
        return f"--{message}"
    return (
        f"--reward-{message}"
        if message.startswith(("schedule ", "on ", "lookahead ", "timeout "))
        else message
    )


@dataclass(frozen=True)
class Language:
    """Which texts are allowed.

    Attributes:
        option: Which option says so; None if all texts are.
        constraint: Their constraint; None if all are.
        settings: What tells whether it is the same as before, as JSON data.
    """

    option: str | None
    constraint: Constraint | None
    settings: dict[str, Any]


_LIBRARY = "library:"
"""In front of the name of a ready grammar."""


def load_language(given: dict[str, Any], limits: Limits | None = None) -> Language:
    """The language of a schema, a regular expression or a grammar; all texts without any of them.

    Args:
        given: The command's options.
        limits: What it may cost; of what a module names it is the module's own business.

    Raises:
        click.UsageError: More than one is given, one cannot be read, or it is refused.
    """
    named = [f"--{name}" for name in ("schema", "regex", "grammar") if given[name] is not None]
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} exclude each other")
    option = named[0] if named else None
    whitespace = given["whitespace"]
    if whitespace is not None and option != "--schema":
        raise click.UsageError("--whitespace needs --schema")
    if option is None:
        return Language(None, None, {"schema": None})
    if option == "--schema":
        constraint, data = _schema(given["schema"], whitespace, limits)
        settings = {"schema": data}
        if whitespace is not None:
            settings["whitespace"] = whitespace
        return Language(option, constraint, settings)
    # `schema` stays among the settings, so that runs from before the others can be resumed.
    if option == "--regex":
        from guided_smc.grammars import regex

        constraint = _made(lambda: regex(given["regex"], limits=limits), option)
        return Language(option, constraint, {"schema": None, "regex": given["regex"]})
    from guided_smc.grammars import lark, library

    what = f"grammar {given['grammar']}"
    if given["grammar"].startswith(_LIBRARY):
        name = given["grammar"].removeprefix(_LIBRARY)
        ready = _made(lambda: library.from_name(name), what)
        return Language(option, ready, {"schema": None, "grammar": given["grammar"]})
    source = read_text(given["grammar"], "grammar")
    folder = str(Path(given["grammar"]).parent)
    constraint = _made(lambda: lark(source, import_paths=[folder], limits=limits), what)
    return Language(option, constraint, {"schema": None, "grammar": source})


def refuse_impossible(lm: LM, constraint: Constraint | None, asked: Iterable[Options]) -> None:
    """Refuse a constraint of which no prompt can get a text, as far as that is known.

    Args:
        lm: The model.
        constraint: As of `load_language`.
        asked: The options of each prompt; nothing is refused where there are none.

    Raises:
        click.UsageError: All of its texts are too long for each of them, or there are none.
    """
    longest = max((options.max_tokens for options in asked), default=0)
    if constraint is None or longest == 0:
        return
    from guided_smc.grammars.finishing import within
    from guided_smc.grammars.sharing import refuse_disjoint

    try:
        refuse_disjoint(constraint)
        within(constraint, lm.model.vocabulary, longest)
    except ConstraintError as error:
        raise click.UsageError(with_flags(str(error))) from None


def _schema(reference: str, whitespace: Any, limits: Limits | None) -> tuple[Constraint, Any]:
    """The constraint that a file or an object stands for, and what tells it from others."""
    from guided_smc.grammars import JsonSchema, json_schema
    from guided_smc.grammars.schema.schema_text import RepeatedKeyError, StrictDecoder

    if not reference:
        raise click.UsageError("--schema needs the name of a file, or module:name")
    what = f"schema {reference}"
    spaced: dict[str, Any] = {} if whitespace is None else {"whitespace": whitespace}
    if Path(reference).suffix != ".json" and not Path(reference).exists() and ":" in reference:
        from guided_smc.grammars import from_output_type
        from guided_smc.references import load_object

        found = load_object(reference)
        constraint = _made(lambda: from_output_type(found), what)
        if constraint is None:
            raise click.UsageError(f"{what} allows any text: leave it out")
        if spaced:
            if not isinstance(constraint, JsonSchema):
                raise click.UsageError(f"--whitespace needs JSON, and {what} is {constraint.name}")
            model = constraint.schema if constraint.model is None else constraint.model
            constraint = json_schema(model, **spaced)
        if isinstance(found, type) and not get_origin(found) and issubclass(found, BaseModel):
            return constraint, found.model_json_schema()
        return constraint, found if isinstance(found, dict) else _described(constraint)
    text = read_text(reference, "schema")
    if not text.strip():
        raise click.UsageError(f"schema {reference} is empty")
    try:
        data = json.loads(text, cls=StrictDecoder)
    except RepeatedKeyError as error:
        raise click.UsageError(f"schema {reference} is ambiguous: {error}") from None
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"schema {reference} is not valid JSON: {error}") from None
    return _made(lambda: json_schema(data, limits=limits, **spaced), what), data


def _described(constraint: Any) -> Any:
    """What a constraint was made from, as JSON data."""
    for name in ("schema", "grammar", "pattern"):
        if hasattr(constraint, name):
            return [constraint.name, getattr(constraint, name)]
    if hasattr(constraint, "texts"):
        return [constraint.name, list(constraint.texts)]
    parts = [getattr(constraint, name, None) for name in ("language", "parts", "constraints")]
    inside = [c for p in parts if p for c in (p if isinstance(p, list | tuple) else [p])]
    return [constraint.name, *map(_described, inside)]


def read_text(reference: str, kind: str) -> str:
    """The text of a file that was named on the command line."""
    if not reference:
        raise click.UsageError(f"the name of the {kind} file is empty")
    try:
        return Path(reference).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise click.UsageError(f"{kind} file not found: {reference}") from None
    except OSError as error:
        raise click.UsageError(f"cannot read {kind} {reference}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{kind} {reference} is not in UTF-8: {error}") from None


def _made(make: Callable[[], Made], what: str) -> Made:
    try:
        return make()
    except ConstraintError as error:
        message = str(error)
        if error.path and error.path not in message:
            message += f" (at {error.path})"
        raise click.UsageError(f"{what}: {message}") from None
