"""From annotated graph and options to a plan: shares of a budget become bytes here, planners see bytes only."""

from __future__ import annotations

from recompile.errors import BudgetError, PlanError
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.options import Options
from recompile.planner.mincut import forget


def decide(joint: JointGraph, hardware: Hardware, options: Options) -> tuple[Plan, Budget]:
    """The plan of the chosen planner within the chosen budget, and that budget in bytes.

    Raises BudgetError when none fits and PlanError when the graph cannot be split or the planner broke its contract.
    """
    planner = options.planner_function()
    try:
        budget = resolve_budget(options.memory_budget, joint, hardware, planner)
        plan = planner(joint, hardware, budget)
    finally:
        forget()
    check_plan(joint, plan, options.planner_name())
    return plan, budget


def resolve_budget(memory_budget: float | int | None, joint: JointGraph, hardware: Hardware, planner) -> Budget:
    """Bytes as they are; a share f as floor + f x (peak of the fastest plan - floor), both by the planner itself."""
    if not isinstance(memory_budget, float):
        return Budget(memory_budget)
    fastest = planner(joint, hardware, Budget(None)).peak_bytes
    try:
        floor = planner(joint, hardware, Budget(0)).peak_bytes
    except BudgetError as error:
        floor = error.floor_bytes
    return Budget(floor + int(memory_budget * (fastest - floor)))


def check_plan(joint: JointGraph, plan: Plan, name: str) -> None:
    """Refuse a plan that saves what cannot be saved, or leaves a value to recomputation that must not be recomputed."""
    saved = {choice.node for choice in plan.saved}
    for node in saved:
        reason = joint.notes[node].cannot_save
        if reason is not None and node.op != "placeholder":
            raise PlanError(f"planner {name!r} saves {node.name}, which cannot be saved: {reason}")
    for choice in plan.recomputed:
        reason = joint.notes[choice.node].cannot_recompute
        if reason is not None:
            raise PlanError(f"planner {name!r} recomputes {choice.node.name}, which must not be recomputed: {reason}")
