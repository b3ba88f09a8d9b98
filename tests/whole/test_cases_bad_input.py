"""Inputs out of the ordinary: as in eager, or an error that names what is unsupported; never a wrong number."""

import functools

import pytest
import torch
import torch.nn as nn
import torch.utils._pytree as pytree

from .every_plan import SHARES, check, quick, trained  # noqa: F401
from .interpret import interpreted, partitioner

pytestmark = pytest.mark.usefixtures("quick")

ROWS, WIDTH = 4, 8


def check_or_named(case, *names, **options):
    """Right under every plan, or refused by an error that holds one of the names."""
    try:
        check(case, **options)
    except AssertionError:
        raise
    except Exception as error:
        assert any(name in str(error).lower() for name in names), f"unclear: {type(error).__name__}: {error}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x).exp().sin()).tanh()


def with_values(*values):
    x = torch.randn(ROWS, WIDTH)
    x.view(-1)[: len(values)] = torch.tensor(values)
    return Net(), (x.requires_grad_(),)


@pytest.mark.parametrize("values", [[float("nan")], [float("inf"), -float("inf")], [1e38, -1e38], [1e-42]], ids=str)
def test_values_that_are_not_finite_go_where_eager_lets_them_go(values):
    """Issue 3: NaN, infinities, overflow, denormals in activations."""
    check(lambda: with_values(*values))


def through_where(x):
    return torch.where(x > 0, x.log(), x.exp()).nan_to_num().sum(0) + x.sqrt().nanmean(0)


def test_gradients_that_are_nan_are_nan_in_the_same_places():
    """Issue 3: the logarithm of what is negative, masked."""
    check(lambda: (through_where, (torch.randn(ROWS, WIDTH, requires_grad=True),)))


@pytest.mark.parametrize("shape", [(0, WIDTH), (0, 3, WIDTH), (2, 0, WIDTH)], ids=str)
def test_empty_batches_are_right(shape):
    """Issue 3: zero-size tensors as inputs."""
    check(lambda: (Net(), (torch.randn(shape, requires_grad=True),)))


def through_empty_middle(x):
    return torch.cat([x.exp()[:, :0].sin(), (x.sin() @ x.new_zeros(WIDTH, 0)), x.cos()], 1).exp()


def test_empty_values_inside_a_function_are_right():
    """Issue 3: zero-size activations."""
    check(lambda: (through_empty_middle, (torch.randn(ROWS, WIDTH, requires_grad=True),)))


def test_a_number_without_dimensions_is_right():
    """Issue 3: zero dimensions."""
    check(lambda: (lambda x: (x.exp().sin() * x).cos(), (torch.tensor(0.7, requires_grad=True),)))


def complex_products(x, w):
    return ((x @ w).exp() * x.conj()).abs().sin() + (x * w[0]).real


def complex_result(x, w):
    return (x @ w).sin() * 1j


def complex_inside(x, w):
    return (torch.complex(x, x.sin()) * torch.view_as_complex(torch.stack([x, x.cos()], -1)).conj()).angle() @ w


def spectrum(x, w):
    return torch.fft.irfft(torch.fft.rfft(x.sin()) * w[0, : WIDTH // 2 + 1].exp(), n=WIDTH).cos()


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(complex_products, torch.cfloat), (complex_result, torch.cfloat), (complex_inside, None), (spectrum, None)],
)
def test_complex_numbers_are_right(function, dtype):
    """Issue 3: as inputs, as results, inside, and in Fourier transforms."""

    def case():
        x, w = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(WIDTH, WIDTH, dtype=dtype)
        return function, (x.requires_grad_(), w.requires_grad_())

    check(case)


def of_sparse(x, w):
    return torch.sparse.mm(x, w).sin().exp()


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_inputs_are_right_or_refused_by_name(layout):
    """Issue 3: a sparse matrix that needs no gradient, times a dense one."""

    def case():
        x = torch.randn(ROWS, WIDTH).relu()
        return of_sparse, (
            x.to_sparse() if layout == "coo" else x.to_sparse_csr(),
            torch.randn(WIDTH, WIDTH, requires_grad=True),
        )

    assert_right_or_named(case, "sparse")


def sparse_gradient_case():
    return nn.Sequential(nn.Embedding(16, WIDTH, sparse=True), nn.Tanh()), (torch.randint(0, 16, (ROWS,)),)


def test_sparse_gradients_are_right_or_refused_by_name():
    """Issue 3: an embedding with sparse=True."""
    assert_right_or_named(sparse_gradient_case, "sparse")


