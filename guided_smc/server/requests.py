"""From what a client sends to requests of the engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guided_smc.api import LM
from guided_smc.errors import PromptError
from guided_smc.options import Options, make_options
from guided_smc.request import Request
from guided_smc.rewards import Reward
from guided_smc.server import tools
from guided_smc.server.compiling import Compiled, Spec
from guided_smc.server.errors import LIKE_OPTIONS, ApiError, Fields
from guided_smc.server.protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ObjectFormat,
    RunRequest,
    Smc,
)
from guided_smc.server.settings import Settings

Body = ChatRequest | CompletionRequest | RunRequest

_MOST_BIAS = 100.0


def find_spec(body: Body) -> Spec | None:
    """The one constraint that a request asks for, if any.

    Raises:
        ApiError: It asks for more than one.
    """
    found: list[Spec] = []
    whitespace = (body.smc_options.whitespace) or "flexible"

    def add(kind: Any, source: Any, param: str, *, strict: bool = True) -> None:
        text = source if isinstance(source, str) else _json(source, param)
        found.append(Spec(kind, text, strict, whitespace if kind == "json" else "flexible", param))

    asked = body.response_format
    if isinstance(asked, ObjectFormat):
        add("json", {"type": "object"}, "response_format")
    elif isinstance(asked, JsonSchemaFormat):
        given = asked.json_schema
        schema = {} if given.schema_ is None else given.schema_
        add("json", schema, "response_format", strict=bool(given.strict))
    for kind in ("json", "regex", "grammar", "choice"):
        if (source := getattr(body, f"guided_{kind}")) is not None:
            add(kind, source, f"guided_{kind}")
    if (outputs := body.structured_outputs) is not None:
        for kind in ("json", "regex", "grammar", "choice"):
            source = getattr(outputs, "json_" if kind == "json" else kind)
            if source is not None:
                add(kind, source, "structured_outputs")
        if outputs.json_object:
            add("json", {"type": "object"}, "structured_outputs")
    if isinstance(body, ChatRequest) and (spec := _tool_spec(body)) is not None:
        found.append(spec)
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(spec.param for spec in found))
        raise ApiError(400, f"{names} exclude each other", param=found[1].param, code="conflict")
    return found[0] if found else None


def fields_of(body: Body) -> Fields:
    """Where a request has its prompt and its constraint, for errors about them."""
    limit = "max_tokens"
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        limit = "max_completion_tokens"
    prompt = "prompt" if getattr(body, "messages", None) is None else "messages"
    spec = find_spec(body)
    return Fields(prompt, limit, None if spec is None else spec.param)


def _tool_spec(body: ChatRequest) -> Spec | None:
    if not body.tools or body.tool_choice == "none":
        return None
    chosen: Any = body.tool_choice or "auto"
    functions = [
        {
            "name": tool.function.name,
            "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            "strict": bool(tool.function.strict),
        }
        for tool in body.tools
    ]
    if isinstance(chosen, NamedTool):
        functions = [f for f in functions if f["name"] == chosen.function.name]
        chosen = "one"
    parallel = body.parallel_tool_calls is not False
    source = {"functions": functions, "choice": chosen, "parallel": parallel}
    return Spec("tools", _json(source, "tools"), param="tools")


def _json(data: Any, param: str) -> str:
    try:
        return json.dumps(data)
    except RecursionError:
        raise ApiError(
            400, f"{param} is nested too deeply", param=param, code="invalid_constraint"
        ) from None


@dataclass(frozen=True)
class Prepared:
    """Requests of the engine, one for each answer, in the order of the choices.

    Attributes:
        requests: Ready to run.
        relaxed: See `Compiled`.
        prompt_tokens: Of all prompts, each once.
    """

    requests: list[Request[Any]]
    relaxed: tuple[dict[str, Any], ...]
    prompt_tokens: int


class Preparer:
    """Makes requests; calls must not overlap, as tokenizers and searches keep state.

    Args:
        lm: The model.
        settings: Defaults and bounds.
        rewards: By the names that clients use.
    """

    def __init__(self, lm: LM, settings: Settings, rewards: Mapping[str, Reward]) -> None:
        self._lm = lm
        self._settings = settings
        self._rewards = rewards
        writes = getattr(lm.encoder, "writes_tools_as", None)
        self._template_tells_tools = bool(writes and writes(tools.OPEN))

    def prepare(self, body: Body, compiled: Compiled | None) -> Prepared:
        """Requests of the engine.

        Raises:
            ApiError, GuidedSMCError: What cannot work.
        """
        smc = body.smc_options
        reward = self._reward(smc)
        self._check_uses(smc, constrained=compiled is not None)
        options = self._options(body, smc, plain=compiled is None and reward is None)
        prompts = self._prompts(body)
        n = body.n if isinstance(body, Common) else 1
        if n * len(prompts) > self._settings.max_choices:
            raise ApiError(
                400,
                f"{n * len(prompts)} answers are more than the server makes for one request "
                f"({self._settings.max_choices})",
                param="n",
                code="too_large",
            )
        shared: dict[str, Any] = {
            "output_type": None if compiled is None else compiled.constraint,
            "reward": reward,
            "beta": smc.beta,
            "logit_bias": _bias(body.logit_bias),
            "options": options,
        }
        requests = []
        total = 0
        for p, (prompt, ids) in enumerate(prompts):
            for i in range(n):
                request = self._lm.request(ids, index=p * n + i, **shared)
                requests.append(dataclasses.replace(request, prompt=prompt))
            total += len(ids)
        return Prepared(requests, () if compiled is None else compiled.relaxed, total)

    def _options(self, body: Body, smc: Smc, *, plain: bool) -> Options:
        given: dict[str, Any] = {
            "max_tokens": body.limit if isinstance(body, ChatRequest) else body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": None if body.top_k is None else max(body.top_k, 0),
            "min_p": body.min_p,
            "seed": body.seed,
            "stop": body.stop,
            "select": smc.selection,
            **{name: getattr(smc, name) for name in LIKE_OPTIONS},
        }
        given = {name: value for name, value in given.items() if value is not None}
        given.setdefault("max_tokens", self._settings.max_tokens)
        if "n_particles" not in given:
            # Without a constraint, a reward or a draft one particle is exact already.
            exact = plain and (self._lm.draft is None or smc.block_size == 0)
            alone = exact and not smc.power and smc.method in (None, "smc")
            given["n_particles"] = 1 if alone else self._settings.n_particles
            if smc.islands:
                given["n_particles"] = -(-given["n_particles"] // smc.islands) * smc.islands
        if isinstance(body, Common) and body.stream:
            # What was sent cannot be taken back.
            if smc.max_restarts:
                raise ApiError(
                    400,
                    "smc.max_restarts: a stream cannot start again; leave it out",
                    param="smc.max_restarts",
                    code="conflict",
                )
            given["max_restarts"] = 0
        options = make_options(None, **given)
        if options.particle_range[1] > self._settings.max_particles:
            raise ApiError(
                400,
                f"{options.particle_range[1]} particles are more than the server allows "
                f"({self._settings.max_particles})",
                param="smc.n_particles",
                code="too_large",
            )
        return options

    def _check_uses(self, smc: Smc, *, constrained: bool) -> None:
        """Refuse what needs something that there is not, in the words of requests."""

        def refuse(name: str, said: str) -> None:
            param = f"smc.{name}"
            raise ApiError(400, f"{param}: {said}", param=param, code="invalid_value")

        if self._lm.draft is None:
            lacking = "the server has no draft (its option --draft); leave it out"
            if smc.block_size not in (None, 0, "auto"):
                refuse("block_size", lacking)
            if smc.draft_temperature is not None:
                refuse("draft_temperature", lacking)
        if smc.method == "token_masking" and not constrained:
            refuse("method", "token_masking needs a constraint, such as response_format")
        if smc.method in ("best_of_n", "soft_best_of_n") and smc.reward is None:
            refuse("method", f"{smc.method} needs smc.reward")

    def _reward(self, smc: Smc) -> Reward | None:
        if smc.reward is None:
            if smc.beta is not None:
                raise ApiError(
                    400, "smc.beta needs smc.reward", param="smc.beta", code="invalid_value"
                )
            return None
        if smc.reward not in self._rewards:
            known = ", ".join(self._rewards) or "none"
            raise ApiError(
                400,
                f"there is no reward {smc.reward!r} (the server has: {known})",
                param="smc.reward",
                code="unknown_reward",
            )
        return self._rewards[smc.reward]

    # -- prompts ---------------------------------------------------------------------------------

    def _prompts(self, body: Body) -> list[tuple[Any, list[int]]]:
        """Each prompt as it is and as tokens."""
        encode = self._lm.encoder.encode
        if isinstance(body, CompletionRequest):
            given: Any = body.prompt
            one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
            prompts = [given] if one else given
            if not prompts:
                raise PromptError("prompt is an empty list: give at least one")
            return [(p, encode(p, chat=False)) for p in prompts]
        if body.messages is None:
            assert isinstance(body, RunRequest)
            return [(body.prompt, encode(body.prompt))]
        if not getattr(self._lm.encoder, "has_chat_template", True):
            raise PromptError(
                "the model has no chat template, so that it takes no messages; send a prompt, as "
                "to /v1/completions"
            )
        messages, told = self._messages(body.messages, body)
        extra = {} if told is None else {"tools": told}
        return [(messages, encode(messages, chat=True, **extra))]

    def _messages(
        self, given: Sequence[Message], body: ChatRequest | RunRequest
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages as the chat template takes them, and tools if it tells of them."""
        asked = body.tools if isinstance(body, ChatRequest) else None
        if isinstance(body, ChatRequest) and body.tool_choice == "none":
            asked = None
        templated = self._template_tells_tools
        messages = [_message(message, templated) for message in given]
        if not asked:
            return messages, None
        described = [tool.model_dump(exclude_none=True) for tool in asked]
        if templated:
            return messages, described
        told = tools.instructions([tool["function"] for tool in described])
        if messages[0]["role"] == "system":
            first = {"role": "system", "content": f"{messages[0]['content']}\n\n{told}"}
            return [first, *messages[1:]], None
        return [{"role": "system", "content": told}, *messages], None


