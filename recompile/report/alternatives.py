"""Other plans beside this one: the trade-off between memory and time as a chart, as a table, and as the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from recompile.decide import budget_bytes_for
from recompile.joint import FrontierPoint
from recompile.report.charts import NARROW, WIDE
from recompile.report.explanation import GraphReport
from recompile.report.frontier_chart import BASELINES, frontier_chart
from recompile.report.tables import Column, table
from recompile.report.text import share_above
from recompile.units import format_bytes, format_flop, format_seconds

FASTEST = "fastest plan met"
TABLE_TEXT = (
    f"Plans without a name were met by the search; none of them beats another in both peak and time. The “{FASTEST}” "
    "is what this planner runs without a memory_budget; rows that ask for a planner are what that one does without. A "
    "memory_budget is rounded up, and lets the plan of its row through with what is held back for what the prediction "
    "misses; of plans that one budget asks for, the fastest is shown."
)


@dataclass(frozen=True)
class NamedPoint:
    """A row of the trade-off: a plan that was met has no name. ``planner``: of those that need no budget."""

    name: str
    point: FrontierPoint
    planner: str = ""


def points_with(graph: GraphReport) -> list[FrontierPoint]:
    """The plans that were met and this one, from the smallest peak to the fastest; what another beats is left out."""
    ordered = sorted([*graph.frontier, this_point(graph)], key=lambda point: (point.peak_bytes, point.step_seconds))
    best: list[FrontierPoint] = []
    for point in ordered:
        if not best or point.step_seconds < best[-1].step_seconds:
            best.append(point)
    return best


def this_point(graph: GraphReport) -> FrontierPoint:
    """The plan of the report, as one of the plans that it is compared with."""
    return FrontierPoint(
        graph.peak_bytes, graph.step_seconds, graph.saved_bytes, graph.recompute_flops, graph.lower_bound_seconds
    )


def is_this(graph: GraphReport, point: FrontierPoint) -> bool:
    return (point.peak_bytes, point.step_seconds) == (graph.peak_bytes, graph.step_seconds)


def named_points(graph: GraphReport) -> list[NamedPoint]:
    """This plan, those that were met, and what other planners would do without a budget."""
    fastest = min(graph.frontier, key=lambda point: point.step_seconds, default=None)
    met = [
        NamedPoint(FASTEST if point is fastest else "", point)
        for point in fastest_by_budget(graph)
        if not is_this(graph, point)
    ]
    others = [NamedPoint(BASELINES.get(name, name), point, name) for name, point in graph.baselines]
    return [NamedPoint("this plan", this_point(graph)), *met, *others]


def fastest_by_budget(graph: GraphReport) -> list[FrontierPoint]:
    """The plans that were met; of those that the same rounded budget asks for, the fastest, be it this plan."""
    fastest: dict[str, FrontierPoint] = {}
    for point in (this_point(graph), *graph.frontier):
        figure = budget_figure(point.peak_bytes)
        if figure not in fastest or point.step_seconds < fastest[figure].step_seconds:
            fastest[figure] = point
    return [point for point in graph.frontier if point == fastest[budget_figure(point.peak_bytes)]]


def frontier_rows(graph: GraphReport) -> str:
    """The points of the chart as a table."""
    rows = named_points(graph)
    fastest = min(row.point.step_seconds for row in rows)
    columns = (
        Column("plan", lambda r: f"<b>{escape(r.name)}</b>" if r.name else "", css="plan"),
        Column("to ask for it", asked_cell, css="asked"),
        Column("peak", lambda r: format_bytes(r.point.peak_bytes), lambda r: r.point.peak_bytes, "key"),
        Column("step", lambda r: format_seconds(r.point.step_seconds), lambda r: r.point.step_seconds, "key"),
        Column("over fastest", lambda r: share_above(r.point.step_seconds, fastest), lambda r: r.point.step_seconds),
        Column("kept", lambda r: format_bytes(r.point.saved_bytes), lambda r: r.point.saved_bytes),
        Column("computed again", lambda r: format_flop(r.point.recompute_flops), lambda r: r.point.recompute_flops),
        Column(
            "no plan is faster than",
            lambda r: "" if r.point.lower_bound_seconds is None else format_seconds(r.point.lower_bound_seconds),
            lambda r: r.point.lower_bound_seconds or 0.0,
        ),
    )
    caption = f"This plan among {len(rows) - 1} others"
    return table(caption, columns, rows, 2, lambda row: "this" if row.name == "this plan" else "")


def asked_cell(row: NamedPoint) -> str:
    """The option that gives the plan."""
    option = f'planner="{row.planner}"' if row.planner else budget_text(row.point.peak_bytes)
    return f"<code>{escape(option)}</code>{' or none' if row.name == FASTEST else ''}"


def frontier_section(graph: GraphReport) -> str:
    if not graph.frontier:
        return (
            "<section><h2>Trade-off between memory and time</h2><p class=small>This planner meets no other plans. "
            "<code>to_html(path, frontier=recompile.frontier(...))</code> shows them.</p></section>"
        )
    points = points_with(graph)
    charts = frontier_chart(graph, points, WIDE, 350, "wide") + frontier_chart(graph, points, NARROW, 300, "narrow")
    without_budget = '<li><i class="base"></i>others, without a budget</li>' if graph.baselines else ""
    legend = (
        '<ul class="legend"><li><i class="dot"></i>this plan</li><li><i class="met"></i>plans that the search met</li>'
        f"{without_budget}"
        '<li><i class="barred"></i>no plan can be here, by this model</li></ul>'
    )
    return (
        f"<section><h2>Trade-off between memory and time</h2><p>{escape(next_steps(graph))}</p>{legend}{charts}"
        f"<details><summary>as a table</summary><p class=small>{TABLE_TEXT}</p>{frontier_rows(graph)}</details>"
        "</section>"
    )


def next_smaller(graph: GraphReport) -> FrontierPoint | None:
    """The largest of the plans that were met with a smaller peak, by a step that a budget can ask for."""
    smaller = [p for p in graph.frontier if budget_bytes_for(p.peak_bytes) < graph.peak_bytes]
    return smaller[-1] if smaller else None


def next_faster(graph: GraphReport) -> FrontierPoint | None:
    """The smallest of the plans that were met with a shorter step."""
    return next((point for point in graph.frontier if point.step_seconds < graph.step_seconds), None)


def budget_text(peak_bytes: int) -> str:
    """The budget that admits a plan of this predicted peak, as an option: ``memory_budget="4.22GiB"``."""
    return f'memory_budget="{budget_figure(peak_bytes)}"'


def budget_figure(peak_bytes: int) -> str:
    """The same without the option's name, rounded up: ``4.22GiB``."""
    unit = format_bytes(budget_bytes_for(peak_bytes)).split(" ")[1]
    scale = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}[unit]
    hundredths = math.ceil(100 * budget_bytes_for(peak_bytes) / scale)
    return f"{hundredths // 100 if unit == 'B' else hundredths / 100}{unit}"


def next_steps(graph: GraphReport) -> str:
    """The neighbours of this plan among those that were met, and the fastest: what less and more memory would do."""
    said = []
    smaller = next_smaller(graph)
    if smaller is not None:
        said.append(f"The next smaller plan: {step_text(graph, smaller)} ({budget_text(smaller.peak_bytes)}).")
    faster = next_faster(graph)
    if faster is not None:
        said.append(f"The next faster one: {step_text(graph, faster)} ({budget_text(faster.peak_bytes)}).")
        if graph.frontier[-1] is not faster:
            said.append(f"The fastest: {step_text(graph, graph.frontier[-1])}.")
    return " ".join(said) or "No plan was met that is smaller or faster."


def step_text(graph: GraphReport, point: FrontierPoint) -> str:
    """``4.17 GiB, 287.00 MiB less, in 23.47 ms, +1.9%``"""
    change, share = point.peak_bytes - graph.peak_bytes, 0.0
    if graph.step_seconds:
        share = point.step_seconds / graph.step_seconds - 1
    more = "more" if change > 0 else "less"
    return (
        f"{format_bytes(point.peak_bytes)}, {format_bytes(abs(change))} {more}, in "
        f"{format_seconds(point.step_seconds)}, {share:+.1%}"
    )
