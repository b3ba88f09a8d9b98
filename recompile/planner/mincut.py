"""The default planner: minimum cuts over a range of prices of a byte, with and without block boundaries, simulated.

A cut at price p minimises seconds + p x saved bytes exactly for additive costs (recompile/mincut.py), but saved bytes
are not the peak: what is rebuilt early and read late is alive as well. So the cuts only propose. Each proposal is
simulated with fusion and lifetimes, and a budget is answered by the fastest proposal whose simulated peak fits. Block
boundaries that must be saved keep backward's working set to one block; every k-th boundary is the classical sqrt(N)
family (Chen et al. 2016). Between two neighbouring proposals on the frontier, plans that follow the smaller one up to
a boundary and the faster one after it fill the gap. PyTorch's own default plan is among the proposals, so the fastest
plan is never slower than it by the simulation. Complexity: 18 cuts per family of boundaries, one simulation per
different plan (90 cuts and 50 plans for a GPT of 6 layers), each near linear in the graph. Known to be suboptimal:
prices are uniform over time, equal layers are not flipped together one role at a time.
"""

from __future__ import annotations

import functools

from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.planner.finish import check_budget, plan_from
from recompile.planner.full import full_recompute_set
from recompile.planner.network import CutNetwork, cut_network
from recompile.planner.pool import Candidate, Pool, fill_between
from recompile.planner.save_all import save_all_set
from recompile.planner.separators import separators
from recompile.planner.stock import stock_saved_set
from recompile.timeline import Timeline

# Prices, as multiples of the price at which saving all candidates costs as much as recomputing all of them.
PRICE_LADDER = tuple(10.0 ** (step / 2) for step in range(-8, 9))
MAX_STRIDES = 6
MAX_FILLED_GAPS = 4


def mincut(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
    """The fastest plan found whose predicted peak is within the budget.

    Raises BudgetError with the smallest peak found when none fits, PlanError when the graph cannot be split at all.
    """
    search = search_of(joint, hardware)
    chosen = search.answer(budget)
    boundaries = {
        i: "a block boundary: later blocks are rebuilt from it" for i in search.boundaries if i in chosen.saved
    }
    return plan_from(search.pool.timeline, chosen.saved, chosen.simulation, boundaries)


class Search:
    """One graph's pool of plans and the ways to extend it."""

    def __init__(self, joint: JointGraph, hardware: Hardware):
        self.pool = Pool(Timeline(joint, hardware))
        flow = self.pool.timeline.flow
        network = cut_network(joint, flow, hardware)
        savable = {
            i for i, seconds in zip(network.candidates, network.save_seconds, strict=True) if seconds is not None
        }
        self.boundaries = tuple(i for i in separators(flow) if i in savable)
        self.pool.add(stock_saved_set(joint, flow, 1.0))
        self.pool.add(save_all_set(joint, flow))
        self.pool.add(full_recompute_set(joint, flow))
        for forced in boundary_families(self.boundaries):
            for price in prices(network):
                self.pool.add(network.saved_at(price, forced))

    def answer(self, budget: Budget) -> Candidate:
        """The fastest plan within the budget, after filling the gap around it."""
        floor = self.pool.frontier()[0]
        check_budget(budget, floor.peak_bytes, "mincut")
        limit = budget.peak_bytes
        if limit is not None:
            self._fill_gap_at(limit)
        chosen = self.pool.fastest_within(limit)
        assert chosen is not None, "the floor fits, so something fits"
        return chosen

    def frontier(self, num_limits: int) -> list[Candidate]:
        """All plans that no other beats, after filling gaps at evenly spaced budgets; from the smallest peak up."""
        found = self.pool.frontier()
        floor, ceiling = found[0].peak_bytes, found[-1].peak_bytes
        for step in range(1, num_limits):
            self._fill_gap_at(floor + step * (ceiling - floor) // num_limits)
        return self.pool.frontier()

    def _fill_gap_at(self, limit: int) -> None:
        """Mix plans that fit with faster ones that don't, so that the memory between them is used."""
        for _ in range(MAX_FILLED_GAPS):
            before = len(self.pool.candidates)
            frontier = self.pool.frontier()
            fitting = [c for c in frontier if c.peak_bytes <= limit]
            too_large = [c for c in frontier if c.peak_bytes > limit]
            for small in {id(c): c for c in (fitting[0], fitting[-1])}.values():
                for fast in {id(c): c for c in (too_large[:1] + too_large[-1:])}.values():
                    fill_between(self.pool, small, fast, self.boundaries, lambda c: c.peak_bytes <= limit)
            if len(self.pool.candidates) == before:
                return


@functools.lru_cache(maxsize=1)
def search_of(joint: JointGraph, hardware: Hardware) -> Search:
    """The search of the graph at hand; asking for several budgets of one graph shares it. See ``forget``."""
    return Search(joint, hardware)


def forget() -> None:
    """Drop the graph that the last search holds on to."""
    search_of.cache_clear()


def boundary_families(boundaries: tuple[int, ...]) -> list[frozenset[int]]:
    """Sets of boundaries that must be saved: none, all, every second, every third, fourth, sixth, eighth, twelfth."""
    families = [frozenset(), frozenset(boundaries)]
    for stride in (2, 3, 4, 6, 8, 12)[:MAX_STRIDES]:
        if len(boundaries) >= 2 * stride:
            families.append(frozenset(boundaries[::stride]))
    return list(dict.fromkeys(families))


def prices(network: CutNetwork) -> list[float]:
    """Seconds per byte to try: none, and a ladder around the ratio of all recomputation to all bytes."""
    seconds = sum(s for s in network.recompute_seconds if s is not None)
    held = sum(size for size, s in zip(network.held_bytes, network.save_seconds, strict=True) if s is not None)
    if not seconds or not held:
        return [0.0]
    return [0.0, *(step * seconds / held for step in PRICE_LADDER)]
