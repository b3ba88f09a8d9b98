"""Reports for terminals: tables through rich, rendered to plain text so that they can be printed, logged and
compared.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from recompile.report.explanation import GraphReport, ValueRow
from recompile.report.rows import value_row
from recompile.units import format_bytes, format_flop, format_seconds

if TYPE_CHECKING:
    from recompile.hardware import Hardware
    from recompile.joint import JointGraph
    from recompile.report.explanation import Explanation
    from recompile.tradeoff import Frontier

WIDTH = 400  # wide enough that nothing is cut; tables take what they need
MAX_ROWS = 30


def explanation_text(explanation: Explanation) -> str:
    """Totals, then per graph what is saved and what is recomputed, the largest first."""
    from recompile.report.advice import advice_for

    if not explanation.graphs:
        return "\n".join(f"recompile: {note}" for note in explanation.notes or ["no training graph was compiled yet"])
    several = f" in {len(explanation.graphs)} graphs, each planned on its own" if len(explanation.graphs) > 1 else ""
    lines = [
        f"recompile: predicted peak {format_bytes(explanation.peak_bytes)} over what is allocated when forward starts, "
        f"{format_bytes(explanation.saved_bytes)} saved for backward, "
        f"{format_flop(explanation.recompute_flops)} recomputed{several}",
        *explanation.notes,
        *(f"advice: {advice}" for advice in advice_for(explanation)),
    ]
    if explanation.program is not None:
        lines.append(program_text(explanation))
    if explanation.footprint is not None:
        lines += ["", str(explanation.footprint)]
    for number, graph in enumerate(explanation.graphs):
        lines.append(graph_text(graph, number, len(explanation.graphs)))
    return "\n".join(lines)


def program_text(explanation: Explanation) -> str:
    """Inductor's own program beside the prediction."""
    program = explanation.program
    peak = explanation.peak_bytes / program.peak_bytes - 1 if program.peak_bytes else 0.0
    seconds = explanation.step_seconds / program.seconds - 1 if program.seconds else 0.0
    return (
        f"Inductor's program for {program.chip.device_name}: peak {format_bytes(program.peak_bytes)} (forward "
        f"{format_bytes(program.forward_peak_bytes)}, backward {format_bytes(program.backward_peak_bytes)}), "
        f"{program.num_launches} launches, {format_bytes(program.moved_bytes)} moved, "
        f"{format_seconds(program.seconds)}; predicted here: peak {peak:+.1%}, time {seconds:+.1%} of it"
    )


def hardware_table(values: Iterable[Hardware]) -> str:
    """One row a device; rates in TFLOP/s of dense matmuls."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("name", no_wrap=True)
    for title in ("float32", "bfloat16", "float8", "GB/s", "memory", "launch"):
        table.add_column(title, justify="right", no_wrap=True)
    for value in values:
        rates = dict(value.flop_per_s)
        shown = [f"{rates[dtype] / 1e12:.4g}" if dtype in rates else "-" for dtype in ("float32", "bfloat16", "float8")]
        table.add_row(
            value.name, *shown, f"{value.byte_per_s / 1e9:.4g}", format_bytes(value.memory_bytes),
            format_seconds(value.launch_s),
        )  # fmt: skip
    return f"dense TFLOP/s, memory bandwidth; sources are in --json\n{_render(table)}"


def graph_text(graph: GraphReport, number: int, count: int) -> str:
    share = graph.recompute_flops / graph.total_flops if graph.total_flops else 0.0
    budget = graph.budget if graph.budget_bytes is None else f"{graph.budget} = {format_bytes(graph.budget_bytes)}"
    head = [
        "",
        f"graph {number + 1} of {count}: budget {budget}, planner {graph.planner}, hardware {graph.hardware}",
        f"  predicted peak {format_bytes(graph.peak_bytes)}, step {format_seconds(graph.step_seconds)}; recomputation "
        f"{format_flop(graph.recompute_flops)} ({share:.1%} of the step's FLOP); "
        f"planned in {graph.planning_seconds:.2f} s",
    ]
    if graph.program_bytes is not None:
        head.append(
            f"  the program that Inductor made of it needs {format_bytes(graph.program_bytes)}, by its allocations"
        )
    if graph.lower_bound_seconds is not None:
        head.append(f"  {bound_text(graph)}")
    if graph.ended_by:
        head.append(f"  ends at a graph break: {graph.ended_by}")
    if graph.sizes:
        head.append(f"  planned at the sizes {', '.join(graph.sizes)}; {reach_text(graph)}")
    kept = [row for row in graph.saved if row.kind != "input"]
    inputs = [row for row in graph.saved if row.kind == "input"]
    head.append(f"  {len(inputs)} inputs and parameters are read again in backward; they are allocated anyway")
    saved = _table(f"saved: {len(kept)} values", kept, key=lambda row: row.size_bytes)
    again = _table(f"recomputed: {len(graph.recomputed)} ops", graph.recomputed, key=lambda row: row.again_seconds)
    return "\n".join([*head, saved, again])


def bound_text(graph: GraphReport) -> str:
    """How far the plan can be from the best one, as far as the model of the step goes."""
    within = "" if graph.budget_bytes is None else " within the budget"
    floor = f"; no peak is below {format_bytes(graph.floor_bound_bytes)}" if graph.floor_bound_bytes is not None else ""
    return (
        f"at most {share_above(graph.step_seconds, graph.lower_bound_seconds)} from optimal by this model: no plan"
        f"{within} takes less than {format_seconds(graph.lower_bound_seconds)}{floor}"
    )


def share_above(seconds: float, bound: float) -> str:
    """By how much a time exceeds a bound on it."""
    return f"{max(0.0, seconds / bound - 1) if bound else 0.0:.1%}"


def price_figure(us_per_mib: float) -> str:
    """Microseconds a MiB, in two digits below ten: ``1.6``, ``0.031``, ``1281``."""
    return f"{us_per_mib:.0f}" if us_per_mib >= 10 else f"{us_per_mib:.2g}"


def frontier_table(frontier: Frontier) -> str:
    """One row a plan, from the smallest peak to the fastest."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    bounded = any(point.lower_bound_seconds is not None for point in frontier.points)
    titles = ("peak", "step", "slower than fastest", "saved", "recomputed")
    for title in (*titles, "at most above optimum") if bounded else titles:
        table.add_column(title, justify="right", no_wrap=True)
    fastest = min((point.step_seconds for point in frontier.points), default=0.0)
    for point in frontier.points:
        slower = point.step_seconds / fastest - 1 if fastest else 0.0
        bound = point.lower_bound_seconds
        table.add_row(
            format_bytes(point.peak_bytes), format_seconds(point.step_seconds), f"{slower:.1%}",
            format_bytes(point.saved_bytes), format_flop(point.recompute_flops),
            *([] if not bounded else ["-" if bound is None else share_above(point.step_seconds, bound)]),
        )  # fmt: skip
    head = f"recompile: {len(frontier.points)} plans on {frontier.hardware}; peaks over what forward starts with"
    return f"{head}\n{_render(table)}"


