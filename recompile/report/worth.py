"""What decisions are worth: the step simulated once more with one value decided the other way.

Prices of single values do not say why a plan is as it is: to be without a large value may mean to run what it is made
of, and what that is made of. The simulation that chose the plan knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from recompile.planner.network import cut_network
from recompile.report.explanation import GraphReport, Turned, ValueRow
from recompile.report.layer_worth import layers_worth
from recompile.report.layers import layers_of, likeness, pattern_of, place_of
from recompile.report.turning import Decided
from recompile.report.worth_text import reason_text, unseen_text
from recompile.timeline import Simulation, Timeline

# Nodes that these simulations, and those of one layer alone, visit together: a few percent of what planning does; the
# least number of them, of which single values get at least half.
TURNS_WORK = 250_000
LEAST_TURNS = 24
# Shares of the peak and of the step: what is smaller, or adds less when it is computed again, is looked at last.
SMALL_SHARE, CHEAP_SHARE = 1e-5, 5e-4

Kind = tuple  # stem, place in the layer, likeness, decision and number among its twins, of values in equal layers
Groups = dict[tuple[Kind, frozenset], list[ValueRow]]


def with_worth(
    graph: GraphReport, timeline: Timeline, kept: frozenset[int], simulation: Simulation, limit_bytes: int | None
) -> GraphReport:
    """The report with what its decisions are worth, and with reasons that say so.

    ``kept``: indices into the timeline's dataflow; ``simulation``: theirs. ``limit_bytes``: what the planner was given.
    """
    graph = replace(graph, limit_bytes=limit_bytes)
    graph = replace(graph, values=priced(graph, timeline))
    plan = Decided(timeline, kept, simulation)
    turns, exchanges = layers_worth(graph, plan)
    num_left = max(LEAST_TURNS, TURNS_WORK // max(1, len(timeline.flow.nodes))) - len(turns) - len(exchanges)
    groups = groups_of(graph)
    turned = turned_values(graph, plan, groups, max(LEAST_TURNS // 2, num_left))
    others = seen_elsewhere(groups, turned)
    rows = []
    for row in graph.values:
        if row.decision and row.kind != "input":
            row = replace(row, turned=turned.get(row.name))
            text = unseen_text(row, graph, others[row.name]) if row.name in others else reason_text(row, graph)
            row = replace(row, reason=text)
        rows.append(row)
    return replace(graph, values=tuple(rows), layers_turned=turns, exchanges=exchanges)


def priced(graph: GraphReport, timeline: Timeline) -> tuple[ValueRow, ...]:
    """The values, with what those that are computed again add to the step."""
    network = cut_network(timeline.joint, timeline.flow, timeline.hardware)
    names = (timeline.flow.nodes[i].name for i in network.candidates)
    prices = dict(zip(names, network.recompute_seconds, strict=True))
    return tuple(
        replace(row, again_seconds=prices.get(row.name) or 0.0)
        if row.decision == "recomputed" and row.kind != "input"
        else row
        for row in graph.values
    )


def turned_values(graph: GraphReport, plan: Decided, groups: Groups, num_left: int) -> dict[str, Turned | None]:
    """By name of a value that was looked at, by ``num_left`` simulations at most; equal layers that are treated alike
    share one. Layers that are treated otherwise never do: the figure would not be theirs.
    """
    index = {node.name: i for i, node in enumerate(plan.timeline.flow.nodes)}
    found: dict[str, Turned | None] = {}
    for rows in by_importance(graph, groups)[:num_left]:
        turned = turned_value(plan, index[rows[0].name])
        found.update((row.name, turned) for row in rows)
    return found


def by_importance(graph: GraphReport, groups: Groups) -> list[list[ValueRow]]:
    """What layers decide differently, then one of each kind that is kept or dear to compute again, then those of layers
    that are treated otherwise, what is dear first, then the rest. The largest of each first.
    """
    ordered = sorted(groups.items(), key=lambda item: -sum(row.size_bytes for row in item[1]))
    differing, seen, ranked = differing_kinds(groups), set(), []
    for (kind, _), rows in ordered:
        is_kept, is_first = rows[0].decision == "saved", kind not in seen
        is_large = rows[0].size_bytes >= SMALL_SHARE * graph.peak_bytes
        is_dear = rows[0].again_seconds >= CHEAP_SHARE * graph.step_seconds
        if kind in differing and is_large:
            rank = 0
        elif is_large if is_kept else is_dear:
            rank = 1 if is_first else 3 if is_kept else 2
        else:
            rank = 4
        seen.add(kind)
        ranked.append((rank, not is_first, not is_kept, rows))
    return [rows for *_, rows in sorted(ranked, key=lambda each: each[:3])]


def differing_kinds(groups: Groups) -> set[Kind]:
    """Kinds of value that are kept in some layers and not in others of theirs, with both decisions."""
    patterns: dict[str, set[frozenset]] = {}
    keep: dict[Kind, set[frozenset]] = {}
    for (kind, pattern), rows in groups.items():
        patterns.setdefault(kind[0], set()).add(pattern)
        if rows[0].decision == "saved":
            keep.setdefault(without_decision(kind), set()).add(pattern)
    differ = {place for place, found in keep.items() if found != patterns[place[0]]}
    return {kind for kind, _ in groups if without_decision(kind) in differ}


def without_decision(kind: Kind) -> Kind:
    return (*kind[:-2], kind[-1])


def seen_elsewhere(groups: Groups, turned: Mapping[str, Turned | None]) -> dict[str, ValueRow | None]:
    """By name of a value that was not looked at, one of its kind that was, of a layer that is treated otherwise."""
    looked_at: dict[Kind, ValueRow] = {}
    for (kind, _), rows in groups.items():
        found = turned.get(rows[0].name)
        if found is not None:
            looked_at.setdefault(kind, replace(rows[0], turned=found))
    return {
        row.name: looked_at.get(kind) for (kind, _), rows in groups.items() for row in rows if row.name not in turned
    }


def groups_of(graph: GraphReport) -> Groups:
    """Decided values that a rule leaves a choice: those at one place of layers that are treated alike.

    The key is the kind of value, and what is decided in its layer.
    """
    groups: Groups = {}
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
