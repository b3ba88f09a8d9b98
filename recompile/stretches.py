"""Programs cut into stretches, each worked out once for all plans in which it looks the same.

Plans of one graph differ in a few places, so most of a program is what another plan's was. Which values go to memory
depends, for the ops of a stretch, on these ops, on what their readers ask for, and on what earlier stretches left to
be inlined. How they fuse depends on them and on the kernels that are open when the stretch begins: those that an op of
it or of a later one could join or reads from. Both are kept by all that they depend on, so the result is the same as
that of one pass over the whole program. A stretch after a change is found again as soon as the open kernels are the
same as without it, some 64 ops later. Equal layers share what fusion did: stretches are cut where nodes look alike, and
ops and buffers are given by place, not by name (``Pattern``, ``Change``), for nothing that fusion asks about a buffer
but its size and who shares it depends on its name. Only what is new costs more than a look-up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from recompile.cpu_fusion import fuse_on_cpu
from recompile.fusion import Fusion, OpenKernel
from recompile.inlining import IS_READ_LATER, FusionFacts, ProgramOps, StoredOp, inline, program_ops
from recompile.kernels import Batch, Schedule, batch_of, kernel_of
from recompile.late import LateArguments
from recompile.looks import cut_alike, looks_of

# Nodes of forward, or nodes that only backward runs, in a stretch: fewer make more look-ups, more are found less often.
NODES_PER_STRETCH = 128
NODES_PER_REBUILT_STRETCH = 256  # as many as one node of backward may need rebuilt, in a row
# With more open kernels than that the rest of a program is fused in one go: a plan that rebuilds most of forward before
# it reads it has them all open, and comparing them costs more than is saved.
MOST_KERNELS_KEPT = 128
# Kernels are numbered in the order in which they begin: the stretch in the high bits, so that a change in one stretch
# leaves the numbers in others alone.
FIRST_BIRTH = 2**32
MOST_KNOWN = 500_000  # stretches, states and ops kept, half a KiB each; 120,000 after the search of a 96-layer GPT
IS_SINGLE_READ, IS_READ_AGAIN = 1, 2  # bits: one stored op reads a buffer; one of a later stretch does


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """The stored ops of a stretch. There is one object for equal ones."""

    ops: tuple[StoredOp, ...]
    inlined: tuple[StoredOp, ...]  # that later stretches read
    put_off: tuple[StoredOp, ...]  # to the end of the program
    reads: np.ndarray  # the buffers that its ops read, one op after the other, and those that they make
    makes: np.ndarray
    buffers: tuple[int, ...]  # all of these, ascending
    pattern: int  # equal for stretches that differ in nothing but the names of ops and buffers


class OpenPattern(NamedTuple):
    """An open kernel, as far as later ops depend on it. Buffers are places in ``State.buffers``."""

    first: int  # of its position, counted from the end of the stretch
    before: int  # bits: the open loops that must run before it
    direct: int  # and via: as in ``OpenKernel``
    via: int
    newest: int  # how many of the open kernels are older than the newest that it reads from
    shape_number: int  # -1: a library call, of which only what it makes counts
    num_ops: int
    touches: tuple[int, ...]
    makes: tuple[int, ...]
    reusable: frozenset[int]


class Pattern(NamedTuple):
    """A state but for the names of ops and buffers."""

    kernels: tuple[OpenPattern, ...]
    sizes: tuple[int, ...]  # of the buffers
    single_readers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """All of a fusion at the end of a stretch that later ops can depend on. There is one object for equal ones."""

    kernels: tuple[tuple[int, tuple[StoredOp, ...]], ...]  # births and ops
    buffers: tuple[int, ...]  # those that these touch and later stretches read
    pattern: Pattern
    number: int  # equal for equal patterns


@dataclass(frozen=True, slots=True)
class Change:
    """What a stretch of some pattern does to a state of some pattern. What goes into a kernel is given by the place of
    an op in the stretch, or by -1 - the place of a kernel in the state, all of whose ops do; buffers likewise by their
    place among those of the stretch or of the state.
    """

    kernels: tuple[tuple[int, tuple[int, ...]], ...]  # places in the state, or after its kernels, and what goes in
    is_open: tuple[bool, ...]
    buffers: tuple[int, ...]
    pattern: Pattern
    number: int
    is_in_order: bool


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """What a stretch did: the kernels that nothing can join any more, and what is open."""

    closed: Batch
    state: State
    is_in_order: bool


class Stretches:
    """The stretches of one graph's programs. ``num_stored`` and ``num_fused`` count those that were worked out; for the
    others one was known that is equal, or for fusion, that has the same pattern.
    """

    def __init__(self, facts: FusionFacts):
        self.facts = facts
        self.late = LateArguments(facts.flow)
        self.num_stored = 0
        self.num_fused = 0
        self._forget()

    def _forget(self) -> None:
        """Begin anew; stretches and states are known by what they are made of, so all of it goes together."""
        self.facts.forget()
        self._stored: dict[tuple, Stretch] = {}
        self._fused: dict[tuple, Fused] = {}
        self._changes: dict[tuple, Change] = {}
        self._states: dict[tuple, State] = {}
        self._numbers: dict[tuple, int] = {}  # of patterns
        nothing = Pattern((), (), ())
        self._start = self._state((), (), nothing, self._number(nothing))

    def schedule(
        self, program: np.ndarray, stretch: np.ndarray, kept: Collection[int], at_hand: Collection[int]
    ) -> Schedule:
        """The kernels of a program; ``stretch``: of each node, ascending. Else see ``store_ops``, ``fuse``."""
        kept_for_others = (self._stored, self._fused, self._changes, self._states, self.facts.stored_ops)
        if sum(map(len, kept_for_others)) > MOST_KNOWN:
            self._forget()
        stored = self._store_all(program_ops(self.facts, program, stretch, kept, at_hand))
        if self.facts.loops_run_together:
            ops, as_in_graph = [op for _, stretch in stored for op in stretch.ops], self.late.any_in(program, kept)
            kernels = fuse_on_cpu(self.facts, ops, kept, as_in_graph)
            return Schedule([batch_of([*enumerate(kernels)])], is_in_order=True)
        return self._fuse_all(stored)

    # What goes to memory

    def _store_all(self, given: ProgramOps) -> list[tuple[int, Stretch]]:
        """The stretches of a program that have stored ops, with their numbers."""
        bounds = [0, *(np.flatnonzero(np.diff(given.stretch)) + 1).tolist(), len(given.ops)]
        ops, flags = given.ops.astype(np.int32).tobytes(), given.flags.tobytes()
        carried: tuple[StoredOp, ...] = ()
        put_off: tuple[StoredOp, ...] = ()
        found, number = [], 0
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
                stretch = self._stored[key] = self._stretch(*key[:3], fewer)
            if stretch.ops:
                found.append((number, stretch))
            put_off += stretch.put_off
            carried += stretch.inlined
            if carried:
                carried = tuple(op for op in carried if given.last_reader[op.makes[0]] > number)
        if put_off:
            stretch = self._stored.get(put_off)
            if stretch is None:
                stretch = self._stored[put_off] = self._of_ops(put_off)
            found.append((number + 1, stretch))
        return found

    def _stretch(
        self, carried: tuple[StoredOp, ...], ops: bytes, flags: bytes, fewer: dict[int, tuple[int, ...]]
    ) -> Stretch:
        """The stretch of these ops; what is only carried past it is no part of what it is known by."""
        indices = np.frombuffer(ops, dtype=np.int32).tolist()
        read = set(chain.from_iterable(map(self.facts.flow.reads.__getitem__, indices)))
        needed = tuple([op for op in carried if op.makes[0] in read])
        key = (needed, ops, flags, tuple(fewer.items()))
        stretch = self._stored.get(key)
        if stretch is None:
            stretch = self._stored[key] = self._store(needed, indices, flags, fewer)
        return stretch

    def _store(
        self, carried: tuple[StoredOp, ...], ops: list[int], flags: bytes, fewer: dict[int, tuple[int, ...]]
    ) -> Stretch:
        self.num_stored += 1
        inlined, put_off = {op.makes[0]: op for op in carried}, []
        stored = inline(self.facts, ops, flags, fewer, inlined, put_off)
        handed_on = {op.makes[0] for op in carried}
        left = [op for op in inlined.values() if op.makes[0] not in handed_on]
        read_later = {i for i, bits in zip(ops, flags, strict=True) if bits & IS_READ_LATER}
        return self._of_ops(tuple(stored), tuple(op for op in left if op.op in read_later), tuple(put_off))

    def _of_ops(
        self, stored: tuple[StoredOp, ...], inlined: tuple[StoredOp, ...] = (), put_off: tuple[StoredOp, ...] = ()
    ) -> Stretch:
        reads = np.array([b for op in stored for b in sorted(op.reads)], dtype=np.int64)
        makes = np.array([b for op in stored for b in op.makes], dtype=np.int64)
        buffers, places = np.unique(np.concatenate([reads, makes]), return_inverse=True)
        buffers = tuple(buffers.tolist())
        rows = tuple([(op.is_extern, op.shape_number, len(op.reads), len(op.makes)) for op in stored])
        sizes = tuple([self.facts.shared_bytes[b] for b in buffers])
        pattern = self._number((rows, places.tobytes(), sizes))
        return Stretch(stored, inlined, put_off, reads, makes, buffers, pattern)

    # What fuses

    def _fuse_all(self, stretches: Sequence[tuple[int, Stretch]]) -> Schedule:
        if not stretches:
            return Schedule([], is_in_order=True)
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
            closed.append(fused.closed)
            is_in_order = is_in_order and fused.is_in_order
            state, r, m = fused.state, r_end, m_end
            if len(state.kernels) > MOST_KERNELS_KEPT:
                return Schedule([*closed, self._fuse_rest(state, stretches[k + 1 :], of_made[m:])])
        return Schedule(closed, is_in_order)

    def _fuse(self, state: State, stretch: Stretch, number: int, read_again: bytes, of_made: bytes) -> Fused:
        """Go on from a state to the end of a stretch."""
        place = {b: k for k, b in enumerate(state.buffers)}
        shared = tuple([(k, place[b]) for k, b in enumerate(stretch.buffers) if b in place])
        key = (state.number, stretch.pattern, shared, read_again, of_made)
        change = self._changes.get(key)
        if change is None:
            change = self._changes[key] = self._change(state, stretch, read_again, of_made)
        closed, left = [], []
        for (k, parts), is_open in zip(change.kernels, change.is_open, strict=True):
            birth = state.kernels[k][0] if k < len(state.kernels) else number * FIRST_BIRTH + k
            ops = sum([state.kernels[~part][1] if part < 0 else stretch.ops[part : part + 1] for part in parts], ())
            if is_open:
                left.append((birth, ops))
            else:
                closed.append((birth, kernel_of(self.facts, ops)))
        buffers = tuple([state.buffers[~k] if k < 0 else stretch.buffers[k] for k in change.buffers])
        return Fused(
            batch_of(closed), self._state(tuple(left), buffers, change.pattern, change.number), change.is_in_order
        )

    def _change(self, state: State, stretch: Stretch, read_again: bytes, of_made: bytes) -> Change:
        """Fuse a stretch, and put the result in terms of places."""
        self.num_fused += 1
        reads, makes = stretch.reads.tolist(), stretch.makes.tolist()
        work = resumed(self.facts, state)
        for k, kernel in enumerate(work.kernels):
            kernel.birth = k
        work.next_birth = len(work.kernels)
        work.single_readers.update(b for b, bits in zip(makes, of_made, strict=True) if bits & IS_SINGLE_READ)
        for op in stretch.ops:
            work.place(op)
        flags = [*zip(reads, read_again, strict=True), *zip(makes, of_made, strict=True)]
        live = (set(state.buffers) - set(reads)) | {b for b, bits in flags if bits & IS_READ_AGAIN}
        everything, is_in_order = work.kernels, work.is_in_order
        closed = set(work.closed(live))
        old, new = ({b: k for k, b in enumerate(buffers)} for buffers in (state.buffers, stretch.buffers))
        named = sorted((b not in old, old[b] if b in old else new[b], b) for b in work.live)
        pattern = self._pattern(work, [b for _, _, b in named])
        place = {op: ~k for k, (_, ops) in enumerate(state.kernels) for op in ops}
        place.update((op, k) for k, op in enumerate(stretch.ops))
        return Change(
            kernels=tuple((k.birth, tuple(dict.fromkeys(place[op] for op in k.ops))) for k in everything),
            is_open=tuple(kernel not in closed for kernel in everything),
            buffers=tuple(k if in_stretch else ~k for in_stretch, k, _ in named),
            pattern=pattern,
            number=self._number(pattern),
            is_in_order=is_in_order,
        )

    def _pattern(self, work: Fusion, buffers: Sequence[int]) -> Pattern:
        """The pattern of a state whose live buffers are given in the order of their places."""
        place, births = {b: k for k, b in enumerate(buffers)}, [kernel.birth for kernel in work.kernels]
        rows = [
            OpenPattern(
                first=kernel.first if kernel.bit else 0,
                before=kernel.before,
                direct=kernel.direct if kernel.bit else 0,
                via=kernel.via if kernel.bit else 0,
                newest=bisect_left(births, kernel.newest) if kernel.bit else 0,
                shape_number=kernel.loops_like.shape_number if kernel.bit else -1,
                num_ops=len(kernel.ops),
                touches=tuple(sorted(place[b] for b in kernel.touches if b in place)) if kernel.bit else (),
                makes=tuple(sorted(place[b] for op in kernel.ops for b in op.makes if b in place)),
                reusable=frozenset(kernel.reusable),
            )
            for kernel in work.kernels
        ]
        sizes = tuple(self.facts.shared_bytes[b] for b in buffers)
        return Pattern(tuple(rows), sizes, tuple(sorted(place[b] for b in work.single_readers)))

    def _fuse_rest(self, state: State, stretches: Sequence[tuple[int, Stretch]], of_made: bytes) -> Batch:
        """Go on from a state to the end of the program, nothing of which is kept for others."""
        work = resumed(self.facts, state)
        makes = (b for _, stretch in stretches for b in stretch.makes.tolist())
        work.single_readers.update(b for b, bits in zip(makes, of_made, strict=True) if bits & IS_SINGLE_READ)
        for number, stretch in stretches:
            work.next_birth = number * FIRST_BIRTH
            for op in stretch.ops:
                work.place(op)
        return batch_of([(k.birth, kernel_of(self.facts, tuple(k.ops))) for k in work.kernels])

    def _number(self, pattern: tuple) -> int:
        return self._numbers.setdefault(pattern, len(self._numbers))

    def _state(self, kernels: tuple, buffers: tuple[int, ...], pattern: Pattern, number: int) -> State:
        key = (kernels, buffers, number)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = State(kernels, buffers, pattern, number)
        return state


def resumed(facts: FusionFacts, state: State) -> Fusion:
    """A fusion that goes on from a state."""
    kernels = []
    for (birth, ops), row in zip(state.kernels, state.pattern.kernels, strict=True):
        kernels.append(
            OpenKernel(
                birth, 0, row.first, row.before, row.direct, row.via, row.newest - 0.5, reusable=set(row.reusable)
            )
        )
        for op in ops:
            kernels[-1].take(op)
    single_readers = [state.buffers[k] for k in state.pattern.single_readers]
    return Fusion.resumed(facts, kernels, state.buffers, single_readers)


def forward_stretches(facts: FusionFacts) -> tuple[np.ndarray, np.ndarray]:
    """By node, the stretch of forward that it is in, as two numbers to be added: see ``stretches_of``."""
    looks = looks_of(facts)
    return np.zeros_like(looks), cut_alike(looks, NODES_PER_STRETCH)


def backward_stretches(facts: FusionFacts) -> tuple[np.ndarray, np.ndarray]:
    """By node, the stretch of backward, a number for what only backward runs and one for what is rebuilt meanwhile."""
    looks, roots = looks_of(facts), list(facts.flow.backward_roots)
    rebuilt = cut_alike(looks, NODES_PER_REBUILT_STRETCH) + 1
    own = np.zeros_like(looks)
    own[roots] = cut_alike(looks[roots], NODES_PER_STRETCH) * (rebuilt.max(initial=0) + 1)
    rebuilt[min(roots, default=0) :] = 0  # what stands among the roots is read by one nearby
    return own, rebuilt


def stretches_of(program: np.ndarray, numbers: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The stretches of a program, ascending: a node is in the first that it could be in, or in the one before it."""
    first, second = numbers
    return np.maximum.accumulate(np.maximum.accumulate(first[program]) + second[program])