def _message(message: Message, templated: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": message.text}
    calls = message.tool_calls or []
    if templated:
        if calls:
            plain["tool_calls"] = [_call(call.model_dump()) for call in calls]
        if role == "tool":
            plain["tool_call_id"] = message.tool_call_id
            if message.name is not None:
                plain["name"] = message.name
        return plain
    if calls:
        said = tools.written([(c.function.name, c.function.arguments) for c in calls])
        plain["content"] = f"{message.text}\n{said}" if message.text else said
    if role == "tool":
        plain = {"role": "user", "content": f"<{tools.ANSWER}>\n{message.text}\n</{tools.ANSWER}>"}
    return plain


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as data, which is what templates write as JSON."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        raise PromptError(
            f"the arguments of the call {call['id']!r} are not JSON: "
            f"{call['function']['arguments']!r}"
        ) from None
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _bias(given: Mapping[str, float] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in (given or {}).items():
        if not name.isascii() or not name.isdecimal():
            raise _wrong_bias(f"keys are token ids, got {name!r}")
        if not -_MOST_BIAS <= value <= _MOST_BIAS:
            raise _wrong_bias(f"of token {name} must be from -100 to 100, got {value}")
        bias[int(name)] = value
    return bias


def _wrong_bias(said: str) -> ApiError:
    return ApiError(400, f"logit_bias: {said}", param="logit_bias", code="invalid_value")
