"""What decisions are worth: the step simulated once more with one value decided the other way.

Prices of single values do not say why a plan is as it is: to be without a large value may mean to run what it is made
of, and what that is made of. The simulation that chose the plan knows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from recompile.errors import PlanError
from recompile.planner.finish import made_legal
from recompile.planner.network import cut_network
from recompile.report.explanation import Exchange, GraphReport, Turned, ValueRow
from recompile.report.layers import Treatment, layers_of, likeness, pattern_of, place_of, treatments_of
from recompile.report.text import price_figure
from recompile.timeline import Simulation, Timeline, recomputed_ops
from recompile.units import format_bytes, format_flop, format_seconds

# Nodes that all these simulations visit together, a few percent of what planning does; the least number of them.
TURNS_WORK = 200_000
LEAST_TURNS = 24
MOST_EXCHANGES = 4  # of one kind of layer
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
    network = cut_network(timeline.joint, timeline.flow, timeline.hardware)
    nodes = timeline.flow.nodes
    prices = {nodes[i].name: s for i, s in zip(network.candidates, network.recompute_seconds, strict=True)}
    turned = turned_values(graph, timeline, kept, simulation)
    rows = []
    for row in graph.values:
        if row.decision and row.kind != "input":
            again = prices.get(row.name) or 0.0 if row.decision == "recomputed" else 0.0
            row = replace(row, again_seconds=again, turned=turned.get(row.name))
            row = replace(row, reason=reason_text(row, graph, limit_bytes))
        rows.append(row)
    return replace(graph, values=tuple(rows), exchanges=tuple(exchanges_of(graph, timeline, kept, simulation)))


# Simulations


def turned_values(
    graph: GraphReport, timeline: Timeline, kept: frozenset[int], simulation: Simulation
) -> dict[str, Turned]:
    """By name of a value; those of equal layers that are treated alike share one simulation, and where there are too
    many of these, layers that are treated otherwise do too. First what is kept, then what takes the most memory.
    """
    index = {node.name: i for i, node in enumerate(timeline.flow.nodes)}
    again_flop = flop_again(timeline, kept)
    num_left = max(LEAST_TURNS, TURNS_WORK // max(1, len(timeline.flow.nodes)))
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
                turned = turn(timeline, kept, simulation, again_flop, index[rows[0].name])
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


def turn(timeline: Timeline, kept: frozenset[int], simulation: Simulation, again_flop: int, i: int) -> Turned | None:
    """The plan with value i kept if it is not, and not if it is; what that needs, or needs no more, goes with it.

    None where there is no such plan: what a value is made of may be neither kept nor computed again.
    """
    legal = legal_or_none(timeline, kept ^ {i})
    if legal is None or (i in legal) == (i in kept):
        return None
    other = timeline.simulate(legal)
    return Turned(
        seconds=other.step_seconds - simulation.step_seconds,
        flop=flop_again(timeline, legal) - again_flop,
        saved_bytes=other.saved_bytes - simulation.saved_bytes,
        peak_bytes=other.peak_bytes - simulation.peak_bytes,
    )


def legal_or_none(timeline: Timeline, kept: frozenset[int]) -> frozenset[int] | None:
    try:
        return made_legal(timeline.joint, timeline.flow, kept)
    except PlanError:
        return None


def exchanges_of(
    graph: GraphReport, timeline: Timeline, kept: frozenset[int], simulation: Simulation
) -> Iterator[Exchange]:
    """One layer of every treatment but the most frequent changes places with the nearest layer of that one."""
    index = {node.name: i for i, node in enumerate(timeline.flow.nodes)}
    places = places_of(graph)
    by_stem: dict[str, list[Treatment]] = {}
    for treatment in treatments_of(layers_of(graph)):
        if treatment.layers:
            by_stem.setdefault(treatment.stem, []).append(treatment)
    for stem, treatments in by_stem.items():
        usual = max(treatments, key=lambda treatment: len(treatment.layers))
        for treatment in [each for each in treatments if each is not usual][:MOST_EXCHANGES]:
            layer, other = min(
                itertools.product(treatment.layers, usual.layers), key=lambda pair: (abs(pair[0] - pair[1]), pair)
            )
            mine, theirs = places[stem, layer], places[stem, other]
            pairs = [(index[mine[place]], index[theirs[place]]) for place in mine.keys() & theirs.keys()]
            turned = {i for pair in pairs for i in pair if (pair[0] in kept) != (pair[1] in kept)}
            legal = legal_or_none(timeline, kept ^ turned) if turned else None
            if legal is None:
                continue
            step = timeline.simulate(legal)
            seconds, peak_bytes = step.step_seconds - simulation.step_seconds, step.peak_bytes - simulation.peak_bytes
            yield Exchange(stem, layer, other, seconds, peak_bytes)


def places_of(graph: GraphReport) -> dict[tuple[str, int | None], dict[tuple, str]]:
    """By layer the names of forward's values by their place in it, which equal layers share."""
    places: dict[tuple[str, int | None], dict[tuple, str]] = {}
    seen: Counter[tuple] = Counter()
    for row in graph.values:
        place = place_of(row.module)
        if row.side != "backward" and row.kind != "input" and place.layer is not None:
            layer, like = (place.stem, place.layer), (place.rest, *likeness(row))
            places.setdefault(layer, {})[*like, seen[layer, like]] = row.name
            seen[layer, like] += 1
    return places


