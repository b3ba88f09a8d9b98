"""Tables of the HTML report: what is kept, computed again and refused, one row for values that are alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from recompile.joint import FrontierPoint
from recompile.report.explanation import GraphReport, PeakReport, ValueRow
from recompile.report.layers import Fold, folds_of, place_of
from recompile.report.text import share_above, short_source
from recompile.units import format_bytes, format_flop, format_seconds

ROWS_SHOWN = 25  # of a table before "show all"
RESIDENTS_SHOWN = 6
LEAST_SHARE_SHOWN = 0.01  # of a peak, for a value that is named
USE_NAMES = {
    "saved": "kept for backward",
    "rebuilt": "computed again",
    "gradient": "gradient",
    "output": "output of forward",
    "temporary": "temporary",
}
# As fx prints them.
SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
# Kinds of value that an op computes, as opposed to views, sizes and inputs.
COMPUTED = ("pointwise", "reduction", "extern")
# Reasons that name another value: those of one rule are told apart by nothing else.
NAMES_ANOTHER = re.compile(r"^(a (?:view|cast) of) \w+")
IS_NO_LIMIT = ("a view of ", "several outputs", "an input of the graph")


@dataclass(frozen=True)
class Column:
    """``cell`` gives HTML; ``key`` the number that a column of numbers is sorted by, None for text."""

    title: str
    cell: Callable[[Any], str]
    key: Callable[[Any], float] | None = None
    css: str = ""


def table(caption: str, columns: Sequence[Column], items: Iterable[Any], sorted_by: int) -> str:
    """A table that a click on a heading sorts; it comes sorted by a column of numbers, the largest first."""
    rows = sorted(items, key=lambda item: -columns[sorted_by].key(item))
    if not rows:
        return f'<p class="none">{escape(caption)}: none.</p>'
    heads = "".join(
        f'<th scope="col" class="{_css(column)}"{_sort_mark(column, k == sorted_by)}>'
        f'<button type="button">{escape(column.title)}</button></th>'
        for k, column in enumerate(columns)
    )
    body = "".join(f"<tr>{''.join(_cell(column, row) for column in columns)}</tr>" for row in rows)
    tools = (
        f'<input type="search" placeholder="filter {len(rows)} rows" aria-label="filter: {escape(caption)}">'
        if len(rows) > 8
        else ""
    )
    return (
        f'<div class="table" data-shown="{ROWS_SHOWN}">{tools}<table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _css(column: Column) -> str:
    return f"{column.css} num".strip() if column.key else column.css


def _sort_mark(column: Column, is_sorted: bool) -> str:
    return ' aria-sort="descending"' if is_sorted else ""


def _cell(column: Column, row: Any) -> str:
    value = f' data-v="{column.key(row):.6g}"' if column.key else ""
    return f'<td class="{_css(column)}" data-t="{escape(column.title)}"{value}><div>{column.cell(row)}</div></td>'


# Pieces of cells


def code(text: str) -> str:
    return f"<code>{escape(text)}</code>" if text else ""


def path_code(text: str, separator: str) -> str:
    """A path that may be broken after its separators."""
    parts = escape(text).replace(separator, f"{separator}<wbr>")
    return f"<code>{parts}</code>" if text else ""


def source_of(source: str) -> str:
    """The last parts of a path; the whole one where the mouse rests."""
    shown = path_code(short_source(source), "/")
    return f'<span title="{escape(source)}">{shown}</span>' if source else ""


def short_op(op: str) -> str:
    """``addmm`` for ``aten.addmm.default``; the namespace stays where it is none of PyTorch's."""
    parts = op.split(".")
    if len(parts) != 3:
        return op
    return parts[1] if parts[0] in ("aten", "prims") else f"{parts[0]}.{parts[1]}"


def shape_text(row: ValueRow) -> str:
    return "×".join(row.shape) or "scalar"


def name_of(fold: Fold) -> str:
    more = f" <small>and {len(fold.rows) - 1} alike</small>" if len(fold.rows) > 1 else ""
    return f"{code(fold.first.name)}{more}<br><small>{code(op_and_shape(fold.first))}</small>"


def op_and_shape(row: ValueRow) -> str:
    """``bf16 2×2048×1024``, with the op where the name does not say it."""
    op = short_op(row.op)
    shown = [] if row.name.startswith(op) else [op]
    return " ".join([*shown, SHORT_DTYPES.get(row.dtype, row.dtype), shape_text(row)])


