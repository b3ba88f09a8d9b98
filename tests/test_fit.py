"""The largest batch that fits."""

import pytest
import torch
import torch.nn as nn

import recompile
from recompile.fit import LARGEST_SIZE, arguments_of, largest_within, max_batch

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(
    ("needed_bytes", "limit", "largest", "most_tries"),
    [
        (lambda n: 10 + 7 * n, 1000, 141, 6),
        (lambda n: 10 + 7 * n + n * n, 10**6, 996, 6),
        (lambda n: 10 + 7 * n if n < 100 else 10 + 13 * n, 5000, 383, 9),
        (lambda n: 5, 4, 0, 1),
        (lambda n: 5, 5, LARGEST_SIZE, 10),
        (lambda n: n, 1, 1, 2),
    ],
    ids=["line", "parabola", "kink", "never", "always", "one"],
)
def test_the_largest_size_is_found_in_a_few_tries(needed_bytes, limit, largest, most_tries):
    tried = []

    def counted(size):
        tried.append(size)
        return needed_bytes(size)

    assert largest_within(counted, limit) == largest
    assert len(tried) <= most_tries and len(set(tried)) == len(tried)


def test_arguments_are_taken_by_keyword_by_position_or_alone():
    assert arguments_of({"x": 1}) == ((), {"x": 1})
    assert arguments_of((1, 2)) == ((1, 2), {})
    assert arguments_of(3) == ((3,), {})


class Wide(nn.Module):
    """One sample's exp takes 4 KiB, its other values next to nothing."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 1024, bias=False), nn.Linear(1024, 8, bias=False)

    def forward(self, x):
        for _ in range(4):
            x = self.down(self.up(x).exp())
        return x.sum()


def make_batch(size):
    return torch.empty(size, 8, device="meta")


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return Wide()


def test_the_answer_fits_and_one_more_does_not(model):
    memory = 2**30
    fit = max_batch(model, make_batch, hardware="a100-40", memory=memory)
    assert fit.footprint.total_bytes <= memory and fit.size > fit.size_without_recomputation > 0
    one_more = recompile.plan(model, make_batch(fit.size + 1), hardware="a100-40", memory_budget=0.0, program=False)
    assert one_more.footprint.with_step(int(1.01 * one_more.peak_bytes)).total_bytes > memory


def test_the_plan_is_the_fastest_one_that_fits(model):
    fit = max_batch(model, make_batch, hardware="a100-40", memory="1GiB", optimizer="sgd")
    floor = recompile.plan(model, make_batch(fit.size), hardware="a100-40", memory_budget=0.0, program=False)
    assert fit.explanation.step_seconds <= floor.step_seconds


def test_without_memory_the_hardware_says_how_much(model):
    fit = max_batch(model, make_batch, hardware="l4")
    assert fit.memory_bytes == 24_000_000_000
    assert str(fit).startswith(f"largest size within 22.35 GiB: {fit.size}; without recomputation: ")
    assert fit.to_json()["size"] == fit.size


def test_when_one_sample_does_not_fit_the_error_itemises_what_it_takes(model):
    with pytest.raises(recompile.BudgetError, match=r"size 1 does not fit into 100\.00 MiB.*\nparameters ") as error:
        max_batch(model, make_batch, hardware="l4", memory="100MiB")
    assert error.value.floor_bytes > 100 * 2**20


@pytest.mark.parametrize("memory", ["plenty", 0, -5, [1]])
def test_a_bad_memory_is_refused_by_name(model, memory):
    with pytest.raises(recompile.OptionError, match="memory="):
        max_batch(model, make_batch, hardware="l4", memory=memory)
