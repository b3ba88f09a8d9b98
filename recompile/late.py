"""Programs for the CPU that run in the graph's order because Inductor would store a library call's arguments late.

The same question that ``torch_private_order.stores_arguments_late`` answers for a graph, for a program that is not made
yet: whether a value that is computed for one call alone stands before another call.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from recompile.dataflow import Dataflow
from recompile.joint import Kind


class LateArguments:
    """The arguments of one graph's library calls that loops compute, and what lies between the two: views."""

    def __init__(self, flow: Dataflow):
        self._num_nodes = len(flow.nodes)
        kinds = zip(flow.kind, flow.nodes, strict=True)
        self._is_call = np.array([kind is Kind.EXTERN and node.op == "call_function" for kind, node in kinds])
        self._buffer = np.array(flow.buffer, dtype=np.int64)
        edges = [(a, i) for i, arguments in enumerate(flow.inputs) for a in {*arguments}]
        self._sources, self._users = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        calls, ways = [], []
        for call in np.flatnonzero(self._is_call).tolist():
            for argument in flow.inputs[call]:
                way = [argument]
                while flow.kind[way[-1]] is Kind.VIEW and flow.inputs[way[-1]]:  # a view of a number has none
                    way.append(flow.inputs[way[-1]][0])
                if flow.kind[way[-1]] is Kind.POINTWISE:
                    calls.append(call)
                    ways.append(way)
        self._calls = np.array(calls, dtype=np.int64)
        self._made = np.array([way[-1] for way in ways], dtype=np.int64)  # the pointwise op
        self._ways = np.array([node for way in ways for node in way], dtype=np.int64)
        lengths = np.array([len(way) for way in ways], dtype=np.int64)
        self._begins = np.cumsum(lengths) - lengths

    def any_in(self, program: np.ndarray, kept: Collection[int]) -> bool:
        """Whether a program has one. ``program``: node indices in order; ``kept``: buffers that outlive it."""
        if not len(self._calls):
            return False
        runs, outlives = np.zeros(self._num_nodes, dtype=bool), np.zeros(self._num_nodes, dtype=bool)
        runs[program], outlives[np.fromiter(kept, np.int64)] = True, True
        num_users = np.bincount(self._sources[runs[self._users]], minlength=self._num_nodes) + outlives[self._buffer]
        is_for_one_call = np.maximum.reduceat(num_users[self._ways], self._begins) == 1
        before = np.zeros(self._num_nodes, dtype=np.int64)  # by node: how many calls stand before it
        before[program] = np.cumsum(self._is_call[program]) - self._is_call[program]
        is_here = runs[self._made] & runs[self._calls]
        return bool((is_here & is_for_one_call & (before[self._calls] > before[self._made])).any())
