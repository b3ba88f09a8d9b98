"""From an fx joint graph to facts: every node's side, storage, bytes, work, seconds, and what may be done with it.

Analysis only: the graph is read, never changed. Linear in nodes and edges.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.fx as fx

from recompile.cost import with_seconds
from recompile.hardware import Hardware
from recompile.joint import Annotation, Cost, JointGraph, Kind, Side
from recompile.rules import (
    NO_RECOMPUTE,
    NO_SAVE,
    RATHER_NOT_SAVE,
    LegalityFacts,
    first_reason,
    is_inside_checkpointed_region,
    is_marked_for_recomputation,
    written_arguments,
)
from recompile.sizes import AT_HINTS, Sizes
from recompile.torch_private import is_symbol, is_tangent, must_be_in_backward, must_be_in_forward, storage_key
from recompile.work import kind_of, num_elements, storage_bytes_of, tensors_in, work_of


def annotate(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    hardware: Hardware,
    static_inputs: Iterable[fx.Node] = (),
    sizes: Sizes = AT_HINTS,
    cost: Cost | None = None,
) -> JointGraph:
    """Annotate a joint forward/backward graph.

    ``joint`` is what AOTAutograd hands a partitioner: placeholders ``primals_*`` and ``tangents_*``, and one output
    tuple of which the first ``num_fwd_outputs`` belong to forward. ``hardware`` prices seconds. ``static_inputs`` are
    the placeholders that stay allocated whatever happens (parameters and buffers). ``sizes`` are the numbers that
    symbolic sizes count as. ``cost``: a cost model for library calls, see ``recompile.cost``.
    """
    graph = joint.graph
    nodes = [node for node in graph.nodes if node.op != "output"]
    sides = sides_of(graph, num_fwd_outputs)
    owner = storage_owners(nodes)
    index = {node: position for position, node in enumerate(nodes)}
    forward = frozenset(node for node in nodes if sides[node] is Side.FORWARD)
    facts = LegalityFacts(owner, overwritten_reads(nodes, owner, sides), forward, frozenset(static_inputs))
    wished = rebuilt_on_wish(nodes, facts)
    notes = {}
    for node in nodes:
        kind, work = kind_of(node), work_of(node, sizes)
        cannot_recompute = first_reason(NO_RECOMPUTE, node, facts)
        cannot_save = first_reason(NO_SAVE, node, facts)
        if cannot_recompute is None:  # wishes hold where recomputation is possible
            cannot_save = cannot_save or first_reason(RATHER_NOT_SAVE, node, facts) or wished.get(node)
        note = Annotation(
            side=sides[node],
            kind=kind,
            storage=index[owner[node]],
            size_bytes=0 if is_symbol(node) else storage_bytes_of(node.meta.get("val"), sizes),
            numel=num_elements(next(tensors_in(node.meta.get("val")), None), sizes),
            work=work,
            seconds=0.0,
            cannot_save=cannot_save,
            cannot_recompute=cannot_recompute,
        )
        notes[node] = with_seconds(node, note, hardware, cost)
    return JointGraph(graph, notes, num_fwd_outputs, frozenset(static_inputs), hardware)


def rebuilt_on_wish(nodes: list[fx.Node], facts: LegalityFacts) -> dict[fx.Node, str]:
    """Values that the user wants recomputed, and what only backward needs of them, each with its reason.

    Keeping the sine of a checkpointed value in that value's place would undo the wish.
    """
    found: dict[fx.Node, str] = {}
    for node in nodes:
        reason = is_marked_for_recomputation(node, facts) or is_inside_checkpointed_region(node, facts)
        source = next((a for a in node.all_input_nodes if a in found), None)
        if reason is None and source is not None and (facts.owner[node] in found or node not in facts.forward):
            reason = f"computed from {source.name}, which is marked for recomputation"
        if reason is not None:
            found[node] = reason
    return found


def sides_of(graph: fx.Graph, num_fwd_outputs: int) -> dict[fx.Node, Side]:
    """FORWARD: forward's outputs and effects need it. BACKWARD: a tangent reaches it. EITHER: all else."""
    returned = graph.output_node().args[0]
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or must_be_in_backward(node) or any(a in backward for a in node.all_input_nodes):
            backward.add(node)
    forward: set[fx.Node] = set()
    pending = [node for node in returned[:num_fwd_outputs] if isinstance(node, fx.Node)]
    pending += [n for n in graph.nodes if n not in backward and (must_be_in_forward(n) or has_forward_effect(n))]
    while pending:
        node = pending.pop()
        if node not in forward and node not in backward:
            forward.add(node)
            pending.extend(node.all_input_nodes)
    sides = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            sides[node] = Side.BACKWARD if is_tangent(node) else Side.FORWARD
        else:
            sides[node] = Side.FORWARD if node in forward else Side.BACKWARD if node in backward else Side.EITHER
    return sides


