"""`guided-smc generate`: its options, and everything that can be checked before a model loads."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from guided_smc.cli.common import (
    SETTINGS,
    State,
    chat_option,
    debug_option,
    draft_option,
    language_options,
    model_option,
    model_options,
    reward_options,
    rows_option,
    tp_plan_option,
)
from guided_smc.cli.interrupts import Interrupts, where_it_stands
from guided_smc.cli.reading import Format, PromptLine, PromptSource
from guided_smc.cli.referents import (
    load_arguments,
    load_language,
    load_model,
    load_tilt,
    refuse_impossible,
)
from guided_smc.cli.sampling import SAMPLING, refuse_no_room, sampling_options, with_flags
from guided_smc.cli.writing import Done, open_output
from guided_smc.errors import OptionError
from guided_smc.options import (
    Options,
    make_options,
)

if TYPE_CHECKING:
    from guided_smc.api import LM

Command = TypeVar("Command", bound=Callable[..., Any])


@click.command(context_settings=SETTINGS, short_help="Generate for every prompt of a file.")
@click.argument("prompts")
@model_option
@draft_option
@language_options
@reward_options
@click.option("--beta", type=float, help="Strength of the rewards.  [default: 1.0]")
@click.option("-o", "--output", default="-", help="Where records go; - is standard output.")
@click.option(
    "--format",
    "fmt",
    type=click.Choice(get_args(Format)),
    default="auto",
    show_default=True,
    help="Of PROMPTS.",
)
@sampling_options()
@click.option(
    "--order",
    type=click.Choice(["input", "finished"]),
    default="input",
    show_default=True,
    help="Order of the records.",
)
@click.option("--resume", is_flag=True, help="Continue the run that left the output unfinished.")
@click.option("--retry-errors", is_flag=True, help="With --resume: run failed lines again.")
@click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
@click.option("--full", is_flag=True, help="Also write particles and steps.")
@chat_option
@rows_option
@model_options
@tp_plan_option
@click.option("--quiet", is_flag=True, help="No progress, notices or summary; errors still.")
@debug_option
@click.pass_obj
def generate(state: State, /, **given: Any) -> int:
    """Generate one output for every prompt in PROMPTS, as JSON lines.

    PROMPTS is a .txt file (one prompt a line), a .jsonl file (one object a line), or - for standard
    input. With another suffix and on standard input it is read as JSONL if its first line begins
    with {, else as text; --format decides otherwise. Blank lines are skipped and not counted. The
    encoding is UTF-8.

    A JSONL line holds "prompt" (a string, or a list of token ids) or "messages" (a list of
    {"role", "content"}). Fields named like a sampling option with underscores ("max_tokens",
    "seed", ...) override it for that line; null keeps the command's. A line's own seed is used as
    it is. All other fields are carried through to the record, with a warning where the name is
    nearly one of these.

    \b
    Examples:
      guided-smc generate prompts.txt
      guided-smc generate prompts.jsonl --schema person.json -o out.jsonl --seed 0
      guided-smc generate prompts.jsonl --schema shop.models:Order -o out.jsonl --resume
      guided-smc generate prompts.txt --regex '[A-Z][a-z]+, [0-9]{1,3}'
      guided-smc generate prompts.txt --reward scores:politeness --beta 2
      guided-smc generate prompts.txt --reward '0.7*length:200' --reward 0.3*sentiment
      echo 'Name a colour.' | guided-smc generate - --temperature 0 --quiet
      guided-smc generate prompts.txt --model Qwen/Qwen2.5-7B --draft Qwen/Qwen2.5-0.5B

    \b
    Records (one JSON object a line):
      index          of the prompt, from 0
      text           of the answer; the best partial text where there is an error
      value          the same as JSON data with --schema; null where there is an error
      finish_reason  stop, length (cut at --max-tokens) or failed
      log_evidence   log of the estimated probability of the constraint and reward; null is -inf
      error          {type, message, line}, only where the line failed; of a reward that failed
                     also {potential, text}
      rewards, kl    with a reward: for each {chosen, tilted, untilted}, its value for the answer
                     and its means with and without tilt; and nats between posterior and model
      n_tokens, seed; restarts and warnings where there are any
      fingerprint    of the line and the settings; --resume compares it
      weights        with --select all, where text, value and n_tokens are lists as well
      prompt, sampling, constraint, selected, diversity, particles, steps, token_texts, usage
                     with --full: what was asked, and all that is known of every particle at every
                     step (`guided-smc view` shows it)
      input          carried fields that are called like one of the above

    Into a file every record is written when it finishes, so a kill loses none; with --order input
    the file is sorted when the run ends. On standard output finished records wait for earlier ones
    (when the run is interrupted they come out at once).

    Behind the run, standard error says for each type of error how many lines failed, and why the
    first of them did, with --quiet too. On a terminal a progress bar moves there, unless the
    records appear there too.

    --resume keeps the records that are there, those with an error too, and drops a torn last line.
    It refuses when the prompts or the settings have changed. --retry-errors runs failed lines
    again, if need be with other settings, such as a larger --max-tokens.

    \b
    Exit codes:
      0    every record of the output is fine
      1    some lines failed, or the run broke off (a message says why)
      2    wrong usage or set-up; nothing ran
      130  Ctrl-C, 143 SIGTERM: what had finished is in the output, and --resume continues
      141  the reader of the output went away
    """  # noqa: D301 (click's mark is the character, not its escape)
    job = _check(**given)
    with Interrupts():
        return _run(job, state)


@dataclass(frozen=True)
class Job:
    """A run whose every part that needs no model has been checked.

    Attributes:
        source: The prompts.
        base: Sampling options of the command.
        settings: Digest of what shapes the records, beside the prompts.
        request: Keyword arguments that every request of the model gets.
        load: Keyword arguments of `guided_smc.load`.
        given: The command's options as they were given.
    """

    source: PromptSource
    base: Options
    settings: str
    request: dict[str, Any]
    load: dict[str, Any]
    given: dict[str, Any]


def _check(**given: Any) -> Job:
    """Check all that can be checked while it costs nothing: options, references, files."""
    if given["retry_errors"] and not given["resume"]:
        raise click.UsageError("--retry-errors needs --resume")
    if given["resume"] and given["overwrite"]:
        raise click.UsageError("--resume and --overwrite exclude each other")
    changes = {name: given[name] for name in SAMPLING if given[name] not in (None, ())}
    try:
        base = make_options(**changes)
    except OptionError as error:
        raise click.UsageError(with_flags(str(error))) from None
    if given["draft"] is None and base.block_size not in (None, 0, "auto"):
        raise click.UsageError("--block-size needs --draft")
    if given["draft"] is None and base.draft_temperature is not None:
        raise click.UsageError("--draft-temperature needs --draft")
    load = load_arguments(given)
    source = PromptSource(given["prompts"], given["fmt"])
    _refuse_same_file(source, given["output"])
    refuse_no_room(load["max_total_tokens"], source.options(base))
    if given["tp_plan"] is not None:
        given = _one_of_several(given, source, base)

    tilt = load_tilt(given, beta=given["beta"])
    language = load_language(given)
    if language.option and base.stop:
        raise click.UsageError(
            f"--stop does not go with {language.option}, which says where to end"
        )
    settings = {
        "options": base.model_dump(mode="json"),
        **{name: given[name] for name in ("model", "draft", "chat")},
        **tilt.settings,
        **language.settings,
    }
    request = {"chat": given["chat"], "output_type": language.constraint, "reward": tilt.reward}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return Job(source, base, digest, request, load, given)


def _run(job: Job, state: State) -> int:
    given, source = job.given, job.source
    output, kept = open_output(
        given["output"],
        in_order=given["order"] == "input",
        resume=given["resume"],
        overwrite=given["overwrite"],
        retry_errors=given["retry_errors"],
    )
    try:
        total = _check_kept(job, output.name, kept) if kept else source.count()
        pending = _skip_kept(job, output.name, kept)
        first: list[PromptLine] = []
        for line in pending:
            if line is None:
                time.sleep(0.01)
                continue
            first.append(line)
            if line.error is None:
                break
        if not first and not kept:
            click.echo(f"Warning: {source.name} holds no prompts", err=True)
        with where_it_stands(f"no prompt has run, and {output.name} is as it was before"):
            lm = _load_model(job) if first and first[-1].error is None else None
            if lm is not None:
                refuse_impossible(lm, job.request["output_type"], source.options(job.base))
        try:
            output.begin()
        except OSError as error:
            raise click.UsageError(f"cannot write to {output.name}: {error.strerror}") from None
    except BaseException:
        output.abandon()
        raise

    from guided_smc.cli.progress import Tally
    from guided_smc.cli.running import Run

    tally = Tally(kept=len(kept), kept_errors=sum(done.failed for done in kept.values()))
    run = Run(output, tally, state, settings=job.settings, full=given["full"])
    return run.finish(
        itertools.chain(first, pending),
        lm,
        request=job.request,
        max_rows=given["batch_rows"],
        total=total,
        quiet=given["quiet"],
        silent=given.get("silent", False),
    )


def _load_model(job: Job) -> LM:
    def notify(message: str) -> None:
        if not job.given["quiet"]:
            click.echo(message, err=True)

    lm = load_model(job.given["model"], job.load, notify)
    if job.base.block_size == "auto" and lm.draft is not None:
        _ = lm.costs  # measured now if need be, and not behind a progress bar
    return lm


# -- resuming ------------------------------------------------------------------------------------


def _check_kept(job: Job, output: str, kept: dict[int, Done]) -> int | None:
    """Refuse records that come from other settings or prompts; returns how many prompts there are.

    Prompts that can be read only once are compared as they pass by, in `_skip_kept`.
    """
    others = [i for i, done in kept.items() if done.fingerprint.partition("-")[2] != job.settings]
    if others and not job.given["retry_errors"]:
        raise click.UsageError(
            f"{output} was made with other settings (model, constraint, reward or sampling "
            "options); repeat those, or start anew with --overwrite"
        )
    if not job.source.rereadable:
        return None
    total = 0
    for index, digest in enumerate(job.source.digests()):
        _check_line(job, output, kept, index, digest)
        total += 1
    surplus = [index for index in kept if index >= total]
    if surplus:
        raise click.UsageError(
            f"{output} holds a record of index {min(surplus)}, but {job.source.name} only "
            f"{total} prompts: it was made from other prompts"
        )
    return total


def _check_line(job: Job, output: str, kept: dict[int, Done], index: int, digest: str) -> None:
    if index in kept and kept[index].fingerprint.partition("-")[0] != digest:
        failed = " (--retry-errors runs it again)" if kept[index].failed else ""
        raise click.UsageError(
            f"{output} was made from other prompts: that of index {index} has changed{failed}"
        )


def _skip_kept(job: Job, output: str, kept: dict[int, Done]) -> Iterator[PromptLine | None]:
    for line in job.source.lines(job.base):
        if line is None or line.index not in kept:
            yield line
        elif not job.source.rereadable:
            _check_line(job, output, kept, line.index, line.digest)


# -- what the options say --------------------------------------------------------------------------


def _one_of_several(given: dict[str, Any], source: PromptSource, base: Options) -> dict[str, Any]:
    """The options of one of the processes that share a model: the first alone writes records."""
    from guided_smc.models.parallel import is_first

    if not source.rereadable:
        raise click.UsageError("--tp-plan needs a prompt file, which every process can read")
    if given["resume"]:
        raise click.UsageError("--resume and --tp-plan exclude each other")
    if base.block_size == "auto":
        raise click.UsageError(
            "--block-size auto and --tp-plan exclude each other: the processes would choose apart"
        )
    if is_first():
        return given
    return {**given, "output": os.devnull, "overwrite": False, "quiet": True, "silent": True}


def _refuse_same_file(source: PromptSource, output: str) -> None:
    target = Path(output)
    if output == "-" or source.path is None or not source.rereadable or not target.exists():
        return
    if target.samefile(source.path):
        raise click.UsageError(f"{output} is the prompt file; write the records elsewhere")
