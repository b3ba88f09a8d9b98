"""What the decisions of a whole layer are worth: the step simulated with one layer decided as another one is.

Values of a layer share work: a softmax and the dropout mask behind it are both made of the scores, and who computes one
of them again has the other almost for nothing. What each spares alone does not add up to what the layer does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from recompile.report.explanation import Exchange, GraphReport, LayerTurned, ValueRow
from recompile.report.layers import Treatment, by_place, layers_of, place_of, treatments_of
from recompile.report.turning import Decided

MOST_PAIRS = 5  # of one kind of layer: treatments that are compared with the most frequent one, three simulations each


def layers_worth(graph: GraphReport, plan: Decided) -> tuple[tuple[LayerTurned, ...], tuple[Exchange, ...]]:
    """For a layer of every treatment and the nearest one of the most frequent: each decided as the other is, and both
    at once.
    """
    index = {node.name: i for i, node in enumerate(plan.timeline.flow.nodes)}
    places = places_of(graph)
    turns, exchanges = [], []
    for stem, layer, other in pairs_of(graph):
        mine, theirs = places[stem, layer], places[stem, other]
        pairs = [(index[mine[place]], index[theirs[place]]) for place in mine.keys() & theirs.keys()]
        differing = [pair for pair in pairs if (pair[0] in plan.kept) != (pair[1] in plan.kept)]
        for numbers, chosen in (
            ((layer, other), {a for a, _ in differing}),
            ((other, layer), {b for _, b in differing}),
        ):
            found = plan.turned(frozenset(chosen)) if chosen else None
            if found is not None:
                turns.append(LayerTurned(stem, *numbers, found[1]))
        both = plan.turned(frozenset(itertools.chain(*differing))) if differing else None
        if both is not None:
            exchanges.append(Exchange(stem, layer, other, both[1].seconds, both[1].peak_bytes))
    return tuple(turns), tuple(exchanges)


def pairs_of(graph: GraphReport) -> Iterator[tuple[str, int, int]]:
    """Kind of layer, a layer of each treatment but the most frequent, and the nearest layer of that one."""
    by_stem: dict[str, list[Treatment]] = {}
    for treatment in treatments_of(layers_of(graph)):
        if treatment.layers:
            by_stem.setdefault(treatment.stem, []).append(treatment)
    for stem, treatments in by_stem.items():
        usual = max(treatments, key=lambda treatment: len(treatment.layers))
        for treatment in others_than(usual, treatments):
            layer, other = nearest(treatment.layers, usual.layers)
            yield stem, layer, other


def others_than(usual: Treatment, treatments: Sequence[Treatment]) -> list[Treatment]:
    """In their order, and where there are too many those whose kept bytes differ most."""
    others = [treatment for treatment in treatments if treatment is not usual]
    others.sort(key=lambda treatment: -abs(treatment.kept_bytes - usual.kept_bytes))
    chosen = others[:MOST_PAIRS]
    return [treatment for treatment in treatments if treatment in chosen]


def nearest(layers: Sequence[int], others: Sequence[int]) -> tuple[int, int]:
    """The numbers of a layer and of another one that are nearest to each other, the smallest of these."""
    return min(itertools.product(layers, others), key=lambda pair: (abs(pair[0] - pair[1]), pair))


def places_of(graph: GraphReport) -> dict[tuple[str, int | None], dict[tuple, str]]:
    """By layer the names of forward's values by their place in it, which equal layers share."""
    rows: dict[tuple[str, int | None], list[ValueRow]] = {}
    for row in graph.values:
        place = place_of(row.module)
        if row.side != "backward" and row.kind != "input" and place.layer is not None:
            rows.setdefault((place.stem, place.layer), []).append(row)
    return {layer: {place: row.name for place, row in by_place(found).items()} for layer, found in rows.items()}
