"""Which kernels a compiler makes of a program, predicted from the dataflow alone: what is stored and what fuses.

A model of Inductor's scheduler (torch/_inductor/ir.py ``StorageBox``, scheduler.py ``can_fuse``), not a copy: pointwise
values are inlined into their readers unless something forces them into memory, then stored ops that share a buffer
and a loop shape are merged greedily as long as no path leaves and re-enters the kernel. Complexity: O(ops x kernels)
for the cycle test on bitsets. Left out for now: split reductions, tilings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from recompile.dataflow import Dataflow
from recompile.joint import Annotation, JointGraph, Kind
from recompile.torch_private import RANDOM_FROM_SEED

aten = torch.ops.aten

# torch._inductor.config: realize_reads_threshold, realize_opcount_threshold; ir.py: inner functions are cut at 100 ops.
MAX_READS_WHEN_REUSED = 4
MAX_OPS_WHEN_REUSED = 30
MAX_OPS_INLINED = 100
# scheduler.py: score_fusion_memory_threshold, are_long_distant_nodes, can_fusion_increase_peak_memory, max_fusion_size.
LEAST_SHARED_BYTES = 10
LONGEST_DISTANCE = 64
REUSE_WEIGHT = 32
MOST_OPS_FUSED = 64
# torch._inductor's Triton heuristics loop over rows above 1024 elements; generated C++ always loops.
LONGEST_ROW_ON_GPU = 1024
LONGEST_ROW_ON_CPU = 1
# ir.py, StorageBox.should_realize_on_reuse: on the CPU a reused expression with one of these is stored.
DEAR_ON_CPU = (aten.exp.default, aten.sigmoid.default)


@dataclass(frozen=True, slots=True)
class OpShape:
    """The loop nest of an op: ``outer`` iterations, each over ``inner`` elements (1 for a pointwise op)."""

    outer: int
    inner: int
    reduces_rows: bool

    @property
    def numel(self) -> int:
        return self.outer * self.inner


@dataclass(frozen=True, slots=True)
class StoredOp:
    """An op whose results go to memory, with what was inlined into it."""

    op: int
    position: int  # among the stored ops
    reads: frozenset[int]  # buffers in memory
    makes: tuple[int, ...]
    members: frozenset[int]  # the op and the ops inlined into it
    flop: int
    is_reduction: bool


@dataclass(slots=True)
class Kernel:
    """One generated loop or one library call."""

    ops: list[StoredOp]
    is_extern: bool
    shape: OpShape
    reads: set[int] = field(default_factory=set)
    makes: set[int] = field(default_factory=set)

    def add(self, op: StoredOp) -> None:
        self.ops.append(op)
        self.reads |= op.reads
        self.makes.update(op.makes)


@dataclass(frozen=True)
class FusionFacts:
    """Per-op facts that fusion needs, computed once per graph."""

    flow: Dataflow
    shape: tuple[OpShape, ...]
    flop: tuple[int, ...]
    always_stored: frozenset[int]
    dear: frozenset[int]  # ops whose reuse forces them into memory on this device
    longest_row: int  # elements that a reduction keeps in registers; longer rows are read again in a later loop


def fusion_facts(joint: JointGraph, flow: Dataflow) -> FusionFacts:
    on_cpu = any(
        isinstance(val := node.meta.get("val"), torch.Tensor) and val.device.type == "cpu" for node in flow.nodes
    )
    return FusionFacts(
        flow=flow,
        shape=tuple(loop_shape(node, joint.notes) for node in flow.nodes),
        flop=tuple(joint.notes[node].work.flop for node in flow.nodes),
        always_stored=frozenset(i for i, node in enumerate(flow.nodes) if node.target in RANDOM_FROM_SEED),
        dear=frozenset(i for i, node in enumerate(flow.nodes) if on_cpu and node.target in DEAR_ON_CPU),
        longest_row=LONGEST_ROW_ON_CPU if on_cpu else LONGEST_ROW_ON_GPU,
    )


def loop_shape(node: fx.Node, notes: Mapping[fx.Node, Annotation]) -> OpShape:
    """How an op's loops run: a reduction goes over its input, outer = results, inner = elements per result."""
    kind, numel = notes[node].kind, notes[node].numel
    if kind is not Kind.REDUCTION or not node.all_input_nodes:
        return OpShape(numel, 1, False)
    source = node.all_input_nodes[0].meta.get("val")
    if not isinstance(source, torch.Tensor) or numel == 0:
        return OpShape(numel, 1, False)
    inner = max(1, notes[node.all_input_nodes[0]].numel // numel)
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or not dims:
        return OpShape(numel, inner, True)
    axes = sorted(dim % source.dim() for dim in dims)
    return OpShape(numel, inner, axes == list(range(source.dim() - len(axes), source.dim())))


def store_ops(
    facts: FusionFacts, program: Sequence[int], kept: frozenset[int], at_hand: frozenset[int] = frozenset()
) -> list[StoredOp]:
    """The ops of a program that write memory; pointwise ops between them are inlined into their readers.

    ``program`` lists node indices in order; ``kept`` are buffers that outlive it (outputs, saved values). ``at_hand``
    are buffers that it starts with: an op that runs for another of its results does not make them.
    """
    flow = facts.flow
    ops = [i for i in program if flow.is_op[i]]
    readers: dict[int, list[int]] = {}
    for i in ops:
        for buffer in flow.reads[i]:
            readers.setdefault(buffer, []).append(i)
    inlined: dict[int, StoredOp] = {}
    stored = []
    for i in ops:
        reads: set[int] = set()
        members = {i}
        flop = facts.flop[i]
        for buffer in flow.reads[i]:
            source = inlined.get(buffer)
            if source is None:
                reads.add(buffer)
            else:
                reads |= source.reads
                members |= source.members
                flop += source.flop
        op = StoredOp(
            i,
            len(stored),
            frozenset(reads),
            tuple(buffer for buffer in flow.makes[i] if buffer not in at_hand),
            frozenset(members),
            flop,
            flow.kind[i] is Kind.REDUCTION,
        )
        if must_be_stored(facts, op, readers, kept):
            stored.append(op)
        elif op.makes:
            inlined[op.makes[0]] = op
    return stored


def must_be_stored(facts: FusionFacts, op: StoredOp, readers: dict[int, list[int]], kept: frozenset[int]) -> bool:
    """Whether an op's result goes to memory rather than into its readers' loops."""
    flow = facts.flow
    if flow.kind[op.op] is not Kind.POINTWISE or len(op.makes) != 1 or op.op in facts.always_stored:
        return True
    buffer = op.makes[0]
    users = readers.get(buffer, ())
    if buffer in kept or any(flow.kind[user] is Kind.EXTERN for user in users):
        return True
    if len(op.members) > MAX_OPS_INLINED:
        return True
    reused = len(users) > 1
    heavy = len(op.reads) > MAX_READS_WHEN_REUSED or len(op.members) > MAX_OPS_WHEN_REUSED
    return reused and (heavy or not facts.dear.isdisjoint(op.members))


def fuse(facts: FusionFacts, stored: Sequence[StoredOp]) -> list[Kernel]:
    """Merge stored ops into kernels and return these in an order that respects their dependencies."""
    work = Fusion(facts, _single_readers(stored))
    for op in stored:
        work.place(op)
    return _in_order(work.kernels)


class Fusion:
    """Kernels under construction: each op in turn joins the kernel it shares most with, or begins one."""

    def __init__(self, facts: FusionFacts, single_readers: frozenset[int]):
        self.facts = facts
        self.single_readers = single_readers
        self.kernels: list[Kernel] = []
        self.before: list[int] = []  # per kernel a bitset of the kernels that must run before it
        self.made_by: dict[int, int] = {}
        self.readers_of: dict[int, list[int]] = {}

    def place(self, op: StoredOp) -> None:
        """Put one op into a kernel."""
        sources = {self.made_by[b] for b in op.reads if b in self.made_by}
        ancestors = 0
        for k in sources:
            ancestors |= self.before[k] | 1 << k
        shape = self.facts.shape[op.op]
        is_extern = self.facts.flow.kind[op.op] not in (Kind.POINTWISE, Kind.REDUCTION)
        home = None if is_extern else self.best_home(op, sources)
        if home is None:
            home = len(self.kernels)
            self.kernels.append(Kernel([], is_extern, shape))
            self.before.append(ancestors)
        else:
            _merge_ancestors(self.before, home, ancestors & ~(1 << home))
            if shape.inner > 1:
                self.kernels[home].shape = shape
        self.kernels[home].add(op)
        self.made_by.update((buffer, home) for buffer in op.makes)
        for buffer in op.reads:
            self.readers_of.setdefault(buffer, []).append(home)

    def best_home(self, op: StoredOp, sources: set[int]) -> int | None:
        """The kernel that shares most bytes with the op and may take it without a cycle, or None."""
        size = self.facts.flow.size_bytes
        candidates = set(sources)
        for buffer in op.reads:
            candidates.update(self.readers_of.get(buffer, ()))
        best, best_bytes = None, 0
        for k in sorted(candidates):
            kernel = self.kernels[k]
            if kernel.is_extern or not shapes_fuse(kernel.shape, self.facts.shape[op.op]):
                continue
            if any(self.before[s] >> k & 1 for s in sources if s != k):
                continue  # a path leaves the kernel and comes back through another
            shared = sum(size[b] for b in op.reads if b in kernel.makes or b in kernel.reads)
            if shared > best_bytes and self.is_worthwhile(op, kernel, shared, k in sources):
                best, best_bytes = k, shared
        return best

    def is_worthwhile(self, op: StoredOp, kernel: Kernel, shared_bytes: int, is_producer: bool) -> bool:
        """Inductor's heuristics against fusions that keep memory alive (scheduler.py, choices.py)."""
        first, last = kernel.ops[0].position, kernel.ops[-1].position
        if not is_producer:
            distance = max(abs(op.position - first), abs(op.position - last))
            if shared_bytes < LEAST_SHARED_BYTES or distance > LONGEST_DISTANCE:
                return False
        size = self.facts.flow.size_bytes
        reusable = {size[b] for b in op.reads & self.single_readers}
        kept_alive = sum(reusable & {size[b] for b in kernel.reads & self.single_readers})
        return len(kernel.ops) < MOST_OPS_FUSED and kept_alive <= REUSE_WEIGHT * shared_bytes


def _single_readers(stored: Sequence[StoredOp]) -> frozenset[int]:
    """Buffers made in the program that exactly one stored op reads: without fusion their memory could be reused."""
    counts: dict[int, int] = {}
    for op in stored:
        for buffer in op.reads:
            counts[buffer] = counts.get(buffer, 0) + 1
    return frozenset(buffer for op in stored for buffer in op.makes if counts.get(buffer) == 1)


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


def _merge_ancestors(before: list[int], home: int, ancestors: int) -> None:
    """Kernel ``home`` now also follows ``ancestors``; so does everything that follows it."""
    fresh = ancestors & ~before[home]
    if not fresh:
        return
    before[home] |= fresh
    for k in range(len(before)):
        if before[k] >> home & 1:
            before[k] |= fresh


def _in_order(kernels: list[Kernel]) -> list[Kernel]:
    """Topological order: kernels by their first op, each preceded by what it needs (depth first, as Inductor sorts)."""
    made_by = {buffer: k for k, kernel in enumerate(kernels) for buffer in kernel.makes}
    order: list[Kernel] = []
    done: set[int] = set()
    for first in sorted(range(len(kernels)), key=lambda k: kernels[k].ops[0].position):
        pending = [first]
        while pending:
            k = pending[-1]
            sources = {made_by[b] for b in kernels[k].reads if b in made_by} - done - {k}
            if sources and k not in done:
                pending.extend(sorted(sources, reverse=True))
                continue
            pending.pop()
            if k not in done:
                done.add(k)
                order.append(kernels[k])
    return order


def spilled_buffers(kernel: Kernel, longest_row: int) -> set[int]:
    """Buffers read in a later pass over the rows than the one that makes them: stored although no other kernel reads
    them.

    A reduction whose rows exceed ``longest_row`` elements is a loop; what follows it is another loop over the same
    rows.
    """
    if kernel.is_extern or kernel.shape.inner <= longest_row:
        return set()
    made_in: dict[int, int] = {}
    reduced: set[int] = set()
    spilled: set[int] = set()
    for op in kernel.ops:
        inside = [b for b in op.reads if b in made_in]
        turn = max((made_in[b] + (b in reduced) for b in inside), default=0)
        spilled.update(b for b in inside if b not in reduced and made_in[b] < turn)
        made_in.update((buffer, turn) for buffer in op.makes)
        if op.is_reduction:
            reduced.update(op.makes)
    return spilled


def stored_buffers(kernels: Iterable[Kernel], kept: frozenset[int], longest_row: int) -> set[int]:
    """Buffers that really occupy memory: all made ones but those read only inside the kernel that makes them."""
    readers: dict[int, set[int]] = {}
    kernels = list(kernels)
    for k, kernel in enumerate(kernels):
        for buffer in kernel.reads:
            readers.setdefault(buffer, set()).add(k)
    stored = set()
    for k, kernel in enumerate(kernels):
        stored |= spilled_buffers(kernel, longest_row)
        for buffer in kernel.makes:
            if kernel.is_extern or buffer in kept or readers.get(buffer, set()) - {k}:
                stored.add(buffer)
    return stored
