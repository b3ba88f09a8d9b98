"""The relaxed problem behind the lower bounds: what a saved set costs at least, as one minimum cut.

For each value v that backward could need: r_v = 1 if backward computes it again, s_v = 1 if it is saved; from what is
saved everything needed must be rebuilt, as in ``recompile.mincut``. Moments t of the step are chosen where something is
certain (``certain``): the start of backward, the library calls e_1 ... e_m of backward's chain, its end, and forward's
chain. At e_k every value that is read at e_k or later is *held*, or computed after e_k (x_v = 1, which takes r_v = 1)
from values for which the same is true. So with a price mu(t) of a byte at each moment

    seconds + sum over t of mu(t) x live bytes at t
        >=  fixed seconds + sum over t of mu(t) x fixed bytes at t
          + sum over v of  r_v x (seconds of v's library call, its write where that is certain)
                         + s_v x (its write + bytes x mu(start of backward, forward after v is made))
                         + l_v x (its reads by loops of backward)      l_v = 1 - y_v where a loop needs v
                         + h_v x bytes x mu(e_1 ... e_d(v))            h_v = 1 - x_v where v is demanded

What a loop needs it reads from memory, or computes itself (y_v = 1, which takes r_v = 1 and a v that loops make) from
values that it needs in turn.

d(v) is the last k at which v is demanded, directly or for the sake of another value. Values with the same d form a
region in which the choice between holding and computing is the same problem at every e_k up to d, so that one copy of
it with the prices added up loses nothing; what a region's values read outside of it is taken as free. Every term is a
capacity of a cut in a graph of at most six vertices a value, two each for (r, s), (y, l) and (x, h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from recompile.channels_last import copied_for_layout
from recompile.dataflow import Dataflow, tangents_of
from recompile.joint import Kind, Side
from recompile.planner.certain import (
    LOOPS,
    Phase,
    bytes_beside_chain,
    has_call_among,
    is_made,
    is_stored,
    phase_of,
    spans,
)
from recompile.planner.network import CutNetwork, cut_network
from recompile.planner.traffic import Traffic
from recompile.slices import counted_once
from recompile.timeline import WRITES_INTO_A_COPY, Timeline
from recompile.work import name_of


@dataclass(frozen=True)
class Relaxation:
    """One graph's problem. Arrays with one entry a candidate unless said otherwise; bytes and seconds."""

    candidates: tuple[int, ...]  # nodes, as indices into the dataflow, ascending
    recompute_seconds: np.ndarray  # inf: must not be recomputed
    save_seconds: np.ndarray  # inf: cannot be saved
    load_seconds: np.ndarray  # for a loop of backward to read it from memory
    made_by_loop: np.ndarray  # a loop that reads it may compute it instead
    loaded: np.ndarray  # positions that loops of backward itself read
    saved_bytes: np.ndarray  # what saving adds to memory while it lasts
    held_bytes: np.ndarray  # what holding adds; 0 for what is counted elsewhere
    passes_through: np.ndarray  # a view, or several results at once: holds no memory of its own
    saved_from: np.ndarray  # the first k of forward's chain at which it is alive for being saved alone
    demanded_until: np.ndarray  # d: the last k of backward's chain, 0 for none
    uses: np.ndarray  # pairs (v, u), u is computed from v; positions among the candidates
    needed: np.ndarray  # positions: read by backward itself
    demanded: np.ndarray  # positions: read by backward itself at e_d or later
    fixed_seconds: float
    backward_bytes: np.ndarray  # fixed bytes at the start, e_1 ... e_m and the end of backward
    forward_bytes: np.ndarray  # fixed bytes at forward's calls

    @property
    def num_moments(self) -> int:
        return len(self.backward_bytes) + len(self.forward_bytes)


