"""Servers for tests: one in this process over a table, and a real one in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

from guided_smc import LM, TableModel, Vocabulary

BYTES = Vocabulary([bytes([b]) for b in range(256)] + [b""], eos_ids=[256])


USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "light",
        "description": "Switches the light.",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


class ChatTable(TableModel):
    """A table over bytes that takes messages: their contents, one after the other."""

    def encode(self, prompt, *, chat=None):
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = "".join(message["content"] for message in prompt) or "?"
        return super().encode(prompt)


def table_lm() -> LM:
    """Random texts over all bytes, the same for the same prompt."""
    model = ChatTable.random(BYTES, seed=3, eos_probability=0.02)
    model.name = "table"
    return LM(model)


@contextlib.contextmanager
def table_client(lm=None, *, rewards=None, headers=None, **settings) -> Iterator:
    """A client of an application in this process."""
    from starlette.testclient import TestClient

    from guided_smc.server import Settings, create_app

    settings = {"n_particles": 2, "max_tokens": 8, **settings}
    app = create_app(lm or table_lm(), Settings(**settings), rewards)
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        client.server = app.state.server
        yield client


def chat(client, **fields):
    return client.post("/v1/chat/completions", json={"model": "table", "messages": USER, **fields})


def refused(response, status, *, param=None, code=None, said=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code
    if said is not None:
        assert said in error["message"]
    return error


@contextlib.contextmanager
def table_server(**settings) -> Iterator[str]:
    """The address of a server over a table, in a thread of this process."""
    import uvicorn

    from guided_smc.server import Settings, create_app
    from guided_smc.server.serving import uvicorn_config

    made = Settings(port=0, **settings)
    server = uvicorn.Server(uvicorn_config(create_app(table_lm(), made), made))
    thread = threading.Thread(target=server.run)
    thread.start()
    until = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.02)
    (listener,) = server.servers
    (socket,) = listener.sockets
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


def read_metrics(url: str, key: str = "") -> dict[str, float]:
    """By name and labels."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=headers)) as said:
        lines = said.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def wait_idle(url: str, key: str = "", seconds: float = 60.0) -> dict[str, float]:
    """The metrics, once nothing runs or waits."""
    until = time.monotonic() + seconds
    while True:
        metrics = read_metrics(url, key)
        if not metrics["guided_smc_groups"] and not metrics["guided_smc_queue"]:
            return metrics
        assert time.monotonic() < until, "it does not come to rest"
        time.sleep(0.05)


def events(text: str) -> list:
    """The events of a stream: `(name, data)` each, the last of OpenAI's as it is."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" in lines:
            said = lines["data"]
            found.append((lines.get("event"), said if said == "[DONE]" else json.loads(said)))
    return found


class Process:
    """`guided-smc serve` on a free port of the loopback."""

    def __init__(self, *arguments: str, model: str = "smollm2-135m", **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "guided_smc.cli", "serve", model, "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[dict] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._listening.wait(180) or not self.url:
            self.kill()
            raise AssertionError(f"the server did not start: {self.lines}")

    url = ""

    def _read(self) -> None:
        for line in self._process.stderr:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.lines.append({"message": line})
            if self.lines[-1]["message"] == "listening":
                self.url = self.lines[-1]["url"]
                self._listening.set()
        self._listening.set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float = 60.0) -> int:
        return self._process.wait(seconds)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error) -> None:
        if self._process.poll() is None:
            self.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(10)
        self._process.stderr.close()
