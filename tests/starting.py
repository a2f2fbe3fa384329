"""Commands and scripts as processes that start at once, forked from one with the libraries read.

Importing torch and transformers takes a core ten seconds or so, for each process that a test
starts. Here they are imported once, in a process that does nothing else; a command is a fork of it
with an environment, a folder and streams of its own. It ends as a process does, exit code and all.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

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
    return _run(None, words, stdin, timeout)


def run_script(
    script: Path, words: Sequence[str] = (), timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python SCRIPT WORDS` does, in the present folder; errors as of `run_command`.

    Args:
        script: A file.
        words: Its arguments.
        timeout: In seconds.
        environment: What its environment has besides.
    """
    done = _run(script, [str(word) for word in words], b"", timeout, environment)
    done.stdout, done.stderr = (text.decode() for text in (done.stdout, done.stderr))
    return done


def _run(
    script: Path | None,
    words: Sequence[str],
    stdin: bytes,
    timeout: float,
    more: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        names = [os.path.join(folder, name) for name in ("in", "out", "err")]
        for name in names:
            with open(name, "wb") as file:
                file.write(stdin if name == names[0] else b"")
        environment = {**os.environ, **more}
        given = (script, list(words), names, os.getcwd(), environment)
        process = _context.Process(target=_main, args=given)
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


def _main(
    script: Path | None,
    words: Sequence[str],
    names: Sequence[str],
    folder: str,
    environment: dict[str, str],
) -> None:
    """In the forked process: the streams, and then the script, or the command if there is none."""
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
    # As python does for a script, and for a module that `-m` names.
    sys.path.insert(0, folder if script is None else str(script.parent))
    sys.argv = ["guided-smc" if script is None else str(script), *words]
    if script is None:
        from guided_smc.cli import main

        main()
    else:
        runpy.run_path(str(script), run_name="__main__")
