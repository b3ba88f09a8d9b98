"""From annotated graph and options to a plan: shares of a budget become bytes here, planners see bytes only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from recompile.dataflow import dataflow_of, rebuilt_in_backward
from recompile.errors import BudgetError, PlanError
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.options import Options
from recompile.planner.dual import Certificate
from recompile.planner.mincut import forget, mincut, search_of
from recompile.planner.pool import Candidate
from recompile.timeline import Timeline
from recompile.tradeoff import points_of
from recompile.units import format_bytes

# Share of a budget in bytes that is kept back for what the prediction misses. Measured peaks lay at most 0.4 % above
# the predicted ones on GPT-2 and Llama-like models on the CPU (`make demo` prints both).
PREDICTION_MARGIN = 0.01


def decide(joint: JointGraph, hardware: Hardware, options: Options) -> tuple[Plan, Budget]:
    """The plan of the chosen planner within the chosen budget, and the bytes that the planner was given.

    Raises BudgetError when none fits and PlanError when the graph cannot be split or the planner broke its contract.
    """
    planner = options.planner_function()
    try:
        budget = resolve_budget(options, joint, hardware, planner)
        plan, budget = plan_within(planner, joint, hardware, budget, options)
        search = search_of(joint, hardware) if planner is mincut else None  # the one that just answered
    except BudgetError as error:
        raise (with_margin(error, options) if isinstance(options.memory_budget, int) else error) from None
    finally:
        forget()
    check_plan(joint, plan, budget, options.planner_name())
    if search is None:
        return with_bounds(Timeline(joint, hardware), plan, budget), budget
    return with_bounds(search.pool.timeline, plan, budget, search.pool.frontier(), search.baselines), budget


def plan_within(
    planner, joint: JointGraph, hardware: Hardware, budget: Budget, options: Options
) -> tuple[Plan, Budget]:
    """A plan within the budget; the smallest where only what is kept back for the program's sake stands against it."""
    try:
        return planner(joint, hardware, budget), budget
    except BudgetError as refused:
        if not options.kept_back or refused.floor_bytes > predicted_bytes_within(options.memory_budget):
            raise
        smallest = Budget(refused.floor_bytes)
        return planner(joint, hardware, smallest), smallest


def with_bounds(
    timeline: Timeline, plan: Plan, budget: Budget, met: Sequence[Candidate] = (),
    baselines: Mapping[str, Candidate] = MappingProxyType({}),
) -> Plan:  # fmt: skip
    """The plan with its certificate: how fast, and how small, any plan could be. The same for every planner.

    ``met``, ``baselines``: plans that it is to be compared with; what bounds this plan's time bounds theirs.
    """
    certificate = Certificate(timeline)
    bound = certificate.seconds(budget.peak_bytes)
    return replace(
        plan,
        lower_bound_seconds=bound if math.isfinite(bound) else None,
        floor_bound_bytes=certificate.floor_bytes(),
        frontier=points_of(met, certificate),
        baselines=tuple(zip(baselines, points_of(list(baselines.values()), certificate), strict=True)),
    )


def with_margin(error: BudgetError, options: Options) -> BudgetError:
    """A planner's refusal in the user's terms: the smallest ``memory_budget`` that would do, margin included."""
    floor_bytes = budget_bytes_for(error.floor_bytes)
    return BudgetError(
        f"no plan of {options.planner_name()!r} keeps the step's peak within memory_budget="
        f"{format_bytes(options.memory_budget)}: the smallest budget that it can keep is {format_bytes(floor_bytes)} "
        f"({floor_bytes} bytes) over what is allocated when forward starts. Raise memory_budget to at least that, or "
        f"lower the batch size or sequence length.",
        floor_bytes,
    )


def resolve_budget(options: Options, joint: JointGraph, hardware: Hardware, planner) -> Budget:
    """Bytes less what is kept back; a share f is floor + f x (fastest plan's peak - floor), both by the planner."""
    memory_budget = options.memory_budget
    if memory_budget is None:
        return Budget(None)
    if isinstance(memory_budget, int):
        return Budget(max(0, predicted_bytes_within(memory_budget) - options.kept_back))
    fastest = planner(joint, hardware, Budget(None)).peak_bytes
    try:
        floor = planner(joint, hardware, Budget(0)).peak_bytes
    except BudgetError as error:
        floor = error.floor_bytes
    return Budget(floor + int(memory_budget * (fastest - floor)))


def predicted_bytes_within(memory_budget: int) -> int:
    """The largest predicted peak that a budget in bytes admits: the budget less the margin."""
    return math.floor(memory_budget / (1 + PREDICTION_MARGIN))


def budget_bytes_for(peak_bytes: int) -> int:
    """The smallest budget in bytes that admits a plan of this predicted peak, margin included."""
    return math.ceil(peak_bytes * (1 + PREDICTION_MARGIN))


def check_plan(joint: JointGraph, plan: Plan, budget: Budget, name: str) -> None:
    """Refuse a plan that saves what cannot be saved, or leaves a value to recomputation that must not be recomputed."""
    if not isinstance(plan, Plan):
        raise PlanError(f"planner {name!r} returned a {type(plan).__name__}, not a recompile.Plan")
    if budget.peak_bytes is not None and plan.peak_bytes > budget.peak_bytes:
        raise PlanError(
            f"planner {name!r} returned a plan with a peak of {plan.peak_bytes} bytes for a budget of "
            f"{budget.peak_bytes}; it must raise recompile.BudgetError when no plan fits"
        )
    saved = {choice.node for choice in plan.saved}
    for node in saved:
        reason = joint.notes[node].cannot_save
        if reason is not None and node.op != "placeholder":
            raise PlanError(f"planner {name!r} saves {node.name}, which cannot be saved: {reason}")
    flow = dataflow_of(joint)
    rebuilt, _ = rebuilt_in_backward(flow, frozenset(flow.index[node] for node in saved if node.op != "placeholder"))
    for node in [*(choice.node for choice in plan.recomputed), *(flow.nodes[i] for i in rebuilt)]:
        reason = joint.notes[node].cannot_recompute
        if reason is not None:
            raise PlanError(f"planner {name!r} recomputes {node.name}, which must not be recomputed: {reason}")
