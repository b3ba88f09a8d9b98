"""Collectives and distributed tensors, on a group of one process: nothing is sent, but every op is there."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from .every_plan import check, quick  # noqa: F401
from .interpret import partitioner

pytestmark = [
    pytest.mark.usefixtures("quick", "group_of_one"),
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
]

WIDTH = 8


@pytest.fixture(scope="module")
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class AllReduced(nn.Module):
    """A row-parallel linear layer: each rank has a part of the sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        from torch.distributed._functional_collectives import all_reduce

        h = all_reduce(self.first(x).sin().exp(), "sum", dist.group.WORLD)
        return self.second(h.tanh()).sin()


def test_a_collective_is_not_sent_again_at_any_budget():
    """One in forward and, as the gradient of a sum over ranks is such a sum, one in backward."""
    backend = check(lambda: (AllReduced(), (torch.randn(4, WIDTH),)), num_steps=1)
    for budget in (None, 0.0):
        partition = backend.graphs[0].replay(partitioner(budget)).partition
        calls = partition.forward_calls, partition.backward_calls
        assert [call["_c10d_functional.all_reduce.default"] for call in calls] == [1, 1]


class Sharded(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x))).sin()


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1,))
    return parallelize_module(Sharded(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def test_distributed_tensors_are_right_at_every_budget():
    """Tensor parallelism: parameters are DTensors, which AOTAutograd unwraps."""
    check(lambda: (tensor_parallel(), (torch.randn(4, WIDTH),)))
