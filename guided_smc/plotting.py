"""Pictures, by matplotlib (`pip install 'guided-smc[plot]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from guided_smc.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from guided_smc.sweep import Sweep

_SHOWN = {
    "smc": ("guided-smc, N = {n}, by β", "o-", "#1b6ca8"),
    "best_of_n": ("best of n", "s--", "#c0392b"),
    "soft_best_of_n": ("soft best of {n}, by β", "^:", "#7f8c8d"),
}


_LABEL_WIDTH, _LABEL_HEIGHT = 18.0, 8.0
"""Room for a label, in points (1/72 inch)."""


def require_matplotlib() -> None:
    """Refuse to go on where nothing could be drawn.

    Raises:
        OptionError: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise OptionError(
            "a plot needs matplotlib: pip install matplotlib, or 'guided-smc[plot]'"
        ) from None


def draw_frontier(sweep: Sweep, path: str | Path) -> None:
    """Mean reward over KL, with two standard errors, as PNG, SVG or PDF.

    Raises:
        OptionError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    labels: list[tuple[str, float, float, str]] = []
    for method, (label, style, colour) in _SHOWN.items():
        points = [p for p in sweep.points if p.method == method]
        if not points:
            continue
        points.sort(key=lambda p: p.n if p.beta is None else p.kl.value)
        axes.errorbar(
            [p.kl.value for p in points],
            [p.reward.value for p in points],
            xerr=[2 * (p.kl.std_error or 0.0) for p in points],
            yerr=[2 * (p.reward.std_error or 0.0) for p in points],
            fmt=style,
            color=colour,
            label=label.format(n=points[0].n),
            markersize=4,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
        )
        labels += [
            (f"n={p.n}" if p.beta is None else f"{p.beta:g}", p.kl.value, p.reward.value, colour)
            for p in points
        ]
    axes.set_xlabel("KL to the model (nats)")
    axes.set_ylabel(f"mean reward: {sweep.name}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    _annotate(axes, labels)
    figure.savefig(path, dpi=150)


def _annotate(axes: Axes, labels: Sequence[tuple[str, float, float, str]]) -> None:
    """Write texts beside points (text, x, y, colour); one that would cover another is left out."""
    taken: list[tuple[float, float]] = []
    points_per_pixel = 72 / axes.figure.dpi
    for text, x, y, colour in labels:
        offset = (5, -9) if text.startswith("n=") else (5, 5)
        pixels = axes.transData.transform((x, y))
        at = (pixels[0] * points_per_pixel + offset[0], pixels[1] * points_per_pixel + offset[1])
        if any(abs(at[0] - u) < _LABEL_WIDTH and abs(at[1] - v) < _LABEL_HEIGHT for u, v in taken):
            continue
        taken.append(at)
        axes.annotate(
            text,
            (x, y),
            textcoords="offset points",
            xytext=offset,
            fontsize=7,
            color=colour,
        )
