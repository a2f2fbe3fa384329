"""Ready grammars: what they accept is judged by the tools that people read such texts with."""

import ast
import contextlib
import csv
import datetime
import io
import json
import logging
import random
import re
import runpy
import sqlite3
from collections import Counter
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Literal

import chess
import chess.pgn
import graphql
import library_texts as texts
import pydantic
import pytest
from languages import begins, check_masks, is_member, random_members
from rdkit import Chem, rdBase

from guided_smc.errors import ConstraintError, OutputValidationError
from guided_smc.grammars import Limits, library
from guided_smc.grammars.library.base import LIBRARY


def example(name):
    return LIBRARY[name].make(**library.examples(name).arguments)


@pytest.mark.parametrize("name", library.names())
def test_the_examples_are_members_and_the_others_are_none(name):
    constraint, examples = example(name), library.examples(name)
    assert constraint.name == name
    assert [text for text in examples.accepted if not is_member(constraint, text)] == []
    assert [text for text in examples.refused if is_member(constraint, text)] == []
    assert len(examples.accepted) >= 3 and len(examples.refused) >= 5
    for text in examples.accepted:
        assert begins(constraint, text)
        assert constraint.value_key(text) == constraint.value_key(text)


@pytest.mark.parametrize("name", library.names())
def test_masks_are_exact(name):
    constraint = example(name)
    for seed in range(2):
        found = check_masks(constraint, random.Random(seed), steps=12)
        assert found is None or is_member(constraint, found.decode())


def rows(constraint, seed=0, count=60, name=None):
    found = random_members(constraint, seed, count, texts.WORDS.get(name, ""), longest=120)
    assert len(found) >= 0.9 * count
    return found


def accepts_all(constraint, members):
    assert len(members) >= 15
    assert [text for text in members if not is_member(constraint, text)] == []


def test_json_is_what_json_reads():
    constraint = library.json()
    accepts_all(constraint, texts.JSON)
    for text in [*rows(constraint), *texts.JSON]:
        assert constraint.parse(text) == json.loads(text)
    assert not is_member(library.json(top="object"), "[]")
    assert is_member(library.json(top="array"), "[{}]")
    assert not is_member(library.json(whitespace="compact"), "[\n1]")
    with pytest.raises(ConstraintError, match="top must be one of 'any', 'object', 'array'"):
        library.json(top="text")


def test_arithmetic_is_python():
    constraint = library.arithmetic(variables=["x", "y"], functions=["sqrt", "max"])
    accepts_all(constraint, texts.ARITHMETIC)
    for text in rows(constraint):
        for node in ast.walk(ast.parse(text, mode="eval")):
            if isinstance(node, ast.Name):
                assert node.id in ("x", "y", "sqrt", "max")
            kinds = ast.Expression | ast.BinOp | ast.UnaryOp | ast.Constant | ast.Call | ast.Name
            assert isinstance(node, kinds | ast.operator | ast.unaryop | ast.Load)
    assert not is_member(library.arithmetic(), "x")


@pytest.mark.parametrize("form", texts.DATES)
def test_dates_exist(form):
    constraint = library.iso_date(form=form)
    assert all(is_member(constraint, text) for text in texts.DATES[form])
    written = {
        "calendar": lambda day: day.isoformat(),
        "week": lambda day: "{:04}-W{:02}-{}".format(*day.isocalendar()),
        "ordinal": lambda day: f"{day.year:04}-{day.timetuple().tm_yday:03}",
    }[form]
    for text in rows(constraint, count=60):
        assert written(constraint.parse(text)) == text
    # Around the turn of every 53rd year, the leap years of centuries, and the ends of the calendar.
    for year in [1, 4, 99, 400, *range(1583, 9999, 53), 9998, 9999]:
        for month, day in ((1, 1), (1, 3), (2, 28), (12, 27), (12, 31)):
            moment = datetime.date(year, month, day)
            assert is_member(constraint, written(moment)), moment
        leap = 365 + (year % 4 == 0 and (year % 100 != 0 or year % 400 == 0))
        weeks = datetime.date(year, 12, 28).isocalendar()[1]
        assert is_member(library.iso_date(), f"{year:04}-02-29") == (leap == 366)
        if form == "ordinal":
            assert is_member(constraint, f"{year:04}-366") == (leap == 366)
        if form == "week":
            assert is_member(constraint, f"{year:04}-W53-1") == (weeks == 53)


