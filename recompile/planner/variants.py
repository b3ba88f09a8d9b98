"""Plans that differ from a good one in one place per segment: the neighbourhood in which better ones are looked for.

Additive costs misjudge some values: a save that stops a fusion, a rebuilt one that two kernels store. So every value of
a segment that matters in bytes is turned: kept where a plan rebuilds it, rebuilt where it keeps it. In a plan of any
kind that is all that changes (``turned_plans``); a cut is solved again, so that all else settles around the turned
value (``varied_cuts``). Equal segments try different turns in the same plan: n equal layers need one for n turns. None
of these plans need be good or fit a budget: what counts is what their segments teach (``library``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from recompile.errors import PlanError
from recompile.planner.flips import free_values
from recompile.planner.network import CutNetwork
from recompile.planner.segments import Segments

# Values below this share of a segment's largest are left alone, and so are the smallest where many are left: plans and
# cuts around one of them at most.
SMALLEST_SHARE = 1 / 256
MOST_TURNED_PLANS = 12
MOST_TURNED_CUTS = 24


def turned_plans(
    segments: Segments, turns: Mapping[str, Sequence[int]], saved: frozenset[int]
) -> Iterator[frozenset[int]]:
    """Sets of saved values that differ from ``saved`` in one value of each segment, at most MOST_TURNED_PLANS.

    ``turns``: by kind of segment the offsets to turn, from ``turns_of``. Every one of them is turned in one segment of
    each kind and treatment, the first offsets first.
    """
    alike: dict[tuple[str, frozenset[int]], list[int]] = {}
    for k, pattern in enumerate(segments.patterns(saved)):
        alike.setdefault((segments.kind[k], pattern), []).append(k)
    members = [(turns[kind], ks) for (kind, _), ks in alike.items()]
    for turned in itertools.islice(rounds(segments, members), MOST_TURNED_PLANS):
        yield saved ^ turned


def varied_cuts(
    network: CutNetwork, segments: Segments, turns: Mapping[str, Sequence[int]], price: float, base: frozenset[int]
) -> Iterator[frozenset[int]]:
    """What cuts at ``price`` save that have all boundaries kept and one value of each segment turned against ``base``,
    the cut without turns; at most MOST_TURNED_CUTS. Cuts that the rules forbid are left out.
    """
    members: dict[str, list[int]] = {}
    for k, kind in enumerate(segments.kind):
        members.setdefault(kind, []).append(k)
    pairs = [(turns[kind], ks) for kind, ks in members.items()]
    for turned in itertools.islice(rounds(segments, pairs), MOST_TURNED_CUTS):
        try:
            yield network.saved_at(price, frozenset(segments.boundaries) | (turned - base), turned & base)
        except PlanError:
            continue  # a value of these is needed to rebuild one that cannot be saved


def rounds(segments: Segments, members: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[frozenset[int]]:
    """Nodes to turn at a time. ``members``: offsets, each of which is turned in one of the segments beside them."""
    batched = [batches(offsets, ks) for offsets, ks in members]
    for pairs in itertools.zip_longest(*batched, fillvalue=()):
        yield frozenset(segments.first[k] + offset for batch in pairs for k, offset in batch)


def batches(offsets: Sequence[int], members: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Pairs (segment, offset), every offset once, as many at a time as there are segments."""
    for start in range(0, len(offsets), len(members)):
        yield list(zip(members, offsets[start : start + len(members)], strict=False))


def turns_of(network: CutNetwork, segments: Segments) -> dict[str, list[int]]:
    """By kind of segment the offsets of values that may be kept as well as rebuilt, the largest first; boundaries,
    views and small ones left out."""
    held = dict(zip(network.candidates, network.held_bytes, strict=True))
    free, boundaries = free_values(network), set(segments.boundaries)
    found: dict[str, list[int]] = {}
    for kind, first, last in zip(segments.kind, segments.first, segments.last, strict=True):
        if kind in found:
            continue
        own = [i for i in free if first <= i <= last]
        least = SMALLEST_SHARE * max((held[i] for i in own), default=0)
        matter = [(-held[i], i - first) for i in own if held[i] > least and i not in boundaries]
        found[kind] = [offset for _, offset in sorted(matter)]
    return found
