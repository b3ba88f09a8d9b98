"""Put every recomputed node of a backward graph right before the first node that needs it."""

from __future__ import annotations

import torch.fx as fx

from recompile.torch_private import is_tangent, must_be_in_backward, must_be_in_forward


def place_recomputation(graph: fx.Graph) -> int:
    """Reorder a backward graph in place; returns the number of nodes placed.

    Backward's own nodes (those a tangent reaches, and writes) keep their order, which is autograd's: the last layers
    come first. All else is rebuilt from saved values and is only brought in when its turn comes, so that one block's
    recomputation is alive at a time. What nothing in backward needs is removed: it came along because it has an effect
    (a random draw, a check), and forward has had that effect. Linear in nodes and edges.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    own: list[fx.Node] = []
    reached: set[fx.Node] = set()
    for node in nodes:
        if is_tangent(node) or any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
        writes = node.op == "call_function" and (must_be_in_backward(node) or must_be_in_forward(node))
        if node.op != "placeholder" and (node in reached or writes or node.op == "output"):
            own.append(node)
    placed = set(graph.find_nodes(op="placeholder"))
    num_placed = 0
    for anchor in own:
        missing: set[fx.Node] = set()
        pending = [anchor]
        while pending:
            node = pending.pop()
            if node not in placed and node not in missing:
                missing.add(node)
                pending.extend(node.all_input_nodes)
        placed |= missing
        missing.discard(anchor)
        for node in sorted(missing, key=position.__getitem__):
            if node not in reached:
                anchor.prepend(node)
                num_placed += 1
    for node in reversed(nodes):
        if node not in placed:
            graph.erase_node(node)
    return num_placed
