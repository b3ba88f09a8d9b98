"""Which values of a program go to memory, predicted from the dataflow alone; the others are inlined into their readers.

A model of Inductor (torch/_inductor/ir.py ``StorageBox``), not a copy. What does not depend on the plan is computed
once a graph; what an op with others inlined into it reads and costs, once for all plans that have it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from recompile.asks import SPREADS, WANTS_STORED, asked
from recompile.channels_last import IN_MEMORY, lying_channels_last, on_cpu
from recompile.dataflow import Dataflow
from recompile.joint import Annotation, JointGraph, Kind
from recompile.loops import Access, first_tensor, walked, walks_of
from recompile.sizes import AT_HINTS
from recompile.torch_private import RANDOM_FROM_SEED, SEEDS
from recompile.view_copies import CopyTable, ViewCopy, view_copies
from recompile.work import name_of, reduced_dims, words

aten = torch.ops.aten

# torch._inductor.config: realize_reads_threshold, realize_opcount_threshold; ir.py: inner functions are cut at 100 ops.
MAX_READS_WHEN_REUSED = 4
MAX_OPS_WHEN_REUSED = 30
MAX_OPS_INLINED = 100
# ir.py, StorageBox.realize_hint: what reads fewer values than that is cheap enough to be computed once more.
LEAST_READS_STORED_AHEAD = 2
# ir.py, StorageBox.should_realize_on_reuse: on the CPU a reused expression with one of these is stored.
DEAR_ON_CPU = words("exp log log10 log1p log2 sigmoid tanh")
# lowering.py, as_strided: places in memory are chosen, so that what it is a view of is in memory.
CHOOSES_PLACES = aten.as_strided.default
# torch._inductor's Triton heuristics loop over rows above 1024 elements; generated C++ always loops.
LONGEST_ROW_ON_GPU = 1024
LONGEST_ROW_ON_CPU = 1


@dataclass(frozen=True, slots=True)
class OpShape:
    """The loop nest of an op: ``outer`` iterations, each over ``inner`` elements (1 for a pointwise op)."""

    outer: int
    inner: int
    reduces_rows: bool

    @property
    def numel(self) -> int:
        return self.outer * self.inner


@dataclass(frozen=True, slots=True, eq=False)
class StoredOp:
    """An op whose results go to memory, with what was inlined into it. There is one object for equal ones."""

    op: int
    reads: frozenset[int]  # buffers in memory
    makes: tuple[int, ...]
    members: frozenset[int]  # the op and the ops inlined into it
    flop: int
    shape: OpShape
    shape_number: int  # equal for equal shapes of one graph
    is_extern: bool  # a library call
    is_reduction: bool
    is_too_long: bool  # to be inlined
    is_too_dear: bool  # to be inlined into several readers
    is_dear: bool = False  # to be computed anew for each element that a reader spreads it over
    walks: tuple[Access, ...] = ()  # on the CPU: what it reads, and how; see ``recompile.loops``
    ends: frozenset[int] = frozenset()  # on the CPU: where its loops end
    is_copied: bool = False  # a view of the result is in memory: those who read the result itself have it inlined


@dataclass(frozen=True, eq=False)
class FusionFacts:
    """Per-op facts that fusion needs, computed once per graph."""

    flow: Dataflow
    shape: tuple[OpShape, ...]
    flop: tuple[int, ...]
    always_stored: frozenset[int]
    dear: frozenset[int]  # ops whose reuse forces them into memory on this device
    longest_row: int  # elements that a reduction keeps in registers; longer rows are read again in a later loop
    # codegen/cpp.py KernelGroup: all loops between two library calls are one function, and what dies in it is freed
    # after it.
    loops_run_together: bool = False
    keeps_rows: bool = False  # a kernel holds what only it reads a row at a time, for a later loop over the same row
    view_copies: tuple[ViewCopy, ...] = ()
    stored_ops: dict[tuple, StoredOp] = field(default_factory=dict, repr=False)
    copies: dict[StoredOp, StoredOp] = field(default_factory=dict, repr=False)
    kernels: dict[tuple[StoredOp, ...], Any] = field(default_factory=dict, repr=False)
    nests: dict[StoredOp, Any] = field(default_factory=dict, repr=False)
    sharing: dict[tuple, list[tuple[int, int]]] = field(default_factory=dict, repr=False)
    fits: dict[tuple[int, int], bool] = field(default_factory=dict, repr=False)  # by the numbers of two shapes

    def forget(self) -> None:
        """Drop what was worked out for plans; equal ops and kernels are one object only from here on."""
        for known in (self.stored_ops, self.copies, self.kernels, self.nests, self.sharing):
            known.clear()

    @functools.cached_property
    def is_op(self) -> np.ndarray:
        return np.array(self.flow.is_op, dtype=bool)

    @functools.cached_property
    def is_library_call(self) -> np.ndarray:
        return np.array([kind is Kind.EXTERN for kind in self.flow.kind], dtype=bool)

    @functools.cached_property
    def reads(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The buffers that each op reads, one op after the other; by node where its buffers begin, and their number."""
        counts = np.array([len(reads) for reads in self.flow.reads], dtype=np.int64)
        buffers = np.array([buffer for reads in self.flow.reads for buffer in reads], dtype=np.int64)
        return buffers, np.cumsum(counts) - counts, counts

    @functools.cached_property
    def asks(self) -> np.ndarray:
        """By read, in the order of ``reads``: bits of what the reader asks for."""
        flow = self.flow
        return np.array([asked(flow, i, b) for i, reads in enumerate(flow.reads) for b in reads], dtype=np.int64)

    @functools.cached_property
    def wanted(self) -> dict[int, frozenset[int]]:
        """Per library call the buffers that it reads from memory."""
        flow = self.flow
        calls = [i for i, kind in enumerate(flow.kind) if kind is Kind.EXTERN]
        return {i: frozenset(b for b in flow.reads[i] if asked(flow, i, b) & WANTS_STORED) for i in calls}

    @functools.cached_property
    def shared_bytes(self) -> tuple[int, ...]:
        """By buffer: what two kernels that read it share. Of a program's seeds each reads another one."""
        nodes = self.flow.nodes
        return tuple(0 if nodes[b].target is SEEDS else size for b, size in enumerate(self.flow.size_bytes))

    @functools.cached_property
    def copy_table(self) -> CopyTable:
        return CopyTable(self.view_copies)

    @functools.cached_property
    def read_through(self) -> dict[int, frozenset[int]]:
        """By op: the buffers that it reads through a view that may be written out."""
        found: dict[int, frozenset[int]] = {}
        for copy in self.view_copies:
            for reader in copy.read_through:
                found[reader] = found.get(reader, frozenset()).union(self.flow.makes[copy.op])
        return found

    def copied(self, op: StoredOp) -> StoredOp:
        """The op as it is inlined into readers beside a view of its result in memory."""
        beside = self.copies.get(op)
        if beside is None:
            beside = self.copies[op] = replace(op, is_copied=True)
        return beside

    @functools.cached_property
    def shape_number(self) -> tuple[int, ...]:
        numbers = {shape: number for number, shape in enumerate(dict.fromkeys(self.shape))}
        return tuple(numbers[shape] for shape in self.shape)

    @functools.cached_property
    def result(self) -> np.ndarray:
        """By node: the buffer of an op that could be inlined; -1 for one that is stored whoever reads it."""
        flow = self.flow
        inlinable = (
            flow.kind[i] is Kind.POINTWISE and len(makes) == 1 and i not in self.always_stored
            for i, makes in enumerate(flow.makes)
        )
        return np.array([flow.makes[i][0] if can else -1 for i, can in enumerate(inlinable)], dtype=np.int64)

    def stored_op(self, i: int, sources: tuple[StoredOp | None, ...], makes: tuple[int, ...]) -> StoredOp:
        """Op i when ``sources`` are inlined into it, one for each buffer that it reads, None for one in memory."""
        op = self.stored_ops.get((i, sources, makes))
        if op is None:
            op = self.stored_ops[i, sources, makes] = self._new_stored_op(i, sources, makes)
        return op

    def _new_stored_op(self, i: int, sources: tuple[StoredOp | None, ...], makes: tuple[int, ...]) -> StoredOp:
        inlined = [source for source in sources if source is not None]
        in_memory = [b for b, source in zip(self.flow.reads[i], sources, strict=True) if source is None]
        reads = frozenset(in_memory).union(*(source.reads for source in inlined))
        members = frozenset((i,)).union(*(source.members for source in inlined))
        is_heavy = len(reads) > MAX_READS_WHEN_REUSED or len(members) > MAX_OPS_WHEN_REUSED
        walks, ends = self.walked(i, sources) if self.loops_run_together else ((), frozenset())
        return StoredOp(
            op=i,
            reads=reads,
            makes=makes,
            members=members,
            flop=self.flop[i] + sum(source.flop for source in inlined),
            shape=self.shape[i],
            shape_number=self.shape_number[i],
            is_extern=self.flow.kind[i] not in (Kind.POINTWISE, Kind.REDUCTION),
            is_reduction=self.flow.kind[i] is Kind.REDUCTION,
            is_too_long=len(members) > MAX_OPS_INLINED,
            walks=walks,
            ends=ends,
            is_too_dear=is_heavy or not self.dear.isdisjoint(members),
            is_dear=not self.dear.isdisjoint(members),
        )

    @functools.cached_property
    def walks(self) -> tuple[tuple[tuple[Access, ...], frozenset[int]], ...]:
        """By node what it reads and how, on the CPU; see ``walks_of``."""
        return tuple(walks_of(self.flow, i) for i in range(len(self.flow.nodes)))

    @functools.cached_property
    def ranges(self) -> tuple[tuple[int, ...], ...]:
        """By node the sizes of its (first) result."""
        vals = [first_tensor(node.meta.get("val")) for node in self.flow.nodes]
        return tuple(() if val is None else AT_HINTS.shape(val) for val in vals)

    def walked(self, i: int, sources: tuple[StoredOp | None, ...]) -> tuple[tuple[Access, ...], frozenset[int]]:
        """What op i reads from memory, and where its loops end; see ``stored_op``."""
        inlined = {
            b: (source.walks, source.ends, source.shape.numel)
            for b, source in zip(self.flow.reads[i], sources, strict=True)
            if source is not None
        }
        return walked(*self.walks[i], inlined)


