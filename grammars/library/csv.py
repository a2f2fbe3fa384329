"""CSV with given columns."""

from __future__ import annotations

import csv as python_csv
import datetime
import io
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from guided_smc.errors import ConstraintError
from guided_smc.grammars.library.base import (
    Ready,
    check_count,
    check_names,
    check_one_of,
    either,
    listed,
    literal,
    repeated,
)
from guided_smc.grammars.matching import Limits
from guided_smc.grammars.schema import formats
from guided_smc.grammars.schema.keywords import shorten

_DATE = formats.PATTERNS["date"].removeprefix("^").removesuffix("$")
_DIGITS = "(0|[1-9][0-9]{0,17})"


@listed(
    columns={"name": str, "age": int | None, "size": Literal["S", "L"]},
    accepted=(
        "name,age,size\nAda,36,S\n",
        'name,age,size\n"Bo, ""B"" Smith",,L\n,-1,S',
        "name,age,size\n",
        "name,age,size",
    ),
    refused=(
        "",
        "Ada,36,S\n",
        "name,age,size\nAda,36\n",
        "name,age,size\nAda,036,S\n",
        'name,age,size\nAda "A",36,S\n',
        "name,age,size\nAda,36,M\n",
        "name,age,size\n\n",
        "name, age, size\n",
    ),
)
def csv(
    columns: Mapping[str, Any] | Iterable[str],
    *,
    header: bool = True,
    delimiter: str = ",",
    newline: Literal["\n", "\r\n"] = "\n",
    min_rows: int = 0,
    max_rows: int | None = None,
    limits: Limits | None = None,
) -> Ready:
    r"""Tables with given columns.

    Dialect: RFC 4180: fields that hold the delimiter, a quote or a line break stand in double
    quotes, in which a quote is doubled; others may. Every row has all columns, the last line may
    end with a line break or not, and there are no empty lines. Left out: NUL.

    A field has the type of its column: `str`; `int` (up to 18 digits) and `float` (finite, as JSON
    writes numbers); `bool` (`true`, `false`); `datetime.date` (`2024-02-29`); a `Literal` or an
    `Enum` of texts and ints. With `| None` it may be empty, which is None, and a `str` is then not
    empty. Fields of types other than `str` are quoted only where they must be.

    Args:
        columns: Their names, or their names and types.
        header: Whether the first line holds the names.
        delimiter: Between fields: `,`, `;`, `|`, `:`, a tab or a space.
        newline: What ends a line.
        min_rows: Fewest rows behind the header.
        max_rows: Most rows behind the header.
        limits: What the grammar may cost.

    Returns:
        A constraint whose values are lists of dicts, one for each row, with typed fields.

    Raises:
        ConstraintError: There is no column, one has another type, or an argument cannot work.
    """
    types = dict(columns) if isinstance(columns, Mapping) else {}
    names = check_names(columns, "columns", r"[^\x00]+", "has at least one character, and no NUL")
    check_one_of(header, (True, False), "header")
    check_one_of(delimiter, tuple(",;\t|: "), "delimiter")
    check_one_of(newline, ("\n", "\r\n"), "newline")
    check_count(min_rows, "min_rows", 0)
    if max_rows is not None:
        check_count(max_rows, "max_rows", max(min_rows, 1))
    fields = [
        _field(types.get(name, str), name, delimiter, alone=len(names) == 1) for name in names
    ]
    first = literal(delimiter.join(_written(name, delimiter) for name in names))
    rows = f"{first} {_lines(min_rows, max_rows)}" if header else _table(min_rows, max_rows)
    grammar = [f"start: {rows}\n", f"NEWLINE: {literal(newline)}\n", _QUOTED]
    grammar.append(f'PLAIN: /[^"\\r\\n\\x00{_CLASS.get(delimiter, delimiter)}]+/\n')
    grammar.append(
        f"row: {f' {literal(delimiter)} '.join(f'field_{i}' for i in range(len(names)))}\n"
    )
    grammar += [f"field_{i}: {field.grammar}\n" for i, field in enumerate(fields)]

    def read(text: str) -> list[dict[str, Any]]:
        lines = io.StringIO(text, newline="")
        found = list(python_csv.reader(lines, delimiter=delimiter, strict=True))
        return [
            {name: f.value(text) for name, f, text in zip(names, fields, row, strict=True)}
            for row in found[1 if header else 0 :]
        ]

    return Ready("".join(grammar), "csv", read=read, key=_key, limits=limits)


