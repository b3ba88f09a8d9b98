"""The joint graph as integers: which op runs, which buffers it reads and makes. Views vanish into the buffers behind
them.

Computed once per graph; the planner and the timeline work on it for every plan they try.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.fx as fx

from recompile.joint import JointGraph, Kind, Side
from recompile.rules import written_arguments
from recompile.torch_private import is_tangent
from recompile.work import looked_at


@dataclass(frozen=True, eq=False)
class Dataflow:
    """Nodes by index in graph order; a *buffer* is named by the index of the node that first owned its storage.

    ``reads[i]``: buffers whose contents op i reads. ``makes[i]``: buffers op i allocates (itself, or the elements
    picked out of it). ``after[i]``: the ops that made what op i reads, and ops it must follow for its arguments'
    sake. An index that is a view, an input or an element has empty ``makes`` and is no op.
    """

    nodes: tuple[fx.Node, ...]
    index: dict[fx.Node, int]
    kind: tuple[Kind, ...]
    side: tuple[Side, ...]
    buffer: tuple[int, ...]  # node -> the buffer behind its value
    size_bytes: tuple[int, ...]  # by buffer
    numel: tuple[int, ...]  # by node: elements of its (first) result
    op: tuple[int, ...]  # node -> the op that computes it (itself; the parent, for an element)
    inputs: tuple[tuple[int, ...], ...]  # by node: its argument nodes
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    is_op: tuple[bool, ...]
    is_input: tuple[bool, ...]
    is_static: tuple[bool, ...]  # parameters and buffers
    fwd_outputs: tuple[int, ...]
    bwd_outputs: tuple[int, ...]
    cannot_save: frozenset[int]
    cannot_recompute: frozenset[int]

    def maker(self, buffer: int) -> int:
        """The op that allocates a buffer."""
        return self.op[buffer]

    @functools.cached_property
    def sized(self) -> np.ndarray:
        """Two rows: ops, and buffers of which these want the sizes alone, so that they are arguments and not read."""
        found = [
            (i, b)
            for i, arguments in enumerate(self.inputs)
            for b in {self.buffer[a] for a in arguments if self.is_op[i]}.difference(self.reads[i])
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 2).T

    def num_sized(self, ops: np.ndarray) -> np.ndarray:
        """By buffer how many of these ops want its sizes alone: users to Inductor, which counts arguments."""
        users, buffers = self.sized
        runs = np.zeros(len(self.nodes), dtype=bool)
        runs[ops] = True
        return np.bincount(buffers[runs[users]], minlength=len(self.nodes))

    @functools.cached_property
    def from_nothing(self) -> frozenset[int]:
        """Pointwise ops that read no memory if all that they read is computed in them: positions, constants, masks."""
        found: set[int] = set()
        for i, read in enumerate(self.reads):
            is_loop = self.is_op[i] and self.kind[i] is Kind.POINTWISE
            if is_loop and all(self.op[b] in found for b in read):
                found.add(i)
        return frozenset(found)

    # What the orders below need whatever the plan is.

    @functools.cached_property
    def needed(self) -> tuple[int, ...]:
        """Nodes of forward (or either side) that backward reads or returns, ascending; inputs left out."""
        found = {a for i in self.backward_roots for a in self.inputs[i]} | set(self.bwd_outputs)
        return tuple(sorted(i for i in found if self.side[i] is not Side.BACKWARD and not self.is_input[i]))

    @functools.cached_property
    def needed_inputs(self) -> frozenset[int]:
        """Inputs of forward that nodes of backward read or return."""
        found = {a for i in self.backward_roots for a in self.inputs[i]} | set(self.bwd_outputs)
        return frozenset(i for i in found if self.side[i] is not Side.BACKWARD and self.is_input[i])

    @functools.cached_property
    def backward_roots(self) -> tuple[int, ...]:
        """The nodes that only backward can run, in graph order."""
        return tuple(i for i, side in enumerate(self.side) if side is Side.BACKWARD and not self.is_input[i])

    @functools.cached_property
    def demands(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Per root of backward that reads nodes of forward: its place among the roots, and these; then those returned.

        Inputs are left out. No node of forward reads one of backward, so all else that a root reads ran before it.
        """
        places = [*enumerate(map(self.inputs.__getitem__, self.backward_roots))]
        places += [(len(self.backward_roots), (i,)) for i in self.bwd_outputs]
        found = [(p, tuple(i for i in read if self._is_rebuildable[i])) for p, read in places]
        return tuple((place, read) for place, read in found if read)

    @functools.cached_property
    def rebuilt_from(self) -> tuple[tuple[int, ...], ...]:
        """By node: its arguments other than inputs of the graph."""
        return tuple(tuple(a for a in arguments if not self.is_input[a]) for arguments in self.inputs)

    @functools.cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """By node: the nodes that have it as an argument, ascending."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, arguments in enumerate(self.inputs):
            for a in arguments:
                found[a].append(i)
        return tuple(map(tuple, found))

    @functools.cached_property
    def always_in_forward(self) -> np.ndarray:
        """By node, whether forward runs it whatever is saved: its outputs and effects need it."""
        runs = np.zeros(len(self.nodes), dtype=bool)
        add_ancestors(self, runs, [i for i, side in enumerate(self.side) if side is Side.FORWARD])
        return runs

    @functools.cached_property
    def last_rebuilt(self) -> list[frozenset[int] | None]:
        """What ``rebuilt_nodes`` was last asked for, and its answer: one plan is asked about several times in a row."""
        return [None, None]

    @functools.cached_property
    def _is_rebuildable(self) -> tuple[bool, ...]:
        return tuple(
            side is not Side.BACKWARD and not is_input for side, is_input in zip(self.side, self.is_input, strict=True)
        )


def dataflow_of(joint: JointGraph) -> Dataflow:
    """Index the graph. Linear in nodes and edges."""
    nodes = tuple(joint.nodes)
    index = {node: position for position, node in enumerate(nodes)}
    notes = [joint.notes[node] for node in nodes]
    inputs = tuple(tuple(index[argument] for argument in node.all_input_nodes) for node in nodes)
    op = [index_of_parent(node, index) for node in nodes]
    buffer = tuple(note.storage for note in notes)
    is_input = tuple(node.op in ("placeholder", "get_attr") for node in nodes)
    views = [note.kind is Kind.VIEW for note in notes]
    is_op = tuple(op[i] == i and not is_input[i] and not views[i] for i in range(len(nodes)))
    makes: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        allocates = buffer[i] == i and not is_input[i] and not views[i] and not written_arguments(node)
        if allocates and isinstance(node.meta.get("val"), torch.Tensor):
            makes[op[i]].append(i)
    reads = tuple(
        tuple(dict.fromkeys(buffer[index[a]] for a in looked_at(node))) if runs else ()
        for node, runs in zip(nodes, is_op, strict=True)
    )
    return Dataflow(
        nodes=nodes,
        index=index,
        kind=tuple(note.kind for note in notes),
        side=tuple(note.side for note in notes),
        buffer=buffer,
        size_bytes=tuple(note.size_bytes for note in notes),
        numel=tuple(note.numel for note in notes),
        op=tuple(op),
        inputs=inputs,
        reads=reads,
        makes=tuple(map(tuple, makes)),
        is_op=is_op,
        is_input=is_input,
        is_static=tuple(node in joint.static_inputs for node in nodes),
        fwd_outputs=tuple(index[node] for node in joint.fwd_outputs),
        bwd_outputs=tuple(index[node] for node in joint.bwd_outputs),
        cannot_save=frozenset(i for i, note in enumerate(notes) if note.cannot_save is not None),
        cannot_recompute=frozenset(i for i, note in enumerate(notes) if note.cannot_recompute is not None),
    )


def index_of_parent(node: fx.Node, index: dict[fx.Node, int]) -> int:
    while node.target is operator.getitem:
        node = node.args[0]
    return index[node]


def needed_by_backward(flow: Dataflow) -> tuple[int, ...]:
    """Nodes of forward (or either side) that backward reads or returns, ascending; inputs left out."""
    return flow.needed


def rebuilt_in_backward(flow: Dataflow, saved: frozenset[int]) -> tuple[list[int], list[int]]:
    """The nodes that backward must compute again given what is saved, and the inputs it reads; both ascending.

    ``saved`` holds node indices. Inputs of the graph are always at hand.
    """
    rebuilt = rebuilt_nodes(flow, saved)
    inputs = {a for i in rebuilt for a in flow.inputs[i] if flow.is_input[a] and a not in saved}
    return sorted(rebuilt), sorted(inputs | flow.needed_inputs)


def rebuilt_nodes(flow: Dataflow, saved: frozenset[int]) -> frozenset[int]:
    """The nodes that backward must compute again given what is saved. Linear in these, whatever the graph."""
    if flow.last_rebuilt[0] == saved:
        return flow.last_rebuilt[1]
    done, pending, rebuilt_from = set(saved), list(flow.needed), flow.rebuilt_from
    while pending:
        i = pending.pop()
        if i not in done:
            done.add(i)
            pending += rebuilt_from[i]
    rebuilt = frozenset(done.difference(saved))
    flow.last_rebuilt[:] = saved, rebuilt
    return rebuilt


def in_forward(flow: Dataflow, saved: frozenset[int]) -> np.ndarray:
    """By node, whether forward runs it: its outputs, effects or the saved values need it."""
    runs = flow.always_in_forward.copy()
    add_ancestors(flow, runs, saved)
    return runs


def add_ancestors(flow: Dataflow, marked: np.ndarray, roots: Iterable[int]) -> None:
    """Mark nodes and all that they are computed from; inputs are not marked, nor looked behind what is marked."""
    pending = [i for i in roots if not marked[i] and not flow.is_input[i]]
    while pending:
        i = pending.pop()
        if not marked[i]:
            marked[i] = True
            pending += flow.rebuilt_from[i]


def forward_order(flow: Dataflow, saved: frozenset[int]) -> list[int]:
    """The nodes that forward runs: what its outputs, effects and the saved values need, in graph order."""
    return np.flatnonzero(in_forward(flow, saved)).tolist()


def backward_order(flow: Dataflow, saved: frozenset[int]) -> list[int]:
    """The nodes that backward runs, each rebuilt one right before the first that needs it.

    Backward's own nodes keep the order of the joint graph, which is autograd's. ``saved`` are values of forward.
    """
    order: list[int] = []
    roots, rebuilt_from, done, copied = flow.backward_roots, flow.rebuilt_from, set(saved), 0
    for place, demanded in flow.demands:
        pending = [i for i in demanded if i not in done]
        if not pending:
            continue
        missing = []
        while pending:
            i = pending.pop()
            if i not in done:
                done.add(i)
                missing.append(i)
                pending += rebuilt_from[i]
        order += roots[copied:place]
        order += sorted(missing)
        copied = place
    order += roots[copied:]
    return order


def tangents_of(flow: Dataflow) -> tuple[int, ...]:
    return tuple(i for i, node in enumerate(flow.nodes) if is_tangent(node))
