"""Bytes kept for little time given up for bytes that spare more: the last touch on a plan for one budget.

What a budget has no room for in all equal segments is done in some, and what is kept for little makes that room. It is
the greedy rule for a knapsack (Dantzig 1957) with figures measured by simulations of the plan at hand: what a flip of
one value in all equal segments (``flips``) adds to the peak and spares of the step's seconds. All that is cheaper for a
byte than the dearest thing left out is given up, and then as much of everything as fits is taken, the dearest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from recompile.errors import PlanError
from recompile.planner.network import CutNetwork
from recompile.planner.pool import Candidate

LEAST_GAIN = 0.0025  # of a step's seconds
SMALLEST_SHARE = 1 / 4096  # of the plan's peak: what has fewer bytes is left as it is


@dataclass(frozen=True)
class Flip:
    """A change of a plan: what it adds to the peak and spares of the seconds, either of which may be negative."""

    values: frozenset[int]
    added_bytes: int
    spared_seconds: float

    @property
    def seconds_per_byte(self) -> float:
        return self.spared_seconds / max(abs(self.added_bytes), 1)


@dataclass
class Trials:
    """Simulations of changed plans, as many as are left."""

    simulated: Callable[[frozenset[int]], Candidate]
    left: int

    def changed(self, plan: Candidate, values: Iterable[int]) -> Candidate | None:
        """The plan with these values kept or rebuilt instead; None where that cannot be or none is left."""
        if self.left == 0:
            return None
        self.left -= 1
        try:
            return self.simulated(plan.saved.symmetric_difference(values))
        except PlanError:
            return None  # a value of these is needed to rebuild one that cannot be saved

    def flips(self, plan: Candidate, groups: Iterable[frozenset[int]]) -> list[Flip]:
        """What each of the groups would change."""
        pairs = ((group, self.changed(plan, group)) for group in groups)
        return [
            Flip(group, new.peak_bytes - plan.peak_bytes, plan.step_seconds - new.step_seconds)
            for group, new in pairs
            if new is not None
        ]


def exchange(
    start: Candidate,
    groups: Iterable[frozenset[int]],
    simulated: Callable[[frozenset[int]], Candidate],
    limit_bytes: float,
    most_flips: int,
) -> Candidate:
    """A faster plan within the limit by flips of the groups, or the plan itself.

    A group is flipped in as many of its members as fit, the last ones, since what they keep is freed first in backward.
    Where all that gains less than LEAST_GAIN, only flips of whole groups that take no memory are made: equal segments
    are treated alike unless that costs something. ``most_flips`` may be simulated to learn what each group would
    change, and as many again to make the exchange.
    """
    trials = Trials(simulated, most_flips)
    flips = trials.flips(start, groups)
    trials.left = most_flips
    base = start
    for flip in flips:
        if flip.spared_seconds > 0 and flip.added_bytes <= 0:
            new = trials.changed(base, flip.values)
            if new is not None and new.step_seconds < base.step_seconds and new.peak_bytes <= limit_bytes:
                base = new
    wanted = [flip for flip in flips if flip.spared_seconds > 0 and flip.added_bytes > 0]
    given_up = cheaper(flips, wanted) if base.peak_bytes + sum(f.added_bytes for f in wanted) > limit_bytes else []
    room = trials.changed(base, (i for flip in given_up for i in flip.values)) if given_up else base
    best = filled(room or base, [*wanted, *given_up], trials, limit_bytes)
    fits = best.peak_bytes <= limit_bytes
    return best if fits and best.step_seconds <= (1 - LEAST_GAIN) * base.step_seconds else base


def cheaper(flips: Iterable[Flip], wanted: Sequence[Flip]) -> list[Flip]:
    """Flips that free memory for fewer seconds a byte than the dearest of those wanted spares."""
    dearest = max((flip.seconds_per_byte for flip in wanted), default=0.0)
    return [
        flip for flip in flips if flip.added_bytes < 0 and flip.spared_seconds <= 0 and -flip.seconds_per_byte < dearest
    ]


def filled(plan: Candidate, flips: Iterable[Flip], trials: Trials, limit_bytes: float) -> Candidate:
    """The plan with as much of each flip as fits and makes it faster, the dearest for a byte first."""
    best = plan
    for flip in sorted(flips, key=lambda flip: -abs(flip.seconds_per_byte)):
        members, improved = sorted(flip.values), None
        fit, too_many = 0, len(members) + 1
        while too_many - fit > 1:
            middle = (fit + too_many) // 2
            new = trials.changed(best, members[-middle:])
            if new is not None and new.peak_bytes <= limit_bytes and new.step_seconds < best.step_seconds:
                improved, fit = new, middle
            else:
                too_many = middle
        best = improved or best
    return best


def likely_groups(
    network: CutNetwork, groups: Iterable[frozenset[int]], saved: frozenset[int], most: int
) -> list[frozenset[int]]:
    """Of the groups, by what their values cost one by one, those kept that spare least for a byte and those rebuilt
    that would spare most; at most so many, half of them kept ones.
    """
    size = network.flow.size_bytes
    prices = zip(network.candidates, network.recompute_seconds, network.save_seconds, strict=True)
    spared = {i: again - keep for i, again, keep in prices if again is not None and keep is not None}

    def seconds_per_byte(group: frozenset[int]) -> float:
        return sum(spared[i] for i in group) / max(1, sum(size[i] for i in group))

    dearest_last = sorted(groups, key=seconds_per_byte)
    kept = [group for group in dearest_last if group <= saved][: most // 2]
    rebuilt = [group for group in reversed(dearest_last) if not group <= saved]
    return [*kept, *rebuilt[: most - len(kept)]]
