"""The report of a decision that was just made: the plan simulated again, for its moments and for what it is worth."""

from __future__ import annotations

from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.occupancy import occupancy_of
from recompile.options import Options
from recompile.report.explanation import GraphReport
from recompile.report.rows import report_graph
from recompile.report.worth import with_worth
from recompile.timeline import Timeline


def report_of(
    joint: JointGraph, hardware: Hardware, plan: Plan, budget: Budget, options: Options, planning_seconds: float,
    sizes: tuple[str, ...] = (), limits: tuple[tuple[str, int], ...] = (),
) -> GraphReport:  # fmt: skip
    """``sizes`` and ``limits``: of a graph with symbolic sizes, what it was planned at and up to where it serves."""
    timeline, asked = Timeline(joint, hardware), options.memory_budget
    kept = frozenset(timeline.flow.index[c.node] for c in plan.saved if c.node.op != "placeholder")
    simulation = timeline.simulate(kept)
    report = report_graph(
        joint,
        plan,
        simulation,
        occupancy_of(timeline, kept, simulation),
        planner=options.planner_name(),
        hardware=hardware.name,
        budget=repr(asked),
        budget_bytes=asked if isinstance(asked, int) else budget.peak_bytes,
        planning_seconds=planning_seconds,
        sizes=sizes,
        limits=limits,
    )
    return with_worth(report, timeline, kept, simulation, budget.peak_bytes)
