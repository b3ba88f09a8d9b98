"""Several steps of training as people write them (CASES 14): accumulation, hooks, scaled losses, fused optimisers."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from .every_plan import SHARES, assert_close_within, largest_in, quick  # noqa: F401
from .interpret import interpreted, partitioner

pytestmark = pytest.mark.usefixtures("quick")

ROWS, WIDTH = 4, 8
NUM_STEPS = 5
TOLERANCE = 1e-4  # AdamW divides by the root of squared gradients, which enlarges what is rounded differently
PLANS = [
    *((budget, "mincut") for budget in (*SHARES, 6_000)),
    *((None, name) for name in ("full", "save_all", "stock")),
]
every_plan = pytest.mark.parametrize(("budget", "planner"), PLANS)


class Net(nn.Module):
    """A norm with buffers, dropout, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        x = self.down(self.dropout(F.gelu(self.norm(self.up(x)))))
        return self.down(F.silu(self.norm(self.up(x.sin()))))


def by_adamw(model, compiled, num_called):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for x in batches():
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()


def by_adamw_with_accumulation(model, compiled, num_called):
    """An optimiser's step after every second backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number, x in enumerate(batches()):
        (compiled(x).square().mean() / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def by_scaled_loss(model, compiled, num_called):
    """The scaler sees an overflow in the third step and skips it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number, x in enumerate(batches()):
        optimizer.zero_grad()
        loss = compiled(x).square().mean() * (float("inf") if number == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def by_hooks(model, compiled, num_called):
    """Hooks on parameters that count, scale, and step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for name, parameter in model.named_parameters():

        def halve(gradient, name=name):
            num_called[name] = num_called.get(name, 0) + 1
            return gradient / 2

        def note(parameter, name=name):
            num_called[f"{name} accumulated"] = num_called.get(f"{name} accumulated", 0) + 1

        parameter.register_hook(halve)
        parameter.register_post_accumulate_grad_hook(note)
    for x in batches():
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()


def by_hooks_on_activations(model, compiled, num_called):
    """A hook on the compiled function's output and one on its input."""
    for x in batches():
        x.requires_grad_()
        x.register_hook(lambda gradient: num_called.update(x=num_called.get("x", 0) + 1))
        y = compiled(x)
        y.register_hook(lambda gradient: gradient * 2)
        y.square().mean().backward()
        model.up.weight.data.sub_(x.grad.mean() * 0.1)


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(NUM_STEPS)]


LOOPS = [by_adamw, by_adamw_with_accumulation, by_scaled_loss, by_hooks, by_hooks_on_activations]
references = {}


def trained_by(loop, compiled):
    torch.manual_seed(0)
    model, num_called = Net(), {}
    torch.manual_seed(1)
    loop(model, compiled(model), num_called)
    return dict(model.state_dict()), {name: p.grad for name, p in model.named_parameters()}, num_called


@every_plan
@pytest.mark.parametrize("loop", LOOPS)
def test_five_steps_leave_eagers_weights_buffers_and_gradients(loop, budget, planner):
    """CASES 14 and 4: with eager's dropout; hooks are called as often as in eager."""
    if loop not in references:
        references[loop] = copy.deepcopy(trained_by(loop, lambda model: model))
    expected_state, expected_gradients, expected_called = references[loop]
    backend = interpreted(partitioner(budget, planner), fallback_random=True)
    state, gradients, called = trained_by(loop, lambda model: torch.compile(model, backend=backend))
    assert called == expected_called
    for name, expected in expected_state.items():
        assert_close_within(name, state[name], expected, TOLERANCE * largest_in(expected))
    largest = max(map(largest_in, expected_gradients.values()))
    for name, expected in expected_gradients.items():
        assert_close_within(name, gradients[name], expected, TOLERANCE * max(largest_in(expected), 1e-2 * largest))
    assert len(backend.graphs) == 1


def test_hooks_are_called_once_a_step():
    """CASES 14: what the comparison above compares with."""
    _, _, called = trained_by(by_hooks, lambda model: torch.compile(model, backend=interpreted(partitioner(0.0))))
    assert set(called.values()) == {NUM_STEPS} and len(called) == 2 * len(list(Net().parameters()))