_CLASS = {"\t": r"\t", "|": r"\|"}
_QUOTED = r"""
QUOTED: /"([^"\x00]|"")+"/
"""


def _lines(low: int, high: int | None) -> str:
    """Rows behind another line, and perhaps the end of the last line."""
    return f"{repeated('NEWLINE row', low, high)} [NEWLINE]"


def _table(low: int, high: int | None) -> str:
    """Rows from the start of the text."""
    rows = f"row {_lines(max(low - 1, 0), None if high is None else high - 1)}"
    return rows if low else f"[{rows}]"


def _key(rows: list[dict[str, Any]]) -> Hashable:
    return tuple(tuple(row.values()) for row in rows)


@dataclass(frozen=True)
class _Field:
    """What a column holds: its grammar, and how a text becomes a value."""

    grammar: str
    value: Callable[[str], Any]


def _field(hint: Any, name: str, delimiter: str, *, alone: bool) -> _Field:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    optional = NoneType in members
    types = [member for member in members if member not in (NoneType, None)]
    if len(types) != 1:
        raise _unknown(hint, name)
    field = _typed(types[0], name, delimiter)
    if not optional and types[0] is not str:
        return field
    # Alone in its line, an empty field has quotes, since readers skip empty lines.
    grammar = f"{field.grammar} | {literal(_EMPTY) if alone else literal('')}"
    if optional:
        return _Field(grammar, lambda text: field.value(text) if text else None)
    return _Field(f"{grammar} | {literal(_EMPTY)}", field.value)


_EMPTY = '""'


def _typed(hint: Any, name: str, delimiter: str) -> _Field:
    """A field that is not empty."""
    if hint in _PATTERNS:
        return _PATTERNS[hint]
    members = list(get_args(hint)) if get_origin(hint) is Literal else []
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = list(hint)
    plain = [member.value if isinstance(member, Enum) else member for member in members]
    if not plain or not all(type(value) in (str, int) for value in plain):
        raise _unknown(hint, name)
    values = dict(zip(map(str, plain), members, strict=True))
    if len(values) < len(plain):
        raise ConstraintError(f"two values of {name} are written alike: remove or rename one")
    check_names(values, f"values of {name}", r"[^\x00]+", "has at least one character, and no NUL")
    return _Field(either(_written(text, delimiter) for text in values), values.__getitem__)


_PATTERNS: dict[Any, _Field] = {
    str: _Field("PLAIN | QUOTED", str),
    int: _Field(f"/-?{_DIGITS}/", int),
    float: _Field(rf"/-?{_DIGITS}(\.[0-9]{{1,18}})?([eE][-+]?[0-9]{{1,2}})?/", float),
    bool: _Field('"true" | "false"', {"true": True, "false": False}.__getitem__),
    datetime.date: _Field(f"/{_DATE}/", datetime.date.fromisoformat),
}


def _unknown(hint: Any, name: str) -> ConstraintError:
    return ConstraintError(
        f"the column {name!r} has the type {shorten(repr(hint))}: use str, int, float, bool, "
        "datetime.date, a Literal or an Enum of texts and ints, or one of these with `| None`"
    )


def _written(text: str, delimiter: str) -> str:
    """A field as its line shows it."""
    if any(character in text for character in f'"\r\n{delimiter}'):
        return '"' + text.replace('"', '""') + '"'
    return text
