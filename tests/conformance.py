"""How well JSON Schema constraints hold, over two collections of schemas with known answers.

    python tests/conformance.py            # both, with the small model's tokens; compares
    python tests/conformance.py --update   # and keeps what has improved
    python tests/conformance.py --output benchmarks/results/conformance-cpu.json   # keeps the times

The official JSON-Schema-Test-Suite comes with the source distribution of the `jsonschema` package;
MaskBench's development part lies beside the checkout. Each is left out, with a message, where it
cannot be had. A text is accepted if the mask lets every token pass, the check lets every prefix
pass, and both accept the end. `tests/conformance.json` holds what was reached; it may only improve.

Besides it is told what a schema takes to compile, what a mask and a fork take along the accepted
texts (CPU time, which a busy machine changes little), and why schemas were refused. No time fails
anything: `--output` keeps them beside those of the benchmarks, with the machine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import random
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import jsonschema
import numpy as np
from rich.console import Console
from rich.table import Table

import guided_smc
from guided_smc.errors import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars import JsonSchema, Limits
from guided_smc.grammars.schema.exact_validators import ExactValidators
from guided_smc.grammars.schema.keywords import Schema
from guided_smc.grammars.schema.validating import _of_item, _of_property
from guided_smc.potentials import Completion
from guided_smc.vocabulary import Vocabulary

HERE = Path(__file__).parent
RATCHET = HERE / "conformance.json"
CACHE = HERE.parent / ".cache" / "conformance"
MASKBENCH = HERE.parent.parent / "shared" / "data" / "maskbench-dev.jsonl"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
LEFT_OUT = {
    "format": "says that formats are annotations; here they are asserted",
    "content": "says that encodings are annotations, or in old drafts that they are not",
    "format-assertion": "needs a metaschema from the network",
    "cross-draft": "needs schemas from the network",
    "vocabulary": "needs a metaschema from the network",
}
"""Files of the suite that are not asked, and why."""

WORST = ("invalid_accepted", "valid_rejected", "out_of_order", "failed")
"""Counts that may not rise; `compiled` may not fall."""

Tokenize = Callable[[str], list[int]]


@dataclass
class Case:
    """A schema with instances, and the keywords under which it is counted."""

    name: str
    schema: Any
    tests: list[dict[str, Any]]
    keywords: list[str]


@dataclass
class Tally:
    """What came out, by keyword."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    notes: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    fork_us: list[float] = field(default_factory=list)

    def add(self, keywords: Iterable[str], **counts: int) -> None:
        """Count under each keyword, and under all."""
        for keyword in {*keywords, "all"}:
            self.counts[keyword].update(counts)


