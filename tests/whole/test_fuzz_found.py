"""What random programs found, each in its smallest form. All ran in eager PyTorch, and did not under this backend."""

from __future__ import annotations

import pytest
import torch

from .fuzz import differences, trained
from .interpret import interpreted, partitioner
from .programs import Program

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
