"""Tables of the HTML report: what is kept, computed again and refused, one row for values that are alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from recompile.report.explanation import GraphReport, ValueRow
from recompile.report.layers import Fold, folds_of, ranges_text
from recompile.report.roles import dtype_text, role_of, short_op
from recompile.report.text import price_figure, short_source
from recompile.units import format_bytes, format_flop, format_seconds

ROWS_SHOWN = 25  # of a table before "show all"
MODEL_ITSELF = "the model itself"  # what computes a value outside of all its modules
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


def table(
    caption: str, columns: Sequence[Column], items: Iterable[Any], sorted_by: int,
    css: Callable[[Any], str] = lambda item: "",
) -> str:  # fmt: skip
    """A table that a click on a heading sorts; it comes sorted by a column of numbers, the largest first. ``css``: the
    class of a row.
    """
    rows = sorted(items, key=lambda item: -columns[sorted_by].key(item))
    if not rows:
        return f'<p class="none">{escape(caption)}: none.</p>'
    heads = "".join(
        f'<th scope="col" class="{_css(column)}"{_sort_mark(column, k == sorted_by)}>'
        f'<button type="button">{escape(column.title)}</button></th>'
        for k, column in enumerate(columns)
    )
    body = "".join(
        f"<tr{f' class={css(row)}' if css(row) else ''}{_found_by(row)}>"
        f"{''.join(_cell(column, row) for column in columns)}</tr>"
        for row in rows
    )
    tools = (
        f'<input type="search" placeholder="filter {len(rows)} rows" aria-label="filter: {escape(caption)}">'
        if len(rows) > 8
        else ""
    )
    return (
        f'<div class="table" data-shown="{ROWS_SHOWN}">{tools}<table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _found_by(item: Any) -> str:
    """What a filter finds a row by, beside its text: the modules of all values that share it."""
    fold = getattr(item, "fold", item)
    modules = dict.fromkeys(row.module for row in fold.rows) if isinstance(fold, Fold) else ()
    return f' data-find="{escape(" ".join(modules))}"' if len(modules) > 1 else ""


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


def shape_text(row: ValueRow) -> str:
    """``2×2048×1024``; "" for what is no tensor: the results of an op stand in its role."""
    is_several = row.dtype in ("tuple", "list")
    return "" if is_several else "×".join(row.shape) or "scalar"


def role_text(row: ValueRow) -> str:
    return f" <small>{escape(role_of(row))}</small>" if role_of(row) else ""


def name_of(fold: Fold) -> str:
    more = f" <small>and {len(fold.rows) - 1} alike</small>" if len(fold.rows) > 1 else ""
    role = f"<small>{escape(role_of(fold.first))}</small><br>" if role_of(fold.first) else ""
    return f"{code(fold.first.name)}{more}<br>{role}<small>{code(op_and_shape(fold.first))}</small>"


def op_and_shape(row: ValueRow) -> str:
    """``bf16 2×2048×1024``, with the op where the name does not say it."""
    op = short_op(row.op)
    shown = [] if row.name.startswith(op) else [op]
    return " ".join(part for part in (*shown, dtype_text(row), shape_text(row)) if part)


def place_cell(fold: Fold) -> str:
    """The module, the line and its text; which layers it is in, where these are several."""
    layers = f" <small>layers {ranges_text(fold.layers)}</small>" if len(fold.layers) > 1 else ""
    module = path_code(fold.module, ".") or MODEL_ITSELF
    return f"{module}{layers}<br><small>{source_of(fold.first.source)}</small>{code_of(fold.first)}"


def code_of(row: ValueRow) -> str:
    """The user's line that made a value."""
    return f'<br><small class="line">{code(row.code)}</small>' if row.code else ""


def total_cell(fold: Fold, total: str, each: str) -> str:
    """A sum, and what of it each of several values has."""
    return f"{total}<br><small>{len(fold.rows)} × {each}</small>" if len(fold.rows) > 1 else total


def spared_seconds(fold: Fold) -> float:
    """By how much longer the step takes without one of the values; 0 where it does not, or nobody looked."""
    return max(0.0, fold.first.turned.seconds) if fold.first.turned is not None else 0.0


def us_per_mib(fold: Fold) -> float:
    """The price that the other decision puts on memory; 0 where it would be better or nobody looked."""
    turned = fold.first.turned
    is_priced = turned is not None and turned.seconds * turned.saved_bytes < 0
    return -turned.seconds * 1e6 / (turned.saved_bytes / 2**20) if is_priced else 0.0


PLACE = Column("module, source", place_cell, css="module")
VALUE = Column("value", name_of, css="value")
SIZE = Column(
    "size",
    lambda fold: total_cell(fold, format_bytes(fold.size_bytes), format_bytes(fold.first.size_bytes)),
    lambda fold: fold.size_bytes,
    "key",
)
FLOP = Column(
    "FLOP",
    lambda fold: total_cell(fold, format_flop(fold.flop), format_flop(fold.first.flop)),
    lambda fold: fold.flop,
)
INTENSITY = Column("FLOP/B", lambda fold: f"{fold.first.intensity:.1f}", lambda fold: fold.first.intensity)
ADDS = Column(
    "adds to the step",
    lambda fold: total_cell(fold, format_seconds(fold.again_seconds), format_seconds(fold.first.again_seconds)),
    lambda fold: fold.again_seconds,
    "key",
)
SPARES = Column(
    "spares, each",
    lambda fold: format_seconds(spared_seconds(fold)) if spared_seconds(fold) > 0 else "–",
    spared_seconds,
    "key",
)
PRICE = Column("us per MiB", lambda fold: price_figure(us_per_mib(fold)) if us_per_mib(fold) else "–", us_per_mib)
REASON = Column("reason (each)", lambda fold: escape(fold.first.reason), css="reason")


def kept_table(graph: GraphReport) -> str:
    rows = [row for row in graph.saved if row.kind != "input"]
    columns = (PLACE, VALUE, SIZE, SPARES, PRICE, INTENSITY, REASON)
    return table(f"Kept for backward: {len(rows)} values", columns, folds_of(rows), columns.index(SIZE))


def work_text(rows: Sequence[ValueRow]) -> str:
    """``28 ops, 35.49 GFLOP, 0.21 ms``"""
    num = f"{len(rows)} op{'s' if len(rows) != 1 else ''}"
    seconds = sum(row.again_seconds for row in rows)
    return f"{num}, {format_flop(sum(row.flop for row in rows))}, {format_seconds(seconds)}"


def again_table(graph: GraphReport) -> str:
    rows = graph.recomputed
    columns = (PLACE, VALUE, ADDS, FLOP, SIZE, INTENSITY, REASON)
    return table(f"Computed again: {len(rows)} ops", columns, folds_of(rows), columns.index(ADDS))


# Refusals


RULED_OUT = {"saved": "keeping it", "computed again": "computing it again"}


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
        Column("ruled out", lambda item: RULED_OUT[item.what], css="what"),
        Column("because it is", lambda item: escape(item.reason), css="reason"),
        *map(of_fold, (PLACE, VALUE, SIZE)),
    )
    num = sum(len(refusal.fold.rows) for refusal in refusals)
    return table(f"No choice, by a rule: {num} values", columns, refusals, 4) + left_out_text(graph)


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
