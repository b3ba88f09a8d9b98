"""From a set of saved nodes to a Plan: made legal, simulated, each choice with its reason."""

from __future__ import annotations

from recompile.dataflow import Dataflow, needed_by_backward, rebuilt_in_backward, rebuilt_nodes
from recompile.errors import BudgetError
from recompile.joint import Budget, Choice, JointGraph, Plan
from recompile.planner.contradiction import contradiction, path_to_need
from recompile.planner.reasons import Reasons
from recompile.timeline import Simulation, Timeline, recomputed_ops


def made_legal(joint: JointGraph, flow: Dataflow, saved: frozenset[int]) -> frozenset[int]:
    """``saved`` plus every value that would otherwise be recomputed although it must not be, less what cannot be
    saved and what backward would not read.
    """
    bases = {flow.buffer[i] if i in flow.cannot_save else i for i in saved}  # a view is kept by its base
    legal = {i for i in bases if i not in flow.cannot_save and not flow.is_input[i]}
    while True:
        rebuilt = rebuilt_nodes(flow, frozenset(legal))
        illegal = sorted(rebuilt & flow.cannot_recompute)
        if not illegal:
            unneeded = legal.difference(needed_by_backward(flow))
            return frozenset(legal).difference(i for i in unneeded if rebuilt.isdisjoint(flow.users[i]))
        savable = {_savable_part(flow, i, rebuilt) for i in illegal} - {None}
        if not savable - legal:
            raise contradiction(joint, flow, path_to_need(flow, illegal[0], rebuilt))
        legal |= savable


def _savable_part(flow: Dataflow, i: int, rebuilt: set[int]) -> int | None:
    """The node itself if it can be saved; else the nearest rebuilt reader of it that can."""
    pending, seen = [i], set()
    while pending:
        node = pending.pop(0)
        if node not in flow.cannot_save:
            return node
        seen.add(node)
        pending += [u for u in flow.users[node] if u in rebuilt and u not in seen]
    return None


def plan_from(timeline: Timeline, saved: frozenset[int], simulation: Simulation, kept_for: dict[int, str]) -> Plan:
    """The Plan value of a legal saved set. ``kept_for`` overrides the reason of some saved nodes."""
    joint, flow, reasons = timeline.joint, timeline.flow, Reasons(timeline)
    _, inputs = rebuilt_in_backward(flow, saved)
    again = recomputed_ops(flow, saved)
    notes = [joint.notes[node] for node in flow.nodes]
    held = "an input of the graph: held by the caller anyway"
    kept = [Choice(flow.nodes[i], held) for i in inputs if flow.nodes[i].op == "placeholder"]
    kept += [Choice(flow.nodes[i], kept_for.get(i) or reasons.for_saving(i)) for i in sorted(saved)]
    return Plan(
        saved=tuple(kept),
        recomputed=tuple(Choice(flow.nodes[i], reasons.for_recomputing(i)) for i in again),
        peak_bytes=simulation.peak_bytes,
        saved_bytes=simulation.saved_bytes,
        recompute_flops=sum(notes[i].work.flop for i in again),
        step_seconds=simulation.step_seconds,
    )


def check_budget(budget: Budget, floor_bytes: int, planner: str) -> None:
    """Raise BudgetError if the smallest peak that the planner reached does not fit."""
    if budget.peak_bytes is not None and floor_bytes > budget.peak_bytes:
        raise BudgetError(
            f"{planner}: {budget.peak_bytes} bytes asked, {floor_bytes} is the smallest peak", floor_bytes
        )
