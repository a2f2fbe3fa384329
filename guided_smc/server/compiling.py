"""Constraints of requests: compiled off the event loop, in processes that can be killed, and kept.

What a stranger hands in is compiled in a worker first (`guided_smc.grammars.worker`), within the
limits of time and memory, and then again in this process, where nothing can end it. It takes as
long there as it took in the worker: so a worker gets half of the time that is left, and both
together stay within the limit. What is then left is for looking ahead, which gives up by itself,
after binding the constraint to the model's tokens: that cannot be ended, and other limits bound it.

What is compiled is kept, the least recently used given up first; what
was refused is remembered for a minute, so that sending it again costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from guided_smc.errors import ConstraintError, GuidedSMCError, UnsupportedConstraintError
from guided_smc.grammars import Limits, choice, json_schema, lark, regex
from guided_smc.grammars.finishing import look_ahead
from guided_smc.potentials import Constraint
from guided_smc.server import tools
from guided_smc.server.errors import ApiError
from guided_smc.server.metrics import Metrics
from guided_smc.vocabulary import Vocabulary

Kind = Literal["json", "regex", "grammar", "choice", "tools"]

_REFUSED_S = 60.0
_TOO_SLOW = "constraint_too_slow"
_MOST_RELAXED = 32
_MOST_CHOICES = 10_000


@dataclass(frozen=True)
class Spec:
    """A constraint as a client names it.

    Attributes:
        kind: What it is.
        source: Its text: a pattern, a grammar, or JSON.
        strict: Whether a keyword that cannot be enforced is an error.
        whitespace: Of JSON.
        param: The field that it came from.
    """

    kind: Kind
    source: str
    strict: bool = True
    whitespace: str = "flexible"
    param: str = field(default="response_format", compare=False)


@dataclass(frozen=True)
class Compiled:
    """A constraint, and what was loosened in it.

    Attributes:
        constraint: The language.
        relaxed: Keywords, each with its path and whether texts are checked for it.
    """

    constraint: Constraint
    relaxed: tuple[dict[str, Any], ...] = ()


class Compiler:
    """Compiles constraints, each once.

    Args:
        limits: What one may cost.
        vocabulary: The model's tokens.
        kept: How many are kept.
        metrics: Told how long it took.
    """

    def __init__(
        self,
        limits: Limits,
        vocabulary: Vocabulary,
        *,
        kept: int,
        metrics: Metrics | None = None,
    ) -> None:
        self._limits = limits
        self._vocabulary = vocabulary
        self._kept = kept
        self._metrics = metrics
        self._found: OrderedDict[Spec, Compiled] = OrderedDict()
        self._refused: OrderedDict[Spec, tuple[ApiError, float]] = OrderedDict()
        self._pending: dict[Spec, asyncio.Task[Compiled]] = {}
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, "compile")

    async def compile(self, spec: Spec) -> Compiled:
        """The constraint of a spec.

        Raises:
            ApiError: It is refused, with the field to blame.
        """
        if spec in self._found:
            self._count("yes")
            self._found.move_to_end(spec)
            return self._found[spec]
        error, until = self._refused.get(spec, (None, 0.0))
        if error is not None and time.monotonic() < until:
            self._count("refused")
            raise error.blaming(spec.param)
        if spec not in self._pending:
            self._count("no")
            # A task of its own: who asked first may go away while others wait for it.
            task = asyncio.create_task(self._compile(spec))
            self._pending[spec] = task
            task.add_done_callback(partial(self._settled, spec))
        try:
            return await asyncio.shield(self._pending[spec])
        except ApiError as refusal:
            raise refusal.blaming(spec.param) from refusal.__cause__

    def close(self) -> None:
        """Compile nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, spec: Spec) -> Compiled:
        start = time.perf_counter()
        loop = asyncio.get_running_loop()
        outcome = "refused"
        try:
            made = await loop.run_in_executor(self._threads, self._bound, spec)
            outcome = "compiled"
        except GuidedSMCError as error:
            refusal = ApiError(400, _with_path(error), code=_code(error))
            if refusal.code != _TOO_SLOW:  # which it may be for what else the machine does
                self._refused[spec] = (refusal, time.monotonic() + _REFUSED_S)
                if len(self._refused) > self._kept:
                    self._refused.popitem(last=False)
            raise refusal from error
        finally:
            if self._metrics:
                seconds = time.perf_counter() - start
                self._metrics.compile_seconds.labels(outcome).observe(seconds)
        self._found[spec] = made
        if len(self._found) > self._kept:
            self._found.popitem(last=False)
        return made

    def _bound(self, spec: Spec) -> Compiled:
        """Compiled, and all done that can be done before a run: the engine's thread has others
        to serve.
        """
        allowance = Allowance(self._limits)
        try:
            made = compiled(spec, allowance)
            allowance.check()
            look_ahead(made.constraint, self._vocabulary, allowance.left)
        except ConstraintError as error:
            if error.limit == "max_compile_seconds":
                raise allowance.spent() from None
            raise
        return made

    def _settled(self, spec: Spec, task: asyncio.Task[Compiled]) -> None:
        self._pending.pop(spec, None)
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits any more

    def _count(self, found: str) -> None:
        if self._metrics:
            self._metrics.compile_cache.labels(found).inc()


