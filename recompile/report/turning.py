"""A plan with some of its decisions turned around: made legal, simulated, and what that changes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from recompile.errors import PlanError
from recompile.planner.finish import made_legal
from recompile.report.explanation import Turned
from recompile.timeline import Simulation, Timeline, recomputed_ops


@dataclass(frozen=True)
class Decided:
    """The plan that is looked at: what it keeps, as indices into the timeline's dataflow, and its simulation."""

    timeline: Timeline
    kept: frozenset[int]
    simulation: Simulation

    @functools.cached_property
    def flop_again(self) -> int:
        return flop_again(self.timeline, self.kept)

    def turned(self, decisions: frozenset[int]) -> tuple[frozenset[int], Turned] | None:
        """What is kept with these values kept where they are not, and not where they are; what that needs, or needs no
        more, goes with it. None where there is no such plan.
        """
        timeline, before = self.timeline, self.simulation
        try:
            legal = made_legal(timeline.joint, timeline.flow, self.kept ^ decisions)
        except PlanError:  # what a value is made of may be neither kept nor computed again
            return None
        after = timeline.simulate(legal)
        return legal, Turned(
            seconds=after.step_seconds - before.step_seconds,
            flop=flop_again(timeline, legal) - self.flop_again,
            saved_bytes=after.saved_bytes - before.saved_bytes,
            peak_bytes=after.peak_bytes - before.peak_bytes,
        )


def flop_again(timeline: Timeline, kept: frozenset[int]) -> int:
    return sum(timeline.facts.flop[i] for i in recomputed_ops(timeline.flow, kept))
