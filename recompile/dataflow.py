"""The joint graph as integers: which op runs, which buffers it reads and makes. Views vanish into the buffers behind
them.

Computed once per graph; the planner and the timeline work on it for every plan they try.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from recompile.joint import JointGraph, Kind, Side
from recompile.rules import written_arguments
from recompile.torch_private import is_tangent


@dataclass(frozen=True)
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

    def maker(self, buffer: int) -> int:
        """The op that allocates a buffer."""
        return self.op[buffer]


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
    reads = tuple(tuple(dict.fromkeys(buffer[a] for a in inputs[i])) if is_op[i] else () for i in range(len(nodes)))
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
    )


def index_of_parent(node: fx.Node, index: dict[fx.Node, int]) -> int:
    while node.target is operator.getitem:
        node = node.args[0]
    return index[node]


def needed_by_backward(flow: Dataflow) -> tuple[int, ...]:
    """Nodes of forward (or either side) that backward reads or returns, ascending; inputs left out."""
    needed = set()
    for i, side in enumerate(flow.side):
        if side is Side.BACKWARD:
            needed.update(a for a in flow.inputs[i] if flow.side[a] is not Side.BACKWARD)
    needed.update(i for i in flow.bwd_outputs if flow.side[i] is not Side.BACKWARD)
    return tuple(sorted(i for i in needed if not flow.is_input[i]))


def rebuilt_in_backward(flow: Dataflow, saved: frozenset[int]) -> tuple[list[int], list[int]]:
    """The nodes that backward must compute again given what is saved, and the inputs it reads; both ascending.

    ``saved`` holds node indices. Inputs of the graph are always at hand.
    """
    rebuilt: set[int] = set()
    inputs: set[int] = set()
    pending = list(needed_by_backward(flow))
    for i, side in enumerate(flow.side):
        if side is Side.BACKWARD:
            inputs.update(a for a in flow.inputs[i] if flow.is_input[a] and flow.side[a] is not Side.BACKWARD)
    inputs.update(i for i in flow.bwd_outputs if flow.is_input[i] and flow.side[i] is not Side.BACKWARD)
    while pending:
        i = pending.pop()
        if i in saved or i in rebuilt:
            continue
        if flow.is_input[i]:
            inputs.add(i)
            continue
        rebuilt.add(i)
        pending.extend(flow.inputs[i])
    return sorted(rebuilt), sorted(inputs)


def forward_order(flow: Dataflow, saved: frozenset[int]) -> list[int]:
    """The nodes that forward runs: what its outputs, effects and the saved values need, in graph order."""
    wanted: set[int] = set()
    pending = [i for i, side in enumerate(flow.side) if side is Side.FORWARD and not flow.is_input[i]]
    pending += list(saved)
    while pending:
        i = pending.pop()
        if i not in wanted and not flow.is_input[i]:
            wanted.add(i)
            pending.extend(flow.inputs[i])
    return sorted(wanted)


def backward_order(flow: Dataflow, saved: frozenset[int]) -> list[int]:
    """The nodes that backward runs, each rebuilt one right before the first that needs it.

    Backward's own nodes keep the order of the joint graph, which is autograd's.
    """
    order: list[int] = []
    done: set[int] = set(saved)
    roots = [i for i, side in enumerate(flow.side) if side is Side.BACKWARD and not flow.is_input[i]]
    for root in (*roots, *flow.bwd_outputs):
        missing: set[int] = set()
        pending = [root]
        while pending:
            i = pending.pop()
            if i not in done and i not in missing and not flow.is_input[i]:
                missing.add(i)
                pending.extend(flow.inputs[i])
        order.extend(sorted(missing))
        done |= missing
    return order


def tangents_of(flow: Dataflow) -> tuple[int, ...]:
    return tuple(i for i, node in enumerate(flow.nodes) if is_tangent(node))
