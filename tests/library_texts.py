"""Texts as people write them, which the ready grammars have to accept; one list for each."""

import datetime
from typing import Literal

SCHEMA = '''
    CREATE TABLE employees (id INTEGER, name TEXT, salary REAL, dept_id INTEGER, hired TEXT);
    CREATE TABLE departments (id INTEGER, name TEXT, "group" TEXT, "head count" INTEGER);
    CREATE TABLE "order" (id INTEGER, "say ""hi""" TEXT, employee_id INTEGER, total REAL);
'''
TABLES = {
    "employees": ["id", "name", "salary", "dept_id", "hired"],
    "departments": ["id", "name", "group", "head count"],
    "order": ["id", 'say "hi"', "employee_id", "total"],
}
JOINS = [("employees.dept_id", "departments.id"), ("order.employee_id", "employees.id")]

SDL = """
    enum Episode { NEWHOPE EMPIRE JEDI }
    scalar Date
    type Query {
        hero(episode: Episode): Character
        character(id: ID!, full: Boolean): Character
        search(text: String!, first: Int, scores: [Float!]): [Character!]!
        version: String!
    }
    type Mutation { rename(id: ID!, name: String!): Character }
    type Character { id: ID! name: String born: Date appearsIn: [Episode!]! friends: [Character] }
"""
TYPES = {
    "Episode": ["NEWHOPE", "EMPIRE", "JEDI"],
    "Date": None,
    "Query": {
        "hero": ("Character", {"episode": "Episode"}),
        "character": ("Character", {"id": "ID!", "full": "Boolean"}),
        "search": ("[Character!]!", {"text": "String!", "first": "Int", "scores": "[Float!]"}),
        "version": "String!",
    },
    "Mutation": {"rename": ("Character", {"id": "ID!", "name": "String!"})},
    "Character": {
        "id": "ID!",
        "name": "String",
        "born": "Date",
        "appearsIn": "[Episode!]!",
        "friends": "[Character]",
    },
}

