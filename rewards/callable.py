"""Any Python function as a reward: `Ψ = exp(β·R(x))`.

Two conventions, told apart by the signature alone, so that no trial call is needed:

- *batch*, as TRL's trainers call rewards:
  `fn(prompts=[...], completions=[...], **columns) -> [score, ...]`;
- *text*: `fn(text) -> score`.

A coroutine function of either kind is awaited.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from guided_smc.errors import OptionError, PotentialError
from guided_smc.potentials import Completion
from guided_smc.rewards.base import Reward, as_number, check_timeout
from guided_smc.rewards.schedules import Schedule
from guided_smc.rewards.scoring import Failed, Progress, TimedOut, each, each_awaited, shorten

_TEXTS = frozenset({"completions", "completion_ids", "completions_ids"})
"""Parameters by which a function asks for the batch convention. TRL passes the tokens under the
second name, and its guide calls them by the third."""


def reward(
    fn: Callable[..., Any],
    *,
    beta: float = 1.0,
    on: str | None = None,
    schedule: Schedule = "constant",
    prefix: Callable[..., Any] | None = None,
    timeout: float | None = None,
    bounds: tuple[float, float] | None = None,
    name: str | None = None,
    messages: bool | None = None,
    lookahead: int = 0,
) -> CallableReward:
    """A potential `exp(β·R)` from a function that scores texts.

    Args:
        fn: With one positional parameter: called with a text, returns a number. With a parameter
            `completions` or `completion_ids`, or with nothing but `**kwargs`: called by keyword
            with lists, one entry for each text, as TRL does; returns a sequence of numbers. It gets
            what its signature names (and, with `**kwargs`, all): `prompts`, `completions`,
            `completion_ids`, and the columns that belong to the prompt; None for a text says
            that the reward does not apply to it. May be a coroutine function. −inf means weight 0.
        beta: β, finite.
        on: When unfinished texts are scored: `"end"` (never), `"step"`, `"sentence"`, `"line"`,
            `"field"`. A score of −inf ends a particle. Default: `"end"`; `"step"` with `prefix`.
        schedule: How β grows along unfinished texts; see `Reward`.
        prefix: What is asked of unfinished texts instead of `fn`: an estimate of what R will be.
            Of either convention.
        timeout: Seconds that one call for all texts of a step may take.
        bounds: Least and largest R; a score outside them is an error.
        name: In results and messages; by default the function's.
        messages: Whether `completions` are lists of one chat message, and not texts. Default: where
            the prompt is a list of messages.
        lookahead: How many of the likeliest next tokens are scored before one is drawn; see
            `Reward`.

    Raises:
        OptionError: A value cannot be, or a signature fits neither convention.
    """
    return CallableReward(
        fn,
        beta=beta,
        on=on,
        schedule=schedule,
        prefix=prefix,
        timeout=timeout,
        bounds=bounds,
        name=name,
        messages=messages,
        lookahead=lookahead,
    )


class CallableReward(Reward):
    """`exp(β·R)` of a function R. See `reward` for the arguments.

    Attributes:
        fn: The function.
        convention: `"batch"` or `"text"`.
        timeout: Seconds.
    """

    may_abstain = True

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        beta: float = 1.0,
        on: str | None = None,
        schedule: Schedule = "constant",
        prefix: Callable[..., Any] | None = None,
        timeout: float | None = None,
        bounds: tuple[float, float] | None = None,
        name: str | None = None,
        messages: bool | None = None,
        lookahead: int = 0,
    ) -> None:
        for function in (fn, prefix):
            if not callable(function) and (function is fn or prefix is not None):
                hint = ""
                if isinstance(function, str):
                    hint = (
                        "; guided_smc.rewards has ready ones, such as length(60), and "
                        "guided_smc.rewards.parse makes one of a text such as 'length:60'"
                    )
                raise OptionError(f"a reward must be callable, got {shorten(repr(function))}{hint}")
        if on is None:
            on = "end" if prefix is None else "step"
        super().__init__(
            beta=beta,
            on=on,
            schedule=schedule,
            name=name or _name(fn),
            bounds=bounds,
            lookahead=lookahead,
        )
        if prefix is not None and on == "end":
            raise OptionError(f'the reward {self.name!r} has prefix= and on="end": never asked')
        if messages not in (None, True, False):
            raise OptionError(f"messages must be True, False or None, got {messages!r}")
        self.fn = fn
        self.timeout = check_timeout(timeout)
        self._whole = _Function.of(fn, self.name)
        self._unfinished = self._whole if prefix is None else _Function.of(prefix, self.name)
        self.convention: Literal["batch", "text"] = self._whole.convention
        if messages is not None and self.convention == "text":
            raise OptionError(
                f"messages goes with functions that take `completions`, and {self.name!r} is "
                f"called with a text, because {self._whole.because}"
            )
        self._messages = messages

    def score(self, completions: Sequence[Completion]) -> Sequence[Any]:
        """What the function returns, one for each text."""
        return self._call(self._whole, completions)

    def estimate(self, completions: Sequence[Completion]) -> Sequence[Any]:
        """What `prefix` returns, or else the function."""
        return self._call(self._unfinished, completions)

    def _in_time(
        self,
        ask: Callable[[Sequence[Completion]], Sequence[Any]],
        completions: Sequence[Completion],
    ) -> list[Any]:
        return list(ask(completions))  # which minds the time itself, and knows the text at fault

    def _call(self, function: _Function, completions: Sequence[Completion]) -> Sequence[Any]:
        run = each_awaited if function.is_async else each
        if function.convention == "text":
            texts = list(dict.fromkeys(c.text for c in completions))
            progress = Progress(len(texts))
            items: list[Any] = texts
            fn = function.fn
        else:
            progress = Progress(1)
            items = [self._arguments(function, completions)]
            fn = function.by_keyword
        try:
            returned = run(fn, items, timeout=self.timeout, progress=progress)
            if any(map(inspect.isawaitable, returned)):
                # A plain function around a coroutine function.
                progress = Progress(len(items))
                returned = each_awaited(_itself, returned, timeout=self.timeout, progress=progress)
        except Failed as failed:
            assert isinstance(failed.__cause__, Exception)
            about = self._about(function, completions, failed.at)
            raise self._explained(
                function, f"raised {_describe_error(failed.__cause__)}", about
            ) from failed.__cause__
        except TimedOut:
            about = self._about(function, completions, progress.first_pending)
            what = "was cancelled"
            if self.timeout is not None:
                what = f"took longer than timeout={self.timeout:g} seconds"
            raise self._explained(function, what, about) from None
        if function.convention == "batch":
            return self._scores(function, returned[0], completions)
        by_text = dict(zip(items, returned, strict=True))
        for completion in completions:
            value = by_text[completion.text]
            if as_number(value) is None:
                what = f"returned {_describe(value)}, not a number"
                raise self._explained(function, what, [completion])
        return [by_text[c.text] for c in completions]

    def _about(
        self, function: _Function, completions: Sequence[Completion], at: int
    ) -> Sequence[Completion]:
        """The text that an error is about; of a batch, all of them."""
        if function.convention == "batch":
            return completions
        first = {c.text: c for c in reversed(completions)}
        texts = list(dict.fromkeys(c.text for c in completions))
        return [first[texts[at]]]

    def _scores(
        self, function: _Function, returned: Any, completions: Sequence[Completion]
    ) -> list[Any]:
        try:
            scores = _as_list(returned)
        except Exception as error:
            what = f"raised {_describe_error(error)}"
            raise self._explained(function, what, completions) from error
        if scores is None:
            what = f"returned {_describe(returned)}, not one score for each text"
            raise self._explained(function, what, completions)
        if len(scores) != len(completions):
            what = f"returned {len(scores)} scores for {len(completions)} texts"
            raise self._explained(function, what, completions)
        for value, completion in zip(scores, completions, strict=True):
            if value is not None and as_number(value) is None:
                what = f"returned {_describe(value)}, not a number"
                raise self._explained(function, what, [completion])
        return scores

    def _explained(
        self, function: _Function, what: str, completions: Sequence[Completion]
    ) -> PotentialError:
        """`error`, and how the function was called."""
        plain = self.error(what, completions)
        return PotentialError(
            f"{plain} (called by the {function.convention} convention, because {function.because})",
            potential=self.name,
            text=plain.text,
        )

    def _arguments(self, function: _Function, completions: Sequence[Completion]) -> dict[str, Any]:
        """What a function of the batch convention is called with."""
        ids = [list(c.token_ids) for c in completions]
        available: dict[str, list[Any]] = {
            "prompts": [self._prompt(c) for c in completions],
            "completions": [self._completion(c) for c in completions],
            "completion_ids": ids,
        }
        columns = {name: None for c in completions for name in c.columns if name not in available}
        for name in columns:
            if all(name in c.columns for c in completions) or name not in function.required:
                available[name] = [c.columns.get(name) for c in completions]
        if "completions_ids" in function.parameters:
            available["completions_ids"] = ids
        missing = [p for p in function.required if p not in available]
        if missing:
            known = ", ".join(map(repr, columns)) or "none"
            raise self._explained(
                function,
                f"needs {', '.join(map(repr, missing))}, and no column of the prompt has this name "
                f"(there are: {known})",
                completions,
            )
        return {
            name: values
            for name, values in available.items()
            if name not in function.bound and (function.takes_all or name in function.parameters)
        }

    def _prompt(self, completion: Completion) -> Any:
        if self._messages is True and isinstance(completion.prompt, str):
            return [{"role": "user", "content": completion.prompt}]
        return completion.prompt

    def _completion(self, completion: Completion) -> Any:
        wanted = self._messages
        if wanted is None:
            wanted = is_chat(completion.prompt)
        text = completion.text
        return [{"role": "assistant", "content": text}] if wanted else text


@dataclass(frozen=True)
class _Function:
    """A function, and how it wants to be called.

    Attributes:
        fn: The function.
        convention: Which.
        because: Why, for messages.
        parameters: Names by which it can be given something.
        required: Those that it must be given.
        bound: Those that `functools.partial` has given it.
        takes_all: Whether it takes any keyword.
        is_async: Whether what it returns is to be awaited.
    """

    fn: Callable[..., Any]
    convention: Literal["batch", "text"]
    because: str
    parameters: frozenset[str] = frozenset()
    required: tuple[str, ...] = ()
    bound: frozenset[str] = frozenset()
    takes_all: bool = False
    is_async: bool = False

    def by_keyword(self, arguments: dict[str, Any]) -> Any:
        """Call it. What it computes as it is iterated over is computed here."""
        found = self.fn(**arguments)
        return list(found) if isinstance(found, Iterator) else found

    @classmethod
    def of(cls, fn: Callable[..., Any], name: str) -> _Function:
        """By its signature.

        Raises:
            OptionError: It fits neither convention.
        """
        inner: Any = fn
        while isinstance(inner, functools.partial):
            inner = inner.func
        is_async = any(map(inspect.iscoroutinefunction, (inner, type(inner).__call__)))
        try:
            signature = inspect.signature(fn)
        except (ValueError, TypeError):
            return cls(fn, "text", "its signature cannot be read", is_async=is_async)
        parameters = signature.parameters.values()
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
        any_positional = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        keywords = {p.name for p in named if p.kind is not p.POSITIONAL_ONLY}
        required = tuple(p.name for p in named if p.default is p.empty)

        because = None
        asked = sorted(_TEXTS & keywords)
        if asked and set(required) <= keywords:
            because = f"it has a parameter `{asked[0]}`"
        elif any_keyword and set(required) <= keywords and (not named or "prompts" in keywords):
            because = "it takes any keyword"
        if because is not None:
            bound = fn.keywords if isinstance(fn, functools.partial) else {}
            return cls(
                fn,
                "batch",
                because,
                frozenset(keywords),
                required,
                frozenset(bound),
                any_keyword,
                is_async,
            )
        positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
        needed = [p for p in positional if p.default is p.empty]
        if (
            not asked
            and len(needed) <= 1
            and len(needed) == len(required)
            and (positional or any_positional)
        ):
            because = "it has one positional parameter and no `completions`"
            return cls(fn, "text", because, is_async=is_async)
        raise OptionError(
            f"the reward {name!r} has the signature {signature}: a reward takes either "
            "`completions` (a list of texts; and `prompts` and columns if it likes) or one text; "
            "bind its other parameters with functools.partial"
        )


def _itself(value: Any) -> Any:
    return value


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


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


def _describe(value: Any) -> str:
    return f"{shorten(repr(value))} ({type(value).__name__})"


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
