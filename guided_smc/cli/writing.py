"""Records out: to a file that can be resumed, or to a stream.

A file gets every record the moment it finishes, so that even a kill loses nothing that was done;
`--order input` then sorts the file when the run ends, however it ends. A stream cannot be sorted
afterwards: there a finished record waits for the earlier ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import click

from guided_smc.cli.records import encode


class Output(Protocol):
    """Where records go. `begin` once before the first, `close` once after the last."""

    name: str

    def begin(self) -> None:
        """Change what is there, now that the run will really start. Raises OSError."""

    def write(self, index: int, record: dict[str, Any]) -> None:
        """Take a finished record. Raises OSError if it cannot be written."""

    def close(self) -> str | None:
        """Put everything taken in its place; returns a warning if the order could not be kept."""

    def abandon(self) -> None:
        """Undo the opening: the run will not start."""


@dataclass(frozen=True)
class Done:
    """A record that an earlier run left."""

    offset: int
    fingerprint: str
    failed: bool


@dataclass(frozen=True)
class Existing:
    """What an earlier run left.

    Attributes:
        records: By index.
        size: Bytes up to the end of the last whole record; what stands behind is torn.
        unterminated: The last record is whole but lacks its newline.
    """

    records: dict[int, Done]
    size: int = 0
    unterminated: bool = False


def scan(path: Path) -> Existing:
    """Read the records of an earlier run.

    Raises:
        click.UsageError: A line other than a torn last one is not a record of this command, or
            two have one index.
    """
    records: dict[int, Done] = {}
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            terminated = raw.endswith(b"\n")
            found = _parse_record(raw, offset)
            if found is None:
                if not terminated and _is_torn(raw):
                    break
                raise click.UsageError(
                    f"{path} cannot be resumed: line {number} is not a record of guided-smc"
                )
            index, done = found
            if index in records:
                raise click.UsageError(
                    f"{path} cannot be resumed: line {number} is a second record of index {index}"
                )
            records[index] = done
            offset += len(raw)
            if not terminated:
                return Existing(records, offset, unterminated=True)
    return Existing(records, offset)


def _parse_record(raw: bytes, offset: int) -> tuple[int, Done] | None:
    try:
        record = json.loads(raw)
        index, fingerprint = record["index"], record["fingerprint"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if type(index) is not int or index < 0 or not isinstance(fingerprint, str):
        return None
    return index, Done(offset, fingerprint, failed="error" in record)


def _is_torn(raw: bytes) -> bool:
    """Whether an unterminated line may be the beginning of a record, and nothing else's.

    Resuming drops such a line, which must not happen to a file that was named by mistake.
    """
    start = b'{"index": '
    if not (raw.startswith(start) or start.startswith(raw)):
        return False
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return True
    return False


class FileOutput:
    """A regular file.

    Args:
        path: Where.
        in_order: Sort by index on closing.
        existing: Continue after these records instead of starting anew.
        dropped: Indices of existing records that do not stay, because they will be made again.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        in_order: bool,
        existing: Existing | None = None,
        dropped: Collection[int] = (),
    ) -> None:
        self.name = str(path)
        # Through symbolic links: sorting replaces the file, not a link to it.
        self._path = path.resolve()
        self._in_order = in_order
        self._existing = existing or Existing({})
        self._dropped = dropped
        self._created = not self._path.exists()
        self._file = FileIO(self._path, "xb" if self._created else "r+b")
        self._places: list[tuple[int, int]] = []  # (index, offset) as they stand in the file

    def begin(self) -> None:
        """Take away what does not stay: everything, or a torn last line and dropped records."""
        existing = self._existing
        self._file.truncate(existing.size)
        self._file.seek(existing.size)
        if existing.unterminated:
            _write_all(self._file, b"\n")
        self._places = [(index, done.offset) for index, done in existing.records.items()]
        if self._dropped:
            self._rewrite([p for p in self._places if p[0] not in self._dropped])

    def write(self, index: int, record: dict[str, Any]) -> None:
        """Append the record; it is with the operating system when this returns."""
        offset = self._file.tell()
        try:
            _write_all(self._file, encode(record))
        except OSError:
            # Whole lines only: what did fit of this one says nothing.
            with contextlib.suppress(OSError):
                self._file.truncate(offset)
            raise
        self._places.append((index, offset))

    def close(self) -> str | None:
        """Sort if asked to and necessary, and close."""
        try:
            if self._in_order and self._places != sorted(self._places):
                self._rewrite(sorted(self._places))
        except OSError as error:
            return f"the records in {self.name} are not in input order: {error.strerror}"
        finally:
            self._file.close()
        return None

    def abandon(self) -> None:
        """Leave no empty file behind that was not there before."""
        self._file.close()
        if self._created:
            self._path.unlink(missing_ok=True)

    def _rewrite(self, places: Iterable[tuple[int, int]]) -> None:
        """Replace the file at once by the lines at these places, in this order."""
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        moved: list[tuple[int, int]] = []
        try:
            with os.fdopen(handle, "wb") as copy, self._path.open("rb") as original:
                for index, offset in places:
                    original.seek(offset)
                    moved.append((index, copy.tell()))
                    copy.write(original.readline())
            shutil.copymode(self._path, name)
            os.replace(name, self._path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = FileIO(self._path, "r+b")
        self._file.seek(0, os.SEEK_END)
        self._places = moved


class StreamOutput:
    """Standard output, a pipe, or a device.

    Args:
        file: Unbuffered.
        name: For messages.
        in_order: Records wait until those with smaller indices, counted from 0, are out.
    """

    def __init__(self, file: FileIO, name: str, *, in_order: bool) -> None:
        self.name = name
        self._file = file
        self._in_order = in_order
        self._waiting: dict[int, bytes] = {}
        self._next = 0

    @property
    def on_terminal(self) -> bool:
        """Whether records appear on a terminal."""
        return self._file.isatty()

    def begin(self) -> None:
        """Nothing to change."""

    def write(self, index: int, record: dict[str, Any]) -> None:
        """Send the record and those that waited for it, or let it wait."""
        if not self._in_order:
            _write_all(self._file, encode(record))
            return
        self._waiting[index] = encode(record)
        while self._next in self._waiting:
            _write_all(self._file, self._waiting.pop(self._next))
            self._next += 1

    def close(self) -> str | None:
        """Send what still waits for records that will not come."""
        try:
            for index in sorted(self._waiting):
                _write_all(self._file, self._waiting.pop(index))
        finally:
            self._file.close()
        return None

    def abandon(self) -> None:
        """Close."""
        self._file.close()


def open_output(
    target: str, *, in_order: bool, resume: bool, overwrite: bool, retry_errors: bool
) -> tuple[Output, dict[int, Done]]:
    """Check and open the output, changing nothing that is there.

    Args:
        target: A path, or `-` for standard output.
        in_order: Input order rather than the order of finishing.
        resume: Continue after the records that are there.
        overwrite: Replace what is there.
        retry_errors: On resuming, records with an error do not count as done.

    Returns:
        The output, and the records of an earlier run that it keeps, by index.

    Raises:
        click.UsageError: It cannot be written, holds something already, or cannot be resumed.
    """
    path = Path(target)
    try:
        is_stream = target == "-" or (path.exists() and not path.is_file() and not path.is_dir())
        if is_stream and (resume or overwrite):
            raise click.UsageError("--resume and --overwrite need an output file (-o FILE)")
        if target == "-":
            return StreamOutput(_take_stdout(), "standard output", in_order=in_order), {}
        if is_stream:
            return StreamOutput(FileIO(path, "wb"), target, in_order=in_order), {}
        existing = Existing({})
        if path.is_file() and path.stat().st_size > 0:
            if resume:
                existing = scan(path)
            elif not overwrite:
                raise click.UsageError(
                    f"{target} already exists; --resume continues it, --overwrite replaces it"
                )
        dropped = {i for i, done in existing.records.items() if done.failed and retry_errors}
        output = FileOutput(path, in_order=in_order, existing=existing, dropped=dropped)
        return output, {i: done for i, done in existing.records.items() if i not in dropped}
    except OSError as error:
        raise click.UsageError(f"cannot write to {target}: {error.strerror}") from None


def _take_stdout() -> FileIO:
    """Standard output for records alone: what else would print there goes to standard error."""
    sys.stdout.flush()
    try:
        records = FileIO(os.dup(1), "wb")
        os.dup2(2, 1)
    except OSError as error:
        raise click.UsageError(f"cannot write to standard output: {error.strerror}") from None
    return records


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = file.write(view)
        if written is None:  # a pipe that is full and was set not to block
            time.sleep(0.01)
        else:
            view = view[written:]
