"""Kinds, FLOP and bytes of single ops, each expected value worked out by hand."""

import operator

import pytest
import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import recompile.torch_private  # noqa: F401  registers Inductor's prims
from recompile.joint import Kind, Work
from recompile.sizes import AT_HINTS, UNBACKED_SIZE
from recompile.work import bytes_of, kind_of, num_elements, reduced_dims, storage_bytes_of, work_of

aten, prims = torch.ops.aten, torch.ops.prims

X = torch.empty(4, 6)  # 24 elements, 96 bytes


@pytest.fixture(scope="module")
def library():
    """Two custom ops that nothing is known about: one returns a tensor, one returns nothing."""
    with torch.library._scoped_library("recompile_test", "FRAGMENT") as scoped:
        scoped.define("mix(Tensor x, Tensor y) -> Tensor")
        scoped.impl("mix", lambda x, y: torch.empty_like(x), "Meta")
        scoped.define("check(Tensor x) -> ()")
        scoped.impl("check", lambda x: None, "Meta")
        yield torch.ops.recompile_test


def trace(function, *inputs, mode="fake"):
    """The graph of a function of tensors, with fake values."""
    return make_fx(function, tracing_mode=mode)(*inputs).graph


def last_of(function, *inputs, mode="fake"):
    """The last op that a function runs."""
    return [node for node in trace(function, *inputs, mode=mode).nodes if node.op == "call_function"][-1]


def calls(graph):
    return [node for node in graph.nodes if node.op == "call_function"]


def kinds(graph):
    return " ".join(kind_of(node).value for node in graph.nodes)


# Kinds


@pytest.mark.parametrize(
    "view",
    [
        lambda x: aten.view.default(x, [6, 4]),
        lambda x: aten._unsafe_view.default(x, [6, 4]),
        lambda x: aten.permute.default(x, [1, 0]),
        lambda x: aten.t.default(x),
        lambda x: aten.expand.default(x, [3, 4, 6]),
        lambda x: aten.slice.Tensor(x, 0, 1, 3),
        lambda x: aten.select.int(x, 0, 1),
        lambda x: aten.unsqueeze.default(x, 0),
        lambda x: aten.as_strided.default(x, [2, 2], [1, 1]),
        lambda x: aten.alias.default(x),
        lambda x: aten.detach.default(x),
        lambda x: aten.split.Tensor(x, 2)[1],
        lambda x: aten.unbind.int(x, 1)[5],
    ],
)
def test_a_view_is_a_view_and_free(view):
    node = last_of(view, X)
    assert (kind_of(node), work_of(node)) == (Kind.VIEW, Work(0, 0, 0))


def test_a_view_stays_one_when_a_graph_pass_has_replaced_its_input():
    graph = trace(lambda x: (aten.view.default(x, [24]), aten._unsafe_view.default(x, [24])), X)
    for node in calls(graph):
        node.args[0].meta["val"] = torch.empty(4, 6, device="meta")
    assert kinds(graph) == "input view view output"


@pytest.mark.parametrize(
    "pointwise",
    [
        lambda x: aten.add.Tensor(x, x),
        lambda x: aten.where.self(x > 0, x, x),
        lambda x: aten.clone.default(x),
        lambda x: aten._to_copy.default(x, dtype=torch.float64),
        lambda x: prims.convert_element_type.default(x, torch.bfloat16),
        lambda x: prims.mul.default(x, x),
        lambda x: prims.fma.default(x, x, x),
        lambda x: aten.full.default([3], 1.0),
        lambda x: aten.arange.start_step(0, 8, 1),
        lambda x: prims.iota.default(8, start=0, step=1, dtype=torch.int64, device="cpu", requires_grad=False),
        lambda x: aten.cat.default([x, x]),
        lambda x: aten.constant_pad_nd.default(x, [1, 1]),
        lambda x: aten.gather.default(x, 1, aten.full.default([4, 2], 0, dtype=torch.int64)),
        lambda x: aten.index.Tensor(x, [aten.full.default([2], 0, dtype=torch.int64)]),
        lambda x: aten.repeat.default(x, [2, 1]),
        lambda x: aten.slice_scatter.default(x, aten.slice.Tensor(x, 0, 0, 2), 0, 2, 4),
        lambda x: aten.tril.default(x),
        lambda x: aten.flip.default(x, [0]),
        lambda x: aten.roll.default(x, [1], [0]),
        lambda x: aten.copy.default(x, x),
        lambda x: aten.copy_.default(x, x + 1),
        lambda x: aten.maximum.default(x, x),
        lambda x: aten.max.other(x, x),
    ],
)
def test_what_inductor_writes_as_one_loop_is_pointwise(pointwise):
    assert kind_of(last_of(pointwise, X)) is Kind.POINTWISE


