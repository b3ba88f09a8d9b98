"""Passes by what they make of small graphs: orders as text, and split graphs run on real tensors."""

import itertools
import re

import pytest
import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._guards import TracingContext, tracing

from recompile.annotation import annotate, inputs_to_snapshot
from recompile.decide import decide
from recompile.options import Options
from recompile.passes import place_recomputation, snapshot_overwritten, split_joint
from recompile.planner import BY_NAME
from tests.notation import H100, joint, order_text
from tests.test_dataflow import SINES
from tests.test_planners import residual_chain


def split(built, saved="", random_ops=""):
    """Forward and backward when the nodes of these names are saved; the inputs that backward needs are too."""
    inputs = [node for node in built.module.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    kept = inputs + [node for node in built.module.graph.nodes if node.name in saved.split()]
    random_nodes = [built.node[name] for name in random_ops.split()]
    with tracing(TracingContext(inputs[0].meta["val"].fake_mode)):
        return split_joint(built.module, kept, built.num_fwd_outputs, random_ops=random_nodes)


def options(budget, planner="mincut"):
    return Options.parse({"memory_budget": budget, "planner": planner})


def returned(module):
    return " ".join(str(node) for node in module.graph.output_node().args[0])


def taken(module):
    return " ".join(node.name for node in module.graph.find_nodes(op="placeholder"))


def run_step(forward, backward, num_fwd_outputs, inputs, tangents):
    """Forward's outputs and the gradients, run op by op on real tensors; forward may overwrite ``inputs``."""
    made = fx.Interpreter(forward).run(*inputs)
    saved = made[num_fwd_outputs:]
    sizes = [value for value in saved if not isinstance(value, torch.Tensor)]  # forward's last, backward's first
    tensors = saved[: len(saved) - len(sizes)]
    return made[:num_fwd_outputs], fx.Interpreter(backward).run(*sizes, *tensors, *tangents)


# Place recomputation


@pytest.mark.parametrize(
    ("saved", "order"),
    [
        ("", "a* b* d* g3 e* g2 f* g1"),
        ("b", "d* g3 a* e* g2 f* g1"),
        ("a b", "d* g3 e* g2 f* g1"),
        ("d e f", "g3 g2 g1"),
    ],
)
def test_what_is_rebuilt_runs_right_before_its_first_reader(saved, order):
    assert order_text(split(joint(SINES), saved)[1].graph) == order


def test_one_block_s_recomputation_is_done_when_the_next_begins():
    order = order_text(split(joint(residual_chain(2)), "x1")[1].graph)
    assert order == (
        "h1* r1* r1_t* gv1 v1_t* gr1 gh1 x1_t* gu1 u1_t* gx1 t1 "
        "h0* r0* r0_t* gv0 v0_t* gr0 gh0 x0_t* gu0 u0_t* gx0 t0"
    )  # fmt: skip


def backward_graph():
    """The rebuilt values a, b first, as a partitioner leaves them, and an assertion that forward has made already."""
    built = joint("""
        x = input 4
        t = tangent 4
        a = sin x
        b = cos a
        k = aten._assert_tensor_metadata a None None torch.float32
        g = mul t t
        h = mul g b
        y = sin b
        i = mul h y
        return | i
    """)
    return built.module.graph


def test_nodes_move_down_to_their_readers_and_what_nothing_reads_goes():
    graph = backward_graph()
    assert place_recomputation(graph) == 3
    assert order_text(graph) == "g a* b* h y* i"
    graph.lint()


def test_placing_twice_changes_nothing():
    graph = backward_graph()
    place_recomputation(graph)
    before = order_text(graph)
    place_recomputation(graph)
    assert order_text(graph) == before


def test_a_write_in_backward_keeps_its_place():
    built = joint(
        "x = input 4\nt = tangent 4\na = sin x\nw = copy_ x a\ng = mul t t\nb = cos a\nh = mul g b\nreturn | h"
    )
    built.node["w"].meta["partitioner_tag"] = "must_be_in_backward"
    place_recomputation(built.module.graph)
    assert order_text(built.module.graph) == "a* w* g b* h"


# Split


def test_forward_returns_its_outputs_and_then_the_saved_values_in_order():
    built = joint(SINES)
    before = str(built.module.graph)
    forward, backward = split(built, "a b")
    assert (returned(forward), order_text(forward.graph)) == ("c primals_1 a b", "a* b* c*")
    assert (taken(backward), returned(backward)) == ("primals_1 a b tangents_1", "g1")
    assert str(built.module.graph) == before


def test_sizes_are_handed_over_last():
    built = joint("""
        x = input s4x8
        n = sym_size.int x 0
        a = sin x
        t = tangent -
        e = expand t [n,8]
        g = mul e a
        return a | g
    """)
    forward, backward = split(built, "n a")
    assert (returned(forward), taken(backward)) == ("a a n", "n a tangents_1")
    x = torch.randn(5, 8)  # another size than the hint
    assert torch.equal(run_step(forward, backward, 1, [x], [torch.tensor(3.0)])[1][0], 3.0 * x.sin())


def test_what_only_backward_reads_runs_there_unless_it_is_saved():
    for saved, forward_order in (("", "a* b* c*"), ("d", "a* b* c* d*")):
        assert order_text(split(joint(SINES), saved)[0].graph) == forward_order


def test_an_output_that_backward_reads_is_returned_twice():
    text = "x = input 4\ny = exp x\nt = tangent 4\ng = mul t y\nreturn y | g None"
    forward, backward = split(joint(text), "y")
    assert (returned(forward), taken(backward), returned(backward)) == ("y y", "y tangents_1", "g None")


@pytest.mark.parametrize("saved", ["", "a", "b", "a b", "d e f", "a d"])
def test_every_split_of_a_graph_computes_the_same(saved):
    built = joint(SINES)
    x, t = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    (y,), (gradient,) = run_step(*split(built, saved), 1, [x], [t])
    torch.testing.assert_close(y, x.sin().sin().sin())
    torch.testing.assert_close(gradient, t * x.sin().sin().cos() * x.sin().cos() * x.cos())


# Random ops


def test_a_draw_that_runs_again_in_backward_draws_the_same_numbers():
    text = "x = input 400\nr = rand_like x\ny = mul x r\nt = tangent 400\ng = mul t r\nreturn y | g"
    forward, backward = split(joint(text), random_ops="r")
    ones = torch.ones(400)
    (y,), (gradient,) = run_step(forward, backward, 1, [ones], [ones])
    assert torch.equal(y, gradient)
    assert not torch.equal(y, run_step(forward, backward, 1, [ones], [ones])[0][0])  # each step draws anew


def test_a_draw_that_is_saved_is_made_once():
    text = "x = input 4\nr = rand_like x\ny = mul x r\nt = tangent 4\ng = mul t r\nreturn y | g"
    forward, backward = split(joint(text), "r", random_ops="r")
    assert (order_text(forward.graph), order_text(backward.graph)) == ("r* y*", "g")


# Inputs that forward overwrites

# A buffer s is read, then updated: y = x s, s <- s + x. The gradient of x is t times the old s.
EMA = """
    s = input 4
    x = input 4
    y = mul x s
    n = add s x
    w = copy_ s n
    t = tangent 4
    g = mul t s
    return y | g
"""


def ema_reading(lines, read):
    return EMA.replace("y = mul x s", f"{lines}\ny = mul x {read}").replace("mul t s", f"mul t {read}")


CASES = {
    "directly": EMA,
    "through views": ema_reading("v = view s [2,2]\np = view v [4]", "p"),
    "through a split": ema_reading("k = split s 4\np = getitem k 0", "p"),
    "rebuilt": ema_reading("e = exp s", "e"),  # the gradient is t exp(s)
}


def snapshot(built):
    return snapshot_overwritten(built.module.graph, inputs_to_snapshot(built.module.graph, built.num_fwd_outputs))


def test_readers_get_a_copy_and_the_write_keeps_its_target():
    built = joint(EMA)
    assert snapshot(built) == 1
    node = built.node
    assert [str(argument) for name in "ynwg" for argument in node[name].args] == [
        "primals_2", "clone_default", "clone_default", "primals_2", "primals_1", "n", "tangents_1", "clone_default"
    ]  # fmt: skip
    built.module.graph.lint()


def test_views_of_the_input_become_views_of_the_copy():
    built = joint(CASES["through views"])
    snapshot(built)
    notes = annotate(built.module, 1, H100).notes
    copy = next(node for node in notes if node.name == "clone_default")
    assert {notes[built.node[name]].storage for name in "vp"} == {notes[copy].storage}


def test_an_output_that_is_the_input_itself_stays_it():
    built = joint(EMA.replace("return y |", "return y s |"))
    snapshot(built)
    assert returned(built.module) == "y primals_1 g"


def test_without_overwritten_inputs_nothing_changes():
    built = joint(SINES)
    before = str(built.module.graph)
    assert (snapshot(built), str(built.module.graph)) == (0, before)


@pytest.mark.parametrize("budget", [None, 0.5, 0.0])
@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_backward_never_reads_the_new_content_for_the_old(text, budget):
    built = joint(text)
    snapshot(built)
    graph = annotate(built.module, 1, H100)
    plan, _ = decide(graph, H100, options(budget))
    saved = [node for node in graph.nodes if node in {choice.node for choice in plan.saved}]
    forward, backward = split_joint(built.module, saved, 1)
    s, x, t = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.full((4,), 10.0), torch.tensor([1.0, 10.0, 100.0, 1000.0])
    old = s.exp() if text is CASES["rebuilt"] else s.clone()
    (y,), (gradient,) = run_step(forward, backward, 1, [s, x], [t])
    assert s.tolist() == [11.0, 12.0, 13.0, 14.0]
    assert torch.equal(y, 10.0 * old)
    assert torch.equal(gradient, t * old)


# Any graph, any plan

STEPS = (  # what computes a 4 x 4 value n from others, u and v
    "n = sin v",
    "n = mul u v",
    "n = mm u v",
    "n = t v",
    "n_a = clone v memory_format=torch.contiguous_format; n_b = view n_a [16]; n = view n_b [4,4]",
    "n_a = sum v [1] True; n = sub u n_a",
    "n_a = var_mean.dim v [0] keepdim=True; n_b = getitem n_a 1; n = mul u n_b",
    "n_a = split v 2; n_b = getitem n_a 1; n = cat [n_b,n_b]",
)


@st.composite
def joint_graphs(draw):
    """Random joint graphs with views, reductions, several outputs, values of either side, and writes to inputs."""
    lines, numbers = [f"x{i} = input 4x4 float64" for i in range(3)], itertools.count()

    def extended(values):
        """The values and up to six more, each computed from some before it."""
        values = list(values)
        for _ in range(draw(st.integers(1, 6))):
            step, name = draw(st.sampled_from(STEPS)), f"n{next(numbers)}"
            for letter in "uv":
                step = re.sub(rf"\b{letter}\b", draw(st.sampled_from(values)), step)
            lines.extend(re.sub(r"\bn(?=_|\b)", name, step).split("; "))
            values.append(name)
        return values

    def some(values):
        return draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))

    forward = extended(["x0", "x1", "x2"])
    for i in sorted(draw(st.sets(st.integers(0, 2)))):
        lines += [f"c{i} = clone {draw(st.sampled_from(forward))}", f"w{i} = copy_ x{i} c{i}"]
    lines.append("y = tangent 4x4 float64")
    outputs, gradients = some(forward), some(extended([*forward, "y"]))
    return "\n".join([*lines, f"return {' '.join(outputs)} | {' '.join(gradients)}"])


