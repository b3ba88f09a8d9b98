"""From work and hardware to seconds."""

from __future__ import annotations

import torch

from recompile.hardware import Hardware
from recompile.joint import Kind, Work

RUNS_NOTHING = frozenset({Kind.INPUT, Kind.VIEW, Kind.VALUE, Kind.OUTPUT})


def roofline_seconds(work: Work, hardware: Hardware, dtype: torch.dtype, kind: Kind) -> float:
    """Seconds of one op run on its own: the slower of its arithmetic and its memory traffic, and one kernel launch.

    ``dtype`` picks the rate of library calls, whose arithmetic is matmuls; all else runs at the vector rate. The
    bound of Williams, Waterman and Patterson (2009), "Roofline": nothing overlaps a launch, the rest overlaps fully.
    """
    if kind in RUNS_NOTHING:
        return 0.0
    flop_per_s = hardware.matmul_flop_per_s(dtype) if kind is Kind.EXTERN else hardware.vector_flop_per_s
    moved_bytes = work.read_bytes + work.write_bytes
    return max(work.flop / flop_per_s, moved_bytes / hardware.byte_per_s) + hardware.launch_s
