"""What the endpoints take and answer, over a table in this process."""

import json
import math

import jsonschema
import pytest
from server_support import TOOL, USER, chat, events, refused, table_client, table_lm

from guided_smc import LM
from guided_smc.rewards import length
from guided_smc.server.requests import find_spec

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client():
    rewards = {"long": length(6)}
    with table_client(rewards=rewards, max_tokens=40, max_schema_seconds=2.0) as made:
        yield made


# -- what is taken -----------------------------------------------------------------------------


def test_a_chat_completion_has_openais_shape_and_what_the_particles_tell(client):
    answer = chat(client, seed=1, max_tokens=5).json()
    assert answer["object"] == "chat.completion" and answer["model"] == "table"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["usage"]["completion_tokens"] <= 5
    assert answer["usage"]["prompt_tokens"] == 2
    assert choice["smc"]["seed"] == 1 and choice["smc"]["log_evidence"] == 0
    assert answer["smc"] == choice["smc"]


FORMATS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        }
    },
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
]


@pytest.mark.parametrize("fields", FORMATS, ids=str)
def test_an_answer_under_a_schema_is_valid(client, fields):
    answer = chat(client, seed=2, **fields).json()
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
    assert answer["choices"][0]["smc"]["n_particles"] == 2
    assert answer["choices"][0]["smc"]["log_evidence"] < 0


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ],
    ids=str,
)
def test_a_json_object_is_one(client, fields):
    answer = chat(client, seed=2, **fields).json()
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ["yes", "no", "eh"]}, ["yes", "no", "eh"]),
        ({"structured_outputs": {"choice": ["yes", "no", "eh"]}}, ["yes", "no", "eh"]),
        ({"guided_regex": "[ab]c"}, ["ac", "bc"]),
        ({"structured_outputs": {"regex": "[ab]c"}}, ["ac", "bc"]),
        ({"guided_grammar": 'start: "x" | "yy"'}, ["x", "yy"]),
        ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, ["x", "yy"]),
    ],
    ids=str,
)
def test_choices_patterns_and_grammars_bind(client, fields, allowed):
    texts = {chat(client, seed=s, **fields).json()["choices"][0]["message"]["content"]
             for s in range(12)}  # fmt: skip
    assert texts <= set(allowed) and len(texts) > 1


def test_seeds_repeat_and_choices_are_independent_samples_with_seeds_of_their_own(client):
    first = chat(client, seed=7, n=3, guided_regex="[a-z]{6}").json()["choices"]
    again = chat(client, seed=7, n=3, guided_regex="[a-z]{6}").json()["choices"]
    texts = [c["message"]["content"] for c in first]
    assert texts == [c["message"]["content"] for c in again]
    assert len(set(texts)) == 3 and [c["index"] for c in first] == [0, 1, 2]
    alone = chat(client, seed=first[2]["smc"]["seed"], guided_regex="[a-z]{6}").json()
    assert alone["choices"][0]["message"]["content"] == texts[2]


def test_completions_take_texts_token_ids_and_lists_of_them(client):
    for prompt, n in (("ab", 1), (["ab", "c"], 2), ([97, 98], 1), ([[97], [98, 99]], 2)):
        sent = {"model": "table", "prompt": prompt, "n": 2, "max_tokens": 3, "seed": 1}
        answer = client.post("/v1/completions", json=sent).json()
        assert answer["object"] == "text_completion"
        assert [c["index"] for c in answer["choices"]] == list(range(2 * n))
    words = client.post("/v1/completions", json={**sent, "prompt": "ab"}).json()
    ids = client.post("/v1/completions", json={**sent, "prompt": [97, 98]}).json()
    assert [c["text"] for c in words["choices"]] == [c["text"] for c in ids["choices"]]


def test_stop_strings_end_a_text_and_are_not_in_it(client):
    bias = {str(b): 60 for b in b"abz"}
    answer = chat(client, stop="z", logit_bias=bias, seed=3, max_tokens=30).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert set(answer["message"]["content"]) <= set("ab")


