"""Which loops Inductor fuses for the CPU: pairs by score, again and again, reductions with their readers last.

A model of ``Scheduler.fuse_nodes`` (torch/_inductor/scheduler.py), of ``score_fusion`` (choices.py) and of
``CppScheduling`` (codegen/cpp.py). Unlike a GPU's kernel, one of C++ has a fixed nest of loops: what a reduction makes
is read in a loop of its own beside it under the same outer loops, and such pairs are only looked at when no other pair
is left. So a value between a producer and its reader that needs a reduction keeps the two apart.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recompile.fusion import LEAST_SHARED_BYTES, LONGEST_DISTANCE, MOST_OPS_FUSED, REUSE_WEIGHT, bits_of
from recompile.inlining import FusionFacts, StoredOp
from recompile.kernels import Kernel, first_that_can_run, in_order, kernel_of
from recompile.nests import Nests, Pair, nests_of
from recompile.torch_private_fusion import LONGEST_WAIT

MOST_OPS_SIDE_BY_SIDE = 16  # config.cpp.max_horizontal_fusion_size
MOST_ROUNDS = 10  # scheduler.py, fuse_nodes
MOST_PAIRS_EACH = 64  # config.max_fusion_buffer_group_pairwise_attempts


@dataclass(slots=True, eq=False)
class Group:
    """Ops fused so far. Bitsets and numbers are positions in the program."""

    ops: list[StoredOp]
    nests: Nests
    bits: int
    before: int  # bits of ops that must run before
    sources: frozenset[int]  # of ops that make what it reads
    first: int
    last: int
    reusable: frozenset[int]  # sizes of buffers that it alone reads
    is_extern: bool


class Candidate(NamedTuple):
    """Two groups that may fuse; those of the highest score go first."""

    score: tuple[bool, int, int]  # two of a kind, those that share most, those that stand close
    one: Group
    two: Group
    is_outer: bool  # they share outer loops only (``get_fusion_pair_priority``)


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
        self.once = {b for b, count in counts.items() if count == 1 and b not in kept}  # read by one op alone
        self.single: list[Group] = []  # the ops as groups of one, by position
        for k, op in enumerate(stored):
            self.single.append(self.group_of_one(k, op))
            self.maker.update((b, k) for b in op.makes)
        self.group_of = list(self.single)  # by position
        self.fused: dict[Group, None] = {}

    def group_of_one(self, k: int, op: StoredOp) -> Group:
        before, sources = 0, frozenset([self.maker[b] for b in op.reads if b in self.maker])
        for source in sources:
            before |= self.single[source].before | 1 << source
        size = self.facts.flow.size_bytes
        return Group(
            ops=[op],
            nests=nests_of(self.facts, op),
            bits=1 << k,
            before=before,
            sources=sources,
            first=k,
            last=k,
            reusable=frozenset([size[b] for b in op.reads if b in self.once]),
            is_extern=op.is_extern,
        )

    def run(self) -> list[Group]:
        """Rounds until nothing fuses: the pairs within one nest as long as there are any, then those side by side."""
        groups, fresh = list(self.single), set(self.single)
        pending: list[Candidate] = []
        for _ in range(MOST_ROUNDS):
            pairs = [*pending, *self.new_pairs(groups, fresh)]
            first = [pair for pair in pairs if not pair.is_outer]
            chosen = first or pairs
            pending = [] if chosen is pairs else [pair for pair in pairs if pair.is_outer]
            chosen.sort(key=_score, reverse=True)
            made = []
            for _, one, two, _ in chosen:
                one, two = self.group_of[one.first], self.group_of[two.first]  # what they have become part of
                if self.can_fuse(one, two) and not self.is_cyclic(one, two):
                    made.append(self.fuse(one, two))
            if not made:
                break
            groups = self.in_order({self.group_of[g.first] for g in groups})
            alive = set(groups)
            fresh = alive.intersection(made)
            pending = [pair for pair in pending if pair.one in alive and pair.two in alive]
        return groups

    def in_order(self, groups: Collection[Group]) -> list[Group]:
        """By their first op, each preceded by what it reads from (``topological_sort_schedule``)."""
        found: dict[Group, None] = {}
        entered: set[Group] = set()
        pending = sorted(groups, key=_first, reverse=True)
        while pending:
            group = pending[-1]
            if group in entered:  # all that it reads from is there
                found.setdefault(pending.pop())
                continue
            entered.add(group)
            sources = (self.group_of[k] for k in sorted(group.sources, reverse=True))
            pending += [source for source in sources if source not in entered]
        return list(found)

    def new_pairs(self, groups: Sequence[Group], fresh: Collection[Group]) -> list[Candidate]:
        """Pairs that share a buffer and may fuse, one of each in ``fresh``: what others could not they still cannot."""
        touched = {b for group in fresh for b in group.nests.buffers}
        by_buffer: dict[int, list[Group]] = {}
        for group in groups:
            for b in group.nests.buffers:
                if b in touched:
                    by_buffer.setdefault(b, []).append(group)
        seen, found = set(), []
        for sharing in by_buffer.values():
            for k, other in self.may_fuse(tuple([group.nests for group in sharing])):
                one, two = sharing[k], sharing[other]
                if (one in fresh or two in fresh) and (one, two) not in seen:
                    seen.add((one, two))
                    if self.can_fuse(one, two):
                        found.append(self.candidate(one, two))
        return found

    def may_fuse(self, sharing: tuple[Nests, ...]) -> list[tuple[int, int]]:
        """Which of those that access a buffer may fuse in some program, by their places."""
        known = self.facts.sharing.get(sharing)
        if known is None:
            places = range(len(sharing))
            pairs = ((k, other) for k in places for other in places[k + 1 : k + 1 + MOST_PAIRS_EACH])
            known = [(k, other) for k, other in pairs if sharing[k].beside(sharing[other]).can_share_loops]
            self.facts.sharing[sharing] = known
        return known

    def candidate(self, one: Group, two: Group) -> Candidate:
        pair = one.nests.beside(two.nests)
        are_alike = one.nests.is_reduction == two.nests.is_reduction and pair.shared_bytes > 0
        score = are_alike, pair.shared_bytes, -distance(one, two)
        return Candidate(score, one, two, self.is_outer(one, two, pair))

    def is_outer(self, one: Group, two: Group, pair: Pair) -> bool:
        return bool(one.bits & two.before) and not pair.is_inside

    def can_fuse(self, one: Group, two: Group) -> bool:
        """``Scheduler._can_fuse``; ``one`` runs before ``two`` if either needs the other."""
        if one is two or two.bits & one.before:
            return False
        pair = one.nests.beside(two.nests)
        shared = pair.shared_bytes
        is_producer = bool(one.bits & two.before)
        if not shared or not (pair.is_inside or pair.depth if is_producer else pair.is_same):
            return False
        num_ops = one.nests.num_ops + two.nests.num_ops
        if num_ops > (MOST_OPS_FUSED if is_producer else MOST_OPS_SIDE_BY_SIDE):
            return False
        if not is_producer and (shared < LEAST_SHARED_BYTES or distance(one, two) > LONGEST_DISTANCE):
            return False
        if sum(one.reusable & two.reusable) > REUSE_WEIGHT * shared:
            return False
        return not is_producer or (self.has_all(one, two) and not self.keeps_waiting(one, two))

    def has_all(self, one: Group, two: Group) -> bool:
        """What the reader needs comes from the producer, as it is made there, or can be there before."""
        for dep in two.nests.reads:
            maker = self.maker.get(dep[0])
            if maker is None or two.bits >> maker & 1:
                continue
            if one.bits >> maker & 1:
                if dep not in one.nests.writes:
                    return False
            elif self.group_of[maker].before & one.bits:
                return False
        return True

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
        if awaited >> (one.last + 1) == 0 and sum(two.nests.writes.values()) <= sum(one.nests.writes.values()):
            return False
        late = [one] + [g for g in self.single[one.last + 1 : two.first] if g.before & one.bits]
        size = self.facts.flow.size_bytes
        made = {b: size[b] for g in late for op in g.ops for b in op.makes}
        held = {b for g in late for op in g.ops for b in op.reads if b in self.maker and b not in made}
        held_bytes = sum(size[b] for b in held if b not in self.kept and self.last_reader[b] < two.first)
        return held_bytes > sum(made.values())

    def fuse(self, one: Group, two: Group) -> Group:
        bits = one.bits | two.bits
        is_outer = self.is_outer(one, two, one.nests.beside(two.nests))
        group = Group(
            ops=one.ops + two.ops,
            nests=one.nests.fused_with(two.nests, is_outer),
            bits=bits,
            before=(one.before | two.before) & ~bits,
            sources=frozenset([k for k in one.sources | two.sources if not bits >> k & 1]),
            first=min(one.first, two.first),
            last=max(one.last, two.last),
            reusable=one.reusable | two.reusable,
            is_extern=False,
        )
        for bit in bits_of(bits):
            self.group_of[bit.bit_length() - 1] = group
        for part in (one, two):
            self.fused.pop(part, None)
        self.fused[group] = None
        return group


_score, _first = operator.attrgetter("score"), operator.attrgetter("first")


def distance(one: Group, two: Group) -> int:
    """How far apart the two stand in the program (``are_long_distant_nodes``)."""
    return max(abs(one.first - two.last), abs(two.first - one.last))


def fuse_on_cpu(
    facts: FusionFacts, stored: Sequence[StoredOp], kept: Collection[int], as_in_graph: bool = False
) -> list[Kernel]:
    """Merge stored ops into kernels of C++ and return these in order; ``kept``: buffers that outlive the program.

    ``as_in_graph``: in the graph's order as far as that can be, not in Inductor's.
    """
    groups = CpuFusion(facts, stored, kept).run()
    kernels = [kernel_of(facts, tuple(g.ops)) for g in sorted(groups, key=_first)]
    return first_that_can_run(kernels) if as_in_graph else in_order(kernels)
