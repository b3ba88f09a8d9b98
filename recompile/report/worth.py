"""What decisions are worth: the step simulated once more with one value decided the other way.

Prices of single values do not say why a plan is as it is: to be without a large value may mean to run what it is made
of, and what that is made of. The simulation that chose the plan knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from recompile.planner.network import cut_network
from recompile.report.explanation import GraphReport, Turned, ValueRow
from recompile.report.layer_worth import with_layers_worth
from recompile.report.layers import layers_of, likeness, pattern_of, place_of
from recompile.report.text import price_figure
from recompile.report.turning import Decided
from recompile.timeline import Simulation, Timeline
from recompile.units import format_bytes, format_flop, format_seconds

# Nodes that all these simulations visit together, a few percent of what planning does; the least number of them.
TURNS_WORK = 200_000
LEAST_TURNS = 24
# Times that differ by less are equal: what is shown has a digit less.
EQUAL_S = 5e-8
# Memory has a price where it is at least so much; a few bytes that spare a kernel have one that says nothing.
LEAST_PRICED_BYTES = 1024


def with_worth(
    graph: GraphReport, timeline: Timeline, kept: frozenset[int], simulation: Simulation, limit_bytes: int | None
) -> GraphReport:
    """The report with what its decisions are worth, and with reasons that say so.

    ``kept``: indices into the timeline's dataflow; ``simulation``: theirs. ``limit_bytes``: what the planner was given.
    """
    graph = replace(graph, limit_bytes=limit_bytes)
    network = cut_network(timeline.joint, timeline.flow, timeline.hardware)
    nodes = timeline.flow.nodes
    prices = {nodes[i].name: s for i, s in zip(network.candidates, network.recompute_seconds, strict=True)}
    plan = Decided(timeline, kept, simulation)
    turned = turned_values(graph, plan)
    rows = []
    for row in graph.values:
        if row.decision and row.kind != "input":
            again = prices.get(row.name) or 0.0 if row.decision == "recomputed" else 0.0
            row = replace(row, again_seconds=again, turned=turned.get(row.name))
            row = replace(row, reason=reason_text(row, graph))
        rows.append(row)
    turns, exchanges = with_layers_worth(graph, plan)
    return replace(graph, values=tuple(rows), layers_turned=turns, exchanges=exchanges)


# Simulations


def turned_values(graph: GraphReport, plan: Decided) -> dict[str, Turned]:
    """By name of a value; those of equal layers that are treated alike share one simulation, and where there are too
    many of these, layers that are treated otherwise do too. First what is kept, then what takes the most memory.
    """
    index = {node.name: i for i, node in enumerate(plan.timeline.flow.nodes)}
    num_left = max(LEAST_TURNS, TURNS_WORK // max(1, len(index)))
    found: dict[str, Turned] = {}
    borrowed: dict[tuple, Turned] = {}
    groups = sorted(groups_of(graph).items(), key=lambda item: importance(item[1]))
    for is_first in (True, False):  # one of each kind, then one of each that is treated otherwise beside it
        for (kind, _), rows in groups:
            if rows[0].name in found or (kind in borrowed) is is_first:
                continue
            if num_left <= 0:
                turned = borrowed.get(kind)
            else:
                num_left -= 1
                turned = turned_value(plan, index[rows[0].name])
                if turned is not None:
                    borrowed.setdefault(kind, turned)
            if turned is not None:
                found.update((row.name, turned) for row in rows)
    return found


def importance(rows: Sequence[ValueRow]) -> tuple[bool, int]:
    """What is kept comes first, then what takes the most memory."""
    return rows[0].decision != "saved", -sum(row.size_bytes for row in rows)


def groups_of(graph: GraphReport) -> dict[tuple[tuple, frozenset], list[ValueRow]]:
    """Decided values that a rule leaves a choice: those at one place of layers that are treated alike.

    The key is the kind of value, and what is decided in its layer.
    """
    groups: dict[tuple[tuple, frozenset], list[ValueRow]] = {}
    for layer in layers_of(graph):
        pattern, seen = pattern_of(layer), Counter()
        for row in (*layer.kept, *layer.again):
            if row.cannot_recompute if row.decision == "saved" else row.cannot_save:
                continue
            like = (layer.stem, place_of(row.module).rest, *likeness(row), row.decision)
            seen[like] += 1
            groups.setdefault(((*like, seen[like]), pattern), []).append(row)
    return groups


def turned_value(plan: Decided, i: int) -> Turned | None:
    """What deciding value i the other way would change; None where what is legal decides it back."""
    found = plan.turned(frozenset([i]))
    return None if found is None or (i in found[0]) == (i in plan.kept) else found[1]


# Sentences


def reason_text(row: ValueRow, graph: GraphReport) -> str:
    """The planner's reason, and what the decision is worth: the sentence that terminals and HTML show."""
    if row.reason and row.turned is not None and row.turned.saved_bytes == 0:  # an output of forward costs nothing
        return row.reason
    worth = kept_text if row.decision == "saved" else rebuilt_text
    return "; ".join(text for text in (row.reason, worth(row, graph)) if text)


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
        found = dropped_fit_text(turned, graph) or "; the search did not find this"
        return f"without it the step takes {format_seconds(-turned.seconds)} less{though}{found}"
    return f"without it the step takes as long{though}{dropped_fit_text(turned, graph)}"


