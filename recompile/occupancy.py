"""What lies in memory during a simulated step: bytes of each kind at every kernel, and every buffer at both peaks.

The simulation says how much is alive, this says what. It goes through the kernels of one plan once more, in linear
time, and its sums agree with the simulation's to the byte.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from recompile.channels_last import copied_for_layout
from recompile.dataflow import Dataflow, backward_order, forward_order, tangents_of
from recompile.kernels import Kernel
from recompile.lifetimes import DIES, IN_STORAGE, WRITTEN, by_kernel, fates, in_sequence
from recompile.slices import Lives, storages_in
from recompile.stretches import backward_stretches, forward_stretches, stretches_of
from recompile.timeline import Simulation, Timeline, recomputed_ops


class Use(enum.Enum):
    """What a buffer is there for."""

    SAVED = "saved"  # kept from forward for backward
    REBUILT = "rebuilt"  # computed again in backward
    GRADIENT = "gradient"  # returned by backward
    OUTPUT = "output"  # returned by forward, which the caller may hold
    TEMPORARY = "temporary"  # all else: activations on their way, gradients of activations


@dataclass(frozen=True, slots=True)
class Resident:
    """A buffer that is alive; ``node`` is the index of the node that owns it."""

    node: int
    size_bytes: int
    use: Use


@dataclass(frozen=True)
class Peak:
    """The kernel of a phase at which most is alive, and all that is, the largest first.

    ``shared_bytes``: by how much the residents' bytes exceed ``live_bytes``, because results are written in place over
    values that die there; negative where the kernel needs memory beyond its results.
    """

    phase: str
    moment: int  # its place among the simulation's kernels
    node: int  # the kernel's first op
    live_bytes: int
    residents: tuple[Resident, ...]

    @property
    def shared_bytes(self) -> int:
        return sum(resident.size_bytes for resident in self.residents) - self.live_bytes


@dataclass(frozen=True)
class Occupancy:
    """``bytes_of[use]``: one entry a kernel, forward's first; over all uses they add up to the simulation's."""

    bytes_of: dict[Use, tuple[int, ...]]
    peaks: tuple[Peak, ...]


@dataclass(frozen=True)
class Program:
    """One phase: its kernels, what becomes of the buffers they touch, and what is alive when it begins."""

    phase: str
    kernels: list[Kernel]
    fates: list[bytes]
    alive: dict[int, Use]
    use_when_made: dict[int, Use]  # of buffers that are no temporaries
    loops_run_together: bool  # so that what dies in one is freed after the last before a library call
    lives: list[Lives] = field(default_factory=list)  # of what has slices in it

    def touched(self, k: int) -> tuple[list[int], list[int]]:
        """The buffers that kernel k allocates, and those that are freed after it."""
        by_itself = [
            (b, bits)
            for b, bits in zip(self.kernels[k].touches.tolist(), self.fates[k], strict=True)
            if not bits & IN_STORAGE
        ]
        made = [b for b, bits in by_itself if bits & WRITTEN]
        dead = [b for b, bits in by_itself if bits & DIES]
        made += [life.whole for life in self.lives if life.birth == k]
        return made, dead + [life.whole for life in self.lives if life.death == k]


def occupancy_of(timeline: Timeline, saved: frozenset[int], simulation: Simulation) -> Occupancy:
    """What is alive when the node indices ``saved`` are kept; ``simulation`` is the timeline's of the same."""
    columns: dict[Use, list[int]] = {use: [] for use in Use}
    peaks, start = [], 0
    for program in (forward_of(timeline, saved), backward_of(timeline, saved)):
        live_bytes = simulation.live_bytes[start : start + len(program.kernels)]
        peak = follow(program, timeline.flow.size_bytes, live_bytes, columns)
        if peak is not None:
            moment, residents = peak
            node = program.kernels[moment].ops[0].op
            peaks.append(Peak(program.phase, start + moment, node, live_bytes[moment], residents))
        start += len(program.kernels)
    return Occupancy({use: tuple(column) for use, column in columns.items()}, tuple(peaks))


