"""The trade-off between peak and time as a chart: plans that were met, this one, others, and what no plan reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from recompile.joint import FrontierPoint
from recompile.report.charts import (
    BYTE_UNITS,
    CHARACTER,
    SECOND_UNITS,
    Frame,
    axes,
    label,
    left_or_right,
    line,
    svg,
)
from recompile.report.explanation import GraphReport
from recompile.units import format_bytes, format_seconds

# What other planners do, in words for charts and tables.
BASELINES = {"stock": "PyTorch's choice", "save_all": "everything kept", "full": "whole blocks again"}
LINE = 14  # px: the height of a line of text
SHIFTS = (0.0, -0.25, 0.25, -0.5, 0.5)  # of a name's width to the side, above and below its mark
GAPS = (6, 16, 30, 48)  # px between a mark and its name, the nearest first
MARK, UPRIGHT, STAIRS = 100, 10, 1  # how bad it is to cover a mark or a name, a vertical line, the line of the plans
NEAR = 12  # px: a name farther away than this has a line to its mark


def frontier_chart(graph: GraphReport, points: Sequence[FrontierPoint], width: int, height: int, kind: str) -> str:
    """Step time against peak: the plans that were met, this one, the budget, and what no plan reaches."""
    drawn = [*points, *(point for _, point in graph.baselines)]
    peaks = [point.peak_bytes for point in drawn] + [graph.peak_bytes]
    times = [point.step_seconds for point in drawn] + [graph.step_seconds]
    bounds = [(point.peak_bytes, point.lower_bound_seconds) for point in points if point.lower_bound_seconds]
    lowest = min([*times, *(seconds for _, seconds in bounds)])
    room = 0.08 * (max(times) - lowest or max(times))
    floor = graph.floor_bound_bytes or min(peaks)
    frame = Frame(
        width,
        height,
        52,
        16,
        56,
        42,
        (0.92 * min(floor, *peaks), 1.04 * max(peaks)),
        (lowest - room, max(times) + room),
    )
    parts = unreachable(graph, frame, bounds)
    parts += axes(frame, BYTE_UNITS, SECOND_UNITS, "peak of the step", "time of the step")
    steps = [f"M{frame.x(points[0].peak_bytes):.1f},{frame.y(points[0].step_seconds):.1f}"] if points else []
    steps += [f"H{frame.x(point.peak_bytes):.1f}V{frame.y(point.step_seconds):.1f}" for point in points[1:]]
    parts.append(f'<path class="stairs" d="{"".join(steps)}"/>')
    for point in points:
        what = f"{format_bytes(point.peak_bytes)}, {format_seconds(point.step_seconds)}"
        parts.append(
            f'<circle class="met" cx="{frame.x(point.peak_bytes):.1f}" cy="{frame.y(point.step_seconds):.1f}" r="3.5">'
            f"<title>{what}</title></circle>"
        )
    x, y = frame.x(graph.peak_bytes), frame.y(graph.step_seconds)
    taken = [around(frame.x(point.peak_bytes), frame.y(point.step_seconds), 4) for point in points]
    taken += [around(x, y, 7), Box(x, 0, x + 1, y, UPRIGHT), *stairs_boxes(points, frame)]
    if graph.budget_bytes is not None and frame.x_range[0] <= graph.budget_bytes <= frame.x_range[1]:
        parts += budget_mark(graph.budget_bytes, frame, taken)
    parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
    text = f"this plan: {format_bytes(graph.peak_bytes)}, {format_seconds(graph.step_seconds)}"
    at, anchor = left_or_right(x, frame, text, wants_left=False)
    parts += [line(x, 22, x, y - 6, "lead"), label(at, 16, text, anchor, "strong halo")]  # above all that is drawn
    parts += baseline_marks(graph, frame, taken)  # over the lines that they may have to cross
    return svg(frame, "Trade-off between peak memory and time", text, parts, kind)


def stairs_boxes(points: Sequence[FrontierPoint], frame: Frame) -> list[Box]:
    """Where the line runs that leads from plan to plan: over to the next, then down."""
    places = [(frame.x(point.peak_bytes), frame.y(point.step_seconds)) for point in points]
    found = []
    for (x0, y0), (x1, y1) in pairwise(places):
        found += [Box(x0, y0, x1, y0 + 1, STAIRS), Box(x1, y0, x1 + 1, y1, STAIRS)]
    return found


def budget_mark(budget_bytes: int, frame: Frame, taken: list[Box]) -> list[str]:
    """A line with its name, right of it if there is room."""
    x, width = frame.x(budget_bytes), len("budget") * CHARACTER
    fits = x + 8 + width < frame.width - frame.right
    left = x + 5 if fits else x - 5 - width
    taken += [Box(left, frame.top, left + width, frame.top + LINE), Box(x, frame.top, x + 1, frame.floor, UPRIGHT)]
    name = label(x + 5 if fits else x - 5, frame.top + 12, "budget", "start" if fits else "end", "budget-text")
    return [line(x, frame.top, x, frame.floor, "budget"), name]


@dataclass(frozen=True)
class Box:
    """A rectangle in px that something is drawn in. ``weight``: how bad it is to cover it."""

    left: float
    top: float
    right: float
    bottom: float
    weight: int = MARK

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def around(x: float, y: float, radius: float) -> Box:
    return Box(x - radius, y - radius, x + radius, y + radius)


def baseline_marks(graph: GraphReport, frame: Frame, taken: list[Box]) -> list[str]:
    """What other planners would do without a budget: a square with a name beside it, where nothing else is drawn.

    ``taken``: where marks and names stand already; the new ones are added.
    """
    places = [(frame.x(point.peak_bytes), frame.y(point.step_seconds)) for _, point in graph.baselines]
    taken += [around(x, y, 4) for x, y in places]
    parts = []
    for (name, _), (x, y) in zip(graph.baselines, places, strict=True):
        text = BASELINES.get(name, name)
        box = room_for(x, y, len(text) * CHARACTER, frame, taken)
        taken.append(box)
        parts.append(f'<rect class="base" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>')
        at = min(max(x, box.left), box.right)
        if not around(x, y, NEAR).meets(box):
            parts.append(line(x, y, at, box.bottom if box.bottom < y else box.top, "lead"))
        parts.append(label(box.left, box.bottom - 3, text, "start", "halo unit"))
    return parts


def room_for(x: float, y: float, width: float, frame: Frame, taken: Sequence[Box]) -> Box:
    """The nearest place for a name beside a mark where nothing is drawn; where there is none, the one that meets the
    least.
    """
    found = []
    for gap in GAPS:
        beside = width / 2 + gap
        for shift, bottom in (
            *((shift * width, y - gap) for shift in SHIFTS), *((shift * width, y + gap + LINE) for shift in SHIFTS),
            (-beside, y + LINE / 2), (beside, y + LINE / 2),
        ):  # fmt: skip
            left = min(max(x + shift - width / 2, frame.left + 2), frame.width - width)
            box = Box(left, bottom - LINE, left + width, bottom)
            if frame.top <= box.top and box.bottom <= frame.floor:
                found.append(box)
    return min(found, key=lambda box: sum(other.weight for other in taken if box.meets(other)))


def unreachable(graph: GraphReport, frame: Frame, bounds: Sequence[tuple[int, float]]) -> list[str]:
    """The areas left of the smallest possible peak, and below the shortest possible time."""
    parts, right = [], frame.width - frame.right
    start = float(frame.left)
    if graph.floor_bound_bytes:
        start = min(max(frame.x(graph.floor_bound_bytes), start), right)
        parts.append(
            f'<rect class="barred" x="{frame.left}" y="{frame.top}" width="{start - frame.left:.1f}" '
            f'height="{frame.floor - frame.top}"/>'
        )
    if bounds:
        edge = [f"{start:.1f},{frame.floor}", f"{start:.1f},{frame.y(bounds[0][1]):.1f}"]
        edge += [f"{frame.x(peak):.1f},{frame.y(seconds):.1f}" for peak, seconds in bounds]
        edge += [f"{right:.1f},{frame.y(bounds[-1][1]):.1f}", f"{right:.1f},{frame.floor}"]
        parts.append(f'<polygon class="barred" points="{" ".join(edge)}"/>')
    return parts
