"""Memory that forward reads and later writes: buffers, inputs, activations; and buffers that count steps."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from .every_plan import check, quick  # noqa: F401
from .interpret import interpreted, partitioner

pytestmark = pytest.mark.usefixtures("quick")

ROWS, WIDTH = 4, 8


class Ema(nn.Module):
    """Activations times an average of themselves, which is updated afterwards."""

    def __init__(self, read, update, returned):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.linspace(0.5, 1.5, WIDTH))
        self.read, self.update, self.returned = read, update, returned

    def forward(self, x):
        hidden = self.linear(x)
        y = (hidden * self.read(self.average)).exp()
        with torch.no_grad():
            self.update(self.average, hidden.detach().mean(0))
        return (y, self.average) if self.returned else y


def directly(buffer):
    return buffer.clone()  # eager refuses to differentiate what was overwritten since


def through_view(buffer):
    return buffer.view(2, 4).exp().view(WIDTH)


def through_slice(buffer):
    return torch.cat([buffer[4:], buffer[:4].sin()])


def through_expand(buffer):
    return buffer.expand(ROWS, WIDTH).contiguous()


def through_view_of_view(buffer):
    return buffer.view(2, 4).t().flatten()[2:3]


def detached(buffer):
    return buffer.detach().cos()


def by_add(buffer, mean):
    buffer.mul_(0.9).add_(mean, alpha=0.1)


def by_copy(buffer, mean):
    buffer.copy_(0.9 * buffer + 0.1 * mean)


def by_index_put(buffer, mean):
    buffer.index_put_((torch.tensor([0, 3, 5]),), mean[:3])


def by_slice_assignment(buffer, mean):
    buffer[2:6] = mean[2:6]


def by_view(buffer, mean):
    buffer.view(2, 4)[1].add_(mean[:4])


def by_filling(buffer, mean):
    buffer.zero_()


def ema(read=directly, update=by_add, returned=False):
    return Ema(read, update, returned), (torch.randn(ROWS, WIDTH, requires_grad=True),)


READS = [directly, through_view, through_slice, through_expand, through_view_of_view, detached]
UPDATES = [by_add, by_copy, by_index_put, by_slice_assignment, by_view, by_filling]


@pytest.mark.parametrize("read", READS)
def test_what_read_a_buffer_is_not_rebuilt_from_its_new_content(read):
    """CASES 1: directly, and through views."""
    check(lambda: ema(read))


@pytest.mark.parametrize("update", UPDATES)
def test_what_read_a_buffer_is_right_however_the_buffer_is_written(update):
    """CASES 1: in whole or in part, by any op."""
    check(lambda: ema(through_slice, update))


@pytest.mark.parametrize("read", [directly, through_view])
def test_a_buffer_that_is_returned_too_is_returned_with_its_new_content(read):
    """CASES 1: the buffer is an output as well."""
    check(lambda: ema(read, returned=True))


class TwoReaders(nn.Module):
    """A buffer that is read, written, read by the next layer, and written again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        x = (self.first(x) * self.scale.clone()).sin()
        self.scale.mul_(1.1)
        x = (self.second(x) * self.scale.view(2, 4).cos().view(WIDTH)).exp()
        self.scale[1:].add_(0.25)
        return x * self.scale


def test_a_buffer_read_in_two_layers_and_written_after_each_has_three_contents():
    """CASES 1: each layer keeps the content that it read."""
    check(lambda: (TwoReaders(), (torch.randn(ROWS, WIDTH),)))


def overwritten_input(x, scale):
    """An input that needs no gradient is read, then written by the caller's function."""
    y = (x.sin() * scale.clone()).exp()
    scale.add_(1.0)
    return y


def overwritten_view_of_input(x, scale):
    y = (x.sin() * scale[1:].exp()).exp()
    scale[:3].mul_(2.0)
    return y, scale


def overwritten_first(x, scale):
    scale.mul_(0.5)
    return (x.sin() * scale).exp()


@pytest.mark.parametrize("function", [overwritten_input, overwritten_view_of_input, overwritten_first])
def test_an_input_that_the_function_overwrites_is_read_as_it_was(function):
    """CASES 1: an input in the place of the buffer; it is left as eager leaves it."""
    width = WIDTH + 1 if function is overwritten_view_of_input else WIDTH
    check(lambda: (function, (torch.randn(ROWS, WIDTH, requires_grad=True), torch.rand(width))))


