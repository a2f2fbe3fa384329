"""Records out: the output file and stream, resuming, and runs on an exact table model.

No real model: what is shown here is that no record is lost, doubled, torn or out of place.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import signal
from io import FileIO
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console

from guided_smc import LM, Potential, TableModel, Vocabulary
from guided_smc.cli.common import State
from guided_smc.cli.interrupts import Interrupted, Interrupts
from guided_smc.cli.progress import Tally, failures, summary
from guided_smc.cli.reading import PromptSource
from guided_smc.cli.records import encode
from guided_smc.cli.running import READER_GONE, Run
from guided_smc.cli.writing import FileOutput, StreamOutput, open_output, scan
from guided_smc.engine import Engine
from guided_smc.options import Options
from guided_smc.signals import held

INF = math.inf


# -- files ---------------------------------------------------------------------------------------


def a_record(index: int, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": "x" * index, "fingerprint": "d-s", **more}


def fill(path: Path, *indices: int) -> bytes:
    data = b"".join(encode(a_record(i)) for i in indices)
    path.write_bytes(data)
    return data


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def start(path: Path, **changes: Any) -> FileOutput:
    given = {"in_order": True, "resume": False, "overwrite": False, "retry_errors": False}
    output, _ = open_output(str(path), **{**given, **changes})
    assert isinstance(output, FileOutput)
    output.begin()
    return output


@pytest.mark.parametrize("in_order", [True, False])
def test_a_file_holds_each_record_at_once_and_is_sorted_on_closing_if_asked(tmp_path, in_order):
    path = tmp_path / "out.jsonl"
    output = start(path, in_order=in_order)
    for n, index in enumerate((2, 0, 3, 1), 1):
        output.write(index, a_record(index))
        assert len(indices(path)) == n
    assert output.close() is None
    assert indices(path) == ([0, 1, 2, 3] if in_order else [2, 0, 3, 1])
    assert list(tmp_path.iterdir()) == [path]


def test_sorting_keeps_the_files_permissions_and_follows_links(tmp_path):
    path, link = tmp_path / "out.jsonl", tmp_path / "link"
    path.touch(mode=0o640)
    path.chmod(0o640)
    link.symlink_to(path)
    output = start(link)
    for index in (1, 0):
        output.write(index, a_record(index))
    output.close()
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert indices(path) == [0, 1]


def test_an_existing_output_is_refused_unless_it_is_empty(tmp_path):
    path = tmp_path / "out.jsonl"
    before = fill(path, 0)
    with pytest.raises(click.UsageError, match="already exists; --resume continues it"):
        start(path)
    assert path.read_bytes() == before
    path.write_bytes(b"")
    start(path).close()


def test_overwriting_happens_only_when_the_run_begins(tmp_path):
    path = tmp_path / "out.jsonl"
    before = fill(path, 0, 1)
    output, kept = open_output(
        str(path), in_order=True, resume=False, overwrite=True, retry_errors=False
    )
    assert kept == {}
    assert path.read_bytes() == before
    output.begin()
    assert path.read_bytes() == b""


def test_a_run_that_does_not_start_leaves_no_trace(tmp_path):
    path = tmp_path / "out.jsonl"
    given: Any = {"in_order": True, "resume": False, "overwrite": True, "retry_errors": False}
    open_output(str(path), **given)[0].abandon()
    assert not path.exists()
    before = fill(path, 0)
    open_output(str(path), **given)[0].abandon()
    assert path.read_bytes() == before


@pytest.mark.parametrize("target", ["no/such/folder/out.jsonl", "."])
def test_an_unwritable_output_is_told_before_anything_runs(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(click.UsageError, match=f"cannot write to {target}"):
        start(Path(target))


@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_a_stream_can_be_neither_resumed_nor_overwritten(option):
    with pytest.raises(click.UsageError, match="need an output file"):
        start(Path("/dev/null"), **{option: True})


# -- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_dropped_and_its_prompt_is_not_done(tmp_path, cut):
    path = tmp_path / "out.jsonl"
    data = fill(path, 0, 2, 1)
    path.write_bytes(data[: len(data) - cut])
    done = {0, 2, 1} if cut == 1 else {0, 2}  # only the newline is missing
    assert set(scan(path).records) == done

    output = start(path, resume=True)
    for index in {0, 1, 2, 3} - done:
        output.write(index, a_record(index))
    output.close()
    assert path.read_bytes() == fill(tmp_path / "whole.jsonl", 0, 1, 2, 3)


def test_resuming_what_is_not_there_starts_it(tmp_path):
    output = start(tmp_path / "out.jsonl", resume=True)
    output.write(0, a_record(0))
    output.close()
    assert indices(tmp_path / "out.jsonl") == [0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json\n", "line 2 is not a record of guided-smc"),
        (b'{"index": 1}\n', "line 2 is not a record"),
        (b'{"index": -1, "fingerprint": "x"}\n', "line 2 is not a record"),
        (b"\x00\x00\n", "line 2 is not a record"),
        (b"[]\n", "line 2 is not a record"),
        (b'{"index": 0, "fingerprint": "x"}\n', "line 2 is a second record of index 0"),
    ],
)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_file_that_this_command_did_not_write_is_refused_and_left_alone(
    tmp_path, line, message, at_the_end
):
    path = tmp_path / "out.jsonl"
    # An unterminated last line is dropped only if it can be the beginning of a record.
    rest = line.rstrip(b"\n") if at_the_end else line + encode(a_record(2))
    before = encode(a_record(0)) + rest
    path.write_bytes(before)
    with pytest.raises(click.UsageError, match=message):
        start(path, resume=True)
    assert path.read_bytes() == before


def test_failed_records_are_kept_or_with_retry_errors_taken_out(tmp_path):
    path = tmp_path / "out.jsonl"
    failed = encode(a_record(1, error={"type": "E", "message": "m"}))
    data = encode(a_record(0)) + failed + encode(a_record(2))
    path.write_bytes(data)
    start(path, resume=True).close()
    assert path.read_bytes() == data

    output, kept = open_output(
        str(path), in_order=True, resume=True, overwrite=False, retry_errors=True
    )
    assert set(kept) == {0, 2}
    output.begin()
    assert indices(path) == [0, 2]
    output.write(1, a_record(1))
    output.close()
    assert path.read_bytes() == fill(tmp_path / "whole.jsonl", 0, 1, 2)


def test_a_file_killed_at_any_byte_resumes_to_the_whole_file(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = fill(tmp_path / "whole.jsonl", 0, 1, 2)
    data = fill(path, 1, 0, 2)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        output, kept = open_output(
            str(path), in_order=True, resume=True, overwrite=False, retry_errors=False
        )
        output.begin()
        for index in {0, 1, 2} - set(kept):
            output.write(index, a_record(index))
        output.close()
        assert path.read_bytes() == whole, size


# -- disks that are full, readers that are gone ---------------------------------------------------


class Full(FileIO):
    """A file on a disk with room for so many bytes."""

    room = 0

    def write(self, data: Any) -> int:
        part = bytes(data)[: self.room]
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(part)
        return super().write(part)


def test_a_full_disk_leaves_whole_lines_only(tmp_path):
    path = tmp_path / "out.jsonl"
    output = start(path)
    output.write(0, a_record(0))
    output._file.close()
    output._file = Full(path, "r+b")
    output._file.seek(0, os.SEEK_END)
    output._file.room = 10
    with pytest.raises(OSError, match="No space left"):
        output.write(1, a_record(1))
    output.close()
    assert path.read_bytes() == encode(a_record(0))


def test_sorting_that_fails_keeps_every_record_and_warns(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    output = start(path)
    for index in (1, 0):
        output.write(index, a_record(index))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("guided_smc.cli.writing.os.replace", full)
    assert "not in input order: No space left" in output.close()
    assert indices(path) == [1, 0]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("in_order", [True, False])
def test_on_a_stream_records_wait_for_earlier_ones_until_it_is_closed(tmp_path, in_order):
    path = tmp_path / "stream"
    output = StreamOutput(FileIO(path, "wb"), "stream", in_order=in_order)
    seen = []
    for index in (1, 0, 4, 3):
        output.write(index, a_record(index))
        seen.append(indices(path))
    if in_order:
        assert seen == [[], [0, 1], [0, 1], [0, 1]]
    else:
        assert seen[-1] == [1, 0, 4, 3]
    output.close()
    assert indices(path) == ([0, 1, 3, 4] if in_order else [1, 0, 4, 3])


# -- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_raises_at_once_but_waits_while_it_is_held_back(signum, code):
    before = signal.getsignal(signum)
    signal.signal(signum, signal.SIG_DFL)
    try:
        with Interrupts():
            with pytest.raises(Interrupted) as caught:
                os.kill(os.getpid(), signum)
            assert caught.value.exit_code == code
            finished = False
            with pytest.raises(Interrupted), held():
                os.kill(os.getpid(), signum)
                finished = True
            assert finished
        assert signal.getsignal(signum) is signal.SIG_DFL
    finally:
        signal.signal(signum, before)


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# -- runs on a table model -----------------------------------------------------------------------

VOCABULARY = Vocabulary([b"a", b"b", b"c", b""], eos_ids=[3])
PROMPTS = [a + b + c for a, b, c in itertools.product("abc", repeat=3)]


class Tripwire(Potential):
    """Says nothing, but does something the n-th time it is asked."""

    name = "tripwire"

    def __init__(self, at: int, action: Any) -> None:
        self.at = at
        self.asked = 0
        self.action = action

    def log_complete(self, completions: Any) -> list[float]:
        self.asked += 1
        if self.asked == self.at:
            self.action()
        return [0.0] * len(completions)


def run_on_table(
    tmp_path: Path,
    output: Any = None,
    *,
    data: str | None = None,
    potential: Potential | None = None,
    resume: bool = False,
    total: int | None = None,
) -> tuple[int, Tally]:
    """One run of the command behind its checks, over 27 prompts; 3 prompts of 4 particles fit."""
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS) if data is None else data)
    base = Options(n_particles=4, seed=5, max_tokens=12)
    kept: dict[int, Any] = {}
    if output is None:
        output, kept = open_output(
            str(tmp_path / "out.jsonl"),
            in_order=True,
            resume=resume,
            overwrite=False,
            retry_errors=False,
        )
    output.begin()
    tally = Tally(kept=len(kept))
    lines = (
        line for line in PromptSource(str(tmp_path / "p.txt")).lines(base) if line.index not in kept
    )
    lm = LM(TableModel.random(VOCABULARY, seed=2, eos_probability=0.2))
    with Interrupts():
        run = Run(output, tally, State(), settings="s", full=False)
        code = run.finish(
            lines,
            lm,
            request={"potential": potential},
            max_rows=12,
            total=total,
            quiet=False,
        )
    return code, tally


def test_a_run_writes_every_index_once_and_says_what_it_did(tmp_path, capfd):
    code, tally = run_on_table(tmp_path)
    assert code == 0
    assert indices(tmp_path / "out.jsonl") == list(range(27))
    assert (tally.done, tally.valid) == (27, 27)
    assert 0 < tally.mean_ess <= 1
    records = [json.loads(s) for s in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert tally.returned_tokens == sum(r["n_tokens"] for r in records)
    assert tally.particle_tokens > tally.returned_tokens
    assert tally.mean_log_evidence == pytest.approx(0.0, abs=1e-6)  # no constraint, no reward
    said = capfd.readouterr()
    assert said.out == ""
    for row in ("prompts", "valid", "tokens/s", "mean ESS / N", "mean log-evidence", "verify"):
        assert row in said.err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("at", [1, 9, 20])
def test_an_interrupted_run_resumes_to_the_bytes_of_one_that_was_not(
    tmp_path, capfd, signum, code, at
):
    (tmp_path / "whole").mkdir()
    run_on_table(tmp_path / "whole")
    before = {s: signal.signal(s, signal.SIG_DFL) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        tripwire = Tripwire(at, lambda: os.kill(os.getpid(), signum))
        assert run_on_table(tmp_path, potential=tripwire, total=27)[0] == code
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    found = indices(tmp_path / "out.jsonl")
    assert len(found) < 27
    assert f"Interrupted: {len(found)} of 27 prompts are done, in" in capfd.readouterr().err
    assert run_on_table(tmp_path, resume=True)[0] == 0
    whole = (tmp_path / "whole" / "out.jsonl").read_bytes()
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_lines_that_fail_are_recorded_among_the_others(tmp_path, capfd):
    class Fussy(Potential):
        name = "fussy"

        def log_complete(self, completions: Any) -> list[float]:
            return [math.nan if c.prompt == "bb" else 0.0 for c in completions]

    code, tally = run_on_table(tmp_path, data="aa\nbb\nxx\ncc\n", potential=Fussy())
    assert code == 1
    records = [json.loads(s) for s in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r.get("error", {}).get("type") for r in records] == [
        None,
        "PotentialError",
        "PromptError",
        None,
    ]
    assert records[1]["error"]["potential"] == "fussy"
    assert records[1]["error"]["text"] in records[1]["error"]["message"]
    assert tally.errors == {"PotentialError": 1, "PromptError": 1}
    said = capfd.readouterr().err
    assert "1 PromptError, 1 PotentialError" in said
    for record in (r for r in records if "error" in r):
        error = record["error"]
        assert f"{error['type']} in 1 line (line {error['line']}): " in said
    assert said.count("--retry-errors") == 1


def test_of_what_fails_the_first_line_of_each_type_is_told_and_what_failed_before_is_counted():
    tally = Tally(kept=4, kept_errors=2)
    for kind, line, message in (
        ("PotentialError", 3, "raised\nKeyError"),
        ("PromptError", 4, "line 4: no JSON"),
        ("PotentialError", 2, "x" * 1000),
    ):
        tally.add_error({"type": kind, "line": line, "message": message})
    first, second, before = failures(tally)
    assert first.startswith("PotentialError in 2 lines, the first of them (line 2): xxx")
    assert first.endswith("(the whole of it is in the record)") and len(first) < 700
    assert second == "PromptError in 1 line (line 4): no JSON"
    assert before == "2 lines failed in an earlier run; their records say why"
    assert failures(Tally(kept=3)) == []


def test_a_disk_that_fills_up_stops_the_run_and_keeps_what_was_done(tmp_path, capfd):
    path = tmp_path / "out.jsonl"
    output = FileOutput(path, in_order=True)
    begin = output.begin

    def begin_on_a_small_disk() -> None:
        begin()
        output._file.close()
        output._file = Full(path, "r+b")
        output._file.room = 500

    output.begin = begin_on_a_small_disk  # type: ignore[method-assign]
    with pytest.raises(click.ClickException, match=r"cannot write to .*: No space left") as caught:
        run_on_table(tmp_path, output)
    assert caught.value.exit_code == 1
    n = len(indices(path))
    assert n > 0
    assert f"Stopped: {n} prompts are done, in {path}; --resume continues" in capfd.readouterr().err
    assert run_on_table(tmp_path, resume=True)[0] == 0
    assert indices(path) == list(range(27))


def test_an_unexpected_failure_of_the_engine_keeps_what_was_done(tmp_path, monkeypatch):
    steps = itertools.count()
    settle = Engine._settle

    def fail_later(self: Any, *arguments: Any, **named: Any) -> Any:
        if next(steps) == 25:
            raise RuntimeError("out of memory")
        return settle(self, *arguments, **named)

    monkeypatch.setattr(Engine, "_settle", fail_later)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_on_table(tmp_path)
    found = indices(tmp_path / "out.jsonl")
    assert found
    assert found == sorted(found)
    monkeypatch.undo()
    run_on_table(tmp_path, resume=True)
    assert indices(tmp_path / "out.jsonl") == list(range(27))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_reader_that_goes_away_ends_the_run_in_silence(tmp_path, capfd, in_order):
    reading, writing = os.pipe()
    os.close(reading)
    output = StreamOutput(FileIO(writing, "wb"), "pipe", in_order=in_order)
    assert run_on_table(tmp_path, output)[0] == READER_GONE
    assert capfd.readouterr().err == ""


def test_the_summary_of_a_run_that_had_nothing_left_to_do_divides_by_nothing():
    text = io.StringIO()
    Console(file=text, width=100).print(summary(Tally(kept=3, kept_errors=1)))
    assert "0 (and 3 kept from before, 1 with an error)" in text.getvalue()
