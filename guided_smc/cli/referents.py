"""What options refer to: schemas, grammars, rewards, device maps. All raise `click.UsageError`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import click
from pydantic import BaseModel

from guided_smc.errors import ConstraintError

if TYPE_CHECKING:
    from guided_smc.potentials import Constraint, Potential


def load_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `guided_smc.load` from those of a command."""
    if given["device"] and given["device_map"]:
        raise click.UsageError("--device and --device-map exclude each other")
    names = ("draft", "dtype", "device", "trust_remote_code", "allow_pickle")
    device_map = _parse_device_map(given["device_map"])
    return {**{name: given[name] for name in names}, "device_map": device_map}


def _parse_device_map(text: str | None) -> Any:
    """A name, or the mapping that JSON says."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--device-map is not valid JSON: {error}") from None


def load_reward(
    reference: str | None, beta: float, on: Literal["end", "prefix"]
) -> Potential | None:
    """The reward that a function is; None without one."""
    if reference is None:
        return None
    from guided_smc.references import load_object

    function = load_object(reference)
    if not callable(function):
        raise click.UsageError(f"--reward {reference} is not a function")
    from guided_smc.rewards import reward

    return reward(function, beta=beta, on=on)


def load_schema(reference: str | None) -> Any:
    """A JSON Schema or a pydantic model; None without one."""
    if reference is None:
        return None
    if Path(reference).suffix != ".json" and not Path(reference).exists() and ":" in reference:
        from guided_smc.references import load_object

        found = load_object(reference)
        if isinstance(found, dict) or _is_model(found):
            return found
        raise click.UsageError(f"--schema {reference} is not a pydantic model")
    text = _read_text(reference, "schema")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"schema {reference} is not valid JSON: {error}") from None


_LIBRARY = "library:"
"""In front of the name of a ready grammar."""


def load_grammar(reference: str | None) -> str | None:
    """The text of a grammar file, or the name of a ready grammar as it is; None without one."""
    if reference is None or reference.startswith(_LIBRARY):
        return reference
    return _read_text(reference, "grammar")


def _read_text(reference: str, kind: str) -> str:
    try:
        return Path(reference).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise click.UsageError(f"{kind} file not found: {reference}") from None
    except OSError as error:
        raise click.UsageError(f"cannot read {kind} {reference}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{kind} {reference} is not in UTF-8: {error}") from None


def _is_model(schema: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(schema, type) and issubclass(schema, BaseModel)


def schema_data(schema: Any) -> Any:
    """The schema as plain data, which tells whether it is the same as before."""
    return schema.model_json_schema() if _is_model(schema) else schema


def make_constraint(schema: Any, reference: str | None) -> Constraint | None:
    """The language of a schema, which was named by `reference`; None without one."""
    if schema is None:
        return None
    from guided_smc.grammars import json_schema

    return _made(json_schema, schema, f"schema {reference}")


def one_language(given: dict[str, Any]) -> str | None:
    """The option that says which texts are allowed; None without one."""
    named = [f"--{name}" for name in ("schema", "regex", "grammar") if given[name] is not None]
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} exclude each other")
    return named[0] if named else None


def make_language(
    schema: Any, pattern: str | None, grammar: str | None, given: dict[str, Any]
) -> Constraint | None:
    """The language of a schema, a regular expression or a grammar; None without any of them."""
    if pattern is not None:
        from guided_smc.grammars import regex

        return _made(regex, pattern, "--regex")
    if given["grammar"] is not None and given["grammar"].startswith(_LIBRARY):
        from guided_smc.grammars import library

        name = given["grammar"].removeprefix(_LIBRARY)
        return _made(library.from_name, name, f"--grammar {given['grammar']}")
    if grammar is not None:
        from guided_smc.grammars import lark

        return _made(lark, grammar, f"grammar {given['grammar']}")
    return make_constraint(schema, given["schema"])


def _made(make: Callable[[Any], Constraint], source: Any, what: str) -> Constraint:
    try:
        return make(source)
    except ConstraintError as error:
        message = str(error)
        if error.path and error.path not in message:
            message += f" (at {error.path})"
        raise click.UsageError(f"{what}: {message}") from None
