"""What holds for every plan of a graph: the order of library calls, what lies in memory at each of them, and the time
that no choice of saved values avoids. The ground that the lower bounds of ``dual`` stand on.

*Order.* Kernels may be reordered and fused, so the order of the graph proves nothing about the order of kernels. A
path of data does. A *chain* is the longest path of library calls in one phase, each computed from the one before; its
calls e_1 ... e_m run one after the other in every plan, and each is a kernel of its own. An op that follows e_k (there
is a path to it) runs after e_k, one that e_k follows runs before it, wherever fusion puts either; so a loop that
precedes e_k and one that follows it are two kernels.

*Memory.* A buffer that must be stored, is made before e_k and is read after it, is alive at e_k. What a weight's
gradient is made of lies beside the chain: at e_k either the gradient exists or something that it is made from.

*Time.* Library calls cost their seconds whatever is fused. A loop kernel costs at least its traffic (it may be held up
by arithmetic instead, which is left out) and one launch. Counted are only reads and writes that fusion cannot remove:
of buffers that a library call makes or reads, inputs, tangents and gradients.

All this follows the rules of ``recompile.timeline`` and ``recompile.fusion``, in linear time. Left out, so that bounds
are lower than they could be: spills, rebuilt values that wait for their reader, inlined reads done twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recompile.dataflow import Dataflow
from recompile.fusion import FusionFacts
from recompile.joint import Kind, Side

LOOPS = (Kind.POINTWISE, Kind.REDUCTION)


@dataclass(frozen=True)
class Phase:
    """The ops that one program runs whatever is saved, in graph order, and what is certain about them.

    ``follows[i]``: the largest k such that op i is e_k or follows it, 0 if none. ``precedes[i]``: the smallest k such
    that op i is e_k or e_k follows it, m + 1 if none. ``readers``: per buffer the ops that read it and whose result
    reaches memory in the end. ``kept``: buffers that outlive the program.
    """

    ops: tuple[int, ...]
    chain: tuple[int, ...]
    follows: dict[int, int]
    precedes: dict[int, int]
    readers: dict[int, tuple[int, ...]]
    kept: frozenset[int]

    def last_read(self, buffer: int) -> int:
        """The largest k such that the buffer is read by e_k or after it; 0 if none."""
        return max((self.follows[i] for i in self.readers.get(buffer, ())), default=0)

    def first_read(self, buffer: int) -> int:
        """The smallest k such that the buffer is read by e_k or before it; m + 1 if none."""
        return min((self.precedes[i] for i in self.readers.get(buffer, ())), default=len(self.chain) + 1)


def is_made(flow: Dataflow, buffer: int) -> bool:
    """Whether an op allocates the buffer, as opposed to inputs and values that are no tensors."""
    return buffer in flow.makes[flow.op[buffer]]


def phase_of(facts: FusionFacts, sides: Iterable[Side], kept: frozenset[int]) -> Phase:
    """The certain part of forward (``sides`` = FORWARD) or backward (BACKWARD)."""
    flow, sides = facts.flow, frozenset(sides)
    ops = tuple(i for i in range(len(flow.nodes)) if flow.is_op[i] and flow.side[i] in sides)
    inside = frozenset(ops)
    sources = {i: [flow.op[b] for b in flow.reads[i] if is_made(flow, b) and flow.op[b] in inside] for i in ops}
    chain = longest_chain(flow, ops, sources)
    place = {call: k for k, call in enumerate(chain, start=1)}
    follows: dict[int, int] = {}
    for i in ops:
        follows[i] = place.get(i, max((follows[source] for source in sources[i]), default=0))
    precedes = {i: place.get(i, len(chain) + 1) for i in ops}
    for i in reversed(ops):
        for source in sources[i]:
            precedes[source] = min(precedes[source], precedes[i])
    return Phase(ops, chain, follows, precedes, effective_readers(facts, ops, kept), kept)


def longest_chain(flow: Dataflow, ops: Sequence[int], sources: dict[int, list[int]]) -> tuple[int, ...]:
    """The library calls on the path that has most of them."""
    depth: dict[int, int] = {}
    before: dict[int, int | None] = {}
    for i in ops:
        before[i] = max(sources[i], key=lambda source: depth[source], default=None)
        depth[i] = (0 if before[i] is None else depth[before[i]]) + (flow.kind[i] is Kind.EXTERN)
    step = max(ops, key=lambda i: depth[i], default=None)
    chain = []
    while step is not None:
        if flow.kind[step] is Kind.EXTERN:
            chain.append(step)
        step = before[step]
    return tuple(reversed(chain))


def effective_readers(facts: FusionFacts, ops: Sequence[int], kept: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Per buffer its readers, less loops whose result never reaches memory: inlined into nothing, they vanish."""
    flow = facts.flow
    readers: dict[int, list[int]] = {}
    for i in reversed(ops):  # a reader comes after what it reads
        vanishes = flow.kind[i] is Kind.POINTWISE and len(flow.makes[i]) == 1 and i not in facts.always_stored
        if vanishes and flow.makes[i][0] not in kept and not readers.get(flow.makes[i][0]):
            continue
        for buffer in flow.reads[i]:
            readers.setdefault(buffer, []).append(i)
    return {buffer: tuple(reversed(found)) for buffer, found in readers.items()}


