"""SQL queries over the user's own tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from guided_smc.errors import ConstraintError
from guided_smc.grammars.library.base import (
    Ready,
    check_mapping,
    check_names,
    either,
    listed,
    literal,
    source,
)
from guided_smc.grammars.matching import Limits
from guided_smc.grammars.schema.keywords import shorten

_KEYWORDS = (
    "abort|action|add|after|all|alter|always|analyze|and|as|asc|attach|"
    "autoincrement|before|begin|between|by|cascade|case|cast|check|collate|column|"
    "commit|conflict|constraint|create|cross|current|current_date|current_time|"
    "current_timestamp|database|default|deferrable|deferred|delete|desc|detach|"
    "distinct|do|drop|each|else|end|escape|except|exclude|exclusive|exists|"
    "explain|fail|filter|first|following|for|foreign|from|full|generated|glob|"
    "group|groups|having|if|ignore|immediate|in|index|indexed|initially|inner|"
    "insert|instead|intersect|into|is|isnull|join|key|last|left|like|limit|match|"
    "materialized|natural|no|not|nothing|notnull|null|nulls|of|offset|on|or|"
    "order|others|outer|over|partition|plan|pragma|preceding|primary|query|raise|"
    "range|recursive|references|regexp|reindex|release|rename|replace|restrict|"
    "returning|right|rollback|row|rows|savepoint|select|set|table|temp|temporary|"
    "then|ties|to|transaction|trigger|true|false|unbounded|union|unique|update|"
    "using|vacuum|values|view|virtual|when|where|window|with|within|without"
)
"""Of SQLite; names that are one of them are quoted, and are no aliases."""


@listed(
    tables={"people": ["name", "age", "city_id"], "cities": ["id", "name", "first mayor"]},
    joins=[("people.city_id", "cities.id")],
    accepted=(
        "SELECT * FROM people",
        "select name from people where age >= 18 and name like 'A%' order by age desc limit 3;",
        'SELECT COUNT(*) AS n FROM cities WHERE "first mayor" IS NOT NULL',
        "SELECT city_id, AVG(age) FROM people GROUP BY city_id HAVING COUNT(*) > 2",
        "SELECT people.name, cities.name FROM people JOIN cities ON people.city_id = cities.id",
        "SELECT name FROM people WHERE age > (SELECT AVG(age) FROM people)",
        "SELECT name FROM people WHERE city_id IN (SELECT id FROM cities WHERE name = 'Bo''ness')",
    ),
    refused=(
        "SELECT salary FROM people",
        "SELECT id FROM people",
        "SELECT name FROM cities JOIN people ON cities.id = people.age",
        "SELECTname FROM people",
        "SELECT name FROM people WHERE COUNT(*) > 1",
        "SELECT first mayor FROM cities",
        "DROP TABLE people",
        "SELECT name FROM people; DROP TABLE people",
        "SELECT name FROM people -- all",
        "",
    ),
)
def sql_select(
    tables: Mapping[str, Sequence[str]],
    *,
    joins: Iterable[tuple[str, str]] = (),
    limits: Limits | None = None,
) -> Ready:
    """One SELECT over the user's tables, in which every column belongs to a table that is read.

    Dialect: a part of what SQLite documents as `select-stmt`: DISTINCT, expressions, aliases of
    results, one table or the join of two, WHERE, aggregates, GROUP BY, HAVING, ORDER BY, LIMIT,
    uncorrelated subqueries behind IN and comparisons. Keywords in any case, names as they are
    given; names that are no plain ASCII identifiers, or are keywords of SQLite, stand in double
    quotes. Between two words one space, or a newline and up to eight spaces; binary arithmetic has
    a space on both sides.

    So SQLite runs every member on a database with these tables. Left out: UNION and its kin, WITH,
    CASE, EXISTS, window functions, aliases of tables and more than one join, comments. Not
    checked: types, and that a grouped query shows grouped columns only (SQLite does not either).

    Args:
        tables: The columns of each table.
        joins: Pairs of columns, as `"table.column"`, on which two tables may be joined, with JOIN
            or LEFT JOIN. In a join all columns are qualified.
        limits: What the grammar may cost; it grows with the number of tables and joins.

    Returns:
        A constraint whose values are the texts.

    Raises:
        ConstraintError: There is no table, a table without columns, a name that cannot be quoted
            or that occurs twice (SQL ignores case), or a join of something else.
    """
    columns = _columns(tables)
    rules = [
        source("sql"),
        f"ALIAS: /[A-Za-z_][A-Za-z0-9_]{{0,30}}/ & ~/(?i-u:{_KEYWORDS})/\n",
    ]
    tables_only, scopes = [], []
    for i, (table, names) in enumerate(columns.items()):
        tables_only.append(f"_t{i}")
        shown = [*map(_quoted, names), *(_qualified(table, name) for name in names)]
        rules += _scope(f"_t{i}", shown, literal(_quoted(table)))
        rules.append(source("sql_table").replace("$", f"_t{i}"))
    for j, pair in enumerate(_joined(joins, columns)):
        scopes.append(f"_j{j}")
        shown = [_qualified(table, name) for table, _ in pair for name in columns[table]]
        rules += _scope(f"_j{j}", shown, _join(*pair))
    rules.append(f"""start: ({_any("query", tables_only + scopes)}) [";"]
