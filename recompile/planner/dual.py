"""Prices over time: lower bounds on time and peak that hold for every plan.

Give each moment t of the step (``relaxation``) a price mu(t) >= 0 of a byte. For every saved set S within M bytes

    seconds(S)  >=  seconds(S) + sum over t of mu(t) x (live bytes of S at t - M)  >=  L(mu)

where L(mu) is the least of the right side over the relaxed problem: one minimum cut. The maximum of L over all prices
is the bound; L is concave, and live bytes - M of the relaxed plan is a subgradient. Steps are Polyak's (1969): towards
a target, here the time of a known plan or a little above the best bound. Each round's L is valid, whatever the steps.
A round's L is a straight line in M, so bounds found for one budget serve all others.

How close it gets: the relaxed problem knows what ``certain`` knows. Complexity: one cut a round, near linear in the
graph; fewer rounds on larger graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from recompile.planner.relaxation import relax
from recompile.planner.relaxed_cut import CutSolver, Relaxed
from recompile.timeline import Timeline

# Rounds of ascent at most, and on larger graphs as many as visit this many candidates together.
MAX_ROUNDS = 60
MAX_VISITS = 100_000
MIN_ROUNDS = 12
# Polyak's relaxation of the step, and the share by which a target exceeds the best bound where no plan's time is known.
STEP = 0.5
TARGET_SHARE = 0.02
# Rounds end early after this many in a row that raise the best bound by less than this share.
PATIENCE = 15
LEAST_GAIN_SHARE = 1e-5
# Bounds are sums of floating point numbers; this share below them nothing is lost to rounding.
ROUNDING_SHARE = 1e-9
# Moments at which the floor is sought one by one, the ones with most fixed bytes.
NUM_FLOOR_MOMENTS = 3


@dataclass
class Certificate:
    """Lower bounds for one graph. Keeps what it has found: asking for several budgets shares it."""

    timeline: Timeline
    solver: CutSolver = field(init=False)
    found: list[Relaxed] = field(init=False, default_factory=list)
    _prices: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.solver = CutSolver(relax(self.timeline))
        self._prices = np.zeros(self.solver.problem.num_moments)
        self.found.append(self.solver.solve(self._prices))

    def seconds(self, limit_bytes: int | None, known_seconds: float | None = None) -> float:
        """No plan with a simulated peak within ``limit_bytes`` is faster; infinite where there is provably none.

        ``known_seconds``: the time of some plan within the limit; rounds end when the bound reaches it.
        """
        if limit_bytes is not None:
            for _ in self.ascend(limit_bytes, self._num_rounds(), STEP, known_seconds):
                pass
        return self.seconds_so_far(limit_bytes)

    def seconds_so_far(self, limit_bytes: int | None) -> float:
        """The best bound for a limit from the rounds made until now, without another."""
        if limit_bytes is None:
            return float(self.found[0].value) * (1 - ROUNDING_SHARE)
        if limit_bytes < self.floor_bytes():
            return math.inf
        return float(max(relaxed.seconds_within(limit_bytes) for relaxed in self.found)) * (1 - ROUNDING_SHARE)

    def floor_bytes(self) -> int:
        """No legal plan has a simulated peak below this."""
        if not hasattr(self, "_floor"):
            self._floor = self._find_floor()
        return self._floor

    def fixed_bytes(self) -> np.ndarray:
        """Bytes that are alive whatever is saved, per moment."""
        return np.concatenate([self.solver.problem.backward_bytes, self.solver.problem.forward_bytes])

    def _find_floor(self) -> int:
        fixed = self.fixed_bytes()
        best = float(fixed.max(initial=0.0))
        for moment in dict.fromkeys([0, *np.argsort(-fixed, kind="stable")[:NUM_FLOOR_MOMENTS].tolist()]):
            prices = np.zeros(len(fixed))
            prices[moment] = 1.0
            best = max(best, self.solver.solve(prices, seconds_weight=0.0).value)
        return math.ceil(best * (1 - ROUNDING_SHARE)) if math.isfinite(best) else 0

    def ascend(
        self, limit_bytes: int, rounds: int, step: float, known_seconds: float | None = None
    ) -> Iterator[Relaxed]:
        """One Relaxed a round, from zero prices up."""
        relaxed, prices, best, idle = self.found[0], self._prices, -math.inf, 0
        for _ in range(rounds):
            yield relaxed
            bound = relaxed.seconds_within(limit_bytes)
            idle = 0 if bound > best * (1 + LEAST_GAIN_SHARE) else idle + 1
            best = max(best, bound)
            is_known = known_seconds is not None and best >= known_seconds
            if is_known or idle == PATIENCE or not math.isfinite(bound):
                return
            excess = relaxed.live_bytes - limit_bytes
            excess = np.where((prices > 0) | (excess > 0), excess, 0.0)
            norm = float(excess @ excess)
            if norm == 0.0:
                return
            target = known_seconds if known_seconds is not None else best * (1 + TARGET_SHARE)
            prices = np.maximum(0.0, prices + step * (target - bound) / norm * excess)
            relaxed = self.solver.solve(prices)
            self.found.append(relaxed)

    def _num_rounds(self) -> int:
        size = max(1, len(self.solver.problem.candidates))
        return max(MIN_ROUNDS, min(MAX_ROUNDS, MAX_VISITS // size))


def lower_bound(timeline: Timeline, limit_bytes: int | None, known_seconds: float | None = None) -> float:
    """Seconds that no legal plan with a simulated peak within ``limit_bytes`` undercuts; None: whatever its peak."""
    return Certificate(timeline).seconds(limit_bytes, known_seconds)


def floor_bound(timeline: Timeline) -> int:
    """Bytes that the simulated peak of no legal plan undercuts."""
    return Certificate(timeline).floor_bytes()
