"""The server under load: what sharing a batch brings, and whether a crowd leaves anything behind.

Throughput: the same requests one after the other and 16 at once, in turns, round by round. Crowd:
64 clients send 300 requests of all kinds, some of which go away early, are broken, or are huge.
Every answer has to be valid or to carry its typed error; then rows, cache and memory are looked at.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from harness import RESULTS, interleave, machine, ratio, report, spread
from rich.table import Table

AT_ONCE = 16
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "alive": {"type": "boolean"},
        },
        "required": ["name", "age", "alive"],
        "additionalProperties": False,
    },
    "mood": {"enum": ["happy", "sad", "angry", "calm"]},
    "numbers": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 999},
        "minItems": 1,
        "maxItems": 5,
    },
    "place": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
            "kind": {"enum": ["town", "city", "village"]},
        },
        "required": ["city", "kind"],
        "additionalProperties": False,
    },
}
BROKEN: dict[str, dict[str, Any]] = {
    "no schema": {"guided_json": {"type": "nope"}},
    "broken pattern": {"guided_regex": "(a"},
    "endless": {"guided_json": {"$ref": "#"}},
    "deep": {"guided_json": json.loads('{"items":' * 200 + "{}" + "}" * 200)},
    "unknown field": {"beam_width": 3},
    "too long": {"max_tokens": 1_000_000},
}


class Server:
    """`guided-smc serve`, for this run."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "guided_smc.cli", "serve", "--port", "0", *arguments]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = ""
        ready = threading.Event()

        def read() -> None:
            assert self._process.stderr is not None
            for line in self._process.stderr:
                if '"listening"' in line:
                    self.url = json.loads(line)["url"]
                    ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        ready.wait(300)
        if not self.url:
            raise RuntimeError("the server did not start")

    def metrics(self) -> dict[str, float]:
        """By name and labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def rest(self) -> dict[str, float]:
        """The metrics once nothing runs or waits."""
        while True:
            found = self.metrics()
            if not found["guided_smc_groups"] and not found["guided_smc_queue"]:
                return found
            time.sleep(0.1)

    @property
    def memory_mib(self) -> float:
        """Of the process, resident; 0 where that is not told."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return 0.0
        (line,) = [x for x in status.splitlines() if x.startswith("VmRSS")]
        return int(line.split()[1]) / 1024

    def stop(self) -> int:
        """Ask it to stop; its exit code."""
        self._process.terminate()
        return self._process.wait(120)