def dropped_fit_text(turned: Turned, graph: GraphReport) -> str:
    """That the peak is higher without a value, and why: what its rebuilding needs is alive beside the rest."""
    text = fit_text(turned.peak_bytes, graph)
    is_swap = turned.saved_bytes > 0
    why = (
        "what would be kept in its place is larger"
        if is_swap
        else "rebuilding it needs more at the peak than keeping it"
    )
    return f"{text} ({why})" if text else ""


def rebuilt_text(row: ValueRow, graph: GraphReport) -> str:
    """What keeping a value would spare and at which price, or that it would not pay."""
    turned = row.turned
    if turned is None:
        return "" if row.reason else f"computing it again adds {format_seconds(row.again_seconds)}"
    if turned.seconds < -EQUAL_S:
        also = f" and {format_flop(-turned.flop)}" if turned.flop < 0 else ""
        text = f"kept, it would spare {format_seconds(-turned.seconds)}{also}"
        return text + price_text(turned) + (fit_text(turned.peak_bytes, graph) or "; the search did not find this")
    if turned.seconds > EQUAL_S:
        return f"slower if kept: the step would take {format_seconds(turned.seconds)} longer{moved_text(row)}"
    return "not worth its memory: kept, the step would take as long"


def moved_text(row: ValueRow) -> str:
    """Why keeping can take time: what fused kernels hand on in registers has to go through memory if it is kept."""
    is_fused = row.kind in ("pointwise", "reduction") and row.turned.saved_bytes >= LEAST_PRICED_BYTES
    return f", as {format_bytes(row.turned.saved_bytes)} would be written and read again" if is_fused else ""


def price_text(turned: Turned) -> str:
    """Seconds a MiB, what ranks values against each other: memory should go to the dearest."""
    held = abs(turned.saved_bytes)
    if held < LEAST_PRICED_BYTES:
        return ""
    return f", for {format_bytes(held)}: {price_figure(abs(turned.seconds) * 1e6 / (held / 2**20))} us per MiB"


def fit_text(peak_change_bytes: int, graph: GraphReport) -> str:
    """What stands against another decision where the budget does."""
    peak = graph.peak_bytes + peak_change_bytes
    if graph.limit_bytes is None or peak <= graph.limit_bytes:
        return ""
    over = "the budget" if graph.budget_bytes is None or peak > graph.budget_bytes else "the budget less its margin"
    return f"; the peak would be {format_bytes(peak)}, over {over}"
