"""What an answer keeps for little is given up for what spares more: on stand-ins for simulated plans."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest

from recompile.errors import PlanError
from recompile.planner.exchange import LEAST_GAIN, exchange, likely_groups


@dataclass(frozen=True)
class Weighed:
    """Stands for a simulated plan: each value from 1 to 6 takes 10 bytes and spares 1 second of 100, 7 to 9 a byte each
    and 0.5 seconds; 10 takes 30 bytes and costs half a second, 11 takes 40 and spares 1.5.
    """

    saved: frozenset[int]

    bytes_of: ClassVar[dict[int, int]] = {**dict.fromkeys(range(1, 7), 10), 7: 1, 8: 1, 9: 1, 10: 30, 11: 40}
    seconds_of: ClassVar[dict[int, float]] = {
        **dict.fromkeys(range(1, 7), 1.0), 7: 0.5, 8: 0.5, 9: 0.5, 10: -0.5, 11: 1.5,
    }  # fmt: skip

    @property
    def peak_bytes(self):
        return sum(self.bytes_of[i] for i in self.saved)

    @property
    def step_seconds(self):
        return 100 - sum(self.seconds_of[i] for i in self.saved)


LARGE, SMALL = range(1, 7), range(7, 10)


def exchanged(limit_bytes, *groups, saved=(), most_flips=100, plan=Weighed):
    """Values saved in the end, and how many plans were simulated."""
    asked = []

    def simulated(saved):
        asked.append(saved)
        if 20 in saved:
            raise PlanError("20 cannot be kept")
        return plan(saved)

    found = exchange(plan(frozenset(saved)), map(frozenset, groups), simulated, limit_bytes, most_flips)
    return sorted(found.saved), len(asked)


def test_what_does_not_fit_in_all_equal_segments_is_kept_in_the_last_of_them():
    assert exchanged(35, LARGE)[0] == [4, 5, 6]
    assert exchanged(60, LARGE)[0] == [1, 2, 3, 4, 5, 6]


def test_what_spares_most_for_a_byte_is_kept_first_and_the_rest_takes_what_is_left():
    assert exchanged(13, LARGE, SMALL)[0] == [6, 7, 8, 9]
    assert exchanged(12, LARGE, SMALL)[0] == [7, 8, 9]
    assert exchanged(2, LARGE, SMALL)[0] == [8, 9]


def test_what_is_kept_for_little_makes_room_for_what_spares_more():
    """11 spares 0.0375 seconds a byte, 1 to 6 spare 0.1: four of them in its place."""
    assert exchanged(40, LARGE, [11], saved=[11])[0] == [3, 4, 5, 6]
    assert exchanged(45, SMALL, [11], saved=[11])[0] == [7, 8, 9, 11]
    assert exchanged(40, SMALL, [11], saved=[11])[0] == [11]  # 1.5 seconds, and so 7 to 9


def test_as_much_of_what_was_given_up_as_still_fits_is_kept_again():
    assert exchanged(30, SMALL, [4, 5, 6], saved=[4, 5, 6])[0] == [5, 6, 7, 8, 9]


def test_what_is_cheaper_to_rebuild_than_to_keep_is_not_kept_whatever_the_limit():
    assert exchanged(30, [10], saved=[10])[0] == []
    assert exchanged(math.inf, [10], SMALL, saved=[10])[0] == [7, 8, 9]


def test_nothing_is_given_up_where_all_that_is_wanted_fits():
    assert exchanged(math.inf, [11], SMALL, saved=[11]) == ([7, 8, 9, 11], 2 + 2)  # SMALL by halves: two, three


def test_a_flip_that_no_plan_can_have_is_passed_over_and_flips_end_where_they_were_given_out():
    assert exchanged(35, (19, 20), LARGE)[0] == [4, 5, 6]
    assert exchanged(35, LARGE, most_flips=0) == ([], 0)
    assert exchanged(35, LARGE, most_flips=1)[1] == 2  # one to see what there is, one to make use of it


class Slow(Weighed):
    """Each value spares 0.01 seconds of 100."""

    @property
    def step_seconds(self):
        return 100 - 0.01 * len(self.saved)


def test_equal_segments_stay_alike_where_less_than_the_least_gain_is_in_it():
    assert LEAST_GAIN * 100 < 0.5  # one of 7 to 9 is more
    assert exchanged(1, SMALL)[0] == [9]
    assert exchanged(1, SMALL, plan=Slow)[0] == []


def priced(rebuild, keep, size):
    """A network of values with these seconds and bytes, by value."""
    values = sorted(size)
    return SimpleNamespace(
        candidates=values,
        recompute_seconds=[rebuild.get(i) for i in values],
        save_seconds=[keep.get(i) for i in values],
        flow=SimpleNamespace(size_bytes=size),
    )


@pytest.mark.parametrize(
    ("most", "expected"), [(4, [{1}, {2}, {4}, {3}]), (2, [{1}, {4}]), (3, [{1}, {4}, {3}]), (1, [{4}])]
)
def test_the_cheapest_kept_and_the_dearest_rebuilt_groups_are_looked_at_first(most, expected):
    seconds = {1: 1.0, 2: 4.0, 3: 1.0, 4: 4.0}
    network = priced(seconds, dict.fromkeys(seconds, 0.5), dict.fromkeys(seconds, 8))
    groups = [frozenset({i}) for i in seconds]
    assert [set(group) for group in likely_groups(network, groups, frozenset({1, 2}), most)] == expected
