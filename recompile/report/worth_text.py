"""Sentences on what the decision about one value is worth: the reasons that terminals and HTML show."""

from __future__ import annotations

from recompile.report.explanation import GraphReport, Turned, ValueRow
from recompile.report.layers import place_of
from recompile.report.text import price_figure
from recompile.units import format_bytes, format_flop, format_seconds

# Times that differ by less are equal: what is shown has a digit less.
EQUAL_S = 5e-8
# Memory has a price where it is at least so much; a few bytes that spare a kernel have one that says nothing.
LEAST_PRICED_BYTES = 1024
NEEDS_MORE = "rebuilding it needs more at the peak than keeping it"


def reason_text(row: ValueRow, graph: GraphReport) -> str:
    """The planner's reason, and what the decision is worth: the sentence that terminals and HTML show."""
    if row.reason and row.turned is not None and row.turned.saved_bytes == 0:  # an output of forward costs nothing
        return row.reason
    worth = kept_text if row.decision == "saved" else rebuilt_text
    text = "; ".join(text for text in (row.reason, worth(row, graph)) if text)
    return text.removeprefix("yet ")  # where nothing stands before it


def unseen_text(row: ValueRow, graph: GraphReport, other: ValueRow | None) -> str:
    """The same of a value that was not simulated: of a kept one what was found of its kind in a layer that is decided
    otherwise, and that it is that one's.
    """
    if row.decision != "saved":
        return reason_text(row, graph)
    text = "not simulated by itself"
    if other is not None:
        number = place_of(other.module).layer
        text = f"not simulated here; in layer {number}, decided otherwise, {kept_text(other, graph)}"
    return "; ".join(part for part in (row.reason, text) if part)


def kept_text(row: ValueRow, graph: GraphReport) -> str:
    """What a kept value spares, or that it is the budget that asks for it."""
    turned = row.turned
    if turned is None:
        return "" if row.reason else "small, or nothing can be kept in its place"
    again = format_flop(turned.flop) if turned.flop > 0 else ""
    if turned.seconds > EQUAL_S:
        work = f"{again} run again and " if again else ""
        text = f"without it {work}the step takes {format_seconds(turned.seconds)} longer"
        return text + price_text(turned) + dropped_fit_text(turned, graph)
    though = f", though {again} run again" if again else ""
    if turned.seconds < -EQUAL_S:
        found = dropped_fit_text(turned, graph) or f": {missed_text(turned, graph)}"
        return f"yet dropping it alone would make the step {format_seconds(-turned.seconds)} shorter{though}{found}"
    return f"without it the step takes as long{though}{dropped_fit_text(turned, graph)}"


def missed_text(turned: Turned, graph: GraphReport) -> str:
    """That a decision would be better the other way, and how little that may be."""
    share = f" ({-turned.seconds / graph.step_seconds:.2%} of the step)" if graph.step_seconds else ""
    return f"the search did not find this{share}"


def dropped_fit_text(turned: Turned, graph: GraphReport) -> str:
    """That the peak is higher without a value, and why: what its rebuilding needs is alive beside the rest."""
    text = fit_text(turned, graph)
    why = "what would be kept in its place is larger" if turned.saved_bytes > 0 else NEEDS_MORE
    return f"{text} ({why})" if text else ""


def rebuilt_text(row: ValueRow, graph: GraphReport) -> str:
    """What keeping a value would spare and at which price, or that it would not pay."""
    turned = row.turned
    if turned is None:
        return "" if row.reason else f"computing it again adds {format_seconds(row.again_seconds)}"
    if turned.seconds < -EQUAL_S:
        also = f" and {format_flop(-turned.flop)}" if turned.flop < 0 else ""
        text = f"kept, it would spare {format_seconds(-turned.seconds)}{also}"
        return text + price_text(turned) + (fit_text(turned, graph) or f"; {missed_text(turned, graph)}")
    if turned.seconds > EQUAL_S:
        return f"slower if kept: the step would take {format_seconds(turned.seconds)} longer{moved_text(row)}"
    return "not worth its memory: kept, the step would take as long"


def moved_text(row: ValueRow) -> str:
    """Why keeping can take time: what fused kernels hand on in registers has to go through memory if it is kept."""
    is_fused = row.kind in ("pointwise", "reduction") and row.turned.saved_bytes >= LEAST_PRICED_BYTES
    return f", with {format_bytes(row.turned.saved_bytes)} to be written and read again" if is_fused else ""


def price_text(turned: Turned) -> str:
    """What memory is held for, where it is enough to have a price."""
    price = us_per_mib_text(turned)
    return f", for {format_bytes(abs(turned.saved_bytes))}: {price}" if price else ""


def us_per_mib_text(turned: Turned) -> str:
    """Seconds a MiB; "" for a few bytes."""
    held = abs(turned.saved_bytes)
    if held < LEAST_PRICED_BYTES:
        return ""
    return f"{price_figure(abs(turned.seconds) * 1e6 / (held / 2**20))} us per MiB"


def fit_text(turned: Turned, graph: GraphReport) -> str:
    """What stands against another decision where the budget does."""
    over = over_text(turned.peak_bytes, graph)
    return f"; {over}" if over else ""


def over_text(peak_change_bytes: int, graph: GraphReport) -> str:
    """That a peak which is so much higher would be over the budget; "" where it is not."""
    peak = graph.peak_bytes + peak_change_bytes
    if graph.limit_bytes is None or peak <= graph.limit_bytes:
        return ""
    over = "the budget" if graph.budget_bytes is None or peak > graph.budget_bytes else "the budget less its margin"
    return f"the peak would be {format_bytes(peak)}, over {over}"