def flop_again(timeline: Timeline, kept: frozenset[int]) -> int:
    return sum(timeline.facts.flop[i] for i in recomputed_ops(timeline.flow, kept))


# Sentences


def reason_text(row: ValueRow, graph: GraphReport, limit_bytes: int | None) -> str:
    """The planner's reason, and what the decision is worth: the sentence that terminals and HTML show."""
    if row.reason and row.turned is not None and row.turned.saved_bytes == 0:  # an output of forward costs nothing
        return row.reason
    worth = kept_text if row.decision == "saved" else rebuilt_text
    return "; ".join(text for text in (row.reason, worth(row, graph, limit_bytes)) if text)


def kept_text(row: ValueRow, graph: GraphReport, limit_bytes: int | None) -> str:
    """What a kept value spares, or that it is the budget that asks for it."""
    turned = row.turned
    if turned is None:
        return "" if row.reason else "small, or nothing can be kept in its place"
    again = format_flop(turned.flop) if turned.flop > 0 else ""
    if turned.seconds > EQUAL_S:
        work = f"{again} run again and " if again else ""
        text = f"without it {work}the step takes {format_seconds(turned.seconds)} longer"
        return text + price_text(turned) + fit_text(turned, graph, limit_bytes)
    though = f", though {again} run again" if again else ""
    if turned.seconds < -EQUAL_S:
        found = fit_text(turned, graph, limit_bytes) or "; the search did not find this"
        return f"without it the step takes {format_seconds(-turned.seconds)} less{though}{found}"
    return f"without it the step takes as long{though}{fit_text(turned, graph, limit_bytes)}"


def rebuilt_text(row: ValueRow, graph: GraphReport, limit_bytes: int | None) -> str:
    """What keeping a value would spare and at which price, or that it would not pay."""
    turned = row.turned
    if turned is None:
        return "" if row.reason else f"computing it again adds {format_seconds(row.again_seconds)}"
    if turned.seconds < -EQUAL_S:
        also = f" and {format_flop(-turned.flop)}" if turned.flop < 0 else ""
        text = f"kept, it would spare {format_seconds(-turned.seconds)}{also}"
        return text + price_text(turned) + (fit_text(turned, graph, limit_bytes) or "; the search did not find this")
    if turned.seconds > EQUAL_S:
        return f"not worth its memory: kept, the step would take {format_seconds(turned.seconds)} longer"
    return "not worth its memory: kept, the step would take as long"


def price_text(turned: Turned) -> str:
    """Seconds a MiB, what ranks values against each other: memory should go to the dearest."""
    held = abs(turned.saved_bytes)
    if held < LEAST_PRICED_BYTES:
        return ""
    return f", for {format_bytes(held)}: {price_figure(abs(turned.seconds) * 1e6 / (held / 2**20))} us per MiB"


def fit_text(turned: Turned, graph: GraphReport, limit_bytes: int | None) -> str:
    """What stands against the other decision where the budget does."""
    peak = graph.peak_bytes + turned.peak_bytes
    if limit_bytes is None or peak <= limit_bytes:
        return ""
    over = "the budget" if graph.budget_bytes is None or peak > graph.budget_bytes else "the budget less its margin"
    return f"; the peak would be {format_bytes(peak)}, over {over}"
