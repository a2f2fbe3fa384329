"""Python: expressions, and statements with indentation."""

from __future__ import annotations

from guided_smc.grammars.library.base import Ready, check_count, listed, source
from guided_smc.grammars.matching import Limits


@listed(
    accepted=(
        "1 + 2 * x",
        "[f(i, key=i**2) for i in range(10) if i % 2 == 0]",
        "{'a': 1, **other}",
        "a if b else lambda x, *y: x",
        "not x in y and z[1:, ::2].w",
        "f'{name!r:>10} is {age + 1}'",
        "0x_ff + 1_000.5e-3j",
        "(*a, b)",
        "max(\n    a,\n    b,\n)",
    ),
    refused=(
        "",
        "1 +",
        "x = 1",
        "f(a=1, b)",
        "lambda: (yield)",
        "notx y",
        "x if y",
        "01",
        "'\\x4'",
        "(*a)",
        "print 'a'",
        "class",
        " 1",
    ),
)
def python_expression() -> Ready:
    r"""Expressions of Python, each of which Python compiles (`ast.parse(text, mode="eval")`).

    Dialect: that of Python 3.10 and later, after the full grammar in the language reference:
    operators, comparisons, `and`/`or`/`not`, conditional expressions, lambdas, calls, attributes,
    subscripts and slices, tuples, lists, sets, dicts, comprehensions, numbers, strings in single,
    double or three double quotes, raw strings, and f-strings. Names are in ASCII. Spaces where
    PEP 8 has them, or none: at most one, and after an opening bracket, a comma or a value in
    brackets also a new line and up to 40 spaces.

    Left out: `:=`, `await`, `yield`, bytes, strings side by side, `\N{...}`, comments,
    positional-only parameters, attributes of numbers, and in the fields of f-strings all but
    numbers, names, calls, subscripts and arithmetic. Not checked: that no parameter and no keyword
    argument is there twice, and what CPython cannot hold: brackets nested 100 deep, integers of
    4300 digits.

    Returns:
        A constraint whose values are the texts.
    """
    return Ready(f"start: tests\n{source('python')}", "python_expression")


@listed(
    accepted=(
        "x = 1",
        "def f(x: int, *, y=2) -> int:\n    return x + y\n",
        "for i in range(3):\n    if i > 1:\n        break\n    print(i)\nelse:\n    pass",
        "while True: n += 1",
        "# twice\na, b = b, a  # swapped\n\n\nassert a, 'no'\n",
        "if a:\n    x: int = 0\nelif b:\n    d['k'].v = 2\nelse:\n    raise E from e",
    ),
    refused=(
        "",
        "x =",
        "if a:\nb",
        "if a:\n   b",
        "  x = 1",
        "return 1",
        "break",
        "for i in x:\n    def f():\n        continue",
        "def f(x=1, y):\n    pass",
        "if a:\n    b\n  c",
        "f() = 1",
        "import os",
        "else:\n    pass",
    ),
)
def python_block(*, depth: int = 4, indent: int = 4, limits: Limits | None = None) -> Ready:
    """Statements of Python, with indentation, which Python compiles (`compile(..., "exec")`).

    Dialect: expressions as in `python_expression`, also as statements; assignments (chained, to
    several names, augmented, annotated), `pass`, `assert`, `raise`, `break` and `continue` in
    loops, `return` in functions; `if`, `while`, `for` with `elif` and `else`, and `def` with
    defaults, stars and annotations. A block is indented, or one simple statement on the same line.
    Up to two blank lines between statements, and comments: behind a statement, or on lines of
    their own that are indented like the next statement. The end of the line is a newline alone.

    Left out: `class`, `import`, `try`, `with`, `match`, `del`, `global`, `nonlocal`, `async`,
    decorators, `;`, starred targets. Not checked: that no parameter and no keyword argument is
    there twice.

    Args:
        depth: Levels of indentation, up to 8. The grammar grows with them.
        indent: Spaces that a level has, up to 8.
        limits: What the grammar may cost.

    Returns:
        A constraint whose values are the texts.

    Raises:
        ConstraintError: A number is out of bounds.
    """
    check_count(depth, "depth", 0, 8)
    check_count(indent, "indent", 1, 8)
    rules = [source("python"), source("python_statements")]
    rules.append("start: [COMMENTS] block_0_simple [LAST]\n")
    for level in range(depth + 1):
        lines = r"\n{1,3}" + " " * (indent * level)
        comment = r"#[^\n\r\x00]*"
        rules.append(f"LINE_{level}: /( {{1,2}}{comment})?({lines}{comment})*{lines}/\n")
        rules.append(f"def_{level}: signature suite_{level}_in_function\n")
        rules += [_block(level, place, deeper=level < depth) for place in _PLACES]
    return Ready("".join(rules), "python_block", limits=limits)


_PLACES = ("simple", "in_loop", "in_function", "in_both")
"""Where statements stand, which decides about `break` and `return`: the rules for simple ones."""

_IN_LOOP = {"simple": "in_loop", "in_function": "in_both"}


def _block(level: int, place: str, *, deeper: bool) -> str:
    """The rules for statements at a level of indentation."""
    here, line = f"{level}_{place}", f"LINE_{level}"
    loop = f"suite_{level}_{_IN_LOOP.get(place, place)}"
    body = f" | LINE_{level + 1} block_{level + 1}_{place}" if deeper else ""
    return f"""
block_{here}: statement_{here} ({line} statement_{here})*
statement_{here}: {place} | if_{here} | while_{here} | for_{here} | def_{level}
suite_{here}: ":" (" " {place}{body})
if_{here}: "if " test suite_{here} ({line} "elif " test suite_{here})* [else_{here}]
while_{here}: "while " test {loop} [else_{here}]
for_{here}: "for " targets " in " tests {loop} [else_{here}]
else_{here}: {line} "else" suite_{here}
"""