@settings(max_examples=80, derandomize=True, deadline=None)
@given(joint_graphs(), st.sampled_from(sorted(BY_NAME)), st.sampled_from([None, 0.3, 0.0]))
def test_every_plan_of_every_graph_computes_what_the_joint_graph_computes(text, planner, budget):
    built = joint(text)
    snapshot(built)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
    tangent = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    expected_inputs = [value.clone() for value in inputs]
    expected = fx.Interpreter(built.module).run(*expected_inputs, tangent)
    graph = annotate(built.module, built.num_fwd_outputs, H100)
    plan, _ = decide(graph, H100, options(budget, planner))
    saved = [node for node in graph.nodes if node in {choice.node for choice in plan.saved}]
    split_graphs = split_joint(built.module, saved, built.num_fwd_outputs)
    outputs, gradients = run_step(*split_graphs, built.num_fwd_outputs, inputs, [tangent])
    torch.testing.assert_close([*outputs, *gradients, *inputs], [*expected, *expected_inputs])


@settings(max_examples=80, derandomize=True, deadline=None)
@given(joint_graphs(), st.sampled_from(sorted(BY_NAME)), st.sampled_from([None, 0.3, 0.0]))
def test_a_plan_s_saved_bytes_are_those_that_forward_hands_over(text, planner, budget):
    built = joint(text)
    built.module.graph.eliminate_dead_code()  # as the partitioner does before it annotates
    snapshot(built)
    graph = annotate(built.module, built.num_fwd_outputs, H100)
    plan, _ = decide(graph, H100, options(budget, planner))
    saved = [node for node in graph.nodes if node in {choice.node for choice in plan.saved}]
    forward, _ = split_joint(built.module, saved, built.num_fwd_outputs)
    note = {node.name: note for node, note in graph.notes.items()}
    handed_over = returned(forward).split()[built.num_fwd_outputs :]
    allocated_anyway = {note[node.name].storage for node in graph.nodes if node.op == "placeholder"}
    allocated_anyway |= {note[node.name].storage for node in graph.fwd_outputs}
    storages = {note[name].storage: note[name].size_bytes for name in handed_over}
    assert plan.saved_bytes == sum(size for storage, size in storages.items() if storage not in allocated_anyway)
