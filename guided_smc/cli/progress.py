"""What a run shows on standard error: a progress bar, and a summary table at the end."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from guided_smc.results import Result, Step

_PATIENCE_S = 2.0
"""After so long the display says who is at work."""

_LONGEST = 500
"""Characters of an error's message that are shown: a reward's holds the text that it was given."""


class Tally:
    """What has happened so far in this run.

    Attributes:
        kept: Records that an earlier run left.
        kept_errors: How many of those hold an error.
        valid: Prompts done without an error.
        errors: Prompts done with an error, by its type.
        first_errors: Of each type that of the first line, as the line's record has it.
        restarts: Starts over, all prompts.
        warned: Prompts with warnings.
        returned_tokens: Tokens of the answers.
        particle_tokens: Tokens of all particles, resampled away or not.
        seconds: By phase of the engine.
    """

    def __init__(self, *, kept: int = 0, kept_errors: int = 0) -> None:
        self.kept = kept
        self.kept_errors = kept_errors
        self.valid = 0
        self.errors: Counter[str] = Counter()
        self.first_errors: dict[str, dict[str, Any]] = {}
        self.restarts = 0
        self.warned = 0
        self.returned_tokens = 0
        self.particle_tokens = 0
        self.seconds: Counter[str] = Counter()
        self._ess_fractions = 0.0
        self._steps = 0
        self._log_evidences: list[float] = []
        self._started = time.perf_counter()
        self.elapsed = 0.0

    @property
    def done(self) -> int:
        """Prompts that this run has finished."""
        return self.valid + self.errors.total()

    @property
    def failed(self) -> bool:
        """Whether any record of the output holds an error."""
        return bool(self.errors) or self.kept_errors > 0

    @property
    def mean_ess(self) -> float | None:
        """ESS / N, averaged over all steps of all prompts."""
        return self._ess_fractions / self._steps if self._steps else None

    @property
    def mean_log_evidence(self) -> float | None:
        """Over the prompts whose log-evidence is finite."""
        found = self._log_evidences
        return math.fsum(found) / len(found) if found else None

    def start(self) -> None:
        """The model is there: from now on the clock runs for the rates."""
        self._started = time.perf_counter()

    def add_step(self, step: Step) -> None:
        """A step of one prompt."""
        self._ess_fractions += step.ess / len(step.log_weights)
        self._steps += 1
        self.elapsed = time.perf_counter() - self._started

    def add_result(self, result: Result[Any], record: dict[str, Any]) -> None:
        """A prompt that ran to its end, and the record made of it."""
        n_tokens = record["n_tokens"]
        self.returned_tokens += sum(n_tokens) if isinstance(n_tokens, list) else n_tokens
        self.particle_tokens += result.usage.particle_tokens
        self.seconds.update(result.usage.seconds)
        self.restarts += result.restarts
        self.warned += bool(result.warnings)
        if math.isfinite(result.log_evidence):
            self._log_evidences.append(result.log_evidence)
        if "error" in record:
            self.add_error(record["error"])
        else:
            self.valid += 1
        self.elapsed = time.perf_counter() - self._started

    def add_error(self, error: dict[str, Any]) -> None:
        """A prompt that failed, with the error of its record."""
        kind = error["type"]
        self.errors[kind] += 1
        first = self.first_errors.setdefault(kind, error)
        if error["line"] < first["line"]:  # lines do not finish in their order
            self.first_errors[kind] = error
        self.elapsed = time.perf_counter() - self._started

    def per_second(self, count: int) -> str:
        """A rate, for reading."""
        return f"{count / self.elapsed:.3g}" if self.elapsed > 0 else "0"


class ScoringColumn(ProgressColumn):
    """The reward that is at work, once it has been for some seconds."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Empty where none is, or not for long."""
        scoring = sys.modules.get("guided_smc.rewards.scoring")  # imported where there is a reward
        active = scoring.active() if scoring else None
        if active is None or active.seconds < _PATIENCE_S:
            return Text("")
        return Text(f"{active.name} has been scoring for {active.seconds:.0f} s", style="yellow")


class Display:
    """A progress bar, where standard error is a terminal.

    Args:
        tally: Is shown.
        total: Prompts in all, kept ones included; None if not known.
        console: On standard error.
        quiet: No bar even on a terminal.
    """

    def __init__(
        self, tally: Tally, *, total: int | None, console: Console, quiet: bool = False
    ) -> None:
        self._tally = tally
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            ScoringColumn(),
            console=console,
            disable=quiet or not is_terminal(console),
            # Records may go to a terminal on standard output: rich must not take them for its own.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(
            "", total=total, completed=tally.kept, rates="waiting for the first step"
        )

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.update()
        self._progress.stop()

    def update(self) -> None:
        """Show what the tally holds now."""
        tally = self._tally
        rates = [f"{tally.per_second(tally.done)} prompts/s"]
        rates.append(f"{tally.per_second(tally.returned_tokens)} tokens/s")
        if tally.mean_ess is not None:
            rates.append(f"ESS {tally.mean_ess:.0%}")
        if tally.errors:
            rates.append(f"{tally.errors.total()} failed")
        self._progress.update(
            self._task, completed=tally.kept + tally.done, rates=" · ".join(rates)
        )


def is_terminal(console: Console) -> bool:
    """Whether a bar can move there. `FORCE_COLOR` is a wish for colours, not a terminal."""
    return console.file.isatty() and not console.is_dumb_terminal


def summary(tally: Tally) -> Table:
    """What the run did, as a table of two columns."""
    table = Table(show_header=False, title="guided-smc generate", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("prompts", _count(tally))
    table.add_row("valid", str(tally.valid))
    table.add_row(
        "errors",
        ", ".join(f"{count} {kind}" for kind, count in tally.errors.most_common()) or "0",
    )
    if tally.restarts:
        table.add_row("restarts", str(tally.restarts))
    if tally.warned:
        table.add_row("with warnings", f"{tally.warned} (in their records)")
    table.add_row(
        "tokens/s",
        f"{tally.per_second(tally.returned_tokens)} returned, "
        f"{tally.per_second(tally.particle_tokens)} of particles",
    )
    ess, log_evidence = tally.mean_ess, tally.mean_log_evidence
    table.add_row("mean ESS / N", "-" if ess is None else f"{ess:.2f}")
    table.add_row("mean log-evidence", "-" if log_evidence is None else f"{log_evidence:.2f}")
    phases = ", ".join(f"{phase} {s:.1f}" for phase, s in tally.seconds.most_common())
    table.add_row("seconds", f"{tally.elapsed:.1f}" + (f" ({phases})" if phases else ""))
    return table


def failures(tally: Tally) -> list[str]:
    """What failed: a line for each type of error."""
    said = []
    for kind, count in tally.errors.most_common():
        first = tally.first_errors[kind]
        where = f"line {first['line']}"
        message = " ".join(first["message"].removeprefix(f"{where}: ").split())
        if len(message) > _LONGEST:
            message = message[:_LONGEST] + "... (the whole of it is in the record)"
        lines = "1 line" if count == 1 else f"{count} lines, the first of them"
        said.append(f"{kind} in {lines} ({where}): {message}")
    if tally.kept_errors:
        lines = "1 line" if tally.kept_errors == 1 else f"{tally.kept_errors} lines"
        said.append(f"{lines} failed in an earlier run; their records say why")
    return said


def _count(tally: Tally) -> str:
    count = str(tally.done)
    if tally.kept:
        failed = f", {tally.kept_errors} with an error" if tally.kept_errors else ""
        count += f" (and {tally.kept} kept from before{failed})"
    return count
