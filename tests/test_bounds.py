"""Lower bounds against every plan of small graphs: what is claimed of all plans is checked on all of them."""

import math

import pytest
from hypothesis import HealthCheck, assume, given, settings

from recompile.planner.dual import Certificate, floor_bound, lower_bound
from recompile.timeline import Timeline
from tests.notation import CHAIN, H100, annotated
from tests.random_graphs import joint_texts, legal_sets
from tests.test_planners import DROPOUT, residual_chain
from tests.test_timeline import TWO_RESULTS

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


def all_plans(text, device="meta", most=10):
    timeline = Timeline(annotated(text.replace(" cpu\n", f" {device}\n"), device=device), H100)
    sets = legal_sets(timeline.joint, timeline.flow, most)
    return timeline, [] if sets is None else [timeline.simulate(saved) for saved in sets]


def check(timeline, plans):
    certificate = Certificate(timeline)
    floor = min(plan.peak_bytes for plan in plans)
    assert certificate.floor_bytes() <= floor
    peaks = sorted({plan.peak_bytes for plan in plans})
    for limit in (None, peaks[0], peaks[len(peaks) // 2], peaks[-1], (peaks[0] + peaks[-1]) // 2):
        best = min(plan.step_seconds for plan in plans if limit is None or plan.peak_bytes <= limit)
        for known in (None, best):
            assert certificate.seconds(limit, known) <= best


@pytest.mark.parametrize("device", ["meta", "cpu"])
@RELAXED
@given(text=joint_texts())
def test_no_plan_of_a_random_graph_is_faster_or_smaller_than_its_bounds(device, text):
    timeline, plans = all_plans(text, device)
    assume(plans)
    check(timeline, plans)


@pytest.mark.parametrize(
    "text", [CHAIN, DROPOUT, TWO_RESULTS, residual_chain(3)], ids=["chain", "dropout", "two results", "residual"]
)
def test_no_plan_of_a_known_graph_is_faster_or_smaller_than_its_bounds(text):
    check(*all_plans(text))


def bounds(text, *limits):
    certificate = Certificate(Timeline(annotated(text), H100))
    return [certificate.seconds(limit) for limit in limits]


def test_on_the_cpu_loops_over_columns_and_over_rows_are_not_bounded_to_kernels_of_their_own():
    """There all of forward is one kernel, on a GPU it is two at least."""
    text = """
        x = input 2048x512
        t = tangent 2048x512
        c = cos x
        m = mean.dim c [0] True
        a = sub x m
        d = cos a
        n = mean.dim d [0] True
        e = sub a n
        v = var_mean.correction x [1] correction=0 keepdim=True
        u = getitem v 1
        f = sub x u
        h = add x x
        g = add t t
        return e f h | g
    """
    for device in ("cpu", "meta"):
        timeline, plans = all_plans(text, device)
        assert lower_bound(timeline, None) <= min(plan.step_seconds for plan in plans)


def test_on_a_chain_with_one_choice_both_bounds_are_met():
    """384 bytes take one launch more, a matmul again, than 512; below 384 there is no plan."""
    plain, tight, none = bounds(CHAIN, 512, 384, 383)
    assert floor_bound(Timeline(annotated(CHAIN), H100)) == 384
    assert (plain, tight - plain) == (pytest.approx(12e-6, rel=1e-4), pytest.approx(2e-6, rel=1e-4))
    assert none == math.inf


def test_less_memory_never_bounds_less_time_and_without_a_limit_memory_costs_nothing():
    text = residual_chain(8)
    certificate = Certificate(Timeline(annotated(text), H100))
    limits = [certificate.floor_bytes() * share // 4 for share in (4, 5, 6, 8, 12, 100)]
    for limit in limits:
        certificate.seconds(limit)
    found = [certificate.seconds_so_far(limit) for limit in (*limits, None)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == pytest.approx(lower_bound(Timeline(annotated(text), H100), None))


def test_rounds_end_when_the_bound_reaches_a_known_plan():
    certificate = Certificate(Timeline(annotated(CHAIN), H100))
    assert certificate.seconds(512, known_seconds=certificate.seconds(None)) == certificate.seconds(None)
    assert len(certificate.found) == 1


def test_where_nothing_can_be_planned_the_bound_is_infinite():
    text = """
        x = input 4x8
        s = prims.inductor_seed cpu !must_recompute
        r = prims.inductor_random [4,8] s 'rand' !must_recompute
        y = mul x r
        t = tangent 4x8
        g = mul t r
        return y | g
    """
    assert bounds(text, None, 2**20) == [math.inf, math.inf]