class Judge:
    """Asks a constraint about texts, as the engine would: token by token."""

    def __init__(self, vocabulary: Vocabulary, tokenize: Tokenize) -> None:
        self.vocabulary = vocabulary
        self.tokenize = tokenize
        self.words = np.empty((1, -(-len(vocabulary) // 32)), dtype=np.int32)

    def accepts(self, constraint: JsonSchema, text: str) -> bool:
        """Whether the mask and the check both let a text pass."""
        ids = self.tokenize(text)
        state = constraint.compile(self.vocabulary).start()
        check = constraint.check()
        assert check is not None
        for n, token in enumerate(ids):
            if not state.advance(token) or check.log_prefix([self._of(ids[: n + 1], False)])[0]:
                return False
        return state.accepting and check.log_complete([self._of(ids, True)])[0] == 0

    def time(self, constraint: JsonSchema, text: str, tally: Tally) -> None:
        """Note what a mask and a fork take at each token of a text that is accepted."""
        grammar = constraint.compile(self.vocabulary)
        state = grammar.start()
        for token in self.tokenize(text):
            begun = time.process_time()
            grammar.fill_masks([state], self.words)
            masked = time.process_time()
            state = state.fork()
            tally.mask_us.append(1e6 * (masked - begun))
            tally.fork_us.append(1e6 * (time.process_time() - masked))
            state.advance(token)

    def _of(self, ids: list[int], finished: bool) -> Completion:
        text = self.vocabulary.decode(ids, finished=finished)
        return Completion("", tuple(ids), text, finished, self.vocabulary)


def spellings(data: Any) -> Iterator[str]:
    """A value as compact JSON, with ordinary whitespace, over several lines, and in escapes."""
    yield json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    yield json.dumps(data, ensure_ascii=False)
    yield json.dumps(data, indent=2, ensure_ascii=False)
    yield in_escapes(data)


def in_escapes(data: Any) -> str:
    """A value as JSON with every character of a string escaped."""
    if isinstance(data, dict):
        return "{" + ",".join(f"{in_escapes(k)}:{in_escapes(v)}" for k, v in data.items()) + "}"
    if isinstance(data, list):
        return "[" + ",".join(map(in_escapes, data)) + "]"
    if isinstance(data, str):
        units = data.encode("utf-16-be", errors="surrogatepass")
        pairs = zip(units[::2], units[1::2], strict=True)
        return '"' + "".join(f"\\u{a:02x}{b:02x}" for a, b in pairs) + '"'
    return json.dumps(data)


def in_order(data: Any, schema: Any) -> Any:
    """A value with its properties in the schema's order."""
    checked = Schema(json.loads(json.dumps(schema)))
    validators = ExactValidators(checked, Limits().max_check_steps)

    def spread(nodes: list[Any], value: Any) -> list[dict[str, Any]]:
        """Schemas with those that they apply to the same value, in the order of the text."""
        found: dict[int, dict[str, Any]] = {}

        def visit(node: Any) -> None:
            if not isinstance(node, dict) or id(node) in found:
                return
            found[id(node)] = node
            for keyword, part in node.items():
                if keyword == "$ref":
                    visit(checked.targets.get(id(node)))
                elif keyword in ("allOf", "anyOf", "oneOf"):
                    for each in part:
                        if keyword == "allOf" or validators.holds(each, value):
                            visit(each)
                elif keyword in ("if", "then", "else"):
                    visit(part)

        for node in nodes:
            visit(node)
        return list(found.values())

    def sort(value: Any, nodes: list[Any]) -> Any:
        facts = spread(nodes, value)
        if isinstance(value, list):
            return [
                sort(part, [s for f in facts for s in _of_item(f, i)])
                for i, part in enumerate(value)
            ]
        if isinstance(value, dict):
            order: dict[str, int] = {}
            for keyword in ("properties", "required"):
                for fact in facts:
                    for name in fact.get(keyword, ()):
                        order.setdefault(name, len(order))
            names = sorted(value, key=lambda name: order.get(name, len(order)))
            return {
                name: sort(value[name], [s for f in facts for s in _of_property(f, name)])
                for name in names
            }
        return value

    return sort(data, [checked.document])


def shuffles(data: Any, most: int = 60) -> Iterator[Any]:
    """A value with its properties in other orders."""
    draw = random.Random(0)

    def shuffle(value: Any) -> Any:
        if isinstance(value, list):
            return [shuffle(v) for v in value]
        if isinstance(value, dict):
            names = draw.sample(list(value), len(value))
            return {name: shuffle(value[name]) for name in names}
        return value

    if isinstance(data, dict) and len(data) <= 4:
        yield from (dict(items) for items in itertools.permutations(data.items()))
    yield from (shuffle(data) for _ in range(most))


def judge_case(case: Case, judge: Judge, tally: Tally) -> None:
    """Compile one schema and ask about its instances."""
    tally.add(case.keywords, schemas=1)
    begun = time.process_time()
    try:
        constraint = JsonSchema(case.schema)
        tally.compile_ms.append(1e3 * (time.process_time() - begun))
        constraint.compile(judge.vocabulary)
    except ConstraintError as error:
        if any(test["valid"] for test in case.tests):
            tally.notes.append(f"refused: {case.name}: {error}")
            tally.refusals[reason(error)] += 1
            tally.add(case.keywords, refused=1)
        else:  # nothing satisfies it, so that refusing it is right
            tally.add(case.keywords, compiled=1)
        return
    tally.add(case.keywords, compiled=1)
    for test in case.tests:
        try:
            judge_test(case, test, constraint, judge, tally)
        except Exception as error:
            tally.notes.append(f"failed: {case.name}: {error!r}")
            tally.add(case.keywords, failed=1)


def judge_test(
    case: Case, test: dict[str, Any], constraint: JsonSchema, judge: Judge, tally: Tally
) -> None:
    """Ask about one instance in all its spellings."""
    data = test["data"]
    shown = f"{case.name}: {test.get('description', '')}: {json.dumps(data)[:200]}"
    if not test["valid"]:
        accepted = any(judge.accepts(constraint, text) for text in spellings(data))
        tally.add(case.keywords, invalid=1, invalid_accepted=int(accepted))
        if accepted:
            tally.notes.append(f"invalid accepted: {shown}")
        return
    tally.add(case.keywords, valid=1)
    for candidate in (data, in_order(data, case.schema)):
        if all(judge.accepts(constraint, text) for text in spellings(candidate)):
            judge.time(constraint, json.dumps(candidate, ensure_ascii=False), tally)
            return
    kind = "valid_rejected"
    if any(judge.accepts(constraint, json.dumps(other)) for other in shuffles(data)):
        kind = "out_of_order"
    tally.add(case.keywords, **{kind: 1})
    tally.notes.append(f"{kind.replace('_', ' ')}: {shown}")


def reason(error: ConstraintError) -> str:
    """Why a schema was refused, without the names that are in it."""
    if isinstance(error, UnsupportedConstraintError) and error.keyword == "$ref":
        reference = re.search("'(.*?)'", str(error))
        if reference is not None and "json-schema.org/" in reference[1]:
            return "$ref to a metaschema"
        return "$ref to another document"
    return re.sub(r"'[^']*'|\$[\w.$\[\]]*", "…", str(error)).partition(";")[0]


def suite_cases(folder: Path, drafts: Iterable[str] = tuple(DRAFTS)) -> Iterator[Case]:
    """The official suite, from its folder `json/tests`."""
    for draft in drafts:
        for file in sorted((folder / draft).rglob("*.json")):
            if file.stem in LEFT_OUT and file.parent.name != "format":
                continue
            for group in json.loads(file.read_text(encoding="utf-8")):
                schema = group["schema"]
                if isinstance(schema, dict) and "$schema" not in schema:
                    schema = {"$schema": DRAFTS[draft], **schema}
                name = f"{file.relative_to(folder)}: {group['description']}"
                label = f"format: {file.stem}" if file.parent.name == "format" else file.stem
                yield Case(name, schema, group["tests"], [label])


def maskbench_cases(file: Path) -> Iterator[Case]:
    """MaskBench, one schema a line, under each keyword that occurs in it."""
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        keywords = _keywords(record["schema"])
        yield Case(record["id"], record["schema"], record["tests"], sorted(keywords))


def _keywords(schema: Any) -> set[str]:
    known = jsonschema.Draft201909Validator.VALIDATORS.keys()
    known |= jsonschema.Draft202012Validator.VALIDATORS.keys() | {"dependencies"}
    found: set[str] = set()
    stack = [(schema, False)]
    while stack:
        node, names = stack.pop()
        if isinstance(node, dict):
            if not names:
                found |= node.keys() & known
            for key, part in node.items():
                stack.append((part, not names and key in ("properties", "patternProperties")))
        elif isinstance(node, list):
            stack += [(part, False) for part in node]
    return found


def suite_folder() -> Path | None:
    """The suite's `json/tests`, fetched once through pip; None where that is not possible."""
    version = importlib.metadata.version("jsonschema")
    folder = CACHE / f"jsonschema-{version}" / "json" / "tests"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "jsonschema", "--dest", str(CACHE)]
        subprocess.run([*command, f"jsonschema=={version}"], check=False)
        archive = CACHE / f"jsonschema-{version}.tar.gz"
        if not archive.is_file():
            return None
        with tarfile.open(archive) as tar:
            wanted = [m for m in tar.getmembers() if "/json/" in m.name and ".." not in m.name]
            tar.extractall(CACHE, members=wanted)
    return folder


def worse(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What a ratchet file says better of than the counts now."""
    found = []
    for keyword, old in before.items():
        new = now.get(keyword, {})
        found += [f"{keyword}: {k} {new.get(k, 0)}" for k in WORST if new.get(k, 0) > old.get(k, 0)]
        if new.get("compiled", 0) < old.get("compiled", 0):
            found.append(f"{keyword}: compiled {new.get('compiled', 0)}, was {old['compiled']}")
    return found


def _plain(tally: Tally) -> dict[str, dict[str, int]]:
    return {
        keyword: {k: n for k, n in sorted(counts.items()) if n}
        for keyword, counts in sorted(tally.counts.items())
    }


def _table(title: str, tally: Tally) -> Table:
    table = Table("keyword", title=title)
    columns = ("compiled", "schemas", "invalid_accepted", "invalid", "valid_rejected", "valid")
    for column in (*columns, "out_of_order", "failed"):
        table.add_column(column.replace("_", " "), justify="right")
    for keyword, counts in sorted(tally.counts.items(), key=lambda item: (item[0] == "all", item)):
        values = [counts[c] for c in (*columns, "out_of_order", "failed")]
        table.add_row(keyword, *map(str, values))
    return table


def _refusals(tally: Tally) -> Table:
    table = Table("why schemas were refused", "schemas")
    for why, count in tally.refusals.most_common():
        table.add_row(why, str(count))
    return table


def timings(tally: Tally) -> dict[str, dict[str, float]]:
    """Median, 99th percentile and maximum of the CPU times, and how many there are of each."""
    lists = {"compile_ms": tally.compile_ms, "mask_us": tally.mask_us, "fork_us": tally.fork_us}
    found: dict[str, dict[str, float]] = {}
    for what, took in lists.items():
        quantiles = np.quantile(took, (0.5, 0.99, 1.0)) if took else (0.0, 0.0, 0.0)
        rounded = (round(float(q), 2) for q in quantiles)
        found[what] = dict(zip(("median", "p99", "most"), rounded, strict=True))
        found[what]["times"] = len(took)
    return found


def _timings(times: dict[str, dict[str, float]]) -> Table:
    table = Table("", "median", "p99", "most", "times", title="CPU time")
    for what, row in times.items():
        cells = (f"{row[name]:.1f}" for name in ("median", "p99", "most"))
        table.add_row(what.replace("_", ", ").replace("us", "µs"), *cells, str(row["times"]))
    return table


def _machine() -> dict[str, Any]:
    """As the benchmarks describe it."""
    sys.path.append(str(HERE.parent / "benchmarks"))
    found: dict[str, Any] = importlib.import_module("harness").machine()
    return found


@click.command()
@click.option("--update", is_flag=True, help="Keep what has improved in tests/conformance.json.")
@click.option("--only", type=click.Choice(["suite", "maskbench"]), help="One of the two.")
@click.option("--bytes", "as_bytes", is_flag=True, help="One token a byte instead of a model's.")
@click.option("--maskbench", type=click.Path(path_type=Path), default=MASKBENCH, help="Its file.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the times there, as JSON.")
def main(
    update: bool, only: str | None, as_bytes: bool, maskbench: Path, output: Path | None
) -> None:
    """Measure conformance, print it, and compare with what was reached before."""
    times: dict[str, Any] = {
        "benchmark": "conformance",
        "machine": None if output is None else _machine(),
        "settings": {"tokens": "bytes" if as_bytes else "smollm2-135m"},
        "collections": {},
    }
    # Tables keep their columns when the output is a file.
    console = Console() if Console().is_terminal else Console(width=160)
    judge = _byte_judge() if as_bytes else _model_judge()
    collections: dict[str, Iterator[Case]] = {}
    if only != "maskbench":
        folder = suite_folder()
        if folder is None:
            console.print("JSON-Schema-Test-Suite left out: its source could not be fetched")
        else:
            collections["json-schema-test-suite"] = suite_cases(folder)
            for name, why in LEFT_OUT.items():
                console.print(f"not asked: {name}.json, which {why}")
    if only != "suite":
        if maskbench.is_file():
            collections["maskbench-dev"] = maskbench_cases(maskbench)
        else:
            console.print(f"MaskBench left out: there is no {maskbench}")
    reached = json.loads(RATCHET.read_text()) if RATCHET.is_file() else {}
    lost: list[str] = []
    for name, cases in collections.items():
        tally = Tally()
        for case in cases:
            judge_case(case, judge, tally)
        for note in tally.notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        console.print(_table(name, tally))
        if tally.refusals:
            console.print(_refusals(tally))
        own = timings(tally)
        console.print(_timings(own))
        times["collections"][name] = {"schemas": tally.counts["all"]["schemas"], **own}
        now = _plain(tally)
        lost += worse(now, reached.get(name, {}))
        reached[name] = now
    for line in lost:
        console.print(f"worse than before: {line}", style="red", markup=False)
    if output is not None:
        output.write_text(json.dumps(times, indent=2) + "\n", encoding="utf-8")
    if update and not lost:
        RATCHET.write_text(json.dumps(reached, indent=1) + "\n")
    sys.exit(1 if lost else 0)


def _byte_judge() -> Judge:
    vocabulary = Vocabulary([bytes([i]) for i in range(256)] + [b""], eos_ids=[256])
    return Judge(vocabulary, lambda text: list(text.encode()))


def _model_judge() -> Judge:
    lm = guided_smc.load("smollm2-135m")
    encoder: Any = lm.encoder
    return Judge(
        lm.model.vocabulary, lambda text: encoder._tokenize(text, add_special_tokens=False)
    )


if __name__ == "__main__":
    main()
