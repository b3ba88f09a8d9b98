"""The default planner: cuts propose, simulations decide, and a mixture of what was learnt fills a budget.

1. Minimum cuts (recompile/mincut.py) at every breakpoint of the price of a byte (``envelope``), freely and with block
   boundaries kept (``separators``): kept boundaries bound what backward rebuilds at a time to one block; every second,
   fourth, ... boundary is the classical sqrt(N) family (Chen et al. 2016). PyTorch's own default plan is added, so the
   fastest plan is never slower than it by the simulation.
2. Each plan is simulated with fusion and lifetimes, and teaches what each way to treat a segment between boundaries
   costs (``library``). Around the best ones single values are turned, another one in each equal segment (``variants``).
3. For a budget, dynamic programming picks the fastest way for each segment so that the peak fits (``mixture``); the
   result is simulated, and corrected where the figures did not add up. Around the fastest simulated plan that fits
   values are turned and what they teach is mixed again, as long as that makes it faster; then single values are flipped
   in all equal segments (``flips``), and what is kept for little is given up for what spares more (``exchange``). A
   larger budget never gets a slower answer but by what was tried at just that budget.

Complexity: some 100 cuts and 200 simulations whatever the depth, each near linear in the graph. Known to be suboptimal:
pieces are measured one by one, so what two neighbours save together in a shared kernel shows only by chance; no value
is rebuilt twice, so that the smallest peak of N equal layers grows as sqrt(N).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from recompile.collector import collector_paused
from recompile.errors import PlanError
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.planner.envelope import envelope
from recompile.planner.exchange import SMALLEST_SHARE, exchange, likely_groups
from recompile.planner.finish import check_budget, plan_from
from recompile.planner.flips import climb, flip_groups
from recompile.planner.full import full_recompute_set
from recompile.planner.library import Library
from recompile.planner.mixture import fastest_mixture
from recompile.planner.network import cut_network
from recompile.planner.pool import Candidate, Pool, fill_between
from recompile.planner.save_all import save_all_set
from recompile.planner.segments import segments_of
from recompile.planner.separators import separators
from recompile.planner.stock import stock_saved_set
from recompile.planner.variants import turned_plans, turns_of, varied_cuts
from recompile.progress import tell
from recompile.timeline import Timeline

# Cuts tried per family of boundaries in search of all breakpoints of the price; where only every so many-th boundary is
# kept, down to the root of 256 layers, a few.
MOST_CUTS = 40
MOST_STRIDED_CUTS = 6
STRIDES = (2, 4, 8, 16)
MAX_FILLED_GAPS = 4
# Values are turned around so many plans, from the smallest peak to the fastest, before mixing and again after it; and
# so often around an answer.
NUM_TURNED_PLANS = 4
MOST_REFINEMENTS = 3
# Times that what an answer keeps for little is given up for what spares more; most end after one or two.
MOST_EXCHANGES = 3
# Flips of single values around the smallest plan, and around an answer: as many as visit this many nodes together.
FLIP_WORK = 200_000
LEAST_FLIPS = 30
# At the smallest plan, of its peak: lesser values are left alone, and what takes more than this is not kept. So the
# flips get as far as those that lower it: by 5 % on Llama, 1 % on GPT.
FLIPPED_SHARES = (0.001, 0.125)
# Where flips of everything are that many times less than FLIP_WORK, they start from some further plans as well: the
# floor of a U-net of one level came out 8 % smaller, those of models of 500 nodes no more than .03 %.
PASSES_OF_TINY, MOST_STARTS = 8, 4
# How many neighbouring segments a piece covers: with more than one, boundaries between them may be rebuilt too.
STRIDES_MIXED = (1, 2, 4, 8)
# Peaks, evenly spaced, for which the best mixture of pieces is simulated whatever budget is asked: fewer in large
# graphs, as many as visit this many nodes together. With 8 instead of 20, 24 layers came out as fast, a third sooner.
NUM_LIMITS, LEAST_LIMITS = 20, 8
LIMITS_WORK = 50_000
FLOOR_STEP_SHARE = 0.02
# Mixtures tried for one of those, and for the peak that is asked: each aims as far from it as the one before was off.
NUM_TRIES = 2
NUM_TRIES_WHEN_ASKED = 4
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
        with collector_paused():
            self._explore(joint, hardware)

    def _explore(self, joint: JointGraph, hardware: Hardware) -> None:
        self.pool = Pool(Timeline(joint, hardware))
        flow = self.pool.timeline.flow
        self.network = cut_network(joint, flow, hardware)
        savable = zip(self.network.candidates, self.network.save_seconds, strict=True)
        can_save = {i for i, seconds in savable if seconds is not None}
        self.boundaries = tuple(i for i in separators(flow) if i in can_save)
        self.segments = segments_of(flow, self.boundaries)
        self.turns = turns_of(self.network, self.segments)
        self.libraries = [
            Library(self.pool.timeline, self.segments if stride == 1 else segments_of(flow, self.boundaries[::stride]))
            for stride in STRIDES_MIXED
            if stride == 1 or len(self.boundaries) >= 4 * stride
        ]
        tell(f"planning a graph of {len(flow.nodes)} nodes, {len(self.segments)} segments")
        self.baselines = {  # by the name of the planner that keeps these
            "stock": self._try(stock_saved_set(joint, flow, 1.0)),
            "save_all": self._try(save_all_set(joint, flow)),
            "full": self._try(full_recompute_set(joint, flow)),
        }
        for forced, most_cuts in boundary_families(self.boundaries):
            for cut in envelope(self.network, forced, most_cuts):
                self._try(cut.saved)
        tell(f"{len(self.pool.candidates)} plans by minimum cuts at every price of a byte")
        self._vary_cuts()
        self._turn_values()
        tell(f"{len(self.pool.candidates)} plans with single values turned")
        self._mix_everywhere()
        self._turn_values()
        self._mix_everywhere()
        self._flip_at_floor()
        num_kept = len(self.pool.frontier())
        tell(f"{len(self.pool.candidates)} plans with mixtures of what was learnt, {num_kept} of them worth having")

    def answer(self, budget: Budget) -> Candidate:
        """The fastest plan within the budget, after filling the gap around it.

        What one budget tries is no other's business: the same plan comes out whatever was asked before.
        """
        with collector_paused():
            return self._answer(budget)

    def _answer(self, budget: Budget) -> Candidate:
        check_budget(budget, self.pool.frontier()[0].peak_bytes, "mincut")
        limit = budget.peak_bytes
        pool, libraries = self.pool.copied(), [library.copied() for library in self.libraries]
        if limit is not None:
            for library in libraries:
                mix(pool, library, limit, NUM_TRIES_WHEN_ASKED)
            if pool.fastest_within(limit).peak_bytes < (1 - UNUSED_SHARE) * limit:
                self._fill_gap_at(pool, limit)
        refined = self._refined(pool, libraries, limit)
        climbed = list(self._climb(pool, refined, faster_within(limit), limit))[-1]
        return self._exchanged(pool, climbed, math.inf if limit is None else limit)

    def _exchanged(self, pool: Pool, plan: Candidate, limit: float) -> Candidate:
        """The plan with what it keeps for little given up for what spares more."""
        for _ in range(MOST_EXCHANGES):
            groups = flip_groups(
                self.network, self.segments, plan.saved, least_bytes=int(SMALLEST_SHARE * plan.peak_bytes)
            )
            likely = likely_groups(self.network, groups, plan.saved, self._most_flips())
            before, plan = plan, exchange(plan, likely, pool.add, limit, self._most_flips())
            if plan is before:
                break
        return plan

    def _refined(self, pool: Pool, libraries: Sequence[Library], limit: int | None) -> Candidate:
        """The fastest plan within the limit, after mixing what turns around it teach as long as that helps."""
        best = pool.fastest_within(limit)
        assert best is not None, "the floor fits, so something fits"
        room = max(each.peak_bytes for each in pool.candidates.values()) if limit is None else limit
        for _ in range(MOST_REFINEMENTS):
            for candidate in self._turned(pool, best):
                for library in libraries:
                    library.measure(candidate)
            for library in libraries:
                mix(pool, library, room, NUM_TRIES_WHEN_ASKED)
            before, best = best, pool.fastest_within(limit)
            if best is before:
                break
        return best

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

    def _vary_cuts(self) -> None:
        """Turn values in the cut at the highest price: elsewhere that gains nothing over turns of whole plans."""
        cut = envelope(self.network, frozenset(self.boundaries), MOST_CUTS)[-1]
        for saved in varied_cuts(self.network, self.segments, self.turns, cut.price, cut.saved):
            self._try(saved)

    def _turn_values(self) -> None:
        """Turn values around a few of the best plans, from the smallest peak to the fastest, and learn from that."""
        for plan in spread(self.pool.frontier(), NUM_TURNED_PLANS):
            for candidate in self._turned(self.pool, plan):
                self._learn_from(candidate)

    def _turned(self, pool: Pool, plan: Candidate) -> Iterator[Candidate]:
        """Plans with one value per segment turned, simulated."""
        for saved in turned_plans(self.segments, self.turns, plan.saved):
            try:
                yield pool.add(saved)
            except PlanError:
                continue  # a value of these is needed to rebuild one that cannot be saved

    def _flip_at_floor(self) -> None:
        """Flips around the smallest plan, where the smallest peak counts; in a tiny graph around a few of them."""
        floor, affordable = self.pool.frontier()[0], FLIP_WORK // len(self.pool.timeline.flow.nodes)
        least, most = (int(share * floor.peak_bytes) for share in FLIPPED_SHARES)
        num_groups = len(flip_groups(self.network, self.segments, floor.saved))
        if num_groups <= affordable:
            least, most = 0, None  # a small graph: all can be tried
        starts = [floor]
        if PASSES_OF_TINY * num_groups <= affordable:
            by_peak = {c.peak_bytes: c for c in sorted(self.pool.candidates.values(), key=smallness, reverse=True)}
            starts = [by_peak[peak] for peak in sorted(by_peak)[:MOST_STARTS]]
        for start in starts:
            for better in self._climb(self.pool, start, is_smaller, most, least):
                self._learn_from(better)

    def _climb(
        self,
        pool: Pool,
        start: Candidate,
        is_better: Callable[[Candidate, Candidate], bool],
        most_bytes: int | None,
        least_bytes: int = 0,
    ) -> Iterator[Candidate]:
        """A plan and what flips make of it, from one improvement to the next; for the bytes see ``flip_groups``."""
        yield start

        def groups_of(saved: frozenset[int]) -> list[frozenset[int]]:
            return flip_groups(self.network, self.segments, saved, most_bytes, least_bytes)

        yield from climb(start, groups_of, pool.add, is_better, self._most_flips())

    def _most_flips(self) -> int:
        return max(LEAST_FLIPS, FLIP_WORK // len(self.pool.timeline.flow.nodes))

    def _mix_everywhere(self) -> None:
        """Mixtures below the smallest peak as long as they lower it, then at evenly spaced peaks up to the fastest."""
        floor = self.pool.frontier()[0].peak_bytes
        while self._mix_at(int(floor * (1 - FLOOR_STEP_SHARE))) < floor:
            floor = self.pool.frontier()[0].peak_bytes
        ceiling = self.pool.frontier()[-1].peak_bytes
        num_limits = min(NUM_LIMITS, max(LEAST_LIMITS, LIMITS_WORK // len(self.pool.timeline.flow.nodes)))
        for step in range(num_limits + 1):
            self._mix_at(floor + step * (ceiling - floor) // num_limits)

    def _mix_at(self, limit: int) -> int:
        """Mix with every library for a peak, learn from what was tried, and return the smallest peak so far."""
        for library in self.libraries:
            for candidate in mix(self.pool, library, limit, NUM_TRIES):
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


def mix(pool: Pool, library: Library, limit: int, num_tries: int) -> list[Candidate]:
    """Add the best mixtures of pieces for a peak to the pool, each corrected by the last one's simulation."""
    aim, segments, tried = limit, library.segments, []
    choices = [library.best_of(kind) for kind in segments.kind]
    for _ in range(num_tries):
        mixture = fastest_mixture(choices, library.gradient_bytes, aim)
        if mixture is None:
            break
        placed = (segments.placed(k, piece.pattern) for k, piece in enumerate(mixture))
        tried.append(pool.add(frozenset().union(*placed)))
        if 0 <= limit - tried[-1].peak_bytes < CLOSE_SHARE * limit:
            break
        aim += limit - tried[-1].peak_bytes
    return tried


