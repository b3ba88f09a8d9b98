"""Flips of single values: which go together, and the climb from one improvement to the next."""

from array import array
from dataclasses import dataclass

from recompile.errors import PlanError
from recompile.planner.flips import climb, flip_groups
from recompile.planner.mincut import is_smaller
from recompile.planner.network import cut_network
from recompile.planner.pool import Candidate
from recompile.timeline import Simulation
from tests.notation import H100
from tests.test_segments import CHAIN, cut_at

BYTES_OF_A_VALUE = 4 * 8 * 4


def groups(saved, **limits):
    joint, flow, segments = cut_at(CHAIN, "e1", "e2", "e3")
    place = {node.name: i for i, node in enumerate(flow.nodes)}
    found = flip_groups(cut_network(joint, flow, H100), segments, frozenset(place[name] for name in saved), **limits)
    return {frozenset(flow.nodes[i].name for i in group) for group in found}


def test_a_value_is_flipped_in_all_equal_segments_that_treat_it_alike():
    together = groups(["e1", "e2", "e3"])
    assert {frozenset({"a2", "a3"}), frozenset({"e2", "e3"}), frozenset({"a1"}), frozenset({"e1"})} <= together
    apart = groups(["e1", "e2"])
    assert {frozenset({"a2", "a3"}), frozenset({"e2"}), frozenset({"e3"})} <= apart
    assert not any({"x", "w1", "t"} & group for group in together)  # inputs are there anyway


def test_what_would_take_too_many_bytes_is_not_kept_and_small_values_are_left_alone():
    saved, one = ["e1", "e2", "e3"], BYTES_OF_A_VALUE
    assert frozenset({"a2", "a3"}) in groups(saved, most_bytes=2 * one)
    fewer = groups(saved, most_bytes=2 * one - 1)
    assert frozenset({"a2", "a3"}) not in fewer and {frozenset({"a1"}), frozenset({"e2", "e3"})} <= fewer
    assert frozenset({"a1"}) in groups(saved, least_bytes=one) and not groups(saved, least_bytes=one + 1)


@dataclass(frozen=True)
class Scored:
    """Stands for a simulated plan: the fewer of the values 1 to 5 it saves the better, but 3 must be saved."""

    saved: frozenset[int]

    @property
    def cost(self):
        return len(self.saved) + 10 * (3 not in self.saved)


def climbed(most_flips):
    asked = []

    def simulated(saved):
        asked.append(saved)
        if 5 not in saved:
            raise PlanError("5 cannot be rebuilt")
        return Scored(saved)

    singles = [frozenset({i}) for i in range(1, 6)]
    start = Scored(frozenset(range(1, 6)))
    found = climb(start, lambda saved: singles, simulated, lambda new, best: new.cost < best.cost, most_flips)
    return [sorted(candidate.saved) for candidate in found], len(asked)


def test_each_improvement_is_the_start_of_the_next_and_a_plan_that_cannot_be_is_passed_over():
    assert climbed(100) == ([[2, 3, 4, 5], [3, 4, 5], [3, 5]], 10)  # the second pass finds nothing


def test_the_climb_ends_after_as_many_flips_as_it_was_given():
    assert climbed(2) == ([[2, 3, 4, 5], [3, 4, 5]], 2)


def step_of(forward_bytes, backward_bytes, seconds=1.0):
    """A plan of two moments."""
    simulation = Simulation(
        1, array("q", [0, 1]), array("q", [forward_bytes, backward_bytes]), array("d", [seconds, 0.0]), 0
    )
    return Candidate(frozenset(), frozenset(), simulation, 0)


def test_of_plans_with_equal_peaks_that_is_smaller_which_leaves_more_room_in_the_other_half():
    assert is_smaller(step_of(80, 100), step_of(90, 100)) and not is_smaller(step_of(90, 100), step_of(80, 100))
    assert is_smaller(step_of(99, 99), step_of(10, 100))
    assert is_smaller(step_of(90, 100, seconds=1.0), step_of(90, 100, seconds=2.0))