class Allowance:
    """What a request's constraint may cost, all that it is made of together.

    Args:
        limits: Of the operator.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds = limits.max_compile_seconds or math.inf
        self._until = time.monotonic() + self._seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._until - time.monotonic()

    @property
    def limits(self) -> Limits:
        """For the next part, which is compiled in a worker and, in as much time, here.

        Raises:
            ConstraintError: No time is left.
        """
        self.check()
        if self._seconds == math.inf:
            return self._limits
        return replace(self._limits, max_compile_seconds=self.left / 2)

    def check(self) -> None:
        """Refuse to go on where no time is left.

        Raises:
            ConstraintError: None is.
        """
        if self.left <= 0:
            raise self.spent()

    def spent(self) -> ConstraintError:
        """The error of a constraint that takes too long."""
        return ConstraintError(
            f"compiling it takes more than the limit of {self._seconds:g} seconds; simplify it, or "
            "try again when the server has less to do",
            limit="max_compile_seconds",
        )


def compiled(spec: Spec, allowance: Allowance) -> Compiled:
    """Compile a spec.

    Only what has masks is taken: what is judged text by text, as by patterns with lookaround, can
    take a stranger's time in the middle of everybody's step.

    Raises:
        ConstraintError: Invalid, beyond the limits, or without masks.
    """
    if spec.kind == "json":
        return _json(spec, allowance)
    if spec.kind == "tools":
        return _tools(spec, allowance)
    limits = allowance.limits
    if spec.kind == "regex":
        return Compiled(regex(spec.source, engine="llguidance", limits=limits))
    if spec.kind == "choice":
        if len(spec.source) > limits.max_bytes:
            raise ConstraintError(f"the choices have more than {limits.max_bytes} characters")
        values = json.loads(spec.source)
        if len(values) > _MOST_CHOICES:
            raise ConstraintError(f"{len(values)} choices are more than {_MOST_CHOICES}")
        return Compiled(choice(values))
    made = lark(spec.source, limits=limits)
    if made.engine != "llguidance":
        notes = "; ".join(made.notes())
        raise UnsupportedConstraintError(
            f"this grammar has no masks, and the server takes only what has: {notes}",
            keyword="grammar",
        )
    return Compiled(made)


def _json(spec: Spec, allowance: Allowance) -> Compiled:
    schema = spec.source
    dropped: list[dict[str, Any]] = []
    while True:
        try:
            made = json_schema(
                schema,
                whitespace=spec.whitespace,  # type: ignore[arg-type]
                limits=allowance.limits,
            )
        except UnsupportedConstraintError as error:
            if spec.strict or len(dropped) >= _MOST_RELAXED:
                raise
            schema = json.dumps(without(json.loads(schema), error))
            dropped.append({"keyword": error.keyword, "path": error.path, "enforced": False})
            continue
        found = [
            {"keyword": r.keyword, "path": r.path, "enforced": r.enforced} for r in made.relaxed
        ]
        return Compiled(made, (*dropped, *found))


def _tools(spec: Spec, allowance: Allowance) -> Compiled:
    """Calls of tools; a keyword that no mask knows is dropped where a tool is not strict."""
    asked = json.loads(spec.source)
    dropped: list[dict[str, Any]] = []
    for function in asked["functions"]:
        where = f"tools: {function['name']}: parameters"
        while True:
            try:
                made = json_schema(function["parameters"], limits=allowance.limits)
                missing = [r for r in made.relaxed if r.enforced]
                if not missing:
                    break
                error = UnsupportedConstraintError(
                    f"{missing[0].path}: {missing[0].keyword!r} is more than the mask of a call "
                    "can say; leave it out, or leave strict out",
                    keyword=missing[0].keyword,
                    path=missing[0].path,
                )
            except UnsupportedConstraintError as refused:
                error = refused
            if function["strict"] or len(dropped) >= _MOST_RELAXED:
                raise UnsupportedConstraintError(
                    f"{where}: {error}", keyword=error.keyword, path=error.path
                )
            function["parameters"] = without(function["parameters"], error)
            dropped.append(
                {
                    "keyword": error.keyword,
                    "path": error.path,
                    "enforced": False,
                    "tool": function["name"],
                }
            )
    grammar = tools.grammar(asked["functions"], asked["choice"], parallel=asked["parallel"])
    made_of_all = lark(grammar, engine="llguidance", limits=allowance.limits)
    return Compiled(made_of_all, tuple(dropped))


def without(schema: Any, error: UnsupportedConstraintError) -> Any:
    """A schema without the keyword that an error names, at its path.

    Raises:
        UnsupportedConstraintError: The error itself, where the path leads nowhere.
    """
    node = schema
    steps = _steps(error.path or "$")
    if steps and steps[-1] == error.keyword:  # some paths lead to the keyword itself
        steps.pop()
    for step in steps:
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            raise error from None
    if not isinstance(node, dict) or error.keyword not in node:
        raise error
    del node[error.keyword]
    return schema


def _steps(path: str) -> list[str | int]:
    """The keys and indices of a JSON path, as `json_path` writes them."""
    steps: list[str | int] = []
    for name, index, quoted in re.findall(r'\.([\w$-]+)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]', path):
        steps.append(name or (int(index) if index else json.loads(quoted)))
    return steps


def _code(error: GuidedSMCError) -> str:
    if isinstance(error, UnsupportedConstraintError):
        return "unsupported_constraint"
    slow = isinstance(error, ConstraintError) and error.limit == "max_compile_seconds"
    return _TOO_SLOW if slow else "invalid_constraint"


def _with_path(error: GuidedSMCError) -> str:
    path = getattr(error, "path", None)
    message = error.problem if isinstance(error, ConstraintError) else str(error)
    return message if path is None or path in message else f"{message} (at {path})"
