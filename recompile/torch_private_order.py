"""The order of a program for the CPU in which a library call's arguments are stored late: that of the graph.

Inductor stores a value that a library call alone reads when it comes to the call (torch/_inductor/ir.py
``ExternKernel.realize_input``), not where the value stands in the graph. A gradient that group norm computes for
``convolution_backward`` so waits until the call's other argument was rebuilt, by another convolution perhaps, and what
it is computed from waits with it. And all loops between two library calls are one C++ function that holds at once what
all of them make, which the estimate by which Inductor picks among orders (memory.py ``reorder_for_peak_memory``) does
not know. A U-net's step needed 1.5 MiB more than its graph's 14.3.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch._inductor import memory
from torch._inductor.virtualized import V

from recompile.joint import Kind
from recompile.torch_private_emitted import op_of
from recompile.work import kind_of


def with_planned_order(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """The compilation of one graph, forward's or backward's, in the graph's order where Inductor would leave it."""

    @functools.wraps(inner_compile)
    def compiled(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        with planned_order(graph):
            return inner_compile(graph, *args, **kwargs)

    return compiled


@contextmanager
def planned_order(graph: fx.GraphModule) -> Iterator[None]:
    """What Inductor makes of the graph in the block runs in the graph's order, if it would store arguments late."""
    if not stores_arguments_late(graph):
        yield
        return

    reorder = memory.reorder_for_peak_memory

    def ordered(nodes: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        reorder(nodes, *args, **kwargs)  # for what it notes about buffers: later passes ask for it
        return in_order(nodes, {node: k for k, node in enumerate(V.graph.graph.nodes)})

    with mock.patch.object(memory, "reorder_for_peak_memory", ordered):
        yield


def stores_arguments_late(graph: fx.GraphModule) -> bool:
    """Whether a graph on the CPU has a library call between a call and a value that is computed for it alone."""
    nodes = list(graph.graph.nodes)
    kinds = [kind_of(node) for node in nodes]
    values = [node.meta.get("val") for node in nodes]
    if not any(isinstance(val, torch.Tensor) and val.device.type == "cpu" for val in values):
        return False
    place = {node: k for k, node in enumerate(nodes)}
    calls = [k for k, node in enumerate(nodes) if kinds[k] is Kind.EXTERN and node.op == "call_function"]
    for k in calls:
        for argument in nodes[k].all_input_nodes:
            while len(argument.users) == 1 and kinds[place[argument]] is Kind.VIEW and argument.all_input_nodes:
                argument = argument.all_input_nodes[0]
            is_for_one_call = len(argument.users) == 1 and kinds[place[argument]] is Kind.POINTWISE
            if is_for_one_call and any(place[argument] < other < k for other in calls):
                return True
    return False


def in_order(nodes: Sequence[Any], place: Mapping[fx.Node, int]) -> list[Any]:
    """Inductor's nodes in the order in which the graph has what they compute, each after what it depends on.

    ``place``: of each node of the graph.
    """
    called = {each: op_of(each.node) for node in nodes for each in node.get_nodes() if each.is_extern()}
    rank = {node: (min(own_place(each, place, called) for each in node.get_nodes()), k) for k, node in enumerate(nodes)}
    maker = {name: node for node in nodes for name in node.get_buffer_names()}
    sources = {node: {maker[d.name] for d in node.unmet_dependencies if d.name in maker} - {node} for node in nodes}
    readers: dict[Any, list[Any]] = {node: [] for node in nodes}
    for node in nodes:
        for source in sources[node]:
            readers[source].append(node)
    ready = [(*rank[node], node) for node in nodes if not sources[node]]
    heapq.heapify(ready)
    found = []
    while ready:
        node = heapq.heappop(ready)[-1]
        found.append(node)
        for reader in readers[node]:
            sources[reader].remove(node)
            if not sources[reader]:
                heapq.heappush(ready, (*rank[reader], reader))
    assert len(found) == len(nodes), "what Inductor fused has no cycles"
    return found


def own_place(node: Any, place: Mapping[fx.Node, int], called: Mapping[Any, fx.Node | None]) -> int:
    """Where the graph has what a node computes: a library call itself, for loops the last op that is no such call.

    ``called``: the op of each of Inductor's nodes that is a library call.
    """
    if called.get(node) in place:
        return place[called[node]]
    ops = [op for op in (node.node.origins if node.node is not None else ()) if op in place]
    loops = [op for op in ops if op not in called.values()]  # one for a call's sake names the call as well
    return max(map(place.__getitem__, loops or ops), default=-1)
