"""The tables' parts on layers small enough to count by hand."""

import pytest
import torch

from benchmarks import gpu as gpu_benchmark
from benchmarks.layers import GPTLayer, ShardedLayer
from benchmarks.tables import POLICIES, Model, markdown, policies, saved_in_eager
from recompile.joint import Budget

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, LENGTH, WIDTH, HEADS = 2, 64, 32, 4
HALF = 2  # bytes of a float16


def layers(count):
    return Model(lambda: GPTLayer(WIDTH, HEADS, flash=False), count, (BATCH, LENGTH, WIDTH), torch.float16, "a100-80")


@pytest.fixture(scope="module")
def models():
    """Of 3 and of 4 layers."""
    return layers(3), layers(4)


def test_eager_saves_what_the_formula_says(models):
    """Korthikanti et al. 2022, section 4.1: L B W (34 + 5 heads L / W) bytes a layer; ours keeps float32 statistics of
    two norms and the input of each dropout is not one of them."""
    formula = LENGTH * BATCH * WIDTH * (34 + 5 * HEADS * LENGTH / WIDTH)
    less, more = (model.eager_bytes() for model in models)
    assert more - less == pytest.approx(formula, rel=0.1)
    assert more == pytest.approx(4 * formula, rel=0.1)


def test_full_recomputation_keeps_the_two_residual_sums_of_a_layer(models):
    """And 24 bytes of seeds for its three dropouts."""
    less, more = (model.cost("full").saved_bytes for model in models)
    assert more - less == 2 * BATCH * LENGTH * WIDTH * HALF + 24


def test_selective_recomputation_drops_what_is_square_in_the_sequence(models):
    core, model = BATCH * HEADS * LENGTH * LENGTH, models[1]
    saved = {policy: model.cost(policy).saved_bytes / 4 for policy in ("save all", "selective")}
    assert saved["selective"] < saved["save all"] - 2 * HALF * core
    kept = POLICIES["selective"](model.joint, model.hardware, Budget(None)).saved
    shapes = [choice.node.meta["val"].shape for choice in kept if choice.node.op != "placeholder"]
    assert all(len(shape) < 3 or shape[-1] != shape[-2] for shape in shapes)
    assert set(policies(flash=False)) - set(policies(flash=True)) == {"selective"}


def test_our_smallest_plan_has_no_higher_peak_than_full_recomputation(models):
    full, smallest, fastest = (models[1].cost(policy) for policy in ("full", "ours, smallest", "ours, fastest"))
    assert smallest.peak_bytes <= full.peak_bytes < fastest.peak_bytes
    assert fastest.seconds <= min(smallest.seconds, full.seconds)


def test_gradients_of_weights_are_not_in_the_tables(models):
    joint = models[0].joint
    gradients = [node for node in joint.bwd_outputs if joint.notes[node].size_bytes == 0]
    assert len(gradients) >= 2 * len(list(GPTLayer(WIDTH, HEADS, False).parameters())) - 4


def test_a_sharded_layer_holds_its_part_of_the_sequence_between_blocks():
    layer = ShardedLayer(64, 8, 2, 128, ranks=4, flash=True)
    x = torch.randn(2, 16, 64)
    assert layer.gathered(x).shape == (2, 64, 64)
    assert layer(x).shape == x.shape
    with torch.no_grad():
        assert layer.scattered(torch.ones(2, 64, 64)).eq(4).all()


def test_a_row_becomes_a_line_of_a_table():
    assert markdown([{"policy": "full", "GB": 12.3456, "extra FLOP": 0.334, "published": None}]) == (
        "| policy | GB | extra FLOP | published |\n|---|---|---|---|\n| full | 12.35 | 33.4% | - |"
    )


def test_eager_keeps_shared_storage_once():
    class Twice(torch.nn.Module):
        def forward(self, x):
            y = x.exp()
            return (y * y.view(-1, 2).view_as(y)).sum()

    assert saved_in_eager(Twice(), (torch.randn(4, 4, device="meta", requires_grad=True),)) == 64


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_benchmark, "RESULTS", tmp_path)
    results = gpu_benchmark.all_runs("cpu")
    assert len(results) == 14 and gpu_benchmark.failures(results) == []
    assert (tmp_path / "cpu.json").exists()