def test_times_are_what_python_reads():
    constraint = library.iso_time(zone="optional")
    accepts_all(constraint, texts.TIMES)
    read = pydantic.TypeAdapter(datetime.time).validate_python
    for text in [*rows(constraint), *texts.TIMES]:
        assert constraint.parse(text) == read(text)
    moment = library.iso_datetime()
    accepts_all(moment, [f"2024-02-29T{time}" for time in texts.TIMES])
    read = pydantic.TypeAdapter(datetime.datetime).validate_python
    for text in rows(moment, count=40):
        assert moment.parse(text) == read(text)
    assert not is_member(library.iso_time(), "10:10:10Z")
    assert not is_member(library.iso_time(zone="required"), "10:10:10")
    assert not is_member(library.iso_time(digits=2), "10:10:10.123")
    assert not is_member(library.iso_time(digits=0), "10:10:10.1")
    with pytest.raises(ConstraintError, match="digits must be an int from 0 to 6, got 7"):
        library.iso_datetime(digits=7)


def test_durations_have_the_length_that_pydantic_reads():
    accepts_all(library.iso_duration(), texts.DURATIONS)
    constraint = library.iso_duration(calendar=False)
    read = pydantic.TypeAdapter(datetime.timedelta).validate_python
    for text in rows(constraint):
        assert constraint.parse(text).timedelta() == read(text)
    for text in rows(library.iso_duration()):
        read(text)
    assert not is_member(constraint, "P1Y")
    long = library.iso_duration().parse("P1Y2M3DT4H5M6.5S")
    assert long == library.Duration(*map(Decimal, ["1", "2", "0", "3", "4", "5", "6.5"]))
    with pytest.raises(ValueError, match="no fixed length"):
        long.timedelta()


def test_sqlite_runs_every_query():
    constraint = library.sql_select(texts.TABLES, joins=texts.JOINS)
    accepts_all(constraint, texts.SQL)
    database = sqlite3.connect(":memory:")
    database.executescript(texts.SCHEMA)
    # A name in double quotes that is no column would be taken for a text.
    if hasattr(database, "setconfig"):
        database.setconfig(sqlite3.SQLITE_DBCONFIG_DQS_DML, False)
    for text in [*rows(constraint, name="sql_select", count=150), *texts.SQL]:
        database.execute(f"EXPLAIN {text}").fetchall()
    for text in (
        "SELECT id FROM employees, departments",
        "SELECT total FROM employees",
        "SELECT 1",
    ):
        assert not is_member(constraint, text)
    # Other words for the same join, and a join that was not given.
    join = "SELECT employees.id FROM {} ON departments.id = employees.dept_id"
    assert is_member(constraint, join.format("departments INNER JOIN employees"))
    assert not is_member(constraint, join.format('departments JOIN "order"'))


NAMES = ["naïve", 'a"b', "back\\slash", "日本", "select", "x y", "it's", "{brace}", "A-1"]


def test_any_name_is_written_as_the_language_wants_it():
    spelt = ['"' + name.replace('"', '""') + '"' for name in NAMES]
    constraint = library.sql_select({name: [name] for name in NAMES})
    database = sqlite3.connect(":memory:")
    for name in spelt:
        database.execute(f"CREATE TABLE {name} ({name})")
        query = f"SELECT {name}, {name}.{name} FROM {name}"
        assert is_member(constraint, query)
        database.execute(query)
    fields = [*NAMES, "a,b", "two\nlines", " x "]
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows([fields, fields])
    table = library.csv(fields)
    assert is_member(table, out.getvalue())
    assert table.parse(out.getvalue()) == [dict(zip(fields, fields, strict=True))]
    plan = library.pddl_plan({"A-1": ["T_2"]}, {"T_2": ["x-y_z"]})
    assert is_member(plan, "(A-1 x-y_z)")


def test_graphql_parses_every_query():
    constraint = library.graphql_query()
    accepts_all(constraint, texts.GRAPHQL)
    for text in [*rows(constraint, name="graphql_query"), *texts.GRAPHQL]:
        graphql.parse(text)


