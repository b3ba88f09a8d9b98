"""What it takes generated loops to read and write a value, in bytes at the rate of the device's memory.

On a GPU the bytes of the value. Vectorised C++ keeps a mask in a register of the width of the numbers that it is for
and turns it into bools, and bools into it, element by element through an array (ATen/cpu/vec/vec_mask.h ``VecMask``:
``store`` goes by a cast, a cast by ``from``), which takes longer than moving floats.
"""

from __future__ import annotations

import torch

from recompile.channels_last import on_cpu
from recompile.dataflow import Dataflow
from recompile.loops import first_tensor

# Per element, as bytes moved at the nominal 8 GB/s of one thread: torch 2.13, gcc, AVX-512, tensors of 2 million
# elements. ``x <= 0`` written beside ``relu(x)`` takes 11 ns more; ``where(mask, 0, g)`` takes 3 ns more than
# ``where(x <= 0, 0, g)``.
BYTES_TO_WRITE_BOOL = 88
BYTES_TO_READ_BOOL = 24


def moves_of(flow: Dataflow) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By buffer: what reading it takes, and what writing it takes."""
    if not on_cpu(flow):
        return flow.size_bytes, flow.size_bytes
    is_bool = [is_mask(node.meta.get("val")) for node in flow.nodes]
    read, written = (
        tuple(
            numel * each if mask else size
            for mask, size, numel in zip(is_bool, flow.size_bytes, flow.numel, strict=True)
        )
        for each in (BYTES_TO_READ_BOOL, BYTES_TO_WRITE_BOOL)
    )
    return read, written


def is_mask(val: object) -> bool:
    tensor = first_tensor(val)
    return tensor is not None and tensor.dtype is torch.bool