def test_a_bias_decides_what_is_said(client):
    answer = chat(client, logit_bias={"113": 100}, max_tokens=4, seed=0).json()
    assert answer["choices"][0]["message"]["content"] == "qqqq"


def test_a_reward_is_called_by_name_and_told_of(client):
    answer = chat(client, smc={"reward": "long", "beta": 2, "n_particles": 4}, seed=1).json()
    (rewards,) = [answer["smc"]["rewards"]]
    assert len(rewards) == 1
    error = refused(chat(client, smc={"reward": "short"}), 400, param="smc.reward")
    assert "the server has: long" in error["message"]
    refused(chat(client, smc={"beta": 1.0}), 400, param="smc.beta")


def test_particles_are_used_where_they_change_something(client):
    plain = chat(client, seed=1).json()["smc"]
    assert plain["n_particles"] == 1
    assert chat(client, seed=1, guided_regex="a|b").json()["smc"]["n_particles"] == 2
    assert chat(client, seed=1, smc={"n_particles": 5}).json()["smc"]["n_particles"] == 5


def test_effective_texts_are_fewer_than_effective_particles_where_particles_agree(client):
    sent = {"smc": {"n_particles": 4, "ess_threshold": 0}, "seed": 1}
    alike = chat(client, guided_choice=["same"], **sent).json()["smc"]
    assert alike["effective_texts"] == pytest.approx(1) and alike["ess"] == pytest.approx(4)
    apart = chat(client, guided_regex="[a-z]{8}", **sent).json()["smc"]
    assert apart["effective_texts"] == pytest.approx(apart["ess"])


def test_what_is_not_strict_is_relaxed_and_told_of(client):
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.org/a"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(client, response_format=asked, seed=0).json()
    (relaxed,) = answer["smc"]["relaxed"]
    assert relaxed["keyword"] == "$ref" and relaxed["enforced"] is False
    asked["json_schema"]["strict"] = True
    refused(chat(client, response_format=asked), 400, code="unsupported_constraint")


# -- tools ---------------------------------------------------------------------------------------


def test_a_required_call_has_the_declared_parameters(client):
    for choice in ("required", {"type": "function", "function": {"name": "light"}}):
        answer = chat(client, tools=[TOOL], tool_choice=choice, seed=1, max_tokens=90).json()
        (made,) = answer["choices"]
        assert made["finish_reason"] == "tool_calls" and made["message"]["content"] is None
        for call in made["message"]["tool_calls"]:
            assert call["function"]["name"] == "light"
            assert set(json.loads(call["function"]["arguments"])) == {"on"}


def test_with_one_call_at_a_time_there_is_one(client):
    for seed in range(4):
        answer = chat(
            client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, seed=seed,
            max_tokens=90,
        ).json()  # fmt: skip
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


def test_auto_may_answer_in_words_and_none_calls_nothing(client):
    words = chat(client, tools=[TOOL], seed=1, logit_bias={"60": -100}, max_tokens=90).json()
    assert words["choices"][0]["message"].get("tool_calls") is None
    assert words["choices"][0]["message"]["content"]
    plain = chat(client, tools=[TOOL], tool_choice="none", seed=1, max_tokens=5).json()
    assert plain["choices"][0]["smc"]["n_particles"] == 1


