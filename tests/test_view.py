"""`guided-smc view` and the page that it writes, without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import VOCABULARY

from guided_smc import LM, Vocabulary, viewer
from guided_smc.cli.main import cli
from guided_smc.cli.records import encode
from guided_smc.models.table import TableModel
from guided_smc.records import details

MODEL = TableModel.random(VOCABULARY, seed=11, eos_probability=0.1)
FRONTEND = Path(__file__).parent.parent / "guided_smc" / "viewer" / "frontend"


def a_record(**changes):
    out = LM(MODEL).generate("a", n_particles=4, max_tokens=5, seed=2**62 + 1)
    record = {"index": 0, "text": out.text, "seed": out.seed, "finish_reason": out.finish_reason}
    return record | details(out, prompt="a", options=None) | changes


class Elements(HTMLParser):
    """The tags of a page, and the content of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script" and not self.scripts[-1]:
            self.scripts[-1] = data


def data_of(text: str):
    return json.loads(Elements(text).scripts[0])


def run(*arguments: str, text: str | None = None):
    return CliRunner().invoke(cli, ["view", *arguments], input=text, standalone_mode=False)


def test_a_page_holds_its_records_and_refers_to_nothing_outside():
    record = a_record()
    text = viewer.page([record], title="a <b> title")
    elements = Elements(text)
    assert [tag for tag, _ in elements.tags if tag in ("script", "style", "link", "img")] == [
        *("link", "style", "script", "script")
    ]
    links = [a[k] for _, a in elements.tags for k in ("src", "href") if k in a]
    assert links == ["data:,"]
    assert "<title>a &lt;b&gt; title</title>" in text
    (shown,) = data_of(text)
    assert shown["text"] == record["text"]
    assert shown["steps"] == json.loads(encode({"steps": record["steps"]}))["steps"]


def test_integers_that_javascript_would_round_are_written_as_texts():
    (shown,) = data_of(viewer.page([a_record()]))
    assert shown["seed"] == str(2**62 + 1)


@pytest.mark.parametrize(
    "text",
    [
        "</script><script>alert(1)</script>",
        "<!-- <script>",
        "]]>\u2028\u2029\x00\x1b[31m",
        "\ud800",
        '"}],"x":["',
    ],
)
def test_no_text_ends_the_element_that_it_stands_in(text):
    page = viewer.page([{"text": text, "prompt": text, "error": {"type": text, "message": text}}])
    assert len(Elements(page).scripts) == 2
    assert data_of(page)[0]["text"] == text
    page.encode()


