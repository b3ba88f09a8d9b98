"""Values that Inductor writes straight into the result of a ``cat``, so that one allocation holds both.

The result is allocated when the first of its slices is made, and freed after the last use of it or of any slice. A
model of ``ConcatKernel`` (torch/_inductor/ir.py) and of ``cat`` (lowering.py). What the loops read and write is left as
it is: a loop that copies the other inputs is counted as if it copied the slices too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from recompile.asks import SCATTERS
from recompile.channels_last import on_cpu
from recompile.dataflow import Dataflow
from recompile.joint import Kind
from recompile.kernels import ROLES, Schedule
from recompile.lifetimes import DIES, IN_STORAGE, WRITTEN
from recompile.work import name_of


class Lives(NamedTuple):
    """The result of a ``cat`` with slices in it: the kernels, by place, that allocate it and after which it is freed,
    None if it outlives the program.
    """

    whole: int
    size_bytes: int
    birth: int
    death: int | None


def slices_of(flow: Dataflow) -> dict[int, int]:
    """Per buffer that a ``cat`` takes as it is, the buffer of the ``cat``, if it can be made there.

    It must be what a loop computes, and no input of an earlier library call, for which its strides are fixed. The first
    ``cat`` that takes it has it. On a GPU a ``cat`` that only loops read may be computed inside of them instead, and is
    left out.
    """
    is_cpu = on_cpu(flow)
    ever_called = {b for i, kind in enumerate(flow.kind) if kind is Kind.EXTERN for b in flow.reads[i]}
    called: set[int] = set()  # what library calls before the node that is looked at read
    found: dict[int, int] = {}
    for i, node in enumerate(flow.nodes):
        if flow.kind[i] is Kind.EXTERN:
            called.update(flow.reads[i])
        if is_cat(flow, i) and (is_cpu or i in ever_called):
            for x in flow.inputs[i]:
                is_free = flow.buffer[x] == x and x not in called and x not in found
                if is_free and is_made_by_loop(flow, x) and flow.nodes[x].meta["val"].dtype == node.meta["val"].dtype:
                    found[x] = i
    return found


def counted_once(flow: Dataflow, slices: dict[int, int]) -> Dataflow:
    """The same with the bytes of slices taken off their ``cat``: no sum over buffers exceeds what their storages take,
    wherever the slices are made.
    """
    size = list(flow.size_bytes)
    for x, whole in slices.items():
        size[whole] -= size[x]
    return replace(flow, size_bytes=tuple(size))


def is_cat(flow: Dataflow, i: int) -> bool:
    return flow.makes[i] == (i,) and flow.kind[i] is Kind.POINTWISE and name_of(flow.nodes[i].target) == "cat"


def is_made_by_loop(flow: Dataflow, i: int) -> bool:
    """Whether a loop computes the value and it alone: no ``cat``, whose own place is fixed, and no scatter."""
    is_own = flow.makes[i] == (i,) and flow.kind[i] in (Kind.POINTWISE, Kind.REDUCTION)
    return is_own and name_of(flow.nodes[i].target) not in SCATTERS | {"cat"}


def storages_in(
    schedule: Schedule, found: bytes, flow: Dataflow, slices: dict[int, int], kept: Collection[int]
) -> tuple[bytes, list[Lives]]:
    """The storages of several buffers in a program, and ``fates`` with the bit IN_STORAGE for all uses of these, none
    of which DIES by itself. What a program returns is no slice: its strides are fixed when it is made.
    """
    buffers, bits = schedule.uses // ROLES, np.frombuffer(found, dtype=np.uint8).copy()
    written = set(buffers[(bits & WRITTEN) > 0].tolist())
    members: dict[int, set[int]] = {}
    for x, whole in slices.items():
        if x in written and whole in written and x not in kept:
            members.setdefault(whole, {whole}).add(x)
    lives, users = [], schedule.users()
    for whole, inside in members.items():
        uses = np.flatnonzero(np.isin(buffers, [*inside]))
        births = users[uses[(bits[uses] & WRITTEN) > 0]]
        bits[uses] = bits[uses] & ~np.uint8(DIES) | IN_STORAGE
        death = None if whole in kept else int(users[uses].max())
        lives.append(Lives(whole, flow.size_bytes[whole], int(births.min()), death))
    return bits.tobytes(), lives
