"""`guided-smc check`, mostly in this process: starting one takes a second."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import jsonschema
import pytest

from guided_smc.cli import main

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder with some files; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    (tmp_path / "note.json").write_text('{"contentEncoding": "base64"}')
    (tmp_path / "list.lark").write_text('start: "[" (ITEM ("," ITEM)*)? "]"\nITEM: /[a-z]+/\n')
    (tmp_path / "endless.lark").write_text('start: "a" start\n')
    (tmp_path / "twice.json").write_text('{"items": {"type": "null", "type": "null"}}')
    (tmp_path / "empty.json").write_bytes(b"\xef\xbb\xbf\n")
    (tmp_path / "mark.json").write_bytes(b'\xef\xbb\xbf{"const": 1}')
    (tmp_path / "mark.lark").write_bytes(b'\xef\xbb\xbfstart: "1"')
    (tmp_path / "list.txt").write_bytes(b"[ab,cd]\r\n")
    (tmp_path / "latin.txt").write_bytes(b"[\xe4]")
    (tmp_path / "schemas.py").write_text(
        "import pydantic\nclass Point(pydantic.BaseModel):\n    x: int\n    y: int = 0\n"
        "from guided_smc import regex\nnone = regex('a+') & regex('b+')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*words, stdin=b""):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as caught:
            main(["check", *words])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


def test_it_says_what_became_of_a_schema(check):
    code, out, err = check("--schema", "person.json")
    assert (code, err) == (0, "")
    first, *rows = out.splitlines()
    assert first.startswith("schema person.json compiles in ")
    assert first.endswith(" ms")
    cells = {tuple(part.strip() for part in row.strip().split("  ", 1)) for row in rows}
    assert ("engine", "llguidance's masks, and a check of closed values") in cells
    assert ("source bytes", str(len(json.dumps(PERSON)))) in cells
    assert ("subschemas", "4") in cells
    assert ("checked", "uniqueItems ($.properties.tags.uniqueItems)") in cells
    code, out, _ = check("--schema", "note.json")
    assert code == 0
    assert "ignored        contentEncoding ($.contentEncoding)" in out


@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        (["--schema", "person.json", "--text", '{"name": "Ada"}'], 0, ["text accepted"]),
        (["--schema", "person.json", "--text", '{"name": 1}'], 1, [
            "text refused at line 1, column 10 (character 9, byte 9)",
            '  {"name": 1}', "           ^", "\"1\" is not allowed here; allowed: '\"'"]),
        (["--schema", "person.json", "--text", '{"name": "A", "tags": ["b", "b"]}'], 1, [
            "text refused at line 1, column 31 (character 30, byte 30)",
            '  {"name": "A", "tags": ["b", "b"]}', " " * 32 + "^",
            "uniqueItems at $.tags[1]: an equal item came before"]),
        (["--schema", "schemas:Point", "--text", '{"x": 1}'], 0, ["text accepted"]),
        (["--grammar", "list.lark", "--text-file", "list.txt"], 0, ["text accepted"]),
        (["--grammar", "list.lark", "--text", "[ab"], 1, [
            "text ends too early at line 1, column 4 (character 3, byte 3)", "  [ab", "     ^",
            'the text is a valid beginning, but ends too early; it could go on with lower-case '
            'letters, "," or "]"']),
        (["--regex", "[a-z]+", "--text", ""], 1, [
            "text ends too early at line 1, column 1 (character 0, byte 0)", "  ", "  ^",
            "the text is a valid beginning, but ends too early; it could go on with lower-case "
            "letters"]),
    ],
)  # fmt: skip
def test_a_text_is_accepted_or_shown_where_it_dies(check, words, code, last):
    found, out, err = check(*words)
    assert (found, err) == (code, "")
    assert out.splitlines()[-len(last) :] == last


def test_a_text_may_come_from_standard_input_without_its_last_line_break(check):
    assert check("--regex", "ä\n?", "--text-file", "-", stdin="ä\n".encode())[0] == 0
    code, out, _ = check("--regex", "a", "--text-file", "-", stdin=b"a\n\n")
    assert code == 1
    assert "a line break comes after the end" in out


def test_members_are_drawn_and_the_seed_gives_them_again(check):
    words = ("--schema", "person.json", "--sample", "4", "--max-characters", "90", "--json")
    code, out, err = check(*words, "--seed", "1")
    assert (code, err) == (0, "")
    members = json.loads(out)["members"]
    assert len(members) == 4
    for member in members:
        jsonschema.validate(json.loads(member), PERSON)
        assert len(member) <= 90
    assert json.loads(check(*words, "--seed", "1")[1])["members"] == members
    code, out, _ = check("--regex", "a\n?b", "--sample", "20", "--seed", "0")
    assert {"member ab", 'member "a\\nb"'} == set(out.splitlines()[-20:])


def test_where_no_member_is_found_the_exit_code_is_1(check):
    code, out, err = check("--regex", "a{9}", "--sample", "1", "--max-characters", "5")
    assert code == 1
    assert out.startswith("regex a{9} compiles")
    assert err.startswith("Error: regex 'a{9}': no member of up to 5 characters")


def test_json_says_it_all_to_machines(check):
    words = ("--schema", "person.json", "--json", "--text", '{"name": "Ä", "tags": ["b", "b"]}')
    code, out, err = check(*words)
    assert (code, err) == (1, "")
    record = json.loads(out)
    assert record["relaxed"] == [
        {"keyword": "uniqueItems", "path": "$.properties.tags.uniqueItems", "enforced": True}
    ]
    assert record["sizes"]["source_bytes"] == len(json.dumps(PERSON))
    assert 0 < record["seconds"] < 60
    text = record["text"]
    assert (text["verdict"], text["offset"], text["byte_offset"]) == ("refused", 30, 31)
    assert (text["line"], text["column"], text["checked"]) == (1, 31, True)
    assert text["refusal"]["keyword"] == "uniqueItems"
    assert text["allowed"]["in_words"].startswith("any character")
    code, out, err = check("--regex", "[a", "--json")
    assert code == 2
    assert json.loads(out)["error"] in err


def test_the_time_limit_compiles_in_a_worker_and_names_itself(check, monkeypatch):
    from guided_smc.grammars import worker

    asked = []
    monkeypatch.setattr(worker._workers, "ask", lambda _, limits: asked.append(limits))
    monkeypatch.setattr(worker._workers, "take", lambda: None)
    monkeypatch.setattr(worker._workers, "give_back", lambda _: None)
    assert check("--schema", "person.json", "--time-limit", "1.5")[0] == 0
    assert [limits.max_compile_seconds for limits in asked] == [1.5]
    assert check("--schema", "person.json")[0] == 0
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "one of --schema, --regex and --grammar is needed"),
        ("--regex a --grammar list.lark", "--regex and --grammar exclude each other"),
        ("--regex a --text a --text-file list.txt", "--text and --text-file exclude each other"),
        ("--regex a --seed 1", "--seed and --max-characters need --sample"),
        ("--regex a --max-characters 1", "--seed and --max-characters need --sample"),
        ("--regex a --sample -1", "Invalid value for '--sample'"),
        ("--regex a --time-limit 0", "Invalid value for '--time-limit'"),
        ("--regex a --text-file none.txt", "text file not found: none.txt"),
        ("--regex a --text-file latin.txt", "text latin.txt is not in UTF-8"),
        (
            "--schema twice.json",
            'twice.json is ambiguous: the key "type" comes twice in one object, at $.items.type',
        ),
        ("--schema schemas:none", "no text satisfies both regex 'a+' and regex 'b+'"),
        ("--schema empty.json", "schema empty.json is empty"),
        ("--grammar empty.json", "grammar empty.json: the grammar is empty"),
        ("--regex [a", "--regex: '[a' is not a regular expression"),
        ("--schema none.json", "schema file not found: none.json"),
        ("--schema list.lark", "schema list.lark is not valid JSON"),
        ("--grammar endless.lark", "grammar endless.lark: no finite text satisfies the rule"),
    ],
)
def test_what_does_not_compile_or_makes_no_sense_exits_with_2_and_one_line(check, words, message):
    code, out, err = check(*words.split())
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("Error: ")
    assert message in line


@pytest.mark.parametrize("option", ["--schema", "--grammar", "--text-file"])
def test_the_empty_name_of_a_file_is_told(check, option):
    others = ["--regex", "a"] if option == "--text-file" else []
    code, out, err = check(*others, option, "")
    assert (code, out) == (2, "")
    assert "the name of the" in err or "needs the name of a file" in err


@pytest.mark.parametrize("language", [("--schema", "mark.json"), ("--grammar", "mark.lark")])
def test_a_byte_order_mark_in_front_of_a_file_is_not_read(check, language):
    assert check(*language, "--text", "1")[0] == 0
    assert check(*language, "--text-file", "-", stdin=b"\xef\xbb\xbf1\n")[0] == 0
    assert check(*language, "--text", "\ufeff1")[0] == 1


def test_the_real_command_loads_no_model_library_and_documents_its_exit_codes(tmp_path):
    (tmp_path / "distinct.json").write_text('{"type": "array", "uniqueItems": true}')
    (tmp_path / "list.lark").write_text('start: "a" ("," "a")*\n')
    script = (
        "import sys\n"
        "from guided_smc.cli import main\n"
        "for words in (['--schema', 'distinct.json', '--text', '[1, 1]'],\n"
        "              ['--regex', '(?!b)[a-c]+', '--sample', '1'],\n"
        "              ['--grammar', 'list.lark', '--sample', '1', '--json'],\n"
        "              ['--grammar', 'library:json', '--text', '{}'],\n"
        "              ['--regex', 'a+', '--text', 'ab']):\n"
        "    try:\n"
        "        main(['check', *words])\n"
        "    except SystemExit as ended:\n"
        "        code = ended.code\n"
        "assert not {'torch', 'transformers', 'tokenizers', 'gguf'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith('allowed: "a" or the end\n')


def test_the_help_states_the_exit_codes(check):
    code, out, _ = check("--help")
    assert code == 0
    for status in ("\n    0 ", "\n    1 ", "\n    2 "):
        assert status in out
