"""The run itself: lines become requests, events become records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from guided_smc.cli.common import State, say_error, show_traceback
from guided_smc.cli.interrupts import Interrupted
from guided_smc.cli.progress import Display, Tally, failures, summary
from guided_smc.cli.reading import PromptLine
from guided_smc.cli.records import error_record, result_record
from guided_smc.cli.writing import FileOutput, Output, StreamOutput
from guided_smc.errors import GuidedSMCError
from guided_smc.results import ErrorEvent, Event, ResultEvent, StepEvent
from guided_smc.signals import held

if TYPE_CHECKING:
    from guided_smc.api import LM
    from guided_smc.request import Request

READER_GONE = 141
"""As a shell reports SIGPIPE."""


class ReaderGoneError(Exception):
    """Whoever read the output has gone away: no reason to say anything."""


class Run:
    """One run of the command.

    Args:
        output: Takes the records; closed when the run ends, however it ends.
        tally: Counts.
        state: Whether to show tracebacks.
        settings: Digest that goes into the records' fingerprints.
        full: Write particles and diagnostics.
    """

    def __init__(
        self,
        output: Output,
        tally: Tally,
        state: State,
        *,
        settings: str,
        full: bool,
    ) -> None:
        self._output = output
        self._tally = tally
        self._state = state
        self._settings = settings
        self._full = full
        self._running: dict[int, tuple[PromptLine, int]] = {}  # with the seed

    def finish(
        self,
        lines: Iterable[PromptLine | None],
        lm: LM | None,
        *,
        request: dict[str, Any],
        max_rows: int,
        total: int | None,
        quiet: bool,
        silent: bool = False,
    ) -> int:
        """Run to the end and return the exit code.

        Args:
            lines: What is left to do; None where nothing has arrived yet.
            lm: None where no line needs a model, because each holds an error.
            request: Arguments of every request.
            max_rows: Most particles at once.
            total: Prompts in all, if known.
            quiet: No progress, no summary.
            silent: Not even what failed: another process says it.
        """
        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        # Between records on the same terminal a bar would be torn to pieces.
        records_show = isinstance(self._output, StreamOutput) and self._output.on_terminal
        code: int | None = None
        try:
            self._tally.start()
            with Display(
                self._tally, total=total, console=console, quiet=quiet or records_show
            ) as display:
                for event in self._events(lines, lm, request, max_rows):
                    self._take(event)
                    display.update()
        except ReaderGoneError:
            code = READER_GONE
        except Interrupted as interrupted:
            code = interrupted.exit_code
            click.echo(f"Interrupted: {self._where_it_stands(total)}", err=True)
        except Exception as error:
            click.echo(f"Stopped: {self._where_it_stands(total)}", err=True)
            if isinstance(error, GuidedSMCError):
                raise click.ClickException(str(error)) from error
            raise
        finally:
            code = self._close(code)
        if code == READER_GONE:
            return code
        if not quiet:
            console.print(summary(self._tally))
        if not silent:
            self._say_failures()
        return (1 if self._tally.failed else 0) if code is None else code

    def _events(
        self,
        lines: Iterable[PromptLine | None],
        lm: LM | None,
        settings: dict[str, Any],
        max_rows: int,
    ) -> Iterator[Event[Any]]:
        requests = self._requests(lines, lm, settings)
        if lm is not None:
            return lm.run(requests, max_rows=max_rows)
        for request in requests:
            assert request is None, "a request without a model"
        return iter(())

    def _requests(
        self, lines: Iterable[PromptLine | None], lm: LM | None, settings: dict[str, Any]
    ) -> Iterator[Request[Any] | None]:
        """The requests of the lines that can run; the others are recorded on the way."""
        for line in lines:
            if line is None:
                yield None
                continue
            error: Exception | None = line.error
            if error is None:
                assert lm is not None and line.prompt is not None
                try:
                    request = lm.request(
                        line.prompt,
                        index=line.index,
                        options=line.options,
                        exact_seed=line.own_seed,
                        columns=line.carried,
                        **settings,
                    )
                except Exception as failure:
                    error = failure
                else:
                    self._running[line.index] = (line, request.seed)
                    yield request
                    continue
            self._record_error(line, error)

    def _take(self, event: Event[Any]) -> None:
        if isinstance(event, StepEvent):
            self._tally.add_step(event.step)
        elif isinstance(event, ErrorEvent):
            line, seed = self._running.pop(event.index)
            self._record_error(line, event.error, seed)
        elif isinstance(event, ResultEvent):
            line, _ = self._running.pop(event.index)
            record = result_record(line, event.result, self._fingerprint(line), full=self._full)
            with held():
                self._write(line.index, record)
                self._tally.add_result(event.result, record)

    def _record_error(self, line: PromptLine, error: Exception, seed: int | None = None) -> None:
        if self._state.debug and not isinstance(error, GuidedSMCError):
            show_traceback(error)
        record = error_record(line, error, self._fingerprint(line), seed=seed)
        with held():
            self._write(line.index, record)
            self._tally.add_error(record["error"])

    def _write(self, index: int, record: dict[str, Any]) -> None:
        try:
            self._output.write(index, record)
        except BrokenPipeError:
            raise ReaderGoneError from None
        except OSError as error:
            raise click.ClickException(
                f"cannot write to {self._output.name}: {error.strerror}"
            ) from error

    def _fingerprint(self, line: PromptLine) -> str:
        return f"{line.digest}-{self._settings}"

    def _close(self, code: int | None) -> int | None:
        """Close the output, out of reach of another Ctrl-C; returns the exit code."""
        try:
            with held():
                warning = self._output.close()
            if warning:
                click.echo(f"Warning: {warning}", err=True)
        except BrokenPipeError:
            return READER_GONE
        except OSError as error:
            click.echo(f"Warning: cannot write to {self._output.name}: {error.strerror}", err=True)
            return 1
        except Interrupted as interrupted:
            return interrupted.exit_code
        return code

    def _say_failures(self) -> None:
        said = failures(self._tally)
        for line in said:
            say_error(line)
        if said and isinstance(self._output, FileOutput):
            click.echo(
                "Once the cause is mended, the same command with --resume --retry-errors runs "
                "failed lines again.",
                err=True,
            )
        elif said:
            click.echo(
                "With records in a file (-o FILE), --resume --retry-errors could run failed lines "
                "again.",
                err=True,
            )

    def _where_it_stands(self, total: int | None) -> str:
        done = self._tally.kept + self._tally.done
        said = (
            f"{done} prompts are done" if total is None else f"{done} of {total} prompts are done"
        )
        if isinstance(self._output, FileOutput):
            said += f", in {self._output.name}; --resume continues"
        return said