@pytest.mark.parametrize(
    "reduction",
    [
        lambda x: aten.sum.dim_IntList(x, [0]),
        lambda x: aten.mean.default(x),
        lambda x: aten.amax.default(x, [1]),
        lambda x: aten.max.dim(x, 1),
        lambda x: aten.max.default(x),
        lambda x: aten.argmax.default(x),
        lambda x: aten.var.correction(x, [1]),
        lambda x: aten.prod.default(x),
        lambda x: aten.any.default(x),
        lambda x: aten.cumsum.default(x, 0),
        lambda x: aten._softmax.default(x, 1, False),
    ],
)
def test_reductions_and_scans_are_reductions(reduction):
    assert kind_of(calls(trace(reduction, X))[0]) is Kind.REDUCTION


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (lambda x: x.sum(-1), [1]),
        (lambda x: x.amax((1, 0)), [0, 1]),
        (lambda x: x.argmax(), [0, 1]),
        (lambda x: x.sum(()), [0, 1]),
        (lambda x: x.max(0)[0], [0]),
        (lambda x: torch.linalg.vector_norm(x, 1, 0), [0]),  # its second argument is the order and no dimension
        (lambda x: x[0, 0].max(-1)[0], []),
        (lambda x: x[0, 0].sum(), []),
    ],
)
def test_a_reduction_goes_over_the_dimensions_it_names_or_all(function, dims):
    node = next(node for node in trace(function, X).nodes if kind_of(node) is Kind.REDUCTION)
    assert reduced_dims(node, node.args[0].meta["val"].dim()) == dims


@pytest.mark.parametrize(
    "extern",
    [
        lambda x: aten.mm.default(x, aten.t.default(x)),
        lambda x: aten.topk.default(x, 2)[0],
        lambda x: aten.sort.default(x)[0],
        lambda x: aten.scatter.src(x, 0, aten.full.default([1, 6], 0, dtype=torch.int64), x),
        lambda x: aten.index_put.default(x, [aten.full.default([4], 0, dtype=torch.int64)], x),
        lambda x: aten.digamma.default(x),
        lambda x: aten.rand.default([4]),
        lambda x: prims.inductor_seeds.default(2, torch.device("cpu")),
        lambda x: aten.add.Tensor(aten.full.default([4], 1j, dtype=torch.complex64), 1),
    ],
)
def test_what_fuses_with_nothing_is_extern(extern):
    assert kind_of(last_of(extern, X)) is Kind.EXTERN


def test_an_element_of_several_outputs_has_the_kind_of_the_op_and_costs_nothing():
    graph = trace(lambda x: aten.var_mean.correction(x, [1], correction=0)[1], X)
    assert kinds(graph) == "input reduction reduction reduction output"  # both elements are picked apart
    assert [work_of(node) for node in calls(graph)[1:]] == [Work(0, 0, 0), Work(0, 0, 0)]


def test_sizes_and_what_is_computed_from_them_are_values_and_free():
    graph = trace(lambda x: aten.view.default(x, [x.shape[0] * 6]), X, mode="symbolic")
    size = next(node for node in graph.nodes if node.target is aten.sym_size.int)
    product = next(node for node in graph.nodes if node.target is operator.mul)
    assert [kind_of(size), kind_of(product)] == [Kind.VALUE, Kind.VALUE]
    assert [work_of(size), work_of(product)] == [Work(0, 0, 0), Work(0, 0, 0)]


