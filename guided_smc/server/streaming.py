"""What of a text is decided while its particles still grow.

The answer is one of the particles of positive weight, or goes on from one. So what all of these
have in common will not change, and can be sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from guided_smc.results import StepEvent


def decided(event: StepEvent, stops: Sequence[str] = ()) -> str:
    """The longest text that every answer still possible begins with.

    Args:
        event: A step, with the particles' texts: of whole characters only.
        stops: Strings at which texts end; what may be the beginning of one is not decided.
    """
    step = event.step
    possible = [
        text
        for text, ancestor in zip(event.texts, step.ancestors, strict=True)
        if step.log_weights[ancestor] > -math.inf
    ]
    common = _common(possible)
    # The longest such beginning: behind it there may be another one.
    held = max((_overlap(common, stop) for stop in stops), default=0)
    return common[: len(common) - held]


def _common(texts: Sequence[str]) -> str:
    """The longest beginning of all texts: of the first and the last in order, as it happens."""
    if not texts:
        return ""
    low, high = min(texts), max(texts)
    differs = (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    return low[: next(differs, len(low))]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that begin a stop string without completing it."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
