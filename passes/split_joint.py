"""Split a joint graph into forward and backward for a given list of saved nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from recompile.passes.place_recomputation import place_recomputation
from recompile.passes.replay_random import replay_random
from recompile.torch_private import split_joint_graph, thread_generators


def split_joint(
    joint: fx.GraphModule,
    saved: Sequence[fx.Node],
    num_fwd_outputs: int,
    static_inputs: Sequence[fx.Node] = (),
    random_ops: Sequence[fx.Node] = (),
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules; what backward needs beyond ``saved`` is rebuilt in it, next to its first use.

    ``saved`` holds nodes of the joint graph, inputs included, in graph order. Of ``random_ops``, those that end up in
    both graphs draw the same numbers in both. The joint graph itself is left alone.
    """
    forward, backward, num_symbols = split_joint_graph(joint, list(saved), num_fwd_outputs, list(static_inputs))
    replay_random(joint, forward, backward, random_ops, num_symbols)
    place_recomputation(backward.graph)
    backward.recompile()
    return thread_generators(forward, backward)
