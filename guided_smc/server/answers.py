"""From results to what OpenAI's clients read."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from guided_smc import __version__
from guided_smc.errors import OutputError
from guided_smc.results import Result
from guided_smc.server import tools
from guided_smc.vocabulary import Vocabulary

FINGERPRINT = f"guided-smc-{__version__}"

Kind = Literal["chat", "text"]


def check(result: Result[Any]) -> None:
    """Raise if there is no text to return: every particle died other than at max_tokens.

    Raises:
        OutputError: With the best partial text.
    """
    if not result.selected and result.finish_reason == "failed":
        try:
            _ = result.value
        except OutputError as error:
            raise error from None


def smc_record(result: Result[Any], relaxed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the particles tell of an answer."""
    alive = [p.weight for p in result.particles if p.weight > 0]
    return {
        "n_particles": len(result.particles),
        "log_evidence": result.log_evidence,
        "log_evidence_std_error": result.log_evidence_std_error,
        "ess": 1 / sum(w * w for w in alive) if alive else 0.0,
        "ancestors": result.diversity.ancestors[0] if result.diversity.ancestors else 0,
        "independent": result.diversity.independent,
        "effective_texts": result.diversity.distinct,
        "rewards": {
            name: {"chosen": r.chosen, "mean": r.tilted.value} for name, r in result.rewards.items()
        },
        "steps": len(result.steps),
        "resamplings": result.usage.resamplings,
        "restarts": result.restarts,
        "particle_tokens": result.usage.particle_tokens,
        "seed": result.seed,
        "relaxed": list(relaxed),
        "fallbacks": list(result.warnings),
    }


@dataclass
class Writer:
    """Writes the response of one request, whole or in chunks.

    Attributes:
        kind: Of a chat or of plain text.
        model: As the client named it.
        relaxed: See `Compiled`.
        prompt_tokens: Of all prompts.
        calls: Whether an answer may call tools.
        vocabulary: Where log-probabilities are asked for: of the tokens that they tell.
    """

    kind: Kind
    model: str
    relaxed: Sequence[dict[str, Any]]
    prompt_tokens: int
    calls: bool = False
    vocabulary: Vocabulary | None = None
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.kind == "chat" else "cmpl-") + uuid.uuid4().hex

    def response(self, results: Sequence[Result[Any]]) -> dict[str, Any]:
        """The whole response."""
        choices = [self._choice(i, result) for i, result in enumerate(results)]
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {
            **self._head(name),
            "choices": choices,
            "usage": self.usage(results),
            "smc": choices[0]["smc"],
        }

    def usage(self, results: Sequence[Result[Any]]) -> dict[str, int]:
        """Tokens read, and tokens returned."""
        returned = sum(len(result.token_ids) for result in results)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": returned,
            "total_tokens": self.prompt_tokens + returned,
        }

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _choice(self, index: int, result: Result[Any]) -> dict[str, Any]:
        check(result)
        calls = self.tool_calls(result.text, result.finish_reason)
        choice: dict[str, Any] = {"index": index}
        if self.kind == "chat":
            message: dict[str, Any] = {"role": "assistant", "refusal": None}
            message["content"] = None if calls else result.text
            if calls:
                message["tool_calls"] = calls
            choice["message"] = message
        else:
            choice["text"] = result.text
        choice["logprobs"] = self.logprobs(result)
        choice["finish_reason"] = self.finish_reason(result, calls)
        choice["smc"] = smc_record(result, self.relaxed)
        return choice

    def tool_calls(self, text: str, finish_reason: str = "stop") -> list[dict[str, Any]]:
        """The complete calls in a text."""
        found = (tools.read(text) or []) if self.calls else []
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in found
        ]

    @staticmethod
    def finish_reason(result: Result[Any], calls: Sequence[Any]) -> str:
        """Why the answer ended."""
        return "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason

    def logprobs(self, result: Result[Any]) -> dict[str, Any] | None:
        """Log p of each token of the answer under the target, if it is asked for.

        The target is the model at the request's temperature, top-p, bias and so on, without any
        constraint and reward. Of an answer that no particle completed nothing is known.
        """
        if self.vocabulary is None:
            return None
        if not result.selected:
            return {"content": []} if self.kind == "chat" else None
        particle = result.particles[result.selected[0]]
        # The end token's, which comes last if one was drawn, is that of no text.
        pairs = list(zip(particle.token_ids, particle.token_log_p, strict=False))
        pieces = [self.vocabulary.tokens[token] or b"" for token, _ in pairs]
        if self.kind == "chat":
            return {
                "content": [
                    {
                        "token": piece.decode(errors="replace"),
                        "logprob": log_p,
                        "bytes": list(piece),
                        "top_logprobs": [],
                    }
                    for piece, (_, log_p) in zip(pieces, pairs, strict=True)
                ]
            }
        ends = itertools.accumulate(len(piece) for piece in pieces)
        whole = b"".join(pieces)
        starts = [0, *ends][:-1] if pieces else []
        return {
            "tokens": [piece.decode(errors="replace") for piece in pieces],
            "token_logprobs": [log_p for _, log_p in pairs],
            "top_logprobs": None,
            "text_offset": [len(whole[:start].decode(errors="replace")) for start in starts],
        }

    # -- chunks ----------------------------------------------------------------------------------

    def chunk(self, index: int, **of_choice: Any) -> dict[str, Any]:
        """One chunk of one choice."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {**self._head(name), "choices": [{**choice, **of_choice}]}

    def first(self, index: int) -> dict[str, Any] | None:
        """What a choice begins with."""
        if self.kind == "text":
            return None
        return self.chunk(index, delta={"role": "assistant", "content": ""})

    def more(self, index: int, text: str) -> dict[str, Any]:
        """Text that was decided."""
        if self.kind == "text":
            return self.chunk(index, text=text)
        return self.chunk(index, delta={"content": text})

    def last(self, index: int, result: Result[Any], sent: str) -> list[dict[str, Any]]:
        """What a choice ends with: the rest of the text or the calls, and why it ended."""
        calls = [] if sent else self.tool_calls(result.text)
        chunks = []
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            chunks.append(self.chunk(index, delta={"tool_calls": numbered}))
        # An answer that no particle completed may be another than what was sent: nothing is added.
        elif result.text.startswith(sent) and len(result.text) > len(sent):
            chunks.append(self.more(index, result.text[len(sent) :]))
        ending: dict[str, Any] = {"text": ""} if self.kind == "text" else {"delta": {}}
        ending["finish_reason"] = self.finish_reason(result, calls)
        ending["logprobs"] = self.logprobs(result)
        ending["smc"] = smc_record(result, self.relaxed)
        return [*chunks, self.chunk(index, **ending)]

    def final_usage(self, results: Sequence[Result[Any]]) -> dict[str, Any]:
        """The chunk that tells the usage."""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {**self._head(name), "choices": [], "usage": self.usage(results)}

    def sendable(self, text: str) -> str:
        """What of a decided text may be sent as text: not what may still become a call."""
        if self.calls and (text.startswith(tools.OPEN) or tools.OPEN.startswith(text)):
            return ""
        return text
