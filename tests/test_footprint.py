"""What training takes on one GPU, item by item."""

import math

import pytest
import torch
import torch.nn as nn

from recompile.footprint import (
    CONTEXT_BYTES,
    footprint,
    state_bytes_per_parameter_byte,
)


def tied():
    """1000 parameters of 4 bytes, used twice; 10 more that are not trained; a buffer of 10 x 8 bytes."""
    with torch.device("meta"):
        model = nn.Module()
        model.embed = nn.Embedding(100, 10)
        model.head = nn.Linear(10, 100, bias=False)
        model.head.weight = model.embed.weight
        model.frozen = nn.Parameter(torch.empty(10), requires_grad=False)
        model.register_buffer("ids", torch.empty(10, dtype=torch.int64))
    return model


def test_every_item_is_counted_once_without_allocating_anything():
    batch = {"tokens": torch.empty(4, 16, dtype=torch.int64, device="meta"), "name": "text"}
    items = footprint(tied(), batch, step_bytes=100_000)
    assert (items.parameter_bytes, items.buffer_bytes, items.batch_bytes) == (4040, 80, 512)
    assert (items.optimizer_bytes, items.gradient_bytes, items.step_bytes) == (8000, 4000, 100_000)
    allocated = 4040 + 80 + 512 + 8000 + 100_000
    assert items.fragmentation_bytes == math.ceil(0.03 * allocated)
    assert items.total_bytes == allocated + math.ceil(0.03 * allocated) + 32 * 2**20 + CONTEXT_BYTES


def test_the_gradients_are_the_least_that_a_step_leaves():
    items = footprint(tied(), (), step_bytes=3000, optimizer="none", context_bytes=0, capability=(8, 0))
    assert items.total_bytes == 4040 + 80 + 4000 + math.ceil(0.03 * 8120) + 8 * 2**20 + 2**17


@pytest.mark.parametrize(("optimizer", "share"), [("adamw", 2.0), ("SGD", 0.0), ("sgd-momentum", 1.0), (6, 6.0)])
def test_optimizers_keep_this_much_state(optimizer, share):
    assert state_bytes_per_parameter_byte(optimizer) == share


@pytest.mark.parametrize("optimizer", ["lion", -1, None, True])
def test_an_unknown_optimizer_is_refused_with_what_is_accepted(optimizer):
    with pytest.raises(ValueError, match=r"optimizer=.* accepted: one of adamw, adam, sgd, sgd-momentum, none, or a"):
        state_bytes_per_parameter_byte(optimizer)


def test_the_table_shows_items_and_total():
    lines = str(footprint(tied(), (), step_bytes=2**30)).splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == [
        "parameters", "buffers", "batch", "optimizer state", "step's peak (with gradients, 3.91 KiB in the end)",
        "cuBLAS workspace", "CUDA context, assumed", "fragmentation, assumed 3%", "total",
    ]  # fmt: skip
    assert lines[-1].split()[1:] == ["1.56", "GiB"]
