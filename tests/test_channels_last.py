"""The layout of images on a GPU: what Inductor copies for its convolutions, where their bias goes, what a row is."""

import pytest

from recompile import channels_last
from recompile.channels_last import copied_for_layout, lying_channels_last
from recompile.dataflow import dataflow_of
from recompile.timeline import Timeline
from tests.notation import H100, annotated

ONE_BY_ONE = "[1,1] [1,1] [1,1] False [0,0] 1"
# x is 2 x 128 x 8 x 8 x 4 = 65,536 bytes, and so are y and t; w is 128 x 128 x 9 x 4 = 589,824.
STEP = f"""
    x = input 2x128x8x8
    w = param 128x128x3x3
    b = param 128
    y = convolution x w {{bias}} {ONE_BY_ONE}
    {{rest}}
"""
BACKWARD = f"""
    t = tangent 2x128x8x8
    g = convolution_backward t x w None {ONE_BY_ONE} [False,True,False]
    gw = getitem g 1
    return y | gw
"""


def step(rest=BACKWARD, bias=None, device="meta"):
    return Timeline(annotated(STEP.format(bias=bias, rest=rest), device=device), H100)


def copied(text, device="meta"):
    flow = dataflow_of(annotated(text, device=device))
    return [flow.nodes[i].name for i in copied_for_layout(flow)]


def convolution(images, weight, groups=1):
    call = f"convolution x w None [1,1] [1,1] [1,1] False [0,0] {groups}"
    return f"x = input {images}\nw = param {weight}\ny = {call}\nreturn y |"


@pytest.mark.parametrize(
    ("text", "on_gpu"),
    [
        (convolution("2x128x8x8", "128x128x3x3"), True),
        (convolution("2x64x8x8", "64x64x3x3"), False),  # too few channels
        (convolution("2x65x8x8", "64x65x3x3"), True),
        (convolution("2x256x8x8", "128x256x3x3"), False),  # half as many out as in
        (convolution("2x256x8x8", "128x256x1x1"), True),  # which a 1 x 1 filter may have
        (convolution("2x256x8x8", "256x128x3x3", groups=2), False),
        (convolution("2x256x8x8", "256x1x3x3", groups=256), True),  # depthwise
        (convolution("s2x128x8x8", "128x128x3x3"), False),  # a size that is not known
    ],
)
def test_on_a_gpu_heuristics_decide_whether_images_have_channels_last_and_on_the_cpu_they_always_have(text, on_gpu):
    wanted = ["primals_1"] if "x1x" in text else ["primals_1", "primals_2"]  # such a weight lies right either way
    assert copied(text) == (wanted if on_gpu else [])
    assert copied(text, "cpu") == wanted


def test_on_a_gpu_few_convolutions_among_many_nodes_change_no_layout(monkeypatch):
    text = convolution("2x128x8x8", "128x128x3x3")
    monkeypatch.setattr(channels_last, "NODES_PER_CONVOLUTION", 3)  # x, w and y are three
    assert copied(text) == []
    monkeypatch.setattr(channels_last, "NODES_PER_CONVOLUTION", 4)
    assert copied(text) == ["primals_1", "primals_2"]


def test_copies_are_made_first_and_kept_for_backward():
    timeline = step()
    simulation, copies_bytes = timeline.simulate(frozenset()), 65536 + 589824
    assert simulation.saved_bytes == copies_bytes
    assert simulation.live_bytes[0] == copies_bytes + 65536
    call = timeline.joint.notes[timeline.flow.nodes[simulation.nodes[0]]].seconds
    # two kernels that read and write all of it
    assert simulation.seconds[0] == pytest.approx(call + 2 * H100.launch_s + 2 * copies_bytes / H100.byte_per_s)


