"""How the loops of generated C++ run over memory: which dimensions become one loop, and which reads are the same.

Inductor merges neighbouring dimensions of an op into one loop where every read and write goes on from the one to the
next (torch/_inductor/sizevars.py ``_simplify_loops``), and takes two reads of a buffer for the same one only if they
are so merged to the same index (dependencies.py ``MemoryDep``). Both follow from the strides of the arguments, through
the ops that are inlined. A *walk* is such an index: (size, stride) of each loop, from the outermost on. One that does
not begin at the first element, as over a part of a split, has a loop of one step before them, its stride the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.fx as fx

from recompile.dataflow import Dataflow
from recompile.joint import Kind
from recompile.sizes import AT_HINTS
from recompile.work import name_of, reduced_dims, words

Walk = tuple[tuple[int, int], ...]
Access = tuple[int, Walk]  # of a buffer

# Their result depends on where in the loop it is computed, so the loops of these dimensions stay apart.
BY_POSITION = words("arange cat constant_pad_nd iota select_scatter slice_scatter")
# The second argument says which rows of the first are read.
BY_INDEX = words("embedding")
NOWHERE = -1


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


def starting(start: int, walk: Walk) -> Walk:
    """The walk from another element on."""
    return ((1, start), *walk) if start else walk


def start_of(walk: Walk) -> int:
    return walk[0][1] if walk and walk[0][0] == 1 else 0


def moving(walk: Walk) -> Walk:
    """A walk without the loops in which it stays where it is: equal for reads that Inductor takes for the same."""
    return starting(start_of(walk), merged([loop for loop in walk if loop[1]]))


def steps(walk: Walk) -> int:
    """Elements that a walk touches."""
    return math.prod(size for size, stride in walk if stride)


def through(outer: Walk, inner: Walk) -> Walk:
    """The walk over a buffer of an op that walks by ``outer`` over a value which is computed along ``inner``."""
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


def bounds(walk: Walk) -> frozenset[int]:
    """Where loops end: the elements inside of each but the outermost."""
    found, inside = set(), 1
    for size, _ in reversed(walk):
        inside *= size
        found.add(inside)
    return frozenset(found)


def sizes_between(ends: Iterable[int], numel: int) -> tuple[int, ...]:
    """The sizes of the loops over ``numel`` elements that end there."""
    sizes, left = [], numel
    for end in sorted({1, *ends}, reverse=True):
        if 1 <= end < left and not left % end:
            sizes.append(left // end)
            left = end
    return tuple(sizes)


def walked(
    own: Iterable[Access], ends: Iterable[int], inlined: Mapping[int, tuple[Sequence[Access], Iterable[int], int]]
) -> tuple[tuple[Access, ...], frozenset[int]]:
    """What an op reads from memory, and where its loops end, with values inlined into it.

    ``inlined``: by the buffer that would be behind a value the same of it, and its number of elements.
    """
    found: dict[Access, None] = {}
    ends = set(ends)
    for buffer, walk in own:
        accesses, inner_ends, numel = inlined.get(buffer, ((), (), 0))
        is_whole = all(size * stride <= numel for size, stride in walk)  # not a piece put into a larger value
        if buffer not in inlined:
            accesses, walks = ((buffer, walk),), [walk]
        else:
            starts = [start_of(walk) + start_of(inner) for _, inner in accesses]
            walks = [through(walk, inner) if is_whole else walk for _, inner in accesses]
            walks = [starting(start, merged(outer)) for start, outer in zip(starts, walks, strict=True)]
            ends |= ends_through(walk, inner_ends) if is_whole else set()
        found.update(((b, outer), None) for (b, _), outer in zip(accesses, walks, strict=True))
        ends.update(*map(bounds, walks))
    return tuple(found), frozenset(ends)


def ends_through(walk: Walk, ends: Iterable[int]) -> set[int]:
    """Where loops along a walk over a value end because the loops that compute the value end."""
    found, inside = set(), 1
    for size, stride in reversed(walk):
        found.update(inside * (end // stride) for end in ends if stride and stride <= end < stride * size)
        inside *= size
    return found


def walks_of(flow: Dataflow, i: int) -> tuple[tuple[Access, ...], frozenset[int]]:
    """What a pointwise op or a reduction reads, each value by itself, and where its own loops end in any case.

    An op that computes where it is reads, as it were, the buffer NOWHERE.
    """
    node = flow.nodes[i]
    val = first_tensor(node.meta.get("val"))
    if val is None or flow.kind[i] not in (Kind.POINTWISE, Kind.REDUCTION):
        return (), frozenset()
    if flow.kind[i] is Kind.REDUCTION and node.all_input_nodes:
        return _walks_of_reduction(flow, node)
    shape, name = AT_HINTS.shape(val), name_of(node.target)
    lies = _strides(val, shape)
    order = sorted(range(len(shape)), key=lambda dim: -lies[dim])  # as it lies in memory
    ends = bounds(tuple((shape[dim], 0) for dim in order)) if name in BY_POSITION else frozenset()
    found: list[Access] = []
    if name in BY_POSITION and not node.all_input_nodes:
        found.append((NOWHERE, ((flow.numel[i], 1),)))
    for number, argument in enumerate(node.all_input_nodes):
        read, buffer = argument.meta.get("val"), flow.buffer[flow.index[argument]]
        if not isinstance(read, torch.Tensor) or buffer not in flow.reads[i]:
            continue
        strides = _strides(read, shape)
        if name in BY_INDEX:
            num_row_dims = read.dim() - 1 if number == 0 else len(shape) - read.dim()
            rows = _strides(read, AT_HINTS.shape(read))
            strides = [0] * (len(shape) - num_row_dims) + rows[1:] if number == 0 else rows + [0] * num_row_dims
        elif name in BY_POSITION and AT_HINTS.shape(read) != shape:
            strides = lies
        found.append((buffer, starting(_start(read), merged((shape[dim], strides[dim]) for dim in order))))
    return tuple(found), ends


def _walks_of_reduction(flow: Dataflow, node: fx.Node) -> tuple[tuple[Access, ...], frozenset[int]]:
    """The loops over what is kept lie outside of those over what is reduced."""
    source = first_tensor(node.all_input_nodes[0].meta.get("val"))
    if source is None:
        return (), frozenset()
    shape = AT_HINTS.shape(source)
    reduced = reduced_dims(node, len(shape))
    order = [dim for dim in range(len(shape)) if dim not in reduced] + reduced
    found = []
    for argument in node.all_input_nodes:
        read = argument.meta.get("val")
        if isinstance(read, torch.Tensor):
            strides = _strides(read, shape)
            walk = starting(_start(read), merged((shape[dim], strides[dim]) for dim in order))
            found.append((flow.buffer[flow.index[argument]], walk))
    return tuple(found), frozenset((math.prod(shape[dim] for dim in reduced),))


def _start(read: torch.Tensor) -> int:
    return AT_HINTS.number(read.storage_offset())


def _strides(read: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Strides of a value in loops over ``shape``, 0 where it is broadcast."""
    sizes = AT_HINTS.shape(read)
    strides = [0] * (len(shape) - len(sizes))
    strides += [0 if n == 1 else AT_HINTS.number(stride) for n, stride in zip(sizes, read.stride(), strict=True)]
    return strides[len(strides) - len(shape) :]


def first_tensor(val: object) -> torch.Tensor | None:
    if isinstance(val, list | tuple):
        val = next((item for item in val if isinstance(item, torch.Tensor)), None)
    return val if isinstance(val, torch.Tensor) else None
