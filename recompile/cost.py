"""From work and hardware to seconds, by the roofline or by a cost model of the user's own.

A cost model is a function ``(node, note, hardware) -> seconds``, given as the option ``cost``. It prices one run of a
library call: a matmul, a convolution, attention, a custom op (``Kind.EXTERN``). ``note.work`` has its FLOP and bytes,
``note.seconds`` the roofline's answer, which is the place to start from. What Inductor generates code for is not asked
about: such ops cost what the kernels cost that they are fused into, from the rates of the Hardware.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
import torch.fx as fx

from recompile.errors import OptionError
from recompile.hardware import Hardware
from recompile.hardware import resolve as resolve_hardware
from recompile.joint import Annotation, Cost, JointGraph, Kind, Work

RUNS_NOTHING = frozenset({Kind.INPUT, Kind.VIEW, Kind.VALUE, Kind.OUTPUT})
CPU = torch.device("cpu")


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


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype that decides an op's rate: that of its first floating input, else of its result."""
    values = [argument.meta.get("val") for argument in node.all_input_nodes] + [node.meta.get("val")]
    tensors = [val for val in values if isinstance(val, torch.Tensor)]
    return next((val.dtype for val in tensors if val.dtype.is_floating_point), torch.float32)


def with_seconds(node: fx.Node, note: Annotation, hardware: Hardware, cost: Cost | None) -> Annotation:
    """A note with the seconds of a device. Raises OptionError where ``cost`` gives no number of seconds."""
    priced_note = replace(note, seconds=roofline_seconds(note.work, hardware, dtype_of(node), note.kind))
    if cost is None or note.kind is not Kind.EXTERN or node.target is operator.getitem:
        return priced_note
    seconds = cost(node, priced_note, hardware)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise OptionError(
            f"the cost model {getattr(cost, '__qualname__', cost)!r} gives {seconds!r} for {node.name} "
            f"({node.target}); it must give seconds, 0 or more"
        )
    return replace(priced_note, seconds=float(seconds))


def priced(joint: JointGraph, hardware: str | Hardware, cost: Cost | None = None) -> JointGraph:
    """An annotated graph with the seconds of another device; see ``JointGraph.priced_for``."""
    value = resolve_hardware(hardware, CPU)
    notes = {node: with_seconds(node, note, value, cost) for node, note in joint.notes.items()}
    return replace(joint, notes=notes, hardware=value)
