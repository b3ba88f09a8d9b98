"""recompile.explain: every graph that was compiled, with all that was decided, and a word on what it cannot show.

No code is made here: graphs are interpreted (``handed_to_inductor``).
"""

import copy
import inspect
import json
import logging

import pytest
import torch
from torch import nn

import recompile
from recompile.report.explanation import GraphReport
from recompile.report.text import MAX_ROWS

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "handed_to_inductor")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)

    def forward(self, x):
        hidden = self.up(x)
        hidden = torch.nn.functional.gelu(hidden)
        return self.down(hidden)


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.third(x)


def place(code, within):
    """``file:line`` of a line of this file."""
    lines, first = inspect.getsourcelines(within)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if code in line)}"


def batch(rows=64):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def step(forward, x):
    forward(x).sum().backward()


def compiled_with(model, **options):
    return torch.compile(model, backend="recompile", options=options)


def explained(model, x=None, **options):
    """The explanation after one step."""
    compiled = compiled_with(model, **options)
    step(compiled, batch() if x is None else x)
    return recompile.explain(compiled)


def names(rows):
    return [row.name for row in rows if row.kind != "input"]


def budgets_of(compiled):
    return [graph.budget for graph in recompile.explain(compiled).graphs]


# What it takes


class Callable:
    def __call__(self, x):
        return x


NOT_COMPILED = [Block(), Block().forward, step, 3, None, "model", Block, Callable()]


@pytest.mark.parametrize("target", NOT_COMPILED, ids=lambda target: type(target).__name__)
def test_what_is_not_compiled_is_a_type_error_that_says_what_is_accepted(target):
    with pytest.raises(TypeError, match=r"torch\.compile\(\.\.\., backend='recompile'\) or recompile\.remat"):
        recompile.explain(target)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_another_backend_compiled_is_a_type_error_rather_than_an_empty_answer(backend):
    with pytest.raises(TypeError, match="recompile"):
        recompile.explain(torch.compile(Block(), backend=backend))


def test_before_the_first_call_it_says_that_nothing_was_compiled():
    explanation = recompile.explain(compiled_with(Block()))
    assert explanation.graphs == explanation.notes == ()
    assert (explanation.peak_bytes, explanation.saved_bytes, explanation.recompute_flops) == (0, 0, 0)
    assert str(explanation) == "recompile: no training graph was compiled yet"
    assert json.loads(json.dumps(explanation.to_json()))["graphs"] == []
    assert len(explanation.to_networkx()) == 0


def test_compiled_modules_functions_methods_and_lambdas_are_explained():
    model = Block()
    for target in (model, model.forward, lambda x: model(x)):
        torch._dynamo.reset()
        assert len(explained(target).graphs) == 1


# What it shows


def test_the_text_names_each_saved_value_with_op_shape_dtype_size_source_and_reason():
    explanation = explained(Block(), planner="save_all")
    text = str(explanation)
    [graph] = explanation.graphs
    hidden = next(row for row in graph.saved if row.op == "aten.mm.default")
    assert hidden.source == place("self.up(x)", Block.forward)
    assert (hidden.shape, hidden.dtype, hidden.size_bytes) == (("64", "64"), "float32", 64 * 64 * 4)
    assert (hidden.module, hidden.side, hidden.flop) == ("up", "forward", 2 * 64 * 64 * 8)
    assert hidden.reason.startswith("without it ") and "the step takes " in hidden.reason
    line = next(line for line in text.splitlines() if line.startswith(f"{hidden.name} "))
    short_place = "/".join(hidden.source.split("/")[-2:])
    for shown in (hidden.name, "aten.mm.default", "64x64", "float32", "16.00 KiB", short_place, hidden.reason):
        assert shown in line
    assert "saved: " in text
    assert "recomputed: 0 ops" in text


def test_the_text_names_each_recomputed_op_with_flop_intensity_seconds_source_and_reason():
    explanation = explained(Block(), planner="stock")
    [graph] = explanation.graphs
    erf = next(row for row in graph.recomputed if row.op == "aten.erf.default")
    assert erf.source == place("gelu(hidden)", Block.forward)
    line = next(line for line in str(explanation).splitlines() if line.startswith(f"{erf.name} "))
    for shown in ("64x64", "kFLOP", f" {erf.intensity:.1f} ", "test_explain.py:", erf.reason):
        assert shown in line
    assert explanation.recompute_flops == sum(row.flop for row in graph.recomputed) >= erf.flop > 0