def two_views_of_one_input(x, scale):
    left, right = scale[:WIDTH], scale[WIDTH:]
    y = (x * left.clone()).sin() * right.exp()
    left.add_(right)
    return y.exp() * left


def test_two_views_of_one_input_of_which_one_is_written_are_told_apart():
    """CASES 1: the write goes through one view, the read through both."""
    check(lambda: (two_views_of_one_input, (torch.randn(ROWS, WIDTH, requires_grad=True), torch.rand(2 * WIDTH))))


class BatchNormed(nn.Module):
    def __init__(self, dimensions, momentum):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = (nn.BatchNorm1d if dimensions == 1 else nn.BatchNorm2d)(WIDTH, momentum=momentum)
        self.shape = (ROWS, WIDTH) if dimensions == 1 else (ROWS, WIDTH, 1, 1)

    def forward(self, x):
        return F.relu(self.norm(self.linear(x).view(self.shape))).square()


@pytest.mark.parametrize(("momentum", "num_graphs"), [(0.1, 1), (None, 2)])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_batch_norm_is_updated_once_a_step(dimensions, momentum, num_graphs):
    """CASES 4: momentum None reads the number of batches in Python, which breaks the graph."""
    case = BatchNormed(dimensions, momentum)
    check(lambda: (copy.deepcopy(case), (torch.randn(ROWS, WIDTH),)), num_steps=3, num_graphs=num_graphs)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_counts_its_steps(momentum):
    """CASES 4: num_batches_tracked is exact at the least memory."""
    model = BatchNormed(2, momentum)
    compiled = torch.compile(model, backend=interpreted(partitioner(0.0)))
    for _ in range(3):
        compiled(torch.randn(ROWS, WIDTH)).sum().backward()
    assert model.norm.num_batches_tracked.item() == 3


def parametrised_spectral_norm():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def hooked_spectral_norm():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def weight_norm():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


@pytest.mark.parametrize("make", [parametrised_spectral_norm, hooked_spectral_norm, weight_norm])
def test_spectral_norms_power_iteration_moves_once_a_step(make):
    """CASES 4: the vectors of the power iteration are buffers that forward overwrites."""
    check(lambda: (make(), (torch.randn(ROWS, WIDTH),)), num_steps=3)


class Counting(nn.Module):
    """An integer, a boolean and a float buffer that change at every step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x):
        self.step += 1
        hidden = self.linear(x) / self.step
        self.seen |= (hidden > 0).any(0)
        self.total += hidden.detach().sum(0)
        return (hidden * self.seen).exp() * self.total


def test_buffers_of_every_dtype_are_updated_once_a_step():
    """CASES 4: counters, flags and sums that the output depends on."""
    check(lambda: (Counting(), (torch.randn(ROWS, WIDTH),)), num_steps=3)


def relu_in_place(h):
    h = (h * 2).relu_()
    return h.sin()


def add_in_place(h):
    y = h.tanh()
    return (y * 2).add_(y).sin()


def slice_assigned(h):
    y = h.exp()
    y = y * 1
    y[:, 1:3] = h[:, 1:3].sin() * 2
    return y.cos()


def written_through_view(h):
    y = h.sigmoid() * 1
    y.view(-1)[::2].mul_(3.0)
    return y.exp()


def masked_in_place(h):
    return h.sin().masked_fill_(h > 0, 0.5).exp()


def accumulated_in_new_memory(h):
    total = torch.zeros_like(h)
    for i in range(3):
        total[:, i : i + 2] += h[:, i : i + 2].sin()
    return total.exp_()


def scattered_in_place(h):
    index = torch.arange(ROWS).unsqueeze(1) % WIDTH
    return (h * 1).scatter_(1, index, 0.0).mul(2).index_add_(0, torch.tensor([0, 0]), h[:2].cos())


IN_PLACE = [
    relu_in_place, add_in_place, slice_assigned, written_through_view, masked_in_place, accumulated_in_new_memory,
    scattered_in_place,
]  # fmt: skip


class InPlace(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x):
        return self.function(self.second(self.function(self.first(x))))


@pytest.mark.parametrize("function", IN_PLACE)
def test_activations_written_in_place_have_eagers_gradients(function):
    """CASES 5: as written in common models."""
    check(lambda: (InPlace(function), (torch.randn(ROWS, WIDTH),)))
