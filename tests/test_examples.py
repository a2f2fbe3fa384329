"""Every example runs, and prints what it is there to show."""

from __future__ import annotations

from pathlib import Path

import pytest
from starting import run_script

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parents[1] / "examples"
SHOWS = {
    "arithmetic.py": "mean reward",
    "contrastive.py": "log-likelihood ratio",
    "demo.py": "log-evidence",
    "distortion.py": "token masking",
    "extraction.py": "beta 3: 3.0 of 3 fields",
    "length.py": "about 30 words",
    "sql.py": "WHERE",
    "tilt.py": "beta",
    "tone.py": "beta +4: sentiment +",
}


def test_every_example_is_tested():
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(SHOWS)


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_the_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_script(EXAMPLES / name, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SHOWS[name] in done.stdout
