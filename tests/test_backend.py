"""backend="recompile" as users meet it: options, modes, errors, inference, and gradients equal to eager's.

Models of matmuls alone go through Inductor in a fraction of a second: there is no C++ to compile.
"""

import copy
import dataclasses
import logging
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import recompile
from recompile.backend import Partitioner, graph_break_of
from recompile.planner import save_all

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def matmuls():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False), nn.Linear(8, 8, bias=False))


def batch(rows=16):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def step(forward, x):
    out = forward(x)
    (out * out.detach()).sum().backward()
    return out


def compiled_with(model, **options):
    return torch.compile(model, backend="recompile", options=options)


def assert_trains_like_eager(compiled, model, eager, x):
    """One more step of both, from zeroed gradients."""
    for module in (model, eager):
        module.zero_grad()
    torch.testing.assert_close(step(compiled, x), step(eager, x))
    torch.testing.assert_close(gradients(model), gradients(eager))


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


# Reaching it


def test_torch_finds_the_backend_without_an_import_of_recompile(empty_cache):
    script = """
        import sys, torch
        assert "recompile" in torch._dynamo.list_backends()
        model, x = torch.nn.Linear(8, 8, bias=False), torch.ones(4, 8)
        assert "recompile" not in sys.modules
        torch.compile(model, backend="recompile", options={"memory_budget": 0.5})(x).sum().backward()
        assert "recompile.planner" in sys.modules
        assert torch.allclose(model.weight.grad, torch.full((8, 8), 4.0))
    """
    finished = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("memory_budget", [None, 0.0])
def test_generated_code_trains_like_eager(memory_budget):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    eager, compiled = copy.deepcopy(model), compiled_with(model, memory_budget=memory_budget)
    for _ in range(2):
        assert_trains_like_eager(compiled, model, eager, batch())
    assert bool(recompile.explain(compiled).graphs[0].recomputed)


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["stock", "save_all", "full", "mincut"])
def test_generated_code_of_every_planner_trains_like_eager(planner):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8))
    eager, compiled = copy.deepcopy(model), compiled_with(model, planner=planner)
    assert_trains_like_eager(compiled, model, eager, batch())
    assert recompile.explain(compiled).graphs[0].planner == planner


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_generated_code_of_a_mode_trains_like_eager(mode):
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="recompile", mode=mode)
    assert_trains_like_eager(compiled, model, eager, batch())


# What Inductor is asked for


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("how", ["alone", "inside options"])
def test_a_mode_becomes_inductors_settings_for_it(handed_to_inductor, mode, how):
    arguments = {"mode": mode} if how == "alone" else {"options": {"mode": mode, "memory_budget": None}}
    step(torch.compile(matmuls(), backend="recompile", **arguments), batch())
    [(settings, partitioner)] = handed_to_inductor
    assert settings == torch._inductor.list_mode_options(mode)
    assert isinstance(partitioner, Partitioner)


def test_options_beside_a_mode_win_over_the_modes_own(handed_to_inductor):
    step(compiled_with(matmuls(), mode="max-autotune", max_autotune=False), batch())
    [(settings, _)] = handed_to_inductor
    assert settings["max_autotune"] is False
    assert settings["coordinate_descent_tuning"] is True


def test_an_option_of_inductor_is_active_when_forward_and_backward_are_lowered(monkeypatch, empty_cache):
    from torch._inductor.graph import GraphLowering

    lower, seen = GraphLowering.run, []

    def recorded(self, *args):
        seen.append((self.is_backward, inductor_config.max_fusion_size, inductor_config.triton.cudagraph_trees))
        return lower(self, *args)

    monkeypatch.setattr(GraphLowering, "run", recorded)
    step(compiled_with(matmuls(), **{"max_fusion_size": 7, "triton.cudagraph_trees": False}), batch())
    assert seen == [(False, 7, False), (True, 7, False)]
    assert inductor_config.max_fusion_size != 7