def send(client: httpx.Client, content: str, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": content}], **fields}
    return client.post("/v1/chat/completions", json=body)


def throughput(server: Server, *, particles: int, count: int, rounds: int) -> dict[str, Any]:
    """Returned tokens per second, one at a time and all at once."""
    names = list(SCHEMAS)
    limits = httpx.Limits(max_connections=AT_ONCE)
    with httpx.Client(base_url=server.url, timeout=1200, limits=limits) as client:

        def one(seed: int) -> int:
            answer = send(
                client,
                f"Something new, number {seed}.",
                guided_json=SCHEMAS[names[seed % len(names)]],
                max_tokens=48,
                seed=seed,
                smc={"n_particles": particles},
            )
            answer.raise_for_status()
            return int(answer.json()["usage"]["completion_tokens"])

        def seeds(round_: int) -> range:
            return range(1000 * round_, 1000 * round_ + count)

        def in_turn(round_: int) -> int:
            return sum(one(seed) for seed in seeds(round_))

        def together(round_: int) -> int:
            with ThreadPoolExecutor(AT_ONCE) as threads:
                return sum(threads.map(one, seeds(round_)))

        contestants: dict[str, Callable[[int], int]] = {"one": in_turn, "together": together}
        laps = interleave(contestants, repeats=rounds)
    speed = {name: [lap.outcome / lap.seconds for lap in each] for name, each in laps.items()}
    same = all(a.outcome == b.outcome for a, b in zip(laps["one"], laps["together"], strict=True))
    return {
        "n_particles": particles,
        "requests": count,
        "tokens_per_second": {name: spread(values) for name, values in speed.items()},
        "together_to_one": ratio(speed["together"], speed["one"]),
        "same_number_of_tokens": same,
    }


def crowd(server: Server, *, clients: int, requests: int) -> dict[str, Any]:
    """What a crowd of all kinds is told."""
    kinds = ["schema"] * 10 + ["free", "huge", "cancelled", "gone", "broken", "broken"]
    chosen = random.Random(0).choices(kinds, k=requests)
    names = list(SCHEMAS)
    huge = {"enum": [f"value {i:06}" for i in range(5000)]}
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    with httpx.Client(base_url=server.url, timeout=1200, limits=limits) as client:

        def one(i: int) -> tuple[str, str]:
            kind, content = chosen[i], f"Something, number {i}."
            fields: dict[str, Any] = {"seed": i, "max_tokens": 48, "smc": {"n_particles": 2}}
            schema: Any = None
            if kind == "broken":
                fields |= list(BROKEN.values())[i % len(BROKEN)]
            elif kind == "free":
                fields |= {"n": 2}
            elif kind == "huge":
                schema = fields["guided_json"] = huge
                content = "word " * 1500
            else:
                schema = fields["guided_json"] = SCHEMAS[names[i % len(names)]]
            try:
                if kind == "gone":
                    body = {"model": "smollm2-135m", "stream": True, **fields}
                    body["messages"] = [{"role": "user", "content": content}]
                    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        next(answer.iter_lines(), None)
                    return kind, "left"
                if kind == "cancelled":
                    with httpx.Client(base_url=server.url, timeout=0.5 + i % 5) as other:
                        answer = send(other, content, **fields)
                else:
                    answer = send(client, content, **fields)
            except httpx.TimeoutException:
                return kind, "left"
            said = answer.json()
            if answer.status_code != 200:
                assert set(said["error"]) == {"message", "type", "param", "code"}, said
                return kind, f"{answer.status_code} {said['error']['code']}"
            for choice in said["choices"]:
                if choice["finish_reason"] == "stop" and schema is not None:
                    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            return kind, str(said["choices"][0]["finish_reason"])

        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            told = Counter(threads.map(one, range(requests)))
        seconds = time.perf_counter() - start
    after = server.rest()
    return {
        "clients": clients,
        "requests": requests,
        "seconds": seconds,
        "told": {f"{kind}: {what}": n for (kind, what), n in sorted(told.items())},
        "left_behind": {
            name: after[f"guided_smc_{name}"]
            for name in ("groups", "queue", "particles", "cached_tokens_reserved")
        },
        "engine_failures": after["guided_smc_engine_failures_total"],
        "memory_mib": server.memory_mib,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "serving-cpu.json")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--crowds", type=int, default=3)
    given = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    server = Server("--max-queue", "400", "--deadline", "1200")
    try:
        rounds, count = (1, 4) if given.quick else (given.rounds, AT_ONCE)
        results["throughput"] = [
            throughput(server, particles=n, count=count, rounds=rounds)
            for n in ((1,) if given.quick else (1, 4))
        ]
        _save(results, given.out)  # a crowd takes long
        sizes = {"clients": 8, "requests": 16} if given.quick else {"clients": 64, "requests": 300}
        results["memory_mib_before_crowds"] = server.memory_mib
        crowds = results["crowd"] = []
        for _ in range(1 if given.quick else given.crowds):
            crowds.append(crowd(server, **sizes))
            _save(results, given.out)
    finally:
        results["exit_code"] = server.stop()
    report(results, [_speeds(results), _crowds(results)], given.out)


def _save(results: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _speeds(results: dict[str, Any]) -> Table:
    table = Table(title="Returned tokens/s: medians over rounds (lowest and highest)")
    for name in ("N", "one at a time", f"{AT_ONCE} at once", "ratio"):
        table.add_column(name)
    for row in results["throughput"]:
        both = [row["tokens_per_second"][name] for name in ("one", "together")]
        cells = [f"{s['median']:.1f} ({s['low']:.1f} to {s['high']:.1f})" for s in both]
        gain = row["together_to_one"]
        gained = f"{gain['ratio']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"
        table.add_row(str(row["n_particles"]), *cells, gained)
    return table


def _crowds(results: dict[str, Any]) -> Table:
    before = f"{results['memory_mib_before_crowds']:.0f} MiB before"
    table = Table(title=f"Crowds, one after the other, and what they were told ({before})")
    for name in ("clients", "requests", "seconds", "told", "left behind", "MiB after"):
        table.add_column(name)
    for row in results["crowd"]:
        told = "\n".join(f"{n} × {what}" for what, n in row["told"].items())
        left = ", ".join(f"{n:g} {what}" for what, n in row["left_behind"].items())
        cells = [row["clients"], row["requests"], f"{row['seconds']:.0f}", told, left]
        table.add_row(*map(str, cells), f"{row['memory_mib']:.0f}")
    return table


if __name__ == "__main__":
    main()
