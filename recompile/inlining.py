"""Which values of a program go to memory, predicted from the dataflow alone; the others are inlined into their readers.

A model of Inductor (torch/_inductor/ir.py ``StorageBox``), not a copy. What does not depend on the plan is computed
once a graph; what an op with others inlined into it reads and costs, once for all plans that have it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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
# ir.py, StorageBox.should_realize_on_reuse: on the CPU a reused expression with one of these is stored.
DEAR_ON_CPU = (aten.exp.default, aten.sigmoid.default)
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


@dataclass(frozen=True, eq=False)
class FusionFacts:
    """Per-op facts that fusion needs, computed once per graph."""

    flow: Dataflow
    shape: tuple[OpShape, ...]
    flop: tuple[int, ...]
    always_stored: frozenset[int]
    dear: frozenset[int]  # ops whose reuse forces them into memory on this device
    longest_row: int  # elements that a reduction keeps in registers; longer rows are read again in a later loop
    stored_ops: dict[tuple, StoredOp] = field(default_factory=dict, repr=False)
    kernels: dict[tuple[StoredOp, ...], Any] = field(default_factory=dict, repr=False)
    fits: dict[tuple[int, int], bool] = field(default_factory=dict, repr=False)  # by the numbers of two shapes

    @functools.cached_property
    def readers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every pair of an op and a buffer that it reads, and whether that op is a library call."""
        pairs = [(i, buffer) for i, reads in enumerate(self.flow.reads) for buffer in reads]
        ops, buffers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return ops, buffers, np.array([kind is Kind.EXTERN for kind in self.flow.kind], dtype=bool)[ops]

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
            is_too_dear=is_heavy or not self.dear.isdisjoint(members),
        )


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
    fewer = {flow.op[b]: tuple(m for m in flow.makes[flow.op[b]] if m not in at_hand) for b in at_hand}
    must, is_reused = must_be_stored(facts, ops, kept, fewer)
    reads, makes, known_ops = flow.reads, flow.makes, facts.stored_ops
    inlined: dict[int, StoredOp] = {}
    stored = []
    for i, is_forced, has_many_readers in zip(ops, must, is_reused, strict=True):
        made = fewer[i] if i in fewer else makes[i]
        key = (i, tuple(map(inlined.get, reads[i])), made)
        op = known_ops.get(key) or facts.stored_op(*key)
        if is_forced or op.is_too_long or (has_many_readers and op.is_too_dear):
            stored.append(op)
        elif made:
            inlined[made[0]] = op
    return stored


def must_be_stored(
    facts: FusionFacts, ops: list[int], kept: frozenset[int], fewer: Mapping[int, tuple[int, ...]]
) -> tuple[list[bool], list[bool]]:
    """For each op, whether its result goes to memory whatever it takes to compute it, and whether several read it.

    That is so for what a library call reads or what is kept. ``fewer``: ops of which not all results are made.
    """
    num_nodes = len(facts.flow.nodes)
    runs, is_kept = np.zeros(num_nodes, dtype=bool), np.zeros(num_nodes, dtype=bool)
    runs[ops] = True
    is_kept[list(kept)] = True
    readers, read, by_library = facts.readers
    runs_now = runs[readers]
    num_readers = np.bincount(read[runs_now], minlength=num_nodes)
    is_kept[read[runs_now & by_library]] = True
    result = facts.result
    if fewer:
        result = result.copy()
        for i, made in fewer.items():
            can = facts.flow.kind[i] is Kind.POINTWISE and len(made) == 1 and i not in facts.always_stored
            result[i] = made[0] if can else -1
    result = result[ops]
    return (is_kept[result] | (result < 0)).tolist(), (num_readers[result] > 1).tolist()