list: {_any("list", tables_only)}
scalar: "(" ({_any("scalar", tables_only)}) ")"
""")
    return Ready("".join(rules), "sql_select", limits=limits)


def _any(rule: str, scopes: list[str]) -> str:
    return " | ".join(f"{rule}{scope}" for scope in scopes)


def _scope(name: str, columns: list[str], tables: str) -> list[str]:
    # As one terminal, and not as a rule: the parser counts every alternative of each table.
    column = f"COLUMN{name.upper()}"
    own = f"column{name}: {column}\n{column}: {either(columns)}\nfrom{name}: {tables}\n"
    return [own, source("sql_scope").replace("$", name)]


def _join(left: tuple[str, str], right: tuple[str, str]) -> str:
    """Both orders of the tables, and of the columns that are equal."""
    (a, b), (x, y) = (
        (literal(_quoted(t)) for t, _ in (left, right)),
        (literal(_qualified(*column)) for column in (left, right)),
    )
    tables = f"{a} WS JOIN WS {b} | {b} WS JOIN WS {a}"
    return f"({tables}) WS ON WS ({x} EQUAL {y} | {y} EQUAL {x})"


def _columns(tables: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    rule = "has at least one character, and no control character"
    plain = r"[^\x00-\x1f\x7f]+"
    names = check_names(check_mapping(tables, "tables"), "tables", plain, rule, fold=True)
    return {
        table: check_names(tables[table], f"columns of {table}", plain, rule, fold=True)
        for table in names
    }


def _quoted(name: str) -> str:
    """A name as SQL writes it."""
    plain = re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)
    if plain and not re.fullmatch(_KEYWORDS, name.lower()):
        return name
    return '"' + name.replace('"', '""') + '"'


def _qualified(table: str, column: str) -> str:
    return f"{_quoted(table)}.{_quoted(column)}"


def _joined(
    joins: Any, columns: Mapping[str, list[str]]
) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    known: dict[str, list[tuple[str, str]]] = {}
    for table in columns:
        for name in columns[table]:
            known.setdefault(f"{table}.{name}", []).append((table, name))
    found: list[tuple[tuple[str, str], tuple[str, str]]] = []
    for pair in joins:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or isinstance(pair, str):
            raise ConstraintError(
                "joins are pairs such as ('people.city_id', 'cities.id'), got "
                f"{shorten(repr(pair))}"
            )
        for column in pair:
            if len(known.get(column, ())) > 1:
                raise ConstraintError(f"the join on {column!r}: two columns are called so")
            if column not in known:
                raise ConstraintError(
                    f"the join on {shorten(repr(column))}: there is no such column (of "
                    f"{shorten(', '.join(known), 200)})"
                )
        left, right = known[pair[0]][0], known[pair[1]][0]
        if left[0] == right[0]:
            raise ConstraintError(
                f"the join of {left[0]!r} with itself needs aliases of tables, which are left out"
            )
        found.append((left, right))
    return found
