"""Let backward draw the same random numbers again: from the generator's state that forward saved before its draw."""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from recompile.torch_private import replay_with_saved_state


def replay_random(
    joint: fx.GraphModule,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    random_ops: Iterable[fx.Node],
    num_symbols: int,
) -> int:
    """Wrap each of ``random_ops`` that runs in both graphs; returns how many those are.

    ``random_ops`` are nodes of the joint graph; their copies go by the same name. Forward runs such an op under
    ``run_and_save_rng_state`` and hands the state over as one more saved value, in front of its ``num_symbols`` sizes;
    backward runs it under ``run_with_rng_state``, which puts the generator back afterwards.
    """
    names = {node.name for node in forward.graph.nodes} & {node.name for node in backward.graph.nodes}
    twice = [node for node in random_ops if node.name in names]
    if twice:
        replay_with_saved_state(joint, forward, backward, twice, num_symbols)
    return len(twice)