def test_the_text_opens_with_peak_saved_bytes_and_recomputed_flop_and_names_budget_planner_and_hardware():
    explanation = explained(Block(), memory_budget=0.5, hardware="h100")
    first, *lines = str(explanation).splitlines()
    assert first.startswith("recompile: predicted peak ")
    assert "saved for backward" in first
    [head] = [line for line in lines if line.startswith("graph 1 of 1: budget 0.5 = ")]
    assert head.endswith("planner mincut, hardware h100")


def test_values_too_many_for_the_text_are_counted_and_are_all_in_the_json():
    widths = range(8, 8 + 2 * MAX_ROWS)  # a shape each, so that no two values share a row
    explanation = explained(nn.Sequential(*[nn.Sequential(nn.Linear(n, n + 1), nn.GELU()) for n in widths]))
    num_saved = len(names(explanation.graphs[0].saved))
    assert num_saved > MAX_ROWS
    assert f"... and {num_saved - MAX_ROWS} more" in str(explanation)
    [graph] = explanation.to_json()["graphs"]
    assert sum(row["decision"] == "saved" and row["kind"] != "input" for row in graph["values"]) == num_saved


def test_json_holds_totals_and_every_node_and_is_read_back():
    explanation = explained(Block(), planner="stock")
    data = json.loads(json.dumps(explanation.to_json()))
    assert {key: data[key] for key in ("peak_bytes", "saved_bytes", "recompute_flops", "step_seconds")} == {
        "peak_bytes": explanation.peak_bytes,
        "saved_bytes": explanation.saved_bytes,
        "recompute_flops": explanation.recompute_flops,
        "step_seconds": explanation.step_seconds,
    }
    assert GraphReport.from_json(data["graphs"][0]) == explanation.graphs[0]
    assert {row["decision"] for row in data["graphs"][0]["values"]} == {"", "saved", "recomputed"}


def test_the_timeline_peaks_where_the_report_says():
    [graph] = explained(Block(), memory_budget=0.5).graphs
    assert max(moment.live_bytes for moment in graph.timeline) <= graph.peak_bytes
    assert {moment.phase for moment in graph.timeline} == {"forward", "backward"}
    assert {moment.node for moment in graph.timeline} <= {row.name for row in graph.values}


def test_the_networkx_graph_holds_every_graph_with_its_decisions(tmp_path):
    import networkx

    explanation = explained(Breaks(), planner="save_all")
    graph = explanation.to_networkx()
    assert len(graph) == sum(len(report.values) for report in explanation.graphs)
    assert networkx.number_weakly_connected_components(graph) >= 3
    for number, report in enumerate(explanation.graphs):
        for row in report.values:
            vertex = graph.nodes[f"{number}.{row.name}"]
            assert (vertex["op"], vertex["decision"], vertex["graph"]) == (row.op, row.decision, number)
            assert {f"{number}.{name}" for name in row.inputs} == set(graph.predecessors(f"{number}.{row.name}"))
    networkx.write_graphml(graph, tmp_path / "graph.graphml")


def test_planning_is_logged_once_a_graph_when_asked_for(caplog):
    with caplog.at_level(logging.WARNING, logger="recompile"):
        explained(Breaks(), verbose=True)
    told = [record.getMessage() for record in caplog.records]
    assert sum("predicted peak" in message for message in told) == 3
    assert sum("planning a graph of" in message for message in told) == 3
    assert len(told) == 3 + 3 * 4  # beside the peak, how far planning is


# Several compilations in one process


def test_two_equal_compilations_of_one_module_are_both_explained(handed_to_inductor):
    model = Block()
    one, other = compiled_with(model, memory_budget=0.5), compiled_with(model, memory_budget=0.5)
    step(one, batch())
    step(other, batch())
    assert len(handed_to_inductor) == 1, "Dynamo reuses the code of an equal compilation"
    assert recompile.explain(other) == recompile.explain(one)
    assert budgets_of(other) == ["0.5"]


def test_an_equal_compilation_that_met_a_shape_of_its_own_shows_the_shared_graph_too():
    model = Block()
    one, other = compiled_with(model), compiled_with(model)
    step(one, batch(64))
    step(other, batch(64))
    step(other, batch(5))
    assert len(recompile.explain(other).graphs) == 2


def test_compilations_of_one_module_with_different_options_show_their_own_plans():
    model = Block()
    options = [{"planner": "save_all"}, {"planner": "full"}, {"memory_budget": 1_000_000}]
    compiled = [compiled_with(model, **chosen) for chosen in options]
    for each in compiled:
        step(each, batch())
    shown = [[(graph.planner, graph.budget) for graph in recompile.explain(each).graphs] for each in compiled]
    assert shown == [[("save_all", "None")], [("full", "None")], [("mincut", "1000000")]]


