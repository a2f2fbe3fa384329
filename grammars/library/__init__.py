"""Ready grammars: constraints for languages that everybody knows.

Each is a function that returns a constraint; its docstring says which texts it accepts, after which
source, and what is left out. `names` lists them, `examples` shows members and others, and
`from_name` makes those that need no arguments.
"""

from __future__ import annotations

import difflib
import inspect

from guided_smc.errors import ConstraintError
from guided_smc.grammars.library.arithmetic import arithmetic
from guided_smc.grammars.library.base import LIBRARY, Examples
from guided_smc.grammars.library.chess import chess_moves, chess_san
from guided_smc.grammars.library.csv import csv
from guided_smc.grammars.library.dates import (
    Duration,
    iso_date,
    iso_datetime,
    iso_duration,
    iso_time,
)
from guided_smc.grammars.library.graphql import graphql_query
from guided_smc.grammars.library.json import json
from guided_smc.grammars.library.pddl import pddl_plan
from guided_smc.grammars.library.python import python_block, python_expression
from guided_smc.grammars.library.smiles import smiles
from guided_smc.grammars.library.sql import sql_select
from guided_smc.potentials import Constraint

__all__ = [
    "Duration",
    "Examples",
    "arithmetic",
    "chess_moves",
    "chess_san",
    "csv",
    "examples",
    "from_name",
    "graphql_query",
    "iso_date",
    "iso_datetime",
    "iso_duration",
    "iso_time",
    "json",
    "names",
    "pddl_plan",
    "python_block",
    "python_expression",
    "smiles",
    "sql_select",
]


def names() -> list[str]:
    """The names of all ready grammars."""
    return list(LIBRARY)


def examples(name: str) -> Examples:
    """Members of a ready grammar's language, and texts that are none.

    Raises:
        ConstraintError: There is no grammar of that name.
    """
    _check(name)
    return LIBRARY[name].examples


def from_name(name: str) -> Constraint:
    """A ready grammar as it is without arguments.

    Raises:
        ConstraintError: There is no grammar of that name, or it needs arguments.
    """
    _check(name)
    make = LIBRARY[name].make
    needed = [p.name for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    if needed:
        raise ConstraintError(
            f"the grammar {name!r} needs {' and '.join(needed)}: make it in Python with "
            f"library.{name}({', '.join(f'{n}=...' for n in needed)})"
        )
    return make()


def _check(name: str) -> None:
    if name not in LIBRARY:
        close = difflib.get_close_matches(name, LIBRARY, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConstraintError(
            f"there is no grammar {name!r} in the library (it has {', '.join(LIBRARY)}){hint}"
        )
