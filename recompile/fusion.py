"""Which kernels a compiler makes of the ops that write memory, predicted from the dataflow alone.

A model of Inductor's scheduler (torch/_inductor/scheduler.py ``can_fuse``), not a copy: stored ops that share a buffer
and a loop shape are merged greedily as long as no path leaves and re-enters the kernel. Complexity: O(ops x open
kernels), where a kernel is open while an op may still join it or read from it: some 64 ops long, whatever the length
of the program. Left out for now: split reductions, tilings.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from recompile.inlining import FusionFacts, OpShape, StoredOp

# scheduler.py: score_fusion_memory_threshold, are_long_distant_nodes, can_fusion_increase_peak_memory, max_fusion_size.
LEAST_SHARED_BYTES = 10
LONGEST_DISTANCE = 64
REUSE_WEIGHT = 32
MOST_OPS_FUSED = 64
# What a kernel does with a buffer: bits of one number.
MADE, ALWAYS_STORED, LOOPED = 1, 2, 4


@dataclass(frozen=True, eq=False)
class Kernel:
    """One generated loop or one library call. There is one object for equal ones."""

    ops: tuple[StoredOp, ...]
    shape: OpShape
    spills: frozenset[int]  # buffers that it stores whoever reads them

    @property
    def is_extern(self) -> bool:
        return self.ops[0].is_extern

    @functools.cached_property
    def reads(self) -> frozenset[int]:
        return frozenset(chain.from_iterable(op.reads for op in self.ops))

    @functools.cached_property
    def makes(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(op.makes for op in self.ops))

    @functools.cached_property
    def touches(self) -> np.ndarray:
        """What it makes, then what else it reads."""
        return np.array([*self.makes, *sorted(self.reads.difference(self.makes))], dtype=np.int64)

    @functools.cached_property
    def roles(self) -> np.ndarray:
        """Of the buffers in ``touches``."""
        made = [
            MADE | (ALWAYS_STORED if self.is_extern or b in self.spills else 0) | (0 if self.is_extern else LOOPED)
            for b in self.makes
        ]
        return np.array(made + [0] * (len(self.touches) - len(made)), dtype=np.int64)


def kernel_of(facts: FusionFacts, ops: tuple[StoredOp, ...]) -> Kernel:
    """The kernel of these ops; its loops are those of the last op that has rows or columns."""
    kernel = facts.kernels.get(ops)
    if kernel is None:
        shape = next((op.shape for op in reversed(ops) if op.shape.inner > 1), ops[0].shape)
        spills = spilled_buffers(ops, shape, facts.longest_row)
        kernel = facts.kernels[ops] = Kernel(ops, shape, frozenset(spills))
    return kernel


def fuse(facts: FusionFacts, stored: Sequence[StoredOp]) -> list[Kernel]:
    """Merge stored ops into kernels and return these in an order that respects their dependencies."""
    work = Fusion(facts, stored)
    for position, op in enumerate(stored):
        work.place(op, position)
    kernels = [kernel_of(facts, tuple(kernel.ops)) for kernel in work.kernels]
    return [kernels[k] for k in _in_order([{k.number for k in kernel.sources} for kernel in work.kernels])]


@dataclass(slots=True, eq=False)
class OpenKernel:
    """A kernel under construction."""

    ops: list[StoredOp]
    number: int
    bit: int  # names it in the bitsets; 0 for a library call, which nothing joins
    first: int  # position of its first op
    last_use: int  # no op after this position joins it or reads what it makes
    before: int  # bitset of the loops that must run before it
    sources: set[OpenKernel]  # those that make what it reads
    loops_like: StoredOp | None = None  # the op whose loops it has
    touches: set[int] = field(default_factory=set)  # buffers that it reads or makes
    reusable: set[int] = field(default_factory=set)  # sizes of the buffers that it alone reads

    def take(self, op: StoredOp, size: Sequence[int], single_readers: frozenset[int]) -> None:
        if self.loops_like is None or op.shape.inner > 1:
            self.loops_like = op
        self.touches |= op.reads
        self.touches.update(op.makes)
        self.reusable.update([size[b] for b in op.reads & single_readers])


class Fusion:
    """Kernels under construction: each op in turn joins the kernel it shares most with, or begins one."""

    def __init__(self, facts: FusionFacts, stored: Sequence[StoredOp]):
        self.facts = facts
        self.size = facts.flow.size_bytes
        self.last_read: dict[int, int] = {}
        for position, op in enumerate(stored):
            self.last_read.update(dict.fromkeys(op.reads, position))
        self.single_readers = _single_readers(stored)
        self.kernels: list[OpenKernel] = []
        self.num_loops = 0
        self.open: list[OpenKernel] = []  # those that an op may still join or read from
        self.made_by: dict[int, OpenKernel] = {}
        self.readers_of: dict[int, list[OpenKernel]] = {}  # the loops that read a buffer, without those far behind

    def place(self, op: StoredOp, position: int) -> None:
        """Put one op into a kernel."""
        sources = set(map(self.made_by.get, op.reads))
        sources.discard(None)
        before = ancestors = 0
        last_use = position
        for kernel in sources:
            before |= kernel.before
            ancestors |= kernel.bit
        for buffer in op.makes:
            last_use = max(last_use, self.last_read.get(buffer, 0))
        home = None if op.is_extern else self.best_home(op, position, sources, before)
        if home is None:
            home = self.begin(op, position, sources, before | ancestors, last_use)
        else:
            self.join(home, op, sources, before | ancestors, last_use)
        for buffer in op.makes:
            self.made_by[buffer] = home
        if home.bit:
            for buffer in op.reads:
                self.readers_of.setdefault(buffer, []).append(home)

    def begin(self, op: StoredOp, position: int, sources: set[OpenKernel], ancestors: int, last_use: int) -> OpenKernel:
        """A new kernel of this op."""
        kernel = OpenKernel([op], len(self.kernels), 0, position, last_use, ancestors, sources)
        if not op.is_extern:
            kernel.bit = 1 << self.num_loops
            kernel.last_use = max(last_use, position + LONGEST_DISTANCE)
            self.num_loops += 1
            kernel.take(op, self.size, self.single_readers)
        if kernel.number % LONGEST_DISTANCE == 0:
            self.open = [k for k in self.open if k.last_use >= position]
        self.open.append(kernel)
        self.kernels.append(kernel)
        return kernel

    def join(self, home: OpenKernel, op: StoredOp, sources: set[OpenKernel], ancestors: int, last_use: int) -> None:
        """Add an op to a kernel: it now also follows ``ancestors``, and so does everything that follows it."""
        home.ops.append(op)
        home.sources |= sources
        home.last_use = max(home.last_use, last_use)
        home.take(op, self.size, self.single_readers)
        fresh = ancestors & ~(home.before | home.bit)
        if fresh:
            home.before |= fresh
            for kernel in self.open:
                if kernel.before & home.bit:
                    kernel.before |= fresh

    def best_home(self, op: StoredOp, position: int, sources: set[OpenKernel], before: int) -> OpenKernel | None:
        """The kernel that shares most bytes with the op and may take it without a cycle, or None.

        ``before``: the loops before ``sources``. A path from one of these would leave the kernel and come back.
        """
        candidates = {kernel for kernel in sources if kernel.bit}
        for buffer in op.reads & self.readers_of.keys():
            near = [k for k in self.readers_of[buffer] if position - k.first <= LONGEST_DISTANCE]
            self.readers_of[buffer] = near
            candidates.update(near)
        size, best, best_bytes = self.size, None, 0
        for kernel in sorted(candidates, key=_number):
            if before & kernel.bit or not fits(self.facts, kernel.loops_like, op):
                continue
            shared_bytes = sum([size[b] for b in op.reads & kernel.touches])
            if shared_bytes > best_bytes and self.is_worthwhile(op, kernel, shared_bytes, kernel in sources):
                best, best_bytes = kernel, shared_bytes
        return best

    def is_worthwhile(self, op: StoredOp, kernel: OpenKernel, shared_bytes: int, is_producer: bool) -> bool:
        """Inductor's heuristics against fusions that keep memory alive (scheduler.py, choices.py)."""
        if len(kernel.ops) >= MOST_OPS_FUSED or (not is_producer and shared_bytes < LEAST_SHARED_BYTES):
            return False
        reusable = {self.size[b] for b in op.reads & self.single_readers}
        return sum(reusable & kernel.reusable) <= REUSE_WEIGHT * shared_bytes