def test_one_model_for_two_shapes_shows_both_graphs():
    compiled = compiled_with(Block())
    step(compiled, batch(64))
    step(compiled, batch(5))
    explanation = recompile.explain(compiled)
    shapes = [graph.values[1].shape for graph in explanation.graphs]
    assert len(shapes) == 2
    assert "in 2 graphs, each planned on its own" in str(explanation)
    assert not any("graph break" in note for note in explanation.notes)


def test_an_explanation_is_a_value_that_later_compilations_do_not_change():
    compiled = compiled_with(Block())
    step(compiled, batch(64))
    before = recompile.explain(compiled)
    step(compiled, batch(5))
    assert (len(before.graphs), len(recompile.explain(compiled).graphs)) == (1, 2)


# Graph breaks


def test_graph_breaks_are_counted_and_each_is_named_with_its_line():
    model = Breaks()
    explanation = explained(model, memory_budget=0.5)
    _, first = inspect.getsourcelines(Breaks.forward)
    assert [graph.ended_by.split(": ")[0] for graph in explanation.graphs] == [
        f"{__file__}:{first + 2}",
        f"{__file__}:{first + 4}",
        "",
    ]
    [note] = explanation.notes
    assert note.startswith("2 graph break(s): the budget holds for each graph on its own")
    for graph in explanation.graphs[:2]:
        assert graph.ended_by in note
        assert f"ends at a graph break: {graph.ended_by}" in str(explanation)
    assert "in 3 graphs, each planned on its own" in str(explanation)


def test_with_graph_breaks_the_total_peak_counts_what_the_other_graphs_have_saved():
    explanation = explained(Breaks(), planner="save_all")
    saved, peaks = zip(*[(graph.saved_bytes, graph.peak_bytes) for graph in explanation.graphs], strict=True)
    assert explanation.saved_bytes == sum(saved)
    assert explanation.peak_bytes == max(peak + sum(saved) - own for peak, own in zip(peaks, saved, strict=True))


def test_with_graph_breaks_gradients_are_right():
    model = Breaks()
    eager = copy.deepcopy(model)
    step(compiled_with(model, memory_budget=0.0), batch())
    step(eager, batch())
    for parameter, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


# Modules that hold compiled modules


def test_a_module_that_holds_remat_modules_shows_each_with_its_own_options():
    one, other = recompile.remat(Block(), memory_budget=0.5), recompile.remat(Block(), planner="full")
    model = nn.Sequential(one, nn.Tanh(), other)
    step(model, batch())
    assert [(graph.budget, graph.planner) for graph in recompile.explain(model).graphs] == [
        ("0.5", "mincut"),
        ("None", "full"),
    ]
    assert budgets_of(one) == ["0.5"]


def test_equal_remat_blocks_that_share_one_compilation_all_count_in_the_total():
    @recompile.remat(memory_budget=0.5)
    class Repeated(Block):
        pass

    model = nn.Sequential(*[Repeated() for _ in range(3)])
    step(model, batch().requires_grad_())
    one = recompile.explain(model[0])
    assert [len(recompile.explain(block).graphs) for block in model] == [1, 1, 1]
    assert one.saved_bytes > 0
    assert recompile.explain(model).saved_bytes == 3 * one.saved_bytes


def test_inside_a_compiled_module_a_remat_module_is_planned_under_the_outer_options():
    inner = recompile.remat(Block(), memory_budget=0.125)
    compiled = compiled_with(nn.Sequential(inner, Block()), planner="full")
    step(compiled, batch())
    assert [(graph.budget, graph.planner) for graph in recompile.explain(compiled).graphs] == [("None", "full")]
    assert recompile.explain(inner).graphs == ()


def test_compilations_of_one_function_for_other_shapes_are_alternatives_in_the_totals():
    compiled = torch.compile(Block(), backend="recompile", dynamic=False)
    step(compiled, batch(16))
    step(compiled, batch(64))
    explanation = recompile.explain(compiled)
    small, large = sorted(explanation.graphs, key=lambda graph: graph.peak_bytes)
    assert small.peak_bytes < large.peak_bytes
    assert (explanation.peak_bytes, explanation.saved_bytes) == (large.peak_bytes, large.saved_bytes)
    assert "1 graph(s) are compilations of a function for other inputs" in str(explanation)


def test_a_dynamic_graph_says_at_which_sizes_it_was_planned():
    compiled = torch.compile(Block(), backend="recompile", dynamic=True)
    step(compiled, batch(16))
    [graph] = recompile.explain(compiled).graphs
    assert [size.partition("=")[2] for size in graph.sizes] == ["16"]
    assert f"planned at the sizes {graph.sizes[0]}" in str(recompile.explain(compiled))