def follow(
    program: Program, size_bytes: Sequence[int], live_bytes: Sequence[int], columns: dict[Use, list[int]]
) -> tuple[int, tuple[Resident, ...]] | None:
    """Append bytes by use for every kernel; the first kernel at the highest point, with its residents."""
    highest = max(range(len(live_bytes)), key=live_bytes.__getitem__, default=None)
    there, made, found = dict(program.alive), {}, None  # what was there may be computed again beside it: an output
    held = dict.fromkeys(Use, 0)
    for buffer, use in there.items():
        held[use] += size_bytes[buffer]
    dead: list[int] = []

    def free() -> None:
        for buffer in dead:
            held[(made if buffer in made else there).pop(buffer)] -= size_bytes[buffer]
        dead.clear()

    for k, kernel in enumerate(program.kernels):
        is_freed_at_once = kernel.is_extern or not program.loops_run_together
        if is_freed_at_once:
            free()
        new, last_used = program.touched(k)
        for buffer in new:
            made[buffer] = program.use_when_made.get(buffer, Use.TEMPORARY)
            held[made[buffer]] += size_bytes[buffer]
        for use, count in split_exactly(held, live_bytes[k]).items():
            columns[use].append(count)
        if k == highest:
            alive = [Resident(b, size_bytes[b], use) for b, use in [*there.items(), *made.items()]]
            found = k, tuple(sorted(alive, key=_largest_first))
        dead += last_used
        if is_freed_at_once:
            free()
    return found


def split_exactly(held: dict[Use, int], live_bytes: int) -> dict[Use, int]:
    """Bytes by use with the sum that the simulation gives.

    What a kernel needs beyond its results is temporary. What it writes in place counts once: temporaries give way
    first, then what dies in backward.
    """
    excess = sum(held.values()) - live_bytes
    shown = dict(held)
    shown[Use.TEMPORARY] += max(0, -excess)
    for use in (Use.TEMPORARY, Use.REBUILT, Use.SAVED, Use.GRADIENT, Use.OUTPUT):
        given = min(max(0, excess), shown[use])
        shown[use] -= given
        excess -= given
    return shown


def forward_of(timeline: Timeline, saved: frozenset[int]) -> Program:
    """The program of forward, as the simulation runs it."""
    flow = timeline.flow
    handed_over, outputs = handed_over_by(flow, saved), outputs_of(flow)
    kept = frozenset(handed_over | outputs)
    uses = dict.fromkeys(outputs, Use.OUTPUT) | dict.fromkeys(handed_over - outputs, Use.SAVED)
    copies = dict.fromkeys(copied_for_layout(flow), Use.SAVED)
    numbers = forward_stretches(timeline.facts)
    return program_of(timeline, "forward", forward_order(flow, saved), numbers, kept, frozenset(), copies, uses, ())


def backward_of(timeline: Timeline, saved: frozenset[int]) -> Program:
    """The program of backward; rebuilt are values whose op ran in forward already."""
    flow = timeline.flow
    handed_over, outputs = handed_over_by(flow, saved), outputs_of(flow)
    tangents = frozenset(tangents_of(flow))
    gradients = frozenset(
        b for b in (flow.buffer[i] for i in flow.bwd_outputs) if not flow.is_input[b] or b in tangents
    )
    copies = copied_for_layout(flow)
    held = dict.fromkeys(tangents, Use.TEMPORARY) | dict.fromkeys([*handed_over, *copies], Use.SAVED)
    releasable = (handed_over - outputs) | tangents | frozenset(copies)
    again = frozenset(recomputed_ops(flow, saved))
    rebuilt = [b for op in again for b in flow.makes[op]]
    uses = dict.fromkeys(rebuilt, Use.REBUILT) | dict.fromkeys(gradients, Use.GRADIENT)
    held |= dict.fromkeys(outputs, Use.OUTPUT)
    numbers, order = backward_stretches(timeline.facts), backward_order(flow, saved)
    return program_of(timeline, "backward", order, numbers, gradients, handed_over, held, uses, releasable)


def program_of(
    timeline: Timeline, phase: str, order: Sequence[int], numbers: tuple[np.ndarray, np.ndarray],
    kept: frozenset[int], at_hand: frozenset[int], alive: dict[int, Use], uses: dict[int, Use],
    releasable: Collection[int],
) -> Program:  # fmt: skip
    """Kernels and lifetimes, as in ``Timeline.simulate``."""
    indices = np.array(order, dtype=np.int64)
    kernels = timeline.stretches.schedule(indices, stretches_of(indices, numbers), kept, at_hand).kernels()
    schedule = in_sequence(kernels)
    found = fates(schedule, len(timeline.flow.nodes), kept, releasable)
    found, lives = storages_in(schedule, found, timeline.flow, timeline.slices, kept)
    return Program(phase, kernels, by_kernel(found, kernels), alive, uses, timeline.facts.loops_run_together, lives)


def handed_over_by(flow: Dataflow, saved: frozenset[int]) -> frozenset[int]:
    """The buffers behind the saved values, inputs left out."""
    return frozenset(flow.buffer[i] for i in saved if not flow.is_input[flow.buffer[i]])


def outputs_of(flow: Dataflow) -> frozenset[int]:
    """The buffers that forward returns, inputs left out."""
    return frozenset(flow.buffer[i] for i in flow.fwd_outputs if not flow.is_input[flow.buffer[i]])


def _largest_first(resident: Resident) -> tuple[int, int]:
    return -resident.size_bytes, resident.node
