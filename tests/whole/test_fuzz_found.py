"""What random programs found, each in its smallest form. All ran in eager PyTorch, and did not under this backend."""

from __future__ import annotations

import pytest
import torch

from .fuzz import differences, trained
from .interpret import interpreted, partitioner
from .programs import Program, numbers

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PLANS = [(None, "save_all"), (None, "full"), (None, "stock"), (None, "mincut"), (0.5, "mincut"), (0.0, "mincut")]
every_plan = pytest.mark.parametrize(("budget", "planner"), PLANS)


def program(*lines: str) -> Program:
    return Program("def forward(self, x, y, h):\n" + "".join(f"    {line}\n" for line in lines))


def differences_to_eager(found: Program, budget: object, planner: str) -> list[str]:
    backend = interpreted(partitioner(budget, planner), fallback_random=True)
    actual = trained(found, lambda model: torch.compile(model, backend=backend))
    return differences(found, actual, trained(found))


@every_plan
@pytest.mark.parametrize("write", ["h.mul_(0.5)", "h[0].relu_()", "y.detach().relu_()"])
def test_an_input_that_wants_a_gradient_and_is_written_after_it_was_read_is_not_read_again_in_backward(
    write, budget, planner
):
    """AOTAutograd writes such an input itself, after forward: the graph holds no write, only an output that says so."""
    found = program(f"v0 = torch.tanh({write[0]})", write, "return (torch.tanh(v0),)")
    assert differences_to_eager(found, budget, planner) == []


@every_plan
def test_an_output_that_the_caller_overwrites_before_backward_gives_the_right_gradient_or_pytorchs_error(
    budget, planner
):
    """Keeping an output for backward costs nothing, but then it is the caller's too."""

    def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ w
        return product, product.tanh() @ w

    def gradient(called) -> torch.Tensor:
        w = numbers(6, 6, start=40).requires_grad_()
        product, result = called(numbers(6, 6), w)
        product.add_(1)
        result.sum().backward()
        return w.grad

    compiled = torch.compile(forward, backend=interpreted(partitioner(budget, planner)))
    try:
        actual = gradient(compiled)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(actual, gradient(forward))
