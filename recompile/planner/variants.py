"""Cuts that differ in one place per segment: the neighbourhood in which better plans are looked for.

Additive costs misjudge some values: a save that stops a fusion, a rebuilt one that two kernels store. So for every
value of a segment that matters in bytes, the cut is solved again with that value turned: kept where the cut rebuilds
it, rebuilt where the cut keeps it; all else settles around it. Boundaries are kept, so segments don't interact, and
equal segments try different turns in the same cut: a network of n equal layers needs one cut for n turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from recompile.dataflow import Dataflow
from recompile.planner.network import CutNetwork
from recompile.planner.segments import Segments

# Values below this share of a segment's largest are left to the cut, and so are the smallest where many are left: with
# 24 turns a price GPT, Llama and a conv net came out as fast as with all turns, and as with every turn of every plan.
SMALLEST_SHARE = 1 / 256
MOST_ROUNDS = 24


def varied_cuts(
    network: CutNetwork, segments: Segments, price: float, base: frozenset[int]
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Pairs (kept, rebuilt) of values to turn against ``base``, the cut at ``price`` with all boundaries kept.

    Every turn of every kind of segment is in one of the pairs, the largest values first, up to MOST_ROUNDS pairs.
    """
    flow = network.flow
    members: dict[str, list[int]] = {}
    for k, kind in enumerate(segments.kind):
        members.setdefault(kind, []).append(k)
    turns = {kind: _offsets_that_matter(network, flow, segments, ks[0]) for kind, ks in members.items()}
    num_rounds = max((-(-len(turns[kind]) // len(ks)) for kind, ks in members.items()), default=0)
    for turn in range(min(num_rounds, MOST_ROUNDS)):
        kept, rebuilt = set(segments.boundaries), set()
        for kind, ks in members.items():
            for k, offset in zip(ks, turns[kind][turn * len(ks) : (turn + 1) * len(ks)], strict=False):
                i = segments.first[k] + offset
                (rebuilt if i in base else kept).add(i)
        yield frozenset(kept), frozenset(rebuilt)


def _offsets_that_matter(network: CutNetwork, flow: Dataflow, segments: Segments, k: int) -> list[int]:
    """Values of segment k that may be kept as well as rebuilt, the largest first; views and small ones left out."""
    free = [
        (i, held)
        for i, again, keep, held in zip(
            network.candidates, network.recompute_seconds, network.save_seconds, network.held_bytes, strict=True
        )
        if segments.first[k] <= i <= segments.last[k] and again is not None and keep is not None
    ]
    least = SMALLEST_SHARE * max((held for _, held in free), default=0)
    matter = [
        (-held, i - segments.first[k])
        for i, held in free
        if held > least and i in flow.makes[flow.op[i]] and i not in segments.boundaries
    ]
    return [offset for _, offset in sorted(matter)]
