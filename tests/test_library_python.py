"""Ready grammars of Python, judged by Python."""

import ast
import heapq
import inspect
import re
import shlex
import statistics
import textwrap
import warnings

import library_texts as texts
import pytest
from languages import is_member
from test_library import accepts_all, rows

from guided_smc.grammars import library


def compiles(text, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of `1 is 2` and its like
        try:
            compile(text, "text", mode)
        except SyntaxError as error:
            # What is documented as unchecked: names that occur twice.
            assert re.match(
                "duplicate (argument|parameter)|keyword argument repeated", error.msg
            ), text


def test_python_compiles_every_expression():
    constraint = library.python_expression()
    accepts_all(constraint, texts.PYTHON_EXPRESSIONS)
    for text in [*rows(constraint, name="python_expression", count=150), *texts.PYTHON_EXPRESSIONS]:
        compiles(text, "eval")


@pytest.mark.parametrize("options", [{}, {"depth": 1, "indent": 2}, {"depth": 0}])
def test_python_compiles_every_block(options):
    constraint = library.python_block(**options)
    if not options:
        accepts_all(constraint, texts.PYTHON_BLOCKS)
        for text in texts.PYTHON_BLOCKS:
            compiles(text, "exec")
    for text in rows(constraint, name="python_block", count=100 if not options else 20):
        compiles(text, "exec")
    nested = "if x:\n    if y:\n        z"
    assert is_member(constraint, nested) == (not options)
    assert is_member(constraint, "if x:\n  z") == (options.get("indent") == 2)
    assert is_member(constraint, "if x: z")


LEFT_OUT = ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.JoinedStr, ast.FormattedValue
STATEMENTS = (
    *(ast.FunctionDef, ast.If, ast.For, ast.While, ast.Break, ast.Continue, ast.Return, ast.Pass),
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Raise, ast.Assert),
)


def in_dialect(node):
    for inner in ast.walk(node):
        match inner:
            case ast.Starred() if not isinstance(inner.ctx, ast.Load):
                return False
            case ast.FunctionDef(decorator_list=[_, *_]) | ast.arguments(posonlyargs=[_, *_]):
                return False
            case ast.stmt() if not isinstance(inner, STATEMENTS):
                return False
            case ast.Constant(value=bytes()):
                return False
        if isinstance(inner, LEFT_OUT):
            return False
    return True


def test_pythons_own_library_is_accepted():
    expressions, functions = set(), set()
    for module in (heapq, textwrap, statistics, shlex):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.expr) and not isinstance(node, ast.Slice | ast.Starred):
                if in_dialect(node):
                    expressions.add(ast.unparse(node))
            elif isinstance(node, ast.FunctionDef) and in_dialect(node):
                functions.add(ast.unparse(node))
    assert len(expressions) > 1000 and len(functions) > 40
    expression, block = library.python_expression(), library.python_block(depth=8)
    assert [text for text in expressions if not is_member(expression, text)] == []
    assert [text for text in functions if not is_member(block, text)] == []