@pytest.mark.parametrize(
    ("rest", "is_apart"),
    [
        (f"z = convolution y w None {ONE_BY_ONE}\n    return z |", True),  # cuDNN reads the sum
        ("z = sin y\n    return z |", False),  # computed in the kernel of z
    ],
)
def test_on_a_gpu_a_bias_is_added_in_a_kernel_of_its_own_where_a_library_call_reads_the_sum(rest, is_apart):
    plain, biased = (step(rest, bias).simulate(frozenset()) for bias in (None, "b"))
    extra = biased.step_seconds - plain.step_seconds
    wanted = H100.launch_s + 2 * 65536 / H100.byte_per_s if is_apart else 0.0
    assert extra == pytest.approx(wanted, abs=2 * 512 / H100.byte_per_s)  # the bias itself is 512 bytes
    plain, biased = (step(rest, bias, "cpu").simulate(frozenset()) for bias in (None, "b"))
    assert biased.step_seconds == pytest.approx(plain.step_seconds, abs=2 * 512 / H100.byte_per_s)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_loops_make_in_another_shape_than_a_convolution_reads_is_copied(device):
    """As the gradient of a group norm: y, s and the copy are there. A sine in the shape of y takes the place of y."""
    end = f"z = convolution {{}} w None {ONE_BY_ONE}\n    return z |"
    copies_bytes, within = 65536 + 589824, 589824 if device == "cpu" else 0  # see test_library_memory.py
    reshaped = "v = view y [2,32,256]\n    s = sin v\n    u = view s [2,128,8,8]\n    " + end.format("u")
    for rest, num_images in [(reshaped, 3), ("s = sin y\n    " + end.format("s"), 1)]:
        live = step(rest, device=device).simulate(frozenset()).live_bytes
        assert [bytes_ - copies_bytes for bytes_ in live] == [65536 + within, num_images * 65536, 2 * 65536 + within]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_gradient_is_written_as_backward_reads_it_unless_that_rebuilds_a_convolution(device):
    """With s there are y, t, the copies of x and w, and, if y is to be rebuilt later, the copy of s."""
    timeline = step(
        f"""t = tangent 2x128x8x8
            v = view t [2,32,256]
            s = sin v
            u = view s [2,128,8,8]
            g = convolution_backward u x w None {ONE_BY_ONE} [True,True,False]
            gx = getitem g 0
            gw = getitem g 1
            h = mul gx y
            return y | gw h""",
        device=device,
    )
    node = {node.name: i for i, node in enumerate(timeline.flow.nodes)}
    for saved, num_images in [({node["y"]}, 3), (set(), 4)]:
        moments = timeline.simulate(frozenset(saved)).moments
        (live,) = [m.live_bytes for m in moments if m.node == node["s"]]
        assert live - 65536 - 589824 == num_images * 65536


def test_on_the_cpu_what_was_copied_for_a_convolution_is_there_until_the_loops_before_it_have_run():
    """q shares nothing with s. With both there are y, t, r, s and its copy, q, and forward's copies of x and w."""
    timeline = step(
        f"""t = tangent 2x128x8x8
            r = tangent 2x128x8x8
            v = view t [2,32,256]
            s = sin v
            u = view s [2,128,8,8]
            q = cos r
            g = convolution_backward u x w None {ONE_BY_ONE} [True,True,False]
            gx = getitem g 0
            gw = getitem g 1
            h = mul gx y
            return y | gw h q""",
        device="cpu",
    )
    node = {node.name: i for i, node in enumerate(timeline.flow.nodes)}
    (live,) = [m.live_bytes for m in timeline.simulate(frozenset()).moments if m.node == node["q"]]
    assert live - 65536 - 589824 == 6 * 65536


POOLED = """
    a = sin y
    n = neg x
    m = mean.dim a [2,3]
    c = mean.dim a [1]
    k = mean.dim k4 [2,3]
    return a m c k n |
"""


def test_rows_are_what_is_contiguous_in_memory():
    def seen(device):
        timeline = step("k4 = input 2x8x4x4" + POOLED, device=device)
        nodes = timeline.flow.nodes
        lying = {nodes[i].name for i in lying_channels_last(timeline.flow)}
        rows = {n.name for n, shape in zip(nodes, timeline.facts.shape, strict=True) if shape.reduces_rows}
        return lying, rows & {"m", "c", "k"}

    assert seen("meta") == ({"primals_1", "primals_2", "y", "a", "n"}, {"c", "k"})  # k4 never meets a convolution
    assert seen("cpu") == (set(), {"m", "k"})
