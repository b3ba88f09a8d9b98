"""Advice on other budgets: less memory, a faster step, none at all, and decisions that the search missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recompile.hardware import named_hardware
from recompile.joint import FrontierPoint
from recompile.report.alternatives import FASTEST, budget_figure, next_faster, next_smaller
from recompile.report.explanation import GraphReport, ValueRow
from recompile.report.layers import folds_of
from recompile.report.roles import role_of, short_op
from recompile.report.text import share_above, short_source
from recompile.report.worth_text import EQUAL_S, over_text
from recompile.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from recompile.report.explanation import Explanation

# What a plan with about a quarter less has of this one's peak.
QUARTER_LESS = (0.65, 0.75, 0.85)  # at least, ideally, at most
A_BIT_FASTER = (0.91, 0.95, 0.98)  # the same of a step
# Share of the step from which on decisions that would be better the other way are worth a sentence.
MISSED_SHARE = 1e-3
MISSED_SHOWN = 3  # kinds of decision


@dataclass(frozen=True, slots=True)
class Advice:
    """``seen`` is a sentence, ``do`` another. ``source``: file and line, "" where there is none."""

    seen: str
    do: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.seen}{f' ({short_source(self.source)})' if self.source else ''} {self.do}"


def no_budget_needed(explanation: Explanation) -> Iterator[Advice]:
    """That the GPU has room for the fastest plan, where a budget was asked for."""
    hardware = named_hardware().get(explanation.graphs[0].hardware) if len(explanation.graphs) == 1 else None
    if hardware is None or explanation.footprint is None or explanation.graphs[0].budget_bytes is None:
        return
    graph = explanation.graphs[0]
    fastest = min(graph.frontier, key=lambda point: point.step_seconds, default=None)
    if fastest is None or fastest.step_seconds >= graph.step_seconds:
        return
    total = explanation.footprint.with_step(fastest.peak_bytes).total_bytes
    if total > hardware.memory_bytes:
        return
    everything, more = dict(graph.baselines).get("save_all"), ""
    if everything is not None:
        more = (
            f", with everything kept {format_bytes(explanation.footprint.with_step(everything.peak_bytes).total_bytes)}"
        )
    yield Advice(
        f"No budget is needed to fit: of the GPU's {format_bytes(hardware.memory_bytes)} all that training takes with "
        f"the fastest plan that was met is {format_bytes(total)}{more}.",
        "Unless something else needs the memory, leave memory_budget out: this planner then runs the fastest plan that "
        f"it met, a step of {format_seconds(fastest.step_seconds)}, {share_less(graph, fastest)} less "
        f'("{FASTEST}" in the table of the HTML report).',
    )


def share_less(graph: GraphReport, point: FrontierPoint) -> str:
    return f"{1 - point.step_seconds / graph.step_seconds:.1%}"


def a_larger_budget(graph: GraphReport) -> Iterator[Advice]:
    """How to ask for a faster step, where one was met: the next plan, one that is about 5 % faster, the fastest."""
    faster = next_faster(graph)
    if faster is None:
        return
    points, said = [faster], [f"{faster_text(graph, faster)}"]
    fastest, bit = min(graph.frontier, key=lambda point: point.step_seconds), a_bit_faster(graph)
    if bit is not None and bit not in (faster, fastest):
        points.append(bit)
        said.append(faster_text(graph, bit))
    if fastest is not faster:
        points.append(fastest)
        said.append(f"the fastest that was met takes {faster_text(graph, fastest)}")
    yield Advice(f"A faster step can be had: {'; '.join(said)}.", ask_for(points))


def faster_text(graph: GraphReport, point: FrontierPoint) -> str:
    more = format_bytes(point.peak_bytes - graph.peak_bytes)
    return (
        f"{format_seconds(point.step_seconds)}, {share_less(graph, point)} less, at a peak of "
        f"{format_bytes(point.peak_bytes)}, {more} more"
    )


def a_smaller_budget(graph: GraphReport) -> Iterator[Advice]:
    """How to ask for less, where something less was met: the next plan, one with about a quarter less, the smallest."""
    smaller = next_smaller(graph)
    if smaller is None:
        return
    smallest, quarter = graph.frontier[0], a_quarter_less(graph)
    points = [smaller]
    said = [
        f"{format_bytes(smaller.peak_bytes)}, {format_bytes(graph.peak_bytes - smaller.peak_bytes)} less, "
        f"{slower_text(graph, smaller)}"
    ]
    if quarter is not None and quarter not in (smaller, smallest):
        points.append(quarter)
        less = format_bytes(graph.peak_bytes - quarter.peak_bytes)
        said.append(f"{format_bytes(quarter.peak_bytes)}, {less} less, {slower_text(graph, quarter)}")
    if smallest is not smaller:
        points.append(smallest)
        said.append(f"the smallest that was met is {format_bytes(smallest.peak_bytes)}, {slower_text(graph, smallest)}")
    yield Advice(f"A smaller peak can be had: {'; '.join(said)}.", ask_for(points))


def a_quarter_less(graph: GraphReport) -> FrontierPoint | None:
    return nearest(graph, lambda point: point.peak_bytes / graph.peak_bytes, QUARTER_LESS)


def a_bit_faster(graph: GraphReport) -> FrontierPoint | None:
    return nearest(graph, lambda point: point.step_seconds / graph.step_seconds, A_BIT_FASTER)


def nearest(
    graph: GraphReport, share_of: Callable[[FrontierPoint], float], shares: tuple[float, float, float]
) -> FrontierPoint | None:
    """The plan that was met whose share of this one is nearest to what is ideal, among those in between."""
    least, ideal, most = shares
    near = [point for point in graph.frontier if least <= share_of(point) <= most]
    return min(near, key=lambda point: abs(share_of(point) - ideal), default=None)


def ask_for(points: list[FrontierPoint]) -> str:
    """``Ask for them: memory_budget="4.21GiB", "3.38GiB" or "1.48GiB".``"""
    figures = [f'"{budget_figure(point.peak_bytes)}"' for point in points]
    listed = figures[0] if len(figures) == 1 else f"{', '.join(figures[:-1])} or {figures[-1]}"
    return f"Ask for {'it' if len(figures) == 1 else 'one of them'}: memory_budget={listed}."


def slower_text(graph: GraphReport, point: FrontierPoint) -> str:
    return (
        f"in a step of {format_seconds(point.step_seconds)}, {share_above(point.step_seconds, graph.step_seconds)} more"
    )


def missed_decisions(graph: GraphReport) -> Iterator[Advice]:
    """Decisions of a search that would make the step faster the other way, and fit, where they are worth something
    together.
    """
    rows = [row for row in graph.values if is_missed(row, graph)] if graph.frontier else []
    spared = -sum(row.turned.seconds for row in rows)
    if spared < MISSED_SHARE * graph.step_seconds or not rows:
        return
    folds = folds_of(rows, also=lambda row: (row.decision, round(row.turned.seconds, 9)))
    folds.sort(key=lambda fold: sum(row.turned.seconds for row in fold.rows))
    shown = [
        f"{len(fold.rows)} × {missed_text(fold.first)}, {format_seconds(-fold.first.turned.seconds)} each"
        if len(fold.rows) > 1
        else f"{missed_text(fold.first)}, {format_seconds(-fold.first.turned.seconds)}"
        for fold in folds[:MISSED_SHOWN]
    ]
    rest = sum(len(fold.rows) for fold in folds[MISSED_SHOWN:])
    more = f"; and {rest} more" if rest else ""
    fit = " and fit" if graph.limit_bytes is not None else ""
    yield Advice(
        f"{len(rows)} decisions would be faster the other way{fit}, each simulated alone: {'; '.join(shown)}{more}. "
        f"In sum {format_seconds(spared)}, {spared / graph.step_seconds:.1%} of the step.",
        "The search did not find this; a planner of your own (option planner) can decide them so.",
    )


def is_missed(row: ValueRow, graph: GraphReport) -> bool:
    """Whether a decision would be faster the other way, and fit."""
    turned = row.turned
    return turned is not None and turned.seconds < -EQUAL_S and not over_text(turned.peak_bytes, graph)


def missed_text(row: ValueRow) -> str:
    """``dropout mask (gt) computed again``"""
    role = role_of(row)
    what = f"{role} ({short_op(row.op)})" if role else short_op(row.op)
    return f"{what} {'computed again' if row.decision == 'saved' else 'kept'}"