_number = operator.attrgetter("number")


def _single_readers(stored: Sequence[StoredOp]) -> frozenset[int]:
    """Buffers made in the program that exactly one stored op reads: without fusion their memory could be reused."""
    counts = Counter(chain.from_iterable(op.reads for op in stored))
    return frozenset(buffer for op in stored for buffer in op.makes if counts.get(buffer) == 1)


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


def _in_order(sources: Sequence[set[int]]) -> list[int]:
    """Topological order of kernels, given those that each reads from: by their first op, each preceded by what it
    needs (depth first, as Inductor sorts).
    """
    order: list[int] = []
    done: set[int] = set()
    for first in range(len(sources)):
        pending = [first]
        while pending:
            k = pending[-1]
            missing = [] if k in done else sorted((sources[k] - done) - {k}, reverse=True)
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if k not in done:
                done.add(k)
                order.append(k)
    return order


def spilled_buffers(ops: Sequence[StoredOp], shape: OpShape, longest_row: int) -> set[int]:
    """Buffers read in a later pass over the rows than the one that makes them: stored although no other kernel reads
    them.

    A reduction whose rows exceed ``longest_row`` elements is a loop; what follows it is another loop over the same
    rows.
    """
    if ops[0].is_extern or shape.inner <= longest_row:
        return set()
    made_in: dict[int, int] = {}
    reduced: set[int] = set()
    spilled: set[int] = set()
    for op in ops:
        inside = [b for b in op.reads if b in made_in]
        turn = max((made_in[b] + (b in reduced) for b in inside), default=0)
        spilled.update(b for b in inside if b not in reduced and made_in[b] < turn)
        made_in.update((buffer, turn) for buffer in op.makes)
        if op.is_reduction:
            reduced.update(op.makes)
    return spilled
