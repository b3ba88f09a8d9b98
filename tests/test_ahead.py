"""Planning for a GPU that is not there."""

import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import recompile
from recompile.trace import trace_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, WIDTH, HIDDEN = 256, 16, 64
EXP_BYTES = BATCH * HIDDEN * 4


class Model(nn.Module):
    """Three times a matmul to HIDDEN, an exp and a matmul back: backward reads each exp and each narrow result."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        for _ in range(3):
            x = self.down(self.up(x).exp())
        return x.sum()


def on_meta(make=Model, shape=(BATCH, WIDTH)):
    with torch.device("meta"):
        return make(), torch.empty(shape)


def test_a_plan_keeps_the_wide_values_or_rebuilds_them_as_the_budget_says():
    model, x = on_meta()
    kept = recompile.plan(model, x, hardware="h100", planner="save_all", program=False)
    small = recompile.plan(model, x, hardware="h100", memory_budget=0.0, program=False)
    assert (kept.recompute_flops, kept.saved_bytes) == (0, 3 * EXP_BYTES + 2 * BATCH * WIDTH * 4)
    assert small.saved_bytes < kept.saved_bytes - EXP_BYTES and small.peak_bytes < kept.peak_bytes
    assert small.recompute_flops >= 2 * BATCH * WIDTH * HIDDEN + 20 * BATCH * HIDDEN  # a matmul and an exp at least
    assert small.graphs[0].hardware == "h100"


def test_weights_on_meta_real_ones_and_fake_ones_have_one_plan():
    from torch._subclasses import FakeTensorMode

    real = Model(), torch.ones(BATCH, WIDTH)
    with FakeTensorMode():
        fake = Model(), torch.ones(BATCH, WIDTH)
    peaks = [recompile.plan(m, x, hardware="h100", program=False).peak_bytes for m, x in (on_meta(), real, fake)]
    assert peaks[0] == peaks[1] == peaks[2] > 0
    assert real[0].up.weight.grad is None and type(real[1]) is torch.Tensor


def test_the_footprint_has_parameters_gradients_and_optimizer_state():
    explanation = recompile.plan(*on_meta(), hardware="h100", program=False)
    items, parameter_bytes = explanation.footprint, 2 * WIDTH * HIDDEN * 4
    assert (items.parameter_bytes, items.gradient_bytes, items.optimizer_bytes) == (
        parameter_bytes, parameter_bytes, 2 * parameter_bytes,
    )  # fmt: skip
    assert (items.step_bytes, items.batch_bytes) == (explanation.peak_bytes, BATCH * WIDTH * 4)
    assert recompile.plan(*on_meta(), hardware="h100", optimizer="sgd", program=False).footprint.optimizer_bytes == 0


def test_a_loss_function_takes_the_results_place():
    class Logits(Model):
        def forward(self, x):
            for _ in range(3):
                x = self.down(self.up(x).exp())
            return {"logits": x}

    model, x = on_meta(Logits)
    with_loss = recompile.plan(model, x, hardware="h100", loss=lambda result: result["logits"].sum(), program=False)
    assert with_loss.peak_bytes == recompile.plan(*on_meta(), hardware="h100", program=False).peak_bytes
    alone = recompile.plan(model, x, hardware="h100", program=False)
    assert alone.peak_bytes >= with_loss.peak_bytes + BATCH * WIDTH * 4 - 4  # the logits stay, and a tangent comes


def test_keyword_arguments_and_functions_can_be_planned():
    def loss_of(x, *, weight):
        return (x @ weight).exp().sum()

    x, weight = torch.empty(4, 8), torch.empty(8, 8, requires_grad=True)
    explanation = recompile.plan(loss_of, x, weight=weight, hardware="h100", program=False)
    assert explanation.peak_bytes > 0 and explanation.footprint is None


def test_autocast_halves_what_a_matmul_makes_and_keeps_softmax_in_float32():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, HIDDEN)

        def forward(self, x):
            return self.linear(x).softmax(-1).square().sum()

    model, x = on_meta(Attend)
    module = trace_step(model, (x,), autocast=torch.bfloat16).module
    dtype_of = {str(node.target): node.meta["val"].dtype for node in module.graph.nodes if node.op == "call_function"}
    assert dtype_of["aten.addmm.default"] == torch.bfloat16
    assert dtype_of["aten.amax.default"] == torch.float32
    halved, full = (
        recompile.plan(model, x, hardware="h100", planner="save_all", autocast=dtype, program=False)
        for dtype in (torch.bfloat16, None)
    )
    assert halved.graphs[0].step_seconds > 0 and full.graphs[0].step_seconds > 0


def test_autocast_inside_of_the_model_is_the_gpus():
    class Inside(Model):
        def forward(self, x):
            with torch.autocast("cuda", torch.bfloat16):
                return self.down(self.up(x).exp()).float().sum()

    model, x = on_meta(Inside)
    module = trace_step(model, (x,)).module
    matmuls = [node.meta["val"].dtype for node in module.graph.nodes if str(node.target) == "aten.mm.default"]
    assert set(matmuls) == {torch.bfloat16}


def test_attention_is_the_one_op_that_a_gpu_takes():
    def loss_of(q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()

    q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    ops = {row.op for row in recompile.plan(loss_of, q, hardware="h100", program=False).graphs[0].values}
    assert "aten._scaled_dot_product_flash_attention.default" in ops


def test_a_model_far_larger_than_memory_takes_none():
    """A layer of 100 TiB."""
    with torch.device("meta"):
        model, x = nn.Linear(5_000_000, 5_000_000, bias=False), torch.empty(8, 5_000_000)
    explanation = recompile.plan(model, x, hardware="b200", program=False, loss=torch.sum)
    assert explanation.footprint.parameter_bytes == 4 * 5_000_000**2


def test_the_frontier_runs_from_the_floor_to_the_fastest_plan():
    model, x = on_meta()
    points = recompile.frontier(model, x, hardware="h100").points
    ends = [recompile.plan(model, x, hardware="h100", memory_budget=b, program=False).peak_bytes for b in (0.0, None)]
    assert [points[0].peak_bytes, points[-1].peak_bytes] == ends


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hardware": "h900"}, "option 'hardware': 'h900' is not known"),
        ({"hardware": "cpu"}, "hardware='cpu': planning ahead is for GPUs"),
        ({"hardware": None}, "hardware=None: planning ahead is for GPUs"),
        ({"hardware": "h100", "memory_budget": "auto"}, "memory_budget='auto' asks a device"),
        ({"hardware": "h100", "memory_budget": -1}, "memory_budget=-1 is not accepted"),
        ({"hardware": "h100", "planner": "best"}, "planner"),
        ({"hardware": "h100", "inductor": {"no_such_option": 1}}, "no_such_option"),
    ],
)
def test_a_bad_option_is_refused_by_name(options, text):
    with pytest.raises(recompile.OptionError, match=text):
        recompile.plan(*on_meta(), **options)


def test_a_budget_below_the_floor_says_the_floor():
    with pytest.raises(recompile.BudgetError) as error:
        recompile.plan(*on_meta(), hardware="h100", memory_budget="1KiB")
    assert error.value.floor_bytes > 1024


def test_a_step_without_gradients_is_refused():
    with pytest.raises(ValueError, match="nothing to train"):
        recompile.plan(lambda x: x.exp(), torch.empty(4), hardware="h100")


def test_a_graph_break_is_refused_with_its_place():
    def broken(x):
        torch._dynamo.graph_break()
        return x.exp()

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"test_ahead\.py"):
        recompile.plan(broken, torch.empty(4, requires_grad=True), hardware="h100")


def test_without_triton_the_plan_works_and_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("recompile.ahead.triton_is_installed", lambda: False)
    explanation = recompile.plan(*on_meta(), hardware="h100")
    assert explanation.program is None and explanation.peak_bytes > 0
    assert "no program of Inductor's: it needs the triton package, pip install 'recompile[gpu-dry-run]'" in str(
        explanation
    )


def test_a_gpu_that_no_code_can_be_generated_for_is_planned_and_says_so():
    explanation = recompile.plan(*on_meta(), hardware="mi300x")
    assert explanation.program is None and "not for mi300x" in str(explanation)


def test_a_shape_stands_for_tokens():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
    by_shape = recompile.plan(model, torch.Size([2, 8]), hardware="h100", loss=torch.sum, program=False)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    assert (
        by_shape.peak_bytes == recompile.plan(model, tokens, hardware="h100", loss=torch.sum, program=False).peak_bytes
    )


def test_asking_for_the_program_without_triton_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("recompile.ahead.triton_is_installed", lambda: False)
    with pytest.raises(recompile.OptionError, match=r"pip install 'recompile\[gpu-dry-run\]'"):
        recompile.plan(*on_meta(), hardware="h100", program=True)