def has_forward_effect(node: fx.Node) -> bool:
    """Whether the node does something besides returning a value, so that forward must run it whoever reads it."""
    return node.op == "call_function" and node.is_impure() and not node.users


def storage_owners(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node the first node with the same storage: a view's base, or the node itself.

    A view belongs to what it looks at even where its fake tensor says otherwise: graph passes that replace a node leave
    the old storage on its views.
    """
    first: dict[int, fx.Node] = {}
    owner: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        val = node.meta.get("val")
        key = storage_key(val) if isinstance(val, torch.Tensor) else None
        base = viewed_node(node) if kind_of(node) is Kind.VIEW else None
        if base is not None:
            owner[node] = owner[base]
        else:
            owner[node] = node if key is None else first.setdefault(key, node)
    return owner


def viewed_node(view: fx.Node) -> fx.Node | None:
    """What a view looks at: its op's first input, through getitem for ops that return several views."""
    while view.target is operator.getitem:
        view = view.args[0]
    return view.all_input_nodes[0] if view.all_input_nodes else None


def overwritten_reads(
    nodes: list[fx.Node], owner: dict[fx.Node, fx.Node], sides: dict[fx.Node, Side]
) -> dict[fx.Node, fx.Node]:
    """Nodes that read storage which a later node of forward writes, with that writer. Views read it too."""
    after = overwritten_after_forward(nodes[0].graph) if nodes else {}
    last_write: dict[fx.Node, tuple[int, fx.Node]] = {owner[i]: (len(nodes), new) for i, new in after.items()}
    for position, node in enumerate(nodes):
        if sides[node] is not Side.BACKWARD:
            for written in written_arguments(node):
                if last_write.get(owner[written], (-1, node))[0] < position:
                    last_write[owner[written]] = (position, node)
    reads = {}
    for position, node in enumerate(nodes):
        for argument in node.all_input_nodes:
            written_at, writer = last_write.get(owner[argument], (-1, None))
            if written_at > position and sides[node] is not Side.BACKWARD and kind_of(node) is not Kind.INPUT:
                reads[node] = writer
    return reads


def inputs_to_snapshot(graph: fx.Graph, num_fwd_outputs: int) -> list[fx.Node]:
    """Placeholders that forward overwrites although backward needs what was read from them before."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    sides = sides_of(graph, num_fwd_outputs)
    owner = storage_owners(nodes)
    relevant = needed_in_backward(graph, sides, num_fwd_outputs)
    written = {owner[argument] for n in nodes if sides[n] is not Side.BACKWARD for argument in written_arguments(n)}
    written |= {owner[node] for node in overwritten_after_forward(graph)}
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node in relevant and not written_arguments(node):
            found.update((a, None) for a in node.all_input_nodes if a.op == "placeholder" and owner[a] in written)
    return list(found)


def overwritten_after_forward(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Inputs that AOTAutograd overwrites itself once forward has returned, with the output that holds the new content.

    It does so for inputs that want a gradient; the graph shows no write, only the description of its outputs.
    """
    output = graph.output_node()
    placeholders = {node.meta["desc"]: node for node in graph.find_nodes(op="placeholder") if "desc" in node.meta}
    found = {}
    for value, description in zip(output.args[0], output.meta.get("desc") or (), strict=False):
        mutated = getattr(description, "mutated_input", None)
        if mutated in placeholders and isinstance(value, fx.Node):
            found[placeholders[mutated]] = value
    return found


def needed_in_backward(graph: fx.Graph, sides: dict[fx.Node, Side], num_fwd_outputs: int) -> set[fx.Node]:
    """Backward's nodes and everything they are computed from."""
    returned = graph.output_node().args[0][num_fwd_outputs:]
    pending = [node for node in graph.nodes if sides.get(node) is Side.BACKWARD and node.op != "output"]
    pending += [node for node in returned if isinstance(node, fx.Node)]
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return seen
