"""genlm-control's environment, and the process in it.

It wants versions of its own, so it is kept apart: a virtual environment under `.envs/`, made once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = HERE / ".envs" / "genlm"
PACKAGE = "genlm-control==0.4.1"


class InstallError(RuntimeError):
    """The environment could not be made."""


class WorkerError(RuntimeError):
    """The worker failed."""


def installed() -> bool:
    """Whether the environment is there, with this version."""
    marker = ENVIRONMENT / ".installed"
    return marker.is_file() and marker.read_text(encoding="utf-8") == PACKAGE


def install(torch_version: str) -> None:
    """Make the environment, unless it is there.

    Raises:
        InstallError: No network, no wheel for this Python, ...: with pip's last line.
    """
    if installed():
        return
    pip = [_python(), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run(sys.executable, "-m", "venv", ENVIRONMENT)
    # torch first and pinned: what pip takes by itself may be gigabytes of CUDA.
    _run(*pip, f"torch=={torch_version}")
    _run(*pip, PACKAGE)
    (ENVIRONMENT / ".installed").write_text(PACKAGE, encoding="utf-8")


def _run(*command: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise InstallError(said[-1] if said else f"exit status {done.returncode}")


def _python() -> Path:
    return ENVIRONMENT / "bin" / "python"


class Worker:
    """A process that answers one request at a time; see `genlm_worker.py`."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self._process = subprocess.Popen(
            [_python(), HERE / "genlm_worker.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """One request.

        Raises:
            WorkerError: It refused, or it has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps({"do": do, **request}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"genlm-control's process has ended ({self._process.poll()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"genlm-control: {answer['error']}")
        if do == "load":
            self.versions = answer["versions"]
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
