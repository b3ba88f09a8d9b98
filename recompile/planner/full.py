"""Recompute whole blocks: keep the block boundaries and what must not be run twice, rebuild the rest ("full"
checkpointing).
"""

from __future__ import annotations

from recompile.dataflow import Dataflow
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.planner.finish import check_budget, made_legal, plan_from
from recompile.planner.separators import separators
from recompile.timeline import Timeline


def full(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
    """The plan that keeps block boundaries alone. Raises BudgetError when its peak does not fit."""
    timeline = Timeline(joint, hardware)
    saved = made_legal(joint, timeline.flow, full_recompute_set(joint, timeline.flow))
    simulation = timeline.simulate(saved)
    check_budget(budget, simulation.peak_bytes, "full")
    boundary = "a block boundary: the block after it is rebuilt from it"
    return plan_from(timeline, saved, simulation, {i: boundary for i in separators(timeline.flow) if i in saved})


def full_recompute_set(joint: JointGraph, flow: Dataflow) -> frozenset[int]:
    """The block boundaries that can be saved."""
    return frozenset(i for i in separators(flow) if joint.notes[flow.nodes[i]].cannot_save is None)
