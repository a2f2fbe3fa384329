"""The live page of the viewer in a real browser, over a server as small as one can be."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browsers import Watched, chromium
from viewing import ASCII, LETTERS, node, record_of

from guided_smc import LM, StepEvent, json_schema, regex, viewer
from guided_smc.cli.records import encode
from guided_smc.records import step_record


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


class Server(ThreadingHTTPServer):
    """A server of the page and of runs, as small as one can be."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pause = 0.0
        self.key: str | None = None
        self.breaks: threading.Event | None = None  # when to break off, after a step
        self.asked: list[dict] = []
        self.gone = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._answer(200, "text/html; charset=utf-8", viewer.page().encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        key = self.server.key
        if key and self.headers["Authorization"] != f"Bearer {key}":
            told = {"error": {"message": "wrong key", "type": "invalid_request_error"}}
            return self._answer(401, "application/json", json.dumps(told).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if self.server.breaks:
            self.send_header("Content-Length", "1000000")
        self.end_headers()
        try:
            self._run(body)
        except ConnectionError:
            self.server.gone.set()
        except Exception as error:
            self._send("error", {"error": {"message": str(error)}})

    def _run(self, body):
        smc, prompt = body["smc"], body["messages"][-1]["content"]
        language = None
        if "guided_json" in body:
            language = json_schema(body["guided_json"])
        if "guided_regex" in body:
            language = regex(body["guided_regex"])
        settings = {"n_particles": smc["n_particles"], "max_tokens": body["max_tokens"]}
        settings |= {"seed": body["seed"], "output_type": language}
        self._send("start", {"n_particles": smc["n_particles"], "prompt": prompt})
        for event in LM(LETTERS).stream(prompt, **settings):
            if isinstance(event, StepEvent):
                time.sleep(self.server.pause)
                self._send("step", step_record(event.step, ASCII, event.texts))
                if self.server.breaks:
                    self.server.breaks.wait(60)
                    return
            else:
                self._send("result", record_of(event.result, prompt=prompt))

    def _send(self, name, data):
        line = encode(data).decode().rstrip("\n")
        self.wfile.write(f"event: {name}\ndata: {line}\n\n".encode())
        self.wfile.flush()

    def _answer(self, code, kind, data):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    found = Server()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def live(browser, server):
    watched = Watched(browser, viewport={"width": 1400, "height": 1000})
    watched.page.goto(server.url)
    watched.page.wait_for_selector("form")
    return watched


def fill(page, **values):
    for name, value in values.items():
        page.locator(f"[name={name}]").fill(value)


def test_a_prompt_runs_under_a_schema_from_the_editor_and_its_answer_is_shown(browser, server):
    watched = live(browser, server)
    page = watched.page
    fill(page, prompt="abc", n_particles="6", max_tokens="40")
    editor = page.locator(".cm-content")
    editor.click()
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    # As it stands there: 2^53 + 1 is no number of JavaScript's.
    schema = (
        '{"items": {"enum": [1, 2]}, "type": "array", "maxItems": 3, "default": [9007199254740993]}'
    )
    page.keyboard.insert_text(schema)
    page.get_by_role("button", name="Run").click()
    page.get_by_test_id("answer").wait_for()
    answer = json.loads(page.get_by_test_id("answer").inner_text())
    assert isinstance(answer, list) and set(answer) <= {1, 2}
    (asked,) = server.asked
    assert asked["guided_json"] == schema
    assert (asked["seed"], asked["smc"]) == (0, {"n_particles": 6})
    page.mouse.click(*node(page, 1, 2))
    assert page.locator("#particle-title").inner_text() == "Particle 2 at step 1"
    assert watched.complaints == []
    assert {url.rsplit("/", 1)[0] for url in watched.requests} <= {
        server.url,
        f"{server.url}/smc",
        "data:",
    }


def test_the_picture_grows_while_it_runs_and_a_run_can_be_cancelled(browser, server):
    server.pause = 0.05
    page = live(browser, server).page
    page.get_by_label("free text").check()
    fill(page, prompt="abc", max_tokens="200")
    page.get_by_role("button", name="Run").click()
    steps = "() => document.querySelectorAll('.facts')[0]?.innerText.match(/of (\\d+) step/)?.[1]"
    page.wait_for_function(f"() => Number(({steps})()) >= 2")
    seen = int(page.evaluate(steps))
    page.wait_for_function(f"() => Number(({steps})()) > {seen}")
    assert page.get_by_role("button", name="Run").count() == 0
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Run").wait_for()
    assert "cancelled" in page.get_by_role("alert").inner_text()
    assert server.gone.wait(10)


def test_runs_are_kept_to_be_compared(browser, server):
    page = live(browser, server).page
    page.get_by_label("pattern").check()
    for pattern in ("a{3}", "b{4}"):
        fill(page, prompt="abc", language=pattern, max_tokens="8")
        page.get_by_role("button", name="Run").click()
        page.wait_for_function(
            f"() => document.querySelector('[data-testid=answer]')?.innerText === "
            f"'{pattern[0] * int(pattern[2])}'"
        )
    assert page.locator("[id^=run-]").count() == 2
    page.locator("[id^=run-]").nth(1).click()
    assert page.get_by_test_id("answer").inner_text() == "aaa"


def test_no_key_is_taken_from_those_who_type_a_prompt(browser, server):
    page = live(browser, server).page
    page.get_by_label("free text").check()
    fill(page, prompt="", max_tokens="8")
    page.locator("[name=prompt]").press_sequentially("abc")
    page.keyboard.press("Control+Enter")
    page.get_by_test_id("answer").wait_for()
    page.keyboard.press("Home")
    title = page.locator("#particle-title")
    start = title.inner_text()
    page.locator("[name=prompt]").press_sequentially("wa?")
    assert page.locator("[name=prompt]").input_value() == "wa?abc"
    page.get_by_label("JSON schema").check()
    page.keyboard.press("ArrowLeft")  # among the kinds of answers
    assert page.get_by_label("free text").is_checked()
    page.keyboard.press("ArrowRight")
    page.locator(".cm-content").click()
    page.keyboard.press("Control+Home")
    page.keyboard.type("aw?")
    page.keyboard.press("Home")
    page.keyboard.type("a")
    assert page.locator(".cm-line").first.inner_text() == "aaw?{"
    assert title.inner_text() == start
    assert page.get_by_role("dialog").count() == 0


def test_what_the_server_refuses_is_said(browser, server):
    server.key = "secret"
    page = live(browser, server).page
    status = page.locator(".go [role=status]")
    fill(page, prompt="abc", key="guess")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("does not accept this API key").wait_for()
    assert page.evaluate("() => document.activeElement.name") == "key"
    fill(page, key="secret")
    page.get_by_label("pattern").check()
    fill(page, language="(", max_tokens="8")
    page.keyboard.press("Control+Enter")
    page.wait_for_function("() => document.querySelector('.go .error')?.innerText.includes('(')")
    assert "API key" not in status.inner_text()
    page.get_by_label("JSON schema").check()
    page.locator(".cm-content").click()
    page.keyboard.press("Control+End")
    page.keyboard.type("}")
    asked = len(server.asked)
    page.get_by_role("button", name="Run").click()
    page.get_by_text("the schema is no JSON").wait_for()
    assert len(server.asked) == asked


def test_a_server_that_goes_away_is_said_and_the_page_stays_usable(browser, server):
    server.breaks = threading.Event()
    page = live(browser, server).page
    page.get_by_label("free text").check()
    fill(page, prompt="abc", max_tokens="8")
    page.get_by_role("button", name="Run").click()
    page.locator(".go").get_by_text("are still growing").wait_for()  # what had not arrived is lost
    server.breaks.set()
    page.locator(".go").get_by_text("the connection to the server broke off").wait_for()
    assert "broke off" in page.get_by_role("alert").inner_text()
    assert "growing when the run broke off" in page.get_by_test_id("fate").inner_text()
    server.breaks = None
    page.get_by_role("button", name="Run").click()
    page.get_by_test_id("answer").wait_for()
    assert page.locator(".go .error").count() == 0
    server.shutdown()
    server.server_close()
    page.get_by_role("button", name="Run").click()
    page.get_by_text("the server cannot be reached").wait_for()


def test_what_cannot_be_asked_is_said_in_the_page_before_it_is_sent(browser, server):
    page = live(browser, server).page
    said = page.locator(".go .error")
    page.get_by_label("pattern").check()
    for field, value, told in [
        ("n_particles", "many", "particles: “many” is no number"),
        ("block_size", "x", "block size: “x” is no number"),
        ("seed", "9007199254740993", "is more than this page can send exactly"),
        ("key", "schlüssel’", "characters that no key has"),
    ]:
        before = page.locator(f"[name={field}]").input_value()
        fill(page, **{field: value})
        page.get_by_role("button", name="Run").click()
        page.locator(".go").get_by_text(told).wait_for()
        assert page.evaluate("() => document.activeElement.name") == field
        fill(page, **{field: before})
    page.get_by_label("JSON schema").check()
    for text, told in [("", "the schema is empty"), ("[1]", "a schema is an object")]:
        page.locator(".cm-content").click()
        page.keyboard.press("Control+a")
        page.keyboard.press("Delete")
        page.keyboard.insert_text(text)
        page.get_by_role("button", name="Run").click()
        page.locator(".go").get_by_text(told).wait_for()
    assert said.count() == 1
    assert server.asked == []