@pytest.mark.parametrize(
    ("options", "allow_buffer_reuse"),
    [
        ({}, None),
        ({"memory_budget": None}, None),
        ({"memory_budget": 0.5}, False),
        ({"memory_budget": 0.5, "allow_buffer_reuse": True}, True),
    ],
)
def test_only_with_a_budget_is_memory_saved_by_inductors_options_and_the_users_word_counts(
    handed_to_inductor, options, allow_buffer_reuse
):
    step(compiled_with(matmuls(), **options), batch())
    [(settings, _)] = handed_to_inductor
    assert settings.get("allow_buffer_reuse") is allow_buffer_reuse


# Shapes and breaks


def test_dynamic_serves_three_batch_sizes_with_one_compilation(empty_cache, partitioner_calls):
    model = matmuls()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="recompile", dynamic=True, options={"memory_budget": 0.0})
    for rows in (16, 5, 32):
        assert_trains_like_eager(compiled, model, eager, batch(rows))
    assert counters["stats"]["unique_graphs"] == 1
    assert partitioner_calls == [0.0]


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)

    def forward(self, x):
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x)


def test_fullgraph_refuses_a_graph_break_and_compiles_a_model_without(handed_to_inductor):
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(Breaks(), backend="recompile", fullgraph=True)(batch())
    model = matmuls()
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="recompile", fullgraph=True)
    assert_trains_like_eager(compiled, model, eager, batch())


def test_a_graph_break_leaves_gradients_right(empty_cache, partitioner_calls):
    model = Breaks()
    eager, compiled = copy.deepcopy(model), compiled_with(model, memory_budget=0.0)
    assert_trains_like_eager(compiled, model, eager, batch())
    assert partitioner_calls == [0.0, 0.0]


def test_a_graph_that_dynamo_did_not_end_early_has_no_break():
    assert graph_break_of(torch.fx.symbolic_trace(nn.ReLU())) == ""


# What is refused


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"memory_budge": 0.5}, "'memory_budge' is unknown; accepted are memory_budget, planner"),
        ({"memory_budget": 1.5}, "memory_budget=1.5 is not accepted"),
        ({"memory_budget": 1}, "Write 1.0 if you mean a share"),
        ({"memory_budget": "12 apples"}, "memory_budget='12 apples'"),
        ({"planner": "fastest"}, "'mincut', 'stock', 'save_all', 'full'"),
        ({"hardware": "abacus"}, "abacus"),
        ({"reserve": -1}, "reserve=-1"),
        ({"verbose": "yes"}, "verbose='yes'"),
        ({"mode": "fastest"}, "mode='fastest'"),
        ({"max_fusion_size": "64"}, "max_fusion_size='64' must be a int"),
    ],
)
def test_a_bad_option_raises_a_value_error_that_names_it(options, named):
    with pytest.raises(ValueError) as caught:
        compiled_with(matmuls(), **options)(batch())
    assert type(caught.value) is recompile.OptionError
    assert named in str(caught.value)


def test_a_bad_option_is_refused_in_inference_too():
    with torch.no_grad(), pytest.raises(recompile.OptionError):
        compiled_with(matmuls(), memory_budget=-1.0)(batch())


def test_two_modes_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="contradict"):
        recompile.backend.Options.parse({"mode": "max-autotune"}, mode="reduce-overhead")


def test_a_partitioner_of_the_users_own_is_refused_rather_than_dropped(handed_to_inductor):
    class Mine(torch._inductor.custom_graph_pass.CustomPartitionerFn):
        def __call__(self, gm, joint_inputs, **kwargs):
            raise AssertionError("not reached")

        def uuid(self):
            return "mine"

    with pytest.raises(recompile.OptionError, match="custom_partitioner_fn"):
        step(compiled_with(matmuls(), custom_partitioner_fn=Mine()), batch())


def test_a_budget_below_the_floor_raises_a_runtime_error_and_the_floor_itself_works(empty_cache):
    model = matmuls()
    with pytest.raises(RuntimeError) as caught:
        compiled_with(model, memory_budget="1KB")(batch())
    assert type(caught.value) is recompile.BudgetError
    floor_bytes = caught.value.floor_bytes
    assert floor_bytes > 1000
    assert f"{floor_bytes} bytes" in str(caught.value)
    compiled, eager = compiled_with(model, memory_budget=floor_bytes), copy.deepcopy(model)
    assert_trains_like_eager(compiled, model, eager, batch())
    assert recompile.explain(compiled).peak_bytes <= floor_bytes
    with pytest.raises(recompile.BudgetError):
        compiled_with(model, memory_budget=floor_bytes - 1)(batch())


