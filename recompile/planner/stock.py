"""What PyTorch's own min-cut partitioner would save, made legal: the baseline in the same terms.

Its budget is a share of saved bytes (``activation_memory_budget``); for a peak in bytes the largest share that fits
is taken.
"""

from __future__ import annotations

import torch.fx as fx

from recompile.dataflow import Dataflow
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.planner.finish import check_budget, plan_from
from recompile.planner.pool import Pool
from recompile.timeline import Timeline
from recompile.torch_private_stock import stock_saved_values, uncompiled_module

RATIOS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)


def stock(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
    """PyTorch's plan at the largest ratio whose predicted peak fits. Raises BudgetError when none does."""
    pool = Pool(Timeline(joint, hardware))
    tried = []
    for ratio in RATIOS:
        tried.append(pool.add(stock_saved_set(joint, pool.timeline.flow, ratio)))
        if budget.peak_bytes is None or tried[-1].peak_bytes <= budget.peak_bytes:
            return plan_from(pool.timeline, tried[-1].saved, tried[-1].simulation, {})
    check_budget(budget, min(candidate.peak_bytes for candidate in tried), "stock")
    raise AssertionError("check_budget raises when nothing fits")


def stock_saved_set(joint: JointGraph, flow: Dataflow, ratio: float) -> frozenset[int]:
    """The nodes that PyTorch would save at a ratio, inputs left out. Works on a copy: it marks the nodes it sees."""
    mapping: dict[fx.Node, fx.Node] = {}
    twin = fx.Graph()
    twin.output(twin.graph_copy(joint.graph, mapping))
    module = uncompiled_module(joint.graph.owning_module, twin)
    original = {copied: node for node, copied in mapping.items()}
    saved = stock_saved_values(module, joint.num_fwd_outputs, ratio)
    return frozenset(flow.index[original[n]] for n in saved if n in original and n.op != "placeholder")