JSON = [
    "null",
    "-0.5",
    "[1, 2, 3]",
    '{"name": "Ada", "age": 36}',
    '{"a":{"b":{"c":[]}}}',
    '["a\\nb", "\\u0041", "Ünïcödé", "\\ud83d\\ude00"]',
    "1e10",
    "1E-2",
    '""',
    '{"": 0}',
    "[[], {}, [[]]]",
    '{\n  "x": 1,\n  "y": [\n    true,\n    false\n  ]\n}',
    '"a/b c\\t\\"d\\""',
    '{"id": 12345678901234567890}',
    '[{"lat": 52.52, "lon": 13.405}]',
]
ARITHMETIC = [
    "1",
    "3.14",
    "1 + 1",
    "2*3",
    "(1 + 2) * 3",
    "-5",
    "2**10",
    "7 // 2",
    "7 % 2",
    "1.5e-3 * x",
    "-(x + y)",
    "sqrt(x*x + y*y)",
    "max(x, 1)",
    "((x))",
    "10/4 - 2.5",
    "max(1,2,sqrt(3))",
    "x - -1",
]
DATES = {
    "calendar": ["2024-01-31", "1969-07-20", "2000-02-29", "0476-09-04", "9999-12-31"],
    "week": ["2024-W01-1", "2020-W53-5", "0001-W01-1", "9999-W52-5", "1976-W53-7"],
    "ordinal": ["2024-366", "2023-365", "2001-001", "2000-060", "1900-059"],
}
TIMES = [
    *("00:00:00", "23:59:59", "12:30:15", "06:05:04", "09:41:00", "12:00:00.000001", "18:45:30.5"),
    *("10:10:10Z", "10:10:10+02:00", "10:10:10-08:00", "10:10:10.25+05:45", "10:10:10+00:00"),
    *("10:10:10.123-00:30", "01:01:01.1Z", "23:59:59.999+14:00"),
]
DURATIONS = [
    *(
        "P1Y",
        "P2M",
        "P10D",
        "PT1H",
        "PT30M",
        "PT15S",
        "PT0.25S",
        "P1DT12H",
        "P1Y6M",
        "P3Y6M4DT12H30M5S",
    ),
    *("P4W", "PT1H30M", "PT90M", "P0D", "P1.5D", "PT36H", "P2Y10DT2.5H"),
]
SQL = [
    "SELECT name FROM employees",
    "SELECT * FROM departments;",
    "select * from employees where salary > 50000",
    "SELECT name, salary FROM employees ORDER BY salary DESC LIMIT 5",
    "SELECT DISTINCT dept_id FROM employees WHERE hired >= '2020-01-01'",
    "SELECT COUNT(*) FROM employees",
    "SELECT AVG(salary) AS mean_salary FROM employees WHERE dept_id = 3;",
    "SELECT dept_id, COUNT(*) AS n FROM employees GROUP BY dept_id HAVING COUNT(*) > 10",
    "SELECT employees.name, departments.name FROM employees JOIN departments "
    "ON employees.dept_id = departments.id WHERE departments.\"group\" = 'R&D'",
    "SELECT departments.name, SUM(employees.salary) FROM departments\n"
    "LEFT JOIN employees ON departments.id = employees.dept_id\n"
    "GROUP BY departments.name\nORDER BY SUM(employees.salary) DESC\nLIMIT 1",
    "SELECT name FROM employees WHERE salary = (SELECT MAX(salary) FROM employees)",
    "SELECT name FROM employees WHERE dept_id IN (SELECT id FROM departments "
    "WHERE name LIKE '%sales%')",
    "SELECT name FROM employees WHERE name LIKE 'O''B%' AND NOT salary IS NULL",
    "SELECT name FROM employees WHERE (dept_id = 1 OR dept_id = 2) AND salary BETWEEN 10 AND 20.5",
    'SELECT "head count", "group" FROM departments WHERE "head count" <> 0',
    'SELECT "say ""hi""" FROM "order" WHERE total IS NOT NULL LIMIT 10 OFFSET 20',
    'SELECT ROUND(AVG(total), 2) FROM "order"',
    "SELECT UPPER(name), salary * 1.1 AS raised FROM employees WHERE dept_id NOT IN (1, 2, 3)",
    "SELECT MAX(salary) - MIN(salary) AS spread FROM employees",
    "SELECT COUNT(DISTINCT dept_id) FROM employees WHERE id != -1",
]
PYTHON_EXPRESSIONS = [
    "x",
    "1 + 2",
    "a.b.c(d)[0]",
    "[x ** 2 for x in range(10)]",
    "{k: v for k, v in items.items() if v is not None}",
    "lambda x, y=1: x + y",
    "print('hello', end='')",
    "a if a > b else b",
    "not (a and b) or c",
    "x[1:-1, ..., ::2]",
    'f"{user.name}: {total:.2f}"',
    "sum(i for i in range(n) if i % 3 == 0)",
    "{1, 2, 3} | {4}",
    "(1,)",
    "()",
    "'it\\'s'",
    "r'\\d+'",
    "0xFF & ~mask << 2",
    "f(*args, **kwargs)",
    "sorted(words, key=lambda w: (-len(w), w))[:10]",
    "a < b <= c != d",
    "x is None",
    "key not in d",
    "{'a': [1, 2], 'b': {'c': ()}}",
    "1e-9 + 2.5j",
    "name is nothing",
]
PYTHON_BLOCKS = [
    "x = 1",
    "x += 1\n",
    "def add(a, b):\n    return a + b\n",
    "for i in range(3):\n    print(i)",
    "while n > 0:\n    n -= 1\n    if n == 5:\n        continue\n    total += n\n",
    "if x:\n    y = 1\nelif z:\n    y = 2\nelse:\n    y = 3\n",
    "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "def f():\n    pass\n\n\ndef g():\n    pass\n",
    'def f(x: float, scale: float = 2.0) -> float:\n    """Scale."""\n    return x * scale\n',
    "# a comment\nx = [\n    1,\n    2,\n]\n",
    "for a, b in zip(xs, ys):\n    d[a] = b  # noted\nelse:\n    done = True",
    "print('hello')\nprint(\"world\")",
    "def outer():\n    def inner(*args, **kwargs):\n        return args, kwargs\n    return inner",
    "if not ok: raise ValueError('bad')\n",
    "x = y = z = 0\nobj.attr[i].name = x",
    "assert x > 0, f'{x} is not positive'",
    "while True:\n    try_again = f(x)\n    if try_again:\n        break\n",
    "is_prime = all(n % k for k in range(2, int(n ** 0.5) + 1))\n",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n\n\nprint(gcd(12, 18))\n",
]
GRAPHQL = [
    "{ me { name } }",
    "query { users { id name } }",
    "query GetUser($id: ID!) { user(id: $id) { name email } }",
    'mutation { createUser(input: {name: "Ada", age: 36}) { id } }',
    "{\n  hero {\n    name\n    friends {\n      name\n    }\n  }\n}",
    "{ small: pic(size: 64) big: pic(size: 1024) }",
    "query Q($a: [Int!]! = [1, 2], $b: Boolean = true) { f(a: $a) @skip(if: $b) }",
    "{ ... F } fragment F on User { id }",
    "{ node { ... on User { name } ...G } }\nfragment G on Node { id }",
    "subscription OnEvent { event { type } }",
    '{ search(text: "a \\"b\\" \\u00e9", kinds: [A, B], near: {lat: -1.5, lon: 2e3}) { id } }',
    "{__schema{types{name}}}",
    "{ a, b, c }",
    "query($x:Int){a(x:$x)}",
    "{ item(id: null, on: false) { query, type } }",
]
TYPED_GRAPHQL = [
    "{ version }",
    "query { hero { name } }",
    "query Named { hero(episode: EMPIRE) { name friends { name } } }",
    '{ character(id: "1000") { id, name, appearsIn } }',
    "{ character(id: 7, full: true) { __typename born } }",
    '{ search(text: "an", first: 3, scores: [0.5, 1]) { id } }',
    '{\n  a: character(id: "1") {\n    name\n  }\n  b: character(id: "2") {\n    name\n  }\n}',
    '{ search(text: "", scores: null) { name } }',
]
CSV_COLUMNS = {
    "city": str,
    "people": int | None,
    "area km2": float,
    "kind": Literal["a,b", "c"],
    "founded": datetime.date | None,
    "port": bool,
}
CSV = [
    f"city,people,area km2,kind,founded,port\n{rows}"
    for rows in (
        "",
        "Bonn,330000,141.06,c,,false\n",
        "Bonn,330000,141.06,c,,false",
        'Rome,,1285,"a,b",0753-04-21,false\n',
        '"Washington, D.C.",1,0.5,c,1790-07-16,true\n',
        '"say ""hi""",0,1e3,c,,true\n',
        '"two\nlines",-5,-0.25,c,2000-02-29,true\n',
        ",,0,c,,true\n",
        '"",,0,c,,true\n',
        "  spaced  ,1,1.5E-7,c,,false\n",
        "Zürich,1,1,c,,false\n東京,2,2,c,,true\n",
        "it's,1,1,c,,true",
        "a;b,1,1,c,,true\na|b,1,1,c,,true\n",
        "x,999999999999999999,1,c,,true\n",
        '"\'",1,1,c,9999-12-31,true\n',
    )
]
SMILES = [
    "C",
    "CC",
    "C=C",
    "C#N",
    "O=C=O",
    "CCO",
    "CC(C)C",
    "c1ccccc1",
    "C1CCCCC1",
    "CC(=O)O",
    "OC[C@H]1OC(O)[C@H](O)[C@@H](O)[C@@H]1O",
    "CN1C=NC2=C1C(=O)N(C)C(=O)N2C",
    "c1ccc2ccccc2c1",
    "F/C=C/F",
    "[NH4+].[OH-]",
    "[2H]O[2H]",
    "CC(C)Cc1ccc(cc1)C(C)C(=O)O",
    "C1=CC=CN=C1",
    "[Cu+2].[O-]S(=O)(=O)[O-]",
    "c1cc[nH]c1",
    "CN(C)C(=N)NC(N)=N",
    "[O-][N+](=O)c1ccccc1",
    "ClC(Cl)(Cl)Br",
    "C[Si](C)(C)C",
    "[CH3:1][OH:2]",
]
MOVES = [
    *(
        "e4",
        "d5",
        "exd5",
        "Nf3",
        "Nbd2",
        "R1a3",
        "Qh4e1",
        "Bxf7+",
        "O-O",
        "O-O-O",
        "e8=Q",
        "bxa8=N#",
    ),
    *("Kd2", "Kxe7", "Qxb7#", "Raxd1", "N5xf3", "h1=R+", "a6", "O-O+"),
]
GAMES = [
    "1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 4. Ba4 Nf6 5. O-O",
    "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4. Qxf7# 1-0",
    "1. f3 e5 2. g4 Qh4# 0-1",
    "1. d4 d5 2. c4 1/2-1/2",
    "1. Nf3",
]
PLAN = {
    "actions": {"pick-up": ["block"], "stack": ["block", "block"], "go_to": ["place"], "wait": 0},
    "objects": {"block": ["a", "b", "c"], "place": ["table-1", "shelf_2", "a"]},
}
PLANS = [
    "(wait)",
    "(pick-up a)",
    "(pick-up a)\n",
    "(pick-up a)\n(stack a b)",
    "(go_to table-1)\n(pick-up b)\n(stack b c)\n",
    "(go_to shelf_2)",
    "(go_to a)",
    "(stack a a)",
    *("(wait)\n" * n for n in (2, 3, 5, 8)),
    "\n".join(["(pick-up c)", "(stack c b)"] * 4),
    "(stack c b)",
    "(wait)\n(go_to table-1)",
]