def fusion_facts(joint: JointGraph, flow: Dataflow) -> FusionFacts:
    is_on_cpu = on_cpu(flow)
    channels_last = frozenset(flow.nodes[i] for i in lying_channels_last(flow))
    return FusionFacts(
        flow=flow,
        shape=tuple(loop_shape(node, joint.notes, channels_last) for node in flow.nodes),
        flop=tuple(joint.notes[node].work.flop for node in flow.nodes),
        always_stored=always_stored(flow),
        dear=frozenset(i for i, node in enumerate(flow.nodes) if is_on_cpu and name_of(node.target) in DEAR_ON_CPU),
        longest_row=LONGEST_ROW_ON_CPU if is_on_cpu else LONGEST_ROW_ON_GPU,
        loops_run_together=is_on_cpu,
        keeps_rows=is_on_cpu,
        view_copies=view_copies(flow),
    )


def always_stored(flow: Dataflow) -> frozenset[int]:
    """Ops whose results go to memory whoever reads them."""
    random = {i for i, node in enumerate(flow.nodes) if node.target in RANDOM_FROM_SEED}
    bases = {flow.buffer[i] for i, node in enumerate(flow.nodes) if node.target is CHOOSES_PLACES}
    return frozenset(random | {flow.op[b] for b in bases if not flow.is_input[b]})


