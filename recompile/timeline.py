"""Live bytes and seconds of forward and backward for a set of saved values, without building a graph.

What is counted is the increase over what was allocated when forward started: saved values, forward's outputs (the
caller may hold them), temporaries and gradients. Inputs and parameters are not in it. Saved values and tangents are
released after their last use in backward, as AOTAutograd's boxed calls do.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
import torch

from recompile.channels_last import biased_apart, copied_for_layout, forward_convolutions, laid_anew, on_cpu
from recompile.dataflow import (
    Dataflow,
    backward_order,
    dataflow_of,
    forward_order,
    in_forward,
    rebuilt_nodes,
    tangents_of,
)
from recompile.hardware import Hardware
from recompile.inlining import FusionFacts, StoredOp, fusion_facts
from recompile.joint import JointGraph, Kind
from recompile.kernels import Batch, Kernel, ancestors_inside
from recompile.library_memory import allocated_inside
from recompile.lifetimes import DIES, FROM_LOOP, IN_STORAGE, WRITTEN, fates
from recompile.loops import moving
from recompile.moves import moves_of
from recompile.slices import slices_of, storages_in
from recompile.splits import more_kernels
from recompile.stretches import Stretches, backward_stretches, forward_stretches, stretches_of
from recompile.work import name_of, words

# Ops that Inductor lowers to a copy of their first argument and writes into; a base that nobody reads afterwards (the
# zeros under an embedding's gradient) is not copied (``index_put``, ``scatter`` in torch/_inductor/lowering.py).
WRITES_INTO_A_COPY = words(
    "_unsafe_index_put _unsafe_masked_index_put_accumulate index_add index_put scatter scatter_add scatter_reduce"
)
MOST_STEPS = 200_000  # kept for other programs, half a KiB each; 21,000 after the search of a GPT of 96 layers


@dataclass(frozen=True, slots=True)
class Moment:
    """One kernel of the step: ``live_bytes`` are allocated while it runs."""

    phase: str  # "forward" or "backward"
    node: int  # the kernel's first op, an index into the dataflow
    live_bytes: int
    seconds: float


@dataclass(frozen=True)
class Simulation:
    """A predicted step: one entry a kernel in ``nodes``, ``live_bytes`` and ``seconds``, forward's first."""

    num_forward: int
    nodes: array[int]
    live_bytes: array[int]
    seconds: array[float]
    saved_bytes: int

    @functools.cached_property
    def moments(self) -> tuple[Moment, ...]:
        rows = zip(self.nodes, self.live_bytes, self.seconds, strict=True)
        return tuple(Moment("forward" if k < self.num_forward else "backward", *row) for k, row in enumerate(rows))

    @functools.cached_property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @functools.cached_property
    def step_seconds(self) -> float:
        return sum(self.seconds)

    def peak_of(self, phase: str) -> int:
        return max((moment.live_bytes for moment in self.moments if moment.phase == phase), default=0)


# Places in ``Step.figures``: the first op; bytes by which memory grows when it begins and shrinks when it has ended; 1
# for a generated loop; 1 for one that splits reductions or may finish some.
NODE, GROWS, SHRINKS, IS_LOOP, OF_SPLITS = range(5)


