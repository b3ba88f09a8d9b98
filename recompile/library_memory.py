"""What library calls on the CPU allocate for themselves while they run: oneDNN's copies of a convolution's weights.

oneDNN lays weights out in blocks of channels. Forward makes a copy of that kind, backward another for the weights'
gradient; both are freed when the call returns. Measured with torch 2.13 on one thread (tests/test_library_memory.py
measures again). Left out: rounding up to whole blocks and 8 kB of scratch, what an image of few channels (the first
convolution of a network) and bfloat16 need besides, and a batch of one, for which backward does with one copy.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from recompile.joint import JointGraph

aten = torch.ops.aten


def allocated_inside(joint: JointGraph) -> dict[fx.Node, int]:
    """Bytes that calls need beyond their arguments and results."""
    found = {}
    for node in joint.nodes:
        if node.target is aten.convolution.default:
            weight, stride, copies = node.args[1], node.args[3], 1
        elif node.target is aten.convolution_backward.default:
            weight, stride, copies = node.args[2], node.args[4], 1 + bool(node.args[10][1])
        else:
            continue
        val = weight.meta["val"]
        if val.device.type == "cpu" and not is_a_product(val, stride):
            found[node] = copies * joint.notes[weight].numel * val.element_size()
    return found


def is_a_product(weight: torch.Tensor, stride: list[int]) -> bool:
    """Whether the convolution is one of pixels by themselves, for which weights are read as they are."""
    return all(size == 1 for size in (*weight.shape[2:], *stride))
