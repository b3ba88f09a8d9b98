"""Precision, sharing, kinds of outputs, and the ways that autograd is asked for gradients."""

import itertools

import pytest
import torch
import torch._functorch.config
import torch.nn as nn
import torch.nn.functional as F

from .every_plan import SHARES, assert_close_within, check, largest_in, quick  # noqa: F401
from .interpret import interpreted, partitioner
from .models import Block

pytestmark = pytest.mark.usefixtures("quick")

ROWS, WIDTH = 4, 8
every_share = pytest.mark.parametrize("share", SHARES)


def batch(requires_grad=False):
    return (torch.randn(ROWS, WIDTH, requires_grad=requires_grad),)


class Mixed(nn.Module):
    """bf16 outside, float32 in the middle; `inner` is what the middle runs under."""

    def __init__(self, inner):
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, 32), nn.Linear(32, WIDTH)
        self.inner = inner
        self.dtypes = []

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.gelu(self.up(x))
            with torch.autocast("cpu", **self.inner):
                h = torch.softmax(self.middle(h.to(self.middle_dtype)) * 3, -1)
            return self.down(h).float()

    @property
    def middle_dtype(self):
        return torch.float32 if self.inner.get("enabled") is False else torch.bfloat16


PRECISIONS = {"float32 inside": {"enabled": False}, "float16 inside": {"dtype": torch.float16}}


@pytest.mark.parametrize("inner", PRECISIONS.values(), ids=PRECISIONS)
def test_a_part_with_a_precision_of_its_own_keeps_it_when_recomputed(inner):
    """CASES 6: eager to bf16's precision, and every plan to the last bit; backward's products have forward's dtypes."""
    (graph,) = check(lambda: (Mixed(inner), batch()), tolerance=0.02).graphs
    forward, backward = (products(part) for part in (graph.joint.gm, graph.replay(partitioner(0.0)).partition.backward))
    assert backward <= forward and len(forward) == 2


def products(gm):
    """The dtypes of the matrix products."""
    return {node.meta["val"].dtype for node in gm.graph.nodes if "mm" in str(node.target)}


class Tied(nn.Module):
    """The embedding is the head, and one block is applied twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(16, WIDTH), Block(WIDTH, dropout=0.0)

    def forward(self, tokens):
        x = self.block(self.block(self.embed(tokens)))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


def test_shared_weights_have_the_sum_of_their_gradients():
    """CASES 8: tied embedding and head, one block applied twice."""
    check(lambda: (Tied(), (torch.randint(0, 16, (2, 6)),)))


class Adapted(nn.Module):
    """A frozen weight and a low-rank update of it, as in LoRA."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = F.silu(frozen(x) + up(down(x)) * 2.0)
        return x


def test_frozen_weights_get_no_gradient_and_their_adapters_get_eagers():
    """CASES 8: low-rank adapters."""
    check(lambda: (Adapted(), batch()))