@dataclass(frozen=True, slots=True)
class Step:
    """What running a kernel does to memory, and its time."""

    figures: tuple[int, ...]  # see NODE and the others
    seconds: float
    split: frozenset[int] = frozenset()  # reductions of it that a further kernel finishes
    finishes: frozenset[int] = frozenset()  # reductions that it would finish if another kernel split them
    joins: frozenset[int] = frozenset()  # those of them beside whose other readers it can run, in one kernel


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The steps of a batch of kernels, and their figures as arrays."""

    steps: tuple[Step, ...]
    figures: np.ndarray  # a row for NODE and each of the others, a column for each step
    seconds: np.ndarray


NO_STEPS = Steps((), np.zeros((OF_SPLITS + 1, 0), dtype=np.int64), np.zeros(0))


class Timeline:
    """Simulates steps of one graph on one hardware; what does not depend on the plan is computed once."""

    def __init__(self, joint: JointGraph, hardware: Hardware):
        self.joint = joint
        self.hardware = hardware
        self.flow: Dataflow = dataflow_of(joint)
        self.facts: FusionFacts = fusion_facts(joint, self.flow)
        self._tangents = frozenset(tangents_of(self.flow))
        self._copied_for_layout = copied_for_layout(self.flow)
        kinds = self.flow.kind
        self._written_over = {
            i: self.flow.buffer[self.flow.inputs[i][0]]
            for i, node in enumerate(self.flow.nodes)
            if name_of(node.target) in WRITES_INTO_A_COPY
        }
        self._bytes_to_read, self._bytes_to_write = moves_of(self.flow)
        self._laid_anew = laid_anew(self.flow)
        self._copied_bias = copied_biases(joint, self.flow)
        self._inside = {self.flow.index[node]: count for node, count in allocated_inside(joint).items()}
        self._seconds_alone = {  # what runs outside of generated loops; sizes and tuples run nothing
            i: joint.notes[node].seconds
            for i, node in enumerate(self.flow.nodes)
            if kinds[i] in (Kind.EXTERN, Kind.VALUE)
        }
        for i in biased_apart(self.flow):
            self._seconds_alone[i] += self._seconds_to_move(2 * self.flow.size_bytes[i])
        self._copying_s = 0.0  # on a GPU; what the CPU takes is left out
        if not on_cpu(self.flow):
            self._copying_s = sum(self._seconds_to_move(2 * self.flow.size_bytes[i]) for i in self._copied_for_layout)
        self._more_kernels = more_kernels(self.flow, self.facts, hardware)
        self.stretches = Stretches(self.facts)
        self._numbers = {"forward": forward_stretches(self.facts), "backward": backward_stretches(self.facts)}
        self.slices = slices_of(self.flow)
        self._convolutions = frozenset(forward_convolutions(self.flow))
        self._steps: dict[tuple[Kernel, bytes, bool], Step] = {}
        self._batches: dict[tuple[Batch, bytes, bool], Steps] = {}
        self._outputs = frozenset(
            b for b in map(self.flow.buffer.__getitem__, self.flow.fwd_outputs) if not self.flow.is_input[b]
        )
        returned = {self.flow.buffer[i] for i in self.flow.bwd_outputs}
        self._gradients = frozenset(b for b in returned if not self.flow.is_input[b] or b in self._tangents)

    def simulate(self, saved: frozenset[int]) -> Simulation:
        """The step when exactly the node indices ``saved`` (and inputs) are handed to backward."""
        flow, size = self.flow, self.flow.size_bytes
        handed_over = {b for b in {flow.buffer[i] for i in saved} if not flow.is_input[b]}
        freed = handed_over - self._outputs
        copies = {i: size[i] for i in self._copied_for_layout}
        forward = self._run(
            "forward", forward_order(flow, saved), handed_over | self._outputs, {}, sum(copies.values())
        )
        releasable = {b: size[b] for b in freed} | {t: size[t] for t in self._tangents} | copies
        held = sum(size[b] for b in self._outputs)
        backward = self._run(
            "backward", backward_order(flow, saved), self._gradients, releasable, held, frozenset(handed_over)
        )
        nodes, live_bytes, seconds = (np.concatenate(pair) for pair in zip(forward, backward, strict=True))
        if len(forward[0]) and self._copying_s:  # forward begins with the copies
            seconds[0] += self._copying_s
        # A search keeps hundreds of plans: numbers, not objects.
        columns = array("q", nodes.tobytes()), array("q", live_bytes.tobytes()), array("d", seconds.tobytes())
        return Simulation(len(forward[0]), *columns, sum(size[b] for b in freed) + sum(copies.values()))

    def _run(
        self, phase: str, program: Sequence[int], kept: Collection[int], releasable: dict[int, int], held_bytes: int,
        at_hand: frozenset[int] = frozenset(),
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
        """One program, its kernels' first ops, live bytes and seconds: ``kept`` buffers outlive it, ``releasable`` ones
        live at its start and die at their last use.

        A library call makes all its results; those that are ``at_hand`` already it drops at once.
        """
        indices = np.array(program, dtype=np.int64)
        schedule = self.stretches.schedule(indices, stretches_of(indices, self._numbers[phase]), kept, at_hand)
        found, lives, start = fates(schedule, len(self.flow.nodes), kept, releasable.keys()), [], 0
        if self.slices:
            found, lives = storages_in(schedule, found, self.flow, self.slices, kept)
        if len(self._steps) > MOST_STEPS:
            self._steps.clear()
            self._batches.clear()
        parts, lays_anew = [NO_STEPS], self._lays_anew(phase, program)
        for batch in schedule.batches:
            key = batch, found[start : start + len(batch.uses)], lays_anew
            parts.append(self._batches.get(key) or self._new_steps(*key))
            start += len(batch.uses)
        figures = np.concatenate([part.figures for part in parts], axis=1)[:, schedule.order]
        for _, size_bytes, birth, death in lives:
            figures[GROWS, birth] += size_bytes
            if death is not None:
                figures[SHRINKS, death] += size_bytes
        seconds = np.concatenate([part.seconds for part in parts])[schedule.order]
        of_splits = np.flatnonzero(figures[OF_SPLITS])
        if len(of_splits):
            steps = list(chain.from_iterable(part.steps for part in parts))
            self._join_ends(seconds, {k: steps[i] for k, i in zip(of_splits, schedule.order[of_splits], strict=True)})
        return figures[NODE], self._live_bytes(figures, held_bytes + sum(releasable.values())), seconds

    def _live_bytes(self, figures: np.ndarray, live: int) -> np.ndarray:
        """What is alive during each kernel, ``live`` when the first begins."""
        freed = figures[SHRINKS].cumsum()  # when the kernel has ended
        before = freed - figures[SHRINKS]
        if self.facts.loops_run_together:  # a loop's are freed when the next library call begins
            is_loop, numbers = figures[IS_LOOP] > 0, np.arange(1, len(before) + 1)
            last_call = np.maximum.accumulate(np.where(is_loop, 0, numbers))
            before[is_loop] = np.concatenate([[0], freed])[last_call[is_loop]]
        return live + figures[GROWS].cumsum() - before

    def _join_ends(self, seconds: np.ndarray, steps: dict[int, Step]) -> None:
        """Correct seconds by kernel: the last one of a split reduction is the next that goes over its results.

        That takes the launch of one kernel away, however many reductions it finishes, and that of each further kernel
        that goes over the results and needs nothing that is made later. ``steps``: those that split or may finish.
        """
        split, finished = set(), set()
        for k, step in steps.items():
            if step.finishes and not (split.isdisjoint(step.finishes) and finished.isdisjoint(step.joins)):
                seconds[k] -= self.hardware.launch_s
                finished |= split & step.finishes
                split -= step.finishes
            split |= step.split

    def _new_steps(self, batch: Batch, found: bytes, lays_anew: bool) -> Steps:
        """What a batch does when this becomes of the buffers that its kernels use; see ``fates``."""
        ends = accumulate(batch.counts.tolist(), initial=0)
        parts = [found[start:end] for start, end in pairwise(ends)]
        keys = [(kernel, part, lays_anew) for kernel, part in zip(batch.kernels, parts, strict=True)]
        steps = tuple([self._steps.get(key) or self._new_step(*key) for key in keys])
        figures = np.array([step.figures for step in steps], dtype=np.int64).reshape(-1, OF_SPLITS + 1).T
        result = Steps(steps, figures, np.array([step.seconds for step in steps]))
        if not self.facts.loops_run_together:  # else all of a program is one batch, which no other has
            self._batches[batch, found, lays_anew] = result
        return result

    def _lays_anew(self, phase: str, program: Sequence[int]) -> bool:
        """Whether the program has ``laid_anew`` copied: backward only if it rebuilds a convolution's result.

        Without a convolution of forward Inductor chooses no layout for a graph, so what ``convolution_backward`` reads
        is written as it was traced (torch/_inductor/kernel/conv.py ``constrain_conv_bwd_to_fx_strides``).
        """
        return bool(self._laid_anew) and (phase == "forward" or not self._convolutions.isdisjoint(program))

    def _new_step(self, kernel: Kernel, fate: bytes, lays_anew: bool) -> Step:
        """What the kernel does when this becomes of the buffers that it touches; see ``fates``."""
        size = self.flow.size_bytes
        fates = list(zip(kernel.touches.tolist(), fate, strict=True))
        written = [b for b, bits in fates if bits & WRITTEN]
        made = [b for b, bits in fates if bits & WRITTEN and not bits & IN_STORAGE]
        dying = [b for b, bits in fates if bits & DIES]
        anew = self._laid_anew if lays_anew else frozenset()
        first = kernel.ops[0]
        dropped = sum(size[b] for b in self.flow.makes[first.op] if b not in first.makes) if kernel.is_extern else 0
        bias, copied_bytes = self._copied_bias.get(first.op, (None, 0))
        if not any(b == bias and bits & FROM_LOOP for b, bits in fates):
            copied_bytes = 0
        laid_anew_bytes = sum(size[b] for b in made if b in anew)
        split = frozenset([op.op for op in kernel.ops if op.op in self._more_kernels])
        finishes = self._finishes(kernel)
        passing = dropped + copied_bytes + laid_anew_bytes + self._inside.get(first.op, 0)
        if not self.hardware.counts_fused:
            passing -= self._bytes_reused(kernel, made, dying, anew)
        elif not kernel.is_extern:
            passing += sum(size[b] for op in kernel.ops for b in op.makes if b not in written)
        grows, shrinks = (sum(size[b] for b in buffers) + passing for buffers in (made, dying))
        step = Step(
            figures=(first.op, grows, shrinks, int(not kernel.is_extern), int(bool(split or finishes))),
            seconds=self._seconds(kernel, written, dying)
            + (2 * copied_bytes + laid_anew_bytes) / self.hardware.byte_per_s,
            split=split,
            finishes=finishes,
            joins=frozenset([i for i in finishes if self._needs_nothing_after(kernel, i)]),
        )
        self._steps[kernel, fate, lays_anew] = step
        return step

    def _finishes(self, kernel: Kernel) -> frozenset[int]:
        """The split reductions that the kernel goes over the results of, one by one."""
        ops = {self.flow.op[b] for b in kernel.reads}.intersection(self._more_kernels)
        return frozenset(i for i in ops if kernel.shape.inner == 1 and self.facts.shape[i].outer == kernel.shape.outer)

    def _needs_nothing_after(self, kernel: Kernel, i: int) -> bool:
        """Whether all that the kernel reads is there when op i has run, as far as the order of the graph tells."""
        return all(self.flow.is_input[b] or self.flow.op[b] <= i for b in kernel.reads.difference(kernel.makes))

    def _bytes_reused(
        self, kernel: Kernel, made: Sequence[int], dying: Sequence[int], laid_anew: Collection[int]
    ) -> int:
        """Bytes of results written over inputs that die in the same kernel (Inductor's in-place buffers).

        A result may take an input's place when its op reads it and every other reader in the kernel runs before it.
        Tangents are the caller's: nothing is written over them.
        """
        size = self.flow.size_bytes
        free = [b for b in dying if b not in kernel.makes and b not in self._tangents]
        if kernel.is_extern:
            base = self._written_over.get(kernel.ops[0].op)
            return size[base] if base in free and any(size[b] == size[base] for b in made) else 0
        if not free or not made:
            return 0
        before = ancestors_inside(kernel)
        makers = {buffer: k for k, op in enumerate(kernel.ops) for buffer in op.makes}
        reused = 0
        for buffer in sorted(made):
            maker = makers[buffer]
            allowed = before[maker] | 1 << maker
            for b in free if buffer not in laid_anew else ():
                readers = sum(1 << k for k, op in enumerate(kernel.ops) if b in op.reads)
                is_there = b in kernel.ops[maker].reads and is_read_in_place(kernel.ops[maker], b)
                if size[b] == size[buffer] and is_there and readers & ~allowed == 0:
                    free.remove(b)
                    reused += size[buffer]
                    break
        return reused

    def _seconds(self, kernel: Kernel, written: Sequence[int], spilled: Collection[int]) -> float:
        """Roofline of a kernel: an extern's own, else the larger of traffic and arithmetic, plus a launch.

        What it spills is written, and read again in a later pass over the same rows; see ``Hardware.counts_spills``. A
        reduction's result is written alone: what C++ reads in the next nest of loops is in the cache still.
        """
        if kernel.is_extern:
            return self._seconds_alone.get(kernel.ops[0].op, self.hardware.launch_s)
        read, write = self._bytes_to_read, self._bytes_to_write
        spilled = frozenset(b for b in spilled if not self._is_reduced(b))
        moved = sum(read[b] for b in kernel.reads.difference(kernel.makes))
        moved += sum(write[b] for b in written if b not in spilled)
        if self.hardware.counts_spills:
            moved += sum(write[b] + read[b] for b in written if b in spilled)
        members = frozenset().union(*(op.members for op in kernel.ops))
        flop = sum(self.facts.flop[i] for i in members)
        seconds = max(moved / self.hardware.byte_per_s, flop / self.hardware.vector_flop_per_s)
        num_launches = 1 + sum(self._more_kernels.get(op.op, 0) for op in kernel.ops)
        return seconds + num_launches * self.hardware.launch_s

    def _is_reduced(self, buffer: int) -> bool:
        return self.flow.kind[self.flow.op[buffer]] is Kind.REDUCTION

    def _seconds_to_move(self, moved_bytes: int) -> float:
        """A loop of its own that computes nothing to speak of."""
        return moved_bytes / self.hardware.byte_per_s + self.hardware.launch_s


def is_read_in_place(op: StoredOp, buffer: int) -> bool:
    """Whether an op reads a buffer element by element as it writes its result; on a GPU that is taken for granted."""
    walks = [walk for b, walk in op.walks if b == buffer]
    return all(len(moving(walk)) <= 1 for walk in walks)


def copied_biases(joint: JointGraph, flow: Dataflow) -> dict[int, tuple[int, int]]:
    """Per backward of memory-efficient attention with an expanded bias: the buffer behind it, bytes of it in full.

    Inductor writes the expanded bias out where a loop of the same program makes it: ``sdpa_constraint`` in
    torch/_inductor/lowering.py keeps the expansion for forward's call and for inputs alone.
    """
    found = {}
    for i, node in enumerate(flow.nodes):
        if node.target is torch.ops.aten._scaled_dot_product_efficient_attention_backward.default:
            bias = node.args[4]
            val = bias.meta["val"] if bias is not None else None
            if val is not None and any(
                not stride and size != 1 for size, stride in zip(val.shape, val.stride(), strict=True)
            ):
                found[i] = flow.buffer[flow.index[bias]], joint.notes[bias].numel * val.dtype.itemsize
    return found


def recomputed_ops(flow: Dataflow, saved: frozenset[int]) -> list[int]:
    """Ops that run twice: in forward, and again in backward. What runs only in backward is no recomputation."""
    runs_in_forward = in_forward(flow, saved)
    return sorted(i for i in rebuilt_nodes(flow, saved) if flow.is_op[i] and runs_in_forward[i])