def test_a_planner_that_saves_what_cannot_be_saved_is_refused_by_name(handed_to_inductor):
    def careless(joint, hardware, budget):
        from recompile.joint import Choice, Plan

        unsavable = next(n for n in joint.nodes if joint.notes[n].cannot_save and n.op != "placeholder")
        return Plan((Choice(unsavable, "because"),), (), 0, 0, 0, 0.0)

    with pytest.raises(recompile.PlanError, match="careless"):
        compiled_with(matmuls(), planner=careless)(batch())


def test_a_planner_may_name_what_it_saves_twice(empty_cache):
    def repetitive(joint, hardware, budget):
        plan = save_all(joint, hardware, budget)
        return dataclasses.replace(plan, saved=plan.saved + plan.saved)

    compiled_with(matmuls(), planner=repetitive)(batch()).sum().backward()


# What is chosen at run time


def test_auto_budgets_what_is_free_less_the_reserve(handed_to_inductor, monkeypatch):
    monkeypatch.setattr("recompile.options.free_bytes", lambda device: 2**30)
    compiled = compiled_with(matmuls(), memory_budget="auto", reserve="24MiB")
    step(compiled, batch())
    assert recompile.explain(compiled).graphs[0].budget_bytes == 1000 * 2**20


def test_verbose_logs_the_predicted_peak(handed_to_inductor, caplog):
    with caplog.at_level(logging.WARNING, logger="recompile"):
        step(compiled_with(matmuls(), verbose=True), batch())
    assert "predicted peak" in caplog.text
    assert re.search(r"planning a graph of \d+ nodes(.*\n)+.*\d+ plans with mixtures", caplog.text)


def test_without_verbose_nothing_is_logged(handed_to_inductor, caplog):
    with caplog.at_level(logging.WARNING, logger="recompile"):
        step(compiled_with(matmuls()), batch())
    assert caplog.text == ""


# Inference


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_goes_to_plain_inductor(empty_cache, partitioner_calls, mode):
    model = matmuls()
    compiled = compiled_with(model, memory_budget=0.0)
    with mode():
        torch.testing.assert_close(compiled(batch()), model(batch()))
    assert partitioner_calls == []
    assert recompile.explain(compiled).graphs == ()
    assert recompile.explain(compiled).notes == ()


def test_inference_gets_the_users_options_of_inductor_and_no_others(handed_to_inductor):
    with torch.no_grad():
        compiled_with(matmuls(), memory_budget=0.5, max_fusion_size=7)(batch())
    assert handed_to_inductor == [({"max_fusion_size": 7}, None)]


def test_a_model_without_trainable_parameters_goes_to_plain_inductor(handed_to_inductor):
    compiled_with(matmuls().requires_grad_(False), memory_budget=0.5)(batch())
    assert handed_to_inductor == [({}, None)]


def test_a_model_that_trains_and_is_evaluated_explains_its_training_graph_alone(empty_cache, partitioner_calls):
    model = matmuls()
    compiled = compiled_with(model)
    step(compiled, batch())
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch()), model(batch()))
    assert partitioner_calls == [None]
    assert len(recompile.explain(compiled).graphs) == 1


def test_training_switched_on_inside_a_no_grad_block_keeps_its_budget(handed_to_inductor):
    model = matmuls()

    def forward(x):
        with torch.enable_grad():
            return model(x)

    compiled = compiled_with(forward, memory_budget=0.0)
    with torch.no_grad():
        out = compiled(batch())
    assert out.requires_grad
    assert [graph.budget for graph in recompile.explain(compiled).graphs] == ["0.0"]


def test_a_graph_without_a_differentiable_output_is_not_taken_for_a_lost_record(empty_cache, partitioner_calls):
    model = matmuls()
    compiled = compiled_with(lambda x: model(x).detach())
    compiled(batch())
    assert partitioner_calls == []
    assert recompile.explain(compiled).graphs == ()
    assert recompile.explain(compiled).notes == ()
