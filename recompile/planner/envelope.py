"""All plans that some price of a byte makes cheapest: the lower envelope of lines, found by cuts at their crossings.

A saved set S costs seconds(S) + price x bytes(S), a line in the price. Where the lines of the cheapest sets for two
prices cross, another cut shows whether a third one lies below: then it is a plan of its own, and both sides are looked
at in turn. This is Eisner and Severance's (1976) search; it meets every breakpoint with two cuts each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from recompile.planner.network import CutNetwork

# A set below a crossing by less than this share of its cost is the same but for the rounding of capacities.
ROUNDING_SHARE = 1e-6
# The price from which on bytes are all that counts, in multiples of seconds to recompute everything per byte of all.
TOP_PRICE_SHARE = 1e4


@dataclass(frozen=True, slots=True)
class PricedCut:
    """The cheapest saved set at a price in seconds a byte."""

    price: float
    saved: frozenset[int]
    seconds: float
    held_bytes: int

    def cost_at(self, price: float) -> float:
        return self.seconds + price * self.held_bytes


def envelope(network: CutNetwork, forced: frozenset[int] = frozenset(), most_cuts: int = 32) -> list[PricedCut]:
    """The different sets that are cheapest at some price, from price 0 up; at most ``most_cuts`` cuts are tried.

    ``forced`` nodes are saved wherever anything needs them.
    """
    top = TOP_PRICE_SHARE * price_of_a_byte(network)
    ends = [cut_at(network, price, forced) for price in dict.fromkeys((0.0, top))]
    found = {cut.saved: cut for cut in ends}
    pending = deque([(ends[0], ends[-1])])
    num_cuts = len(ends)
    while pending and num_cuts < most_cuts:
        low, high = pending.popleft()
        if low.held_bytes <= high.held_bytes or high.seconds <= low.seconds:
            continue
        crossing = (high.seconds - low.seconds) / (low.held_bytes - high.held_bytes)
        middle = cut_at(network, crossing, forced)
        num_cuts += 1
        if middle.cost_at(crossing) < low.cost_at(crossing) * (1 - ROUNDING_SHARE):
            found.setdefault(middle.saved, middle)
            pending += [(low, middle), (middle, high)]
    return sorted(found.values(), key=lambda cut: (cut.price, -cut.held_bytes))


def price_of_a_byte(network: CutNetwork) -> float:
    """Seconds to recompute all that may be recomputed, per byte of all that may be saved."""
    seconds = sum(s for s in network.recompute_seconds if s is not None)
    held = sum(size for size, s in zip(network.held_bytes, network.save_seconds, strict=True) if s is not None)
    return seconds / held if held else 0.0


def cut_at(network: CutNetwork, price: float, forced: frozenset[int]) -> PricedCut:
    saved = network.saved_at(price, forced)
    seconds, held_bytes = network.cost_of(saved)
    return PricedCut(price, saved, seconds, held_bytes)
