"""What a report holds, made of a graph's nodes, its plan and the plan's simulation."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.fx as fx

from recompile.joint import Annotation, Choice, JointGraph, Plan
from recompile.occupancy import Occupancy, Use
from recompile.report.explanation import GraphReport, Moment, PeakReport, ValueRow
from recompile.report.roles import with_roles
from recompile.rules import source_line
from recompile.timeline import Simulation

CODE_WIDTH = 100  # characters of a source line: enough to recognise it


def report_graph(
    joint: JointGraph, plan: Plan, simulation: Simulation, occupancy: Occupancy, *, planner: str, hardware: str,
    budget: str, budget_bytes: int | None, planning_seconds: float, sizes: tuple[str, ...],
    limits: tuple[tuple[str, int], ...],
) -> GraphReport:  # fmt: skip
    """The report of one planned graph."""
    decided = {choice.node: ("saved", choice) for choice in plan.saved}
    decided |= {choice.node: ("recomputed", choice) for choice in plan.recomputed}
    nodes = joint.nodes
    rows = tuple(value_row(node, joint.notes[node], nodes, *decided.get(node, ("", None))) for node in nodes)
    return GraphReport(
        planner=planner,
        hardware=hardware,
        budget=budget,
        budget_bytes=budget_bytes,
        peak_bytes=plan.peak_bytes,
        saved_bytes=plan.saved_bytes,
        recompute_flops=plan.recompute_flops,
        total_flops=sum(joint.notes[node].work.flop for node in nodes),
        step_seconds=plan.step_seconds,
        lower_bound_seconds=plan.lower_bound_seconds,
        floor_bound_bytes=plan.floor_bound_bytes,
        planning_seconds=planning_seconds,
        ended_by="",
        sizes=sizes,
        limits=limits,
        values=with_roles(rows),
        timeline=moments_of(nodes, simulation, occupancy),
        peaks=tuple(
            PeakReport(
                phase=peak.phase,
                moment=peak.moment,
                node=nodes[peak.node].name,
                live_bytes=peak.live_bytes,
                shared_bytes=peak.shared_bytes,
                alive=tuple((nodes[r.node].name, r.size_bytes, r.use.value) for r in peak.residents),
            )
            for peak in occupancy.peaks
        ),
        frontier=plan.frontier,
        baselines=plan.baselines,
    )


def moments_of(nodes: Sequence[fx.Node], simulation: Simulation, occupancy: Occupancy) -> tuple[Moment, ...]:
    """The simulation's kernels with bytes by use."""
    columns = (occupancy.bytes_of[use] for use in (Use.SAVED, Use.REBUILT, Use.GRADIENT))
    rows = zip(simulation.moments, *columns, strict=True)
    return tuple(Moment(m.phase, nodes[m.node].name, m.live_bytes, m.seconds, *held) for m, *held in rows)


def value_row(
    node: fx.Node, note: Annotation, nodes: Sequence[fx.Node], decision: str = "", choice: Choice | None = None
) -> ValueRow:
    """A node and its annotation as plain values."""
    val = node.meta.get("val")
    is_tensor = isinstance(val, torch.Tensor)
    return ValueRow(
        name=node.name,
        op="input" if node.op == "placeholder" else str(node.target if node.op == "get_attr" else op_name(node)),
        shape=tuple(str(size) for size in val.shape) if is_tensor else (),
        dtype=str(val.dtype).removeprefix("torch.") if is_tensor else type(val).__name__,
        side=note.side.value,
        kind=note.kind.value,
        storage=nodes[note.storage].name,
        size_bytes=note.size_bytes,
        flop=note.work.flop,
        read_bytes=note.work.read_bytes,
        write_bytes=note.work.write_bytes,
        intensity=note.work.intensity,
        seconds=note.seconds,
        cannot_save=note.cannot_save,
        cannot_recompute=note.cannot_recompute,
        inputs=tuple(argument.name for argument in node.all_input_nodes),
        source=source_line(node),
        module=module_path(node),
        decision=decision,
        reason=choice.reason if choice else "",
        code=code_line(node),
    )


def code_line(node: fx.Node) -> str:
    """The text of the user's line that made the node, cut to ``CODE_WIDTH``; "" where the tracer kept none."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    frames = [k for k, line in enumerate(lines) if line.strip().startswith("File ")]
    text = lines[frames[-1] + 1].strip() if frames and frames[-1] + 1 < len(lines) else ""
    return text if len(text) <= CODE_WIDTH else f"{text[: CODE_WIDTH - 1]}…"


def op_name(node: fx.Node) -> str:
    return (
        str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__name__", str(node.target))
    )


def module_path(node: fx.Node) -> str:
    """The module that computed the node, or what the node computes a gradient of, as Dynamo recorded it:
    ``blocks.3.mlp``; "" where unknown.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = re.sub(r"^[LG]\['(\w+)'\]", r"\1", list(stack.values())[-1][0])  # a local or a global of the function
    path = re.sub(r"^self\b", "", path)
    for prefix in ("_modules[", "]", "'", '"'):
        path = path.replace(prefix, "")
    return path.strip(".")