def test_queries_with_types_are_valid_for_the_schema():
    constraint = library.graphql_query(texts.TYPES)
    assert [text for text in texts.TYPED_GRAPHQL if not is_member(constraint, text)] == []
    schema = graphql.build_schema(texts.SDL)
    # Documented as unchecked.
    rules = [rule for rule in graphql.specified_rules if "OverlappingFields" not in rule.__name__]
    found = rows(constraint, name="graphql_query") + texts.TYPED_GRAPHQL
    rename = 'mutation { rename(id: 1, name: "a") { id } }'
    mutation = library.graphql_query(texts.TYPES, operation="mutation")
    for text in [*found, *rows(mutation, count=20, name="graphql_query"), rename]:
        assert graphql.validate(schema, graphql.parse(text), rules) == [], text
    assert is_member(mutation, rename)
    for text in (
        "{ hero }",
        "{ version { id } }",
        "{ character { id } }",
        "{ hero(episode: OTHER) { id } }",
        "{ hero { age } }",
        "{ search(first: 1) { id } }",
        rename,
    ):
        assert not is_member(constraint, text)


def test_csv_reads_every_table():
    constraint = library.csv(texts.CSV_COLUMNS)
    accepts_all(constraint, texts.CSV)
    for text in [*rows(constraint, name="csv", count=40), *texts.CSV]:
        table = list(csv.reader(io.StringIO(text, newline=""), strict=True))
        assert table[0] == list(texts.CSV_COLUMNS)
        for line, row in zip(table[1:], constraint.parse(text), strict=True):
            assert len(line) == len(row) == len(texts.CSV_COLUMNS)
            assert row["city"] == line[0]
            assert row["people"] == (int(line[1]) if line[1] else None)
            assert row["area km2"] == float(line[2])
            assert row["kind"] == line[3] and row["kind"] in ("a,b", "c")
            assert row["founded"] == (datetime.date.fromisoformat(line[4]) if line[4] else None)
            assert row["port"] is {"true": True, "false": False}[line[5]]


class Size(Enum):
    SMALL = 1
    LARGE = 2


def test_tables_have_the_shape_that_was_asked_for():
    table = library.csv(
        {"a;b": Size, "n": str | None},
        delimiter=";",
        newline="\r\n",
        header=False,
        min_rows=1,
        max_rows=2,
    )
    assert table.parse("1;x\r\n2;\r\n") == [
        {"a;b": Size.SMALL, "n": "x"},
        {"a;b": Size.LARGE, "n": None},
    ]
    assert is_member(table, "1;x") and is_member(table, "1;x\r\n2;y")
    for text in ("", "1;x\n", "1;x\r\n1;x\r\n1;x", "3;x", '1;""'):
        assert not is_member(table, text)
    assert is_member(library.csv(["a;b"], delimiter=";"), '"a;b"\n""\nx')
    assert not is_member(library.csv(["a"]), "a\n\n")
    optional = library.csv({"a": str | None}, header=False)
    assert optional.parse('""\nx\n') == [{"a": None}, {"a": "x"}]
    assert is_member(optional, "") and not is_member(library.csv(["a"], max_rows=1), "a\nx\ny")
    assert is_member(library.csv(["a"], header=False, max_rows=1), "x")
    assert library.csv(["a", "b"]).parse("a,b\n,") == [{"a": "", "b": ""}]
    assert table.value_key("1;x") == table.value_key("1;x\r\n") != table.value_key("2;x")
    with pytest.raises(OutputValidationError, match="no member of csv"):
        table.parse("3;x")


def test_rdkit_reads_every_molecule():
    constraint = library.smiles()
    accepts_all(constraint, texts.SMILES)
    found = rows(constraint, name="smiles", count=100)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    rdBase.LogToPythonLogger()
    log = logging.getLogger("rdkit")
    log.addHandler(handler)
    try:
        for text in [*found, *texts.SMILES]:
            messages.clear()
            if Chem.MolFromSmiles(text, sanitize=False) is None:
                # Documented as unchecked: a ring bond between neighbours.
                assert "duplicates bond" in " ".join(messages), (text, messages)
        for text in texts.SMILES:
            assert Chem.MolFromSmiles(text) is not None, text
    finally:
        log.removeHandler(handler)
    assert sum(any(ring in text for ring in "123") for text in found) > 20


