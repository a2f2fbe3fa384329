"""Prompts in: the lines of a file or of standard input, one at a time.

A `.txt` file holds one prompt a line; a `.jsonl` file holds one JSON object a line, with `prompt`
or `messages`, options of its own, and fields that are carried through to the output. Blank lines
are skipped and have no index. A bad line is a line with an error, so that the others still run.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import math
import os
import select
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import click

from guided_smc.errors import GuidedSMCError, PromptError
from guided_smc.options import Options, make_options

Prompt = str | list[dict[str, Any]] | list[int]
Format = Literal["auto", "txt", "jsonl"]

_FORMATS: dict[str, Format] = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl"}


@dataclass(frozen=True)
class PromptLine:
    """One line that is not blank.

    Attributes:
        index: Position among the prompts, from 0.
        number: Position among all lines, from 1, as an editor shows it.
        digest: Of the line's bytes: a resumed run finds out whether the line has changed.
        prompt: None if and only if there is an error.
        options: Of the command, with the line's overrides.
        own_seed: The line names its seed, which is then used as it is.
        carried: Fields that go through to the output.
        error: Why the line cannot run.
    """

    index: int
    number: int
    digest: str
    prompt: Prompt | None = None
    options: Options | None = None
    own_seed: bool = False
    carried: dict[str, Any] = field(default_factory=dict)
    error: GuidedSMCError | None = None


class PromptSource:
    """Where prompts come from.

    Args:
        path: A file, or `-` for standard input.
        fmt: `auto` goes by the file's suffix; with any other suffix and on standard input, by the
            first prompt: JSONL if it begins with `{`, text otherwise.

    Raises:
        click.UsageError: The file cannot be read.
    """

    def __init__(self, path: str, fmt: Format = "auto") -> None:
        self.name = "standard input" if path == "-" else path
        self._path = None if path == "-" else Path(path)
        self._format = _FORMATS.get(Path(path).suffix.lower(), "auto") if fmt == "auto" else fmt
        self._looked_at: set[str] = set()
        self._file: BinaryIO
        if self._path is None:
            self._file = sys.stdin.buffer
            self.rereadable = False
            return
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            raise click.UsageError(f"prompt file not found: {path}") from None
        except OSError as error:
            raise click.UsageError(f"cannot read prompts from {path}: {error.strerror}") from None
        self.rereadable = stat.S_ISREG(self._path.stat().st_mode)

    @property
    def path(self) -> Path | None:
        """The file, where there is one."""
        return self._path

    def lines(self, base: Options) -> Iterator[PromptLine | None]:
        """The prompts, read as they are asked for; None where a pipe holds no whole line yet.

        Args:
            base: Options that a line may override.

        Raises:
            click.ClickException: The file is in UTF-16, or reading fails on the way.
        """
        return self._lines(self._file, base)

    def _lines(self, file: BinaryIO, base: Options) -> Iterator[PromptLine | None]:
        fmt = self._format
        index = 0
        for numbered in self._numbered(file):
            if numbered is None:
                yield None
                continue
            number, raw = numbered
            if fmt == "auto":
                fmt = "jsonl" if raw.lstrip().startswith(b"{") else "txt"
            line = _read_line(index, number, raw, fmt, base)
            self._warn_of_near_misses(line)
            yield line
            index += 1

    def _warn_of_near_misses(self, line: PromptLine) -> None:
        """Say once of each carried field that it is called nearly like one with a meaning."""
        for name in line.carried.keys() - self._looked_at:
            self._looked_at.add(name)
            spelt = name.replace("-", "_")
            if spelt in _MEANT or spelt in _WHOLE_RUN:  # an error of the line
                continue
            close = difflib.get_close_matches(spelt.lower(), _MEANT, n=1, cutoff=_NEAR)
            if close:
                click.echo(
                    f"Warning: line {line.number}: the field {name!r} means nothing here and is "
                    f"only carried to the record; did you mean {close[0]!r}?",
                    err=True,
                )

    def digests(self) -> Iterator[str]:
        """Digest of each prompt's line, from the start of a file that can be read again."""
        assert self._path is not None and self.rereadable
        with self._path.open("rb") as file:
            for numbered in self._numbered(file):
                assert numbered is not None
                yield _digest(numbered[1])

    def options(self, base: Options) -> Iterator[Options]:
        """Those of each prompt that can run; none where only reading the prompts would show them.

        Args:
            base: Options that a line may override.
        """
        if self._path is None or not self.rereadable:
            if self._format == "txt":  # where no line has any of its own
                yield base
            return
        with self._path.open("rb") as file:
            for line in self._lines(file, base):
                if line is not None and line.options is not None:
                    yield line.options

    def count(self) -> int | None:
        """How many prompts there are; None where that shows only by reading them."""
        if self._path is None or not self.rereadable:
            return None
        with self._path.open("rb") as file:
            return sum(1 for _ in self._numbered(file))

    def _numbered(self, file: BinaryIO) -> Iterator[tuple[int, bytes] | None]:
        """Lines that are not blank, without BOM and line ending, and their numbers."""
        number = 0
        try:
            for raw in file if self.rereadable else _as_they_arrive(file):
                if raw is None:
                    yield None
                    continue
                number += 1
                if number == 1:
                    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        raise click.UsageError(f"{self.name} is in UTF-16; convert it to UTF-8")
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if raw.strip():
                    yield number, raw.rstrip(b"\r\n")
        except OSError as error:
            raise click.ClickException(f"reading {self.name} failed: {error.strerror}") from None