def loop_shape(
    node: fx.Node, notes: Mapping[fx.Node, Annotation], channels_last: frozenset[fx.Node] = frozenset()
) -> OpShape:
    """How an op's loops run: a reduction goes over its input, outer = results, inner = elements per result.

    Rows are what is contiguous in memory: of a value in ``channels_last`` the channels.
    """
    kind, numel = notes[node].kind, notes[node].numel
    if kind is not Kind.REDUCTION or not node.all_input_nodes:
        return OpShape(numel, 1, False)
    source = node.all_input_nodes[0].meta.get("val")
    if not isinstance(source, torch.Tensor) or numel == 0:
        return OpShape(numel, 1, False)
    inner = max(1, notes[node.all_input_nodes[0]].numel // numel)
    axes = reduced_dims(node, source.dim())
    if node.all_input_nodes[0] in channels_last:
        axes = sorted(map(IN_MEMORY.index, axes))
    return OpShape(numel, inner, axes == list(range(source.dim() - len(axes), source.dim())))


@dataclass(frozen=True, slots=True)
class ProgramOps:
    """The ops of a program in order, with what their readers ask for. A program may be cut into stretches."""

    ops: np.ndarray
    stretch: np.ndarray  # by op, ascending
    flags: np.ndarray  # by op: the bits below
    fewer: dict[int, tuple[int, ...]]  # ops of which not all results are made, since some are at hand
    last_reader: np.ndarray  # by buffer: the last stretch that reads it


# Bits of ``ProgramOps.flags``: the result goes to memory whatever it takes to compute it; several ops read it; some op
# of a later stretch reads it; a view of it may go to memory in its place.
# It is what a loop alone computes; a library call reads it.
MUST_BE_STORED, HAS_MANY_READERS, IS_READ_LATER, MAY_BE_COPIED, IS_SPREAD, IS_COMPUTED, IS_CALLED_WITH = (
    1 << k for k in range(7)
)


def program_ops(
    facts: FusionFacts, program: np.ndarray, stretch: np.ndarray, kept: Collection[int], at_hand: Collection[int]
) -> ProgramOps:
    """``program``: node indices in order, ``stretch``: the number of the stretch of each; else see ``store_ops``.

    What a library call reads and what is kept must be stored.
    """
    flow, num_nodes = facts.flow, len(facts.flow.nodes)
    stretch, ops = stretch[facts.is_op[program]], program[facts.is_op[program]]
    buffers, starts, counts = facts.reads
    num_read = counts[ops]
    places = np.repeat(starts[ops] - (np.cumsum(num_read) - num_read), num_read) + np.arange(num_read.sum())
    read = buffers[places]
    num_readers = np.bincount(read, minlength=num_nodes) + flow.num_sized(ops)
    last_reader = np.full(num_nodes, -1, dtype=np.int64)
    last_reader[read] = np.repeat(stretch, num_read)  # of several readers of a buffer the last one stays
    is_kept, is_wanted = np.zeros((2, num_nodes), dtype=bool)
    is_kept[list(kept)] = True
    asks = facts.asks[places]
    is_wanted[read[asks & WANTS_STORED > 0]] = True
    spread = np.zeros(num_nodes, dtype=bool)
    spread[read[asks & SPREADS > 0]] = True
    result, fewer = facts.result, {}
    partial = {flow.op[b] for b in at_hand}.intersection(ops.tolist()) if at_hand else set()
    if partial:
        result = result.copy()
        fewer = {i: tuple(b for b in flow.makes[i] if b not in at_hand) for i in sorted(partial)}
        for i, made in fewer.items():
            can = flow.kind[i] is Kind.POINTWISE and len(made) == 1 and i not in facts.always_stored
            result[i] = made[0] if can else -1
    result = result[ops]
    flags = MUST_BE_STORED * ((is_kept | is_wanted)[result] | (result < 0)) + HAS_MANY_READERS * (
        num_readers[result] > 1
    )
    flags += IS_SPREAD * spread[result]
    flags += IS_READ_LATER * (last_reader[result] > stretch)
    may_be_copied = np.zeros(num_nodes, dtype=bool)
    may_be_copied[facts.copy_table.ops_copied(program, num_nodes)] = True
    flags += IS_COMPUTED * (result >= 0) + IS_CALLED_WITH * is_wanted[result]
    flags += MAY_BE_COPIED * (may_be_copied[ops] & ~is_kept[result] & (result >= 0))
    return ProgramOps(ops, stretch, flags.astype(np.uint8), fewer, last_reader)


def store_ops(
    facts: FusionFacts, program: Sequence[int], kept: Collection[int], at_hand: Collection[int] = frozenset()
) -> list[StoredOp]:
    """The ops of a program that write memory; pointwise ops between them are inlined into their readers.

    ``program`` lists node indices in order; ``kept`` are buffers that outlive it (outputs, saved values). ``at_hand``
    are buffers that it starts with: an op that runs for another of its results does not make them.
    """
    indices = np.array(program, dtype=np.int64)
    given, put_off = program_ops(facts, indices, np.zeros_like(indices), kept, at_hand), []
    return inline(facts, given.ops.tolist(), given.flags.tobytes(), given.fewer, {}, put_off) + put_off


def inline(
    facts: FusionFacts, ops: Sequence[int], flags: bytes, fewer: Mapping[int, tuple[int, ...]],
    inlined: dict[int, StoredOp], put_off: list[StoredOp],
) -> list[StoredOp]:  # fmt: skip
    """Decide op after op: stored ones are returned, others put into ``inlined``, by buffer, where readers find them.

    What reads no memory, such as a mask, loops compute for themselves in any case (ir.py, ComputedBuffer.make_loader).
    If a library call reads it, it is stored too; if the program returns it, at the end: it is put into ``put_off``.
    """
    reads, makes, known, read_through = facts.flow.reads, facts.flow.makes, facts.stored_ops, facts.read_through
    stored = []
    for i, bits in zip(ops, flags, strict=True):
        made = fewer[i] if i in fewer else makes[i]
        sources = tuple(map(inlined.get, reads[i]))
        if i in read_through:
            sources = tuple([None if s and s.is_copied and s.makes[0] in read_through[i] else s for s in sources])
        if i in facts.wanted:
            sources = tuple([None if b in facts.wanted[i] else s for b, s in zip(reads[i], sources, strict=True)])
        key = (i, sources, made)
        op = known.get(key) or facts.stored_op(*key)
        if bits & IS_COMPUTED and not op.reads:
            inlined[made[0]] = op
            if bits & MUST_BE_STORED:
                (stored if bits & IS_CALLED_WITH else put_off).append(op)
        elif bits & MAY_BE_COPIED and may_be_copied(facts, op, bits):
            stored.append(op)
            inlined[made[0]] = facts.copied(op)
        elif bits & MUST_BE_STORED or is_realized(op, bits):
            stored.append(op)
        else:
            inlined[made[0]] = op
    return stored


def is_realized(op: StoredOp, bits: int) -> bool:
    """Whether a result goes to memory for what it takes to compute it again."""
    return op.is_too_long or bool(bits & HAS_MANY_READERS and op.is_too_dear) or bool(bits & IS_SPREAD and op.is_dear)


def may_be_copied(facts: FusionFacts, op: StoredOp, bits: int) -> bool:
    """Whether only a view of the result goes to memory: nothing else would have stored the result before."""
    if is_realized(op, bits):
        return False
    return sum(facts.flow.numel[b] > 1 for b in op.reads) < LEAST_READS_STORED_AHEAD