def assert_right_or_named(case, *names):
    """Without replays: what cannot be copied cannot be replayed. Gradients are compared as dense tensors."""
    for share in SHARES:
        torch._dynamo.reset()
        expected = trained(case, num_steps=1)
        backend = interpreted(partitioner(share))
        try:
            actual = trained(case, functools.partial(torch.compile, backend=backend), num_steps=1)
        except Exception as error:
            assert any(name in str(error).lower() for name in names), f"unclear: {type(error).__name__}: {error}"
            continue
        for value, other in zip(all_tensors(actual), all_tensors(expected), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)


def all_tensors(result):
    leaves = pytree.tree_leaves((result.outputs, result.gradients, result.buffers))
    return [plain(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def plain(value):
    if value.is_nested:
        return value.values()
    return value.detach().to_dense() if value.layout is not torch.strided else value


class Jagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x).values()


def jagged():
    rows = [torch.randn(length, WIDTH) for length in (2, 3, 5)]
    return Jagged(), (torch.nested.nested_tensor(rows, layout=torch.jagged),)


def test_jagged_nested_inputs_are_right_or_refused_by_name():
    """Issue 3: rows of three lengths."""
    assert_right_or_named(jagged, "nested", "jagged")


class Doubled(torch.Tensor):
    """A wrapper of two tensors that counts as their sum."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, requires_grad=a.requires_grad)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return Doubled(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def part(name):
            return pytree.tree_map(lambda v: getattr(v, name) if isinstance(v, Doubled) else v, (args, kwargs or {}))

        results = [func(*given, **named) for given, named in (part("a"), part("b"))]
        return pytree.tree_map(lambda a, b: Doubled(a, b) if isinstance(a, torch.Tensor) else a, *results)


def of_doubled(x, w):
    return ((x @ w).sin().exp() * x).cos()


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 cannot make such a tensor in a graph")
@pytest.mark.parametrize("share", SHARES)
def test_a_wrapper_subclass_has_eagers_gradients(share):
    """Issue 3: both of its tensors, in forward and as gradients."""
    torch.manual_seed(0)
    parts = [torch.randn(ROWS, WIDTH) for _ in range(2)]
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    compiled = torch.compile(of_doubled, backend=interpreted(partitioner(share)))
    results = []
    for function in (of_doubled, compiled):
        x = Doubled(*(part.clone() for part in parts)).requires_grad_()
        y = function(x, w)
        gradients = torch.autograd.grad(y.sum(), [x])
        results.append([y.a.detach(), y.b.detach(), gradients[0].a, gradients[0].b])
    torch.testing.assert_close(results[1], results[0])


def float8_cast(x, w):
    scale = x.detach().abs().max() / 448
    return ((x / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale).sin() @ w


def float8_cast_and_gradient_scale(x, w):
    h = (x @ w).exp()
    return h.to(torch.float8_e5m2).to(torch.bfloat16).float().cos() * h.sin()


@pytest.mark.parametrize("function", [float8_cast, float8_cast_and_gradient_scale])
def test_float8_casts_are_right_or_refused_by_name(function):
    """Issue 3: there and back."""
    case = lambda: (function, (torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH)))  # noqa: E731
    check_or_named(case, "float8", tolerance=0.01)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_are_right(dtype):
    """Issue 3: to the precision of the dtype."""
    tolerance = {torch.float64: 1e-10}.get(dtype, 0.03)
    check(lambda: (Net().to(dtype), (torch.randn(ROWS, WIDTH, dtype=dtype),)), tolerance=tolerance)


def strided(x):
    return (x.t().exp() @ x.sin()).cos()


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced", "channels last"])
def test_inputs_in_any_layout_are_right(layout):
    """Issue 3: what is not contiguous."""

    def case():
        x = {
            "transposed": torch.randn(WIDTH, ROWS).t(),
            "expanded": torch.randn(1, WIDTH).expand(ROWS, WIDTH),
            "sliced": torch.randn(2 * ROWS, 2 * WIDTH)[::2, 1::2],
            "channels last": torch.randn(ROWS, WIDTH, 1, 1).to(memory_format=torch.channels_last).squeeze(),
        }[layout]
        return strided, (x.requires_grad_(),)

    check(case)


def test_one_tensor_given_twice_has_the_sum_of_both_gradients():
    """Issue 3: the same tensor as two arguments, and two views of one storage."""

    def same():
        x = torch.randn(ROWS, ROWS, requires_grad=True)
        return (lambda x, y: (x.sin() @ y.exp()).cos()), (x, x)

    def overlapping():
        base = torch.randn(3 * ROWS * ROWS)
        first, second = (base[i : i + ROWS * ROWS].view(ROWS, ROWS) for i in (0, 5))
        return (lambda x, y: (x.sin() @ y.exp()).cos()), (first.requires_grad_(), second)

    check(same)
    torch._dynamo.reset()
    check(overlapping)
