"""Block boundaries: places in forward where one value carries all that later blocks need.

Saving them bounds what any recomputation has to rebuild to one block (Chen et al. 2016, section 4, with the boundaries
found rather than given). A sweep over forward in graph order, O(nodes + live buffers).
"""

from __future__ import annotations

import bisect
import statistics

from recompile.dataflow import Dataflow
from recompile.joint import Kind, Side

# Buffers below this share of the median result of a library call (masks, statistics) may cross a boundary unnoticed.
TINY_SHARE = 0.1
# A buffer alive over more than this share of forward (an encoder's output, a rotary table) belongs to no boundary.
LONG_LIVED_SHARE = 0.4


def separators(flow: Dataflow) -> tuple[int, ...]:
    """Buffers that are, somewhere in forward, the only sizeable value still needed; in graph order."""
    ops = [i for i, side in enumerate(flow.side) if side is Side.FORWARD and flow.is_op[i]]
    spans = _lifetimes(flow, ops)
    if not spans:
        return ()
    called = [b for b in spans if not flow.is_input[b] and flow.kind[flow.maker(b)] is Kind.EXTERN]
    tiny = TINY_SHARE * statistics.median(flow.size_bytes[buffer] for buffer in called or spans)
    limit = LONG_LIVED_SHARE * len(ops)
    counted = {b: span for b, span in spans.items() if flow.size_bytes[b] >= tiny and span[1] - span[0] <= limit}
    born: dict[int, list[int]] = {}
    dying: dict[int, list[int]] = {}
    for buffer, (start, end) in counted.items():
        born.setdefault(start, []).append(buffer)
        dying.setdefault(end, []).append(buffer)
    live: set[int] = set(born.pop(-1, ()))
    found: set[int] = set()
    for position in range(len(ops)):
        live.difference_update(dying.get(position, ()))
        live.update(born.get(position, ()))
        if len(live) == 1:
            found |= {b for b in live if not flow.is_input[b]}
    return tuple(_without_wide_ones(flow, _one_per_library_call(flow, sorted(found))))


def _one_per_library_call(flow: Dataflow, found: list[int]) -> list[int]:
    """Of boundaries with no library call between them the smallest, then the first: the rest is rebuilt from it at the
    price of a loop."""
    calls = [i for i, kind in enumerate(flow.kind) if kind is Kind.EXTERN]
    groups: dict[int, list[int]] = {}
    for buffer in found:
        groups.setdefault(bisect.bisect_right(calls, flow.maker(buffer)), []).append(buffer)
    return [min(group, key=lambda b: (flow.size_bytes[b], b)) for group in groups.values()]


def _without_wide_ones(flow: Dataflow, found: list[int]) -> list[int]:
    """Less what is larger than its neighbours: the wide inside of a block that is narrow at its ends."""
    sizes = [flow.size_bytes[b] for b in found]
    around = [(sizes[max(0, k - 1)], sizes[min(len(sizes) - 1, k + 1)]) for k in range(len(sizes))]
    ends = {0, len(sizes) - 1}
    return [
        b
        for k, b in enumerate(found)
        if len(found) == 1 or not (sizes[k] > max(around[k]) or (k in ends and sizes[k] > min(around[k])))
    ]


def _lifetimes(flow: Dataflow, ops: list[int]) -> dict[int, tuple[int, int]]:
    """For every buffer that forward makes and reads, the positions in ``ops`` of its making and its last read."""
    place = {i: position for position, i in enumerate(ops)}
    last_read = {buffer: place[i] for i in ops for buffer in flow.reads[i]}
    made = {b: (place[i], last_read[b]) for i in ops for b in flow.makes[i] if b in last_read}
    inputs = [i for i in last_read if flow.is_input[i] and not flow.is_static[i]]
    return made | {i: (-1, last_read[i]) for i in inputs}