class Outputs(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.linear, self.outputs = nn.Linear(WIDTH, WIDTH), outputs

    def forward(self, x):
        return self.outputs(x, self.linear(x).sin())


def several_of_which_one_is_needed_by_backward(x, h):
    y = h.exp()
    return y, y.sin(), h.mean()


def integers_and_booleans(x, h):
    values, indices = h.max(-1)
    return values.exp(), indices, h > 0, h.argsort(-1), h.detach()


def aliases_of_inputs(x, h):
    return x, x.view(-1), x[1:], h.exp()


def aliases_of_each_other(x, h):
    y = h.exp()
    return y, y.view(-1)[2:], y.t(), y[0]


def one_twice(x, h):
    y = h.cos()
    return y, y, {"nested": [y.exp(), None, 3]}


def scalars(x, h):
    return h.square().mean(), h.numel(), x.shape[0]


OUTPUTS = [
    several_of_which_one_is_needed_by_backward, integers_and_booleans, aliases_of_inputs, aliases_of_each_other,
    one_twice, scalars,
]  # fmt: skip


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_outputs_of_every_kind_are_eagers(outputs):
    """CASES 9."""
    check(lambda: (Outputs(outputs), batch(requires_grad=True)))


@every_share
def test_outputs_that_the_loss_does_not_read_need_no_gradient(share):
    """CASES 9: backward from one output of three."""
    torch.manual_seed(0)
    model, (x,) = Outputs(several_of_which_one_is_needed_by_backward), batch()
    expected = torch.autograd.grad(model(x)[1].sum(), list(model.parameters()))
    compiled = torch.compile(model, backend=interpreted(partitioner(share)))
    actual = torch.autograd.grad(compiled(x)[1].sum(), list(model.parameters()))
    assert_all_close(actual, expected)


def assert_all_close(actual, expected, tolerance=1e-5):
    for index, (value, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close_within(str(index), value, other, tolerance * largest_in(other))


def chain(x, weight):
    return ((x @ weight).sin() @ weight).exp() * x.cos()


def compiled_chain(share):
    torch.manual_seed(0)
    inputs = [torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)]
    return torch.compile(chain, backend=interpreted(partitioner(share))), inputs


@every_share
def test_a_retained_graph_gives_its_gradients_twice(share):
    """CASES 10: or PyTorch's error names the setting that donates its memory; without donation it works."""
    compiled, inputs = compiled_chain(share)
    expected = torch.autograd.grad(chain(*inputs).sum(), inputs)
    with torch._functorch.config.patch(donated_buffer=False):
        loss = compiled(*inputs).sum()
        for _ in range(2):
            assert_all_close(torch.autograd.grad(loss, inputs, retain_graph=True), expected)
    torch._dynamo.reset()
    loss = compiled(*inputs).sum()
    try:
        for _ in range(2):
            assert_all_close(torch.autograd.grad(loss, inputs, retain_graph=True), expected)
    except RuntimeError as error:
        assert "donated_buffer=False" in str(error)


@every_share
def test_gradients_of_some_inputs_only_are_right(share):
    """CASES 10: torch.autograd.grad for one input, and inputs of which one needs none."""
    compiled, inputs = compiled_chain(share)
    for wanted in inputs:
        expected = torch.autograd.grad(chain(*inputs).sum(), [wanted])
        assert_all_close(torch.autograd.grad(compiled(*inputs).sum(), [wanted]), expected)
    for frozen, other in itertools.permutations(range(2)):
        given = [value.detach().requires_grad_(i != frozen) for i, value in enumerate(inputs)]
        expected = torch.autograd.grad(chain(*given).sum(), [given[other]])
        assert_all_close(torch.autograd.grad(compiled(*given).sum(), [given[other]]), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
def test_without_gradients_nothing_is_split(mode):
    """CASES 10: no input needs one, no_grad, inference_mode; then again with gradients."""
    compiled, inputs = compiled_chain(0.0)
    backend = interpreted(partitioner(0.0))
    compiled = torch.compile(chain, backend=backend)
    if mode is None:
        result = compiled(*(value.detach() for value in inputs))
    else:
        with mode():
            result = compiled(*inputs)
    assert not backend.graphs and not result.requires_grad
    assert_all_close([result], [chain(*inputs).detach()])
    expected = torch.autograd.grad(chain(*inputs).sum(), inputs)
    assert_all_close(torch.autograd.grad(compiled(*inputs).sum(), inputs), expected)
    assert len(backend.graphs) == 1


@every_share
def test_second_derivatives_are_refused_by_name(share):
    """CASES 11: a clear error, not a wrong number: by autograd.grad and by backward of a penalty."""
    compiled, inputs = compiled_chain(share)
    first = torch.autograd.grad(compiled(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(sum(value.square().sum() for value in first), inputs)


@every_share
def test_a_gradient_penalty_is_refused_by_name(share):
    """CASES 11: the loss holds a first derivative."""
    compiled, inputs = compiled_chain(share)
    y = compiled(*inputs)
    (slope,) = torch.autograd.grad(y.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (y.mean() + slope.square().mean()).backward()