def test_a_copy_between_devices_is_not_fused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten._to_copy.default, (x,), {"device": torch.device("meta")})
    x.meta["val"], y.meta["val"] = torch.empty(4), torch.empty(4, device="meta")
    assert kind_of(y) is Kind.EXTERN


# Sizes


def test_a_symbolic_size_counts_at_its_hint_and_one_that_depends_on_data_at_the_stated_guess():
    unbacked = ShapeEnv().create_unbacked_symint()
    node = last_of(lambda x: aten.exp.default(x), X, mode="symbolic")
    assert AT_HINTS.shape(node.meta["val"]) == (4, 6)
    assert [AT_HINTS.number(7), AT_HINTS.number(unbacked)] == [7, UNBACKED_SIZE]


def test_an_expanded_tensor_touches_its_storage_once():
    expanded = torch.empty(1, 6, dtype=torch.bfloat16).expand(1000, 6)
    assert (num_elements(expanded), bytes_of(expanded), storage_bytes_of(expanded)) == (6000, 12, 12)


def test_overlapping_windows_touch_no_more_than_the_storage():
    assert bytes_of(torch.empty(10).unfold(0, 5, 1)) == 40


def test_a_slice_touches_itself_and_keeps_all_of_its_storage():
    rows = torch.empty(10, 4)[2:4]
    assert (bytes_of(rows), storage_bytes_of(rows)) == (32, 160)


def test_a_tuple_counts_its_tensors_and_a_shared_storage_once():
    x = torch.empty(10)
    assert (bytes_of((x, [x[:5]], None, 3)), storage_bytes_of((x, [x[:5]], None, 3))) == (60, 40)


def test_what_is_not_a_tensor_has_no_bytes():
    assert [bytes_of(None), bytes_of(3), storage_bytes_of(None), bytes_of(torch.empty(0, 5))] == [0, 0, 0, 0]


# Work


@pytest.mark.parametrize(
    ("function", "work"),
    [
        (lambda x: aten.add.Tensor(x, x), Work(24, 96, 96)),  # an input that is read twice is loaded once
        (lambda x: aten.mul.Tensor(x, x[0]), Work(24, 96 + 24, 96)),
        (lambda x: aten.div.Tensor(x, 2.0), Work(8 * 24, 96, 96)),
        (lambda x: aten.exp.default(x), Work(20 * 24, 96, 96)),
        (lambda x: aten.pow.Tensor_Scalar(x, 2), Work(24, 96, 96)),
        (lambda x: aten.pow.Tensor_Scalar(x, 0.3), Work(20 * 24, 96, 96)),
        (lambda x: aten.gt.Scalar(x, 0), Work(24, 96, 24)),
        (lambda x: prims.convert_element_type.default(x, torch.bfloat16), Work(0, 96, 48)),
        (lambda x: aten.clone.default(aten.expand.default(x[:1], [4, 6])), Work(0, 24, 96)),
        (lambda x: aten.full.default([8], 1.0), Work(0, 0, 32)),
        (lambda x: aten.full_like.default(x, 1.0), Work(0, 0, 96)),
        (lambda x: aten.empty.memory_format([8]), Work(0, 0, 0)),
        (lambda x: aten.cat.default([x, x[:2]]), Work(0, 96 + 48, 144)),
        (lambda x: aten.slice_scatter.default(x, aten.exp.default(x[:1]), 0, 0, 1), Work(0, 96, 96)),
        (lambda x: aten.copy.default(x, x + 1), Work(0, 96, 96)),
        (lambda x: aten.sum.dim_IntList(x, [1]), Work(24, 96, 16)),
        (lambda x: aten._softmax.default(x, 1, False), Work(20 * 24, 96, 96)),
        (lambda x: aten.sort.default(x)[0], Work(0, 0, 0)),  # the element; the op itself is below
        (lambda x: aten.mm.default(x, aten.t.default(x)), Work(2 * 4 * 6 * 4, 96 + 96, 64)),
        (lambda x: aten._int_mm.default(x.to(torch.int8), x.to(torch.int8).t()), Work(192, 24 + 24, 64)),
        (lambda x: aten.addmm.default(x[0], x, aten.view.default(x, [6, 4])[:, :1]), Work(48, 24 + 96 + 24, 96)),
    ],
)
def test_one_run_costs(function, work):
    assert work_of(last_of(function, X)) == work


