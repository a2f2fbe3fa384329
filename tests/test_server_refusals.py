"""What the endpoints refuse, and how: over a table in this process."""

import json
import socket
import time

import pytest
from server_support import (
    TOOL,
    USER,
    chat,
    events,
    refused,
    table_client,
    table_lm,
    table_server,
)

from guided_smc.errors import ConstraintError
from guided_smc.grammars import Limits
from guided_smc.grammars.finishing import Finishing
from guided_smc.rewards import length
from guided_smc.server.compiling import Allowance
from guided_smc.server.errors import too_late


@pytest.fixture(scope="module")
def client():
    rewards = {"long": length(6)}
    with table_client(rewards=rewards, max_tokens=40, max_schema_seconds=2.0) as made:
        yield made


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"smc": {"particles": 3}}, "smc.particles"),
        ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, "messages[0].mood"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
         "tool_choice.allowed_tools"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": []}, "functions"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"min_tokens": 3}, "min_tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_is_not_supported_is_refused_by_name(client, fields, param):
    error = refused(chat(client, **fields), 400, param=param, code="unsupported_field")
    assert param in error["message"]


def test_of_a_field_that_is_not_supported_the_values_that_may_be_sent_are_told(client):
    error = refused(chat(client, presence_penalty=0.5), 400, code="unsupported_field")
    assert error["message"].endswith("only what changes nothing may be sent: 0 or null")
    error = refused(chat(client, foo=0.5), 400, code="unsupported_field")
    assert error["message"] == "the field 'foo' is not supported"


def test_a_field_that_changes_nothing_may_be_sent(client):
    neutral = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "top_logprobs": None,
        "logit_bias": {},
        "store": False,
        "modalities": ["text"],
        "tools": [],
        "user": "me",
        "service_tier": "auto",
        "seed": 2**63 - 1,
        "response_format": {"type": "text"},
    }
    assert chat(client, max_tokens=2, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'king'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "needs it"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]},
         "messages[0].tool_call_id", "belongs to messages of tools"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
         "messages[0].tool_calls", "belong to messages of the assistant"),
        ({"messages": [*USER, {"role": "user", "content": "x", "name": "Al"}]},
         "messages[1].name", "say in the content who speaks"),
        ({"temperature": -1}, "temperature", "greater than or equal"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"max_tokens": 0}, "max_tokens", "greater than 0"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "send one"),
        ({"n": 0}, "n", "greater than or equal"),
        ({"n": 17}, "n", "17 answers"),
        ({"seed": -1}, "seed", "greater than or equal"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": ["a"], "guided_regex": "a"}, "stop", "stop strings cannot be used"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "exclude each other"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"smc": {"method": "best_of_n"}}, "smc.method", "needs smc.reward"),
        ({"smc": {"method": "token_masking"}}, "smc.method", "needs a constraint"),
        ({"smc": {"n_particles": 4, "islands": 3}}, "smc.islands", "evenly"),
        ({"smc": {"n_particles": 33}}, "smc.n_particles", "allows (32)"),
        ({"smc": {"block_size": 2}}, "smc.block_size", "no draft (its option --draft)"),
        ({"smc": {"draft_temperature": 1.0}}, "smc.draft_temperature", "(its option --draft)"),
        ({"smc": {"max_restarts": 1}, "stream": True}, "smc.max_restarts", "cannot start again"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"97": 101}}, "logit_bias", "-100 to 100"),
        ({"max_tokens": 10**6}, "max_tokens", "tokens of K/V, and the server has room for 65536"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls", "needs tools"),
        ({"tools": [TOOL, TOOL]}, "tools", "two are named 'light'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice", "no tool 'x'"),
        ({"tools": [TOOL], "guided_regex": "a"}, "tools", "exclude each other"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        ({"guided_regex": "(unclosed"}, "guided_regex", "unclosed"),
        ({"guided_regex": "(?=a)b|(?<!x)c"}, "guided_regex", ""),
        ({"guided_choice": []}, "guided_choice", "nothing to choose"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
         "response_format.json_schema.name", "pattern"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_field_and_the_reason(client, fields, param, said):
    refused(chat(client, **fields), 400, param=param, said=said)


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        ("/v1/completions", {"prompt": []}, "prompt", "invalid_prompt"),
        ("/v1/completions", {"prompt": [97, 300]}, "prompt", "invalid_prompt"),
        ("/v1/completions", {"prompt": "x" * 65}, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x" * 60}, "max_tokens", "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 65}]},
         "messages", "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": USER, "max_completion_tokens": 63},
         "max_completion_tokens", "context_length_exceeded"),
        ("/smc/run", {"prompt": "x" * 65}, "prompt", "context_length_exceeded"),
        ("/smc/run", {}, "prompt", "invalid_value"),
        ("/smc/run", {"prompt": "x", "messages": USER}, "prompt", "invalid_value"),
    ],
    ids=str,
)  # fmt: skip
def test_a_prompt_is_blamed_under_the_name_that_it_has(path, fields, param, code):
    lm = table_lm()
    lm.model.context_length = 64
    with table_client(lm) as small:
        response = small.post(path, json={"model": "table", **fields})
    refused(response, 400, param=param, code=code)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "[ab]{9}"}, "guided_regex"),
        ({"guided_choice": ["a" * 9]}, "guided_choice"),
        ({"structured_outputs": {"regex": "[ab]{9}"}}, "structured_outputs"),
    ],
    ids=str,
)
def test_a_constraint_that_fails_after_it_was_compiled_is_blamed_by_its_field(
    client, fields, param
):
    error = refused(chat(client, max_tokens=3, **fields), 400, code="invalid_constraint")
    assert error["param"] == param and "the shortest text has 9 tokens" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_fails_in_a_run_is_blamed_by_its_field(client, monkeypatch, stream):
    def fails(self, states, bitmask):
        raise ConstraintError("it cannot go on")

    monkeypatch.setattr(Finishing, "fill_masks", fails)
    response = chat(client, guided_regex="[pq]{3}", stream=stream)
    error = events(response.text)[-2][1]["error"] if stream else refused(response, 400)
    assert error["param"] == "guided_regex" and error["message"] == "it cannot go on"


