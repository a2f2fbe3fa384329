"""The real server on the small model, with the clients that people use."""

import json
import os
import re
import runpy
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from server_support import Process, wait_idle

pytestmark = pytest.mark.model

GUIDE = (Path(__file__).parents[1] / "docs" / "server.md").read_text()
MODEL = "smollm2-135m"
SAILOR = [{"role": "user", "content": "Invent a sailor, as JSON with name and age."}]


class Sailor(BaseModel):
    name: str = Field(max_length=16)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def server():
    with Process("--n-particles", "2", "--reward", "brief=length:20", GUIDED_SMC_MAX_TOKENS="48",
                 GUIDED_SMC_API_KEYS="secret") as made:  # fmt: skip
        yield made


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def test_the_openai_client_gets_chats_and_models(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Name a colour."}], seed=1, max_tokens=8
    )
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.smc["seed"] == 1
    assert [model.id for model in client.models.list()] == [MODEL]


def test_the_openai_client_parses_into_a_pydantic_model(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=SAILOR, response_format=Sailor, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Sailor)


def test_the_openai_client_calls_tools_that_are_pydantic_models(client):
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=SAILOR,
        tools=[openai.pydantic_function_tool(Sailor)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
        max_tokens=64,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Sailor)


def test_the_openai_client_streams(client):
    with client.chat.completions.stream(
        model=MODEL, messages=SAILOR, response_format=Sailor, seed=1, logprobs=True
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()
    assert "".join(deltas) == answer.choices[0].message.content
    assert len(deltas) > 1
    assert isinstance(answer.choices[0].message.parsed, Sailor)
    tokens = "".join(t.token for t in answer.choices[0].logprobs.content)
    assert tokens == answer.choices[0].message.content


def test_the_openai_client_streams_calls(client):
    with client.chat.completions.stream(
        model=MODEL, messages=SAILOR, tools=[openai.pydantic_function_tool(Sailor)], seed=1,
        tool_choice="required", parallel_tool_calls=False, max_tokens=64,
    ) as stream:  # fmt: skip
        answer = stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls
    Sailor.model_validate_json(call.function.arguments)


def test_the_openai_client_completes_texts(client):
    answer = client.completions.create(
        model=MODEL, prompt=["Once upon", "In the"], n=2, max_tokens=4, seed=1, logprobs=0
    )
    assert len(answer.choices) == 4
    assert all(len(c.logprobs.tokens) <= 4 for c in answer.choices)


@pytest.mark.parametrize(
    ("sent", "error", "code"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found"),
        ({"top_logprobs": 3}, openai.BadRequestError, "unsupported_field"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "context_length_exceeded"),
        ({"extra_body": {"guided_regex": "("}}, openai.BadRequestError, "invalid_constraint"),
        ({"extra_body": {"guided_regex": "abc", "logit_bias": {"28": 1}, "top_k": 1,
          "guided_choice": ["a"]}}, openai.BadRequestError, "conflict"),
        ({"extra_body": {"smc": {"deadline": 0.01}}, "max_tokens": 48},
         openai.InternalServerError, "deadline_exceeded"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_the_openai_client_knows_every_error_by_its_type(client, sent, error, code):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": SAILOR, **sent})
    assert raised.value.body["code"] == code


def test_a_wrong_key_is_an_authentication_error(server):
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor_gets_its_models(client, mode):
    instructor = pytest.importorskip("instructor")
    patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    made = patched.chat.completions.create(
        model=MODEL, messages=SAILOR, response_model=Sailor, seed=1, max_retries=1, max_tokens=80
    )
    assert isinstance(made, Sailor)


SCHEMAS = [
    {"type": "object", "properties": {"mood": {"enum": ["happy", "sad"]}}, "required": ["mood"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
    {"type": "boolean"},
]  # fmt: skip


def ask(client, schema, seed, **sent):
    body = {"guided_json": schema, **sent}
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": f"Something, number {seed}."}],
        seed=seed, max_tokens=24, extra_body=body,
    )  # fmt: skip


def test_a_seed_gives_the_same_text_whoever_shares_the_batch(server, client):
    alone = ask(client, SCHEMAS[2], 5).choices[0]
    with ThreadPoolExecutor(16) as threads:
        asked = [
            threads.submit(
                ask, client, SCHEMAS[2] if i == 7 else SCHEMAS[i % 4], 5 if i == 7 else i
            )
            for i in range(16)
        ]
        together = asked[7].result().choices[0]
        answers = [one.result() for one in asked]
    assert together.message.content == alone.message.content
    assert together.smc["log_evidence"] == pytest.approx(alone.smc["log_evidence"], abs=1e-3)
    for i, answer in enumerate(answers):
        if i != 7 and answer.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMAS[i % 4])


def test_log_lines_are_json_and_carry_the_id_of_the_request(server, client):
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=SAILOR, max_tokens=2, user="tester"
    )
    number = answer.headers["x-request-id"]
    until = time.monotonic() + 10
    while not (mine := [x for x in server.lines if x.get("request_id") == number]):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert mine[-1]["status"] == 200 and mine[-1]["user"] == "tester"
    assert mine[-1]["path"] == "/v1/chat/completions"


def test_a_crowd_of_all_kinds_gets_valid_answers_or_typed_errors_and_leaves_nothing(server, client):
    """A small version of benchmarks/serving.py."""

    def one(i):
        kind = i % 6
        try:
            if kind == 4:
                ask(client, {"type": "nonsense"}, i)
                return "accepted"
            if kind == 5:
                ask(client.with_options(timeout=0.3), SCHEMAS[0], i, smc={"n_particles": 8})
                return "fast"
            answer = ask(client, SCHEMAS[kind], i).choices[0]
        except openai.BadRequestError as error:
            return error.body["code"]
        except openai.APITimeoutError:
            return "cancelled"
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content), SCHEMAS[kind])
        return answer.finish_reason

    with ThreadPoolExecutor(24) as threads:
        told = list(threads.map(one, range(48)))
    assert {told[i] for i in range(4, 48, 6)} == {"invalid_constraint"}
    assert {told[i] for i in range(5, 48, 6)} <= {"cancelled", "fast"}
    assert {t for i, t in enumerate(told) if i % 6 < 4} <= {"stop", "length"}
    metrics = wait_idle(server.url, "secret")
    assert metrics["guided_smc_particles"] == 0
    assert metrics["guided_smc_cached_tokens_reserved"] == 0
    assert metrics["guided_smc_engine_failures_total"] == 0


def test_the_snippets_of_the_guide_run_in_order(server, tmp_path, capsys):
    script = "\n".join(re.findall(r"^```python\n(.*?)^```", GUIDE, flags=re.M | re.S))
    assert "http://127.0.0.1:8000" in script
    script = script.replace("http://127.0.0.1:8000", server.url)
    script = script.replace('api_key="none"', 'api_key="secret"')
    (tmp_path / "snippets.py").write_text(script)
    made = runpy.run_path(str(tmp_path / "snippets.py"))
    shown = capsys.readouterr().out.splitlines()
    assert "8" in shown and "weather" in made["call"].name
    assert isinstance(made["answer"].choices[0].message.tool_calls, list)


def test_the_page_is_shown(server):
    with urllib.request.urlopen(f"{server.url}/") as page:
        text = page.read().decode()
    assert page.headers["content-type"].startswith("text/html")
    assert '<script type="application/json" id="records">null</script>' in text


ENDLESS = {"messages": SAILOR, "stream": True, "seed": 1, "logit_bias": {"2": -100, "0": -100}}


def test_a_server_that_is_killed_gives_its_clients_clean_errors_and_leaves_no_workers():
    with Process() as server:
        own = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        stream = own.chat.completions.create(model=MODEL, max_tokens=2000, **ENDLESS)
        next(stream)
        workers = _children(server.pid)
        failed = []

        def read():
            try:
                list(stream)
            except Exception as error:
                failed.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        server.kill()
        reader.join(20)
        assert not reader.is_alive(), "the client hangs"
        assert len(failed) == 1, "the client took a torn stream for a whole one"
        with pytest.raises(openai.APIConnectionError):
            own.models.list()
        until = time.monotonic() + 20
        while any(_alive(pid) for pid in workers):
            assert time.monotonic() < until, "workers outlive the server"
            time.sleep(0.05)


def test_a_server_that_is_asked_to_stop_finishes_what_runs(server, client):
    """The last test, since the others need the server."""
    stream = client.chat.completions.create(model=MODEL, max_tokens=30, **ENDLESS)
    # What waits is refused; this runs once it has said something.
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    server.terminate()
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].choices[0].smc["steps"] == 30
    assert server.wait(60) == 0


def _children(pid):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    if stat.read().rsplit(")", 1)[1].split()[1] == str(pid):
                        found.append(int(name))
            except OSError:
                continue
    return found


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