class Problem:
    """The certain facts of one graph, from which its Relaxation is put together."""

    def __init__(self, timeline: Timeline):
        self.timeline, self.flow = timeline, counted_once(timeline.flow, timeline.slices)
        flow = self.flow
        self.tangents = tangents_of(flow)
        self.outputs = frozenset(b for i in flow.fwd_outputs if not flow.is_input[b := flow.buffer[i]])
        returned = {flow.buffer[i] for i in flow.bwd_outputs}
        self.gradients = frozenset(b for b in returned if not flow.is_input[b] or b in self.tangents)
        self.forward = phase_of(timeline.facts, [Side.FORWARD], self.outputs)
        self.backward = phase_of(timeline.facts, [Side.BACKWARD], self.gradients)
        self.network: CutNetwork = cut_network(timeline.joint, flow, timeline.hardware)
        self.place = {node: position for position, node in enumerate(self.network.candidates)}
        self.forward_traffic = Traffic(timeline.facts, self.forward)
        self.backward_traffic = Traffic(timeline.facts, self.backward)

    # Time

    def call_seconds(self, i: int) -> float:
        """Seconds of op i if it is a library call; loops count by their traffic."""
        flow = self.flow
        if not flow.is_op[i] or flow.kind[i] in LOOPS:
            return 0.0
        return self.timeline.joint.notes[flow.nodes[i]].seconds

    def fixed_seconds(self) -> float:
        """Library calls, launches and traffic of both programs whatever is saved."""
        hardware = self.timeline.hardware
        calls = sum(self.call_seconds(i) for i in (*self.forward.ops, *self.backward.ops))
        launches = self.forward_traffic.num_loops + self.backward_traffic.num_loops
        candidates = frozenset(self.network.candidates)
        moved = self.forward_traffic.fixed_bytes(frozenset()) + self.backward_traffic.fixed_bytes(candidates)
        return calls + launches * hardware.launch_s + moved / hardware.byte_per_s

    def recompute_seconds(self, i: int) -> float:
        """What rebuilding node i takes at least, what it reads left out: see ``load_seconds``."""
        flow = self.flow
        by_loop = is_made(flow, i) and flow.kind[flow.op[i]] in LOOPS
        is_written = i in self.gradients or has_call_among(flow, self.backward.readers.get(i, ()))
        num_reads = 0 if flow.op[i] in flow.from_nothing else self.backward_traffic.num_reads(i)
        moved = 1 + max(0, num_reads - 1) if by_loop and is_written else 0
        return self.call_seconds(i) + self._seconds_of(moved * flow.size_bytes[i])

    def save_seconds(self, i: int) -> float:
        """What saving node i takes at least before backward: its write where nothing else forces that."""
        flow = self.flow
        if not is_made(flow, i):
            return 0.0
        maker = flow.op[i]
        runs_in_forward = flow.side[maker] is Side.FORWARD
        is_written_anyway = flow.kind[maker] not in LOOPS or (runs_in_forward and is_stored(flow, self.forward, i))
        runs_for_it = not runs_in_forward and len(flow.makes[maker]) == 1
        written = self._seconds_of(0 if is_written_anyway else flow.size_bytes[i])
        return written + (self.call_seconds(maker) if runs_for_it else 0.0)

    def load_seconds(self, i: int) -> float:
        """What loops of backward take to read node i from memory, as many kernels as certainly do, and one at least."""
        moved = max(1, self.backward_traffic.num_reads(i)) if is_made(self.flow, i) else 0
        return self._seconds_of(moved * self.flow.size_bytes[i])

    def is_loaded(self, i: int) -> bool:
        """Whether a loop of backward itself reads node i."""
        readers = self.backward.readers.get(i, ())
        return is_made(self.flow, i) and any(self.flow.kind[reader] in LOOPS for reader in readers)

    def _seconds_of(self, moved_bytes: int) -> float:
        return moved_bytes / self.timeline.hardware.byte_per_s

    # Memory in backward

    def backward_demand(self) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
        """Per candidate that backward reads: until which k it is demanded, and the ks at which it is surely alive.

        A value that is stored if it is rebuilt, read at e_k or before and again at e_k or later, is alive at e_k
        whether saved or rebuilt. Only before that is there a choice.
        """
        flow, phase, last = self.flow, self.backward, len(self.backward.chain)
        until: dict[int, int] = {}
        alive: dict[int, tuple[int, int]] = {}
        for i in self.network.candidates:
            readers = phase.readers.get(i, ())
            if not is_made(flow, i) or not (readers or i in self.gradients) or i in self.outputs:
                continue
            end = last if i in self.gradients else phase.last_read(i)
            start = phase.first_read(i)
            stored = flow.kind[flow.op[i]] is not Kind.POINTWISE or has_call_among(flow, readers) or i in self.gradients
            stored = stored and flow.op[i] not in flow.from_nothing
            until[i] = end
            if stored and start <= end:
                alive[i], until[i] = (start, end), start - 1
        return until, alive

    def regions(self, until: dict[int, int]) -> list[int]:
        """Per candidate d: the last k at which it is demanded, by backward or by what is computed from it."""
        demanded = [until.get(i, 0) for i in self.network.candidates]
        for value, user in sorted(self.network.uses, key=lambda use: -use[1]):
            demanded[value] = max(demanded[value], demanded[user])
        return demanded

    def backward_bytes(self, alive_candidates: dict[int, tuple[int, int]]) -> np.ndarray:
        """Fixed bytes at the start of backward, at its calls and at its end; zero where backward runs nothing."""
        flow, phase, size, last = self.flow, self.backward, self.flow.size_bytes, len(self.backward.chain)
        total = np.zeros(last + 2)
        if not any(flow.kind[i] is not Kind.VALUE for readers in phase.readers.values() for i in readers):
            return total
        held = sum(size[b] for b in self.outputs)
        copies = {i: size[i] for i in copied_for_layout(flow)}
        total += held
        total[0] += sum(size[t] for t in self.tangents) + sum(copies.values())
        lives = [(size[t], 1, self._release(t)) for t in self.tangents]
        lives += [(size[i], 1, phase.last_read(i)) for i in copies]
        alive = spans(flow, phase)
        lives += [(size[b], start, end) for b, (start, end) in (*alive.items(), *alive_candidates.items())]
        for bytes_, start, end in lives:
            total[max(1, start) : end + 1] += bytes_
        total[1 : last + 1] += bytes_beside_chain(flow, phase, alive)[1:]
        total[1 : last + 1] -= written_over(flow, phase)
        total[last + 1] += sum(size[b] for b in self.gradients - self.outputs)
        return total

    def _release(self, tangent: int) -> int:
        """The last k at which a tangent is alive; one that is returned, or never read, stays."""
        unread = not self.backward.readers.get(tangent)
        return len(self.backward.chain) if unread or tangent in self.gradients else self.backward.last_read(tangent)

    # Memory in forward

    def forward_bytes(self, alive: dict[int, tuple[int, int]]) -> np.ndarray:
        """Fixed bytes at the calls of forward's chain."""
        flow, last = self.flow, len(self.forward.chain)
        total = np.zeros(last + 1) + sum(flow.size_bytes[i] for i in copied_for_layout(flow))
        for buffer, (start, end) in alive.items():
            total[start : end + 1] += flow.size_bytes[buffer]
        return total[1:] - written_over(flow, self.forward)

    def saved_from(self, alive: dict[int, tuple[int, int]]) -> list[int]:
        """Per candidate the place in forward's chain from which it is alive only because it is saved."""
        phase, last = self.forward, len(self.forward.chain)
        found = []
        for i in self.network.candidates:
            made = (
                is_made(self.flow, i)
                and self.flow.op[i] in phase.precedes
                and self.flow.op[i] not in self.flow.from_nothing
            )
            start = phase.precedes[self.flow.op[i]] if made else last + 1
            found.append(max(start, alive.get(i, (0, 0))[1] + 1) - 1)
        return found


