"""Charts as SVG text, made for one width each so that text stays readable: live memory and layers.

Colours are classes that report.css gives values to, so that one chart serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from recompile.report.explanation import GraphReport, Moment
from recompile.report.layers import Layer, stem_text
from recompile.units import format_bytes, format_flop, format_seconds

BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
FLOP_UNITS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3), ("FLOP", 1))
SECOND_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def other_bytes(moment: Moment) -> int:
    """What is alive for no longer than forward or backward: outputs and temporaries."""
    return moment.live_bytes - moment.saved_bytes - moment.gradient_bytes - moment.rebuilt_bytes


# Bands of the timeline, the lowest first: class, legend, and what of a moment it is.
BANDS: tuple[tuple[str, str, Callable[[Moment], int]], ...] = (
    ("saved", "kept for backward", lambda m: m.saved_bytes),
    ("gradient", "gradients that backward returns", lambda m: m.gradient_bytes),
    ("rebuilt", "computed again", lambda m: m.rebuilt_bytes),
    ("other", "outputs and temporaries", other_bytes),
)
WIDE, HALF, NARROW = 1030, 497, 340  # px: a desktop's column, half of it, and a phone's of 390 less its margins
LEAST_STEP = 0.8  # px: kernels that take less of the chart's width are drawn as one, at the highest of them
CHARACTER, BOLD_CHARACTER, FIGURE_CHARACTER = 6.3, 7.3, 6.5  # px: about the width of one; charts have 12 px, figures 11
BUDGET_IN_VIEW = 1.5  # a budget up to this multiple of the peak is drawn; above it the scale is the peak's


@dataclass(frozen=True)
class Frame:
    """A chart's outer size and margins in px, and the values at its right and upper ends."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / ((high - low) or 1) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - self.bottom - (value - low) / ((high - low) or 1) * (self.height - self.top - self.bottom)

    @property
    def floor(self) -> int:
        return self.height - self.bottom


