"""Solves the relaxed problem of ``relaxation`` for given prices: one minimum cut, as in ``recompile.mincut``.

Vertices: enter v and leave v for recomputing and saving, compute v and demand v for the copy that stands for memory at
the calls of backward's chain, inline v and load v for the one that stands for what backward's loops read. Dinic's
algorithm in scipy; 5 ms a solution for 8,500 vertices (a GPT of 12 layers, 1,717 candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from recompile.mincut import INFINITE, LARGEST_TOTAL
from recompile.planner.relaxation import Relaxation


@dataclass(frozen=True)
class Relaxed:
    """The solution for one vector of prices."""

    saved: frozenset[int]
    value: float  # seconds and priced bytes together, of the cheapest relaxed plan
    prices: np.ndarray  # seconds a byte, per moment
    live_bytes: np.ndarray  # per moment, of that plan

    def seconds_within(self, limit_bytes: float) -> float:
        """A lower bound on the step's seconds for every plan whose peak is at most ``limit_bytes``."""
        return self.value - float(self.prices.sum()) * limit_bytes


class CutSolver:
    """Solves the relaxed problem; the graph of the cut is laid out once, prices change its capacities alone."""

    def __init__(self, relaxation: Relaxation):
        self.problem = p = relaxation
        count = len(p.candidates)
        place = np.arange(count)
        self.savable = np.isfinite(p.save_seconds)
        self.copied = p.demanded_until > 0
        self.holds = self.copied & ~p.passes_through
        # Vertices, by number; a value that cannot be saved, or holds no memory, has one in the place of two.
        self.enter, self.compute = place, 2 * count + place
        self.leave = np.where(self.savable, count + place, self.enter)
        self.demand = np.where(self.holds, 3 * count + place, self.compute)
        self.load = 4 * count + place
        self.inline = np.where(p.passes_through, self.load, 5 * count + place)
        self.loads = ~p.passes_through
        self.source, self.sink, self.root = 6 * count, 6 * count + 1, 6 * count + 2
        value, user = p.uses[:, 0], p.uses[:, 1]
        self.inside = p.uses[(p.demanded_until[value] == p.demanded_until[user]) & self.copied[user]]
        self._lay_out()

    def _lay_out(self) -> None:
        p = self.problem
        value, user = p.uses[:, 0], p.uses[:, 1]
        priced = [
            (np.full(len(self.enter), self.source), self.enter),
            (self.enter[self.savable], self.leave[self.savable]),
            (self.compute[self.holds], self.demand[self.holds]),
            (np.where(p.made_by_loop, self.inline, self.source)[self.loads], self.load[self.loads]),
        ]
        looped = p.made_by_loop[user]
        infinite = [
            (self.leave[value], self.enter[user]),
            (self.leave[p.needed], np.full(len(p.needed), self.sink)),
            (self.enter[self.copied], self.compute[self.copied]),
            (self.enter[p.made_by_loop], self.inline[p.made_by_loop]),
            (self.load[value[looped]], self.inline[user[looped]]),
            (self.load[p.loaded], np.full(len(p.loaded), self.sink)),
            (self.demand[self.inside[:, 0]], self.compute[self.inside[:, 1]]),
            (np.array([self.root]), np.array([self.source])),  # keeps the flow below INFINITE where no plan exists
            (self.demand[p.demanded], np.full(len(p.demanded), self.sink)),
        ]
        rows = np.concatenate([row for row, _ in priced + infinite])
        columns = np.concatenate([column for _, column in priced + infinite])
        used, places = np.unique(np.concatenate([rows, columns, [self.root, self.sink]]), return_inverse=True)
        arcs = places[: len(rows)].astype(np.int64) * len(used) + places[len(rows) : 2 * len(rows)]
        distinct, self.slot = np.unique(arcs, return_inverse=True)
        self.num_priced = sum(len(row) for row, _ in priced)
        self.used, self.ends = used, (int(places[-2]), int(places[-1]))
        self.columns = (distinct % len(used)).astype(np.int32)
        self.starts = np.searchsorted(distinct // len(used), np.arange(len(used) + 1)).astype(np.int32)

    def solve(
        self, prices: np.ndarray, seconds_weight: float = 1.0, *, kept: Sequence[int] = (), rebuilt: Sequence[int] = ()
    ) -> Relaxed:
        """The least of seconds x ``seconds_weight`` plus bytes x ``prices`` (one a moment: backward's, then forward's).

        ``kept`` must not be recomputed, ``rebuilt`` must not be saved; both are positions among the candidates.
        ``value`` is rounded down, never up. It is infinite when no plan exists.
        """
        p, num_backward = self.problem, len(self.problem.backward_bytes)
        until = np.concatenate([[0.0], np.cumsum(prices[1 : num_backward - 1])])
        after = np.concatenate([np.cumsum(prices[num_backward:][::-1])[::-1], [0.0]])
        hold = p.held_bytes * until[p.demanded_until]
        save = p.saved_bytes * (prices[0] + after[p.saved_from])
        save[list(rebuilt)] = np.inf
        save = save[self.savable] + p.save_seconds[self.savable] * seconds_weight
        load = p.load_seconds[self.loads] * seconds_weight
        must_save = np.isinf(p.recompute_seconds)
        must_save[list(kept)] = True
        recompute = np.where(must_save, 0.0, p.recompute_seconds) * seconds_weight
        recompute[must_save] = np.inf
        cost, in_sink = self._cut(np.concatenate([recompute, save, hold[self.holds], load]))
        saved = self.savable & ~in_sink[self.enter] & in_sink[self.leave]
        held = self.holds & ~in_sink[self.compute] & in_sink[self.demand]
        live = np.concatenate([self._backward_live(saved, held), self._forward_live(saved)])
        fixed = float(prices @ np.concatenate([p.backward_bytes, p.forward_bytes]))
        value = p.fixed_seconds * seconds_weight + cost + fixed
        return Relaxed(frozenset(np.asarray(p.candidates)[saved].tolist()), value, prices, live)

    def _cut(self, costs: np.ndarray) -> tuple[float, np.ndarray]:
        """The least cost, rounded down, and per vertex whether it is on the sink's side.

        Of the cheapest cuts the one nearest the sink is taken: what nothing needs is neither saved nor held in it.
        """
        finite = np.isfinite(costs)
        total = float(costs[finite].sum())
        factor = LARGEST_TOTAL / total if total > 0 else 0.0
        capacity = np.full(len(self.columns), INFINITE, dtype=np.int32)
        capacity[self.slot[: self.num_priced]] = np.where(finite, np.where(finite, costs, 0.0) * factor, INFINITE)
        network = csr_array((capacity, self.columns, self.starts), shape=(len(self.used), len(self.used)))
        result = maximum_flow(network, *self.ends, method="dinic")
        in_sink = np.zeros(self.root + 1, dtype=bool)
        if result.flow_value > LARGEST_TOTAL:
            return np.inf, in_sink
        residual = csr_array((network - result.flow).T)
        residual.eliminate_zeros()
        order = breadth_first_order(residual, self.ends[1], directed=True, return_predecessors=False)
        in_sink[self.used[order]] = True
        return result.flow_value / factor if factor else 0.0, in_sink

    def _backward_live(self, saved: np.ndarray, held: np.ndarray) -> np.ndarray:
        p, last = self.problem, len(self.problem.backward_bytes) - 2
        ending = np.bincount(p.demanded_until, weights=p.held_bytes * held, minlength=last + 1)
        at_calls = np.cumsum(ending[::-1])[::-1][1 : last + 1]
        return p.backward_bytes + np.concatenate([[float(p.saved_bytes @ saved)], at_calls, [0.0]])

    def _forward_live(self, saved: np.ndarray) -> np.ndarray:
        p, count = self.problem, len(self.problem.forward_bytes)
        starting = np.bincount(p.saved_from, weights=p.saved_bytes * saved, minlength=count + 1)
        return p.forward_bytes + np.cumsum(starting)[:count]