def test_the_policy_of_a_page_lets_its_own_script_run_alone_and_reach_nothing():
    for records, reach in (([a_record()], "'none'"), (None, "'self'")):
        elements = Elements(viewer.page(records))
        (policy,) = (
            a["content"]
            for _, a in elements.tags
            if a.get("http-equiv") == "Content-Security-Policy"
        )
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["connect-src"] == reach
        digest = hashlib.sha256(elements.scripts[1].encode()).digest()
        assert rules["script-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"


def test_the_live_page_holds_no_records():
    assert data_of(viewer.page()) is None


def test_the_script_was_built_from_the_sources_that_are_here():
    names = ["build.mjs", "package-lock.json"]
    names += sorted(f"src/{path.name}" for path in (FRONTEND / "src").iterdir())
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\n".encode())
        digest.update((FRONTEND / name).read_bytes())
    built_from = (FRONTEND.parent / "assets" / "sources.sha256").read_text().strip()
    assert digest.hexdigest() == built_from, "run make viewer"


def test_every_package_in_the_script_has_its_licence_beside_it():
    notices = (FRONTEND.parent / "assets" / "licenses.txt").read_text()
    lock = json.loads((FRONTEND / "package-lock.json").read_text())["packages"]
    for name in ("preact", "d3-scale", "d3-shape", "@codemirror/view", "@lezer/common"):
        version = lock[f"node_modules/{name}"]["version"]
        assert re.search(rf"^{re.escape(name)} {re.escape(version)} \((MIT|ISC)\)$", notices, re.M)
    script = (FRONTEND.parent / "assets" / "viewer.js").stat().st_size
    assert script < 600 * 1024


def test_view_writes_the_page_beside_the_records(tmp_path):
    records = tmp_path / "run.jsonl"
    records.write_bytes(encode(a_record()) + encode(a_record(index=1)))
    done = run(str(records))
    assert (done.exit_code, done.exception) == (0, None)
    assert done.stderr == f"{tmp_path / 'run.html'}: 2 records\n"
    shown = data_of((tmp_path / "run.html").read_text("utf-8"))
    assert [record["index"] for record in shown] == [0, 1]
    assert run(str(records), "--index", "1").exception is None  # over its own page
    assert [r["index"] for r in data_of((tmp_path / "run.html").read_text("utf-8"))] == [1]


def test_view_reads_a_pipe_and_writes_to_one():
    done = run("-", text=encode(a_record()).decode())
    assert done.exit_code == 0
    assert len(data_of(done.stdout)) == 1


def test_view_replaces_no_file_of_somebody_elses(tmp_path):
    (tmp_path / "run.jsonl").write_bytes(encode(a_record()))
    (tmp_path / "run.html").write_text("mine")
    refused = run(str(tmp_path / "run.jsonl"))
    assert "run.html exists and is no page of ours" in str(refused.exception)
    assert (tmp_path / "run.html").read_text() == "mine"
    assert run(str(tmp_path / "run.jsonl"), "--overwrite").exception is None
    assert data_of((tmp_path / "run.html").read_text("utf-8"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "holds no records"),
        ("\n\n", "holds no records"),
        ("[1]\n", "line 1 is no record"),
        ('{"index": 0}\nnonsense\n', "line 2 is no JSON"),
        ('{"index": 0}\n', "holds no record of index 7"),
        ("[" * 100_000 + "\n", "line 1 is no JSON"),
    ],
)
def test_view_says_what_is_wrong_with_records(tmp_path, lines, message):
    (tmp_path / "run.jsonl").write_text(lines)
    assert message in str(run(str(tmp_path / "run.jsonl"), "--index", "7").exception)
    assert not (tmp_path / "run.html").exists()


def test_view_leaves_out_a_last_line_that_a_kill_has_cut_off(tmp_path):
    (tmp_path / "run.jsonl").write_bytes(encode(a_record()) + encode(a_record())[:-40])
    done = run(str(tmp_path / "run.jsonl"))
    assert "Warning: line 2 is cut off" in done.stderr
    assert len(data_of((tmp_path / "run.html").read_text("utf-8"))) == 1


def test_view_says_when_there_is_nothing_to_see(tmp_path):
    (tmp_path / "run.jsonl").write_bytes(encode({"index": 0, "text": "abc"}))
    assert "generate --full writes them" in run(str(tmp_path / "run.jsonl")).stderr


def test_view_needs_a_file_that_is_there():
    assert "cannot read nowhere.jsonl" in str(run("nowhere.jsonl").exception)
    assert "--open needs a file" in str(run("-", "--open", text="{}").exception)


def test_the_snippet_of_the_guide_writes_a_page(tmp_path, monkeypatch):
    guide = (FRONTEND.parents[2] / "docs" / "viewer.md").read_text("utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", guide, re.S)
    letters = Vocabulary([*(bytes([c]) for c in range(32, 127)), b""], eos_ids=[95])
    monkeypatch.chdir(tmp_path)
    exec(snippet, {"lm": LM(TableModel.random(letters, seed=1, eos_probability=0.2))})
    (shown,) = data_of(Path("run.html").read_text("utf-8"))
    assert shown["prompt"] == "Name a colour."
    assert len(shown["particles"]) == 8
