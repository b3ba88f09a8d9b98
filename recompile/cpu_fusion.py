"""Which loops Inductor fuses for the CPU: pairs by score, again and again, reductions with their readers last.

A model of ``Scheduler.fuse_nodes`` (torch/_inductor/scheduler.py), of ``score_fusion`` (choices.py) and of
``CppScheduling`` (codegen/cpp.py). Unlike a GPU's kernel, one of C++ has a fixed nest of loops: what a reduction makes
is read in a loop of its own beside it under the same outer loops, and such pairs are only looked at when no other pair
is left. So a value between a producer and its reader that needs a reduction keeps the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from recompile.fusion import LEAST_SHARED_BYTES, LONGEST_DISTANCE, MOST_OPS_FUSED, REUSE_WEIGHT, bits_of
from recompile.inlining import FusionFacts, StoredOp
from recompile.kernels import Kernel, in_order, kernel_of
from recompile.loops import NOWHERE, moving, sizes_between, steps
from recompile.torch_private_fusion import LONGEST_WAIT

MOST_OPS_SIDE_BY_SIDE = 16  # config.cpp.max_horizontal_fusion_size
MOST_ROUNDS = 10  # scheduler.py, fuse_nodes
MOST_PAIRS_EACH = 64  # config.max_fusion_buffer_group_pairwise_attempts
Dep = tuple[int, tuple]  # a buffer and a walk over it


@dataclass(frozen=True, slots=True, eq=False)
class Nest:
    """The loops of a stored op and the accesses in them, with bytes."""

    outer: tuple[int, ...]
    reduced: tuple[int, ...]
    ranges: tuple[int, ...]
    reads: dict[Dep, int]
    writes: dict[Dep, int]


NOTHING = Nest((), (), (), {}, {})


def nest_of(facts: FusionFacts, op: StoredOp) -> Nest:
    nest = facts.nests.get(op)
    if nest is None:
        nest = facts.nests[op] = new_nest(facts, op)
    return nest


def new_nest(facts: FusionFacts, op: StoredOp) -> Nest:
    """Loops and accesses of an op; what it is not known how to read counts as read in order."""
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
    ranges = facts.ranges[op.op]
    return Nest(outer, reduced, ranges, reads, deps([(b, whole) for b in op.makes]))


@dataclass(slots=True, eq=False)
class Group:
    """Ops fused so far; ``nests``: outer sizes and reduced ones of each loop nest side by side under the outer loops.

    Bitsets are over positions in the program. ``depth`` is how many outer loops its nests share, 0 for one nest.
    """

    ops: list[StoredOp]
    bits: int
    before: int  # ops that must run before
    first: int
    last: int
    outer: tuple[int, ...]
    reduced: tuple[int, ...]
    ranges: set[tuple[int, ...]]
    reads: dict[Dep, int]
    writes: dict[Dep, int]
    reusable: dict[int, int]  # buffers that it alone reads
    is_extern: bool
    is_reduction: bool
    depth: int = 0
    nests: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)


class CpuFusion:
    """One program; ``kept``: the buffers that outlive it."""

    def __init__(self, facts: FusionFacts, stored: Sequence[StoredOp], kept: Collection[int]):
        self.facts, self.kept = facts, kept
        self.maker: dict[int, int] = {}
        self.last_reader: dict[int, int] = {}
        counts = dict.fromkeys((b for op in stored for b in op.makes), 0)
        for k, op in enumerate(stored):
            for b in op.reads:
                self.last_reader[b] = k
                if b in counts:
                    counts[b] += 1
        self.single: list[Group] = []  # the ops as groups of one, by position
        for k, op in enumerate(stored):
            self.single.append(self.group_of_one(k, op, {b for b in op.reads if counts.get(b) == 1 and b not in kept}))
            self.maker.update((b, k) for b in op.makes)
        self.group_of = list(self.single)  # by position
        self.fused: list[Group] = []

    def group_of_one(self, k: int, op: StoredOp, reusable: Collection[int]) -> Group:
        before = 0
        for b in op.reads & self.maker.keys():
            before |= self.single[self.maker[b]].before | 1 << self.maker[b]
        nest = NOTHING if op.is_extern else nest_of(self.facts, op)
        return Group(
            ops=[op],
            bits=1 << k,
            before=before,
            first=k,
            last=k,
            outer=nest.outer,
            reduced=nest.reduced,
            ranges={nest.ranges},
            reads=nest.reads,
            writes=nest.writes,
            reusable={b: self.facts.flow.size_bytes[b] for b in reusable},
            is_extern=op.is_extern,
            is_reduction=op.is_reduction,
            nests=[(nest.outer, nest.reduced)],
        )

    def run(self) -> list[Group]:
        """Rounds until nothing fuses: the pairs within one nest as long as there are any, then those side by side."""
        groups = list(self.single)
        fresh = {id(g) for g in groups}
        pending: list[tuple[Group, Group]] = []
        for _ in range(MOST_ROUNDS):
            pairs = [*pending, *self.new_pairs(groups, fresh)]
            first = [pair for pair in pairs if not self.is_outer(*pair)]
            chosen = first or pairs
            pending = [] if chosen is pairs else [pair for pair in pairs if self.is_outer(*pair)]
            chosen.sort(key=lambda pair: self.score(*pair), reverse=True)
            made = []
            for one, two in chosen:
                one, two = self.now(one), self.now(two)
                if self.can_fuse(one, two) and not self.is_cyclic(one, two):
                    made.append(self.fuse(one, two))
            if not made:
                break
            groups = self.in_order({id(self.group_of[g.first]): self.group_of[g.first] for g in groups}.values())
            alive = {id(g) for g in groups}
            fresh = {id(g) for g in made} & alive
            pending = [pair for pair in pending if id(pair[0]) in alive and id(pair[1]) in alive]
        return groups

    def now(self, group: Group) -> Group:
        """What a group has become part of."""
        return self.group_of[group.first]

    def in_order(self, groups: Collection[Group]) -> list[Group]:
        """By their first op, each preceded by what it reads from (``topological_sort_schedule``)."""
        done, found = set(), []

        def visit(group: Group) -> None:
            if id(group) in done:
                return
            done.add(id(group))
            sources = {self.maker[b] for op in group.ops for b in op.reads if b in self.maker}
            for k in sorted(sources):
                visit(self.group_of[k])
            found.append(group)

        for group in sorted(groups, key=lambda g: g.first):
            visit(group)
        return found

    def new_pairs(self, groups: Sequence[Group], fresh: Collection[int]) -> list[tuple[Group, Group]]:
        """Pairs that share a buffer and may fuse, one of each in ``fresh``: what others could not they still cannot."""
        by_buffer: dict[int, list[Group]] = {}
        for group in groups:
            if not group.is_extern:
                for b in dict.fromkeys(b for b, _ in (*group.reads, *group.writes)):
                    by_buffer.setdefault(b, []).append(group)
        seen, found = set(), []
        for sharing in by_buffer.values():
            for k, one in enumerate(sharing):
                for two in sharing[k + 1 : k + 1 + MOST_PAIRS_EACH]:
                    key = id(one), id(two)
                    if key in seen or not (key[0] in fresh or key[1] in fresh):
                        continue
                    seen.add(key)
                    if self.can_fuse(one, two):
                        found.append((one, two))
        return found

    def shared_bytes(self, one: Group, two: Group) -> int:
        """Bytes that both access in the same order (``score_fusion_memory``)."""
        few, many = sorted((one, two), key=lambda g: len(g.reads) + len(g.writes))
        return sum(
            count
            for deps in (few.reads, few.writes)
            for dep, count in deps.items()
            if dep in many.reads or dep in many.writes
        )

    def score(self, one: Group, two: Group) -> tuple[int, int, int]:
        """Which pairs go first: two of a kind, those that share most, those that stand close."""
        shared = self.shared_bytes(one, two)
        return int(one.is_reduction == two.is_reduction and shared > 0), shared, -distance(one, two)

    def can_fuse(self, one: Group, two: Group) -> bool:
        """``Scheduler._can_fuse``; ``one`` runs before ``two`` if either needs the other."""
        if one is two or two.bits & one.before:
            return False
        is_producer = bool(one.bits & two.before)
        num_ops = len(one.ops) + len(two.ops)
        if num_ops > (MOST_OPS_FUSED if is_producer else MOST_OPS_SIDE_BY_SIDE):
            return False
        if not is_producer and (distance(one, two) > LONGEST_DISTANCE or not self.is_same_nest(one, two)):
            return False
        if is_producer and not (self.is_inside(one, two) or self.outer_depth(one, two)):
            return False
        shared = self.shared_bytes(one, two)
        if not shared or (not is_producer and shared < LEAST_SHARED_BYTES):
            return False
        alive = set(one.reusable.values()) & set(two.reusable.values())
        if sum(alive) > REUSE_WEIGHT * shared:
            return False
        return not is_producer or (self.has_all(one, two) and not self.keeps_waiting(one, two))

    def has_all(self, one: Group, two: Group) -> bool:
        """What the reader needs comes from the producer, as it is made there, or can be there before."""
        for b, walk in two.reads:
            maker = self.maker.get(b)
            if maker is None or two.bits >> maker & 1:
                continue
            if one.bits >> maker & 1:
                if (b, walk) not in one.writes:
                    return False
            elif self.group_of[maker].before & one.bits:
                return False
        return True

    def is_inside(self, one: Group, two: Group) -> bool:
        """Whether a reader runs in its producer's loops, and not in a nest beside them."""
        return self.is_same_nest(one, two) and not one.is_reduction

    def is_same_nest(self, one: Group, two: Group) -> bool:
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
        return len(coarse.outer) == 1 and len(coarse.ops) == 1 and coarse.ranges == fine.ranges

    def outer_depth(self, one: Group, two: Group) -> int:
        """``CppScheduling._get_outer_loop_fusion_depth``."""
        (outer, reduced), (outer_two, reduced_two) = one.nests[-1], two.nests[0]
        if not outer and not outer_two and reduced and reduced_two:
            return 0
        if one.depth and two.depth:
            return one.depth if one.depth == two.depth else 0
        depth = min(len(outer), len(outer_two))
        if not depth or outer[:depth] != outer_two[:depth]:
            return 0
        return depth if depth == (one.depth or two.depth or depth) else 0

    def is_outer(self, one: Group, two: Group) -> bool:
        """Whether they share outer loops only (``get_fusion_pair_priority``)."""
        return bool(one.bits & two.before) and not self.is_inside(one, two)

    def is_cyclic(self, one: Group, two: Group) -> bool:
        """Whether, with what was fused before, a path leads from one of the two out and back to the other."""
        own = one.bits | two.bits
        before = (one.before | two.before) & ~own
        grown = True
        while grown:
            grown = False
            for group in self.fused:
                if group.bits & before and group.bits & ~before:
                    if (group.before | group.bits) & own:
                        return True
                    before |= group.bits | group.before
                    grown = True
        return False

    def keeps_waiting(self, one: Group, two: Group) -> bool:
        """``torch_private_fusion.keeps_memory_waiting``."""
        if two.last - one.first <= LONGEST_WAIT:
            return False
        own = one.bits | two.bits
        awaited = two.before & ~own
        if awaited >> (one.last + 1) == 0 and sum(two.writes.values()) <= sum(one.writes.values()):
            return False
        late = [one] + [g for g in self.single[one.last + 1 : two.first] if g.before & one.bits]
        size = self.facts.flow.size_bytes
        made = {b: size[b] for g in late for op in g.ops for b in op.makes}
        held = {b for g in late for op in g.ops for b in op.reads if b in self.maker and b not in made}
        held_bytes = sum(size[b] for b in held if b not in self.kept and self.last_reader[b] < two.first)
        return held_bytes > sum(made.values())

    def fuse(self, one: Group, two: Group) -> Group:
        """Make one group of two; it has the loops of a reduction in it, else the finer ones."""
        is_outer = self.is_outer(one, two)
        depth = self.outer_depth(one, two) if is_outer else 0
        first = one
        if not is_outer and not one.reduced and not two.reduced:
            first = two if len(one.outer) < len(two.outer) else one
        elif not is_outer and not one.is_reduction and two.is_reduction:
            first = two
        writes = one.writes | two.writes
        group = Group(
            ops=one.ops + two.ops,
            bits=one.bits | two.bits,
            before=(one.before | two.before) & ~(one.bits | two.bits),
            first=min(one.first, two.first),
            last=max(one.last, two.last),
            outer=first.outer,
            reduced=first.reduced,
            ranges=one.ranges | two.ranges,
            reads={dep: count for dep, count in (one.reads | two.reads).items() if dep not in writes},
            writes=writes,
            reusable=one.reusable | two.reusable,
            is_extern=False,
            is_reduction=one.is_reduction or two.is_reduction,
            depth=depth,
            nests=[*one.nests, *two.nests] if is_outer else [(first.outer, first.reduced)],
        )
        for bit in bits_of(group.bits):
            self.group_of[bit.bit_length() - 1] = group
        self.fused = [g for g in self.fused if g is not one and g is not two] + [group]
        return group


def distance(one: Group, two: Group) -> int:
    """How far apart the two stand in the program (``are_long_distant_nodes``)."""
    return max(abs(one.first - two.last), abs(two.first - one.last))


def fuse_on_cpu(facts: FusionFacts, stored: Sequence[StoredOp], kept: Collection[int]) -> list[Kernel]:
    """Merge stored ops into kernels of C++ and return these in order; ``kept``: buffers that outlive the program."""
    groups = CpuFusion(facts, stored, kept).run()
    return in_order([kernel_of(facts, tuple(g.ops)) for g in sorted(groups, key=lambda g: g.first)])
