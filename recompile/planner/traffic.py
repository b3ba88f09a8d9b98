"""Bytes that loops move, and launches that they take, whatever is saved and however they fuse. See ``certain``.

Loops whose shapes never share a kernel (``recompile.fusion.shapes_fuse``) fall into families: column reductions of one
shape; and all others by their number of elements, where a row reduction of M x N joins M with M N. Two loops of one
family with a library call between them do not share a kernel either. So the kernels that read a buffer are at least as
many as, summed over families, the longest sequence of its readers, each separated from the next by a call of the chain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from recompile.fusion import FusionFacts
from recompile.joint import Kind
from recompile.planner.certain import LOOPS, Phase, is_stored


class Traffic:
    """Counts for one phase. ``fixed_bytes``: of buffers that no choice touches; ``num_loops``: kernels at least."""

    def __init__(self, facts: FusionFacts, phase: Phase):
        self.facts, self.flow, self.phase = facts, facts.flow, phase
        self.family = families(facts)
        self.runs = self._certain_runs()
        self.apart = self._columns_apart()

    def _certain_runs(self) -> dict[int, int]:
        """Loops that certainly run in some kernel of their family, be it inlined into another loop.

        Each with the smallest k such that e_k follows such a kernel.
        """
        flow, phase = self.flow, self.phase
        found: dict[int, int] = {}
        for i in reversed(phase.ops):
            if flow.kind[i] not in LOOPS:
                continue
            stored = flow.kind[i] is Kind.REDUCTION or i in self.facts.always_stored or len(flow.makes[i]) != 1
            if stored or is_stored(flow, phase, flow.makes[i][0]):
                found[i] = phase.precedes[i]
                continue
            readers = phase.readers.get(flow.makes[i][0], ())
            into = [found[r] for r in readers if r in found and self.family[r] == self.family[i]]
            if into:
                found[i] = min(into)
        return found

    @property
    def num_loops(self) -> int:
        """Generated kernels that the phase launches at least."""
        plain = {i: k for i, k in self.runs.items() if i not in self.apart}
        groups: dict[Hashable, dict[int, int]] = {}
        for i, group in self.apart.items():
            groups.setdefault(group, {})[i] = self.runs[i]
        return sum(self._kernels(plain).values()) + sum(map(self._longest_sequence, groups.values()))

    def _columns_apart(self) -> dict[int, Hashable]:
        """Per column reduction of the phase a group: fusion needs a shared buffer, and two groups can share none.

        A buffer that might be inlined counts as one with all that it is computed from.
        """
        flow, phase, leader = self.flow, self.phase, {}

        def root(buffer: int) -> int:
            while leader.setdefault(buffer, buffer) != buffer:
                buffer = leader[buffer]
            return buffer

        columns = [i for i in self.family if _is_column(self.facts, i)]
        for i in self.family:
            is_inlined = (
                flow.kind[i] is Kind.POINTWISE and len(flow.makes[i]) == 1 and i not in self.facts.always_stored
            )
            if is_inlined and i in phase.follows:
                is_inlined = not is_stored(flow, phase, flow.makes[i][0])
            if is_inlined or i in columns:
                for buffer in flow.reads[i]:
                    for made in flow.makes[i]:
                        leader[root(buffer)] = root(made)
        return {i: (self.family[i], root(flow.makes[i][0])) for i in columns if i in self.runs}

    def _kernels(self, loops: Iterable[int]) -> dict[Hashable, int]:
        """Per family the kernels at least that these loops run in."""
        members: dict[Hashable, dict[int, int]] = {}
        for i in loops:
            if i in self.runs:
                members.setdefault(self.family[i], {})[i] = self.runs[i]
        return {family: self._longest_sequence(runs) for family, runs in members.items()}

    def _longest_sequence(self, precedes: dict[int, int]) -> int:
        """The most loops among these of which each follows a call of the chain that follows the one before."""
        count, reached = 0, 0
        for i in sorted(precedes, key=lambda i: (precedes[i], i)):
            if self.phase.follows[i] >= reached:
                count, reached = count + 1, precedes[i]
        return count

    def _loops_reading(self, buffer: int) -> list[int]:
        return [i for i in self.phase.readers.get(buffer, ()) if self.flow.kind[i] in LOOPS]

    def num_reads(self, buffer: int) -> int:
        """Loop kernels at least that read a buffer which another kernel made, or nobody in this phase."""
        loops = self._loops_reading(buffer)
        in_any_family = self._longest_sequence({i: self.phase.precedes[i] for i in loops})
        return max(sum(self._kernels(loops).values()), in_any_family)

    def num_reads_after_loop(self, buffer: int, maker: int) -> int:
        """The same for a stored buffer that a loop makes; the kernel that makes it may be one of those that read it."""
        kernels = self._kernels([maker, *self._loops_reading(buffer)])
        kernels[self.family[maker]] = max(0, kernels.get(self.family[maker], 0) - 1)
        return sum(kernels.values())

    def fixed_bytes(self, skipped: frozenset[int]) -> int:
        """Traffic of the buffers that the phase makes or finds, but those ``skipped``."""
        flow, phase = self.flow, self.phase
        made = {b for i in phase.ops for b in flow.makes[i]}
        found = {b for b in phase.readers if b not in made and b not in skipped}
        total = sum(flow.size_bytes[b] * self.num_reads(b) for b in found)
        in_memory = found | {b for b in made if flow.kind[flow.op[b]] not in LOOPS}
        charged: set[int] = set()
        for i in phase.ops:
            for buffer in flow.makes[i]:
                if buffer in in_memory:
                    total += flow.size_bytes[buffer] * self.num_reads(buffer)
                elif is_stored(flow, phase, buffer):
                    total += flow.size_bytes[buffer] * (1 + self.num_reads_after_loop(buffer, i))
                elif flow.kind[i] is Kind.POINTWISE and len(flow.makes[i]) == 1:
                    total += self._stored_or_repeated(buffer, flow.reads[i], in_memory, charged)
        return total

    def _stored_or_repeated(
        self, buffer: int, sources: Iterable[int], in_memory: set[int], charged: set[int]
    ) -> int:  # fmt: skip
        """Bytes for a value that several kernels need: written and read, or each of them reads what it is made from.

        Charged to one source, of those ``in_memory`` and not yet ``charged``, beyond what its direct readers count.
        """
        size, kernels = self.flow.size_bytes, self.num_reads(buffer)
        repeated = {b: max(0, kernels - self.num_reads(b)) * size[b] for b in sources if b in in_memory - charged}
        source = max(repeated, key=lambda b: (repeated[b], -b), default=None)
        if kernels < 2 or source is None:
            return 0
        charged.add(source)
        return min(kernels * size[buffer], repeated[source])


def families(facts: FusionFacts) -> dict[int, Hashable]:
    """Per loop the family that its kernel belongs to: loops of two families never fuse."""
    flow, leader = facts.flow, {}

    def root(numel: int) -> int:
        while leader.setdefault(numel, numel) != numel:
            numel = leader[numel]
        return numel

    loops = [i for i in range(len(flow.nodes)) if flow.is_op[i] and flow.kind[i] in LOOPS]
    for i in loops:
        shape = facts.shape[i]
        if shape.inner > 1 and shape.reduces_rows:
            leader[root(shape.numel)] = root(shape.outer)
    return {i: facts.shape[i] if _is_column(facts, i) else root(facts.shape[i].outer) for i in loops}


def _is_column(facts: FusionFacts, i: int) -> bool:
    return facts.shape[i].inner > 1 and not facts.shape[i].reduces_rows