def _as_they_arrive(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines of a pipe or terminal; None whenever the next has not come yet.

    Whoever feeds us may be slow, and what runs meanwhile must not wait for it.
    """
    try:
        descriptor = file.fileno()
    except (OSError, ValueError):  # something in memory: it is all there
        yield from file
        return
    if os.name != "posix":  # nothing tells there whether a pipe holds something
        yield from file
        return
    left = b""
    while True:
        if not select.select([descriptor], [], [], 0)[0]:
            yield None
            continue
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            break
        *whole, left = (left + chunk).split(b"\n")
        yield from whole
    if left:
        yield left


_MEANT = ("prompt", "messages", *Options.model_fields)
"""Fields of a line that mean something."""

_NEAR = 0.8
"""How alike names are, from 0 to 1, that are taken for a slip."""


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:8]


def read_prompts(path: str, base: Options) -> list[PromptLine]:
    """All prompts of a file, none of them with an error.

    Raises:
        click.UsageError: It cannot be read, holds none, or one of them is wrong.
    """
    source = PromptSource(path)
    lines = [line for line in source.lines(base) if line is not None]
    for line in lines:
        if line.error is not None:
            raise click.UsageError(f"{source.name}: {line.error}")
    if not lines:
        raise click.UsageError(f"{source.name} holds no prompts")
    return lines


def _read_line(index: int, number: int, raw: bytes, fmt: Format, base: Options) -> PromptLine:
    carried: dict[str, Any] = {}
    try:
        text = _decode(raw)
        if fmt == "txt":
            prompt: Prompt = text
            options, own_seed = base, False
        else:
            record = _parse_object(text)
            # Before anything else can fail, so that a failed line keeps its identifiers.
            carried = {
                name: value
                for name, value in record.items()
                if name not in ("prompt", "messages") and name not in Options.model_fields
            }
            prompt = _find_prompt(record)
            options, own_seed = _override(base, record)
    except GuidedSMCError as error:
        located = type(error)(f"line {number}: {error}")
        return PromptLine(index, number, _digest(raw), carried=carried, error=located)
    return PromptLine(index, number, _digest(raw), prompt, options, own_seed, carried)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise PromptError(f"not valid UTF-8 (byte 0x{byte:02x} at {error.start + 1})") from None


def _parse_object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except json.JSONDecodeError as error:
        raise PromptError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise PromptError('expected a JSON object with "prompt" or "messages"')
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def _finite_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:40]} is out of range")
    return number


def _find_prompt(record: dict[str, Any]) -> Prompt:
    given = [name for name in ("prompt", "messages") if record.get(name) is not None]
    if len(given) != 1:
        found = "both" if given else "neither"
        raise PromptError(f'expected one of "prompt" and "messages", found {found}')
    value = record[given[0]]
    if given[0] == "messages":
        if not (isinstance(value, list) and value and all(isinstance(m, dict) for m in value)):
            raise PromptError('"messages" must be a list of at least one object')
    elif isinstance(value, list):
        if not value or not all(type(token) is int for token in value):
            raise PromptError('"prompt" must be a string or a list of token ids')
    elif not isinstance(value, str):
        raise PromptError('"prompt" must be a string or a list of token ids')
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError(f'"{given[0]}" holds half of a surrogate pair') from None
    return value


_WHOLE_RUN = {
    *("model", "draft", "schema", "regex", "grammar"),
    *("reward", "beta", "reward_on", "chat", "dtype", "device"),
}
"""Options of the command that a line might seem to override."""


def _override(base: Options, record: dict[str, Any]) -> tuple[Options, bool]:
    for name in record:
        meant = name.replace("-", "_")
        if meant != name and meant in Options.model_fields:
            # Carried through in silence, the option would be lost.
            raise PromptError(f'unknown field "{name}": the option is called "{meant}"')
        if meant in _WHOLE_RUN:
            raise PromptError(f'"{name}" holds for the whole run: give it to the command')
    # null is what tables exported to JSON hold where a column has no value.
    changes = {
        name: value
        for name, value in record.items()
        if name in Options.model_fields and value is not None
    }
    return (make_options(base, **changes) if changes else base), "seed" in changes
