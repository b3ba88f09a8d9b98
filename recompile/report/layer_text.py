"""Sentences on whole layers: what one would be like decided as another is, and if two changed places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recompile.report.explanation import Exchange, GraphReport, LayerTurned, Turned, ValueRow
from recompile.report.layers import Treatment, by_place, ranges_text, stem_text
from recompile.report.worth_text import EQUAL_S, NEEDS_MORE, over_text, us_per_mib_text
from recompile.units import format_bytes, format_seconds

SAME_SHARE = 1e-3  # of the step's time or peak: what differs by less is called the same
# Single values that come to within this share of what the layer does say the same as it.
ADDS_UP_SHARE = 0.1


def layer_texts(graph: GraphReport, treatment: Treatment, treatments: Sequence[Treatment]) -> list[str]:
    """What one of these layers would be like if it were decided as others are, a sentence or two for each."""
    texts = []
    for found in graph.layers_turned:
        if found.stem == treatment.stem and found.layer in treatment.layers:
            other = next(t for t in treatments if t.stem == found.stem and found.like in t.layers)
            texts.append(turned_text(graph, treatment, other, found))
    return texts


def turned_text(graph: GraphReport, treatment: Treatment, other: Treatment, found: LayerTurned) -> str:
    """``Decided as layers 5, 7 are, each would keep 387.50 MiB less, and the step take 569.7 us longer: 1.5 us per MiB.
    It would fit.``
    """
    turned = found.turned
    who = "each" if len(treatment.layers) > 1 else "it"
    number = ranges_text(other.layers)
    like = f"layers {number} are" if len(other.layers) > 1 else f"layer {number} is"
    keep = "as much"
    if turned.saved_bytes:
        keep = change(turned.saved_bytes, format_bytes, "more", "less")
    take = "as long"
    if abs(turned.seconds) > EQUAL_S:
        take = change(turned.seconds, format_seconds, "longer", "shorter")
    price = us_per_mib_text(turned) if turned.seconds * turned.saved_bytes < 0 else ""
    price = f": {price}" if price else ""
    parts = (
        f"Decided as {like}, {who} would keep {keep}, and the step take {take}{price}.",
        fit_sentence(graph, turned),
        sum_sentence(treatment, other, turned),
    )
    return " ".join(part for part in parts if part)


def fit_sentence(graph: GraphReport, turned: Turned) -> str:
    """Whether the budget would allow it."""
    if graph.limit_bytes is None:
        return ""
    over = over_text(turned.peak_bytes, graph)
    if over:
        why = f" ({NEEDS_MORE})" if turned.saved_bytes < 0 else ""
        return f"It would not fit: {over}{why}."
    if turned.seconds < -EQUAL_S:
        return "It would fit: the search did not find this."
    return "It would fit, but is slower." if turned.seconds > EQUAL_S else "It would fit."


def sum_sentence(treatment: Treatment, other: Treatment, turned: Turned) -> str:
    """What the values that differ come to one by one, where all were looked at and that is more or less than what the
    layer does. A sum of the other sign says nothing.
    """
    rows = differing(treatment, other)
    singles = [row.turned.seconds for row in rows if row is not None and row.turned is not None]
    total = sum(singles)
    if len(singles) < max(2, len(rows)) or total * turned.seconds <= 0:
        return ""
    if abs(total - turned.seconds) <= max(EQUAL_S, ADDS_UP_SHARE * abs(turned.seconds)):
        return ""
    takes = change(total, format_seconds, "longer", "shorter")
    num = len(singles)
    return f"One by one, the {num} values that differ make it {takes} in sum: they share work, so the layer counts."


def differing(treatment: Treatment, other: Treatment) -> list[ValueRow | None]:
    """Values of a layer that it keeps and the other does not, or the other way around; None stands for one of those
    that this layer does not need at all.
    """
    kept, again, kept_there = by_place(treatment.kept), by_place(treatment.again), by_place(other.kept)
    dropped = [row for place, row in kept.items() if place not in kept_there]
    return dropped + [again.get(place) for place in kept_there if place not in kept]


def exchange_text(graph: GraphReport, exchange: Exchange) -> str:
    """``blocks 5 treated as 4 is, and 4 as 5: as long a step, the same peak. Either would do.``"""
    is_as_long = abs(exchange.seconds) <= SAME_SHARE * graph.step_seconds
    is_as_high = abs(exchange.peak_bytes) <= SAME_SHARE * graph.peak_bytes
    time = "as long a step" if is_as_long else f"a step {change(exchange.seconds, format_seconds, 'longer', 'shorter')}"
    peak = "the same peak" if is_as_high else f"a peak {change(exchange.peak_bytes, format_bytes, 'higher', 'lower')}"
    either = " Either would do." if is_as_long and is_as_high else ""
    a, b = exchange.layer, exchange.other
    return f"{stem_text(exchange.stem)} {a} treated as {b} is, and {b} as {a}: {time}, {peak}.{either}"


def change(value: float, text: Callable[[Any], str], more: str, less: str) -> str:
    return f"{text(abs(value))} {more if value > 0 else less}"
