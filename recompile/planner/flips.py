"""Plans that differ from a good one in one value per segment: hill climbing on the simulation itself.

Additive prices misjudge what a kernel shares (an embedding kept for a kernel that reads the table anyway, a rotary
table rebuilt in every layer), and pieces of plans (``library``) what neighbours share. Here one value is flipped, kept
or rebuilt, in all equal segments that treat it alike, and the plan is simulated; the first improvement is taken and the
search goes on from there. A pass costs one simulation for each kind of value, whatever the depth. What a limit has no
room for in all of them is then flipped in some (``fill``).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator

from recompile.errors import PlanError
from recompile.planner.network import CutNetwork
from recompile.planner.pool import Candidate
from recompile.planner.segments import Segments

LEAST_GAIN = 0.0025  # of a step's seconds


def flip_groups(
    network: CutNetwork, segments: Segments, saved: frozenset[int], most_bytes: int | None = None, least_bytes: int = 0
) -> list[frozenset[int]]:
    """Values that equal segments have at the same place and treat alike under ``saved``, the largest first.

    Left out are values of fewer than ``least_bytes``, and groups to be kept that take more than ``most_bytes``: what
    is kept is alive when forward ends.
    """
    groups: dict[tuple, set[int]] = {}
    size = network.flow.size_bytes
    free = [i for i in free_values(network) if size[i] >= least_bytes]
    for i in sorted(free, key=lambda i: (-size[i], i)):
        k = bisect.bisect_left(segments.last, i)
        place = (segments.kind[k], i - segments.first[k]) if k < len(segments) else (i,)
        groups.setdefault((*place, i in saved), set()).add(i)
    found = [frozenset(group) for group in groups.values()]
    if most_bytes is None:
        return found
    return [group for group in found if group <= saved or sum(size[i] for i in group) <= most_bytes]


def free_values(network: CutNetwork) -> list[int]:
    """Values that may be kept as well as rebuilt; views left out."""
    flow = network.flow
    prices = zip(network.candidates, network.recompute_seconds, network.save_seconds, strict=True)
    return [i for i, again, keep in prices if again is not None and keep is not None and i in flow.makes[flow.op[i]]]


def climb(
    start: Candidate,
    groups_of: Callable[[frozenset[int]], list[frozenset[int]]],
    simulated: Callable[[frozenset[int]], Candidate],
    is_better: Callable[[Candidate, Candidate], bool],
    most_flips: int,
) -> Iterator[Candidate]:
    """Improvements found by flips from ``start``, one after the other; ends when a pass finds none."""
    best, left = start, most_flips
    while True:
        before = best
        for group in groups_of(best.saved):
            if left == 0:
                return
            left -= 1
            try:
                candidate = simulated(best.saved ^ group)
            except PlanError:
                continue  # a value of these is needed to rebuild one that cannot be saved
            if is_better(candidate, best):
                best = candidate
                yield best
        if best is before:
            return


def fill(
    start: Candidate,
    groups: Iterable[frozenset[int]],
    simulated: Callable[[frozenset[int]], Candidate],
    limit_bytes: int,
    most_flips: int,
) -> Candidate:
    """A plan with flips that make it faster made in as many of the equal segments as fit, the last ones.

    The last ones, since what they keep is freed first in backward; what gains most per byte goes first. The plan itself
    where all that gains less than LEAST_GAIN: equal segments are treated alike unless that costs something.
    """
    left, best = most_flips, start

    def tried(flipped: Iterable[int]) -> Candidate | None:
        nonlocal left
        left -= 1
        try:
            return simulated(best.saved.symmetric_difference(flipped))
        except PlanError:
            return None  # a value of these is needed to rebuild one that cannot be saved

    worth: list[tuple[float, frozenset[int]]] = []
    for group in groups:
        whole = tried(group) if len(group) > 1 and left > 0 else None
        if whole is not None and whole.step_seconds < start.step_seconds:
            gained, taken = start.step_seconds - whole.step_seconds, whole.peak_bytes - start.peak_bytes
            worth.append((gained / max(taken, 1), group))
    for _, group in sorted(worth, key=lambda pair: -pair[0]):
        members, improved = sorted(group), None
        fit, too_many = 0, len(group) + 1
        while too_many - fit > 1 and left > 0:
            middle = (fit + too_many) // 2
            new = tried(members[-middle:])
            if new is not None and new.peak_bytes <= limit_bytes and new.step_seconds < best.step_seconds:
                improved, fit = new, middle
            else:
                too_many = middle
        best = improved or best
    return best if best.step_seconds <= (1 - LEAST_GAIN) * start.step_seconds else start
