"""Forward cut into segments at block boundaries, and which segments do the same: equal layers are solved once.

Two segments are equal when they run the same ops with the same arguments on the same shapes, wired alike inside; what
lies outside of a segment counts as "the boundary before" or "elsewhere". Linear in nodes and edges.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from recompile.dataflow import Dataflow
from recompile.joint import Side
from recompile.work import name_of


@dataclass(frozen=True)
class Segments:
    """``first[k]`` to ``last[k]`` (both included) are the node indices of segment k's forward nodes.

    ``kind[k]`` is equal for equal segments. ``of_node[i]``: the segment that node i works for, backward's nodes and
    what only backward needs included.
    """

    boundaries: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    kind: tuple[str, ...]
    of_node: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.first)

    def patterns(self, saved: frozenset[int]) -> list[frozenset[int]]:
        """What a plan saves of each segment, as offsets from its first node."""
        ascending = sorted(saved)
        starts = [bisect.bisect_left(ascending, first) for first in self.first]
        ends = [*starts[1:], bisect.bisect_right(ascending, self.last[-1])]
        parts = (ascending[start:end] for start, end in zip(starts, ends, strict=True))
        return [frozenset([i - first for i in part]) for first, part in zip(self.first, parts, strict=True)]

    def placed(self, k: int, pattern: frozenset[int]) -> frozenset[int]:
        """The nodes of segment k that a pattern of an equal segment saves."""
        return frozenset(self.first[k] + offset for offset in pattern)


def segments_of(flow: Dataflow, boundaries: Sequence[int]) -> Segments:
    """Cut forward after each of ``boundaries`` (node indices, ascending)."""
    end = max((i for i, side in enumerate(flow.side) if side is Side.FORWARD), default=-1)
    cuts = [b for b in boundaries if b < end]
    first = (0, *(b + 1 for b in cuts))
    last = (*cuts, end)
    place = [bisect.bisect_left(last, i) for i in range(end + 1)]
    kinds = tuple(_digest(flow, first[k], last[k], cuts[k - 1] if k else -1) for k in range(len(first)))
    return Segments(tuple(cuts), first, last, kinds, tuple(_segment_of_nodes(flow, place)))


def _segment_of_nodes(flow: Dataflow, place: list[int]) -> list[int]:
    """Forward's nodes by position. Backward's where they read forward values: the latest of those; else where their
    gradients come from. What only backward needs belongs to the latest of what it reads."""
    found: list[int] = []
    end = max(place, default=0)
    for i, side in enumerate(flow.side):
        if i < len(place) and side is not Side.BACKWARD:
            found.append(place[i])
            continue
        inputs = [a for a in flow.inputs[i] if not flow.is_input[flow.buffer[a]]]
        forward = [found[a] for a in inputs if flow.side[a] is not Side.BACKWARD]
        gradients = [found[a] for a in inputs if flow.side[a] is Side.BACKWARD]
        found.append(max(forward, default=min(gradients, default=end)))
    return found


def _digest(flow: Dataflow, first: int, last: int, before: int) -> str:
    """A hash of what a segment computes, the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    outputs = {flow.buffer[i] for i in flow.fwd_outputs}
    for i in range(first, last + 1):
        node = flow.nodes[i]

        def named(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            source = flow.index[value]
            if source >= first:
                return f"%{source - first}"
            return "%before" if source == before else f"%elsewhere:{flow.kind[source].value}"

        val = node.meta.get("val")
        shape = (tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else type(val).__name__
        target = node.op if node.op == "placeholder" else str(node.target)
        is_seed = name_of(node.target) == "inductor_lookup_seed"  # a number of its own in each layer
        args = map_aggregate(node.args[:1] if is_seed else node.args, named)
        words = (target, args, map_aggregate(node.kwargs, named), shape, flow.side[i].value)
        words += (flow.buffer[i] in outputs,)
        digest.update(repr(words).encode())
    return digest.hexdigest()