def test_earlier_calls_and_their_results_are_part_of_the_prompt(client):
    call = {"id": "c1", "type": "function", "function": {"name": "light", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    answer = chat(client, messages=messages, tools=[TOOL], seed=1, tool_choice="none").json()
    assert answer["usage"]["prompt_tokens"] > 80


class Templated:
    """An encoder whose chat template tells the model of tools; remembers what it is handed."""

    def __init__(self, model):
        self.model = model
        self.handed = []

    def writes_tools_as(self, mark):
        return mark == "<tool_call>"

    def encode(self, prompt, *, chat=None, tools=None):
        if isinstance(prompt[0], dict):  # and no ids, which come once more
            self.handed.append((prompt, tools))
        return self.model.encode("x")


def test_a_template_that_tells_of_tools_is_handed_them_and_the_calls_as_data():
    model = table_lm().model
    lm = LM(model, encoder=Templated(model))
    call = {"id": "c1", "type": "function", "function": {"name": "light", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    with table_client(lm) as client:
        sent = {"messages": messages, "tools": [TOOL], "max_tokens": 60, "seed": 1}
        assert chat(client, tool_choice="required", **sent).status_code == 200
        handed, tools = lm.encoder.handed[-1]
        assert handed[0] == {"role": "system", "content": "a"}
        assert handed[1]["tool_calls"][0]["function"]["arguments"] == {}
        assert handed[2] == {"role": "tool", "content": "done", "tool_call_id": "c1"}
        assert tools == [TOOL]
        call["function"]["arguments"] = "{"
        refused(chat(client, **sent), 400, code="invalid_prompt", said="'c1' are not JSON")


def test_where_the_template_tells_nothing_of_tools_the_system_message_does():
    model = table_lm().model
    encoder = Templated(model)
    encoder.writes_tools_as = lambda mark: False
    with table_client(LM(model, encoder=encoder)) as client:
        messages = [{"role": "system", "content": "Be brief."}, *USER]
        assert chat(client, messages=messages, tools=[TOOL], seed=1).status_code == 200
    (handed, tools) = encoder.handed[-1]
    assert tools is None and len(handed) == 2
    assert handed[0]["content"].startswith("Be brief.\n\nYou can call these functions:")
    assert '"name": "light"' in handed[0]["content"] and "<tool_call>" in handed[0]["content"]


def test_a_keyword_that_no_mask_knows_is_dropped_where_a_tool_is_not_strict(client):
    tool = json.loads(json.dumps(TOOL))
    tool["function"]["parameters"]["properties"]["on"] = {"type": "array", "uniqueItems": True}
    answer = chat(client, tools=[tool], tool_choice="required", seed=1, max_tokens=90).json()
    assert [r["keyword"] for r in answer["smc"]["relaxed"]] == ["uniqueItems"]
    tool["function"]["strict"] = True
    refused(chat(client, tools=[tool], tool_choice="required"), 400, param="tools")


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"guided_regex": "[a-z]{3,9}"}, {"smc": {"n_particles": 4}}, {"n": 3}, {"stop": "e"}],
    ids=str,
)
def test_a_stream_adds_up_to_the_answer(client, fields):
    for seed in range(5):
        whole = chat(client, seed=seed, smc={"max_restarts": 0} | fields.get("smc", {}),
                     **{k: v for k, v in fields.items() if k != "smc"}).json()  # fmt: skip
        streamed = chat(
            client, seed=seed, stream=True, stream_options={"include_usage": True}, **fields
        )
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *chunks, done = [data for _, data in events(streamed.text)]
        assert done == "[DONE]"
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            mine = [
                c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]
            ]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(c["delta"].get("content", "") for c in mine)
            assert text == choice["message"]["content"]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [
                choice["finish_reason"]
            ]
            assert mine[-1]["smc"]["seed"] == choice["smc"]["seed"]


def test_a_stream_begins_before_the_answer_is_there(client):
    bias = {str(b): 60 for b in b"abcd"}
    streamed = chat(client, seed=1, stream=True, logit_bias=bias, max_tokens=40)
    contents = [d["choices"][0]["delta"].get("content") for _, d in events(streamed.text)[:-1]]
    assert len([c for c in contents if c]) > 3


def test_a_stream_of_calls_carries_them_whole(client):
    streamed = chat(client, tools=[TOOL], tool_choice="required", stream=True, seed=1,
                    max_tokens=90)  # fmt: skip
    deltas = [d["choices"][0]["delta"] for _, d in events(streamed.text)[:-1]]
    assert not any(delta.get("content") for delta in deltas)
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["index"] == 0 and json.loads(calls[0]["function"]["arguments"])


def test_an_error_in_a_stream_is_an_event(client):
    lm = table_lm()
    with table_client(lm) as other:
        lm.model._probabilities = None  # the model breaks down
        streamed = chat(other, stream=True, max_tokens=5, messages=[
            {"role": "user", "content": "never seen"}])  # fmt: skip
        said = [data for _, data in events(streamed.text)]
        assert said[-2]["error"]["type"] == "server_error" and said[-1] == "[DONE]"