def test_an_op_with_several_outputs_writes_them_all():
    sort = calls(trace(lambda x: aten.sort.default(x)[0], X))[0]
    assert work_of(sort) == Work(0, 96, 96 + 2 * 96)
    var_mean = calls(trace(lambda x: aten.var_mean.correction(x, [1], correction=0)[1], X))[0]
    assert work_of(var_mean) == Work(24, 96, 16 + 16)


def test_random_numbers_cost_their_rounds_whether_inductor_writes_the_loop_or_not():
    seed = torch.empty((), dtype=torch.int64)
    drawn = last_of(lambda seed: prims.inductor_random.default([10], seed, "rand"), seed)
    assert (kind_of(drawn), work_of(drawn)) == (Kind.POINTWISE, Work(1000, 8, 40))
    library_call = last_of(lambda x: aten.rand_like.default(x), X)
    assert (kind_of(library_call), work_of(library_call)) == (Kind.EXTERN, Work(2400, 0, 96))


def test_looking_up_a_seed_reads_one_seed():
    node = last_of(lambda seeds: prims.inductor_lookup_seed.default(seeds, 3), torch.empty(50, dtype=torch.int64))
    assert (kind_of(node), work_of(node)) == (Kind.POINTWISE, Work(0, 8, 8))


def test_an_embedding_reads_the_rows_it_picks_and_not_the_table():
    table, tokens = torch.empty(50_000, 8), torch.empty(3, dtype=torch.int64)
    node = last_of(lambda table, tokens: aten.embedding.default(table, tokens), table, tokens)
    assert (kind_of(node), work_of(node)) == (Kind.POINTWISE, Work(0, 3 * 8 * 4 + 3 * 8, 3 * 8 * 4))


def test_a_small_table_that_many_rows_are_picked_from_is_read_once():
    table, tokens = torch.empty(2, 8), torch.empty(300, dtype=torch.int64)
    node = last_of(lambda table, tokens: aten.embedding.default(table, tokens), table, tokens)
    assert work_of(node).read_bytes == 2 * 8 * 4 + 300 * 8


def test_a_batch_of_matmuls_with_an_expanded_side_reads_that_side_once():
    x, y = torch.empty(5, 4, 6, dtype=torch.bfloat16), torch.empty(1, 6, 3, dtype=torch.bfloat16)
    node = last_of(lambda x, y: aten.bmm.default(x, aten.expand.default(y, [5, 6, 3])), x, y)
    assert work_of(node) == Work(5 * 2 * 4 * 6 * 3, 2 * (5 * 4 * 6 + 6 * 3), 2 * 5 * 4 * 3)


