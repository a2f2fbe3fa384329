"""What options refer to: schemas, rewards, device maps. All raise `click.UsageError`."""

from __future__ import annotations

import json
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
    path = Path(reference)
    if path.suffix != ".json" and not path.exists() and ":" in reference:
        from guided_smc.references import load_object

        found = load_object(reference)
        if isinstance(found, dict) or _is_model(found):
            return found
        raise click.UsageError(f"--schema {reference} is not a pydantic model")
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise click.UsageError(f"schema file not found: {reference}") from None
    except OSError as error:
        raise click.UsageError(f"cannot read schema {reference}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"schema {reference} is not valid JSON: {error}") from None


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

    try:
        return json_schema(schema)
    except ConstraintError as error:
        message = str(error)
        if error.path and error.path not in message:
            message += f" (at {error.path})"
        raise click.UsageError(f"schema {reference}: {message}") from None
