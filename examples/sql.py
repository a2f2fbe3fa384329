"""From a question to rows: the model writes SQL over tables of ours, and SQLite runs it.

The grammar has the tables and columns filled in, so that every query runs. What it says is up to
the model, and this one is small: the answers before it do most of the work. `vote` returns
the query with the largest share of the posterior.
"""

import sqlite3

from rich.console import Console
from rich.table import Table

import guided_smc
from guided_smc.grammars import library

SCHEMA = """
CREATE TABLE ships (name TEXT, kind TEXT, year INTEGER, masts INTEGER);
INSERT INTO ships VALUES
    ('Cutty Sark', 'clipper', 1869, 3), ('Gorch Fock', 'barque', 1958, 3),
    ('Passat', 'barque', 1911, 4), ('Sea Cloud', 'barque', 1931, 4), ('Vega', 'schooner', 1948, 2);
"""
SYSTEM = "Answer with one SQL query. The table ships has the columns name, kind, year, masts."
SHOTS = (
    ("Which ships are clippers?", "SELECT name FROM ships WHERE kind = 'clipper';"),
    ("Which ships are schooners?", "SELECT name FROM ships WHERE kind = 'schooner';"),
    ("How many ships have 2 masts?", "SELECT COUNT(*) FROM ships WHERE masts = 2;"),
)
QUESTIONS = ("Which ships are barques?", "How many ships have 3 masts?")


def messages(question: str) -> list[dict[str, str]]:
    """A chat in which such questions have been answered before."""
    turns = [{"role": "system", "content": SYSTEM}]
    for asked, answered in SHOTS:
        turns.append({"role": "user", "content": asked})
        turns.append({"role": "assistant", "content": answered})
    return [*turns, {"role": "user", "content": question}]


def main() -> None:
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    columns = [row[1] for row in database.execute("PRAGMA table_info(ships)")]
    lm = guided_smc.load("smollm2-135m")
    results = lm.generate(
        [messages(question) for question in QUESTIONS],
        output_type=library.sql_select({"ships": columns}),
        select="vote",
        temperature=0.5,
        n_particles=8,
        max_tokens=24,
        seed=0,
    )
    table = Table("question", "query", "share", "rows")
    for question, out in zip(QUESTIONS, results, strict=True):
        rows = database.execute(out.value).fetchall()
        shown = ", ".join(str(row[0]) for row in rows)
        table.add_row(question, out.value, f"{out.values[0].weight:.2f}", shown)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
