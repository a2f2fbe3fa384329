"""What clients send: OpenAI's requests, vLLM's extra fields, and `smc`.

A field that is not here is refused by name. Fields of OpenAI's that this server does not have may
be sent with the value that changes nothing, as some clients do.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from guided_smc.options import Method, ResamplingScheme

_MOST_STOPS = 16
_MOST_TOOLS = 64
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


DISAGREE = "fields_disagree"
"""Pydantic's type of the errors that a request's fields make together."""


def _wrong(field: str, message: str) -> PydanticCustomError:
    """An error of several fields, of which one is to blame."""
    return PydanticCustomError(DISAGREE, "{message}", {"message": message, "field": field})


class Strict(BaseModel):
    """Nothing is ignored, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported, with the values, beside null, that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = dict(data)
        for name, values in cls.neutral.items():
            if name in kept and any(_same(kept[name], value) for value in (None, *values)):
                del kept[name]
        return kept


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class TextPart(Strict):
    """Text in a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """What an assistant has called."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"index": (0,)}


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "refusal": (),
        "audio": (),
        "function_call": (),
        "annotations": ([],),
        "reasoning_content": (),
    }

    @model_validator(mode="after")
    def _agrees(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise _wrong("tool_calls", "belong to messages of the assistant")
        if self.role == "tool" and not self.tool_call_id:
            raise _wrong("tool_call_id", "a message of a tool needs it")
        if self.role != "tool" and self.tool_call_id is not None:
            raise _wrong("tool_call_id", "belongs to messages of tools")
        if self.content is None and not self.tool_calls:
            raise _wrong("content", "is missing")
        if self.name is not None and self.role != "tool":
            raise _wrong("name", "is not supported: say in the content who speaks")
        return self

    @property
    def text(self) -> str:
        """The content."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class SchemaFormat(Strict):
    """A JSON Schema with a name."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that is valid against a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaFormat


ResponseFormat = Annotated[
    TextFormat | ObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class Function(Strict):
    """A function that may be called."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool: always a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by name."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class StructuredOutputs(Strict):
    """vLLM's way of naming a constraint: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "disable_fallback": (False, True),  # there is none
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [n for n in type(self).model_fields if getattr(self, n) not in (None, False)]
        if len(given) != 1:
            names = "json, regex, choice, grammar and json_object"
            raise ValueError(f"needs exactly one of {names}")
        return self


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool = False
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "include_obfuscation": (False,),
        "continuous_usage_stats": (False,),
    }


class Smc(Strict):
    """The extension: how particles are used. See the options of the library."""

    n_particles: int | None = Field(None, gt=0)
    block_size: Annotated[int, Field(ge=0)] | Literal["auto"] | None = None
    ess_threshold: float | None = Field(None, ge=0, le=1)
    resampling: ResamplingScheme | None = None
    selection: Literal["sample", "best", "vote"] | None = None
    reward: str | None = None
    beta: float | None = None
    power: float | None = Field(None, ge=1e-3, le=1e3)
    method: Method | None = None
    target_ess: float | None = Field(None, gt=0)
    min_particles: int | None = Field(None, ge=2)
    max_particles: int | None = Field(None, ge=2)
    islands: int | None = Field(None, gt=0)
    draft_temperature: float | None = Field(None, ge=0)
    max_restarts: int | None = Field(None, ge=0, le=10)
    whitespace: Literal["compact", "line", "indented", "flexible", "any"] | None = None
    deadline: float | None = Field(None, gt=0)


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "functions": (),
    "function_call": (),
    "reasoning_effort": (),
    "verbosity": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
}
"""Fields of OpenAI's and vLLM's that are not supported, with the values that change nothing."""


class Asked(Strict):
    """What every endpoint takes that makes texts."""

    seed: int | None = Field(None, ge=0, lt=2**63)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, gt=0)
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    smc: Smc | None = None

    @model_validator(mode="after")
    def _stops_are_some(self) -> Asked:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MOST_STOPS or not all(stops):
            raise _wrong("stop", f"at most {_MOST_STOPS} strings, none of them empty")
        return self

    @property
    def smc_options(self) -> Smc:
        """What was said of particles."""
        return self.smc or Smc.model_validate({})


class Common(Asked):
    """What both of OpenAI's endpoints take."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    model: str
    n: int = Field(1, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Goes into the server's log.")

    @model_validator(mode="after")
    def _stream_agrees(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "needs stream: true")
        return self


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, gt=0)
    logprobs: bool | None = None
    tools: list[Tool] | None = Field(None, max_length=_MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise _wrong("max_completion_tokens", "is the same as max_tokens: send one of them")
        names = [tool.function.name for tool in self.tools or []]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise _wrong("tools", f"two are named {twice[0]!r}")
        if not names:
            if self.tool_choice not in (None, "none", "auto"):
                raise _wrong("tool_choice", "needs tools")
            if self.parallel_tool_calls is not None and self.tools is None:
                raise _wrong("parallel_tool_calls", "needs tools")
        called: set[str] = set()
        for i, message in enumerate(self.messages):
            called |= {call.id for call in message.tool_calls or []}
            if message.role == "tool" and message.tool_call_id not in called:
                raise _wrong(
                    f"messages[{i}].tool_call_id",
                    f"no message before has made a call {message.tool_call_id!r}",
                )
        chosen = self.tool_choice
        if isinstance(chosen, NamedTool) and chosen.function.name not in names:
            raise _wrong("tool_choice", f"there is no tool {chosen.function.name!r}")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


class RunRequest(Asked):
    """`POST /smc/run`: one answer, with all that the particles did."""

    model: str | None = None
    messages: list[Message] | None = None
    prompt: str | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> RunRequest:
        if self.messages is None and self.prompt is None:
            raise _wrong("prompt", "is missing: send prompt or messages")
        if self.messages is not None and self.prompt is not None:
            raise _wrong("prompt", "excludes messages: send one of them")
        return self
