"""Sizes that change between calls, and sizes that depend on the data (CASES 12)."""

import functools

import pytest
import torch
import torch._dynamo.config
import torch.nn as nn

from .every_plan import SHARES, assert_alike, check, check_replays, quick, trained  # noqa: F401
from .interpret import interpreted, partitioner

pytestmark = pytest.mark.usefixtures("quick")

LENGTH, WIDTH = 4, 8
SIZES = (3, 5, 9)
PLANS = [
    *((share, "mincut") for share in SHARES),
    (200_000, "mincut"),
    (None, "full"),
    (None, "save_all"),
    (None, "stock"),
]
every_plan = pytest.mark.parametrize(("budget", "planner"), PLANS)


class Sized(nn.Module):
    """The number of rows is the divisor of a mean and the size of an expand, for which backward alone needs it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.linear(x).sin()
        return h.exp().mean() + h.mean(0, keepdim=True).expand(x.shape[0], -1, -1).exp().sum()


def trained_on(inputs, compiled=lambda f: f):
    torch.manual_seed(0)
    model = Sized()
    function = compiled(model)
    losses = []
    for x in inputs:
        loss = function(x)
        loss.backward()
        losses.append(loss.detach())
    return losses, [parameter.grad for parameter in model.parameters()]


def assert_right(inputs, num_graphs, budget, planner, dynamic):
    backend = interpreted(partitioner(budget, planner))
    actual = trained_on(inputs, functools.partial(torch.compile, backend=backend, dynamic=dynamic))
    torch.testing.assert_close(actual, trained_on(inputs), rtol=1e-4, atol=1e-5)
    assert len(backend.graphs) == num_graphs


@every_plan
def test_one_compilation_serves_three_sizes_of_batch_and_sequence(budget, planner):
    """CASES 12: dynamic=True."""
    assert_right([torch.randn(size, size + 2, WIDTH) for size in SIZES], 1, budget, planner, dynamic=True)


@pytest.mark.parametrize(("budget", "planner"), [(None, "mincut"), (0.25, "mincut"), (0.0, "mincut"), (None, "full")])
def test_the_second_size_makes_the_graph_dynamic_and_the_third_compiles_nothing(budget, planner):
    """CASES 12: without dynamic=True."""
    assert_right([torch.randn(size, LENGTH, WIDTH) for size in SIZES], 2, budget, planner, dynamic=None)


def size_for_backward_only(x):
    return (x.sin().sum(0) / x.shape[0]).exp()


def sizes_in_arithmetic(x):
    return (x.view(x.shape[0] * 2, -1).softmax(-1) * x.numel()).log().view_as(x)[: x.shape[0] // 2]


@pytest.mark.parametrize("function", [size_for_backward_only, sizes_in_arithmetic])
def test_symbolic_sizes_of_all_kinds_agree_under_every_plan(function):
    """CASES 12: sizes that only backward uses, and arithmetic on sizes."""
    check(lambda: (function, (torch.randn(6, WIDTH, requires_grad=True),)), dynamic=True)


class Router(nn.Module):
    """A mixture of experts: each token goes to one expert, by nonzero, index and scatter."""

    def __init__(self, num_experts=3):
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(num_experts)
        )

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.nonzero(chosen == number, as_tuple=True)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows].unsqueeze(1))
        return y


class ScatterRouter(Router):
    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        dispatch = torch.zeros(len(x), len(self.experts)).scatter(1, chosen, weights)
        return sum(expert(x) * dispatch[:, i : i + 1] for i, expert in enumerate(self.experts))


class Selected(nn.Module):
    def __init__(self, select):
        super().__init__()
        self.linear, self.select = nn.Linear(WIDTH, WIDTH), select

    def forward(self, x):
        return self.select(x, self.linear(x).sin()).exp()


def by_nonzero(x, h):
    return h[torch.nonzero(x[:, 0] > 0).squeeze(1)]


def by_mask(x, h):
    return h[x[:, 0] > 0].square()


def by_masked_select(x, h):
    return torch.masked_select(h, x > 0).cos()


def by_repetition(x, h):
    return h.repeat_interleave((x[:, 0] > 0).long() + 1, dim=0)


def by_item(x, h):
    length = (x[:, 0] > 0).sum().item()
    torch._check(length <= x.shape[0])
    return h[:length].cos()


@pytest.fixture
def data_dependent_sizes():
    """In the graph, in the place of graph breaks."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


@pytest.mark.parametrize("select", [by_nonzero, by_mask, by_masked_select, by_repetition, by_item])
def test_sizes_that_depend_on_the_data_are_read_once(select, data_dependent_sizes):
    """CASES 12: nonzero and its kin."""
    check(lambda: (Selected(select), (torch.randn(6, WIDTH),)))


@pytest.mark.parametrize("router", [Router, ScatterRouter])
def test_a_mixture_of_experts_is_right(router, data_dependent_sizes):
    """CASES 12: routed by nonzero, and by scatter."""
    check(lambda: (router(), (torch.randn(12, WIDTH),)))


def test_an_expert_may_go_without_tokens(data_dependent_sizes):
    """CASES 12: a data-dependent size of zero, in a graph traced for more."""
    backend = interpreted(partitioner(0.0))
    torch.manual_seed(0)
    model = Router()
    compiled = torch.compile(model, backend=backend)
    for bias in (0.0, 100.0):
        model.gate.bias.data[1] = bias
        x = torch.randn(12, WIDTH)
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), allow_unused=True)
        actual = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()), allow_unused=True)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert len(backend.graphs) == 1


def test_a_data_dependent_branch_that_breaks_the_graph_is_right():
    """CASES 12: without capture, each of three parts is planned on its own."""
    check(lambda: (Selected(by_nonzero), (torch.randn(6, WIDTH),)), num_graphs=3)


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.linear(x).sin()
        return torch.cond(x.sum() > 0, lambda h: h.exp().sin(), lambda h: h.cos(), (h,)).exp()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_branch_that_depends_on_the_data_takes_forwards_way_in_backward(sign):
    """CASES 12 and 7: torch.cond, a higher-order op."""
    backend = interpreted(partitioner(0.0))
    case = functools.partial(conditional, sign)
    actual = trained(case, functools.partial(torch.compile, backend=backend))
    assert_alike(actual, trained(case), 1e-5)
    check_replays(backend.graphs[-1])


def conditional(sign):
    return Conditional(), (sign * torch.rand(4, WIDTH),)
