"""How the loops of generated C++ run over memory: which dimensions become one loop, and which reads are the same.

Inductor merges neighbouring dimensions of an op into one loop where every read and write goes on from the one to the
next (torch/_inductor/sizevars.py ``_simplify_loops``), and takes two reads of a buffer for the same one only if they
are so merged to the same index (dependencies.py ``MemoryDep``). Both follow from the strides of the arguments, through
the ops that are inlined. A *walk* is such an index: (size, stride) of each loop, from the outermost on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.fx as fx

from recompile.dataflow import Dataflow
from recompile.joint import Kind
from recompile.sizes import AT_HINTS
from recompile.work import name_of, words

Walk = tuple[tuple[int, int], ...]

# Their result depends on where in the loop it is computed, so the loops of these dimensions stay apart.
BY_POSITION = words("arange cat constant_pad_nd iota select_scatter slice_scatter")
# The second argument says which rows of the first are read.
BY_INDEX = words("embedding index_select")


def merged(walk: Iterable[tuple[int, int]]) -> Walk:
    """Neighbouring loops as one where the outer goes on where the inner ends; loops of one step left out."""
    found: list[tuple[int, int]] = []
    for size, stride in walk:
        if size == 1:
            continue
        if found and found[-1][1] == stride * size:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return tuple(found)


def moving(walk: Walk) -> Walk:
    """A walk without the loops in which it stays where it is: equal for reads that Inductor takes for the same."""
    return merged([loop for loop in walk if loop[1]])


def steps(walk: Walk) -> int:
    """Elements that a walk touches."""
    count = 1
    for size, stride in walk:
        count *= size if stride else 1
    return count


def through(outer: Walk, inner: Walk) -> Walk:
    """The walk over a buffer of an op that walks by ``outer`` over a value which is computed along ``inner``."""
    if product(size for size, _ in inner) < max((size * stride for size, stride in outer), default=0):
        return outer  # a part of it is read from another place
    found: list[tuple[int, int]] = []
    for size, stride in outer:
        if not stride:
            found.append((size, 0))
            continue
        parts, inside = [], 1
        for inner_size, inner_stride in reversed(inner):
            start, end = max(stride, inside), min(stride * size, inside * inner_size)
            if start < end:
                parts.append((max(1, end // start), inner_stride * (start // inside)))
            inside *= inner_size
        found += reversed(parts)
    return merged(found)


def product(sizes: Iterable[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def bounds(walk: Walk) -> frozenset[int]:
    """Where loops end: the elements inside of each but the outermost."""
    found, inside = set(), 1
    for size, _ in reversed(walk):
        inside *= size
        found.add(inside)
    return frozenset(found)


def sizes_between(ends: Iterable[int], numel: int) -> tuple[int, ...]:
    """The sizes of the loops that end there."""
    inside = sorted({1, numel, *(end for end in ends if 1 < end < numel)}, reverse=True)
    return tuple(outer // inner for outer, inner in pairwise(inside))


def walks_of(flow: Dataflow, i: int) -> tuple[tuple[tuple[int, Walk], ...], frozenset[int]]:
    """The buffers that an op reads and its walks over them, and where its own loops end in any case."""
    node = flow.nodes[i]
    val = _first_tensor(node.meta.get("val"))
    if flow.kind[i] not in (Kind.POINTWISE, Kind.REDUCTION) or val is None:
        return (), frozenset()
    if flow.kind[i] is Kind.REDUCTION and node.all_input_nodes:
        return _walks_of_reduction(flow, node)
    shape = AT_HINTS.shape(val)
    order = sorted(range(len(shape)), key=lambda dim: -AT_HINTS.number(val.stride(dim)))
    whole = merged((shape[dim], 1 if shape[dim] == 1 else AT_HINTS.number(val.stride(dim))) for dim in order)
    ends = bounds(whole) if len(whole) > 1 else frozenset()
    name = name_of(node.target)
    if name in BY_POSITION:
        ends |= bounds(tuple((shape[dim], 0) for dim in order))
    found: list[tuple[int, Walk]] = []
    if name in BY_POSITION and not node.all_input_nodes:
        found.append((-1, ((flow.numel[i], 1),)))
    for number, argument in enumerate(node.all_input_nodes):
        read = argument.meta.get("val")
        if not isinstance(read, torch.Tensor):
            continue
        strides = _strides(read, shape)
        if name in BY_INDEX and number == 0:
            strides = [0] * (len(shape) - 1) + [1]
        elif name in BY_INDEX:
            strides = [*(AT_HINTS.number(stride) for stride in read.stride()), 0]
        if name in BY_POSITION and AT_HINTS.shape(read) != shape:
            strides = _strides(val, shape)
        found.append((flow.buffer[flow.index[argument]], merged((shape[dim], strides[dim]) for dim in order)))
    return tuple(found), ends


def _walks_of_reduction(flow: Dataflow, node: fx.Node) -> tuple[tuple[tuple[int, Walk], ...], frozenset[int]]:
    source = _first_tensor(node.all_input_nodes[0].meta.get("val"))
    if source is None:
        return (), frozenset()
    shape = AT_HINTS.shape(source)
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    reduced = sorted(dim % len(shape) for dim in dims) if isinstance(dims, list | tuple) and dims else range(len(shape))
    order = [dim for dim in range(len(shape)) if dim not in reduced] + list(reduced)
    found = []
    for argument in node.all_input_nodes:
        read = argument.meta.get("val")
        if isinstance(read, torch.Tensor):
            strides = _strides(read, shape)
            found.append((flow.buffer[flow.index[argument]], merged((shape[dim], strides[dim]) for dim in order)))
    inner = 1
    for dim in reduced:
        inner *= shape[dim]
    return tuple(found), frozenset((inner,))


def _strides(read: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Strides of a value in a loop over ``shape``, 0 where it is broadcast; as it lies itself where it does not fit."""
    sizes = AT_HINTS.shape(read)
    missing = len(shape) - len(sizes)
    strides = [0] * missing + [
        0 if size == 1 else AT_HINTS.number(stride) for size, stride in zip(sizes, read.stride(), strict=True)
    ]
    return strides[-len(shape) :] if shape else []


def _first_tensor(val: object) -> torch.Tensor | None:
    if isinstance(val, list | tuple):
        val = next((item for item in val if isinstance(item, torch.Tensor)), None)
    return val if isinstance(val, torch.Tensor) else None
