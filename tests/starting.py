"""The command in processes that start at once: forked from one that has read the libraries.

Importing torch and transformers takes a core ten seconds or so, for each command that a test
starts. Here they are imported once, in a process that does nothing else; a command is a fork of it
with an environment, a folder and streams of its own. It ends as a process does, exit code and all.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "guided_smc.api",
        "guided_smc.cli.generate",
        "guided_smc.models.int8",
        "guided_smc.models.loading",
        "guided_smc.rewards.specs",
        "transformers.models.auto.modeling_auto",
    ]
)


def run_command(
    words: Sequence[str], stdin: bytes = b"", timeout: float = 600
) -> subprocess.CompletedProcess[bytes]:
    """What `guided-smc WORDS` does, in the present folder and environment.

    Raises:
        subprocess.TimeoutExpired: It took longer than `timeout` seconds; it has been killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = [os.path.join(folder, name) for name in ("in", "out", "err")]
        for name in names:
            with open(name, "wb") as file:
                file.write(stdin if name == names[0] else b"")
        environment = dict(os.environ)
        process = _context.Process(target=_main, args=(words, names, os.getcwd(), environment))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(words), timeout)
        code = process.exitcode
        process.close()
        out, err = (Path(name).read_bytes() for name in names[1:])
    return subprocess.CompletedProcess(list(words), code, out, err)


def _main(words: Sequence[str], names: Sequence[str], folder: str, environment: dict) -> None:
    """In the forked process: the streams, and then the command."""
    for number, name in enumerate(names):
        file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m` does
    sys.argv = ["guided-smc", *words]
    from guided_smc.cli import main

    main()