BOMBS = {
    "deep": ("guided_json", json.loads('{"items":' * 300 + "{}" + "}" * 300)),
    "huge enum": ("guided_json", {"enum": [f"value {i:09}" for i in range(40_000)]}),
    "exponential regex": ("guided_regex", "(.*a.{40}b.*|c){60}" * 40),
    "slow to end": ("guided_regex", "[^a]*(a[^b]*b){0,400}(c|d[^e]{300})"),
    "endless reference": ("guided_json", {"$ref": "#"}),
    "no base case": (
        "guided_json",
        {
            "type": "object",
            "properties": {"next": {"$ref": "#"}},
            "required": ["next"],
            "additionalProperties": False,
        },
    ),
    "broken pattern": ("guided_json", {"type": "string", "pattern": "("}),
    "endless grammar": ("guided_grammar", 'start: "a" start'),
    "no schema": ("guided_json", {"type": "nope"}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_that_is_a_bomb_or_broken_is_refused_in_time(client, name):
    field, value = BOMBS[name]
    error = refused(chat(client, **{field: value}), 400, param=field)
    # Which of both it is for what is wide and deep depends on the machine.
    bomb = ["constraint_too_slow"] if name in ("exponential regex", "slow to end") else []
    assert error["code"] in ("invalid_constraint", "unsupported_constraint", *bomb)
    if error["code"] != "constraint_too_slow":
        # It is remembered: the second time costs nothing.
        assert refused(chat(client, **{field: value}), 400) == error


def test_all_schemas_of_a_request_together_keep_to_the_time_limit():
    def function(i):
        wide = {f"p{i}_{j}": {"type": "string", "pattern": f"[a-z]{{1,{30 + j}}}(x|y{i})+"}
                for j in range(40)}  # fmt: skip
        return {"name": f"f{i}", "parameters": {"type": "object", "properties": wide}}

    many = [{"type": "function", "function": function(i)} for i in range(60)]
    with table_client(max_schema_seconds=0.5) as other:
        began = time.monotonic()
        error = refused(chat(other, tools=many), 400, param="tools", code="constraint_too_slow")
        assert time.monotonic() - began < 3, "one alone takes about a tenth of a second, twice"
        assert "more than the limit of 0.5 seconds" in error["message"]


def test_what_cannot_be_ended_here_gets_as_much_time_as_it_may_take_in_the_worker():
    allowance = Allowance(Limits.untrusted(max_compile_seconds=0.4))
    first = allowance.limits.max_compile_seconds
    assert 0.1 < first <= 0.2
    time.sleep(0.1)
    assert allowance.limits.max_compile_seconds <= first - 0.05
    time.sleep(0.3)
    with pytest.raises(ConstraintError, match=r"limit of 0\.4 seconds"):
        _ = allowance.limits


def post(client, body, content_type="application/json", path="/v1/chat/completions"):
    headers = {} if content_type is None else {"content-type": content_type}
    return client.post(path, content=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "line 1, column 2: expecting property name"),
        (b'{"a": 1,\n "b": }', "line 2, column 7: expecting value"),
        (b"nonsense", "line 1, column 1"),
        (b'{"temperature": NaN}', "NaN is no number of JSON"),
        (b'{"messages": "\xff"}', "byte 0xff at offset 14"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"guided_json": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "thousands of digits"),
        (b"[]", "is an array"),
        (b"3", "is a number"),
        (b'"x"', "is a string"),
        (b"true", "is a boolean"),
        (b"null", "is null"),
        (b'{"max_tokens": 2, "n": 1, "max_tokens": 3}', "the key 'max_tokens' twice"),
        (b'{"guided_json": {"enum": [1], "enum": [2]}}', "the key 'enum' twice"),
    ],
    ids=lambda value: repr(value)[:24],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/smc/run"])
def test_what_is_no_json_object_is_refused_in_our_own_words(client, path, body, said):
    error = refused(post(client, body, path=path), 400, code="invalid_json", said=said)
    assert error["message"].startswith("the body ") and error["param"] is None


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None],
)
def test_what_does_not_say_that_it_is_json_is_refused(client, content_type):
    sent = json.dumps({"model": "table", "messages": USER, "max_tokens": 2}).encode()
    error = refused(post(client, sent, content_type), 415, code="unsupported_media_type")
    assert "Content-Type: application/json" in error["message"]
    assert (content_type or "there is no Content-Type") in error["message"]
    for fits in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert post(client, sent, fits).status_code == 200


