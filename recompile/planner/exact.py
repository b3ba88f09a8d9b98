"""The best plan there is, by the simulation, proven: for small graphs, to judge the other planners by.

Branch and bound (Land and Doig 1960). Values are decided from the last to the first: of those that backward, or a value
that it rebuilds, needs, the last one is saved or rebuilt, and if it is rebuilt its inputs are needed. So every legal
plan that saves nothing in vain is one leaf of the tree, and no plan is two. Leaves are simulated. A branch is left when
the relaxed problem (``relaxation``) with its decisions fixed, one minimum cut at prices that suit the budget, shows
that nothing in it beats the best plan known; that of ``mincut`` is known from the start. Views and results of one op
are decided by the value that holds their memory.

Exponential at worst: the bound misses what only the simulation knows, so plans that close to the best are all
simulated. Measured on single blocks of 50 to 70 nodes: see benchmarks/gaps.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from recompile.dataflow import needed_by_backward
from recompile.errors import PlanError
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.planner.dual import Certificate
from recompile.planner.finish import check_budget, plan_from
from recompile.planner.mincut import search_of
from recompile.planner.pool import Pool
from recompile.timeline import Simulation, Timeline

# Nodes of a graph at most, inputs included, and plans that are simulated before the search is given up: minutes.
MAX_NODES = 100
MAX_PLANS = 20_000
# A branch is bounded where at least this many values of it are open; below, simulating it is as cheap.
MIN_OPEN = 2
# Figures closer than this share of each other are equal: bounds are rounded down.
TIE_SHARE = 1e-8


def exact(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
    """The fastest plan within the budget, of equally fast ones the smallest.

    Raises BudgetError with the smallest peak of all plans when none fits; PlanError when the graph is too large to
    prove anything about, or cannot be split at all.
    """
    found = optimum(joint, hardware, budget)
    return plan_from(found.timeline, found.saved, found.simulation, {})


def optimum(joint: JointGraph, hardware: Hardware, budget: Budget) -> Branching:
    """The finished search behind ``exact``."""
    num_nodes = len(joint.nodes)
    if num_nodes > MAX_NODES:
        raise PlanError(
            f"planner 'exact' proves optimal plans of graphs with at most {MAX_NODES} nodes, and this one has "
            f"{num_nodes}: use 'mincut', whose plans come with a lower bound"
        )
    pool = search_of(joint, hardware).pool
    search = Branching(pool, budget.peak_bytes)
    if search.best is None:
        smallest = Branching(pool, budget.peak_bytes, by_peak=True)
        smallest.run()
        check_budget(budget, smallest.simulation.peak_bytes, "exact")
    search.run()
    return search


@dataclass
class Branching:
    """One search: the fastest plan within ``limit``, or with ``by_peak`` the smallest of all."""

    pool: Pool
    limit: int | None
    by_peak: bool = False
    num_plans: int = 0
    best: tuple[float, float] | None = None
    saved: frozenset[int] = frozenset()
    simulation: Simulation = field(init=False)

    def __post_init__(self) -> None:
        self.timeline: Timeline = self.pool.timeline
        self.flow = self.timeline.flow
        self.notes = [self.timeline.joint.notes[node] for node in self.flow.nodes]
        for candidate in self.pool.candidates.values():
            self._offer(candidate.saved, candidate.simulation)
        certificate = Certificate(self.timeline)
        self.place = {i: p for p, i in enumerate(certificate.solver.problem.candidates)}
        self.solver = certificate.solver
        self.prices = self._prices(certificate)

    def _prices(self, certificate: Certificate) -> list[np.ndarray]:
        """Price vectors whose bounds are tried on every branch."""
        fixed = certificate.fixed_bytes()
        self.peak_prices = [np.eye(1, len(fixed), k)[0] for k in dict.fromkeys([0, int(np.argmax(fixed))])]
        if self.by_peak:
            return self.peak_prices
        if self.limit is None:
            return [certificate.found[0].prices]
        certificate.seconds(self.limit, self.best[0] if self.best else None)
        best = max(certificate.found, key=lambda relaxed: relaxed.seconds_within(self.limit))
        return [best.prices]

    def run(self) -> None:
        """Search the whole tree."""
        pending = [(frozenset(needed_by_backward(self.flow)), (), ())]
        while pending:
            wanted, kept, rebuilt = pending.pop()
            value, wanted = self._next_value(wanted)
            if wanted is None:
                continue  # what must not be run twice would be
            if value is None:
                self._simulate(frozenset(kept))
                continue
            if len(wanted) >= MIN_OPEN and self._is_hopeless(kept, rebuilt):
                continue
            if self.notes[value].cannot_recompute is None:
                pending.append((wanted | set(self.flow.inputs[value]), kept, (*rebuilt, value)))
            pending.append((wanted, (*kept, value), rebuilt))

    def _next_value(self, wanted: frozenset[int]) -> tuple[int | None, frozenset[int] | None]:
        """The last needed value that can be saved, and what is needed besides; None and None where a need cannot be
        met, None and nothing where all needs are."""
        needs = set(wanted)
        while needs:
            i = max(needs)
            needs.discard(i)
            if self.flow.is_input[i]:
                continue
            if self.notes[i].cannot_save is None:
                return i, frozenset(needs)
            if self.notes[i].cannot_recompute is not None:
                return None, None
            needs.update(self.flow.inputs[i])
        return None, frozenset()

    def _simulate(self, saved: frozenset[int]) -> None:
        self.num_plans += 1
        if self.num_plans > MAX_PLANS:
            raise PlanError(
                f"planner 'exact' gave up after simulating {MAX_PLANS} plans of a graph of {len(self.flow.nodes)} "
                f"nodes: use 'mincut', whose plans come with a lower bound"
            )
        self._offer(saved, self.timeline.simulate(saved))

    def _offer(self, saved: frozenset[int], simulation: Simulation) -> None:
        if not self.by_peak and self.limit is not None and simulation.peak_bytes > self.limit:
            return
        score = simulation.step_seconds, simulation.peak_bytes
        score = score[::-1] if self.by_peak else score
        if self.best is None or score < self.best:
            self.best, self.saved, self.simulation = score, saved, simulation

    def _is_hopeless(self, kept: tuple[int, ...], rebuilt: tuple[int, ...]) -> bool:
        """Whether no plan with these decisions beats the best one, ties in its first figure decided by the second."""
        if self.best is None:
            return False
        kept, rebuilt = [self.place[i] for i in kept], [self.place[i] for i in rebuilt]
        first, second = self.best
        limit = 0 if self.by_peak or self.limit is None else self.limit
        weight = 0.0 if self.by_peak else 1.0
        bound = self._bound(self.prices, weight, limit, kept, rebuilt)
        if bound < first * (1 - TIE_SHARE):
            return False
        if bound > first * (1 + TIE_SHARE) or self.by_peak:
            return True
        return self._bound(self.peak_prices, 0.0, 0, kept, rebuilt) >= second * (1 - TIE_SHARE)

    def _bound(
        self, prices: list[np.ndarray], weight: float, limit: int, kept: list[int], rebuilt: list[int]
    ) -> float:  # fmt: skip
        solved = (self.solver.solve(vector, weight, kept=kept, rebuilt=rebuilt) for vector in prices)
        return max(relaxed.seconds_within(limit) for relaxed in solved)
