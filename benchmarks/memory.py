"""Peak memory of a process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_bytes() -> int:
    """Most memory that this process has held at once.

    Linux hands `ru_maxrss` of a parent on to what it starts, so there the process's own mark is
    read.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    (mark,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(mark.split()[1]) * 1024
