"""Running a file's tests again, with the Triton kernels in the place of their references.

Triton must know of its interpreter when it is first imported, so that takes a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pass_again_interpreted(file: str) -> None:
    """Run the tests of `file` under `TRITON_INTERPRET=1`; some must be there, and all must pass."""
    if INTERPRETED:
        pytest.skip("this is the other process")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install triton)")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
