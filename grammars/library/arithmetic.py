"""Arithmetic."""

from __future__ import annotations

import keyword
from collections.abc import Iterable

from guided_smc.errors import ConstraintError
from guided_smc.grammars.library.base import Ready, check_names, either, listed, source


@listed(
    variables=["x", "rate"],
    functions=["sqrt"],
    accepted=("1 + 2*3", "-(x - 1.5e-3)", "sqrt(x**2) // 10", "2 ** -x", "rate % --7", "0.5"),
    refused=("", "1 +", "(1", "01", "1 2", "y", "sqrt", "x(1)", "2x", "1  + 2", "+1", ".5"),
)
def arithmetic(*, variables: Iterable[str] = (), functions: Iterable[str] = ()) -> Ready:
    """Arithmetic expressions of numbers, and of variables and functions with given names.

    Dialect: Python's, so that each member is a Python expression: the operators `+ - * / // % **`,
    unary `-`, and parentheses; decimal numbers as JSON writes them. Around an operator, and after
    a comma, there may be one space. Left out: unary `+`, numbers without digits before or after
    the point, other white space. That a function gets as many arguments as it takes is not checked.

    Args:
        variables: Names that may stand for numbers.
        functions: Names that may be called, with one argument or more.

    Returns:
        A constraint whose values are the texts.

    Raises:
        ConstraintError: A name is no identifier of ASCII letters, is a keyword of Python, or
            occurs twice.
    """
    names, called = [_names(v, w) for v, w in ((variables, "variables"), (functions, "functions"))]
    for name in names:
        if name in called:
            raise ConstraintError(f"{name!r} is a variable and a function: rename one")
    alternatives = ["NUMBER", "group"]
    if names:
        alternatives.append(either(names))
    if called:
        alternatives.append(f"({either(called)}) arguments")
    return Ready(f"{source('arithmetic')}atom: {' | '.join(alternatives)}\n", "arithmetic")


def _names(names: Iterable[str], what: str) -> list[str]:
    if not isinstance(names, str | bytes) and isinstance(names, Iterable):
        names = list(names)
        if not names:
            return []
    rule = "is made of ASCII letters, digits and _, and begins with no digit"
    found = check_names(names, what, "[A-Za-z_][A-Za-z0-9_]*", rule)
    for name in found:
        if keyword.iskeyword(name):
            raise ConstraintError(f"{name!r} among the {what} is a keyword of Python: rename it")
    return found