def place_cell(fold: Fold) -> str:
    """``12 × blocks.*.mlp`` and the line; the model itself has no name."""
    times = f"{fold.num_layers} × " if fold.num_layers > 1 else ""
    module = path_code(fold.module or "(top)", ".")
    return f"{times}{module}<br><small>{source_of(fold.first.source)}</small>"


PLACE = Column("module, source", place_cell, css="module")
VALUE = Column("value", name_of, css="value")
SIZE = Column("size", lambda fold: format_bytes(fold.size_bytes), lambda fold: fold.size_bytes, "key")
FLOP = Column("FLOP", lambda fold: format_flop(fold.flop), lambda fold: fold.flop)
INTENSITY = Column("FLOP/B", lambda fold: f"{fold.first.intensity:.1f}", lambda fold: fold.first.intensity)
SECONDS = Column("time", lambda fold: format_seconds(fold.seconds), lambda fold: fold.seconds, "key")
REASON = Column("reason (each)", lambda fold: escape(fold.first.reason), css="reason")


def kept_table(graph: GraphReport) -> str:
    rows = [row for row in graph.saved if row.kind != "input"]
    by_name = {row.name: row for row in graph.values}
    behind = {fold.first.name: behind_of(fold.first, by_name) for fold in folds_of(rows)}
    without = Column(
        "else run again",
        lambda fold: work_text(behind[fold.first.name]),
        lambda fold: sum(row.flop for row in behind[fold.first.name]),
        "else",
    )
    columns = (PLACE, VALUE, SIZE, without, INTENSITY, SECONDS, REASON)
    return table(f"Kept for backward: {len(rows)} values", columns, folds_of(rows), columns.index(SIZE))


def behind_of(row: ValueRow, by_name: dict[str, ValueRow]) -> list[ValueRow]:
    """What would be computed again if a kept value were not, back to others that are, beyond what is so anyway."""
    found, pending = {row.name: row}, [row]
    while pending:
        for name in pending.pop().inputs:
            source = by_name.get(name)
            if source is not None and name not in found and source.decision == "" and source.kind != "input":
                found[name] = source
                pending.append(source)
    return [source for source in found.values() if source.kind in COMPUTED]


def work_text(rows: Sequence[ValueRow]) -> str:
    num = f"{len(rows)} op{'s' if len(rows) != 1 else ''}"
    return f"{num}, {format_flop(sum(row.flop for row in rows))}"


def again_table(graph: GraphReport) -> str:
    rows = graph.recomputed
    columns = (PLACE, VALUE, SIZE, FLOP, INTENSITY, SECONDS, REASON)
    return table(f"Computed again: {len(rows)} ops", columns, folds_of(rows), columns.index(SECONDS))


# Refusals


@dataclass(frozen=True)
class Refusal:
    what: str  # "saved" or "computed again"
    reason: str
    fold: Fold

    @property
    def size_bytes(self) -> int:
        return self.fold.size_bytes


def refusals_of(graph: GraphReport) -> list[Refusal]:
    """Values of forward that a rule keeps from being saved or computed again; what follows from the graph left out."""
    found = []
    for what, field in (("saved", "cannot_save"), ("computed again", "cannot_recompute")):

        def reason_of(row: ValueRow, field: str = field) -> str:
            return NAMES_ANOTHER.sub(r"\1 another value", getattr(row, field) or "")

        rows = [row for row in graph.values if row.side != "backward" and is_a_limit(getattr(row, field))]
        found += [Refusal(what, reason_of(fold.first), fold) for fold in folds_of(rows, also=reason_of)]
    return found


def is_a_limit(reason: str | None) -> bool:
    return reason is not None and not reason.startswith(IS_NO_LIMIT)


def of_fold(column: Column) -> Column:
    """The column of a fold, for a refusal."""
    key = column.key
    return Column(
        column.title, lambda item: column.cell(item.fold), (lambda item: key(item.fold)) if key else None, column.css
    )


def refusals_table(graph: GraphReport) -> str:
    refusals = refusals_of(graph)
    columns = (
        Column("must not be", lambda item: escape(item.what), css="what"),
        Column("because it is", lambda item: escape(item.reason), css="reason"),
        *map(of_fold, (PLACE, VALUE, SIZE)),
    )
    num = sum(len(refusal.fold.rows) for refusal in refusals)
    return table(f"Refused by a rule: {num} values", columns, refusals, 4) + left_out_text(graph)


