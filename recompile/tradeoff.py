"""The whole trade-off between peak memory and time of one training step: every plan that no other beats in both."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recompile.hardware import Hardware
from recompile.joint import JointGraph
from recompile.planner.mincut import Search
from recompile.report.text import frontier_table


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan: bytes over what is allocated when forward starts, predicted seconds of forward and backward."""

    peak_bytes: int
    step_seconds: float
    saved_bytes: int
    recompute_flops: int


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
    return Frontier(points_of(Search(joint, hardware).pool.frontier()), hardware.name)


def points_of(candidates: Sequence[Any]) -> tuple[FrontierPoint, ...]:
    """Points of planner candidates, in order."""
    return tuple(
        FrontierPoint(c.peak_bytes, c.step_seconds, c.simulation.saved_bytes, c.recompute_flops) for c in candidates
    )