def has_call_among(flow: Dataflow, readers: Iterable[int]) -> bool:
    return any(flow.kind[i] is Kind.EXTERN for i in readers)


def is_stored(flow: Dataflow, phase: Phase, buffer: int) -> bool:
    """Whether a buffer that the phase makes occupies memory whatever is fused."""
    made_by_loop = flow.kind[flow.op[buffer]] in LOOPS
    return not made_by_loop or buffer in phase.kept or has_call_among(flow, phase.readers.get(buffer, ()))


def spans(flow: Dataflow, phase: Phase) -> dict[int, tuple[int, int]]:
    """Per buffer that the phase makes the first and the last k at which it is certainly alive; empty ones left out.

    A reduction's result that is read beyond e_k is stored, since its reader is another kernel. What is computed from
    nothing is stored when it is wanted, or at the end.
    """
    last = len(phase.chain)
    found = {}
    for i in phase.ops:
        for buffer in flow.makes[i]:
            if flow.kind[i] is Kind.POINTWISE and not is_stored(flow, phase, buffer):
                continue
            if i in flow.from_nothing:
                continue
            start = phase.precedes[i]
            own = start if start <= last and phase.chain[start - 1] == i else 0  # a call's results, read or not
            end = last if buffer in phase.kept else max(phase.last_read(buffer), own)
            if start <= end:
                found[buffer] = (start, end)
    return found


def bytes_beside_chain(flow: Dataflow, phase: Phase, alive: dict[int, tuple[int, int]]) -> list[int]:
    """Per k = 0 ... m the bytes, not counted in ``alive``, without which some result off the chain could not be made.

    Take results that no call of the chain follows, weights' gradients among them, and give each value one of its
    sources as its parent. At e_k a value is made, or something on the way to it from a buffer that exists is alive.
    So a tree holds at least T(v) = min(bytes of v, sum of T over its children), and T(v) = bytes of v for a gradient,
    once its root exists.
    """
    last, size = len(phase.chain), flow.size_bytes
    total = [0] * (last + 1)
    needed: dict[int, int] = {}  # by buffer: the sum of T over the children beside the chain
    for i in reversed(phase.ops):
        if len(flow.makes[i]) != 1:
            continue
        buffer = flow.makes[i][0]
        is_beside = phase.precedes[i] > last
        below = needed.get(buffer, 0)
        if is_beside:
            held = size[buffer] if buffer in phase.kept else min(size[buffer], below)
            parent = _parent(flow, phase, i)
            if parent is not None:
                needed[parent] = needed.get(parent, 0) + held
    for buffer, below in needed.items():
        made = is_made(flow, buffer) and flow.op[buffer] in phase.precedes
        start = phase.precedes[flow.op[buffer]] if made else 1
        if (
            buffer in phase.kept
            or (made and not is_stored(flow, phase, buffer))
            or flow.op[buffer] in flow.from_nothing
        ):
            continue
        counted = alive.get(buffer, (1, 0))
        for k in range(start, last + 1):
            if not counted[0] <= k <= counted[1]:
                total[k] += min(size[buffer], below)
    return total


def _parent(flow: Dataflow, phase: Phase, i: int) -> int | None:
    """The source that a value beside the chain is charged to: one that the phase makes, the latest on the chain."""
    made = [b for b in flow.reads[i] if is_made(flow, b) and flow.op[b] in phase.precedes]
    return max(made, key=lambda b: (phase.follows[flow.op[b]], b), default=None)
