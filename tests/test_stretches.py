"""Stretches: what is kept for other plans and other layers changes no figure, and is found again where it should be."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompile.joint import Side
from recompile.looks import cut_alike
from recompile.timeline import Timeline
from tests import plain_timeline
from tests.notation import H100, annotated


@st.composite
def graphs(draw):
    """Random joint graphs on 8 x 8 values, and several saved sets (shares of what forward computes) for each."""
    lines = ["x = input 8x8", "w = param 8x8", "u = param 16x8", "s = input - int64", "t = tangent 8x8"]
    forward, backward = ["x", "w"], ["t"]
    for number in range(draw(st.integers(2, 14))):
        is_forward = number < 2 or draw(st.booleans())
        name = f"{'v' if is_forward else 'g'}{number}"
        first = draw(st.sampled_from(forward if is_forward else backward))
        second = draw(st.sampled_from(forward))
        random = "prims.inductor_random [8,8] s 'rand'" if is_forward else f"cos {first}"
        op = draw(
            st.sampled_from(["add", "mul", "mm", "sin", "exp", "rows", "columns", "parts", "draw", "view", "cat"])
        )
        if op in ("rows", "columns"):
            lines += [f"{name}s = sum {first} [{int(op == 'rows')}] True", f"{name} = sub {second} {name}s"]
        elif op == "view":
            lines += [f"{name}p = cos {first}", f"{name}v = view {name}p [8,8]", f"{name}a = mm {name}v {second}"]
            lines += [f"{name}b = sin {name}v", f"{name}c = add {name}p {name}a", f"{name} = mul {name}b {name}c"]
        elif op == "cat":
            lines += [f"{name}e = exp {first}", f"{name}c = cat [{name}e,{second}] 1", f"{name} = mm {name}c u"]
            (forward if is_forward else backward).append(f"{name}e")
        elif op == "mask":
            lines += [f"{name}f = full_like x 0.5", f"{name} = {draw(st.sampled_from(['cos', 'exp']))} {name}f"]
        elif op == "parts":
            lines += [f"{name}d = native_dropout {first} 0.3 True", f"{name} = getitem {name}d 0"]
            lines += [f"{name}m = getitem {name}d 1", f"{name}c = mul {name} {name}m"]
            (forward if is_forward else backward).append(f"{name}c")
        else:
            lines.append(
                f"{name} = {random if op == 'draw' else f'{op} {first}' + f' {second}' * (op in ('add', 'mul', 'mm'))}"
            )
        (forward if is_forward else backward).append(name)
    results = draw(st.lists(st.sampled_from(forward[2:]), min_size=1, max_size=2, unique=True))
    gradients = draw(st.lists(st.sampled_from(backward), min_size=1, max_size=3, unique=True))
    shares = draw(st.lists(st.lists(st.integers(0, 40), max_size=12), min_size=1, max_size=4))
    return "\n".join([*lines, f"return {' '.join(results)} | {' '.join(gradients)}"]), shares


def figures(simulation):
    return [(m.phase, m.node, m.live_bytes, m.seconds) for m in simulation.moments], simulation.saved_bytes


@pytest.mark.parametrize(
    ("nodes", "most_open", "most_known"),
    [(3, 128, 10**6), (7, 128, 10**6), (3, 2, 10**6), (1000, 128, 10**6), (3, 128, 0), (7, 128, 40)],
)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_plans_simulated_one_after_the_other_are_what_each_is_by_itself(nodes, most_open, most_known, device):
    @settings(max_examples=25, derandomize=True, deadline=None)
    @given(graphs(), st.booleans())
    def check(drawn, counts_fused):
        text, shares = drawn
        timeline = Timeline(annotated(text, device=device), replace(H100, counts_fused=counts_fused))
        flow = timeline.flow
        able = [i for i, side in enumerate(flow.side) if side is not Side.BACKWARD and not flow.is_input[i]]
        for share in shares:
            saved = frozenset(able[i % len(able)] for i in share)
            assert figures(timeline.simulate(saved)) == plain_timeline.simulate(timeline, saved)

    with (
        mock.patch("recompile.stretches.NODES_PER_STRETCH", nodes),
        mock.patch("recompile.stretches.NODES_PER_REBUILT_STRETCH", nodes + 2),
        mock.patch("recompile.stretches.MOST_KERNELS_KEPT", most_open),
        mock.patch("recompile.stretches.MOST_KNOWN", most_known),
        mock.patch("recompile.timeline.MOST_STEPS", most_known),
    ):
        check()


def layers(count):
    """Layers of a matmul, a normalisation and a residual sum, with their backward; h0 ... are the layers' inputs."""
    lines = ["h0 = input 64x64", *(f"w{i} = param 64x64" for i in range(count)), "t = tangent 64x64"]
    for i in range(count):
        lines += [f"a{i} = mm h{i} w{i}", f"m{i} = amax a{i} [1] True", f"s{i} = sub a{i} m{i}", f"e{i} = exp s{i}"]
        lines += [f"z{i} = sum e{i} [1] True", f"d{i} = div e{i} z{i}", f"h{i + 1} = add h{i} d{i}"]
    gradient = "t"
    for i in reversed(range(count)):
        lines += [f"p{i} = mul {gradient} d{i}", f"q{i} = sum p{i} [1] True", f"r{i} = mul d{i} q{i}"]
        lines += [f"u{i} = sub p{i} r{i}", f"b{i} = mm u{i} w{i}'", f"g{i} = add {gradient} b{i}"]
        lines += [f"k{i} = mm h{i}' u{i}"]
        gradient = f"g{i}"
    return "\n".join([*lines, f"return h{count} | {gradient} {' '.join(f'k{i}' for i in range(count))}"])


def named(timeline, *names):
    return frozenset(i for i, node in enumerate(timeline.flow.nodes) if node.name in names)


def num_new(timeline, saved):
    """The stretches that had to be fused for a plan."""
    before = timeline.stretches.num_fused
    timeline.simulate(saved)
    return timeline.stretches.num_fused - before


def test_a_graph_of_more_equal_layers_has_no_more_stretches_to_fuse():
    num_fused = {}
    for count in (24, 48, 96):
        timeline = Timeline(annotated(layers(count), device="meta"), H100)
        inputs = named(timeline, *(f"h{i}" for i in range(1, count)))
        products = named(timeline, *(f"a{i}" for i in range(count)))
        num_fused[count] = num_new(timeline, inputs), num_new(timeline, inputs | products)
    assert num_fused[24] == num_fused[48] == num_fused[96]


def test_a_plan_that_differs_in_one_layer_has_few_stretches_to_fuse_however_long_the_graph():
    for count in (24, 96):
        timeline = Timeline(annotated(layers(count), device="meta"), H100)
        inputs = named(timeline, *(f"h{i}" for i in range(1, count)))
        timeline.simulate(inputs)
        assert num_new(timeline, inputs) == 0
        assert 0 < num_new(timeline, inputs | named(timeline, "a12")) <= 8


@pytest.mark.parametrize(
    ("looks", "longest", "stretches"),
    [
        ([0, 1, 2, 3] * 3, 4, [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]),
        ([0, 0, 1, 0, 0, 0, 1, 0], 4, [0, 0, 1, 1, 1, 1, 2, 2]),
        ([7] * 8, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
        ([], 4, []),
    ],
)
def test_what_looks_equal_is_cut_at_equal_places(looks, longest, stretches):
    assert cut_alike(np.array(looks, dtype=np.int64), longest).tolist() == stretches
