"""What an op asks of a buffer that it reads: that it is in memory, or elements of it more than once."""

from __future__ import annotations

import torch.fx as fx

from recompile.dataflow import Dataflow
from recompile.joint import Kind
from recompile.loops import BY_INDEX, BY_POSITION
from recompile.work import name_of, words

# Bits of ``FusionFacts.asks``: the reader wants it in memory; it reads elements of it more than once.
WANTS_STORED, SPREADS = 1, 2
# Ops that Inductor lowers to a loop which computes indices and values on its way. What they write into is stored where
# they alone have it, so that they may write over it; else they write into a copy, which computes it on its way as well.
SCATTERS = words("_unsafe_index_put _unsafe_masked_index_put_accumulate index_put scatter scatter_add scatter_reduce")


def asked(flow: Dataflow, i: int, buffer: int) -> int:
    """What op i asks for of a buffer that it reads: bits."""
    node, bits = flow.nodes[i], 0
    if flow.kind[i] is Kind.EXTERN:
        into = flow.inputs[i][0] if name_of(node.target) in SCATTERS else None
        if into is None or (flow.buffer[into] == buffer and len(flow.users[into]) == 1):
            bits |= WANTS_STORED
    elif flow.kind[i] is Kind.POINTWISE and not has_own_shape(node):
        arguments = [a for a in flow.inputs[i] if flow.buffer[a] == buffer]
        if any(1 <= flow.numel[buffer] < max(flow.numel[a], flow.numel[i]) for a in arguments):
            bits |= SPREADS
    return bits


def has_own_shape(node: fx.Node) -> bool:
    return name_of(node.target) in BY_INDEX | BY_POSITION
