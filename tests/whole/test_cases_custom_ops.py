"""Custom ops run as often as in eager, unless their author allows more (CASES 7)."""

from collections import Counter

import pytest
import torch
import torch.nn as nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import recompile
from recompile import registry

from .every_plan import SHARES, assert_alike, check, plans_of, quick, report_of, trained  # noqa: F401
from .interpret import interpreted, partitioner

pytestmark = pytest.mark.usefixtures("quick")

ROWS, WIDTH = 4, 8
PLANS = [
    *((share, "mincut") for share in SHARES),
    (4000, "mincut"),
    (None, "full"),
    (None, "save_all"),
    (None, "stock"),
]
every_plan = pytest.mark.parametrize(("budget", "planner"), PLANS)
calls = Counter()


@torch.library.custom_op("recompile_cases::opaque_sin", mutates_args=())
def opaque_sin(x: torch.Tensor) -> torch.Tensor:
    calls["opaque_sin"] += 1
    return x.sin()


@torch.library.custom_op("recompile_cases::split_sin_cos", mutates_args=())
def split_sin_cos(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    calls["split_sin_cos"] += 1
    return x.sin(), x.cos()


@torch.library.custom_op("recompile_cases::counted_copy", mutates_args=("count",))
def counted_copy(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    calls["counted_copy"] += 1
    count.add_(1)
    return x * count


@torch.library.custom_op("recompile_cases::accumulate", mutates_args=("total",))
def accumulate(x: torch.Tensor, total: torch.Tensor) -> None:
    calls["accumulate"] += 1
    total.add_(x.sum(0))


@torch.library.custom_op("recompile_cases::noted_sin", mutates_args=())
def noted_sin(x: torch.Tensor) -> torch.Tensor:
    calls["noted_sin"] += 1
    return x.sin()


def times_cosine_of_saved(ctx, tangent):
    return tangent * ctx.saved_tensors[0].cos()


def save_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


opaque_sin.register_fake(torch.empty_like)
opaque_sin.register_autograd(times_cosine_of_saved, setup_context=save_input)
noted_sin.register_fake(torch.empty_like)
noted_sin.register_autograd(times_cosine_of_saved, setup_context=save_input)
split_sin_cos.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
split_sin_cos.register_autograd(
    lambda ctx, ds, dc: ds * ctx.saved_tensors[0].cos() - dc * ctx.saved_tensors[0].sin(), setup_context=save_input
)
counted_copy.register_fake(lambda x, count: torch.empty_like(x))
accumulate.register_fake(lambda x, total: None)


class Opaque(nn.Module):
    """Values worth recomputing around each op: the op's result is read by backward, and so is what it reads."""

    def __init__(self, body):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.ones(WIDTH))
        self.body = body

    def forward(self, x):
        return self.body(self, self.second(self.body(self, self.first(x)).exp().sin())).exp()


def with_opaque(self, h):
    return h * opaque_sin(h.tanh()).square().tanh()


def with_two_results(self, h):
    sine, cosine = split_sin_cos(h.tanh())
    return sine * cosine.exp()


def with_mutation(self, h):
    return h.sin() * counted_copy(h.detach().tanh(), self.state).exp()


def with_mutation_only(self, h):
    y = h.sin() * self.state.exp()
    accumulate(h.detach(), self.state)
    return y * self.state.cos()


BODIES = {
    "opaque_sin": with_opaque,
    "split_sin_cos": with_two_results,
    "counted_copy": with_mutation,
    "accumulate": with_mutation_only,
}
every_body = pytest.mark.parametrize("op", BODIES)


def opaque(op):
    return Opaque(BODIES[op]), (torch.randn(ROWS, WIDTH),)


@every_body
def test_a_model_with_a_custom_op_is_right_under_every_plan(op):
    """CASES 7: opaque, with several results, writing to an argument, with no result at all."""
    check(lambda: opaque(op))


@every_body
def test_a_custom_op_is_called_as_often_as_in_eager(op):
    """CASES 7: two calls a step in forward, none in backward, under every plan."""
    backend = interpreted(partitioner(0.0))
    calls.clear()
    trained(lambda: opaque(op), lambda f: torch.compile(f, backend=backend), num_steps=2)
    assert calls[op] == 4
    for name, _, as_asked in plans_of(backend.graphs[0]):
        calls.clear()
        backend.graphs[0].replay(as_asked)
        assert calls[op] == 2, name


@every_plan
def test_an_op_with_an_ordered_effect_is_called_as_often_as_in_eager(budget, planner):
    """CASES 7: each plan is traced anew, for AOTAutograd threads the effect's token after the partitioner."""
    registration = _register_effectful_op(torch.ops.recompile_cases.noted_sin.default, _EffectType.ORDERED)
    try:
        backend = interpreted(partitioner(budget, planner))
        calls.clear()
        result = trained(effectful, lambda f: torch.compile(f, backend=backend), num_steps=2)
        assert calls["noted_sin"] == 4
    finally:
        registration.destroy()
    assert_alike(result, trained(effectful, num_steps=2), 1e-5)


def effectful():
    return Opaque(lambda self, h: noted_sin(h.tanh()).square()), (torch.randn(ROWS, WIDTH),)


@pytest.fixture
def allowed():
    before = dict(registry._registered)
    recompile.register_op(opaque_sin, recompute=True, flop=lambda shape: 1_000 * shape[0] * shape[1])
    yield
    registry._registered.clear()
    registry._registered.update(before)


def test_an_op_is_recomputed_once_its_author_allows_it(allowed):
    """CASES 7: and only then; its price is in the report."""
    (graph,) = check(lambda: opaque("opaque_sin")).graphs
    name = "recompile_cases.opaque_sin.default"
    step = graph.replay(partitioner(None, "full"))
    assert step.partition.backward_calls[name] == 2
    report = report_of(graph, None, "full")
    rows = [row for row in report.values if "opaque_sin" in row.op]
    assert [row.flop for row in rows] == 2 * [1_000 * ROWS * WIDTH]
    assert [row.cannot_recompute for row in rows] == [None, None]
    assert report.recompute_flops >= step.partition.backward_calls[name] * 1_000 * ROWS * WIDTH


def test_a_refusal_to_recompute_names_the_op_and_the_way_out():
    """CASES 7: seen in explain."""
    (graph,) = check(lambda: opaque("opaque_sin"), num_steps=1).graphs
    reasons = {row.cannot_recompute for row in report_of(graph, 0.0).values if "opaque_sin" in row.op}
    assert reasons == {"a custom op (recompile_cases::opaque_sin) that may hide state; see recompile.register_op"}


def test_an_op_that_writes_to_its_arguments_cannot_be_allowed_to_run_twice():
    """CASES 7: a clear error for the author."""
    with pytest.raises(ValueError, match="counted_copy writes to its arguments"):
        recompile.register_op(counted_copy, recompute=True)
