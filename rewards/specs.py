"""Rewards named in text: on a command line, and in YAML or TOML files.

A spec is `[WEIGHT*]NAME[:ARGUMENTS]`: `0.7*length:200`, `keywords:sea,blue`, `hf:owner/model`, or
`module:function` for a function, or a reward, of one's own. A file has a list of them:

    beta: 2
    schedule: linear
    rewards:
      - reward: length
        target: 200
        unit: words
        weight: 0.7
      - "0.3*sentiment"
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import guided_smc.rewards
from guided_smc.errors import OptionError
from guided_smc.references import load_object
from guided_smc.rewards.base import Reward, as_number
from guided_smc.rewards.callable import reward
from guided_smc.rewards.scoring import shorten

_WEIGHT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*\*\s*(.+)", re.DOTALL)
_NO_WEIGHT = re.compile(r"\s*(?:([^:*]*?)\s*\*|([+-])).+", re.DOTALL)
_OF_A_PART = ("on", "name", "weight")
_OF_THE_WHOLE = ("beta", "schedule", "lookahead", "name", "rewards")
_OF_A_FUNCTION = ("timeout", "messages", "bounds")


def _no_arguments(text: str) -> dict[str, Any]:
    raise OptionError("takes no arguments")


def _all_of_it(name: str) -> Callable[[str], dict[str, Any]]:
    """One argument, whatever is in it."""
    return lambda text: {name: text}


def _words(text: str) -> dict[str, Any]:
    return {"words": [word.strip() for word in text.split(",")]}


def _listed(first: str, **types: Callable[[str], Any]) -> Callable[[str], dict[str, Any]]:
    """`value,name=value,...`: the first is `first`."""

    def read(text: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i, piece in enumerate(text.split(",")):
            name, equals, value = piece.partition("=")
            name = name.strip()
            if i == 0 and not (equals and name in types):
                name, value = first, piece
            elif not equals or name not in types:
                known = ", ".join(f"{n}=" for n in types if n != first)
                raise OptionError(f"does not know {piece.strip()!r} (there are: {known})")
            try:
                found[name] = types[name](value.strip())
            except ValueError:
                kind = "a whole number" if types[name] is int else "a number"
                raise OptionError(f"needs {kind} for {name}, got {value.strip()!r}") from None
        return found

    return read


@dataclass(frozen=True)
class _Ready:
    """A ready reward.

    Attributes:
        maker: The function of `guided_smc.rewards` that makes it, by name: some import torch.
        form: How a spec of it looks.
        read: The arguments in a spec.
    """

    maker: str
    form: str
    read: Callable[[str], dict[str, Any]]

    @property
    def make(self) -> Callable[..., Reward]:
        """What makes it."""
        return cast(Callable[..., Reward], getattr(guided_smc.rewards, self.maker))

    @property
    def arguments(self) -> list[str]:
        """Their names."""
        parameters = inspect.signature(self.make).parameters.values()
        return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]


READY: dict[str, _Ready] = {
    "length": _Ready(
        "length",
        "length:TARGET[,unit=words][,band=10]",
        _listed("target", target=int, unit=str, band=int, on=str),
    ),
    "keywords": _Ready("keywords", "keywords:WORD,WORD,...", _words),
    "matches": _Ready("matches", "matches:PATTERN", _all_of_it("pattern")),
    "readability": _Ready(
        "readability",
        "readability:GRADE[,metric=flesch_reading_ease]",
        _listed("grade", grade=float, metric=str, on=str),
    ),
    "sentiment": _Ready("sentiment", "sentiment", _no_arguments),
    "similarity": _Ready("similarity", "similarity:TEXT", _all_of_it("text")),
    "language_model": _Ready("language_model", "language_model:MODEL", _all_of_it("model")),
    "hf": _Ready(
        "sequence_classifier",
        "hf:MODEL[,label=NAME][,template=pair]",
        _listed(
            "model", model=str, label=str, template=str, device=str, dtype=str, batch_size=int,
            max_length=int, on=str,
        ),
    ),
}  # fmt: skip
"""The ready rewards by the names that specs and files have for them."""


def parse(spec: str) -> Reward:
    """The reward that a spec names.

    Raises:
        OptionError: The spec is malformed, or names what there is not; with what there is.
        ModelError: Its model cannot be had.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise OptionError(f"a reward is named by a text such as 'length:200', got {spec!r}")
    weighted = _WEIGHT.fullmatch(spec)
    if weighted is None and (wrong := _NO_WEIGHT.fullmatch(spec)):
        if wrong[2]:
            weight = f"{wrong[2]}1".lstrip("+")
            raise OptionError(f"{spec.strip()!r}: a weight is a number and *, as in '{weight}*...'")
        raise OptionError(f"{spec.strip()!r}: the weight {wrong[1]!r} is not a finite number")
    rest = (weighted[2] if weighted else spec).strip()
    made = _made(rest, {})
    return float(weighted[1]) * made if weighted else made


