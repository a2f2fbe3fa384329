"""Errors as OpenAI's clients know them, and which of ours becomes which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from guided_smc.errors import (
    ConstraintError,
    GuidedSMCError,
    OptionError,
    OutOfPagesError,
    OutputError,
    PotentialError,
    PromptError,
    UnsupportedConstraintError,
)
from guided_smc.models.budget import PAGE

LIKE_OPTIONS = (
    *("n_particles", "block_size", "ess_threshold", "resampling", "power", "method", "target_ess"),
    *("min_particles", "max_particles", "islands", "draft_temperature", "max_restarts"),
)
"""Fields of `smc` that are options of the same name."""

_FIELDS = (*("temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias"),)


class ApiError(Exception):
    """What a client is told instead of an answer.

    Attributes:
        status: Of HTTP.
        message: What was wrong, where, and what to do.
        type: OpenAI's kind of error.
        param: The field of the request that is to blame.
        code: For programs.
        headers: Of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def blaming(self, param: str) -> ApiError:
        """The same error of this field of a request."""
        return ApiError(
            self.status,
            self.message,
            type=self.type,
            param=param,
            code=self.code,
            headers=self.headers,
        )

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def overloaded(retry_after: int) -> ApiError:
    """429: the queue is full."""
    return ApiError(
        429,
        f"the server's queue is full; try again in {retry_after} s",
        type="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after)},
    )


def stopping() -> ApiError:
    """503: the server was asked to stop."""
    return ApiError(
        503,
        "the server is shutting down; try again",
        type="server_error",
        code="shutting_down",
        headers={"Retry-After": "5"},
    )


def too_late(seconds: float, *, waiting: bool = False) -> ApiError:
    """504: the deadline has passed.

    Args:
        seconds: What it was.
        waiting: Whether the request has not even begun.
    """
    limit = f"{_rounded(seconds)} s"
    return ApiError(
        504,
        f"the request waited for others until its deadline of {limit}; try again later"
        if waiting
        else f"the request took longer than {limit}; lower max_tokens, n or smc.n_particles",
        type="timeout_error",
        code="deadline_exceeded",
    )


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


def too_slow() -> ApiError:
    """What ends a stream that nobody reads."""
    return ApiError(
        408, "the client does not read its stream", type="timeout_error", code="slow_reader"
    )


def too_slow_to_send(seconds: float) -> ApiError:
    """408: the rest of a body does not come."""
    return ApiError(
        408,
        f"nothing came of the rest of the body for {_rounded(seconds)} s",
        type="timeout_error",
        code="slow_sender",
        headers={"Connection": "close"},
    )


def failed(request_id: str) -> ApiError:
    """500: no fault of the client's; the log knows more."""
    return ApiError(
        500,
        f"internal error; the server's log tells more under request id {request_id}",
        type="server_error",
        code="internal_error",
    )


@dataclass(frozen=True)
class Fields:
    """Where a request has what an error may be about.

    Attributes:
        prompt: The field with its prompt.
        limit: The field with its most tokens.
        constraint: The field with its constraint, if it has one.
    """

    prompt: str = "prompt"
    limit: str = "max_tokens"
    constraint: str | None = None


def _field_of(option: str | None, fields: Fields) -> str | None:
    """The field of a request that an option was taken from."""
    if option == "max_tokens":
        return fields.limit
    if option in _FIELDS:
        return option
    return f"smc.{option}" if option in LIKE_OPTIONS else None


def from_exception(error: BaseException, request_id: str, fields: Fields | None = None) -> ApiError:
    """What a client is told of an error; what it must not see is only in the log."""
    fields = fields or Fields()
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, UnsupportedConstraintError):
        return ApiError(400, message, param=fields.constraint, code="unsupported_constraint")
    if isinstance(error, ConstraintError):
        return ApiError(400, message, param=fields.constraint, code="invalid_constraint")
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if error.too_long else "invalid_prompt"
        param = fields.limit if error.too_long == "max_tokens" else fields.prompt
        return ApiError(400, message, param=param, code=code)
    if isinstance(error, OutOfPagesError):
        return ApiError(
            400,
            f"prompt, max_tokens and particles may need {error.needed * PAGE} tokens of K/V, and "
            f"the server has room for {error.fit * PAGE}: {error.allows}",
            param=fields.limit,
            code="too_large",
        )
    if isinstance(error, OptionError):
        return ApiError(400, message, param=_field_of(error.option, fields), code="invalid_value")
    if isinstance(error, OutputError):
        return ApiError(422, message, type="no_valid_output", code=error.finish_reason)
    if isinstance(error, PotentialError):
        return ApiError(
            500,
            f"{error.potential!r} failed; the server's log tells more under request id "
            f"{request_id}",
            type="server_error",
            code="potential_failed",
        )
    if isinstance(error, GuidedSMCError):
        return ApiError(500, message, type="server_error", code="model_failed")
    return failed(request_id)
