"""All plans tried for one graph, simulated once each, and the trade-off between peak and time that they span."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from recompile.planner.finish import made_legal
from recompile.timeline import Simulation, Timeline, recomputed_ops


@dataclass(frozen=True)
class Candidate:
    """A legal saved set and its simulated step."""

    saved: frozenset[int]
    recomputed: frozenset[int]  # ops that run in forward and again in backward
    simulation: Simulation
    recompute_flops: int

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes

    @property
    def step_seconds(self) -> float:
        return self.simulation.step_seconds


@dataclass
class Pool:
    """Grows only: a plan once tried stays, so a larger budget never gets a slower answer."""

    timeline: Timeline
    candidates: dict[frozenset[int], Candidate] = field(default_factory=dict)
    _asked: dict[frozenset[int], Candidate] = field(default_factory=dict, repr=False)  # by the set as it was proposed
    _best: list[Candidate] = field(default_factory=list, repr=False)  # the frontier of the first ``_num_compared``
    _num_compared: int = field(default=0, repr=False)

    def add(self, saved: Iterable[int]) -> Candidate:
        """Make the set legal, simulate it unless that was done before, and return it."""
        asked = frozenset(saved)
        if asked not in self._asked:
            self._asked[asked] = self._candidate(made_legal(self.timeline.joint, self.timeline.flow, asked))
        return self._asked[asked]

    def _candidate(self, legal: frozenset[int]) -> Candidate:
        if legal not in self.candidates:
            again = frozenset(recomputed_ops(self.timeline.flow, legal))
            flops = sum(self.timeline.facts.flop[i] for i in again)
            self.candidates[legal] = Candidate(legal, again, self.timeline.simulate(legal), flops)
        return self.candidates[legal]

    def copied(self) -> Pool:
        """A pool of its own with the same plans."""
        return replace(self, candidates=dict(self.candidates), _asked=dict(self._asked))

    def frontier(self) -> list[Candidate]:
        """The candidates that no other beats in both peak and time, from the smallest peak to the fastest."""
        if self._num_compared < len(self.candidates):
            new = islice(self.candidates.values(), self._num_compared, None)
            best: list[Candidate] = []
            for candidate in sorted([*self._best, *new], key=_smallest_first):
                if not best or candidate.step_seconds < best[-1].step_seconds:
                    best.append(candidate)
            self._best, self._num_compared = best, len(self.candidates)
        return list(self._best)

    def fastest_within(self, peak_bytes: int | None) -> Candidate | None:
        """The fastest candidate whose peak fits; None if none fits. Of equally fast ones the smallest."""
        fitting = [c for c in self.frontier() if peak_bytes is None or c.peak_bytes <= peak_bytes]
        return fitting[-1] if fitting else None


def _smallest_first(candidate: Candidate) -> tuple:
    """By peak; of equal peaks the fastest, then the one that recomputes least, then graph order."""
    return candidate.peak_bytes, candidate.step_seconds, candidate.recompute_flops, sorted(candidate.saved)


def fill_between(
    pool: Pool, small: Candidate, fast: Candidate, boundaries: tuple[int, ...], fits: Callable[[Candidate], bool]
) -> None:
    """Try plans that follow ``small`` before a boundary and ``fast`` after it: early layers live longest.

    Bisects over the boundaries for the last one up to which ``small`` is needed for the plan to fit.
    """
    low, high = 0, len(boundaries)
    while low < high:
        middle = (low + high) // 2
        cut = boundaries[middle]
        mixed = {i for i in small.saved if i <= cut} | {i for i in fast.saved if i > cut}
        if fits(pool.add(mixed)):
            high = middle
        else:
            low = middle + 1
