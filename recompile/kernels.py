"""Kernels that are finished: what they do with each buffer, in which order they run, what they spill."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from recompile.inlining import FusionFacts, OpShape, StoredOp

# What a kernel does with a buffer: bits of one number.
MADE, ALWAYS_STORED, LOOPED = 1, 2, 4
ROLES = 8  # numbers that they can make
_NO_USES = np.zeros(0, dtype=np.int64)


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


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Kernels finished together, and what they do with buffers. Programs that have the same stretch share one."""

    kernels: tuple[Kernel, ...]
    births: np.ndarray  # by kernel: ascending in the order in which they were begun
    uses: np.ndarray  # of one kernel after the other
    counts: np.ndarray  # by kernel: how many of these are its


def batch_of(kernels: Sequence[tuple[int, Kernel]]) -> Batch:
    """The batch of kernels that are given with their births."""
    births, finished = zip(*kernels, strict=True) if kernels else ((), ())
    uses = [kernel.uses for kernel in finished]
    counts = np.array([*map(len, uses)], dtype=np.int64)
    return Batch(finished, np.array(births, dtype=np.int64), np.concatenate([_NO_USES, *uses]), counts)


class Schedule:
    """The kernels of a program in batches. ``order``: the first that runs, the second and so on, counted through all
    batches; by birth, but each kernel after those that it needs.
    """

    def __init__(self, batches: Sequence[Batch], is_in_order: bool = False):
        """``is_in_order``: whether it is known that no kernel needs one that was begun after it."""
        self.batches = batches
        self.uses = np.concatenate([_NO_USES, *(batch.uses for batch in batches)])
        self._counts = np.concatenate([_NO_USES, *(batch.counts for batch in batches)])
        births = np.concatenate([_NO_USES, *(batch.births for batch in batches)])
        self.order = births.argsort(kind="stable")
        if not is_in_order:
            self._put_off()

    def kernels(self) -> list[Kernel]:
        """In the order in which they run."""
        found = self._in_batches()
        return [found[k] for k in self.order.tolist()]

    def users(self) -> np.ndarray:
        """By use the place in ``order`` of the kernel whose it is."""
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(place))
        return np.repeat(place, self._counts)

    def _in_batches(self) -> list[Kernel]:
        return list(chain.from_iterable(batch.kernels for batch in self.batches))

    def _put_off(self) -> None:
        """Topological order: kernels by birth, each preceded by what it needs (depth first, as Inductor sorts)."""
        buffers, users, is_made = self.uses // ROLES, self.users(), (self.uses & MADE) > 0
        maker = np.full(buffers.max(initial=0) + 1, -1)
        maker[buffers[is_made]] = users[is_made]
        must_wait = sorted(set(users[maker[buffers] > users].tolist()))  # for kernels that stand after them
        if not must_wait:
            return
        kernels, by_birth, made_by = self._in_batches(), self.order.tolist(), maker.tolist()
        order, is_done, begun = [], bytearray(len(by_birth)), 0
        for first in [*must_wait, len(by_birth)]:
            order += [k for k in range(begun, first) if not is_done[k]]
            is_done[begun:first] = b"\1" * (first - begun)
            begun, pending = first, [first] if first < len(by_birth) else []
            while pending:
                k = pending[-1]
                missing = set() if is_done[k] else {made_by[b] for b in kernels[by_birth[k]].reads} - {-1, k}
                missing = [m for m in sorted(missing, reverse=True) if not is_done[m]]
                if missing:
                    pending.extend(missing)
                    continue
                pending.pop()
                if not is_done[k]:
                    is_done[k] = True
                    order.append(k)
        self.order = self.order[order]


def in_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels in the order in which they run, given in that in which they were begun."""
    return Schedule([batch_of([*enumerate(kernels)])]).kernels()


def first_that_can_run(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels in order: always the first begun of those whose sources have run (``torch_private_order.in_order``)."""
    maker = {b: k for k, kernel in enumerate(kernels) for b in kernel.makes}
    awaited = [{maker[b] for b in kernel.reads if b in maker} - {k} for k, kernel in enumerate(kernels)]
    readers: list[list[int]] = [[] for _ in kernels]
    for k, sources in enumerate(awaited):
        for source in sources:
            readers[source].append(k)
    ready, found = [k for k, sources in enumerate(awaited) if not sources], []
    while ready:  # a heap: it is ascending to begin with
        found.append(heapq.heappop(ready))
        for reader in readers[found[-1]]:
            awaited[reader].remove(found[-1])
            if not awaited[reader]:
                heapq.heappush(ready, reader)
    return [kernels[k] for k in found]


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


def ancestors_inside(kernel: Kernel) -> list[int]:
    """Per op of a kernel a bitset of the ops in it whose results it depends on."""
    maker: dict[int, int] = {}
    before: list[int] = []
    for k, op in enumerate(kernel.ops):
        mask = 0
        for buffer in op.reads:
            if buffer in maker:
                mask |= before[maker[buffer]] | 1 << maker[buffer]
        before.append(mask)
        maker.update((buffer, k) for buffer in op.makes)
    return before