def faster_within(limit: int | None) -> Callable[[Candidate, Candidate], bool]:
    """Whether one plan is faster than another, or as fast and smaller, and its peak within the limit."""

    def is_faster(new: Candidate, best: Candidate) -> bool:
        fits = limit is None or new.peak_bytes <= limit
        return fits and (new.step_seconds, new.peak_bytes) < (best.step_seconds, best.peak_bytes)

    return is_faster


def is_smaller(new: Candidate, best: Candidate) -> bool:
    return smallness(new) < smallness(best)


def smallness(candidate: Candidate) -> tuple[int, int, float]:
    """The peak; of plans with equal ones the sum of forward's and backward's, as what lowers the lesser of the two
    makes room for what lowers the greater and raises it."""
    phases = candidate.simulation.peak_of("forward") + candidate.simulation.peak_of("backward")
    return candidate.peak_bytes, phases, candidate.step_seconds


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


def boundary_families(boundaries: tuple[int, ...]) -> list[tuple[frozenset[int], int]]:
    """Sets of boundaries that must be saved, none, all, every second, fourth and so on, with the cuts to spend on."""
    families = {frozenset(): MOST_CUTS, frozenset(boundaries): MOST_CUTS}
    for stride in STRIDES:
        if len(boundaries) >= 2 * stride:
            families.setdefault(frozenset(boundaries[::stride]), MOST_STRIDED_CUTS)
    return list(families.items())
