"""Plans that differ from a good one in one value per segment: hill climbing on the simulation itself.

Additive prices misjudge what a kernel shares (an embedding kept for a kernel that reads the table anyway, a rotary
table rebuilt in every layer), and pieces of plans (``library``) what neighbours share. Here one value is flipped, kept
or rebuilt, in all equal segments that treat it alike, and the plan is simulated; the first improvement is taken and the
search goes on from there. A pass costs one simulation for each kind of value, whatever the depth.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from recompile.errors import PlanError
from recompile.planner.network import CutNetwork
from recompile.planner.pool import Candidate
from recompile.planner.segments import Segments


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
