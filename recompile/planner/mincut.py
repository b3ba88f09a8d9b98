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
from collections.abc import Iterable, Sequence

from recompile.errors import PlanError
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.planner.finish import check_budget, plan_from
from recompile.planner.full import full_recompute_set
from recompile.planner.library import Library
from recompile.planner.mixture import fastest_mixture
from recompile.planner.network import CutNetwork, cut_network
from recompile.planner.pool import Candidate, Pool, fill_between
from recompile.planner.save_all import save_all_set
from recompile.planner.segments import segments_of
from recompile.planner.separators import separators
from recompile.planner.stock import stock_saved_set
from recompile.planner.variants import varied_cuts
from recompile.timeline import Timeline

# Prices, as multiples of that at which saving all candidates costs as much as recomputing all of them; half decades
# gained nothing that turns and mixtures don't.
PRICE_LADDER = tuple(10.0**step for step in range(-4, 5))
# Families that keep only every so many-th boundary, down to the root of 256 layers; their cuts at every third price.
STRIDES = (2, 4, 8, 16)
MAX_FILLED_GAPS = 4
# Cuts around which single values are turned; more gained nothing on GPT, Llama and a conv net.
NUM_TURNED_CUTS = 5
# How many neighbouring segments a piece covers: with more than one, boundaries between them may be rebuilt too.
STRIDES_MIXED = (1, 2, 4, 8)
# Peaks, evenly spaced, for which the best mixture of pieces is simulated whatever budget is asked.
NUM_LIMITS = 24
FLOOR_STEP_SHARE = 0.02
# Mixtures tried for one peak: each aims as far from it as the one before was off.
MOST_CORRECTIONS = 4
CLOSE_SHARE = 0.005
# A plan that leaves more than this of a budget unused is looked at again.
UNUSED_SHARE = 0.02


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
        self.network = cut_network(joint, flow, hardware)
        savable = zip(self.network.candidates, self.network.save_seconds, strict=True)
        can_save = {i for i, seconds in savable if seconds is not None}
        self.boundaries = tuple(i for i in separators(flow) if i in can_save)
        self.segments = segments_of(flow, self.boundaries)
        self.libraries = [
            Library(self.pool.timeline, segments_of(flow, self.boundaries[::stride]))
            for stride in STRIDES_MIXED
            if stride == 1 or len(self.boundaries) >= 4 * stride
        ]
        for saved in (stock_saved_set(joint, flow, 1.0), save_all_set(joint, flow), full_recompute_set(joint, flow)):
            self._try(saved)
        for forced, ladder in boundary_families(self.boundaries, prices(self.network)):
            for price in ladder:
                self._try(self.network.saved_at(price, forced))
        self._try_turns()
        self._mix_everywhere()

    def answer(self, budget: Budget) -> Candidate:
        """The fastest plan within the budget, after filling the gap around it.

        What one budget tries is no other's business: the same plan comes out whatever was asked before.
        """
        check_budget(budget, self.pool.frontier()[0].peak_bytes, "mincut")
        limit = budget.peak_bytes
        pool = self.pool.copied()
        if limit is not None:
            for library in self.libraries:
                mix(pool, library, limit)
            if pool.fastest_within(limit).peak_bytes < (1 - UNUSED_SHARE) * limit:
                self._fill_gap_at(pool, limit)
        chosen = pool.fastest_within(limit)
        assert chosen is not None, "the floor fits, so something fits"
        return chosen

    def _try(self, saved: Iterable[int]) -> Candidate:
        """Simulate a plan unless that was done, and learn from it what its pieces cost."""
        known = len(self.pool.candidates)
        candidate = self.pool.add(saved)
        if len(self.pool.candidates) > known:
            self._learn_from(candidate)
        return candidate

    def _learn_from(self, candidate: Candidate) -> None:
        for library in self.libraries:
            library.measure(candidate)

    def _try_turns(self) -> None:
        """Cuts with one value per segment turned, at a few prices that give different cuts."""
        cuts: dict[frozenset[int], float] = {}
        for price in prices(self.network):
            cuts.setdefault(self.network.saved_at(price, frozenset(self.boundaries)), price)
        for base, price in spread(list(cuts.items()), NUM_TURNED_CUTS):
            for kept, rebuilt in varied_cuts(self.network, self.segments, price, base):
                try:
                    self._try(self.network.saved_at(price, kept, rebuilt))
                except PlanError:
                    continue  # a value of these is needed to rebuild one that cannot be saved

    def _mix_everywhere(self) -> None:
        """Mixtures below the smallest peak as long as they lower it, then at evenly spaced peaks up to the fastest."""
        floor = self.pool.frontier()[0].peak_bytes
        while self._mix_at(int(floor * (1 - FLOOR_STEP_SHARE))) < floor:
            floor = self.pool.frontier()[0].peak_bytes
        ceiling = self.pool.frontier()[-1].peak_bytes
        for step in range(NUM_LIMITS + 1):
            self._mix_at(floor + step * (ceiling - floor) // NUM_LIMITS)

    def _mix_at(self, limit: int) -> int:
        """Mix with every library for a peak, learn from what was tried, and return the smallest peak so far."""
        for library in self.libraries:
            for candidate in mix(self.pool, library, limit):
                self._learn_from(candidate)
        return self.pool.frontier()[0].peak_bytes

    def _fill_gap_at(self, pool: Pool, limit: int) -> None:
        """Follow plans that fit up to a boundary and faster ones that don't after it, so that the memory between them
        is used."""
        for _ in range(MAX_FILLED_GAPS):
            before = len(pool.candidates)
            frontier = pool.frontier()
            fitting = [c for c in frontier if c.peak_bytes <= limit]
            too_large = [c for c in frontier if c.peak_bytes > limit]
            for small in {id(c): c for c in (fitting[0], fitting[-1])}.values():
                for fast in {id(c): c for c in (too_large[:1] + too_large[-1:])}.values():
                    fill_between(pool, small, fast, self.boundaries, lambda c: c.peak_bytes <= limit)
            if len(pool.candidates) == before:
                return


def mix(pool: Pool, library: Library, limit: int) -> list[Candidate]:
    """Add the best mixture of pieces for a peak to the pool, corrected by what its simulation says; the plans tried."""
    aim, segments, tried = limit, library.segments, []
    choices = [library.best_of(kind) for kind in segments.kind]
    for _ in range(MOST_CORRECTIONS):
        mixture = fastest_mixture(choices, library.gradient_bytes, aim)
        if mixture is None:
            break
        placed = (segments.placed(k, piece.pattern) for k, piece in enumerate(mixture))
        tried.append(pool.add(frozenset().union(*placed)))
        if 0 <= limit - tried[-1].peak_bytes < CLOSE_SHARE * limit:
            break
        aim += limit - tried[-1].peak_bytes
    return tried


def spread(items: list, count: int) -> list:
    """``count`` items evenly spaced over a list, its ends included; all when there are no more."""
    if len(items) <= count:
        return items
    return [items[round(step * (len(items) - 1) / (count - 1))] for step in range(count)]


@functools.lru_cache(maxsize=1)
def search_of(joint: JointGraph, hardware: Hardware) -> Search:
    """The search of the graph at hand; asking for several budgets of one graph shares it. See ``forget``."""
    return Search(joint, hardware)


def forget() -> None:
    """Drop the graph that the last search holds on to."""
    search_of.cache_clear()


def boundary_families(
    boundaries: tuple[int, ...], ladder: Sequence[float]
) -> list[tuple[frozenset[int], Sequence[float]]]:
    """Sets of boundaries that must be saved, with prices to cut at: none, all, every second, fourth and so on."""
    families = {frozenset(): ladder, frozenset(boundaries): ladder}
    for stride in STRIDES:
        if len(boundaries) >= 2 * stride:
            families.setdefault(frozenset(boundaries[::stride]), ladder[::3])
    return list(families.items())


def prices(network: CutNetwork) -> list[float]:
    """Seconds per byte to try: none, and a ladder around the ratio of all recomputation to all bytes."""
    seconds = sum(s for s in network.recompute_seconds if s is not None)
    held = sum(size for size, s in zip(network.held_bytes, network.save_seconds, strict=True) if s is not None)
    if not seconds or not held:
        return [0.0]
    return [0.0, *(step * seconds / held for step in PRICE_LADDER)]