def test_half_a_surrogate_pair_is_refused_or_told_back(client):
    for body in (
        b'{"model": "table", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "table", "messages": [], "\\ud800": 1}',
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "table", "messages": [{"role": "user", "content": "x"}], '
        b'"guided_json": {"enum": ["\\ud800"]}}',
    ):
        response = client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        refused(response, 404 if b'"model": "\\ud800' in body else 400)


def test_unknown_models_pages_and_methods_are_told_in_the_same_shape(client):
    refused(chat(client, model="gpt-4"), 404, param="model", code="model_not_found")
    refused(client.get("/v1/models/gpt-4"), 404, code="model_not_found")
    refused(client.get("/v1/nowhere"), 404, code="not_found")
    refused(client.get("/v1/chat/completions"), 405, code="method_not_allowed")
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["table"]
    assert client.get("/v1/models/table").json()["id"] == "table"


def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so():
    with table_client(max_body_bytes=1000) as client:
        big = json.dumps({"model": "table", "messages": USER, "user": "x" * 2000}).encode()
        headers = {"content-type": "application/json"}
        refused(client.post("/v1/chat/completions", content=big, headers=headers), 413)
        pieces = (big[i : i + 500] for i in range(0, len(big), 500))
        refused(client.post("/v1/chat/completions", content=pieces, headers=headers), 413)


def test_a_key_is_asked_for_where_there_is_one():
    with table_client(api_keys="first,second") as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}):
            response = client.get("/v1/models", headers=headers)
            refused(response, 401, code="invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            sent = {"authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=sent).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/healthz").status_code == 200