WORDS = {
    "sql_select": "SELECT | FROM | WHERE |COUNT(*)|employees|name|salary|dept_id| = | AND | OR "
    "| GROUP BY | HAVING | ORDER BY | IN (SELECT |LEFT JOIN|JOIN | ON |order|'a'|1| LIMIT 3"
    "|departments.id|employees.dept_id| IS NOT NULL| BETWEEN |ROUND(| AS x",
    "python_expression": "not |lambda| in | is | if | else |None|x|f(|**|, |[|]|(|)|{|}|: "
    "| for x in | and | or |0x1f|1.5|f'|f\"|\"a\"|'\\n'|*|**k|=|.a|lambda *, x=1|...",
    "python_block": "x|if |while |for x in |def f(|return |break|continue|pass|raise|assert "
    "|elif x:|else:|:\n    |\n    |\n        |\n| += | = |, |: int| -> "
    "|# c|  # d|*, |**k|f(|(|)|[|]|x = 1",
    "graphql_query": 'query |mutation |{|}| { | } |name|hero|(|)|: |$x|[|]|"a"|...| on |@a|friends'
    "|search(text: |character(id: |, first: 1|, full: true| { id } |version",
    "smiles": "C|c1ccccc1|(C)|(=O)|[NH4+]|1|2|C2|(|)|.C|/C|1CC1|C3CCCC3|N|%|[C@@H]",
    "csv": 'city,people,area km2,kind,founded,port\n|,c,|"a,b"|2000-02-29|true|false|,|\n|1',
}
"""Words that lead a random walk to the more interesting places of a language, by `|`."""
