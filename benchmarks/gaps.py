"""How far from optimal ``mincut`` is, and its lower bound, on graphs small enough to know: ``make gaps``.

Each training step is planned at three budgets between the smallest peak and that of the fastest plan that ``mincut``
knows, and by ``exact``, which proves its plan optimal by the same simulation. Nothing runs. Writes gaps.md beside this
file.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.small_graphs import STEPS
from recompile.ahead import annotated
from recompile.dataflow import Dataflow
from recompile.errors import PlanError
from recompile.hardware import named_hardware
from recompile.joint import Budget, JointGraph
from recompile.planner.dual import Certificate
from recompile.planner.exact import optimum
from recompile.planner.mincut import forget, search_of
from recompile.trace import trace_step

HERE = Path(__file__).parent
HARDWARE = named_hardware()["planner-h100"]
SHARES = (1.0, 0.5, 0.0)  # of the way from the smallest peak to that of the fastest plan


@dataclass(frozen=True)
class Row:
    """One step at one budget; seconds. ``best`` is None where exact gave up."""

    name: str
    num_nodes: int
    share: float
    budget_bytes: int
    mincut: float
    best: float | None
    bound: float
    num_plans: int
    searched: float
    differs: str  # what the best plan saves that mincut's does not, and the other way round

    @property
    def gap(self) -> float | None:
        return None if self.best is None else self.mincut / self.best - 1


def joint_graph(name: str) -> JointGraph:
    """The annotated graph of a step."""
    with torch.device("meta"):
        module, arguments = STEPS[name]()
    return annotated(trace_step(module, arguments), HARDWARE)


def rows_of(name: str) -> list[Row]:
    """A step at every budget."""
    joint = joint_graph(name)
    search = search_of(joint, HARDWARE)
    frontier = search.pool.frontier()
    certificate = Certificate(search.pool.timeline)
    smallest, largest = frontier[0].peak_bytes, frontier[-1].peak_bytes
    rows = []
    for share in SHARES:
        limit = smallest + int(share * (largest - smallest))
        answer = search.answer(Budget(limit))
        started = time.perf_counter()
        try:
            found = optimum(joint, HARDWARE, Budget(limit))
            best, plans, differs = found.best[0], found.num_plans, difference(found.flow, found.saved, answer.saved)
        except PlanError:
            best, plans, differs = None, 0, "not proven"
        rows.append(
            Row(
                name=name,
                num_nodes=len(joint.nodes),
                share=share,
                budget_bytes=limit,
                mincut=answer.step_seconds,
                best=best,
                bound=certificate.seconds(limit),
                num_plans=plans,
                searched=time.perf_counter() - started,
                differs=differs,
            )
        )
    forget()
    return rows


def difference(flow: Dataflow, best: frozenset[int], other: frozenset[int]) -> str:
    """In names: what only the best plan saves, then what only the other does."""
    more, less = (" ".join(flow.nodes[i].name for i in sorted(part)) or "-" for part in (best - other, other - best))
    return f"best saves {more}; mincut {less}"


def markdown(rows: list[Row]) -> str:
    """The table and its summary."""
    lines = [
        "# True gaps of `mincut` on small graphs",
        "",
        f"`make gaps`: training steps planned for {HARDWARE.name} by the simulation, in us. Budgets are shares of the "
        "way from the smallest peak that `mincut` knows to that of its fastest plan. `exact` is proven optimal for the "
        "simulation; the lower bound is what every plan carries. Nothing here says how well the simulation foresees "
        "Inductor's program.",
        "",
        "| step | nodes | budget, MiB (share) | mincut | exact | true gap | lower bound | its gap | plans simulated |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = "not proven" if row.best is None else f"{row.best * 1e6:.2f}"
        gap = "-" if row.gap is None else f"{row.gap:.2%}"
        lines.append(
            f"| {row.name} | {row.num_nodes} | {row.budget_bytes / 2**20:.2f} ({row.share:g}) | {row.mincut * 1e6:.2f} "
            f"| {best} | {gap} | {row.bound * 1e6:.2f} | {row.mincut / row.bound - 1:.2%} | {row.num_plans} |"
        )
    gaps = [row.gap for row in rows if row.gap is not None]
    bounds = [row.mincut / row.bound - 1 for row in rows]
    lines += [
        "",
        f"{len(gaps)} of {len(rows)} plans have a proven optimum. True gap: median {statistics.median(gaps):.2%}, mean "
        f"{statistics.mean(gaps):.2%}, largest {max(gaps):.2%}. Gap to the lower bound: median "
        f"{statistics.median(bounds):.2%}, largest {max(bounds):.2%}.",
        "",
    ]
    return "\n".join(lines)


def main(names: list[str]) -> None:
    """Plan all steps, or those named, and write the table."""
    rows = []
    for name in names or STEPS:
        for row in rows_of(name):
            gap = "not proven" if row.gap is None else f"{row.gap:.2%}"
            print(f"{row.name}, share {row.share:g}: {gap}, {row.searched:.1f} s; {row.differs}", flush=True)
            rows.append(row)
    (HERE / "gaps.md").write_text(markdown(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
