"""Clients that go away, never read, or come while the server stops: over a table, by sockets."""

import json
import socket
import time

import httpx
import pytest
from server_support import read_metrics, table_server, wait_idle

LONG = {
    "model": "table",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 1500,
    "smc": {"n_particles": 8},
    "logit_bias": {"256": -100},
}
"""About a second and more."""


@pytest.fixture(scope="module")
def url():
    with table_server(send_timeout=0.5, max_total_tokens=200_000) as made:
        yield made


def cancelled(url, reason):
    return read_metrics(url).get(f'guided_smc_cancelled_total{{reason="{reason}"}}', 0.0)


def wait_for(what):
    until = time.monotonic() + 40
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def test_a_client_that_goes_away_is_cancelled_whether_it_waits_or_streams(url):
    before = cancelled(url, "gone")
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/v1/chat/completions", json=LONG, timeout=0.2)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**LONG, "stream": True}) as said:
        next(said.iter_lines())
    wait_for(lambda: cancelled(url, "gone") == before + 2)
    metrics = wait_idle(url)
    assert metrics["guided_smc_particles"] == 0
    assert metrics["guided_smc_cached_tokens_reserved"] == 0


@pytest.mark.parametrize("path", ["/smc/run", "/v1/chat/completions"])
def test_a_client_that_never_reads_is_cut_off(url, path):
    before = cancelled(url, "slow_reader")
    host, port = url.removeprefix("http://").split(":")
    asked = {**LONG, "n": 12, "stream": True, "smc": {"n_particles": 4}}
    if path == "/smc/run":
        asked = {k: v for k, v in LONG.items()}
    body = json.dumps(asked).encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect((host, int(port)))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        deaf.sendall(head.encode() + body)
        if path == "/smc/run":
            wait_for(lambda: cancelled(url, "slow_reader") == before + 1)
            deaf.settimeout(20)
            rest = b"".join(iter(lambda: deaf.recv(1 << 20), b""))
            assert b"event: step" in rest and b"event: result" not in rest
        else:
            # Nothing piles up for it: of a text only the newest state is kept.
            time.sleep(1.0)
    assert wait_idle(url)["guided_smc_particles"] == 0


def test_a_run_that_nobody_reads_ends_long_before_its_last_step(url):
    asked = {**LONG, "max_tokens": 12_000, "smc": {"n_particles": 4}}
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({k: v for k, v in asked.items() if k != "model"}).encode()
    before = read_metrics(url)["guided_smc_step_seconds_count"]
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect((host, int(port)))
        head = "POST /smc/run HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: read_metrics(url)["guided_smc_groups"] == 1)
        assert wait_idle(url)["guided_smc_step_seconds_count"] - before < 11_000


def test_others_are_served_while_one_does_not_read(url):
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    with socket.socket() as deaf:
        deaf.connect((host, int(port)))
        head = "POST /smc/run HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        short = {**LONG, "max_tokens": 3}
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/chat/completions", json=short, timeout=30)
            assert answer.status_code == 200


def test_a_full_queue_is_429_with_a_time_to_come_back():
    long = {**LONG, "max_tokens": 4000, "stream": True}
    waiting = {**LONG, "n": 2, "max_tokens": 2, "stream": True}
    with (
        table_server(max_rows=8, max_queue=2, max_total_tokens=200_000) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=long) as running,
    ):
        lines = running.iter_lines()  # kept: to drop it closes the stream
        assert next(lines)
        wait_for(lambda: read_metrics(url)["guided_smc_groups"] == 1)
        with client.stream("POST", "/v1/chat/completions", json=waiting) as second:
            assert second.status_code == 200
            refused = client.post("/v1/chat/completions", json={**LONG, "max_tokens": 2})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
