"""Kernels that are finished: what they do with each buffer, in which order they run, what they spill."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from recompile.inlining import FusionFacts, OpShape, StoredOp

# What a kernel does with a buffer: bits of one number.
MADE, ALWAYS_STORED, LOOPED = 1, 2, 4
ROLES = 8  # numbers that they can make


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
    def uses(self) -> np.ndarray:
        """The buffers that it makes, then what else it reads: each times ROLES, plus the bits of its role."""
        bits = MADE if self.is_extern else MADE | LOOPED
        made = [b * ROLES + (bits | ALWAYS_STORED if self.is_extern or b in self.spills else bits) for b in self.makes]
        read = [b * ROLES for b in sorted(self.reads.difference(self.makes))]
        return np.array(made + read, dtype=np.int64)

    @property
    def touches(self) -> np.ndarray:
        """The buffers in ``uses``."""
        return self.uses // ROLES


def joined_uses(kernels: Sequence[Kernel]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The buffers that kernels touch, one kernel's after the other's, their roles, and of each kernel how many."""
    uses = [kernel.uses for kernel in kernels]
    packed, counts = np.concatenate(uses), np.array([*map(len, uses)], dtype=np.int64)
    return packed // ROLES, packed % ROLES, counts


def kernel_of(facts: FusionFacts, ops: tuple[StoredOp, ...]) -> Kernel:
    """The kernel of these ops; its loops are those of the last op that has rows or columns."""
    kernel = facts.kernels.get(ops)
    if kernel is None:
        shape = next((op.shape for op in reversed(ops) if op.shape.inner > 1), ops[0].shape)
        spills = spilled_buffers(ops, shape, facts.longest_row)
        if facts.keeps_rows:
            spills = spills & not_in_rows(ops, facts.always_stored) | reduced_inside(ops)
        kernel = facts.kernels[ops] = Kernel(ops, shape, frozenset(spills))
    return kernel


def in_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Topological order: kernels by their first op, each preceded by what it needs (depth first, as Inductor sorts)."""
    if not kernels:
        return []
    buffers, roles, counts = joined_uses(kernels)
    user, is_made = np.repeat(np.arange(len(kernels)), counts), (roles & MADE) > 0
    maker = np.full(buffers.max(initial=0) + 1, -1)
    maker[buffers[is_made]] = user[is_made]
    must_wait = set(user[maker[buffers] > user].tolist())  # for kernels that stand after them
    made_by, order, done = maker.tolist(), [], [False] * len(kernels)
    for first, kernel in enumerate(kernels):
        if done[first]:
            continue
        if first not in must_wait:
            done[first] = True
            order.append(kernel)
            continue
        pending = [first]
        while pending:
            k = pending[-1]
            missing = set() if done[k] else {made_by[b] for b in kernels[k].reads} - {-1, k}
            missing = [m for m in sorted(missing, reverse=True) if not done[m]]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if not done[k]:
                done[k] = True
                order.append(kernels[k])
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


def reduced_inside(ops: Sequence[StoredOp]) -> set[int]:
    """Results of reductions that the kernel itself reads: on the CPU in another nest of loops, through memory.

    Only rows of more than one element are held locally (codegen/cpp.py ``try_outer_loop_fusion_with_local_buf``).
    """
    reads = frozenset(chain.from_iterable(op.reads for op in ops))
    return {b for op in ops if op.is_reduction for b in op.makes if b in reads}


def not_in_rows(ops: Sequence[StoredOp], random: frozenset[int]) -> set[int]:
    """Buffers that generated C++ cannot hold a row at a time, though nothing outside the kernel reads them.

    Random numbers are drawn by their flat index (torch/_inductor/inductor_prims.py ``random``), not row by row; so is
    what is made of them. All else that a later loop over the same row reads is a local buffer of one row
    (codegen/cpp.py ``try_outer_loop_fusion_with_local_buf``).
    """
    found: set[int] = set()
    for op in ops:
        if not op.is_reduction and (op.op in random or not found.isdisjoint(op.reads)):
            found.update(op.makes)
    return found