def from_file(path: str | os.PathLike[str]) -> Reward:
    """The reward that a YAML or TOML file describes: a weighted sum.

    The file has `rewards`, a list of specs or of mappings, and may have `beta`, `schedule`,
    `lookahead` and `name` of the whole. A mapping has `reward`, a name or a spec, may have
    `weight`, `on` and `name`, and the reward's other arguments by name.

    Raises:
        OptionError: The file cannot be read, or something in it cannot be; with the place.
        ModelError: A model cannot be had.
    """
    path = Path(path)
    data = _read(path)
    try:
        if not isinstance(data, Mapping):
            raise OptionError("expected a mapping with `rewards`")
        _check_keys(data, _OF_THE_WHOLE)
        entries = data.get("rewards")
        if not isinstance(entries, list) or not entries:
            raise OptionError("`rewards` must be a list of at least one reward")
        parts = [_entry(i, entry) for i, entry in enumerate(entries)]
        whole = sum(parts[1:], parts[0])
        return whole.with_(
            **{key: data.get(key) for key in ("beta", "schedule", "lookahead", "name")}
        )
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None


def _read(path: Path) -> Any:
    """A file's data."""
    import yaml

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    suffix = path.suffix.lower()
    if suffix not in (".yaml", ".yml", ".toml"):
        raise OptionError(f"{path}: a file of rewards is .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{path}: cannot be read: {reason}") from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"{path}: {' '.join(str(error).split())}") from None


def _entry(index: int, entry: Any) -> Reward:
    """A weighted reward of a file's list."""
    try:
        if isinstance(entry, str):
            return parse(entry)
        if not isinstance(entry, Mapping) or not isinstance(entry.get("reward"), str):
            raise OptionError("expected a spec, or a mapping with `reward`")
        # YAML 1.1 reads a bare `on` as true.
        given = {"on" if key is True else key: value for key, value in entry.items()}
        weighted = _WEIGHT.fullmatch(given["reward"])
        if weighted:
            if "weight" in given:
                raise OptionError("the weight is given twice")
            given["reward"], given["weight"] = weighted[2], float(weighted[1])
        number = as_number(given.pop("weight", 1.0))
        if number is None:
            raise OptionError(f"weight must be a number, got {entry['weight']!r}")
        part = _made(given.pop("reward").strip(), given)
        return part if number == 1.0 else number * part
    except OptionError as error:
        raise OptionError(f"rewards[{index}]: {error}") from None


def _made(spec: str, more: Mapping[str, Any]) -> Reward:
    """The reward of a spec without weight, with more arguments by name."""
    name, colon, arguments = spec.partition(":")
    ready = READY.get(name)
    if ready is None:
        if not colon or not all(part.isidentifier() for part in arguments.split(".")):
            raise OptionError(_unknown(name))
        return _of_user(spec, more)
    given: dict[str, Any] = {}
    try:
        if colon:
            given = ready.read(arguments)
        elif not more and ready.read is not _no_arguments:
            raise OptionError("needs arguments")
        twice = sorted(set(given) & set(more))
        if twice:
            raise OptionError(f"has {twice[0]!r} twice")
    except OptionError as error:
        raise OptionError(f"the reward {spec!r} {error}: write {ready.form}") from None
    _check_keys(more, [*ready.arguments, *_OF_A_PART], of=name)
    given.update(more)
    parameters = inspect.signature(ready.make).parameters.values()
    for p in parameters:
        needed = p.default is p.empty and p.kind is not p.VAR_KEYWORD
        if needed and p.name not in given:
            raise OptionError(f"the reward {name!r} needs `{p.name}`: write {ready.form}")
    return ready.make(**given)


def _of_user(spec: str, more: Mapping[str, Any]) -> Reward:
    """What `module:name` names, as a reward."""
    found = load_object(spec)
    if isinstance(found, Reward):
        _check_keys(more, _OF_A_PART, of=spec)
        return found.with_(**more)
    if not callable(found):
        raise OptionError(f"{spec} is not a function or a reward, but {shorten(repr(found))}")
    _check_keys(more, [*_OF_A_PART, *_OF_A_FUNCTION], of=spec)
    return reward(found, **more)


def _check_keys(given: Mapping[Any, Any], known: Any, *, of: str | None = None) -> None:
    for key in given:
        if key not in known:
            hint = _did_you_mean(str(key), known)
            place = f" of {of}" if of else ""
            raise OptionError(f"unknown key {key!r}{place}{hint} (there are: {', '.join(known)})")


def _unknown(name: str) -> str:
    return (
        f"there is no reward {name!r}{_did_you_mean(name, READY)} (there are: {', '.join(READY)}; "
        "a function of yours is named `module:function`)"
    )


def _did_you_mean(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
