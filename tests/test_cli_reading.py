"""Prompts in: formats, encodings, overrides, carried fields, and lines that cannot run."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from guided_smc.cli.reading import PromptLine, PromptSource
from guided_smc.errors import OptionError, PromptError
from guided_smc.options import Options

BASE = Options(max_tokens=20, seed=3)


def read(tmp_path: Path, data: bytes, name: str = "p.jsonl", fmt: Any = "auto") -> list[PromptLine]:
    path = tmp_path / name
    path.write_bytes(data)
    source = PromptSource(str(path), fmt)
    lines = list(source.lines(BASE))
    assert source.count() == len(lines)
    assert list(source.digests()) == [line.digest for line in lines]
    assert [line.index for line in lines] == list(range(len(lines)))
    assert all((line.error is None) == (line.prompt is not None) for line in lines)
    return lines


def read_one(tmp_path: Path, record: Any) -> PromptLine:
    (line,) = read(tmp_path, json.dumps(record).encode())
    return line


# -- files and formats ---------------------------------------------------------------------------


def test_a_text_file_holds_one_prompt_a_line_and_blank_lines_do_not_count(tmp_path):
    lines = read(tmp_path, "\nfirst  \n \t\n{not json\nÜber\n".encode(), "p.txt")
    assert [line.prompt for line in lines] == ["first  ", "{not json", "Über"]
    assert [line.number for line in lines] == [2, 4, 5]
    assert all(line.options is BASE for line in lines)


def test_bom_and_crlf_and_a_missing_last_newline_leave_no_trace(tmp_path):
    lines = read(tmp_path, b"\xef\xbb\xbfone\r\n\r\ntwo", "p.txt")
    assert [line.prompt for line in lines] == ["one", "two"]
    lines = read(tmp_path, b'\xef\xbb\xbf{"prompt": "one"}\r\n')
    assert [line.prompt for line in lines] == ["one"]


def test_only_newlines_end_a_line(tmp_path):
    text = "a\x85b\u2028c\x0bd\re"
    (line,) = read(tmp_path, text.encode(), "p.txt")
    assert line.prompt == text


def test_the_digest_is_that_of_the_line_and_not_of_its_ending(tmp_path):
    unix = read(tmp_path, b"one\ntwo\n", "p.txt")
    dos = read(tmp_path, b"\xef\xbb\xbfone\r\ntwo", "p.txt")
    assert [line.digest for line in unix] == [line.digest for line in dos]
    assert unix[0].digest != unix[1].digest


@pytest.mark.parametrize(
    ("name", "fmt", "data", "is_json"),
    [
        ("p.jsonl", "auto", b'{"prompt": "x"}', True),
        ("p.NDJSON", "auto", b'{"prompt": "x"}', True),
        ("p.txt", "auto", b'{"prompt": "x"}', False),
        ("p.prompts", "auto", b' {"prompt": "x"}', True),
        ("p.prompts", "auto", b'"prompt"', False),
        ("p.prompts", "txt", b'{"prompt": "x"}', False),
        ("p.txt", "jsonl", b'{"prompt": "x"}', True),
    ],
)
def test_the_format_follows_the_option_then_the_suffix_then_the_first_line(
    tmp_path, name, fmt, data, is_json
):
    (line,) = read(tmp_path, data, name, fmt)
    assert line.prompt == ("x" if is_json else data.decode())


def test_an_unnamed_format_is_decided_once_so_that_a_later_line_is_an_error(tmp_path):
    good, bad = read(tmp_path, b'{"prompt": "x"}\nplain\n', "p.data")
    assert good.error is None
    assert "line 2: not valid JSON" in str(bad.error)


def test_standard_input_is_read_as_it_comes(monkeypatch):
    class Slow(io.BytesIO):
        given = 0

        def __next__(self) -> bytes:
            self.given += 1
            return super().__next__()

    stdin = Slow(b'{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": stdin}))
    source = PromptSource("-")
    assert not source.rereadable
    assert source.count() is None
    lines = source.lines(BASE)
    assert next(lines).prompt == "a"
    assert stdin.given == 1
    assert [line.prompt for line in lines] == ["b", "c"]


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(click.UsageError, match=r"prompt file not found: .*none\.txt"):
        PromptSource(str(tmp_path / "none.txt"))
    with pytest.raises(click.UsageError, match=r"cannot read prompts from .*: Is a directory"):
        PromptSource(str(tmp_path))


def test_utf_16_is_recognised(tmp_path):
    (tmp_path / "p.txt").write_bytes("one\ntwo\n".encode("utf-16"))
    source = PromptSource(str(tmp_path / "p.txt"))
    with pytest.raises(click.UsageError, match=r"p\.txt is in UTF-16; convert it to UTF-8"):
        list(source.lines(BASE))


# -- lines that cannot run -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"prompt": "x"', r"line 2: not valid JSON: Expecting ',' delimiter at column 15"),
        (b'{"prompt": NaN}', "line 2: not valid JSON: NaN is not a JSON value"),
        (b'{"prompt": "x", "y": 1e999}', "line 2: not valid JSON: the number 1e999 is out of"),
        (b'{"prompt": "x", "y": ' + b"9" * 5000 + b"}", "line 2: not valid JSON: "),
        (b"[" * 200_000, "line 2: not valid JSON: "),
        (b'"x"', 'line 2: expected a JSON object with "prompt" or "messages"'),
        (b"{}", 'line 2: expected one of "prompt" and "messages", found neither'),
        (b'{"prompt": null}', "found neither"),
        (b'{"prompt": "x", "messages": [{}]}', "found both"),
        (b'{"prompt": 5}', 'line 2: "prompt" must be a string or a list of token ids'),
        (b'{"prompt": []}', '"prompt" must be a string or a list of token ids'),
        (b'{"prompt": [1, true]}', '"prompt" must be a string or a list of token ids'),
        (b'{"prompt": [1, "x"]}', '"prompt" must be a string or a list of token ids'),
        (b'{"messages": []}', 'line 2: "messages" must be a list of at least one object'),
        (b'{"messages": ["x"]}', '"messages" must be a list of at least one object'),
        (b'{"messages": "x"}', '"messages" must be a list of at least one object'),
        (b'{"prompt": "\\ud800"}', 'line 2: "prompt" holds half of a surrogate pair'),
        (b'{"prompt": "\xff"}', r"line 2: not valid UTF-8 \(byte 0xff at 13\)"),
    ],
)
def test_a_malformed_line_is_an_error_with_its_number_and_the_others_are_read(
    tmp_path, bad, message
):
    first, middle, last = read(tmp_path, b'{"prompt": "a"}\n' + bad + b'\n{"prompt": "b"}\n')
    assert (first.prompt, last.prompt) == ("a", "b")
    assert isinstance(middle.error, PromptError)
    with pytest.raises(PromptError, match=message):
        raise middle.error


def test_invalid_utf_8_in_a_text_file_is_that_lines_error(tmp_path):
    good, bad = read(tmp_path, b"fine\n\n\xc3(\n", "p.txt")
    assert good.prompt == "fine"
    assert str(bad.error) == "line 3: not valid UTF-8 (byte 0xc3 at 1)"


def test_a_failed_line_keeps_its_carried_fields(tmp_path):
    line = read_one(tmp_path, {"id": 7, "prompt": 5})
    assert line.error is not None
    assert line.carried == {"id": 7}


# -- prompts, overrides, carried fields ----------------------------------------------------------


def test_messages_and_token_ids_pass_through_as_they_are(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    assert read_one(tmp_path, {"messages": messages}).prompt == messages
    assert read_one(tmp_path, {"prompt": [5, 0, 7]}).prompt == [5, 0, 7]


def test_every_option_can_be_overridden_by_its_name_and_is_not_carried(tmp_path):
    wanted = Options(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        power=2.0,
        stop=("x",),
        seed=9,
        n_particles=3,
        target_ess=1.5,
        min_particles=3,
        max_particles=5,
        block_size="auto",
        ess_threshold=0.25,
        resampling="residual",
        draft_temperature=0.3,
        select="vote",
        max_restarts=4,
    )
    changed = {k: v for k, v in wanted.model_dump().items() if v != getattr(BASE, k)}
    assert set(changed) == set(Options.model_fields) - {"method", "islands"}
    for name, value in {"method": "importance", "islands": 2}.items():  # these exclude some of them
        line = read_one(tmp_path, {"prompt": "x", name: value})
        assert line.error is None and getattr(line.options, name) == value
    line = read_one(tmp_path, {"prompt": "x", "id": "a", **changed})
    assert line.options == wanted
    assert line.own_seed
    assert line.carried == {"id": "a"}


def test_what_a_line_does_not_override_is_the_commands_and_null_overrides_nothing(tmp_path):
    line = read_one(tmp_path, {"prompt": "x", "temperature": 0, "max_tokens": None, "seed": None})
    assert line.options == Options(max_tokens=20, seed=3, temperature=0)
    assert not line.own_seed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "line 1: max_tokens: .*greater than 0, got 0"),
        ({"n_particles": -1}, "line 1: n_particles: .*greater than 0, got -1"),
        ({"select": "first"}, "line 1: select: "),
        ({"temperature": "hot"}, "line 1: temperature: "),
    ],
)
def test_an_invalid_override_is_that_lines_error(tmp_path, changes, message):
    line = read_one(tmp_path, {"prompt": "x", **changes})
    with pytest.raises(OptionError, match=message):
        raise line.error


def test_an_option_spelt_with_a_hyphen_is_refused_rather_than_carried(tmp_path):
    line = read_one(tmp_path, {"prompt": "x", "max-tokens": 5})
    assert str(line.error) == (
        'line 1: unknown field "max-tokens": the option is called "max_tokens"'
    )


def test_a_field_that_is_nearly_an_option_is_carried_with_one_warning(tmp_path, capsys):
    record = {"prompt": "a", "max_token": 3, "Top-P": 1, "message": "x", "id": 1, "note": "y"}
    lines = "".join(json.dumps(record) + "\n" for _ in range(3))
    for line in read(tmp_path, lines.encode()):
        assert line.error is None and line.carried == {
            n: record[n] for n in record if n != "prompt"
        }
        assert line.options.max_tokens == BASE.max_tokens
    said = sorted(capsys.readouterr().err.splitlines())
    assert [line.rpartition(";")[2] for line in said] == [
        " did you mean 'top_p'?",
        " did you mean 'max_tokens'?",
        " did you mean 'messages'?",
    ]
    assert said[1].startswith("Warning: line 1: the field 'max_token' means nothing here")


def test_all_other_fields_are_carried_whatever_they_hold(tmp_path):
    fields = {"id": 1, "text": "mine", "nested": {"a": [None, True]}, "dash-ed": ""}
    assert read_one(tmp_path, {"prompt": "x", **fields}).carried == fields


def test_of_a_pipe_only_whole_lines_are_read_and_nothing_waits(monkeypatch):
    out_of, into = os.pipe()
    with open(out_of, "rb") as stdin, open(into, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin))
        lines = PromptSource("-").lines(BASE)
        assert next(lines) is None
        writer.write(b"first\nsec")
        assert next(lines).prompt == "first"
        assert next(lines) is None
        writer.write(b"ond\n\nthird")
        assert next(lines).prompt == "second"
        assert next(lines) is None
        writer.close()
        (third,) = lines
        assert (third.prompt, third.index, third.number) == ("third", 2, 4)