def reach_text(graph: GraphReport) -> str:
    """What happens at larger sizes."""
    if graph.limits:
        limits = ", ".join(f"{name}<={limit}" for name, limit in graph.limits)
        return f"the plan keeps the budget and serves up to {limits}, larger ones are planned anew"
    return "larger ones run the same plan and need more memory"


def joint_graph_table(joint: JointGraph) -> str:
    """All nodes in graph order with side, storage, bytes, work, intensity, seconds and what is not allowed."""
    table = Table(box=None, pad_edge=False)
    for title in ("node", "op", "shape", "dtype", "side", "storage"):
        table.add_column(title, no_wrap=True)
    for title in ("bytes", "FLOP", "moved", "FLOP/B", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("cannot be saved")
    table.add_column("cannot be recomputed")
    nodes = joint.nodes
    for node in nodes:
        row = value_row(node, joint.notes[node], nodes)
        table.add_row(
            row.name, row.op, "x".join(row.shape), row.dtype, row.side, row.storage, str(row.size_bytes), str(row.flop),
            str(row.read_bytes + row.write_bytes), f"{row.intensity:.2f}", format_seconds(row.seconds),
            row.cannot_save or "", row.cannot_recompute or "",
        )  # fmt: skip
    return _render(table, width=WIDTH)


def _table(title: str, rows: Iterable[ValueRow], key: Callable[[ValueRow], float]) -> str:
    """Rows of equal layers folded into one: same op, shape, dtype, line and reason. Sorted by their sum.

    Of an op that runs again the time is what that adds to the step, of others that of the op alone.
    """
    groups: dict[tuple, list[ValueRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.dtype, row.source, row.reason), []).append(row)
    folded = sorted(groups.values(), key=lambda group: (-sum(map(key, group)), group[0].name))
    if not folded:
        return f"  {title}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("name", "op", "shape", "dtype"):
        table.add_column(name, no_wrap=True)
    is_again = folded[0][0].decision == "recomputed"
    for name in ("size", "FLOP", "FLOP/B", "adds" if is_again else "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("source", no_wrap=True)
    table.add_column("reason (each)", no_wrap=True)
    for group in folded[:MAX_ROWS]:
        row = group[0]
        table.add_row(
            row.name if len(group) == 1 else f"{row.name} and {len(group) - 1} alike",
            row.op, "x".join(row.shape), row.dtype,
            format_bytes(sum(r.size_bytes for r in group)), format_flop(sum(r.flop for r in group)),
            f"{row.intensity:.1f}", format_seconds(sum(r.again_seconds if is_again else r.seconds for r in group)),
            short_source(row.source), row.reason,
        )  # fmt: skip
    text = _render(table)
    if len(folded) > MAX_ROWS:
        rest = [row for group in folded[MAX_ROWS:] for row in group]
        text += f"\n... and {len(rest)} more, {format_bytes(sum(row.size_bytes for row in rest))}; all are in to_json()"
    return text


def short_source(source: str) -> str:
    """The last two parts of a path: enough to find the line, short enough for a column."""
    return os.sep.join(source.split(os.sep)[-2:])


def _render(table: Table, width: int = WIDTH) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, no_color=True, highlight=False, soft_wrap=True).print(
        table, crop=False, soft_wrap=True
    )
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())
