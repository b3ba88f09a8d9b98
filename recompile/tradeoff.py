"""The whole trade-off between peak memory and time of one training step: every plan that no other beats in both."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recompile.hardware import Hardware
from recompile.joint import FrontierPoint, JointGraph
from recompile.planner.dual import Certificate
from recompile.planner.mincut import Search
from recompile.planner.pool import Candidate
from recompile.report.text import frontier_table

NUM_BOUNDED = 6  # plans for which prices are sought; bounds of the others follow from theirs


@dataclass(frozen=True)
class Frontier:
    """Plans from the smallest peak to the fastest step: from point to point the peak rises and the time falls."""

    points: tuple[FrontierPoint, ...]
    hardware: str

    def __str__(self) -> str:
        return frontier_table(self)

    def to_json(self) -> dict[str, Any]:
        return {"hardware": self.hardware, "points": [asdict(point) for point in self.points]}

    def plot(self, path: str | os.PathLike, others: Iterable[tuple[str, int, float]] = ()) -> None:
        """Write a picture (PNG, SVG or PDF, by the ending): step time against peak.

        ``others``: named points of other methods, as (name, peak bytes, step seconds). Needs matplotlib.
        """
        from recompile.report.plot import plot_frontier

        plot_frontier(self, path, list(others))


def frontier_of(joint: JointGraph, hardware: Hardware) -> Frontier:
    """The frontier of an annotated graph, from one search: as ``mincut`` would answer any budget."""
    return frontier_of_search(Search(joint, hardware), hardware)


def frontier_of_search(search: Search, hardware: Hardware) -> Frontier:
    """The plans that a search has met, with bounds."""
    plans = search.pool.frontier()
    certificate = Certificate(search.pool.timeline)
    for plan in plans[:: max(1, len(plans) // NUM_BOUNDED)]:
        certificate.seconds(plan.peak_bytes, plan.step_seconds)
    return Frontier(points_of(plans, certificate), hardware.name)


def points_of(candidates: Sequence[Candidate], certificate: Certificate) -> tuple[FrontierPoint, ...]:
    """Points of planner candidates, in order, with the bounds that the certificate has found until now."""
    return tuple(
        FrontierPoint(
            peak_bytes=c.peak_bytes,
            step_seconds=c.step_seconds,
            saved_bytes=c.simulation.saved_bytes,
            recompute_flops=c.recompute_flops,
            lower_bound_seconds=certificate.seconds_so_far(c.peak_bytes),
        )
        for c in candidates
    )
