"""The main job, as `make demo` runs it: a file of prompts in, typed objects out.

Runs the command line on examples/prompts.txt with the schema examples/person.json, then reads the
records that it wrote as pydantic objects and shows them in a table.
"""

import json
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


class Person(BaseModel):
    """What examples/person.json describes."""

    name: str
    age: int
    occupation: str


def main() -> int:
    out = Path("out") / "people.jsonl"
    out.parent.mkdir(exist_ok=True)
    command = ["generate", str(HERE / "prompts.txt"), "--schema", str(HERE / "person.json")]
    command += ["-o", str(out), "--overwrite", "--n-particles", "8", "--max-tokens", "64"]
    command += ["--seed", "0"]
    print("$ guided-smc", *command, flush=True)
    finished = subprocess.run([sys.executable, "-m", "guided_smc.cli", *command])
    if finished.returncode not in (0, 1):
        return finished.returncode

    table = Table("prompt", "name", "age", "occupation", "log-evidence")
    prompts = (HERE / "prompts.txt").read_text().splitlines()
    for line in out.read_text().splitlines():
        record = json.loads(line)
        prompt = prompts[record["index"]].partition(" Answer in JSON")[0]
        if record.get("error"):
            table.add_row(prompt, f"[red]{record['error']['message']}[/red]")
            continue
        person = Person.model_validate(record["value"])
        evidence = f"{record['log_evidence']:.2f}"
        table.add_row(prompt, person.name, str(person.age), person.occupation, evidence)
    Console().print(table)
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main())