def unit_for(largest: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit of which there is at least one."""
    return next(((name, size) for name, size in units if largest >= size), units[-1])


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values from low to high, about ``count`` of them: steps of 1, 2, 2.5 or 5 times a power of ten."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def svg(frame: Frame, title: str, text: str, parts: Iterable[str], kind: str, data: str = "") -> str:
    """The chart with what a screen reader says about it. ``kind`` is "wide" or "narrow"."""
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {frame.width} {frame.height}" width="{frame.width}" '
        f'height="{frame.height}" role="img" aria-label="{escape(f"{title}. {text}")}"{data}>'
        f"<title>{escape(title)}</title><desc>{escape(text)}</desc>{''.join(parts)}</svg>"
    )


def label(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def axes(
    frame: Frame, x_units: Sequence[tuple[str, float]], y_units: Sequence[tuple[str, float]], x_name: str, y_name: str
) -> list[str]:
    """Grid, ticks and names; each axis in the unit that its largest value asks for."""
    x_unit, x_size = unit_for(frame.x_range[1], x_units)
    y_unit, y_size = unit_for(frame.y_range[1], y_units)
    parts = []
    for value in ticks(frame.y_range[0] / y_size, frame.y_range[1] / y_size, 5 if frame.height > 200 else 3):
        y = frame.y(value * y_size)
        parts += [
            line(frame.left, y, frame.width - frame.right, y, "grid"),
            label(frame.left - 6, y + 4, f"{value:g}", "end"),
        ]
    for value in ticks(frame.x_range[0] / x_size, frame.x_range[1] / x_size, max(4, frame.width // 110)):
        x = frame.x(value * x_size)
        parts += [line(x, frame.floor, x, frame.floor + 4, "tick"), label(x, frame.floor + 17, f"{value:g}", "middle")]
    parts.append(line(frame.left, frame.floor, frame.width - frame.right, frame.floor, "axis"))
    parts.append(label(frame.left - 6, frame.top - 8, y_unit, "end", "unit"))
    parts.append(label(frame.left + 2, frame.top - 8, y_name, "start", "unit"))
    parts.append(label(frame.width - frame.right, frame.height - 6, f"{x_name}, {x_unit}", "end", "unit"))
    return parts


# Live memory


def timeline_chart(graph: GraphReport, width: int, height: int, kind: str) -> str:
    """Live bytes over the predicted step as stacked areas, both peaks and the budget marked."""
    total = sum(m.seconds for m in graph.timeline)
    highest = max((m.live_bytes for m in graph.timeline), default=0)
    budget = graph.budget_bytes
    shows_budget = budget is not None and highest <= budget <= BUDGET_IN_VIEW * highest
    frame = Frame(
        width, height, 52, 14, 74, 42, (0.0, total), (0.0, 1.03 * max(highest, budget if shows_budget else 0, 1))
    )
    steps = drawn_steps(graph.timeline, frame)
    parts = axes(frame, SECOND_UNITS, BYTE_UNITS, "time of the predicted step", "live memory")
    parts += [area(steps, frame, k, css) for k, (css, _, _) in enumerate(BANDS)]
    start = sum(m.seconds for m in graph.timeline if m.phase == "forward")
    turn = frame.x(start)
    parts += [line(turn, frame.top, turn, frame.floor, "turn")]
    parts += [label(turn - 6, frame.floor - 8, "forward", "end", "phase")] if turn - frame.left > 60 else []
    parts += [label(turn + 6, frame.floor - 8, "backward", "start", "phase")] if frame.width - turn > 80 else []
    if shows_budget:
        y = frame.y(budget)
        text = f"budget {format_bytes(budget)}"
        parts += [line(frame.left, y, width - frame.right, y, "budget")]
        parts += [label(width - frame.right, y - 5, text, "end", "budget-text")]
    parts += peak_marks(graph, frame)
    parts.append(
        f'<line class="cursor" x1="0" x2="0" y1="{frame.top}" y2="{frame.floor}"/>'
        f'<rect class="hover" x="{frame.left}" y="{frame.top}" width="{width - frame.left - frame.right}" '
        f'height="{frame.floor - frame.top}"/>'
    )
    peaks = ", ".join(f"{peak.phase}'s peak {format_bytes(peak.live_bytes)}" for peak in graph.peaks)
    text = f"{peaks}; the step takes {format_seconds(total)}."
    data = f' data-left="{frame.left}" data-right="{width - frame.right}" data-total="{total!r}"'
    return svg(frame, "Live memory over the predicted step", text, parts, kind, data)


def drawn_steps(moments: Sequence[Moment], frame: Frame) -> list[tuple[float, float, tuple[int, ...]]]:
    """(from px, to px, cumulated bands); neighbours too thin to be seen are merged into the highest of them."""
    steps: list[tuple[float, float, int, tuple[int, ...]]] = []
    clock = 0.0
    for moment in moments:
        left, clock = frame.x(clock), clock + moment.seconds
        right = frame.x(clock)
        stack, total = [], 0
        for _, _, part in BANDS:
            total += part(moment)
            stack.append(total)
        if steps and steps[-1][1] - steps[-1][0] < LEAST_STEP:
            x0, _, live, before = steps[-1]
            steps[-1] = (
                x0,
                right,
                *((live, before) if live >= moment.live_bytes else (moment.live_bytes, tuple(stack))),
            )
        else:
            steps.append((left, right, moment.live_bytes, tuple(stack)))
    return [(x0, x1, stack) for x0, x1, _, stack in steps]


def area(steps: Sequence[tuple[float, float, tuple[int, ...]]], frame: Frame, band: int, css: str) -> str:
    """One band between its own line and that of the band below."""

    def edge(level: int) -> list[str]:
        values = [frame.y(stack[level]) if level >= 0 else float(frame.floor) for _, _, stack in steps]
        return [f"{x0:.1f},{y:.1f} {x1:.1f},{y:.1f}" for (x0, x1, _), y in zip(steps, values, strict=True)]

    below = " ".join(edge(band - 1)).split(" ")[::-1] if steps else []
    return f'<polygon class="band {css}" points="{" ".join([*edge(band), *below])}"/>' if steps else ""


def peak_marks(graph: GraphReport, frame: Frame) -> list[str]:
    """A mark and a line of text at both peaks; forward's text stands in the upper row, so that they never collide.

    Backward's mark is a ring, so that both are seen where they fall together.
    """
    parts, clock = [], [0.0]
    for moment in graph.timeline:
        clock.append(clock[-1] + moment.seconds)
    for row, peak in enumerate(graph.peaks):
        x, y = frame.x((clock[peak.moment] + clock[peak.moment + 1]) / 2), frame.y(peak.live_bytes)
        text, height = f"{peak.phase}'s peak {format_bytes(peak.live_bytes)}", 16 + 18 * row
        css, radius = ("peak", 3.5) if row == 0 else ("peak ring", 6.5)
        parts += [line(x, height - 10, x, y, "lead"), f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{css}"/>']
        at, anchor = left_or_right(x, frame, text, wants_left=row == 0)
        parts.append(label(at, height, text, anchor, "strong halo"))
    return parts


def left_or_right(x: float, frame: Frame, text: str, wants_left: bool) -> tuple[float, str]:
    """Where a name stands beside a vertical line, on the wanted side, on the other where that has no room, else across
    it: its x and its anchor.
    """
    wide = len(text) * BOLD_CHARACTER
    fits = {True: x - 6 >= wide, False: x + 6 + wide <= frame.width}
    is_left = wants_left if fits[wants_left] else not wants_left
    if not fits[is_left]:
        return max(2.0, min(x - wide / 2, frame.width - wide)), "start"
    return (x - 6, "end") if is_left else (x + 6, "start")


# Layers


@dataclass(frozen=True)
class Measure:
    """A figure of a layer that a chart shows."""

    name: str
    css: str
    of: Callable[[Layer], float]
    units: Sequence[tuple[str, float]]
    text: Callable[[float], str]


LEAST_BAR = 2.0  # px: what is there is seen


def figure_of(value: float) -> str:
    """What stands above a bar: ``776``, ``35.5``, ``0.39``."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def figures_of(values: Sequence[float], slot: float) -> list[str]:
    """What stands above bars that are ``slot`` px apart: in three digits where all have room, else in whole numbers,
    else where a bar is not as the one before it and nothing is in the way.
    """
    exact = [figure_of(value) if value else "" for value in values]
    if all(len(text) * FIGURE_CHARACTER <= slot for text in exact):
        return exact
    rounded = [f"{value:.0f}" if value >= 1 else "<1" if value else "" for value in values]
    if all(len(text) * FIGURE_CHARACTER <= slot for text in rounded):
        return rounded
    shown, end = [], -math.inf
    for k, text in enumerate(rounded):
        half = len(text) * FIGURE_CHARACTER / 2
        is_new = k == 0 or text != rounded[k - 1]
        has_room = (k + 0.5) * slot - half >= end
        shown.append(text if is_new and has_room else "")
        end = (k + 0.5) * slot + half if shown[-1] else end
    return shown


KEPT = Measure("kept", "saved", lambda layer: layer.kept_bytes, BYTE_UNITS, format_bytes)
AGAIN = Measure("computed again", "rebuilt", lambda layer: layer.again_flop, FLOP_UNITS, format_flop)


def layers_chart(layers: Sequence[Layer], measure: Measure, width: int, height: int, kind: str) -> str:
    """One bar a layer."""
    values = [measure.of(layer) for layer in layers]
    unit, size = unit_for(max(values) or 1, measure.units)
    highest = (max(values) or 1) / size
    step = ticks(0, highest, 3)[1] if len(ticks(0, highest, 3)) > 1 else highest
    top = size * step * math.ceil(highest / step - 1e-9)  # the axis ends at a tick, above the highest bar
    frame = Frame(width, height, 52, 14, 40, 38, (0.0, float(len(layers))), (0.0, top))
    parts = []
    for value in ticks(0, frame.y_range[1] / size, 3):
        y = frame.y(value * size)
        parts += [
            line(frame.left, y, width - frame.right, y, "grid"),
            label(frame.left - 6, y + 4, f"{value:g}", "end"),
        ]
    parts.append(label(frame.left + 2, frame.top - 24, f"{measure.name}, {unit} a layer", "start", "unit"))
    every = math.ceil(len(layers) * 22 / (width - frame.left - frame.right))
    slot = frame.x(1) - frame.x(0)
    bar = max(1.0, min(28.0, 0.7 * slot))
    figures = figures_of([value / size for value in values], slot)
    for k, (layer, value) in enumerate(zip(layers, values, strict=True)):
        middle, y = frame.x(k + 0.5), min(frame.y(value), frame.floor - LEAST_BAR if value else frame.floor)
        what = f"{layer.stem.replace('*', str(layer.number))}: {measure.text(value)} {measure.name}"
        parts.append(
            f'<rect class="{measure.css}" x="{middle - bar / 2:.1f}" y="{y:.1f}" width="{bar:.1f}" '
            f'height="{frame.floor - y:.1f}"><title>{escape(what)}</title></rect>'
        )
        if figures[k]:
            parts.append(label(middle, y - 4, figures[k], "middle", "figure halo"))
        if k % every == 0:
            parts.append(label(middle, frame.floor + 16, str(layer.number), "middle"))
    parts.append(line(frame.left, frame.floor, width - frame.right, frame.floor, "axis"))
    parts.append(label(width - frame.right, height - 4, f"layer of {stem_text(layers[0].stem)}", "end", "unit"))
    text = f"{len(layers)} layers, at most {measure.text(max(values))} in one."
    return svg(frame, f"{measure.name} per layer", text, parts, kind)
