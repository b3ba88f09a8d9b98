"""Shapes of graphs that planners elsewhere choke on (CASES 23): they end, and their plans are legal and save memory."""

import pytest

from recompile.decide import decide
from recompile.options import Options
from recompile.planner.mincut import Search
from tests.notation import H100, annotated

PLANNERS = ("mincut", "full", "save_all", "stock")


def long_chain(length=500):
    """sin after sin, a matmul every tenth; backward reads each input of a sin through its cos, and each matmul's."""
    lines, last = ["x0 = input 64x64", "w = param 64x64"], "x0"
    for i in range(1, length + 1):
        lines.append(f"x{i} = mm {last} w" if i % 10 == 0 else f"x{i} = sin {last}")
        last = f"x{i}"
    lines.append("t = tangent 64x64")
    gradient = "t"
    for i in reversed(range(1, length + 1)):
        if i % 10 == 0:
            lines.append(f"g{i} = mm {gradient} w'")
        else:
            lines += [f"c{i} = cos x{i - 1}", f"g{i} = mul {gradient} c{i}"]
        gradient = f"g{i}"
    return "\n".join([*lines, f"return {last} | {gradient}"])


def parallel_chains(count=32, length=8):
    """Chains of sin side by side from one input, summed pairwise at the end."""
    lines, ends = ["x = input 64x64"], []
    for chain in range(count):
        last = "x"
        for i in range(length):
            lines.append(f"c{chain}_{i} = sin {last}")
            last = f"c{chain}_{i}"
        ends.append(last)
    total = ends[0]
    for number, end in enumerate(ends[1:]):
        lines.append(f"s{number} = add {total} {end}")
        total = f"s{number}"
    lines.append("t = tangent 64x64")
    gradients = []
    for chain in range(count):
        gradient = "t"
        for i in reversed(range(length)):
            source = f"c{chain}_{i - 1}" if i else "x"
            lines += [f"k{chain}_{i} = cos {source}", f"g{chain}_{i} = mul {gradient} k{chain}_{i}"]
            gradient = f"g{chain}_{i}"
        gradients.append(gradient)
    return "\n".join([*lines, f"return {total} | {' '.join(gradients)}"])


def many_users(count=1000):
    """One exp that a thousand values read, each of which has a gradient."""
    lines = ["x = input 64x64", "e = exp x"]
    lines += [f"u{i} = mul e {i + 2}.0" for i in range(count)]
    total = "u0"
    for i in range(1, count):
        lines.append(f"s{i} = add {total} u{i}")
        total = f"s{i}"
    lines += ["t = tangent 64x64", "g = mul t e"]
    return "\n".join([*lines, f"return {total} | g"])


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("text", [long_chain(), parallel_chains(), many_users()], ids=["chain", "parallel", "users"])
def test_a_graph_of_an_awkward_shape_is_planned(text, planner):
    graph = annotated(text)
    peaks = {}
    for budget in (None, 0.0):
        plan, _ = decide(graph, H100, Options.parse({"memory_budget": budget, "planner": planner}))
        peaks[budget] = plan.peak_bytes
    assert 0 < peaks[0.0] <= peaks[None]


def test_the_smallest_plan_of_a_long_chain_keeps_far_less_than_all():
    graph = annotated(long_chain())
    everything, _ = decide(graph, H100, Options.parse({"planner": "save_all"}))
    smallest, _ = decide(graph, H100, Options.parse({"memory_budget": 0.0}))
    assert smallest.peak_bytes < everything.peak_bytes / 5


def test_on_a_gpu_four_times_the_layers_take_few_more_plans_and_no_more_work_on_what_fuses():
    """Equal layers are solved once: 80 of them teach the planner nothing that 20 did not. (40 take a third more plans:
    they are mixed by pieces of eight layers too, and all their flips are tried.)
    """
    some, more = (Search(annotated(long_chain(length), device="meta"), H100) for length in (200, 800))
    assert len(more.pool.candidates) < 1.2 * len(some.pool.candidates)
    assert more.pool.timeline.stretches.num_fused < 1.2 * some.pool.timeline.stretches.num_fused
    assert set(more.segments.kind) == set(some.segments.kind)
