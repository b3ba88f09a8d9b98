"""What to tell the user when backward needs a value that can be neither saved nor recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from recompile.dataflow import Dataflow, needed_by_backward
from recompile.errors import PlanError
from recompile.joint import JointGraph
from recompile.rules import source_line


def contradiction(joint: JointGraph, flow: Dataflow, path: Sequence[int]) -> PlanError:
    """The error for a path of nodes, none of which can be saved, from one that cannot be recomputed to a need."""
    first, last = flow.nodes[path[0]], flow.nodes[path[-1]]
    start, end = joint.notes[first], joint.notes[last]
    stuck = f"{named(first)} can be neither saved ({start.cannot_save}) nor recomputed ({start.cannot_recompute})"
    if first is last:
        text = f"backward needs a value that it cannot get: {stuck}. "
    else:
        text = (
            f"backward needs {named(last)}, which cannot be saved ({end.cannot_save}) and would have to be recomputed, "
            f"but {stuck}. "
        )
    return PlanError(
        text + "Loosen the checkpoint policy of one of them, or keep that part out of the compiled region."
    )


def path_to_need(flow: Dataflow, start: int, rebuilt: set[int]) -> list[int]:
    """The shortest way from a node through rebuilt nodes to one that backward reads."""
    needed = set(needed_by_backward(flow))
    readers: dict[int, list[int]] = {}
    for i in sorted(rebuilt):
        for argument in flow.inputs[i]:
            readers.setdefault(argument, []).append(i)
    paths = [[start]]
    seen = {start}
    while paths:
        path = paths.pop(0)
        if path[-1] in needed:
            return path
        fresh = [reader for reader in readers.get(path[-1], ()) if reader not in seen]
        seen.update(fresh)
        paths += [[*path, reader] for reader in fresh]
    return [start]


def named(node: fx.Node) -> str:
    """A node's name and, where it is known, the line of the user's code."""
    line = source_line(node)
    return f"{node.name} ({line})" if line else node.name
