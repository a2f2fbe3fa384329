"""`guided-smc view`: records as a page to look at."""

from __future__ import annotations

import json
import sys
import webbrowser
from pathlib import Path
from typing import Any

import click

from guided_smc.cli.common import SETTINGS, debug_option

_LARGE = 50_000_000  # bytes of a page that a browser takes seconds to open


@click.command(context_settings=SETTINGS, short_help="Show what the particles of a run did.")
@click.argument("records")
@click.option("-o", "--output", help="HTML file.  [default: beside RECORDS, as .html; - is stdout]")
@click.option("--index", multiple=True, type=int, help="Only the record of this index. Repeatable.")
@click.option("--title", help="Of the page.")
@click.option("--open", "show", is_flag=True, help="Open it in the browser.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is no such page.")
@debug_option
def view(
    records: str,
    output: str | None,
    index: tuple[int, ...],
    title: str | None,
    show: bool,
    overwrite: bool,
) -> int:
    """Write one HTML file that shows RECORDS, an output of `guided-smc generate --full`.

    The page holds everything that it needs and asks no network: it can be mailed, or kept with a
    report. It shows the genealogy of the particles, the text of each at any step with what its
    tokens weigh, and how ESS, log-evidence and time went.

    RECORDS is a file of JSON lines, or - for standard input.

    \b
    Examples:
      guided-smc generate prompts.txt --schema person.json --full -o out.jsonl
      guided-smc view out.jsonl --open
      guided-smc view out.jsonl --index 3 --index 8 -o two.html

    \b
    Exit codes:
      0    the page is written, perhaps with a warning
      1    an internal error
      2    wrong usage, RECORDS cannot be read, or the page cannot be written; nothing has changed
      130  Ctrl-C
    """  # noqa: D301 (click's mark is the character, not its escape)
    from guided_smc.viewer import page

    target = output or ("-" if records == "-" else str(Path(records).with_suffix(".html")))
    if target == "-" and show:
        raise click.UsageError("--open needs a file; name one with -o")
    found = _chosen(_read(records), index, records)
    if not any("steps" in record for record in found):
        click.echo(
            "Warning: no record holds steps; guided-smc generate --full writes them", err=True
        )
    text = page(found, title=title or f"guided-smc: {'stdin' if records == '-' else records}")
    data = text.encode()
    if len(data) > _LARGE:
        click.echo(
            f"Warning: the page has {len(data) / 1e6:.0f} MB and will open slowly; --index picks "
            "records",
            err=True,
        )
    if target == "-":
        sys.stdout.buffer.write(data)
        return 0
    path = Path(target)
    _refuse_foreign(path, overwrite)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise click.UsageError(f"cannot write to {path}: {error.strerror}") from None
    click.echo(f"{path}: {len(found)} record{'s' if len(found) != 1 else ''}", err=True)
    if show and not webbrowser.open(path.resolve().as_uri()):
        click.echo("Warning: no browser found", err=True)
    return 0


def _read(records: str) -> list[dict[str, Any]]:
    """The records; a last line that was cut off is left out, with a warning."""
    try:
        data = sys.stdin.buffer.read() if records == "-" else Path(records).read_bytes()
    except OSError as error:
        raise click.UsageError(f"cannot read {records}: {error.strerror}") from None
    found = []
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, or no UTF-8
            if number == len(lines):  # no line break behind it
                click.echo(f"Warning: line {number} is cut off, and left out", err=True)
                break
            raise click.UsageError(
                f"{records}, line {number} is no JSON; records are what guided-smc generate writes"
            ) from None
        if not isinstance(record, dict):
            raise click.UsageError(f"{records}, line {number} is no record but a JSON value")
        found.append(record)
    if not found:
        raise click.UsageError(f"{records} holds no records")
    return found


def _chosen(
    found: list[dict[str, Any]], index: tuple[int, ...], records: str
) -> list[dict[str, Any]]:
    if not index:
        return found
    missing = set(index) - {record.get("index") for record in found}
    if missing:
        raise click.UsageError(f"{records} holds no record of index {min(missing)}")
    return [record for record in found if record.get("index") in index]


def _refuse_foreign(path: Path, overwrite: bool) -> None:
    from guided_smc.viewer import MARK

    if overwrite or not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if MARK.encode() in file.read(500):
                return
    raise click.UsageError(f"{path} exists and is no page of ours; --overwrite replaces it")
