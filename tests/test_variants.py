"""Values turned around a plan, one in each segment: which, how many at a time, and what the planner gains by them."""

import importlib

import pytest

from recompile.joint import Budget
from recompile.planner import variants
from recompile.planner.network import cut_network
from recompile.planner.variants import turned_plans, turns_of, varied_cuts
from tests.notation import H100, annotated
from tests.test_segments import CHAIN, WIDE_AND_NARROW, cut_at

mincut = importlib.import_module("recompile.planner.mincut")  # the package has its function by this name


def layers(count):
    """x + dropout(softmax(x u)) v, so many times; what is between the matmuls is four times as wide."""
    forward, backward = [f"x0 = input 2048x512\nt{count} = tangent 2048x512\ns = prims.inductor_seeds {count} meta"], []
    for i in range(count):
        forward += [f"u{i} = param 512x2048", f"v{i} = param 2048x512", f"a{i} = mm x{i} u{i}", f"e{i} = exp a{i}"]
        forward += [f"z{i} = sum.dim_IntList e{i} [1] True", f"p{i} = div e{i} z{i}"]
        forward += [f"k{i} = prims.inductor_lookup_seed s {i}"]
        forward += [f"r{i} = prims.inductor_random [2048,2048] k{i} 'rand'", f"b{i} = gt.Scalar r{i} 0.1"]
        forward += [f"d{i} = mul p{i} b{i}", f"m{i} = mm d{i} v{i}", f"x{i + 1} = add x{i} m{i}"]
    for i in reversed(range(count)):
        backward += [f"gd{i} = mm t{i + 1} v{i}'", f"gv{i} = mm d{i}' t{i + 1}", f"gp{i} = mul gd{i} b{i}"]
        backward += [f"h{i} = mul gp{i} p{i}", f"gz{i} = sum.dim_IntList h{i} [1] True", f"q{i} = mul p{i} gz{i}"]
        backward += [f"ga{i} = sub h{i} q{i}", f"gx{i} = mm ga{i} u{i}'", f"gu{i} = mm x{i}' ga{i}"]
        backward += [f"t{i} = add t{i + 1} gx{i}"]
    gradients = " ".join(f"gu{i} gv{i}" for i in range(count))
    return "\n".join([*forward, *backward, f"return x{count} | t0 {gradients}"])


def turned(segments, flow, turns, saved):
    """The plans around one, by names; all in the notation of ``saved``: names with blanks between."""
    index = {node.name: i for i, node in enumerate(flow.nodes)}
    plans = turned_plans(segments, turns, frozenset(index[name] for name in saved.split()))
    return [" ".join(flow.nodes[i].name for i in sorted(plan)) for plan in plans]


def test_every_value_is_turned_once_in_equal_segments_that_are_treated_alike():
    """Boundaries are left alone; a1 is kept besides, and a2, but not a3 in the equal layer."""
    joint, flow, segments = cut_at(CHAIN, "e1", "e2", "e3")
    turns = turns_of(cut_network(joint, flow, H100), segments)
    assert turned(segments, flow, turns, "e1 e2 e3") == ["a1 e1 a2 e2 e3"]
    assert turned(segments, flow, turns, "e1 e2 a3 e3") == ["a1 e1 a2 e2 e3"]  # a3, now treated otherwise, as well


@pytest.mark.parametrize(
    ("price", "base", "expected"), [(1.0, "", ["wide", "narrow"]), (0.0, "narrow wide", ["narrow", "wide"])]
)
def test_cuts_settle_around_what_is_turned(price, base, expected):
    """Where memory is dear each of the two is kept alone; where it costs nothing each is left out alone."""
    joint, flow, segments = cut_at(WIDE_AND_NARROW)
    network = cut_network(joint, flow, H100)
    saved = network.saved_at(price)
    assert " ".join(flow.nodes[i].name for i in sorted(saved)) == base
    found = varied_cuts(network, segments, turns_of(network, segments), price, saved)
    assert [" ".join(flow.nodes[i].name for i in sorted(kept)) for kept in found] == expected


def test_equal_segments_try_different_turns_in_the_same_plan():
    """Two turns a segment: both in one plan where there are two segments of a kind, one after the other else."""
    _, flow, segments = cut_at(CHAIN, "e1", "e2", "e3")
    a1 = [node.name for node in flow.nodes].index("a1")
    turns = {segments.kind[0]: [a1, a1 + 1], segments.kind[1]: [0, 1], segments.kind[3]: []}
    assert turned(segments, flow, turns, "e1 e2 e3") == ["a1 e1 a2 e2", "e2 e3"]


def test_the_largest_values_are_turned_first_and_the_least_never(monkeypatch):
    """One is 4x8, one half of that; with a share of three quarters the lesser is too small to be turned."""
    joint, flow, segments = cut_at(WIDE_AND_NARROW)
    network = cut_network(joint, flow, H100)
    names = [[flow.nodes[offset].name for offset in turns_of(network, segments)[kind]] for kind in segments.kind]
    assert names == [["wide", "narrow"]]
    monkeypatch.setattr(variants, "SMALLEST_SHARE", 0.75)
    assert [len(turns) for turns in turns_of(network, segments).values()] == [1]


@pytest.mark.parametrize("with_all_else", [True, False])
def test_plans_are_faster_by_what_turned_values_teach(monkeypatch, with_all_else):
    """Prices take a softmax and the mask behind it for two costs of computing again; both are made of the scores.

    Exchanges and flips around more than the smallest plan find a part of that by themselves, so that only without them
    all of it is the turned values'.
    """
    if not with_all_else:
        monkeypatch.setattr(mincut, "exchange", lambda plan, *_: plan)
        monkeypatch.setattr(mincut, "MOST_STARTS", 1)
    joint = annotated(layers(3), device="meta")
    with_turns = mincut.Search(joint, H100)
    frontier = with_turns.pool.frontier()
    low, high = frontier[0].peak_bytes, frontier[-1].peak_bytes
    budgets = [Budget(low + (high - low) * tenths // 10) for tenths in range(11)]
    found = [with_turns.answer(budget).step_seconds for budget in budgets]
    monkeypatch.setattr(mincut, "turned_plans", lambda *_: ())
    without = mincut.Search(joint, H100)
    before = [without.answer(budget).step_seconds for budget in budgets]
    assert all(new <= old for new, old in zip(found, before, strict=True))
    assert with_all_else or found[5] < 0.98 * before[5]
