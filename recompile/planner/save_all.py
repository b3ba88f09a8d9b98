"""Keep every value that backward reads, as eager autograd does: nothing that forward computed is computed again."""

from __future__ import annotations

from recompile.dataflow import Dataflow, needed_by_backward
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan, Side
from recompile.planner.finish import check_budget, made_legal, plan_from
from recompile.timeline import Timeline


def save_all(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
    """The plan that recomputes nothing it could save. Raises BudgetError when its peak does not fit."""
    timeline = Timeline(joint, hardware)
    saved = made_legal(joint, timeline.flow, save_all_set(joint, timeline.flow))
    simulation = timeline.simulate(saved)
    check_budget(budget, simulation.peak_bytes, "save_all")
    return plan_from(timeline, saved, simulation, {})


def save_all_set(joint: JointGraph, flow: Dataflow) -> frozenset[int]:
    """Per need the value itself if it can be saved, else the values it is made of; what only backward needs runs
    there.
    """
    saved: set[int] = set()
    seen: set[int] = set()
    pending = list(needed_by_backward(flow))
    while pending:
        i = pending.pop()
        if i in seen or flow.is_input[i]:
            continue
        seen.add(i)
        runs_in_forward = flow.side[flow.op[i]] is Side.FORWARD  # attention's log-sum-exp: only backward reads it
        if joint.notes[flow.nodes[i]].cannot_save is None and runs_in_forward:
            saved.add(i)
        else:
            pending.extend(flow.inputs[i])
    return frozenset(saved)
