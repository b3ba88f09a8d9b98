"""The cut problem of a joint graph: both choices of every value priced in seconds, and bytes at a uniform price."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from recompile.dataflow import Dataflow, needed_by_backward, rebuilt_nodes
from recompile.hardware import Hardware
from recompile.joint import JointGraph, Kind, Side
from recompile.mincut import ContradictionError, CutProblem, scaled
from recompile.moves import moves_of
from recompile.planner.contradiction import contradiction

# Share of a pointwise value's own traffic that rebuilding it inside its reader costs at least (a prototype's figure
# from Inductor's kernels for an H100, where the loads are already paid by the reader).
FUSED_RECOMPUTE_SHARE = 0.02
# With this many readers a rebuilt pointwise value tends to be stored after all.
MANY_READERS = 3


@dataclass(frozen=True)
class CutNetwork:
    """Candidates are the nodes of forward that backward could need, as indices into the dataflow, ascending."""

    joint: JointGraph
    flow: Dataflow
    candidates: tuple[int, ...]
    recompute_seconds: tuple[float | None, ...]  # None: must not be recomputed
    save_seconds: tuple[float | None, ...]  # None: cannot be saved
    held_bytes: tuple[int, ...]  # what saving adds to memory: 0 for what is allocated anyway
    uses: tuple[tuple[int, int], ...]  # positions in candidates
    needed: tuple[int, ...]

    @functools.cached_property
    def _problem(self) -> CutProblem:
        return CutProblem(len(self.candidates), self.uses, self.needed)

    @functools.cached_property
    def _seconds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Costs of recomputing and of saving, infinite where forbidden; bytes."""
        recompute, save = (
            np.array([math.inf if value is None else value for value in seconds], dtype=float)
            for seconds in (self.recompute_seconds, self.save_seconds)
        )
        return recompute, save, np.array(self.held_bytes, dtype=float)

    def saved_at(
        self, price: float, forced: frozenset[int] = frozenset(), excluded: frozenset[int] = frozenset()
    ) -> frozenset[int]:
        """The nodes saved by the cheapest choice when a saved byte costs ``price`` seconds.

        ``forced`` nodes must not be recomputed: they are saved if anything needs them. ``excluded`` ones must not be
        saved.
        """
        recompute, save, held = self._seconds
        save = save + price * held
        if forced:
            recompute = np.where(self._among_candidates(forced), math.inf, recompute)
        if excluded:
            save = np.where(self._among_candidates(excluded), math.inf, save)
        costs = scaled(np.concatenate([recompute, save]))
        count = len(self.candidates)
        try:
            choice = self._problem.choose(costs[:count], costs[count:])
        except ContradictionError as error:
            path = [self.candidates[position] for position in error.path]
            raise contradiction(self.joint, self.flow, path) from None
        return frozenset(self.candidates[position] for position in choice.saved)

    def _among_candidates(self, nodes: Collection[int]) -> np.ndarray:
        """By candidate, whether it is one of the nodes."""
        found = np.zeros(len(self.flow.nodes), dtype=bool)
        found[list(nodes)] = True
        return found[list(self.candidates)]

    def cost_of(self, saved: frozenset[int]) -> tuple[float, int]:
        """Seconds of a choice at price 0, and the bytes that it saves."""
        rebuilt = rebuilt_nodes(self.flow, saved)
        recompute, save, held = self._seconds
        is_saved, is_rebuilt = self._among_candidates(saved), self._among_candidates(rebuilt)
        return float(save[is_saved].sum() + recompute[is_rebuilt].sum()), int(held[is_saved].sum())


def cut_network(joint: JointGraph, flow: Dataflow, hardware: Hardware) -> CutNetwork:
    """Build the problem. Linear in nodes and edges."""
    needed = needed_by_backward(flow)
    candidates = _ancestors(flow, needed)
    place = {node: position for position, node in enumerate(candidates)}
    free = {flow.buffer[i] for i in flow.fwd_outputs}
    readers, moves = _readers_by_buffer(flow), moves_of(flow)
    recompute, save, held = [], [], []
    for i in candidates:
        note = joint.notes[flow.nodes[i]]
        already_held = flow.buffer[i] in free or flow.is_input[flow.buffer[i]]
        held.append(0 if already_held else note.size_bytes)
        recompute.append(None if note.cannot_recompute else recompute_seconds(joint, flow, i, readers, hardware))
        seconds = 0.0 if already_held else save_seconds(flow, i, readers, moves, hardware)
        save.append(None if note.cannot_save else seconds)
    return CutNetwork(
        joint=joint,
        flow=flow,
        candidates=candidates,
        recompute_seconds=tuple(recompute),
        save_seconds=tuple(save),
        held_bytes=tuple(held),
        uses=tuple((place[a], place[i]) for i in candidates for a in flow.inputs[i] if a in place),
        needed=tuple(place[i] for i in needed),
    )


def recompute_seconds(
    joint: JointGraph, flow: Dataflow, i: int, readers: dict[int, list[int]], hardware: Hardware
) -> float:
    """What computing node i again in backward adds to the step, given what a compiler fuses."""
    note = joint.notes[flow.nodes[i]]
    if not flow.is_op[i] or flow.side[i] is not Side.FORWARD:
        return 0.0  # a view or element costs nothing; what only backward needs runs once anyway
    if flow.kind[i] is not Kind.POINTWISE:
        return note.seconds
    write = note.work.write_bytes / hardware.byte_per_s
    seconds = max(FUSED_RECOMPUTE_SHARE * write, note.work.flop / hardware.vector_flop_per_s)
    users = readers.get(flow.buffer[i], ())
    if any(flow.side[u] is Side.BACKWARD and flow.kind[u] is Kind.EXTERN for u in users):
        seconds += write
    if len(users) >= MANY_READERS:
        seconds += write / 2
    return seconds


def save_seconds(
    flow: Dataflow, i: int, readers: dict[int, list[int]], moves: tuple[tuple[int, ...], tuple[int, ...]],
    hardware: Hardware,
) -> float:  # fmt: skip
    """The traffic that keeping node i adds: a write where fusion would have avoided it, a read in backward."""
    buffer = flow.buffer[i]
    users = readers.get(buffer, ())
    forward = [u for u in users if flow.side[u] is not Side.BACKWARD]
    backward = [u for u in users if flow.side[u] is Side.BACKWARD]
    moved, (bytes_to_read, bytes_to_write) = 0, moves
    if flow.kind[buffer] is Kind.POINTWISE and all(flow.kind[u] is not Kind.EXTERN for u in forward):
        moved += bytes_to_write[buffer]
    if not any(flow.kind[u] is Kind.EXTERN for u in backward):
        moved += bytes_to_read[buffer]
    return moved / hardware.byte_per_s


def _readers_by_buffer(flow: Dataflow) -> dict[int, list[int]]:
    readers: dict[int, list[int]] = {}
    for i, reads in enumerate(flow.reads):
        for buffer in reads:
            readers.setdefault(buffer, []).append(i)
    return readers


def _ancestors(flow: Dataflow, roots: tuple[int, ...]) -> tuple[int, ...]:
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        i = pending.pop()
        if i not in seen and not flow.is_input[i]:
            seen.add(i)
            pending.extend(flow.inputs[i])
    return tuple(sorted(seen))