def test_moves_are_san():
    constraint = library.chess_san()
    accepts_all(constraint, texts.MOVES)
    board = chess.Board()
    for text in [*rows(constraint), *texts.MOVES]:
        # But no InvalidMoveError: it is a move.
        with contextlib.suppress(chess.IllegalMoveError, chess.AmbiguousMoveError):
            board.parse_san(text)
    # What is legal is always accepted: games of random moves.
    rng, moves = random.Random(0), Counter()
    for _ in range(12):
        board.reset()
        game = []
        while not board.is_game_over() and len(game) < 80:
            move = rng.choice(list(board.legal_moves))
            game.append(board.san(move))
            board.push(move)
        moves.update(game)
        numbered = [f"{n // 2 + 1}. {san}" if n % 2 == 0 else san for n, san in enumerate(game)]
        if numbered:
            assert is_member(library.chess_moves(max_moves=40), " ".join(numbered))
    assert len(moves) > 300
    assert [move for move in moves if not is_member(constraint, move)] == []


def test_games_are_what_pgn_readers_read():
    constraint = library.chess_moves(max_moves=5)
    assert [text for text in texts.GAMES if not is_member(constraint, text)] == []
    assert not is_member(library.chess_moves(max_moves=1), "1. e4 e5 2. Nf3")
    for text in texts.GAMES:
        game = chess.pgn.read_game(io.StringIO(text))
        assert not game.errors and game.end().ply() > 0
    with pytest.raises(ConstraintError, match="max_moves must be an int from 1 to 300, got True"):
        library.chess_moves(max_moves=True)


def test_fifty_tables_and_as_many_joins_are_within_the_limits():
    tables = {f"t{i}": [f"c{i}_{j}" for j in range(20)] for i in range(50)}
    joins = [(f"t{i}.c{i}_0", f"t{i + 1}.c{i + 1}_0") for i in range(49)]
    constraint = library.sql_select(tables, joins=joins)
    assert is_member(constraint, "SELECT c7_3 FROM t7 WHERE c7_19 > 2")
    assert is_member(constraint, "SELECT t8.c8_1 FROM t8 JOIN t7 ON t7.c7_0 = t8.c8_0")
    assert not is_member(constraint, "SELECT c7_3 FROM t8")


