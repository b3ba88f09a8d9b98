"""Which kernels a compiler makes of the ops that write memory, predicted from the dataflow alone.

A model of Inductor's scheduler (torch/_inductor/scheduler.py ``can_fuse``), not a copy: stored ops that share a buffer
and a loop shape are merged greedily as long as no path leaves and re-enters the kernel, and so are two kernels that an
op which joins one of them links. Complexity: O(ops x open kernels), where a kernel is open while an op may still join
it or read from it: some 64 ops long, whatever the length of the program. Left out for now: split reductions, tilings.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from recompile.inlining import FusionFacts, OpShape, StoredOp
from recompile.kernels import Kernel, in_order, kernel_of

# scheduler.py: score_fusion_memory_threshold, are_long_distant_nodes, can_fusion_increase_peak_memory, max_fusion_size.
LEAST_SHARED_BYTES = 10
LONGEST_DISTANCE = 64
REUSE_WEIGHT = 32
MOST_OPS_FUSED = 64


def fuse(facts: FusionFacts, stored: Sequence[StoredOp]) -> list[Kernel]:
    """Merge stored ops into kernels and return these in an order that respects their dependencies."""
    counts = Counter(chain.from_iterable(op.reads for op in stored))
    work = Fusion(facts, {buffer for op in stored for buffer in op.makes if counts[buffer] == 1})
    for op in stored:
        work.place(op)
    return in_order([kernel_of(facts, tuple(kernel.ops)) for kernel in work.kernels])


@dataclass(slots=True, eq=False)
class OpenKernel:
    """A kernel under construction."""

    birth: int  # ascending in the order in which kernels are begun
    bit: int  # names it in the bitsets; 0 for a library call, which nothing joins
    first: int  # position of its first op
    before: int  # bitset of the loops that must run before it
    direct: int = 0  # those of them that it reads from
    via: int = 0  # those from which a path leads to it through a library call, or a loop that nothing joins any more
    newest: float = -1  # the latest birth among what it reads from
    ops: list[StoredOp] = field(default_factory=list)
    loops_like: StoredOp | None = None  # the op whose loops it has
    touches: set[int] = field(default_factory=set)  # buffers that it reads or makes
    reusable: set[int] = field(default_factory=set)  # sizes of the buffers that it alone reads

    def take(self, op: StoredOp) -> None:
        self.loops_like = loops_of(self.loops_like, op)
        self.ops.append(op)
        self.touches |= op.reads
        self.touches.update(op.makes)


class Fusion:
    """Kernels under construction: each op in turn joins the kernel it shares most with, or begins one.

    ``single_readers``: buffers made in the program that one stored op reads: without fusion their memory could be
    reused.
    """

    def __init__(self, facts: FusionFacts, single_readers: set[int]):
        self.facts = facts
        self.size = facts.shared_bytes
        self.single_readers = single_readers
        self.position = 0
        self.kernels: list[OpenKernel] = []
        self.live: set[int] = set()  # buffers from before that later ops read
        self.next_birth = 0
        self.num_loops = 0
        self.made_by: dict[int, OpenKernel] = {}
        self.readers_of: dict[int, list[OpenKernel]] = {}  # the loops that read a buffer, without those far behind
        self.is_in_order = True  # no kernel reads from one that was begun after it

    def place(self, op: StoredOp) -> None:
        """Put one op into a kernel, and other kernels that it has to do with into the same where that is allowed."""
        sources = set(map(self.made_by.get, op.reads))
        sources.discard(None)
        candidates = [] if op.is_extern else self.candidates(op, sources)
        home = self.best_home(op, sources, candidates) if candidates else None
        if home is None:
            candidates = []
            home = self.begin(op.is_extern)
            home.before = self.follow(home, sources)
        else:
            self.put_before(home, self.follow(home, sources))
        home.take(op)
        for buffer in op.makes:
            self.made_by[buffer] = home
        if home.bit:
            for buffer in op.reads:
                self.readers_of.setdefault(buffer, []).append(home)
            home.reusable.update([self.size[b] for b in op.reads & self.single_readers])
        if len(candidates) > 1:
            self.merge_into(home, [kernel for kernel in candidates if kernel is not home])
        self.position += 1

    def candidates(self, op: StoredOp, sources: set[OpenKernel]) -> list[OpenKernel]:
        """The loops that the op reads from, and those nearby that read what it reads, by birth."""
        found = {kernel for kernel in sources if kernel.bit}
        for buffer in op.reads & self.readers_of.keys():
            near = [k for k in self.readers_of[buffer] if self.position - k.first <= LONGEST_DISTANCE]
            self.readers_of[buffer] = near
            found.update(near)
        return sorted(found, key=_birth)

    def best_home(self, op: StoredOp, sources: set[OpenKernel], candidates: Iterable[OpenKernel]) -> OpenKernel | None:
        """The kernel that shares most bytes with the op and may take it without a cycle, or None."""
        before = 0  # a path from one of these to the op would leave it and come back
        for kernel in sources:
            before |= kernel.before
        size, best, best_bytes = self.size, None, 0
        reusable = {size[b] for b in op.reads & self.single_readers}
        for kernel in candidates:
            if before & kernel.bit or not fits(self.facts, kernel.loops_like, op):
                continue
            shared_bytes = sum([size[b] for b in op.reads & kernel.touches])
            if shared_bytes <= best_bytes or len(kernel.ops) >= MOST_OPS_FUSED:
                continue
            if is_worthwhile(shared_bytes, reusable & kernel.reusable, kernel in sources):
                best, best_bytes = kernel, shared_bytes
        return best

    def begin(self, is_extern: bool) -> OpenKernel:
        """A new kernel, still empty."""
        kernel = OpenKernel(self.next_birth, 0, self.position, 0)
        if not is_extern:
            kernel.bit = 1 << self.num_loops
            self.num_loops += 1
        self.next_birth += 1
        self.kernels.append(kernel)
        return kernel

    def follow(self, home: OpenKernel, sources: set[OpenKernel]) -> int:
        """Note what else a kernel reads from; returns the loops that must run before it for that."""
        before = 0
        for kernel in sources:
            if kernel is home:
                continue
            before |= kernel.before | kernel.bit
            home.direct |= kernel.bit
            if not kernel.bit:
                home.via |= kernel.before
            if kernel.birth > home.newest:
                home.newest = kernel.birth
        return before

    def put_before(self, home: OpenKernel, loops: int) -> None:
        """Let ``loops`` run before a kernel and all that follows it."""
        fresh = loops & ~(home.before | home.bit)
        if fresh:
            home.before |= fresh
            for kernel in self.kernels:
                if kernel.before & home.bit:
                    kernel.before |= fresh
                    if kernel.via & home.bit:
                        kernel.via |= fresh
        if home.newest > home.birth:
            self.is_in_order = False

    def merge_into(self, home: OpenKernel, others: Sequence[OpenKernel]) -> None:
        """Merge with a kernel those of the others with which that is allowed, first what shares most bytes with it."""
        shared = [(sum([self.size[b] for b in home.touches & k.touches]), k) for k in others]
        for shared_bytes, other in sorted(shared, key=lambda pair: (-pair[0], pair[1].birth)):
            if not fits(self.facts, home.loops_like, other.loops_like):
                continue
            is_near = self.position - min(home.first, other.first) <= LONGEST_DISTANCE
            is_producer = bool(home.before & other.bit or other.before & home.bit)
            if len(home.ops) + len(other.ops) > MOST_OPS_FUSED or not (is_producer or is_near):
                continue
            if not is_worthwhile(shared_bytes, home.reusable & other.reusable, is_producer):
                continue
            if not self.is_between(home, other) and not self.is_between(other, home):
                home = self.merge(home, other)

    def is_between(self, first: OpenKernel, last: OpenKernel) -> bool:
        """Whether a path leads from the first kernel to the last through some other one."""
        if not last.before & first.bit:
            return False
        return bool(last.via & first.bit) or any(k.bit & last.direct and k.before & first.bit for k in self.kernels)

    def merge(self, one: OpenKernel, other: OpenKernel) -> OpenKernel:
        """Make one kernel of two: the older one takes the ops of the younger, in the order that they have to run in."""
        kept, gone = sorted((one, other), key=_birth)
        first, second = (gone, kept) if kept.before & gone.bit else (kept, gone)
        kept.ops, kept.loops_like = [*first.ops, *second.ops], loops_of(first.loops_like, second.loops_like)
        others = ~(kept.bit | gone.bit)
        before, kept.before = (kept.before | gone.before) & others, kept.before & others
        kept.direct, kept.via = (kept.direct | gone.direct) & others, (kept.via | gone.via) & others
        kept.first, kept.newest = min(kept.first, gone.first), max(kept.newest, gone.newest)
        kept.touches |= gone.touches
        kept.reusable |= gone.reusable
        self.kernels.remove(gone)
        for kernel in self.kernels:
            if kernel.before & gone.bit:
                kernel.before = kernel.before & ~gone.bit | kept.bit | kept.before
                if kernel.direct & gone.bit:
                    kernel.direct = kernel.direct & ~gone.bit | kept.bit
                if kernel.via & gone.bit:
                    kernel.via = kernel.via & ~gone.bit | kept.bit | kept.before
        self.put_before(kept, before)
        self.made_by.update((b, kept) for op in gone.ops for b in op.makes if b in self.made_by)
        for buffer in gone.touches & self.readers_of.keys():
            readers = self.readers_of[buffer]
            self.readers_of[buffer] = [k for k in readers if k is not gone and k is not kept] + [kept]
        return kept

    # Going on later: what happened so far counts only as far as later ops can depend on it.

    def closed(self, live: set[int]) -> list[OpenKernel]:
        """Drop and return the kernels that no later op can join or reads from; ``live``: the buffers that those read.

        Afterwards positions count from here, and bits in the order of the kernels that are left.
        """
        closed, left = [], []
        for kernel in self.kernels:
            if kernel.bit and self.position - kernel.first <= LONGEST_DISTANCE:
                is_open = not live.isdisjoint(kernel.touches)
            else:
                is_open = any(b in live for op in kernel.ops for b in op.makes)
            (left if is_open else closed).append(kernel)
        new_bit = {k.bit: 1 << number for number, k in enumerate(kernel for kernel in left if kernel.bit)}
        known = sum(new_bit)
        closed_bits = sum([kernel.bit for kernel in closed])
        for kernel in left:
            if kernel.direct & closed_bits:
                for source in closed:
                    if source.bit & kernel.direct:
                        kernel.via |= source.before
            kernel.before = sum([new_bit[bit] for bit in bits_of(kernel.before & known)])
            kernel.direct = sum([new_bit[bit] for bit in bits_of(kernel.direct & known)])
        for kernel in left:
            kernel.via = sum([new_bit[bit] for bit in bits_of(kernel.via & known)])
            kernel.first = max(kernel.first - self.position, -LONGEST_DISTANCE - 1)
        for kernel in left:
            kernel.bit = new_bit.get(kernel.bit, 0)
        touched = live & set().union(*(kernel.touches if kernel.bit else kernel.ops[0].makes for kernel in left))
        self.single_readers &= touched
        self.made_by = {b: kernel for b, kernel in self.made_by.items() if b in touched}
        self._begin_at(left, touched)
        return closed

    @classmethod
    def resumed(
        cls, facts: FusionFacts, kernels: Iterable[OpenKernel], live: Iterable[int], single_readers: Iterable[int]
    ) -> Fusion:
        """A fusion that goes on where another one had ``closed``; ``kernels`` as that left them, their bits not set."""
        work = cls(facts, set(single_readers))
        left, live = list(kernels), set(live)
        for kernel in left:
            work.made_by.update((b, kernel) for op in kernel.ops for b in op.makes if b in live)
        for number, kernel in enumerate(kernel for kernel in left if not kernel.ops[0].is_extern):
            kernel.bit = 1 << number
        work._begin_at(left, live)
        return work

    def _begin_at(self, kernels: list[OpenKernel], live: set[int]) -> None:
        self.kernels, self.live, self.position, self.is_in_order = kernels, live, 0, True
        loops = [kernel for kernel in kernels if kernel.bit]
        self.num_loops = len(loops)
        self.readers_of = {}
        for kernel in loops:
            for b in kernel.touches & live:
                self.readers_of.setdefault(b, []).append(kernel)


def bits_of(mask: int) -> Iterator[int]:
    """The single bits of a mask, from the lowest."""
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


_birth = operator.attrgetter("birth")


def loops_of(first: StoredOp | None, second: StoredOp) -> StoredOp:
    """Which of two ops the kernel of both has the loops of: the last that has rows or columns."""
    return second if first is None or second.shape.inner > 1 else first


def is_worthwhile(shared_bytes: int, reusable: Iterable[int], is_producer: bool) -> bool:
    """Inductor's heuristics against fusions that keep memory alive (scheduler.py, choices.py).

    ``reusable``: sizes of buffers that each of the two alone reads.
    """
    return (is_producer or shared_bytes >= LEAST_SHARED_BYTES) and sum(reusable) <= REUSE_WEIGHT * shared_bytes


def fits(facts: FusionFacts, first: StoredOp, second: StoredOp) -> bool:
    """``shapes_fuse`` of two ops, each pair of shapes looked at once."""
    key = first.shape_number, second.shape_number
    known = facts.fits.get(key)
    if known is None:
        known = facts.fits[key] = shapes_fuse(first.shape, second.shape)
    return known


def shapes_fuse(first: OpShape, second: OpShape) -> bool:
    """Whether two loop nests can share a kernel: the same elements, or a row reduction and its rows."""
    columns = [s for s in (first, second) if s.inner > 1 and not s.reduces_rows]
    if columns:
        return first == second
    if first.inner > 1 and second.inner > 1:
        return first.outer == second.outer and first.inner == second.inner
    if first.inner == second.inner == 1:
        return first.outer == second.outer
    rows, flat = (first, second) if first.inner > 1 else (second, first)
    return flat.outer in (rows.outer, rows.numel)
