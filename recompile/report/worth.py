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
from recompile.report.layer_worth import layers_worth
from recompile.report.layers import layers_of, likeness, pattern_of, place_of
from recompile.report.turning import Decided
from recompile.report.worth_text import reason_text
from recompile.timeline import Simulation, Timeline

# Nodes that these simulations, and those of one layer alone, visit together: a few percent of what planning does; the
# least number of them, of which single values get at least half.
TURNS_WORK = 200_000
LEAST_TURNS = 24


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
    turns, exchanges = layers_worth(graph, plan)
    num_left = max(LEAST_TURNS, TURNS_WORK // max(1, len(nodes))) - len(turns)
    turned = turned_values(graph, plan, max(LEAST_TURNS // 2, num_left))
    rows = []
    for row in graph.values:
        if row.decision and row.kind != "input":
            again = prices.get(row.name) or 0.0 if row.decision == "recomputed" else 0.0
            row = replace(row, again_seconds=again, turned=turned.get(row.name))
            row = replace(row, reason=reason_text(row, graph))
        rows.append(row)
    return replace(graph, values=tuple(rows), layers_turned=turns, exchanges=exchanges)


def turned_values(graph: GraphReport, plan: Decided, num_left: int) -> dict[str, Turned]:
    """By name of a value, by ``num_left`` simulations at most. Values of equal layers that are treated alike share one,
    and where there are too many of these, layers that are treated otherwise do too. First what is kept, then what takes
    the most memory.
    """
    index = {node.name: i for i, node in enumerate(plan.timeline.flow.nodes)}
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