def test_a_run_tells_every_step_and_the_record_of_the_command_line(client):
    sent = {"prompt": "ab", "guided_regex": "[ab]{3}", "seed": 1, "smc": {"n_particles": 3}}
    streamed = client.post("/smc/run", json=sent)
    said = events(streamed.text)
    assert said[0][0] == "start" and said[0][1]["n_particles"] == 3
    assert said[0][1]["prompt"] == "ab" and said[0][1]["block_size"] == 0
    steps = [data for name, data in said if name == "step"]
    assert len(steps) == 4 and all(len(step["texts"]) == 3 for step in steps)
    name, record = said[-1]
    assert name == "result" and record["finish_reason"] == "stop"
    assert len(record["particles"]) == 3 and len(record["steps"]) == 4
    assert steps[0]["ess"] == record["steps"][0]["ess"]


def test_a_run_that_fails_ends_with_an_error(client):
    sent = {"prompt": "ab", "guided_regex": "[ab]{3}", "logit_bias": {"300": 1}}
    refused(client.post("/smc/run", json=sent), 400, said="no token 300")
    refused(client.post("/smc/run", json={"prompt": "ab", "stop": [""]}), 400, said="none of them")


# -- what is told beside it -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_chosen_text_under_the_target(client, stream):
    sent = {"logprobs": True, "guided_regex": "[ab]{5}", "seed": 1, "temperature": 0.7}
    model = client.server.lm.model
    answer = chat(client, stream=stream, **sent)
    if stream:
        (said,) = [d for _, d in events(answer.text)[:-1] if d["choices"][0]["logprobs"]]
        said = said["choices"][0]["logprobs"]
        text = chat(client, **sent).json()["choices"][0]["message"]["content"]
    else:
        said = answer.json()["choices"][0]["logprobs"]
        text = answer.json()["choices"][0]["message"]["content"]
    assert "".join(token["token"] for token in said["content"]) == text
    context = tuple(b"hi")
    for token in said["content"]:
        (byte,) = token["bytes"]
        p = model.probabilities(context) ** (1 / 0.7)
        assert token["logprob"] == pytest.approx(math.log(p[byte] / p.sum()), abs=1e-4)
        assert token["top_logprobs"] == []
        context = (*context, byte)


def test_completions_tell_log_probabilities_in_their_own_shape(client):
    sent = {"model": "table", "prompt": "ab", "logprobs": 0, "guided_regex": "[ab]{5}", "seed": 1}
    choice = client.post("/v1/completions", json=sent).json()["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert all(log_p < 0 for log_p in choice["logprobs"]["token_logprobs"])
    refused(client.post("/v1/completions", json={**sent, "logprobs": 2}), 400, param="logprobs")


def test_metrics_tell_what_was_done(client):
    chat(client, seed=1, guided_regex="[ab]{3}")
    text = client.get("/metrics").text
    for name in (
        "guided_smc_requests_total", "guided_smc_request_seconds_count", "guided_smc_queue ",
        "guided_smc_groups ", "guided_smc_particles ", "guided_smc_tokens_total",
        "guided_smc_ess_share_count", "guided_smc_step_seconds_count",
        'guided_smc_phase_seconds_total{phase="mask"}', "guided_smc_compile_seconds_count",
        'guided_smc_compile_cache_total{found="yes"}',
    ):  # fmt: skip
        assert name in text, name


def test_a_schema_is_compiled_once_whatever_the_order_of_requests(client):
    found = client.server.compiler._found
    chat(client, guided_regex="[xy]{2}", seed=1)
    before = len(found)
    chat(client, guided_regex="[xy]{2}", seed=2)
    assert len(found) == before


def test_the_order_of_properties_tells_schemas_apart():
    from guided_smc.server.protocol import ChatRequest

    specs = []
    for names in ("ab", "ba"):
        schema = {"type": "object", "properties": {n: {"type": "null"} for n in names}}
        body = ChatRequest(model="m", messages=USER, guided_json=schema)
        specs.append(find_spec(body))
    assert specs[0] != specs[1]
