"""Pictures: the trade-off between peak memory and step time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recompile.tradeoff import Frontier

INCHES = (7.0, 4.5)


def plot_frontier(frontier: Frontier, path: str | os.PathLike, others: Sequence[tuple[str, int, float]]) -> None:
    """Step time in ms against peak in GiB, other methods' points beside it, each named at its place."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("Frontier.plot() needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    peaks = [point.peak_bytes / 2**30 for point in frontier.points]
    times = [point.step_seconds * 1e3 for point in frontier.points]
    axes.step(peaks, times, where="post", linewidth=1, color="C0", alpha=0.5)
    axes.plot(peaks, times, "o", markersize=4, color="C0", label="recompile")
    for number, (name, peak_bytes, seconds) in enumerate(others, start=1):
        axes.plot(peak_bytes / 2**30, seconds * 1e3, "s", markersize=6, color=f"C{number % 10}", label=name)
    axes.set_xlabel("peak of a step, GiB over what forward starts with")
    axes.set_ylabel(f"predicted step on {frontier.hardware}, ms")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
