"""The cases of this folder through Inductor's own kernels: two always, all of them at every budget when asked for."""

import functools

import pytest
import torch

from . import test_cases_checkpoint as checkpoints
from . import test_cases_custom_ops as custom_ops
from . import test_cases_overwritten as overwritten
from . import test_cases_random as randoms
from . import test_cases_structure as structures
from .every_plan import SHARES, assert_alike, quick, trained  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick")

TOLERANCE = 1e-4  # Inductor's kernels sum in another order than eager's
BUDGETS = (*SHARES, 100_000)
LIKE_EAGER = {
    "buffers": overwritten.ema,
    "buffers through slices": functools.partial(overwritten.ema, overwritten.through_slice, overwritten.by_copy, True),
    "batch norm": lambda: (overwritten.BatchNormed(2, 0.1), (torch.randn(overwritten.ROWS, overwritten.WIDTH),)),
    "spectral norm": lambda: (overwritten.parametrised_spectral_norm(), (torch.randn(4, overwritten.WIDTH),)),
    "in place": lambda: (overwritten.InPlace(overwritten.slice_assigned), (torch.randn(4, overwritten.WIDTH),)),
    "attention": functools.partial(randoms.attention, 0.0),
    "custom op": functools.partial(custom_ops.opaque, "opaque_sin"),
    "mutating custom op": functools.partial(custom_ops.opaque, "counted_copy"),
    "checkpointed region": functools.partial(checkpoints.regions, checkpoints.nested),
    "tied weights": lambda: (structures.Tied(), (torch.randint(0, 16, (2, 6)),)),
    "adapters": lambda: (structures.Adapted(), structures.batch()),
    "aliases": lambda: (structures.Outputs(structures.aliases_of_inputs), structures.batch(requires_grad=True)),
}
EAGERS_RANDOM = {
    "dropout": functools.partial(randoms.noisy, randoms.dropout),
    "rrelu": functools.partial(randoms.noisy, randoms.rrelu),
    "bernoulli": functools.partial(randoms.noisy, randoms.bernoulli),
    "attention with dropout": functools.partial(randoms.attention, 0.3),
    "dropout in a region": functools.partial(checkpoints.regions, checkpoints.with_dropout),
}


def assert_like_eager(case, budget, **options):
    options = {"memory_budget": budget, **options}
    actual = trained(case, functools.partial(torch.compile, backend="recompile", options=options))
    assert_alike(actual, trained(case), TOLERANCE)


@pytest.mark.parametrize("name", ["buffers through slices", "mutating custom op"])
def test_inductors_kernels_give_eagers_gradients_and_buffers_at_the_least_memory(name):
    """CASES 1 and 7."""
    assert_like_eager(LIKE_EAGER[name], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", LIKE_EAGER)
def test_inductors_kernels_give_eagers_gradients_and_buffers(name, budget):
    """CASES 1, 3, 4, 5, 7, 8, 9, 13."""
    assert_like_eager(LIKE_EAGER[name], budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", EAGERS_RANDOM)
def test_inductors_kernels_give_eagers_gradients_with_eagers_random_numbers(name, budget):
    """CASES 2, 3 and 13, with fallback_random."""
    assert_like_eager(EAGERS_RANDOM[name], budget, fallback_random=True)


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("function", [randoms.dropout, randoms.bernoulli, randoms.image_dropout])
def test_inductors_kernels_drop_in_backward_what_they_dropped_in_forward(function, budget):
    """CASES 2, with Inductor's random numbers."""
    torch.manual_seed(0)
    model = randoms.MaskShown(function)
    compiled = torch.compile(model, backend="recompile", options={"memory_budget": budget})
    output = compiled(torch.randn(randoms.BATCH, randoms.LENGTH, randoms.WIDTH))
    output.sum().backward()
    assert torch.equal(output == 0, model.last.grad == 0)
