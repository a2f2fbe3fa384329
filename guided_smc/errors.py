"""Every error this package raises on purpose.

Each message says what was wrong, where, and what to do. All derive from `GuidedSMCError`; those
about a bad argument also derive from `ValueError`, so that ordinary handlers catch them.
"""

from __future__ import annotations

from typing import Literal


class GuidedSMCError(Exception):
    """Base of all errors of this package."""


class OptionError(GuidedSMCError, ValueError):
    """An option has a value that cannot work (`max_tokens=0`, `beta=inf`, an unknown scheme...).

    Attributes:
        option: Its name, where one is to blame and a program may want to know it.
    """

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class PromptError(GuidedSMCError, ValueError):
    """A prompt cannot be used: empty, malformed messages, or too long for the model's context.

    Attributes:
        too_long: What goes beyond the model's context: `"prompt"`, which does so alone, or
            `"max_tokens"`, which does so behind it; None where something else is wrong.
    """

    def __init__(
        self, message: str, *, too_long: Literal["prompt", "max_tokens"] | None = None
    ) -> None:
        super().__init__(message)
        self.too_long = too_long


class ModelError(GuidedSMCError):
    """A model cannot be loaded or used: unknown name, unsafe file format, missing package..."""


class TokenizerMismatchError(ModelError):
    """Draft and target do not share one tokenizer, so draft tokens mean nothing to the target."""


class OutOfPagesError(ModelError):
    """The K/V of a request does not fit: into `max_total_tokens`, or into the device's memory.

    Attributes:
        needed: Pages that it takes.
        fit: Pages that fit.
        allows: In words, what would fit.
    """

    def __init__(self, message: str, *, needed: int, fit: int, allows: str = "") -> None:
        super().__init__(message)
        self.allows = allows
        self.needed = needed
        self.fit = fit


class ConstraintError(GuidedSMCError, ValueError):
    """A schema or grammar is invalid or too large.

    Attributes:
        path: Where in the schema, as a JSON path such as `$.properties.age` (None if unknown).
        limit: Which of `Limits` is exceeded, where raising it would help; the message ends so.
        problem: The message without that.
    """

    def __init__(self, message: str, *, path: str | None = None, limit: str | None = None) -> None:
        super().__init__(message if limit is None else f"{message}, or raise {limit} of `limits`")
        self.path = path
        self.limit = limit
        self.problem = message


class UnsupportedConstraintError(ConstraintError):
    """A schema needs what is not supported: draft 3, or a `$ref` that leads out of the document.

    Attributes:
        keyword: The keyword, such as `$ref`.
    """

    def __init__(self, message: str, *, keyword: str, path: str | None = None) -> None:
        super().__init__(message, path=path)
        self.keyword = keyword


class PotentialError(GuidedSMCError):
    """A user's potential raised, or returned NaN, +inf, or the wrong number of scores.

    Attributes:
        potential: The potential's name.
        text: The text that it was given (None where one cannot be named).
    """

    def __init__(self, message: str, *, potential: str, text: str | None = None) -> None:
        super().__init__(message)
        self.potential = potential
        self.text = text


class OutputError(GuidedSMCError):
    """Raised by `Result.value` when there is no valid value.

    Attributes:
        text: The best text there is (partial where the output was not completed).
        finish_reason: `"length"`, `"failed"`, or `"stop"` where the text was completed and
            only its conversion to the output type failed.
    """

    def __init__(self, message: str, *, text: str, finish_reason: str) -> None:
        super().__init__(message)
        self.text = text
        self.finish_reason = finish_reason


class IncompleteOutputError(OutputError):
    """No particle completed a valid output within `max_tokens` (all weights are zero)."""


class OutputValidationError(OutputError):
    """The text is a member of the constraint's language, but the output type refuses it.

    Happens where a pydantic model has validators that its JSON Schema does not show.
    """
