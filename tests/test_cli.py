"""The real command, as a process, on the small real model.

Starting the model takes seconds, so that each of these tests shows as much as one start can.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from starting import run_command

from guided_smc.cli.main import cli, main

COMMAND = [sys.executable, "-m", "guided_smc.cli"]
COLOURS = ["red", "green", "blue"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

PLUGIN = """
from enum import Enum
from pydantic import BaseModel, Field

class Colour(str, Enum):
    red = "red"
    green = "green"

class Paint(BaseModel):
    colour: Colour = Field(alias="Colour")

NUMBER = 5

def fussy(prompts, completions):
    print("a reward that prints")
    if "raise" in prompts[0]:
        raise KeyError("broken")
    if "short" in prompts[0]:
        return []
    return [float("nan") if "nan" in prompts[0] else 0.0] * len(completions)

def two(text, other):
    return 0.0

def likes_green(text):
    return 1.0 if "green" in text else 0.0
"""

real_model = pytest.mark.model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    (tmp_path / "colour.json").write_text(json.dumps({"enum": COLOURS}))
    (tmp_path / "g.lark").write_text("start: word\nword: <|special|>\n")
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "p.txt").write_text("Name a colour.\n")
    return tmp_path


def call(
    arguments: str | Sequence[str], stdin: bytes = b"", **changes: Any
) -> subprocess.CompletedProcess[bytes]:
    words = arguments.split() if isinstance(arguments, str) else arguments
    if not changes:
        return run_command(words, stdin)
    given: dict[str, Any] = {"input": stdin, "capture_output": True, "timeout": 600}
    return subprocess.run([*COMMAND, *words], **{**given, **changes})


def read_terminal(terminal: int) -> str:
    """All that is written to a pseudo-terminal until its other side is closed."""
    shown = b""
    # Some systems end the file, others report an error.
    with os.fdopen(terminal, "rb", buffering=0) as file, contextlib.suppress(OSError):
        while data := file.read(4096):
            shown += data
    return shown.decode()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_jsonl(path: Path, records: Sequence[dict[str, Any] | str]) -> None:
    lines = (r if isinstance(r, str) else json.dumps(r) for r in records)
    path.write_text("\n".join(lines) + "\n")


# -- no model is needed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["--help", "check --help", "generate --help", "models --help", "tune --help", "--version"],
)
def test_help_and_version_import_nothing_heavy(command):
    script = (
        "import sys\n"
        "from guided_smc.cli import main\n"
        "try:\n"
        f"    main({command.split()!r})\n"
        "finally:\n"
        "    assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if "help" in command:
        assert "Examples:" in done.stdout
    else:
        assert done.stdout.startswith("guided-smc 0.")


@pytest.mark.parametrize("reward", ["nope", "length:ten", "0.5*", "keywords"])
def test_a_wrong_reward_is_told_before_anything_heavy_is_imported(reward, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    script = (
        "import sys\n"
        "from guided_smc.cli import main\n"
        "try:\n"
        f"    main(['generate', {str(prompts)!r}, '--reward', {reward!r}])\n"
        "finally:\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_the_help_of_each_command_states_its_exit_codes(name):
    text = CliRunner().invoke(cli, [name, "--help"]).output
    codes = re.findall(r"^ {4}(\d+)  ", text.partition("Exit codes:")[2], flags=re.M)
    assert codes[:3] == ["0", "1", "2"], text


def test_the_help_states_the_exit_codes_and_every_sampling_option():
    from guided_smc.options import Options

    text = call("generate --help").stdout.decode()
    for code in ("\n    0 ", "\n    1 ", "\n    2 ", "\n    130 ", "143", "141"):
        assert code in text
    for name in Options.model_fields:
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", None),
        ("generate", "Missing argument 'PROMPTS'."),
        ("generate p.txt --bogus", "No such option '--bogus'."),
        ("generate none.txt", "prompt file not found: none.txt"),
        ("generate .", "cannot read prompts from .: Is a directory"),
        ("generate p.txt --max-tokens 0", "--max-tokens: Input should be greater than 0, got 0"),
        ("generate p.txt --n-particles -1", "--n-particles: Input should be greater than 0"),
        ("generate p.txt --max-tokens many", "Invalid value for '--max-tokens'"),
        ("generate p.txt --temperature nan", "--temperature: Input should be a finite number"),
        ("generate p.txt --batch-rows 0", "Invalid value for '--batch-rows'"),
        ("generate p.txt --select first", "Invalid value for '--select'"),
        ("generate p.txt --reward plugin:fussy --beta inf", "--beta must be a finite number"),
        ("generate p.txt --beta 2", "need --reward or --rewards"),
        ("generate p.txt --reward-on end", "need --reward or --rewards"),
        ("generate p.txt --block-size 2", "--block-size needs --draft"),
        ("generate p.txt --draft-temperature 1", "--draft-temperature needs --draft"),
        ("generate p.txt --block-size some", "'some' is neither a number nor auto"),
        ("generate p.txt --draft int8 --block-size -1", "--block-size: must be a whole number"),
        ("generate p.txt --max-particles 9", "--max-particles: needs target_ess, got 9"),
        ("generate p.txt --target-ess 9", "--target-ess: must be at most --max-particles=8"),
        ("generate p.txt --stop . --schema colour.json", "--stop does not go with --schema"),
        ("generate p.txt --stop . --regex [a-z]+", "--stop does not go with --regex"),
        ("generate p.txt --schema colour.json --regex a", "--schema and --regex exclude each"),
        ("generate p.txt --regex a --grammar g.lark", "--regex and --grammar exclude each other"),
        ("generate p.txt --regex [a", "--regex: '[a' is not a regular expression"),
        ("generate p.txt --regex (?i)(a)\\1", "a backreference that ignores case"),
        ("generate p.txt --grammar none.lark", "grammar file not found: none.lark"),
        ("generate p.txt --grammar g.lark", "grammar g.lark: line 2: "),
        ("generate p.txt --grammar library:sms", "there is no grammar 'sms' in the library"),
        ("generate p.txt --grammar library:csv", "the grammar 'csv' needs columns"),
        ("generate p.txt --device cpu --device-map auto", "exclude each other"),
        ("generate p.txt --device-map {x", "--device-map is not valid JSON"),
        ("generate p.txt --reward plugin:missing", "missing"),
        ("generate p.txt --reward nowhere:f", "nowhere"),
        ("generate p.txt --reward plugin:NUMBER", "plugin:NUMBER is not a function or a reward"),
        ("generate p.txt --reward plugin:two", "the reward 'two' has the signature"),
        ("generate p.txt --schema none.json", "schema file not found: none.json"),
        ("generate p.txt --schema p.txt", "schema p.txt is not valid JSON"),
        ("generate p.txt --schema plugin:likes_green", "parameter 'text' of likes_green has no"),
        ("generate p.txt --schema invalid.json", "$.properties.age"),
        ("generate p.txt --schema unsupported.json", "other.json"),
        ("generate p.txt -o no/out.jsonl", "cannot write to no/out.jsonl: No such file"),
        ("generate p.txt -o p.txt --overwrite", "p.txt is the prompt file"),
        ("generate p.txt -o taken.jsonl", "taken.jsonl already exists"),
        ("generate p.txt -o person.json --resume", "line 1 is not a record of guided-smc"),
        ("generate p.txt --resume", "--resume and --overwrite need an output file"),
        ("generate p.txt -o o --retry-errors", "--retry-errors needs --resume"),
        ("generate p.txt -o o --resume --overwrite", "exclude each other"),
        ("generate p.txt -o o --model ./nowhere", "no such file or folder: './nowhere'"),
    ],
)
def test_what_cannot_run_is_told_in_one_line_before_anything_runs(folder, arguments, message):
    invalid = {"type": "object", "properties": {"age": {"type": "integre"}}}
    (folder / "invalid.json").write_text(json.dumps(invalid))
    unsupported = {"type": "array", "items": {"$ref": "other.json"}}
    (folder / "unsupported.json").write_text(json.dumps(unsupported))
    (folder / "taken.jsonl").write_text("{}\n")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    done = call(arguments)
    if message is None:
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"generate  Generate for every prompt" in done.stdout
        return
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("Error: ")
    assert message in line
    assert done.stdout == b""
    assert {p: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


@real_model
def test_an_unknown_model_or_draft_is_told_by_its_option_with_names_that_are_near(folder):
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = call("generate p.txt --model smollm3", env=offline)
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 2 and line.startswith("Error: --model: 'smollm3' is not a file")
    assert line.endswith(". Perhaps it is 'smollm2-135m'")
    done = call("generate p.txt --draft small7", env=offline)
    line = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 2 and line.startswith("Error: --draft: 'small7' is not a file")
    assert "'int8'" in line and "'ngram'" in line


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("generate p.txt -o out.jsonl --overwrite", "no prompt has run, and out.jsonl is as it "),
        ("sweep p.txt --reward length:5", "nothing has been measured"),
        ("tune ./nowhere", "nothing has been measured"),
    ],
)
def test_an_interruption_while_the_model_loads_says_that_nothing_has_run(
    folder, monkeypatch, capsys, command, told
):
    def interrupt(*given, **named):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr("guided_smc.load", interrupt, raising=False)
    (folder / "out.jsonl").write_text("what was there\n")
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 143
    assert f"Interrupted: {told}" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_text() == "what was there\n"


def test_an_unknown_hub_model_is_an_error_of_one_line(folder):
    done = call(
        "generate p.txt -o out.jsonl --model no-such-owner/no-such-model",
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert "'no-such-owner/no-such-model'" in line
    assert not (folder / "out.jsonl").exists()


@real_model
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "generate p.txt --schema person.json --max-tokens 2 -o out.jsonl",
            "json_schema: --max-tokens=2 is too small; the shortest text that was found has ",
        ),
        (
            "sweep p.txt --regex abcdefghijklmnop --reward length:5 --max-tokens 1",
            "--max-tokens=1 is too small; the shortest text has ",
        ),
        ("generate p.txt --regex a(?=b)c -o out.jsonl", "there is no text that it allows; look"),
    ],
)
def test_a_constraint_of_which_no_prompt_can_get_a_text_is_refused(folder, arguments, message):
    done = call(arguments)
    assert done.returncode == 2
    assert message in done.stderr.decode().splitlines()[-1]
    assert done.stdout == b"" and not (folder / "out.jsonl").exists()


def test_debug_shows_the_traceback_before_the_line(folder):
    done = call("generate p.txt --max-tokens 0 --debug")
    *traceback, line = done.stderr.decode().splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert line.startswith("Error: --max-tokens")


def test_lines_that_are_all_malformed_need_no_model(folder):
    write_jsonl(folder / "bad.jsonl", ["{", "[]"])
    done = call("generate bad.jsonl -o out.jsonl --model ./nowhere --quiet")
    assert (done.returncode, done.stdout) == (1, b"")
    error, todo = done.stderr.decode().splitlines()
    assert error.startswith("Error: PromptError in 2 lines, the first of them (line 1): not valid")
    assert "--resume --retry-errors" in todo
    first, second = lines_of(folder / "out.jsonl")
    assert first["error"]["message"].startswith("line 1: not valid JSON")
    assert second["error"]["line"] == 2


def test_an_empty_prompt_file_gives_an_empty_output_and_a_warning(folder):
    (folder / "empty.txt").write_text("\n\n")
    done = call("generate empty.txt -o out.jsonl --quiet")
    assert done.returncode == 0
    assert done.stderr == b"Warning: empty.txt holds no prompts\n"
    assert (folder / "out.jsonl").read_bytes() == b""


def test_a_reader_that_goes_away_and_a_full_disk(folder):
    write_jsonl(folder / "bad.jsonl", ["{"])
    reading, writing = os.pipe()
    os.close(reading)
    done = call("generate bad.jsonl", stdout=writing, stderr=subprocess.PIPE, capture_output=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
    done = call("generate bad.jsonl -o /dev/full --quiet")
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == [
        "Stopped: 0 of 1 prompts are done",
        "Error: cannot write to /dev/full: No space left on device",
    ]


@pytest.mark.parametrize(
    ("command", "on_terminal", "bar"),
    [
        ("generate bad.jsonl", "err", True),
        ("generate bad.jsonl --quiet", "err", False),
        ("generate bad.jsonl", "out", False),
        ("generate bad.jsonl", "both", False),
    ],
)
def test_a_bar_is_shown_on_a_terminal_that_does_not_show_the_records(
    folder, command, on_terminal, bar
):
    write_jsonl(folder / "bad.jsonl", ["{", "{"])
    terminal, behind = pty.openpty()
    with open(folder / "elsewhere", "wb") as elsewhere:
        process = subprocess.Popen(
            [*COMMAND, *command.split()],
            stdout=elsewhere if on_terminal == "err" else behind,
            stderr=elsewhere if on_terminal == "out" else behind,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "140"},
        )
        os.close(behind)
        shown = read_terminal(terminal)
    assert process.wait(timeout=60) == 1
    said = shown + (folder / "elsewhere").read_text()
    assert ("prompts/s" in said) == bar
    assert said.count('"index": ') == 2


# -- the main path -------------------------------------------------------------------------------


@real_model
def test_models_tells_what_is_here(folder):
    done = call("models")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"smollm2-135m" in done.stdout


@real_model
def test_a_file_of_prompts_becomes_records_in_order_and_bad_lines_spoil_no_others(folder):
    write_jsonl(
        folder / "p.jsonl",
        [
            {"prompt": "Invent a person.", "id": "a", "text": "mine"},
            '{"prompt": "bad"',
            {"messages": [{"role": "user", "content": "Who is Ann?"}], "select": "all"},
            {"prompt": "Invent a person.", "max_tokens": 6, "max_restarts": 0},
            "",
            {"prompt": "word " * 20_000},
            {"prompt": "x", "max_tokens": 0},
            {"prompt": "x", "stop": ["."]},
            {"prompt": "Someone.", "seed": 7, "n_particles": 1},
            {"prompt": "Someone.", "seed": 7, "n_particles": 1},
            {"messages": [{"role": "user"}], "id": "b"},
        ],
    )
    done = call(
        "generate p.jsonl --schema person.json -o out.jsonl --seed 3 --n-particles 2 "
        "--max-tokens 40 --full"
    )
    assert done.returncode == 1
    assert done.stdout == b""
    records = lines_of(folder / "out.jsonl")
    assert [r["index"] for r in records] == list(range(10))
    kinds = [r["error"]["type"] if "error" in r else None for r in records]
    assert kinds == [
        None,
        "PromptError",
        None,
        "IncompleteOutputError",
        "PromptError",
        "OptionError",
        "OptionError",
        None,
        None,
        "PromptError",
    ]
    for record in records:
        if "error" in record:
            assert record["value"] is None
        elif record["index"] != 2:
            jsonschema.validate(record["value"], PERSON)
            assert json.loads(record["text"]) == record["value"]
            assert record["finish_reason"] == "stop"
            assert record["log_evidence"] < 0
            assert len(record["particles"]) == (2 if record["index"] == 0 else 1)
            assert record["usage"]["seconds"]["verify"] > 0
            assert record["steps"]
    first, malformed, everyone, partial, too_long, no_tokens = records[:6]
    assert (first["id"], first["input"], first["seed"]) == ("a", {"text": "mine"}, 3)
    assert malformed["error"]["line"] == 2
    assert len(everyone["value"]) == len(everyone["text"]) == len(everyone["weights"])
    assert sum(everyone["weights"]) == pytest.approx(1)
    assert partial["finish_reason"] == "length"
    assert partial["n_tokens"] == 6
    assert first["value"] is not None and partial["text"]
    assert partial["log_evidence"] is None
    assert "context" in too_long["error"]["message"]
    assert too_long["error"]["line"] == 6
    assert "max_tokens" in no_tokens["error"]["message"]
    assert records[7]["seed"] == records[8]["seed"] == 7
    assert records[7]["text"] == records[8]["text"]
    assert records[9]["id"] == "b"
    said = done.stderr.decode()
    assert "3 PromptError" in said
    assert "mean ESS / N" in said
    assert "Traceback" not in said
    assert "\x1b[" not in said  # standard error is no terminal here: no bar, no colours


@real_model
def test_standard_streams_hold_records_alone_and_a_reward_that_fails_costs_its_line_only(folder):
    prompts = {
        "raise": "broken",
        "short": "returned 0 scores for 1 texts",
        "nan": "nan",
        "fine": "",
    }
    done = call(
        "generate - --schema colour.json --reward plugin:fussy --n-particles 1 --no-chat --quiet",
        stdin="\r\n".join(json.dumps({"prompt": p, "name": p}) for p in prompts).encode(),
    )
    assert done.returncode == 1
    *failed, fine = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["name"] for r in failed] == ["raise", "short", "nan"]
    for record in failed:
        error = record["error"]
        assert error["type"] == "PotentialError"
        assert error["potential"] == "fussy"
        assert prompts[record["name"]] in error["message"]
        assert json.loads(error["text"]) in COLOURS
        assert repr(error["text"]) in error["message"]
    assert fine["value"] in COLOURS
    said = done.stderr.decode().splitlines()  # what was printed may come late
    error, todo = (line for line in said if line != "a reward that prints")
    assert "PotentialError in 3 lines, the first of them (line 1)" in error
    assert "'broken'" in error and "-o FILE" in todo


@real_model
def test_a_record_comes_before_a_slow_producer_writes_the_next_prompt(folder):
    process = subprocess.Popen(
        [
            *COMMAND,
            *["generate", "-", "--n-particles", "1", "--max-tokens", "3", "--quiet", "--seed", "1"],
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    for index, prompt in enumerate([b"One.\n", b"Two.\n"]):
        process.stdin.write(prompt)
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["index"] == index
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert process.stdout.read() == b""


@real_model
def test_on_a_terminal_a_bar_moves_and_the_draft_the_reward_and_the_order_are_taken(folder):
    (folder / "three.txt").write_text("A colour?\n" * 3)
    terminal, behind = pty.openpty()
    arguments = (
        "generate three.txt --schema plugin:Paint --reward plugin:likes_green --beta 20 "
        "--draft smollm2-135m --block-size 2 --n-particles 2 --batch-rows 4 "
        "--max-tokens 20 --order finished --select best --seed 1 --full"
    )
    process = subprocess.Popen(
        [*COMMAND, *arguments.split()],
        stdout=subprocess.PIPE,
        stderr=behind,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "140"},
    )
    os.close(behind)
    said = read_terminal(terminal)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    records = [json.loads(line) for line in out.splitlines()]
    assert sorted(r["index"] for r in records) == [0, 1, 2]
    for record in records:
        assert set(record["value"]) == {"Colour"}
        assert all(step["block_size"] == 2 for step in record["steps"])
        for particle in record["particles"]:
            score = 20.0 if "green" in particle["text"] else 0.0
            assert particle["log_potentials"]["likes_green"] == score
        heaviest = max(record["particles"], key=lambda p: p["weight"])
        assert json.loads(heaviest["text"]) == record["value"]
    assert "3/3" in said
    assert "prompts/s" in said and "tokens/s" in said and "ESS" in said
    assert "\x1b[?25h" in said  # the cursor is shown again
    assert "mean log-evidence" in said


@real_model
def test_a_draft_with_another_tokenizer_is_refused(folder):
    import tokenizers
    import transformers

    words = {"<eos>": 0, "a": 1, "b": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    config = transformers.LlamaConfig(
        vocab_size=3,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=0,
    )
    other.save_pretrained(folder / "other")
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "other")
    done = call("generate p.txt -o out.jsonl --draft ./other")
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("Error: ")
    assert "tokenizer" in line
    assert not (folder / "out.jsonl").exists()


# -- resuming ------------------------------------------------------------------------------------


def stop_after(n: int, signum: int, arguments: str, path: Path) -> tuple[int, str]:
    """Start the command, send a signal once n more records are written; exit code and stderr."""
    before = path.read_bytes().count(b"\n") if path.exists() else 0
    process = subprocess.Popen(
        [*COMMAND, *arguments.split()],
        stderr=subprocess.PIPE,
        # A shell that runs the tests in the background has told its children to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 600
    while not path.exists() or path.read_bytes().count(b"\n") < before + n:
        assert process.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signum)
    _, err = process.communicate(timeout=600)
    return process.returncode, err.decode()


@real_model
def test_a_run_that_is_killed_then_interrupted_is_resumed_with_each_index_once(folder):
    path = folder / "out.jsonl"
    write_jsonl(folder / "p.jsonl", [{"prompt": f"Colour {i}?", "id": f"n{i}"} for i in range(12)])
    start = "generate p.jsonl --schema colour.json -o out.jsonl --n-particles 2 --batch-rows 4"
    start += " --seed 5 --no-chat"

    code, _ = stop_after(2, signal.SIGKILL, start, path)
    assert code == -signal.SIGKILL
    killed = path.read_bytes()
    assert 2 <= len(lines_of(path)) < 12
    path.write_bytes(killed + b'{"index": 10, "te')  # as a kill in the middle of a write leaves it

    refused = call(start)
    assert refused.returncode == 2
    assert b"out.jsonl already exists" in refused.stderr
    refused = call(f"{start} --resume --temperature 0.5")
    assert refused.returncode == 2
    assert b"was made with other settings" in refused.stderr
    write_jsonl(folder / "others.jsonl", [{"prompt": f"Animal {i}?"} for i in range(12)])
    refused = call(f"{start} --resume".replace("p.jsonl", "others.jsonl"))
    assert refused.returncode == 2
    assert b"was made from other prompts" in refused.stderr
    assert path.read_bytes().startswith(killed)

    code, said = stop_after(2, signal.SIGINT, f"{start} --resume", path)
    assert code == 130
    n = len(lines_of(path))
    assert f"Interrupted: {n} of 12 prompts are done, in out.jsonl; --resume continues" in said
    assert "Traceback" not in said
    assert set(killed.splitlines()) <= set(path.read_bytes().splitlines())
    kept = {r["index"]: r for r in lines_of(path)}

    done = call(f"{start} --resume")
    assert done.returncode == 0
    records = lines_of(path)
    assert [r["index"] for r in records] == list(range(12))
    assert [r["id"] for r in records] == [f"n{i}" for i in range(12)]
    assert all(r["value"] in COLOURS for r in records)
    assert all(records[i] == record for i, record in kept.items())
    assert f"{12 - n} (and {n} kept from before)" in done.stderr.decode()

    whole = path.read_bytes()
    again = call(f"{start} --resume --model smollm2-135m")
    assert again.returncode == 0
    assert path.read_bytes() == whole


@real_model
def test_a_pattern_or_a_grammar_holds_the_output(folder):
    (folder / "colour.lark").write_text('start: "red" | "blue"\n')
    given = "generate p.txt --max-tokens 8 --seed 1 -o"
    for name, option in [("a", "--regex (?i)red|blue"), ("b", "--grammar colour.lark")]:
        done = call(f"{given} {name}.jsonl {option}")
        assert done.returncode == 0, done.stderr
        (record,) = lines_of(folder / f"{name}.jsonl")
        assert record["value"] == record["text"]
        assert record["text"].lower() in ("red", "blue")
    done = call(f"{given} c.jsonl --grammar library:iso_date --max-tokens 12")
    assert done.returncode == 0, done.stderr
    (record,) = lines_of(folder / "c.jsonl")
    assert record["value"] == record["text"] == str(date.fromisoformat(record["text"]))
    refused = call(f"{given} a.jsonl --resume --regex red")
    assert refused.returncode == 2
    assert b"was made with other settings" in refused.stderr