def test_requests_have_an_id_that_is_sent_back(client):
    given = client.get("/healthz", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    forged = client.get("/healthz", headers={"x-request-id": "a b\tc"})
    assert len(forged.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.3, "0.3 s"), (1 / 3, "0.333 s"), (1e-9, "1e-09 s"), (0.02, "0.02 s")]
)
def test_the_deadline_of_a_request_is_told_as_it_was_set(client, monkeypatch, seconds, told):
    # Whether it passes before or after the request has joined the queue.
    monkeypatch.setattr(client.server.engine, "_admit", lambda: None)
    error = refused(chat(client, smc={"deadline": seconds}), 504, code="deadline_exceeded")
    assert error["type"] == "timeout_error"
    began, waited = f"took longer than {told};", f"waited for others until its deadline of {told};"
    assert began in error["message"] or waited in error["message"]


def test_long_deadlines_are_told_in_whole_seconds():
    assert "longer than 1800 s;" in too_late(1800.4).message


def test_messages_to_a_model_without_a_chat_template_are_refused_with_what_to_send_instead():
    lm = table_lm()
    lm.encoder.has_chat_template = False
    with table_client(lm) as other:
        error = refused(chat(other), 400, param="messages", code="invalid_prompt")
        assert "/v1/completions" in error["message"]


def test_no_error_speaks_of_the_python_library_to_a_client(client, monkeypatch):
    """Limits that the library would raise by an argument are the operator's here."""
    sleeping = ConstraintError("it takes too much; simplify it", limit="max_compile_memory")
    assert "raise max_compile_memory of `limits`" in str(sleeping)

    def fails(*_, **__):
        raise sleeping

    monkeypatch.setattr("guided_smc.server.compiling.regex", fails)
    error = refused(chat(client, guided_regex="never seen"), 400, param="guided_regex")
    assert error["message"] == "it takes too much; simplify it"


def test_an_answer_that_is_cut_says_so_and_one_that_cannot_be_is_an_error(client):
    cut = chat(client, guided_grammar='start: /[a-z]+/ "THE END"', max_tokens=5, seed=1).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["choices"][0]["smc"]["log_evidence"] is None
    never = chat(client, guided_grammar='start: /[ab]+/ "END"', max_tokens=3)
    error = refused(never, 400, code="invalid_constraint", param="guided_grammar")
    assert "max_tokens=3 is too small" in error["message"]
    banned = {str(b): -100 for b in range(256)}
    dead = chat(client, guided_regex="abc", logit_bias=banned, top_k=1)
    error = refused(dead, 422, code="failed")
    assert error["type"] == "no_valid_output"


def test_what_is_refused_blames_the_field_of_whoever_asks(client):
    """Also where it is remembered from somebody who had it in another field."""
    endless = {"$ref": "#"}
    for fields, param in [
        ({"guided_json": endless}, "guided_json"),
        ({"structured_outputs": {"json": endless}}, "structured_outputs"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": endless, "strict": True},
                }
            },
            "response_format",
        ),
    ]:
        refused(chat(client, **fields), 400, param=param, code="invalid_constraint")


def test_what_took_too_long_to_compile_may_be_sent_again(client, monkeypatch):
    real = Allowance.limits
    monkeypatch.setattr(Allowance, "limits", property(lambda self: self._raise()), raising=True)
    monkeypatch.setattr(
        Allowance, "_raise", lambda self: (_ for _ in ()).throw(self.spent()), raising=False
    )
    asked = {"guided_regex": "sent [a-c] twice"}
    error = refused(chat(client, **asked), 400, param="guided_regex", code="constraint_too_slow")
    assert "try again when the server has less to do" in error["message"]
    monkeypatch.setattr(Allowance, "limits", real)
    assert chat(client, **asked).status_code == 200


def test_an_answer_of_a_tool_has_to_be_to_a_call(client):
    messages = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "1"},
    ]
    error = refused(chat(client, messages=messages), 400, param="messages[2].tool_call_id")
    assert "no message before has made a call 'c2'" in error["message"]
    messages[2]["tool_call_id"] = "c1"
    assert chat(client, messages=messages, max_tokens=2).status_code == 200


def test_a_client_that_stops_in_its_body_is_told_and_let_go():
    with table_server(receive_timeout=0.3) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
            said = b"".join(iter(lambda: client.recv(65536), b""))
    assert said.startswith(b"HTTP/1.1 408 ") and b"slow_sender" in said
