"""Pictures: the trade-off between peak memory and step time, and live memory over a step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recompile.report.explanation import Explanation, GraphReport
    from recompile.tradeoff import Frontier

INCHES = (7.0, 4.5)
INCHES_PER_GRAPH = (9.0, 3.6)
# Colours of the HTML report's bands, see report.css.
COLOURS = {
    "saved": "#2f6fb5",
    "gradient": "#3f8f62",
    "rebuilt": "#cf7a1c",
    "other": "#8a95a3",
    "budget": "#b8322a",
    "peak": "#1a2027",
}
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def new_figure(caller: str, inches: tuple[float, float]) -> Any:
    """An empty figure; ImportError that says what to install where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"{caller} needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=inches, layout="constrained")


def plot_frontier(frontier: Frontier, path: str | os.PathLike, others: Sequence[tuple[str, int, float]]) -> None:
    """Step time in ms against peak in GiB, other methods' points beside it, each named at its place."""
    figure = new_figure("Frontier.plot()", INCHES)
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


def plot_timeline(explanation: Explanation, path: str | os.PathLike) -> None:
    """Live memory over the predicted step, one panel a graph, with both peaks and the budget."""
    graphs = explanation.graphs
    if not graphs:
        raise ValueError("there is nothing to plot: no training graph was compiled yet")
    width, height = INCHES_PER_GRAPH
    figure = new_figure("Explanation.plot()", (width, height * len(graphs)))
    panels = figure.subplots(len(graphs), 1, squeeze=False)[:, 0]
    for number, (panel, graph) in enumerate(zip(panels, graphs, strict=True), start=1):
        draw_timeline(panel, graph)
        if len(graphs) > 1:
            panel.set_title(f"graph {number} of {len(graphs)}", loc="left", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def draw_timeline(panel: Any, graph: GraphReport) -> None:
    """Stacked areas of what is alive, kernel by kernel."""
    from recompile.report.charts import BANDS

    highest = max((moment.live_bytes for moment in graph.timeline), default=0)
    unit, size = next(((name, size) for name, size in UNITS if highest >= size), ("B", 1))
    ends = [0.0]
    for moment in graph.timeline:
        ends.append(ends[-1] + moment.seconds * 1e3)
    below = [0.0] * len(graph.timeline)
    for css, name, part in BANDS:
        above = [low + part(moment) / size for low, moment in zip(below, graph.timeline, strict=True)]
        panel.fill_between(ends, [*below, 0.0], [*above, 0.0], step="post", color=COLOURS[css], linewidth=0, label=name)
        below = above
    for peak in graph.peaks:
        middle = (ends[peak.moment] + ends[peak.moment + 1]) / 2
        is_first = peak.phase == "forward"
        panel.plot([middle], [peak.live_bytes / size], "o", color=COLOURS["peak"], markersize=5)
        panel.annotate(
            f"{peak.phase}'s peak {peak.live_bytes / size:.2f} {unit}", (middle, peak.live_bytes / size),
            (-6 if is_first else 6, 8), textcoords="offset points", ha="right" if is_first else "left", fontsize=9,
        )  # fmt: skip
    if graph.budget_bytes is not None and graph.budget_bytes <= 1.5 * highest:
        panel.axhline(graph.budget_bytes / size, color=COLOURS["budget"], linestyle="--", linewidth=1, label="budget")
    panel.set_xlim(0, ends[-1] or 1)
    panel.set_ylim(0, panel.get_ylim()[1] * 1.12)
    panel.set_xlabel(f"time of the predicted step on {graph.hardware}, ms")
    panel.set_ylabel(f"live memory, {unit}")