def left_out_text(graph: GraphReport) -> str:
    """What rules refuse without anybody losing a choice."""
    reasons = [row.cannot_save or "" for row in graph.values if row.side != "backward"]
    views = sum(reason.startswith("a view of ") for reason in reasons)
    several = sum(reason.startswith("several outputs") for reason in reasons)
    inputs = sum(row.kind == "input" for row in graph.values)
    return (
        f'<p class="small">Not listed: {views} views (their base is kept in their place), {several} ops with several '
        f"results (each is kept on its own), {inputs} inputs and parameters (allocated anyway).</p>"
    )


# Peaks and the frontier


def residents_list(graph: GraphReport, peak: PeakReport) -> str:
    """What is alive at a peak: the largest groups of values with their share of it."""
    rows = {row.name: row for row in graph.values}
    groups: dict[tuple, list[tuple[ValueRow, int]]] = {}
    for name, size, use in peak.alive:
        row = rows[name]
        groups.setdefault((use, row.op, row.shape, place_of(row.module).folded), []).append((row, size))
    ordered = sorted(groups.items(), key=lambda item: -sum(size for _, size in item[1]))
    least = LEAST_SHARE_SHOWN * peak.live_bytes
    num_shown = max(1, sum(sum(size for _, size in group) >= least for _, group in ordered[:RESIDENTS_SHOWN]))
    items = [resident(key[0], group, peak.live_bytes) for key, group in ordered[:num_shown]]
    rest = [pair for _, group in ordered[num_shown:] for pair in group]
    if rest:
        size = format_bytes(sum(size for _, size in rest))
        items.append(f'<li class="more"><span>{len(rest)} smaller values</span><b>{size}</b></li>')
    if peak.shared_bytes > 0:
        text = "written in place over values that die there"
        items.append(f'<li class="more"><span>{text}</span><b>−{format_bytes(peak.shared_bytes)}</b></li>')
    if peak.shared_bytes < 0:
        text = "needed by the kernel itself"
        items.append(f'<li class="more"><span>{text}</span><b>{format_bytes(-peak.shared_bytes)}</b></li>')
    return f'<ul class="residents">{"".join(items)}</ul>'


def resident(use: str, group: list[tuple[ValueRow, int]], live_bytes: int) -> str:
    first, size = group[0][0], sum(size for _, size in group)
    fold = Fold(tuple(row for row, _ in group))
    times = f"{len(group)} × " if len(group) > 1 else ""
    share = size / live_bytes if live_bytes else 0.0
    name = first.name if first.kind == "input" else short_op(first.op)
    return (
        f'<li><span class="what"><i class="{use}"></i>{times}{code(name)} '
        f"<code>{escape(shape_text(first))}</code></span><b>{format_bytes(size)}</b>"
        f'<span class="where">{USE_NAMES[use]} · <code>{escape(fold.module or "(top)")}</code> '
        f'{source_of(first.source)}</span><span class="share">{share:.0%}</span>'
        f'<span class="bar"><span class="{use}" style="width:{min(share, 1):.1%}"></span></span></li>'
    )


def frontier_rows(points: Sequence[FrontierPoint]) -> str:
    """The points of the chart as a table."""
    fastest = min(point.step_seconds for point in points)
    columns = (
        Column("peak", lambda p: format_bytes(p.peak_bytes), lambda p: p.peak_bytes, "key"),
        Column("step", lambda p: format_seconds(p.step_seconds), lambda p: p.step_seconds, "key"),
        Column("over the fastest", lambda p: share_above(p.step_seconds, fastest), lambda p: p.step_seconds),
        Column("kept", lambda p: format_bytes(p.saved_bytes), lambda p: p.saved_bytes),
        Column("computed again", lambda p: format_flop(p.recompute_flops), lambda p: p.recompute_flops),
        Column(
            "no plan is faster than",
            lambda p: "" if p.lower_bound_seconds is None else format_seconds(p.lower_bound_seconds),
            lambda p: p.lower_bound_seconds or 0.0,
        ),
    )
    return table(f"{len(points)} plans that no other one met beats in both", columns, points, 0)