def test_symbolic_shapes_cost_what_their_hints_cost():
    def function(x):
        return aten.mm.default(aten.view.default(x, [x.shape[0] * 2, -1]), x[: x.shape[1] // 2])

    sizes = {mode: work_of(last_of(function, torch.empty(3, 6), mode=mode)) for mode in ("fake", "symbolic")}
    assert sizes["symbolic"] == sizes["fake"] == Work(2 * 6 * 3 * 6, 72 + 72, 144)


IMAGE, FILTERS = torch.empty(2, 3, 8, 8), torch.empty(5, 3, 3, 3)
CONVOLUTION = (
    [1, 1],
    [1, 1],
    [1, 1],
    False,
    [0, 0],
    1,
)  # stride, padding, dilation, transposed, output padding, groups
CONVOLUTION_FLOP = 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)  # each output pixel is a dot product of 27


def test_a_convolution_costs_a_dot_product_of_the_filter_per_pixel():
    node = last_of(lambda x, w: aten.convolution.default(x, w, None, *CONVOLUTION), IMAGE, FILTERS)
    read = 4 * (2 * 3 * 64 + 5 * 27)
    assert (kind_of(node), work_of(node)) == (Kind.EXTERN, Work(CONVOLUTION_FLOP, read, 4 * 2 * 5 * 64))


@pytest.mark.parametrize(("mask", "times"), [([True, True, False], 2), ([False, True, False], 1)])
def test_the_backward_of_a_convolution_costs_it_once_for_each_gradient(mask, times):
    def function(g, x, w):
        return aten.convolution_backward.default(g, x, w, [0], *CONVOLUTION, mask)[1]

    node = calls(trace(function, torch.empty(2, 5, 8, 8), IMAGE, FILTERS))[0]
    assert (kind_of(node), work_of(node).flop) == (Kind.EXTERN, times * CONVOLUTION_FLOP)


def test_fused_attention_on_a_cpu_costs_two_matmuls_and_its_backward_five():
    q, k, v = (torch.empty(1, 2, 16, 8) for _ in range(3))

    def function(q, k, v):
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return backward(out, q, k, v, out, logsumexp, 0.0, True)[0]

    forward, backward = (node for node in calls(trace(function, q, k, v)) if node.target is not operator.getitem)
    matmul = 2 * 2 * 16 * 16 * 8
    assert [kind_of(forward), kind_of(backward)] == [Kind.EXTERN, Kind.EXTERN]
    assert [work_of(forward).flop, work_of(backward).flop] == [2 * matmul, 5 * matmul]
    out_bytes, logsumexp_bytes = 4 * 2 * 16 * 8, 4 * 2 * 16
    assert work_of(forward) == Work(2 * matmul, 3 * out_bytes, out_bytes + logsumexp_bytes)


def test_attention_on_jagged_rows_is_counted_at_the_longest_row():
    rows, ends = torch.empty(20, 2, 8, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)
    graph = fx.Graph()
    q, cumulated = graph.placeholder("q"), graph.placeholder("ends")
    args = (q, q, q, cumulated, cumulated, 16, 16, 0.0, True, False)
    node = graph.call_function(aten._flash_attention_forward.default, args)
    q.meta["val"], cumulated.meta["val"], node.meta["val"] = rows, ends, (rows, torch.empty(2, 20))
    assert work_of(node).flop == 2 * (2 * (2 * 2 * 16 * 16 * 8))


def test_an_unknown_op_costs_its_bytes_also_when_it_returns_nothing(library):
    mix = last_of(lambda x: library.mix.default(x, x[0]), X)
    check = last_of(lambda x: library.check.default(x), X)
    assert [kind_of(mix), kind_of(check)] == [Kind.EXTERN, Kind.EXTERN]
    assert [work_of(mix), work_of(check)] == [Work(0, 96 + 24, 96), Work(0, 96, 0)]


def test_a_higher_order_op_costs_its_bytes():
    def branch(x):
        return (x.sin(),)

    node = next(
        node
        for node in trace(lambda x: torch.cond(x.sum() > 0, branch, branch, (x,))[0], X).nodes
        if isinstance(node.target, torch._ops.HigherOrderOperator)
    )
    assert (kind_of(node), work_of(node)) == (Kind.EXTERN, Work(0, 1 + 96, 96))


def test_pooling_reads_every_input_once():
    node = last_of(lambda x: aten.avg_pool2d.default(x, [2, 2], [2, 2]), IMAGE)
    assert (kind_of(node), work_of(node)) == (Kind.POINTWISE, Work(2 * 3 * 64, 4 * 2 * 3 * 64, 4 * 2 * 3 * 16))
