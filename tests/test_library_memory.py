"""What a convolution allocates within its call, predicted and measured on the CPU."""

import pytest
import torch

from recompile import measure
from recompile.library_memory import allocated_inside
from recompile.timeline import Timeline
from tests.notation import annotated

aten = torch.ops.aten
SCRATCH = 10 * 2**10

CONVOLVED = """
    x = input 8x64x8x8
    w = param {weight}
    e = exp x
    y = convolution e w None {stride} {padding} [1,1] False [0,0] {groups}
    t = tangent {result}
    g = convolution_backward t e w None {stride} {padding} [1,1] False [0,0] {groups} {mask}
    gx = getitem g 0
    gw = getitem g 1
    return y | gx gw
"""


def graph_of(weight, stride=1, groups=1, mask="[True,True,False]", device="cpu"):
    kernel = int(weight.split("x")[-1])
    padding, side = kernel // 2, 8 // stride
    sizes = {"stride": f"[{stride},{stride}]", "padding": f"[{padding},{padding}]", "groups": groups, "mask": mask}
    result = f"8x{weight.split('x')[0]}x{side}x{side}"
    return annotated(CONVOLVED.format(weight=weight, result=result, **sizes), device=device)


def predicted(graph):
    found = {node.name: count for node, count in allocated_inside(graph).items()}
    return found.get("y", 0), found.get("g", 0)


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("weight", "settings"),
    [
        ("64x64x3x3", {}),
        ("128x64x3x3", {}),
        ("32x64x5x5", {}),
        ("64x64x1x1", {}),
        ("64x64x1x1", {"stride": 2}),
        ("64x16x3x3", {"groups": 4}),
    ],
)
def test_weights_are_copied_into_blocks_once_in_forward_and_twice_in_backward(weight, settings):
    graph = graph_of(weight, **settings)
    sizes = [*map(int, weight.split("x"))]
    x, w = (torch.randn(s).to(memory_format=torch.channels_last) for s in ((8, 64, 8, 8), sizes))
    stride, padding, groups = settings.get("stride", 1), sizes[-1] // 2, settings.get("groups", 1)
    call = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups
    y = aten.convolution(x, w, None, *call)
    grad = torch.randn_like(y)

    def backward():
        return aten.convolution_backward(grad, x, w, None, *call, [True, True, False])

    backward()  # what a first call allows itself is not counted
    inside = (
        measure(aten.convolution, x, w, None, *call).peak_bytes - y.nbytes,
        measure(backward).peak_bytes - x.nbytes - w.nbytes,
    )
    for expected, measured in zip(predicted(graph), inside, strict=True):
        assert expected <= measured <= expected + SCRATCH


def test_without_a_gradient_for_the_weights_backward_makes_one_copy():
    nbytes = 64 * 64 * 3 * 3 * 4
    assert predicted(graph_of("64x64x3x3")) == (nbytes, 2 * nbytes)
    assert predicted(graph_of("64x64x3x3", mask="[True,False,False]")) == (nbytes, nbytes)


def test_on_other_devices_nothing_is_counted():
    assert predicted(graph_of("64x64x3x3", device="meta")) == (0, 0)


def test_the_simulation_counts_it_during_the_call_alone():
    text = CONVOLVED.format(
        weight="64x64x3x3", result="8x64x8x8", stride="[1,1]", padding="[1,1]", groups=1, mask="[True,True,False]"
    )
    graph = annotated(text.replace("return y |", "z = mean y\n    return z |"))
    timeline = Timeline(graph, graph.hardware)
    moments = timeline.simulate(frozenset()).moments
    alive = {timeline.flow.nodes[m.node].name: m.live_bytes for m in moments if m.phase == "forward"}
    image, weights = 8 * 64 * 8 * 8 * 4, 64 * 64 * 3 * 3 * 4
    assert alive["e"] == image + weights  # w is copied to channels last when forward starts
    assert alive["y"] == 2 * image + 2 * weights
    assert alive["z"] == image + weights + 4
