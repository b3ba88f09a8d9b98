"""Every planner on one graph: python examples/compare_planners.py [graph.json.gz]

The graph is a file, as JointGraph.save or `python -m recompile graph` writes it, so neither the model nor its GPU is
needed here. Without one the example makes its own. For each budget the table has, per planner, the predicted seconds
of a step beside those of the fastest; the last row is a bound: no plan is faster by the same prediction.
"""

import sys
import tempfile
from pathlib import Path

import torch
from custom_planner import greedy
from rich.console import Console
from rich.table import Table
from small_gpt import SmallGPT

import recompile

PLANNERS = ("mincut", "stock", "save_all", "full", greedy)
SHARES = (1.0, 0.6, 0.3, 0.1)  # of the way from the smallest peak that mincut reaches to that of its fastest plan


def make_graph(path: Path) -> None:
    """Trace a step of the small GPT as for an H100, and save it."""
    with torch.device("meta"):
        model, tokens = SmallGPT(layers=3, width=256), torch.empty(8, 513, dtype=torch.int64)
    recompile.joint_graph(model, tokens, hardware="h100").save(path)


def step_seconds(joint: recompile.JointGraph, planner, budget_bytes: int) -> tuple[float | None, float | None]:
    """Predicted seconds of a planner's step and the bound on any plan's; None for a plan that does not fit."""
    try:
        plan = recompile.plan(joint, planner=planner, memory_budget=budget_bytes)
    except recompile.BudgetError:
        return None, None
    return plan.step_seconds, plan.lower_bound_seconds


def main(path: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(path) if path else Path(folder, "graph.json.gz")
        if path is None:
            make_graph(file)
        joint = recompile.JointGraph.load(file)
    points = recompile.frontier(joint).points
    floor, ceiling = points[0].peak_bytes, points[-1].peak_bytes
    # a budget in bytes keeps 1 % back for what the prediction misses
    budgets = [int(1.02 * (floor + share * (ceiling - floor))) for share in SHARES]
    table = Table(title=f"{len(joint.nodes)} nodes on {joint.hardware.name}: ms a step by memory_budget")
    table.add_column("planner")
    for budget in budgets:
        table.add_column(f"{budget / 2**20:.0f} MiB", justify="right")
    bounds: dict[int, float] = {}
    for planner in PLANNERS:
        cells = []
        for budget in budgets:
            seconds, bound = step_seconds(joint, planner, budget)
            cells.append("does not fit" if seconds is None else f"{seconds * 1e3:.3f}")
            if bound is not None:
                bounds[budget] = max(bound, bounds.get(budget, 0.0))
        table.add_row(planner if isinstance(planner, str) else f"{planner.__name__} (yours)", *cells)
    table.add_row("no plan is faster than", *(f"{bounds[b] * 1e3:.3f}" if b in bounds else "-" for b in budgets))
    Console(width=110).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:2])
