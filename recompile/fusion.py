"""Which kernels a compiler makes of the ops that write memory, predicted from the dataflow alone.

A model of Inductor's scheduler (torch/_inductor/scheduler.py ``can_fuse``), not a copy: stored ops that share a buffer
and a loop shape are merged greedily as long as no path leaves and re-enters the kernel. Complexity: O(ops x open
kernels), where a kernel is open while an op may still join it or read from it: some 64 ops long, whatever the length
of the program. Left out for now: split reductions, tilings.
"""

from __future__ import annotations

import functools
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
    return [kernels[k] for k in _in_order([kernel.sources for kernel in work.kernels])]


@dataclass(slots=True, eq=False)
class OpenKernel:
    """A kernel under construction."""

    ops: list[StoredOp]
    bit: int  # names it in the bitsets; 0 for a library call, which nothing joins
    shape: OpShape
    first: int  # position of its first op
    last_use: int  # no op after this position joins it or reads what it makes
    before: int  # bitset of the loops that must run before it
    sources: set[int]  # the kernels that make what it reads
    touches: set[int] = field(default_factory=set)  # buffers that it reads or makes
    reusable: set[int] = field(default_factory=set)  # sizes of the buffers that it alone reads


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
        self.open: list[int] = []  # kernels that an op may still join or read from
        self.made_by: dict[int, int] = {}
        self.readers_of: dict[int, list[int]] = {}  # the loops that read a buffer and are near enough to be joined
        self.nearest = 0  # the first kernel that is near enough

    def place(self, op: StoredOp, position: int) -> None:
        """Put one op into a kernel."""
        kernels, made_by = self.kernels, self.made_by
        sources = {made_by[b] for b in op.reads if b in made_by}
        ancestors = 0
        for k in sources:
            ancestors |= kernels[k].before
        home = None if op.is_extern else self.best_home(op, position, sources, ancestors)
        for k in sources:
            ancestors |= kernels[k].bit
        if position % LONGEST_DISTANCE == 0:
            self.open = [k for k in self.open if kernels[k].last_use >= position]
        last_use = max((self.last_read.get(b, position) for b in op.makes), default=position)
        if home is None:
            home = self.begin(op, position, sources, ancestors, last_use)
        else:
            self.join(home, op, sources, ancestors, last_use)
        made_by.update(dict.fromkeys(op.makes, home))
        if not op.is_extern:
            for buffer in op.reads:
                self.readers_of.setdefault(buffer, []).append(home)

    def begin(self, op: StoredOp, position: int, sources: set[int], ancestors: int, last_use: int) -> int:
        """A new kernel of this op."""
        kernel = OpenKernel([op], 0, op.shape, position, last_use, ancestors, sources)
        if not op.is_extern:
            kernel.bit = 1 << self.num_loops
            kernel.last_use = max(last_use, position + LONGEST_DISTANCE)
            self.num_loops += 1
            self.note(kernel, op)
        self.open.append(len(self.kernels))
        self.kernels.append(kernel)
        return len(self.kernels) - 1

    def join(self, home: int, op: StoredOp, sources: set[int], ancestors: int, last_use: int) -> None:
        """Add an op to a kernel: it now also follows ``ancestors``, and so does everything that follows it."""
        kernel = self.kernels[home]
        kernel.ops.append(op)
        kernel.sources |= sources
        kernel.last_use = max(kernel.last_use, last_use)
        if op.shape.inner > 1:
            kernel.shape = op.shape
        self.note(kernel, op)
        fresh = ancestors & ~kernel.before & ~kernel.bit
        if fresh:
            kernel.before |= fresh
            for k in self.open:
                if self.kernels[k].before & kernel.bit:
                    self.kernels[k].before |= fresh

    def note(self, kernel: OpenKernel, op: StoredOp) -> None:
        kernel.touches |= op.reads
        kernel.touches.update(op.makes)
        kernel.reusable.update(self.size[b] for b in op.reads & self.single_readers)

    def best_home(self, op: StoredOp, position: int, sources: set[int], ancestors: int) -> int | None:
        """The kernel that shares most bytes with the op and may take it without a cycle, or None.

        ``ancestors``: the loops before ``sources``. A path from one of these would leave the kernel and come back.
        """
        kernels, size = self.kernels, self.size
        while kernels and self.nearest < len(kernels) and position - kernels[self.nearest].first > LONGEST_DISTANCE:
            self.nearest += 1
        candidates = set(sources)
        for buffer in op.reads:
            readers = self.readers_of.get(buffer)
            if readers:
                near = [k for k in readers if k >= self.nearest]
                self.readers_of[buffer] = near
                candidates.update(near)
        best, best_bytes = None, 0
        for k in sorted(candidates):
            kernel = kernels[k]
            if not kernel.bit or ancestors & kernel.bit or not shapes_fuse(kernel.shape, op.shape):
                continue
            shared_bytes = sum([size[b] for b in op.reads if b in kernel.touches])
            if shared_bytes > best_bytes and self.is_worthwhile(op, kernel, shared_bytes, k in sources):
                best, best_bytes = k, shared_bytes
        return best

    def is_worthwhile(self, op: StoredOp, kernel: OpenKernel, shared_bytes: int, is_producer: bool) -> bool:
        """Inductor's heuristics against fusions that keep memory alive (scheduler.py, choices.py)."""
        if not is_producer and shared_bytes < LEAST_SHARED_BYTES:
            return False
        reusable = {self.size[b] for b in op.reads & self.single_readers}
        return len(kernel.ops) < MOST_OPS_FUSED and sum(reusable & kernel.reusable) <= REUSE_WEIGHT * shared_bytes


def _single_readers(stored: Sequence[StoredOp]) -> frozenset[int]:
    """Buffers made in the program that exactly one stored op reads: without fusion their memory could be reused."""
    counts = Counter(chain.from_iterable(op.reads for op in stored))
    return frozenset(buffer for op in stored for buffer in op.makes if counts.get(buffer) == 1)


@functools.cache
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
