"""Values made in the result of a ``cat``: one allocation, from the first of them to the last use of any."""

import pytest
import torch
from torch import nn

import recompile
from recompile.dataflow import dataflow_of
from recompile.occupancy import Use, occupancy_of
from recompile.planner.finish import plan_from
from recompile.slices import counted_once, slices_of
from recompile.timeline import Timeline
from tests.notation import H100, annotated

# Values are of 128 bytes, c of 256 and h of 512.
SKIP = """
    x = input 4x8
    w = param 8x8
    u = param 16x8
    a = mm x w
    e = exp a
    c = cat [e,a] 1
    y = mm c u
    z = mm e w
    t = tangent 4x8
    g1 = mm t w'
    g2 = mul g1 e
    g3 = mm t u'
    h = mm c' t
    return y z | g2 g3 h
"""


def slices(text, device="meta"):
    flow = dataflow_of(annotated(text, device=device))
    return {flow.nodes[x].name: flow.nodes[whole].name for x, whole in slices_of(flow).items()}


def live(saved, device="cpu"):
    timeline = Timeline(annotated(SKIP, device=device), H100)
    indices = frozenset(i for i, node in enumerate(timeline.flow.nodes) if node.name in saved)
    found = timeline.simulate(indices)
    return [(timeline.flow.nodes[m.node].name, m.live_bytes) for m in found.moments], found.saved_bytes


FORWARD = [("a", 128), ("e", 384), ("c", 384), ("y", 384), ("z", 512)]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_slice_takes_the_memory_of_the_whole_from_where_it_is_made(device):
    """The exponential of a allocates c, which copies nothing but a. Backward has e in a loop that it alone is in."""
    assert slices(SKIP, device) == {"e": "c"}
    assert live({"c"}, device) == ([*FORWARD, ("g1", 768), ("a", 896), ("g2", 896), ("g3", 1024), ("h", 1536)], 256)


def test_what_a_program_returns_is_no_slice():
    """e is allocated by itself and copied; without c, which is made again from it, forward ends 256 bytes lower."""
    both = [("a", 128), ("e", 256), ("c", 512), ("y", 512), ("z", 640), ("g1", 896), ("g2", 896), ("g3", 1024)]
    assert live({"e", "c"}) == ([*both, ("h", 1536)], 384)
    one = [*both[:4], ("z", 384), ("g1", 640), ("g2", 640), ("g3", 896), ("a", 1024), ("c", 1280), ("h", 1536)]
    assert live({"e"}) == (one, 128)


def test_backward_makes_a_slice_in_a_whole_of_its_own():
    """Forward frees c after y is made; backward's is made with g2, the last reader of e beside c itself."""
    backward = [("g1", 640), ("e", 896), ("g3", 1152), ("c", 1152), ("h", 1536)]
    assert live({"a"}) == ([*FORWARD[:3], ("y", 512), ("z", 640), *backward], 128)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("c = cat [e,a] 1", "k = mm e w\nc = cat [e,a] 1"),  # a library call has fixed the strides of e
        ("e = exp a", "e = mm a w"),  # the call allocates it
        ("c = cat [e,a] 1", "v = view e [4,8]\nc = cat [v,a] 1"),
        ("c = cat [e,a] 1", "d = prims.convert_element_type e torch.bfloat16\nc = cat [d,a] 1"),  # d is
    ],
)
def test_what_is_no_slice(old, new):
    assert old in SKIP
    assert "e" not in slices(SKIP.replace(old, new))


def test_the_first_cat_that_takes_a_value_has_it_and_is_no_slice_itself():
    text = SKIP.replace("y = mm c u", "d = cat [e,c] 1\nv = mm d m\ny = mm c u").replace(
        "u = param", "m = param 24x8\nu = param"
    )
    assert slices(text) == {"e": "c"}


def test_on_a_gpu_a_cat_that_only_loops_read_may_be_computed_in_them():
    text = SKIP.replace("y = mm c u", "s = sin c\ny = mm s u").replace("h = mm c' t", "h = mm s' t")
    assert slices(text, "meta") == {}
    assert slices(text, "cpu") == {"e": "c"}


def test_what_lies_in_the_whole_is_shown_as_the_whole():
    timeline = Timeline(annotated(SKIP, device="cpu"), H100)
    names = [node.name for node in timeline.flow.nodes]
    kept = frozenset([names.index("c")])
    simulation = timeline.simulate(kept)
    found = occupancy_of(timeline, kept, simulation)
    assert [sum(row) for row in zip(*found.bytes_of.values(), strict=True)] == list(simulation.live_bytes)
    assert found.bytes_of[Use.SAVED][:6] == (0, 256, 256, 256, 256, 256)
    assert [(names[r.node], r.use.value) for r in found.peaks[0].residents] == [
        ("c", "saved"), ("y", "output"), ("z", "output"),
    ]  # fmt: skip


def test_bounds_count_each_byte_of_the_whole_once():
    flow = dataflow_of(annotated(SKIP))
    once = {
        node.name: size for node, size in zip(flow.nodes, counted_once(flow, slices_of(flow)).size_bytes, strict=True)
    }
    assert (once["e"], once["c"], once["h"]) == (128, 128, 512)


def test_pooling_backward_reads_no_element_of_what_was_pooled():
    """Made again for its sizes alone, e takes no kernel."""
    text = """
        x = input 1x1x8x8
        e = exp x
        y = avg_pool2d e [2,2]
        t = tangent 1x1x4x4
        g = avg_pool2d_backward t e [2,2] [2,2] [0,0] False True None
        h = sin g
        return y | h
    """
    timeline = Timeline(annotated(text, device="cpu"), H100)
    g, e = ([node.name for node in timeline.flow.nodes].index(name) for name in "ge")
    assert e in timeline.flow.inputs[g]
    assert e not in timeline.flow.reads[g]
    assert timeline.joint.notes[timeline.flow.nodes[g]].work.read_bytes == 64
    assert [timeline.flow.nodes[m.node].name for m in timeline.simulate(frozenset()).moments] == ["y", "h"]


class Skip(nn.Module):
    """A level of a U-net: what goes down comes back beside what was kept."""

    def __init__(self):
        super().__init__()
        self.into, self.down = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x):
        level = nn.functional.silu(self.into(x))
        below = nn.functional.silu(self.down(nn.functional.avg_pool2d(level, 2)))
        return self.out(torch.cat([level, self.up(below)], 1)).square().mean()


KEPT = ("cat", "convolution_1", "convolution_3")


def keeps(joint, hardware, budget):
    """A planner that keeps these, and has the level above made again in backward."""
    timeline = Timeline(joint, hardware)
    saved = frozenset(timeline.flow.index[node] for node in joint.nodes if node.name in KEPT)
    return plan_from(timeline, saved, timeline.simulate(saved), {})


@pytest.mark.usefixtures("fresh_dynamo", "empty_cache")
def test_a_level_of_a_u_net_needs_what_was_predicted():
    """736,840 bytes were predicted while slices counted by themselves, and backward of pooling as a reader."""
    model, x = Skip(), torch.ones(2, 4, 32, 32)
    compiled = torch.compile(model, backend="recompile", options={"memory_budget": 2**20, "planner": keeps})
    compiled(x).backward()
    (graph,) = recompile.explain(compiled).graphs
    assert {row.name for row in graph.saved} >= set(KEPT)
    assert graph.peak_bytes == graph.program_bytes == 685512
