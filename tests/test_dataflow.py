"""The joint graph as indices: ops, buffers, and the order in which forward and backward run for some saved values."""

import pytest

from recompile.dataflow import (
    backward_order,
    dataflow_of,
    forward_order,
    needed_by_backward,
    rebuilt_in_backward,
    tangents_of,
)
from tests.notation import annotated

SINES = """
    x = input 4x8
    a = sin x
    b = sin a
    c = sin b
    t = tangent 4x8
    d = cos b
    g3 = mul t d
    e = cos a
    g2 = mul g3 e
    f = cos x
    g1 = mul g2 f
    return c | g1
"""


def flow_of(text):
    return dataflow_of(annotated(text))


def names(flow, indices):
    return " ".join(flow.nodes[i].name for i in indices)


def indices(flow, text):
    return frozenset(i for i, node in enumerate(flow.nodes) if node.name in text.split())


def by_node(flow, field):
    """``name: the names that the field lists for it``, where it lists any."""
    rows = zip(flow.nodes, getattr(flow, field), strict=True)
    return ", ".join(f"{node.name}: {names(flow, listed)}" for node, listed in rows if listed)


# Ops and buffers


def test_views_vanish_into_the_buffers_behind_them():
    flow = flow_of("""
        x = input 4x8
        v = view x [8,4]
        a = mm x v
        p = permute a [1,0]
        q = unsqueeze p 0      # of a view
        e = exp q
        return e |
    """)
    assert by_node(flow, "reads") == "a: primals_1, e: a"
    assert by_node(flow, "makes") == "a: a, e: e"
    assert names(flow, [i for i, is_op in enumerate(flow.is_op) if is_op]) == "a e"
    assert names(flow, flow.buffer) == "primals_1 primals_1 a a a e"


def test_an_op_makes_the_elements_that_are_picked_out_of_it():
    flow = flow_of("x = input 4x8\nv = var_mean.dim x [1]\nm = getitem v 0\nn = getitem v 1\ny = add m n\nreturn y |")
    assert by_node(flow, "makes") == "v: m n, y: y"
    assert by_node(flow, "reads") == "v: primals_1, y: m n"
    assert names(flow, flow.op) == "primals_1 v v v y"
    assert flow.nodes[flow.maker(3)].name == "v"
    assert flow.numel == (32, 4, 4, 4, 4)


def test_a_write_makes_nothing_and_a_size_is_no_buffer():
    flow = flow_of("x = input s4x8\ny = exp x\nw = copy_ x y\nn = sym_size.int x 0\nf = full [n] 1.0\nreturn f |")
    assert by_node(flow, "makes") == "y: y, f: f"
    assert flow.numel == (32, 32, 32, 0, 4)


# What backward needs


def test_backward_needs_the_forward_values_that_it_reads_or_returns():
    flow = flow_of("x = input 4\na = sin x\nb = sin a\nt = tangent 4\ng = mul t a\nreturn b | g b x")
    assert names(flow, needed_by_backward(flow)) == "a b"
    assert names(flow, tangents_of(flow)) == "tangents_1"


@pytest.mark.parametrize(
    ("saved", "rebuilt", "inputs"),
    [
        ("", "a b d e f", "primals_1"),
        ("a", "b d e f", "primals_1"),
        ("a b", "d e f", "primals_1"),
        ("b d", "a e f", "primals_1"),
        ("a d f", "e", ""),
        ("d e f", "", ""),
    ],
)
def test_what_is_rebuilt_ends_at_saved_values_and_inputs(saved, rebuilt, inputs):
    flow = flow_of(SINES)
    found = rebuilt_in_backward(flow, indices(flow, saved))
    assert (names(flow, found[0]), names(flow, found[1])) == (rebuilt, inputs)


# Orders


@pytest.mark.parametrize(
    ("saved", "order"),
    [
        ("", "a b d g3 e g2 f g1"),
        ("b", "d g3 a e g2 f g1"),
        ("a", "b d g3 e g2 f g1"),
        ("a b", "d g3 e g2 f g1"),
        ("d e f", "g3 g2 g1"),
    ],
)
def test_each_value_is_rebuilt_right_before_the_first_that_needs_it(saved, order):
    flow = flow_of(SINES)
    assert names(flow, backward_order(flow, indices(flow, saved))) == order


@pytest.mark.parametrize(
    ("saved", "order"),
    [("", "a b c"), ("a", "a b c"), ("d", "a b c d"), ("d e f", "a b c d e f")],
)
def test_forward_runs_what_its_outputs_and_the_saved_values_need(saved, order):
    flow = flow_of(SINES)
    assert names(flow, forward_order(flow, indices(flow, saved))) == order


def test_forward_runs_writes_that_no_output_needs():
    flow = flow_of("x = input 4\ny = input 4\nm = mul y 2\nw = copy_ x m\nt = tangent 4\ng = mul t y\nreturn y | g")
    assert names(flow, forward_order(flow, frozenset())) == "m w"
    assert names(flow, backward_order(flow, frozenset())) == "g"


def test_a_gradient_that_no_tangent_reaches_is_made_in_backward():
    flow = flow_of("x = input 4\na = sin x\nt = tangent 4\ng = mul t a\nz = zeros [4]\nreturn a | g z")
    assert names(flow, backward_order(flow, frozenset())) == "a g z"
    assert names(flow, forward_order(flow, frozenset())) == "a"
