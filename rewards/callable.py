"""Any Python function as a reward: `Ψ = exp(β·R(x))`.

Two conventions, told apart by the signature alone, so that no trial call is needed:

- *batch*, as TRL's trainers call rewards: `fn(prompts=[...], completions=[...]) -> [score, ...]`;
- *text*: `fn(text) -> score`.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

from guided_smc.errors import OptionError, PotentialError
from guided_smc.options import check_beta
from guided_smc.potentials import Completion, Potential

_SHOWN = 200
"""Characters of a text or value that a message shows."""


def reward(
    fn: Callable[..., Any],
    *,
    beta: float = 1.0,
    on: Literal["end", "prefix"] = "end",
    name: str | None = None,
) -> Reward:
    """A potential `exp(β·R)` from a function that scores texts.

    Args:
        fn: With a parameter `completions`, or with nothing but `**kwargs`: called with a list of
            texts, by keyword, and with `prompts` if it takes that; returns a sequence of numbers
            of the same length. With one positional parameter: called with a text, returns a
            number. A score of −inf means weight 0.
        beta: β, finite. With 0 the function is not called.
        on: `"end"` scores finished texts. `"prefix"` scores unfinished ones too, which steers
            the particles as they grow; a prefix score of −inf ends a particle.
        name: In results and messages; by default the function's.

    Raises:
        OptionError: β is not finite, or the signature fits neither convention.
    """
    return Reward(fn, beta=beta, on=on, name=name)


class Reward(Potential):
    """`Ψ = exp(β·R(x))`. See `reward` for the arguments.

    Attributes:
        convention: `"batch"` or `"text"`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        beta: float = 1.0,
        on: Literal["end", "prefix"] = "end",
        name: str | None = None,
    ) -> None:
        if not callable(fn):
            raise OptionError(f"a reward must be callable, got {_shorten(repr(fn))}")
        if on not in ("end", "prefix"):
            raise OptionError(f'on must be "end" or "prefix", got {on!r}')
        self.fn = fn
        self.beta = check_beta(beta)
        self.on = on
        self.name = name or _name(fn)
        self.convention: Literal["batch", "text"]
        self.convention, self._because, self._takes_prompts = _convention(fn, self.name)

    @property
    def scores_prefixes(self) -> bool:
        """Whether unfinished texts are scored."""
        return self.on == "prefix"

    def log_complete(self, completions: Sequence[Completion]) -> Sequence[float]:
        """`β·R(x)`, one for each text.

        Raises:
            PotentialError: The function raised, or returned something else than one number for
                each text, NaN, or what makes `β·R` +inf.
        """
        if self.beta == 0 or not completions:
            return [0.0] * len(completions)
        score = self._score_batch if self.convention == "batch" else self._score_texts
        return [
            self._weight(value, completion.text)
            for value, completion in zip(score(completions), completions, strict=True)
        ]

    def log_prefix(self, completions: Sequence[Completion]) -> Sequence[float]:
        """`β·R` of the texts so far if they are scored, else 0. Errors as in `log_complete`."""
        if not self.scores_prefixes:
            return [0.0] * len(completions)
        return self.log_complete(completions)

    def _score_texts(self, completions: Sequence[Completion]) -> list[Any]:
        scores: dict[str, Any] = {}
        for text in (c.text for c in completions):
            if text not in scores:
                try:
                    scores[text] = self.fn(text)
                except Exception as error:
                    raise self._raised(error, [text]) from error
        return [scores[c.text] for c in completions]

    def _score_batch(self, completions: Sequence[Completion]) -> list[Any]:
        texts = [c.text for c in completions]
        arguments: dict[str, Any] = {"completions": list(texts)}
        if self._takes_prompts:
            arguments["prompts"] = [c.prompt for c in completions]
        try:
            returned = self.fn(**arguments)
            scores = _as_list(returned)
        except Exception as error:
            raise self._raised(error, texts) from error
        if scores is None:
            raise self._error(f"returned {_describe(returned)}, not one score for each text", texts)
        if len(scores) != len(texts):
            raise self._error(f"returned {len(scores)} scores for {len(texts)} texts", texts)
        return scores

    def _weight(self, value: Any, text: str) -> float:
        score = _as_number(value)
        if score is None:
            raise self._error(f"returned {_describe(value)}, not a number", [text])
        log_weight = self.beta * score
        if math.isnan(score) or log_weight == math.inf:
            what = "not a number" if math.isnan(score) else f"and beta is {self.beta:g}: infinite"
            raise self._error(f"returned {score!r}, {what}", [text])
        return log_weight

    def _raised(self, error: Exception, texts: list[str]) -> PotentialError:
        return self._error(f"raised {type(error).__name__}: {error}", texts)

    def _error(self, what: str, texts: list[str]) -> PotentialError:
        given = f"the text {_shorten(repr(texts[0]))}"
        if len(texts) > 1:
            given = f"{len(texts)} texts, the first of them {_shorten(repr(texts[0]))}"
        return PotentialError(
            f"the reward {self.name!r} {what}; given {given} (called by the {self.convention} "
            f"convention, because {self._because})",
            potential=self.name,
            text=texts[0],
        )


def _convention(fn: Callable[..., Any], name: str) -> tuple[Literal["batch", "text"], str, bool]:
    """How a function wants to be called, why, and whether it takes `prompts`."""
    if any(map(inspect.iscoroutinefunction, (fn, type(fn).__call__))):
        raise OptionError(f"the reward {name!r} is a coroutine function; wrap it in a plain one")
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):
        return "text", "its signature cannot be read", False
    parameters = signature.parameters.values()
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    any_positional = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    keywords = {p.name for p in named if p.kind is not p.POSITIONAL_ONLY}
    required = {p.name for p in named if p.default is p.empty}
    takes_prompts = any_keyword or "prompts" in keywords

    if "completions" in keywords and required <= {"prompts", "completions"}:
        return "batch", "it has a parameter `completions`", takes_prompts
    if any_keyword and {p.name for p in named} <= {"prompts"}:
        return "batch", "it takes any keyword", takes_prompts
    positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
    needed = [p for p in positional if p.default is p.empty]
    if (
        "completions" not in keywords
        and len(needed) <= 1
        and len(needed) == len(required)
        and (positional or any_positional)
    ):
        return "text", "it has one positional parameter and no `completions`", False
    raise OptionError(
        f"the reward {name!r} has the signature {signature}: a reward takes either `completions` "
        "(a list of texts; and `prompts` if it likes) or one text; bind its other parameters with "
        "functools.partial"
    )


def _name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", None) or type(fn).__name__


def _as_list(value: Any) -> list[Any] | None:
    """The elements of a list, tuple, array, tensor or other sequence; None for a scalar."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    return list(value)


def _as_number(value: Any) -> float | None:
    """A float for a real number, also one of numpy's or a tensor without dimensions."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real | Decimal):
        return None
    real: Any = value
    try:
        return float(real)
    except OverflowError:
        return math.inf if real > 0 else -math.inf


def _describe(value: Any) -> str:
    return f"{_shorten(repr(value))} ({type(value).__name__})"


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
