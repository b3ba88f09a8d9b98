"""Views that Inductor writes out as values of their own.

A pointwise value that a matrix product reads through a view goes to memory as it is, and everybody reads it there. But
where the view itself has several readers, one of them the product, Inductor wants it to lie as the product needs it
(torch/_inductor/graph.py ``run_node``, "Realize if"): it computes the value straight into the shape of the view and
leaves the value unstored. Readers of the view find it in memory; those of the value compute it again from what it was
made of, which lives on until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from recompile.dataflow import Dataflow
from recompile.joint import Kind

aten = torch.ops.aten

# ``need_fixed_layout`` in torch/_inductor/graph.py, as far as it stands in graphs that AOTAutograd has traced.
NEEDS_FIXED_LAYOUT = (aten.mm.default, aten._int_mm.default, aten.convolution_backward.default)


@dataclass(frozen=True)
class ViewCopy:
    """A view that is written out in programs that run it and at least two of its ``readers``, one of ``products``."""

    op: int  # makes the value behind the view
    view: int
    readers: tuple[int, ...]
    products: frozenset[int]
    read_through: frozenset[int]  # the ops that read the value through this view


def view_copies(flow: Dataflow) -> tuple[ViewCopy, ...]:
    """The views of pointwise values that may be written out, one a value at most; linear in nodes and edges."""
    found: dict[int, ViewCopy | None] = {}
    for view, readers in enumerate(flow.users):
        op = flow.op[flow.buffer[view]]
        products = frozenset(reader for reader in readers if flow.nodes[reader].target in NEEDS_FIXED_LAYOUT)
        if flow.kind[view] is not Kind.VIEW or not products or flow.kind[op] is not Kind.POINTWISE:
            continue
        if len(readers) > 1 and len(flow.makes[op]) == 1 and flow.numel[view] == flow.numel[op]:
            through = ops_behind(flow, view)
            calls = {reader for reader in ops_behind(flow, op) if flow.kind[reader] is Kind.EXTERN}
            is_only = op not in found and calls <= through
            found[op] = ViewCopy(op, view, readers, products, through) if is_only else None
    return tuple(copy for copy in found.values() if copy is not None)


def ops_behind(flow: Dataflow, node: int) -> frozenset[int]:
    """The ops that read a value directly or through views of it."""
    found, pending = set(), [node]
    while pending:
        for reader in flow.users[pending.pop()]:
            if flow.is_op[reader]:
                found.add(reader)
            elif flow.kind[reader] is Kind.VIEW:
                pending.append(reader)
    return frozenset(found)


class CopyTable:
    """The copies of one graph as arrays. ``readers`` and ``products`` of one after those of the other."""

    def __init__(self, copies: tuple[ViewCopy, ...]):
        self.op = np.array([copy.op for copy in copies], dtype=np.int64)
        self.view = np.array([copy.view for copy in copies], dtype=np.int64)
        self.readers, self.first_reader = joined([copy.readers for copy in copies])
        self.products, self.first_product = joined([sorted(copy.products) for copy in copies])

    def ops_copied(self, program: np.ndarray, num_nodes: int) -> np.ndarray:
        """The ops whose result the program writes out as a view of it only, if few enough values go into it."""
        if not len(self.op):
            return self.op
        runs = np.zeros(num_nodes, dtype=np.int64)
        runs[program] = 1
        num_readers = np.add.reduceat(runs[self.readers], self.first_reader)
        num_products = np.add.reduceat(runs[self.products], self.first_product)
        return self.op[(runs[self.view] > 0) & (num_products > 0) & (num_readers > 1)]


def joined(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are not empty, one after the other, and where each begins."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return np.array([i for row in rows for i in row], dtype=np.int64), np.cumsum(lengths) - lengths
