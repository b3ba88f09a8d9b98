"""Programs cut into stretches, each worked out once for all plans in which it looks the same.

Plans of one graph differ in a few places, so most of a program is what another plan's was. Which values go to memory
depends, for the ops of a stretch, on these ops, on what their readers ask for, and on what earlier stretches left to
be inlined. How they fuse depends on them and on the kernels that are open when the stretch begins: those that an op of
it or of a later one could join or reads from. Both are kept by all that they depend on, so the result is the same as
that of one pass over the whole program. A stretch after a change is found again as soon as the open kernels are the
same as without it, some 64 ops later. Only what is new costs more than a look-up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from recompile.dataflow import Dataflow
from recompile.fusion import Fusion, Kernel, in_order, kernel_of
from recompile.inlining import IS_READ_LATER, FusionFacts, ProgramOps, StoredOp, inline, program_ops

# Nodes of forward, or nodes that only backward runs, in a stretch: fewer make more look-ups, more are found less often.
NODES_PER_STRETCH = 64
NODES_PER_REBUILT_STRETCH = 192  # as many as one node of backward may need rebuilt, in a row
# With more open kernels than that the rest of a program is fused in one go: a plan that rebuilds most of forward before
# it reads it has them all open, and comparing them costs more than is saved.
MOST_KERNELS_KEPT = 128
# Kernels are numbered in the order in which they begin: the stretch in the high bits, so that a change in one stretch
# leaves the numbers in others alone.
FIRST_BIRTH = 2**32

IS_SINGLE_READ, IS_READ_AGAIN = 1, 2  # bits: one stored op reads a buffer; one of a later stretch does


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """The stored ops of a stretch. There is one object for equal ones."""

    ops: tuple[StoredOp, ...]
    inlined: tuple[StoredOp, ...]  # that later stretches read
    reads: np.ndarray  # the buffers that its ops read, one op after the other, and those that they make
    makes: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """All of a fusion at the end of a stretch that later ops can depend on. There is one object for equal ones."""

    kernels: tuple[tuple, ...]  # birth, ops, first, before and reusable of each
    live: frozenset[int]  # buffers that these touch and later stretches read
    single_readers: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """What a stretch did: the kernels that nothing can join any more, and what is open."""

    closed: tuple[tuple[int, Kernel], ...]  # by birth
    state: State
    is_in_order: bool


class Stretches:
    """The stretches of one graph's programs. ``num_stored`` and ``num_fused`` count those that were worked out."""

    def __init__(self, facts: FusionFacts):
        self.facts = facts
        self.num_stored = 0
        self.num_fused = 0
        self._stored: dict[tuple, Stretch] = {}
        self._fused: dict[tuple, Fused] = {}
        self._states: dict[tuple, State] = {}
        self._at_hand: tuple[State, Fusion] | None = None  # the last fusion and the state in which it is
        self._start = self._state((), frozenset(), frozenset())

    def kernels(
        self, program: np.ndarray, stretch: np.ndarray, kept: Collection[int], at_hand: Collection[int]
    ) -> list[Kernel]:
        """The kernels of a program in order, as ``fuse`` of ``store_ops`` would give them; arguments as there.

        ``stretch``: the number of the stretch of each node, ascending.
        """
        return self._fuse_all(self._store_all(program_ops(self.facts, program, stretch, kept, at_hand)))

    # What goes to memory

    def _store_all(self, given: ProgramOps) -> list[tuple[int, Stretch]]:
        """The stretches of a program that have stored ops, with their numbers."""
        bounds = [0, *(np.flatnonzero(np.diff(given.stretch)) + 1).tolist(), len(given.ops)]
        ops, flags = given.ops.astype(np.int32).tobytes(), given.flags.tobytes()
        carried: tuple[StoredOp, ...] = ()
        found = []
        for start, end in pairwise(bounds):
            if start == end:
                continue
            number = int(given.stretch[start])
            fewer = {}
            if given.fewer:
                fewer = {i: given.fewer[i] for i in given.ops[start:end].tolist() if i in given.fewer}
            key = (carried, ops[4 * start : 4 * end], flags[start:end], tuple(fewer.items()))
            stretch = self._stored.get(key)
            if stretch is None:
                indices = given.ops[start:end].tolist()
                stretch = self._stored[key] = self._store(carried, indices, flags[start:end], fewer)
            if stretch.ops:
                found.append((number, stretch))
            carried += stretch.inlined
            if carried:
                carried = tuple(op for op in carried if given.last_reader[op.makes[0]] > number)
        return found

    def _store(
        self, carried: tuple[StoredOp, ...], ops: list[int], flags: bytes, fewer: dict[int, tuple[int, ...]]
    ) -> Stretch:
        self.num_stored += 1
        inlined = {op.makes[0]: op for op in carried}
        stored = inline(self.facts, ops, flags, fewer, inlined)
        left = [op for op in inlined.values() if op not in carried]
        read_later = {i for i, bits in zip(ops, flags, strict=True) if bits & IS_READ_LATER}
        return Stretch(
            ops=tuple(stored),
            inlined=tuple(op for op in left if op.op in read_later),
            reads=np.array([b for op in stored for b in op.reads], dtype=np.int64),
            makes=np.array([b for op in stored for b in op.makes], dtype=np.int64),
        )

    # What fuses

    def _fuse_all(self, stretches: Sequence[tuple[int, Stretch]]) -> list[Kernel]:
        if not stretches:
            return []
        reads, makes = ([getattr(stretch, name) for _, stretch in stretches] for name in ("reads", "makes"))
        read_in, made_in = (np.repeat(np.arange(len(stretches)), [len(a) for a in arrays]) for arrays in (reads, makes))
        read, made = np.concatenate(reads), np.concatenate(makes)
        last_reader = np.full(len(self.facts.flow.nodes), -1, dtype=np.int64)
        last_reader[read] = read_in
        num_readers = np.bincount(read, minlength=len(last_reader))
        read_again = (IS_READ_AGAIN * (last_reader[read] > read_in)).astype(np.uint8).tobytes()
        of_made = IS_SINGLE_READ * (num_readers[made] == 1) + IS_READ_AGAIN * (last_reader[made] > made_in)
        of_made = of_made.astype(np.uint8).tobytes()
        state, closed, is_in_order, r, m = self._start, [], True, 0, 0
        for k, (number, stretch) in enumerate(stretches):
            r_end, m_end = r + len(stretch.reads), m + len(stretch.makes)
            key = (state, stretch, number, read_again[r:r_end], of_made[m:m_end])
            fused = self._fused.get(key)
            if fused is None:
                fused = self._fused[key] = self._fuse(*key)
            closed += fused.closed
            is_in_order = is_in_order and fused.is_in_order
            state, r, m = fused.state, r_end, m_end
            if len(state.kernels) > MOST_KERNELS_KEPT:
                rest = self._fuse_rest(state, stretches[k + 1 :], of_made[m:])
                return in_order([kernel for _, kernel in sorted(closed + rest, key=_birth)])
        kernels = [kernel for _, kernel in sorted(closed, key=_birth)]
        return kernels if is_in_order else in_order(kernels)

    def _fuse(self, state: State, stretch: Stretch, number: int, read_again: bytes, of_made: bytes) -> Fused:
        """Go on from a state to the end of a stretch."""
        self.num_fused += 1
        reads, makes = stretch.reads.tolist(), stretch.makes.tolist()
        work = self._resumed(state)
        work.next_birth = number * FIRST_BIRTH
        work.single_readers.update(b for b, bits in zip(makes, of_made, strict=True) if bits & IS_SINGLE_READ)
        for op in stretch.ops:
            work.place(op)
        flags = [*zip(reads, read_again, strict=True), *zip(makes, of_made, strict=True)]
        live = (state.live - set(reads)) | {b for b, bits in flags if bits & IS_READ_AGAIN}
        is_in_order, closed = work.is_in_order, work.closed(live)
        kernels = tuple((k.birth, kernel_of(self.facts, tuple(k.ops))) for k in closed)
        state = self._state(*work.state())
        self._at_hand = state, work
        return Fused(kernels, state, is_in_order)

    def _fuse_rest(
        self, state: State, stretches: Sequence[tuple[int, Stretch]], of_made: bytes
    ) -> list[tuple[int, Kernel]]:
        """Go on from a state to the end of the program, nothing of which is kept for others."""
        work = self._resumed(state)
        makes = (b for _, stretch in stretches for b in stretch.makes.tolist())
        work.single_readers.update(b for b, bits in zip(makes, of_made, strict=True) if bits & IS_SINGLE_READ)
        for number, stretch in stretches:
            work.next_birth = number * FIRST_BIRTH
            for op in stretch.ops:
                work.place(op)
        return [(k.birth, kernel_of(self.facts, tuple(k.ops))) for k in work.kernels]

    def _resumed(self, state: State) -> Fusion:
        """A fusion in this state: the last one if it ended there."""
        at_hand, self._at_hand = self._at_hand, None
        if at_hand is not None and at_hand[0] is state:
            return at_hand[1]
        return Fusion.resumed(self.facts, state.kernels, state.live, state.single_readers)

    def _state(self, kernels: tuple, live: frozenset[int], single_readers: frozenset[int]) -> State:
        key = (kernels, live, single_readers)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = State(*key)
        return state


def forward_stretches(flow: Dataflow) -> tuple[np.ndarray, np.ndarray]:
    """By node, the stretch of forward that it is in, as two numbers to be added: see ``stretches_of``."""
    return np.zeros(len(flow.nodes), dtype=np.int64), np.arange(len(flow.nodes)) // NODES_PER_STRETCH


def backward_stretches(flow: Dataflow) -> tuple[np.ndarray, np.ndarray]:
    """By node, the stretch of backward, a number for what only backward runs and one for what is rebuilt meanwhile."""
    rebuilt = np.arange(len(flow.nodes)) // NODES_PER_REBUILT_STRETCH + 1
    own = np.zeros(len(flow.nodes), dtype=np.int64)
    roots = list(flow.backward_roots)
    own[roots] = np.arange(len(roots)) // NODES_PER_STRETCH * (rebuilt[-1] + 1)
    rebuilt[roots] = 0
    return own, rebuilt


def stretches_of(program: np.ndarray, numbers: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The stretches of a program, ascending: a node is in the first that it could be in, or in the one before it."""
    first, second = numbers
    return np.maximum.accumulate(np.maximum.accumulate(first[program]) + second[program])


def _birth(pair: tuple[int, Kernel]) -> int:
    return pair[0]