def written_over(flow: Dataflow, phase: Phase) -> np.ndarray:
    """Per call of the chain the bytes of results that may take an input's place: scatters into what they own."""
    is_in_place = [name_of(flow.nodes[i].target) in WRITES_INTO_A_COPY for i in phase.chain]
    made = [sum(flow.size_bytes[b] for b in flow.makes[i]) for i in phase.chain]
    return np.array(made, dtype=float) * np.array(is_in_place, dtype=float)


def relax(timeline: Timeline) -> Relaxation:
    """The relaxed problem of a graph. Linear in nodes and edges, but for sorting."""
    problem = Problem(timeline)
    flow, network = problem.flow, problem.network
    until, alive = problem.backward_demand()
    demanded = problem.regions(until)
    in_forward = spans(flow, problem.forward)
    nodes = network.candidates
    size = [flow.size_bytes[i] if is_made(flow, i) and i not in problem.outputs else 0 for i in nodes]
    taken = [i in alive and d >= alive[i][0] for i, d in zip(nodes, demanded, strict=True)]
    recompute, save = network.recompute_seconds, network.save_seconds
    return Relaxation(
        candidates=nodes,
        recompute_seconds=_seconds(nodes, recompute, problem.recompute_seconds),
        save_seconds=_seconds(nodes, save, problem.save_seconds),
        load_seconds=np.array([problem.load_seconds(i) for i in nodes], dtype=float),
        made_by_loop=np.array([flow.kind[flow.op[i]] in LOOPS or _passes_through(flow, i) for i in nodes], dtype=bool),
        loaded=np.array([p for p, i in enumerate(nodes) if problem.is_loaded(i)], dtype=np.int64),
        saved_bytes=np.array(size, dtype=float),
        held_bytes=np.array([0 if free else b for b, free in zip(size, taken, strict=True)], dtype=float),
        passes_through=np.array([_passes_through(flow, i) for i in nodes], dtype=bool),
        saved_from=np.array(problem.saved_from(in_forward), dtype=np.int64),
        demanded_until=np.array(demanded, dtype=np.int64),
        uses=np.array(network.uses, dtype=np.int64).reshape(-1, 2),
        needed=np.array(network.needed, dtype=np.int64),
        demanded=np.array([p for p, i in enumerate(nodes) if until.get(i, -1) == demanded[p] > 0], dtype=np.int64),
        fixed_seconds=problem.fixed_seconds(),
        backward_bytes=problem.backward_bytes(alive),
        forward_bytes=problem.forward_bytes(in_forward),
    )


def _seconds(nodes: Sequence[int], allowed: Sequence[float | None], seconds: Callable[[int], float]) -> np.ndarray:
    return np.array([np.inf if a is None else seconds(i) for i, a in zip(nodes, allowed, strict=True)], dtype=float)


def _passes_through(flow: Dataflow, i: int) -> bool:
    """Views share their base's memory; an op with several results holds none but theirs."""
    return flow.kind[i] is Kind.VIEW or (flow.buffer[i] == i and flow.size_bytes[i] > 0 and not is_made(flow, i))
