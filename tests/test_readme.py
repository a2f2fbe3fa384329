"""Every snippet and command of the README runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starting import run_script

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.M | re.S)


def run(command, cwd: Path) -> str:
    scripts = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_python_snippets_run_in_order(tmp_path, monkeypatch):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(code for kind, code in BLOCKS if kind == "python"))
    monkeypatch.chdir(tmp_path)
    done = run_script(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"name='.*' age=\d+", done.stdout)


def test_the_commands_run_in_order(tmp_path):
    shell = [code for kind, code in BLOCKS if kind == "sh"]
    setup = [code for code in shell if "pip install" in code or "make " in code]
    commands = [code for code in shell if code not in setup]
    assert len(setup) == 3
    out = run(["bash", "-euc", "\n".join(commands)], tmp_path)
    assert out.count('"finish_reason"') == 4
    for kind, shown in BLOCKS:
        assert kind != "text" or set(shown.splitlines()) <= set(out.splitlines())


def test_the_make_targets_that_the_readme_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", README, flags=re.M)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.M)
