"""The live page over the real server."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest
from browsers import Watched, chromium

from guided_smc import LM, Vocabulary
from guided_smc.models.table import TableModel

server = pytest.importorskip("guided_smc.server", reason="the server is not there")
uvicorn = pytest.importorskip("uvicorn", reason="pip install 'guided-smc[server]'")

ASCII = Vocabulary([*(bytes([c]) for c in (10, *range(32, 127))), b""], eos_ids=[96])
LETTERS = TableModel.random(ASCII, seed=3, eos_probability=0.02)


class Plain:
    """The last message, letter by letter."""

    def encode(self, prompt, **_):
        messages = isinstance(prompt, list) and isinstance(prompt[0], dict)
        return LETTERS.encode(prompt[-1]["content"] if messages else prompt)


@contextlib.contextmanager
def serving(**settings):
    app = server.create_app(LM(LETTERS, encoder=Plain()), server.Settings(**settings))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        running.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def test_the_server_shows_the_page_and_runs_its_prompts(browser):
    with serving(api_keys=["secret"]) as url:
        watched = Watched(browser, viewport={"width": 1400, "height": 1000})
        page = watched.page
        page.goto(url)
        page.locator("[name=prompt]").fill("abc")
        page.locator("[name=max_tokens]").fill("40")
        page.locator(".cm-content").click()
        page.keyboard.press("Control+a")
        page.keyboard.press("Delete")
        page.keyboard.insert_text('{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}')
        page.get_by_role("button", name="Run").click()
        page.get_by_text("API key").last.wait_for()
        page.wait_for_function("() => document.querySelector('.go .error')?.innerText")
        page.locator("[name=key]").fill("secret")
        page.get_by_role("button", name="Run").click()
        page.get_by_test_id("answer").wait_for()
        assert set(json.loads(page.get_by_test_id("answer").inner_text())) <= {1, 2}
        page.locator("[id^=slot-]").nth(3).click()
        assert page.locator("#particle-title").inner_text().startswith("Particle 3 at step")
        assert page.get_by_test_id("text").inner_text()

        page.get_by_label("Lark grammar").check()
        page.locator("[name=language]").fill("start: (")
        page.get_by_role("button", name="Run").click()
        page.wait_for_function(
            "() => document.querySelector('.go .error')?.innerText.includes('grammar')"
        )
        refused = [c for c in watched.complaints if "Failed to load resource" not in c]
        assert refused == []
        assert {r for r in watched.requests if not r.startswith("data:")} == {
            f"{url}/",
            f"{url}/smc/run",
        }
