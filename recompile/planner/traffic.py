"""Bytes that loops move, and launches that they take, whatever is saved and however they fuse. See ``certain``.

On a GPU loops whose shapes never share a kernel (``recompile.fusion.shapes_fuse``) fall into families: column
reductions of one shape; and all others by their number of elements, where a row reduction of M x N joins M with M N.
Two loops of one family with a library call between them do not share a kernel either. So the kernels that read a buffer
are at least as many as, summed over families, the longest sequence of its readers, each separated from the next by a
call of the chain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from recompile.fusion import FusionFacts
from recompile.joint import Kind, Side
from recompile.planner.certain import LOOPS, Phase, is_stored


class Traffic:
    """Counts for one phase. ``fixed_bytes``: of buffers that no choice touches; ``num_loops``: kernels at least."""

    def __init__(self, facts: FusionFacts, phase: Phase):
        self.facts, self.flow, self.phase = facts, facts.flow, phase
        self.family = families(facts)
        self.runs = self._certain_runs()

    def _certain_runs(self) -> dict[int, int]:
        """Loops that certainly run in some kernel of their family, be it inlined into another loop.

        Each with the smallest k such that e_k follows such a kernel.
        """
        flow, phase = self.flow, self.phase
        found: dict[int, int] = {}
        for i in reversed(phase.ops):
            if flow.kind[i] not in LOOPS:
                continue
            if i in flow.from_nothing and is_stored(flow, phase, flow.makes[i][0]):
                found[i] = len(phase.chain) + 1  # its readers don't wait for it
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
        groups: dict[Hashable, dict[int, int]] = {}
        for i, group in self._fusible_groups().items():
            groups.setdefault(group, {})[i] = self.runs[i]
        return sum(map(self._longest_sequence, groups.values()))

    def _fusible_groups(self) -> dict[int, Hashable]:
        """Per certain loop a group: fusion needs a shared buffer, and loops of two groups can share none.

        A buffer that might be inlined counts as one with all that it is computed from; loops of one family that read
        or make the same one may fuse, and with them what fuses with either.
        """
        flow, forward_only = self.flow, all(self.flow.side[i] is not Side.BACKWARD for i in self.phase.ops)
        loops = [i for i in self.family if not forward_only or flow.side[i] is not Side.BACKWARD]
        inlined, fused = Classes(), Classes()
        for i in loops:
            if self._may_be_inlined(i):
                inlined.unite([flow.makes[i][0], *flow.reads[i]])
        for i in loops:
            touched = (*flow.reads[i], *flow.makes[i])
            fused.unite([("loop", i), *((self.family[i], inlined.of(buffer)) for buffer in touched)])
        return {i: fused.of(("loop", i)) for i in self.runs}

    def _may_be_inlined(self, i: int) -> bool:
        flow = self.flow
        if flow.kind[i] is not Kind.POINTWISE or len(flow.makes[i]) != 1 or i in self.facts.always_stored:
            return False
        return i not in self.phase.follows or not is_stored(flow, self.phase, flow.makes[i][0])

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
        if self.flow.op[buffer] in self.flow.from_nothing and self.flow.op[buffer] in self.phase.precedes:
            return []  # they compute it
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
                elif self._may_be_inlined(i):
                    total += self._stored_or_repeated(buffer, flow.reads[i], in_memory, charged)
        return total

    def _stored_or_repeated(self, buffer: int, sources: Iterable[int], in_memory: set[int], charged: set[int]) -> int:
        """Bytes for a value that is written and read, or computed again from its sources by every kernel that needs it.

        Charged to one source, of those ``in_memory`` and not yet ``charged``, beyond what its direct readers count: for
        a value that several kernels need, and for one that column reductions alone need, which share no kernel with
        the source's other readers.
        """
        size, kernels = self.flow.size_bytes, self.num_reads(buffer)
        loops = self._loops_reading(buffer)
        if kernels < 2 and not any(_is_column(self.facts, i) for i in loops):
            return 0
        if kernels < 2:
            reads = {b: sum(self._kernels(self._loops_reading(b)).values()) + 1 for b in sources if b in in_memory}
            reads = {b: n for b, n in reads.items() if not self._has_column_reader(b)}
        else:
            reads = dict.fromkeys((b for b in sources if b in in_memory), kernels)
        repeated = {b: max(0, n - self.num_reads(b)) * size[b] for b, n in reads.items() if b not in charged}
        source = max(repeated, key=lambda b: (repeated[b], -b), default=None)
        if source is None:
            return 0
        charged.add(source)
        return min(max(2, kernels) * size[buffer], repeated[source])

    def _has_column_reader(self, buffer: int) -> bool:
        return any(_is_column(self.facts, i) for i in self._loops_reading(buffer))


class Classes:
    """Disjoint sets of hashable things (Galler and Fischer 1964)."""

    def __init__(self):
        self.leader: dict[Hashable, Hashable] = {}

    def of(self, thing: Hashable) -> Hashable:
        """What stands for the class of a thing."""
        path = []
        while self.leader.setdefault(thing, thing) != thing:
            path.append(thing)
            thing = self.leader[thing]
        self.leader.update((passed, thing) for passed in path)
        return thing

    def unite(self, things: Sequence[Hashable]) -> None:
        """Make one class of the things' classes."""
        for thing in things[1:]:
            self.leader[self.of(thing)] = self.of(things[0])


def families(facts: FusionFacts) -> dict[int, Hashable]:
    """Per loop the family that its kernel belongs to: loops of two families never fuse.

    On the CPU there is one: nests of unlike loops stand side by side in one kernel (``recompile.cpu_fusion``).
    """
    flow, numels = facts.flow, Classes()
    loops = [i for i in range(len(flow.nodes)) if flow.is_op[i] and flow.kind[i] in LOOPS]
    if facts.loops_run_together:
        return dict.fromkeys(loops, 0)
    for i in loops:
        shape = facts.shape[i]
        if shape.inner > 1 and shape.reduces_rows:
            numels.unite([shape.outer, shape.numel])
    return {i: facts.shape[i] if _is_column(facts, i) else numels.of(facts.shape[i].outer) for i in loops}


def _is_column(facts: FusionFacts, i: int) -> bool:
    """Whether a loop is a reduction over columns that shares no kernel with loops over rows."""
    return not facts.loops_run_together and facts.shape[i].inner > 1 and not facts.shape[i].reduces_rows