def test_plans_use_actions_as_declared():
    constraint = library.pddl_plan(**texts.PLAN)
    accepts_all(constraint, texts.PLANS)
    actions, objects = texts.PLAN["actions"], texts.PLAN["objects"]
    for text in [*rows(constraint), *texts.PLANS]:
        steps = [line.removeprefix("(").removesuffix(")").split() for line in text.splitlines()]
        assert constraint.parse(text) == [tuple(step) for step in steps]
        for name, *arguments in steps:
            types = actions[name] or []
            assert len(arguments) == len(types)
            assert all(a in objects[t] for a, t in zip(arguments, types, strict=True))
    untyped = library.pddl_plan({"swap": 2}, ["x", "y"], min_steps=0, max_steps=2)
    assert is_member(untyped, "") and is_member(untyped, "(swap x y)\n(swap y y)")
    assert not is_member(untyped, "(swap x y)\n" * 3)
    assert not is_member(library.pddl_plan({"swap": 2}, ["x"], min_steps=2), "(swap x x)")
    assert untyped.value_key("(swap x y)") == untyped.value_key("(swap x y)\n")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: library.arithmetic(variables="xy"), "variables are a list of names, got 'xy'"),
        (lambda: library.arithmetic(variables=["if"]), "'if' among the variables is a keyword"),
        (lambda: library.arithmetic(variables=["2x"]), "begins with no digit"),
        (lambda: library.arithmetic(variables=["f"], functions=["f"]), "'f' is a variable and a"),
        (lambda: library.iso_date(form="year"), "form must be one of 'calendar', 'week'"),
        (lambda: library.sql_select({}), "tables are empty"),
        (lambda: library.sql_select({"a": []}), "columns of a are empty"),
        (lambda: library.sql_select(["a"]), "tables are a mapping, got"),
        (lambda: library.sql_select({"a": ["b", "B"]}), "'B' is among the columns of a beside 'b'"),
        (lambda: library.sql_select({"a": ["b\n"]}), "no control character"),
        (lambda: library.sql_select({"a": ["\ud800"]}), "cannot be written"),
        (lambda: library.sql_select({"a": ["b"]}, joins=["a.b"]), "joins are pairs such as"),
        (lambda: library.sql_select({"a": ["b"]}, joins=[("a.b", "a.c")]), "'a.c': there is no"),
        (lambda: library.sql_select({"a": ["b"]}, joins=[("a.b", "a.b")]), "'a' with itself"),
        (
            lambda: library.sql_select({"a.b": ["c"], "a": ["b.c"]}, joins=[("a.b.c", "a.b.c")]),
            "two columns are called so",
        ),
        (lambda: library.python_block(depth=9), "depth must be an int from 0 to 8, got 9"),
        (lambda: library.python_block(limits=Limits(max_grammar_symbols=50)), "python_block: "),
        (lambda: library.graphql_query({"A": {"b": "Int"}}), "no object 'Query'"),
        (lambda: library.graphql_query({"Query": {"b": "C"}}), "Query.b has the type 'C', which"),
        (lambda: library.graphql_query({"Query": {"b": "[Int"}}), "write it as GraphQL does"),
        (lambda: library.graphql_query({"Query": {"b-c": "Int"}}), "made of ASCII letters"),
        (lambda: library.graphql_query({"Query": {"b": ("Int", {"c": "Query"})}}), "built-in"),
        (lambda: library.graphql_query({"Query": {}, "E": ["true"]}), "true, false and null"),
        (lambda: library.graphql_query({"Query": {}, "ID": None}), "'ID' is built in"),
        (lambda: library.graphql_query(operation="mutation"), "operation belongs to types"),
        (lambda: library.csv([]), "columns are empty"),
        (lambda: library.csv(["a", "a"]), "'a' is among the columns twice"),
        (lambda: library.csv({"a": list}), "the column 'a' has the type"),
        (lambda: library.csv({"a": Literal[True]}), "the column 'a' has the type"),
        (lambda: library.csv({"a": Literal[1, "1"]}), "two values of a are written alike"),
        (lambda: library.csv({"a": int | str}), "the column 'a' has the type"),
        (lambda: library.csv(["a"], delimiter='"'), "delimiter must be one of"),
        (lambda: library.csv(["a"], min_rows=2, max_rows=1), "max_rows must be an int of at least"),
        (lambda: library.pddl_plan({"a b": 1}, ["c"]), "begins with a letter"),
        (lambda: library.pddl_plan({"a": ["t"]}, {"u": ["c"]}), "type 't', which no object has"),
        (lambda: library.pddl_plan({"a": "t"}, ["c"]), "a list of types or a number, got 't'"),
        (lambda: library.pddl_plan({"a": -1}, ["c"]), "parameters of a must be an int"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_to_do(make, said):
    with pytest.raises(ConstraintError, match=re.escape(said)):
        make()


def test_grammars_are_found_by_name():
    assert library.names() == [n for n in LIBRARY if callable(getattr(library, n))]
    assert is_member(library.from_name("iso_date"), "2024-02-29")
    with pytest.raises(ConstraintError, match=r"'sql_select' needs tables: make it in Python with"):
        library.from_name("sql_select")
    with pytest.raises(ConstraintError, match=r"no grammar 'smile' in the .* did you mean smiles"):
        library.from_name("smile")
    with pytest.raises(ConstraintError, match="no grammar 'x'"):
        library.examples("x")


DOCS = (Path(__file__).parents[1] / "docs" / "grammars.md").read_text()


def test_the_documentation_lists_them_all():
    lines = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", DOCS, flags=re.M)
    assert sorted(name for name, _ in lines) == sorted(library.names())
    for name, text in lines:
        assert is_member(example(name), text), name


def test_the_documentations_snippet_runs(tmp_path):
    script = tmp_path / "snippet.py"
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCS, flags=re.M | re.S)
    script.write_text(code)
    made = runpy.run_path(str(script))
    assert is_member(made["queries"], 'SELECT "first mayor" FROM cities')
    assert is_member(made["hero"], "{ version }")
