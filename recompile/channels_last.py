"""Which values Inductor lays out with channels last for convolutions, and what it copies and adds for that.

A model of ``decide_layout_opt`` and ``run_node`` of Inductor's ``GraphLowering`` (torch/_inductor/graph.py), and of the
lowering of ``aten.convolution`` (torch/_inductor/kernel/conv.py), torch 2.13. "On a GPU": on any device but the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from recompile.dataflow import Dataflow
from recompile.joint import Kind, Side

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)

# ``decide_layout_opt``: from so many nodes a convolution on, the layout of images matters little to a graph.
NODES_PER_CONVOLUTION = 300
SMALL_NUM_CHANNELS = 64  # where no convolution has more, in or out, cuDNN is no faster with channels last
MUCH_NARROWER = 2  # nor where one makes that many times fewer channels than it reads
IN_MEMORY = (0, 2, 3, 1)  # the dimensions of a 4-D value with channels last, from the outermost on


def copied_for_layout(flow: Dataflow) -> list[int]:
    """Inputs that Inductor copies to channels-last for a convolution when forward starts, and keeps for its backward.

    A copy is saved in the input's place, so backward makes none.
    """
    copied: dict[int, None] = {}
    for i in forward_convolutions(flow) if prefers_channels_last(flow) else ():
        for operand in flow.inputs[i][:2]:
            val = flow.nodes[operand].meta["val"]
            if flow.is_input[operand] and val.dim() == 4 and not has_channels_last_strides(val):
                copied[operand] = None
    return list(copied)


def prefers_channels_last(flow: Dataflow) -> bool:
    """Whether Inductor chooses channels last for the images of forward: on the CPU always, on a GPU by heuristics."""
    convolutions = [flow.nodes[i] for i in forward_convolutions(flow)]
    weights = [node.args[1].meta["val"] for node in convolutions]
    if not convolutions or weights[0].device.type == "cpu":
        return bool(convolutions)
    num_nodes = sum(side is not Side.BACKWARD for side in flow.side)
    if num_nodes >= NODES_PER_CONVOLUTION * len(convolutions):
        return False
    sizes = [size for node in convolutions for argument in node.args[:2] for size in argument.meta["val"].shape]
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return False
    for node, weight in zip(convolutions, weights, strict=True):
        is_grouped = node.args[8] > 1 and weight.shape[1] > 1  # a depthwise convolution is fast with channels last
        if is_grouped or (weight.shape[0] * MUCH_NARROWER <= weight.shape[1] and weight.shape[2] > 1):
            return False
    return any(max(weight.shape[:2]) > SMALL_NUM_CHANNELS for weight in weights)


def lying_channels_last(flow: Dataflow) -> frozenset[int]:
    """On a GPU, the 4-D values with channels last: what convolutions read and make, and what is computed from it."""
    if on_cpu(flow) or not prefers_channels_last(flow):
        return frozenset()
    found = set(copied_for_layout(flow))
    for i, node in enumerate(flow.nodes):
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or val.dim() != 4:
            continue
        maker = node.args[0] if node.target is operator.getitem else node
        is_pointwise = flow.kind[i] is Kind.POINTWISE and not found.isdisjoint(flow.inputs[i])
        if maker.target in CONVOLUTIONS or is_pointwise or (flow.is_input[i] and has_channels_last_strides(val)):
            found.add(i)
    return frozenset(found)


def laid_anew(flow: Dataflow) -> frozenset[int]:
    """Buffers that loops make in another shape than the convolution that reads them has, so that they are copied.

    The layout of a 4-D result is chosen for its reader; that of a view's base, such as the gradient that group norm
    computes by groups, is not. Base and copy are there together when the loops that make them run.
    """
    if not prefers_channels_last(flow):
        return frozenset()
    found = set()
    for i, node in enumerate(flow.nodes):
        for operand in flow.inputs[i] if node.target in CONVOLUTIONS else ():
            base, val = flow.buffer[operand], flow.nodes[operand].meta["val"]
            maker = flow.nodes[base].meta.get("val")
            is_looped = flow.kind[flow.op[base]] in (Kind.POINTWISE, Kind.REDUCTION)
            if flow.kind[operand] is Kind.VIEW and is_looped and val.dim() == 4 and maker.shape != val.shape:
                found.add(base)
    return frozenset(found)


def biased_apart(flow: Dataflow) -> list[int]:
    """Convolutions whose bias a kernel of its own adds, over their result: on a GPU, where a library call reads that.

    Inductor takes the bias off the call, since cuDNN is slower with it; other readers have the addition inlined.
    """
    return [
        i
        for i, node in enumerate(flow.nodes)
        if node.target is aten.convolution.default and node.args[2] is not None
        and node.meta["val"].device.type != "cpu" and any(flow.kind[user] is Kind.EXTERN for user in flow.users[i])
    ]  # fmt: skip


def forward_convolutions(flow: Dataflow) -> Iterator[int]:
    for i, node in enumerate(flow.nodes):
        if node.target is aten.convolution.default and flow.side[i] is not Side.BACKWARD:
            yield i


def on_cpu(flow: Dataflow) -> bool:
    """Whether any value of the graph lies on the CPU, so that its loops become C++."""
    values = (node.meta.get("val") for node in flow.nodes)
    return any(isinstance(val, torch.Tensor) and val.device.type == "cpu" for val in values)


def has_channels_last_strides(val: torch.Tensor) -> bool:
    """Whether a 4-D tensor already lies as convolutions with channels last want it."""
    return val.is_contiguous(memory_format=torch.channels_last)
