"""Loop nests of C++ side by side in one kernel, and what Inductor asks about two of them before it fuses them.

A model of what ``CppScheduling`` (torch/_inductor/codegen/cpp.py) and ``score_fusion_memory`` (scheduler.py) look at.
Nothing here depends on the program that the ops are in, so it is worked out once for all plans: there is one ``Nests``
for all that was fused in the same order, and it knows the answers about those that it was compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from recompile.inlining import FusionFacts, StoredOp
from recompile.loops import NOWHERE, moving, sizes_between, steps

Dep = tuple[int, tuple]  # a buffer and a walk over it


class Pair(NamedTuple):
    """What two nests have to do with each other, in this order."""

    shared_bytes: int  # that both access in the same order
    is_same: bool  # they can run as one nest
    depth: int  # outer loops that they can share with a nest each inside; 0 if none
    is_inside: bool  # the second, as a reader of the first, runs in its loops, and not in a nest beside them

    @property
    def can_share_loops(self) -> bool:
        return bool(self.shared_bytes and (self.is_same or self.depth))


@dataclass(frozen=True, slots=True, eq=False)
class Nests:
    """The loops of fused ops and the accesses in them, with bytes."""

    num_ops: int
    outer: tuple[int, ...]
    reduced: tuple[int, ...]
    ranges: frozenset[tuple[int, ...]]  # of the results
    reads: dict[Dep, int]
    writes: dict[Dep, int]
    is_reduction: bool
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # outer and reduced sizes of each nest side by side
    depth: int = 0  # the outer loops that these share, 0 for one nest
    pairs: dict[Nests, Pair] = field(default_factory=dict, repr=False)
    fusions: dict[tuple[Nests, bool], Nests] = field(default_factory=dict, repr=False)
    buffers: tuple[int, ...] = field(init=False)  # that are accessed

    def __post_init__(self):
        object.__setattr__(self, "buffers", tuple(dict.fromkeys(b for b, _ in (*self.reads, *self.writes))))

    def beside(self, other: Nests) -> Pair:
        """This one first."""
        pair = self.pairs.get(other)
        if pair is None:
            is_same = is_same_nest(self, other)
            is_inside = is_same and not self.is_reduction
            pair = Pair(shared_bytes(self, other), is_same, outer_depth(self, other), is_inside)
            self.pairs[other] = pair
        return pair

    def fused_with(self, other: Nests, is_outer: bool) -> Nests:
        """Both, as one nest or (``is_outer``) side by side under common outer loops."""
        nests = self.fusions.get((other, is_outer))
        if nests is None:
            nests = self.fusions[other, is_outer] = fused(self, other, is_outer)
        return nests


def nests_of(facts: FusionFacts, op: StoredOp) -> Nests:
    nests = facts.nests.get(op)
    if nests is None:
        nests = facts.nests[op] = nest_of(facts, op)
    return nests


def nest_of(facts: FusionFacts, op: StoredOp) -> Nests:
    """Loops and accesses of an op; what it is not known how to read counts as read in order."""
    if op.is_extern:
        return Nests(1, (), (), frozenset(), {}, {}, op.is_reduction, (((), ()),))
    flow, shape = facts.flow, op.shape
    inner = shape.inner if op.is_reduction else 1
    outer = sizes_between({end // inner for end in op.ends if end > inner}, shape.outer)
    reduced = sizes_between({end for end in op.ends if end < inner}, inner)

    def deps(pairs: Iterable[Dep]) -> dict[Dep, int]:
        found = {}
        for b, walk in pairs:
            numel = max(1, flow.numel[b])
            found[b, walk] = flow.size_bytes[b] * min(steps(walk), numel) // numel
        return found

    walks = [(b, moving(walk)) for b, walk in op.walks if b != NOWHERE]
    unknown = op.reads.difference(b for b, _ in walks)
    reads = deps([*walks, *((b, ((flow.numel[b], 1),)) for b in sorted(unknown))])
    whole = ((shape.outer, 1),) if shape.outer > 1 else ()
    writes = deps([(b, whole) for b in op.makes])
    ranges = frozenset([facts.ranges[op.op]])
    return Nests(1, outer, reduced, ranges, reads, writes, op.is_reduction, ((outer, reduced),))


def fused(one: Nests, two: Nests, is_outer: bool) -> Nests:
    """As one nest, the loops of a reduction in it, else the finer ones."""
    first = one
    if not is_outer and not one.reduced and not two.reduced:
        first = two if len(one.outer) < len(two.outer) else one
    elif not is_outer and not one.is_reduction and two.is_reduction:
        first = two
    writes = one.writes | two.writes
    return Nests(
        num_ops=one.num_ops + two.num_ops,
        outer=first.outer,
        reduced=first.reduced,
        ranges=one.ranges | two.ranges,
        reads={dep: count for dep, count in (one.reads | two.reads).items() if dep not in writes},
        writes=writes,
        is_reduction=one.is_reduction or two.is_reduction,
        parts=one.parts + two.parts if is_outer else ((first.outer, first.reduced),),
        depth=one.beside(two).depth if is_outer else 0,
    )


def shared_bytes(one: Nests, two: Nests) -> int:
    """Bytes that both access in the same order (``score_fusion_memory``)."""
    few, many = sorted((one, two), key=lambda nests: len(nests.reads) + len(nests.writes))
    return sum(
        count
        for deps in (few.reads, few.writes)
        for dep, count in deps.items()
        if dep in many.reads or dep in many.writes
    )


def is_same_nest(one: Nests, two: Nests) -> bool:
    """``CppScheduling._can_fuse_horizontal_impl``."""
    if one.depth or two.depth:
        return False
    if one.outer == two.outer and one.reduced == two.reduced:
        return True
    if not one.reduced and one.outer == two.outer + two.reduced:
        return True
    if one.reduced or two.reduced or math.prod(one.outer) != math.prod(two.outer):
        return False
    coarse, fine = (one, two) if len(one.outer) < len(two.outer) else (two, one)
    return len(coarse.outer) == 1 and coarse.num_ops == 1 and coarse.ranges == fine.ranges


def outer_depth(one: Nests, two: Nests) -> int:
    """``CppScheduling._get_outer_loop_fusion_depth``."""
    (outer, reduced), (outer_two, reduced_two) = one.parts[-1], two.parts[0]
    if not outer and not outer_two and reduced and reduced_two:
        return 0
    if one.depth and two.depth:
        return one.depth if one.depth == two.depth else 0
    depth = min(len(outer), len(outer_two))
    if not depth or outer[:depth] != outer_two[:depth]:
        return 0
    return depth if depth == (one.depth or two.depth or depth) else 0
