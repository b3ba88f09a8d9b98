"""What was decided, as values, as JSON, as text and as graphs; for plans of graphs of a few nodes."""

import io
import json
from dataclasses import replace

import networkx

from recompile.decide import decide
from recompile.options import Options
from recompile.report import planned
from recompile.report.explanation import Exchange, Explanation, GraphReport, LayerTurned, Turned
from recompile.report.rows import code_line, module_path
from recompile.report.text import MAX_ROWS, short_source
from tests.notation import H100, annotated, joint

CHAIN = """
    x = input 4x8
    w = param 8x8
    a = mm x w @train/model.py:3
    e = exp a @train/model.py:4
    y = mm e w @train/model.py:5
    t = tangent 4x8
    g2 = mm t w'
    g3 = mul g2 e
    g4 = mm g3 w'
    return y | g4
"""


def report_of(text=CHAIN, budget=None, planner="mincut"):
    graph = annotated(text)
    options = Options.parse({"memory_budget": budget, "planner": planner})
    plan, resolved = decide(graph, H100, options)
    return planned.report_of(graph, H100, plan, resolved, options, 0.25)


# One graph


def test_a_report_holds_the_plan_and_its_totals(kept, rebuilt):
    assert (kept.peak_bytes, kept.saved_bytes, kept.recompute_flops) == (512, 128, 0)
    assert (rebuilt.peak_bytes, rebuilt.saved_bytes, rebuilt.recompute_flops) == (384, 0, 512 + 640)
    # four matmuls of 512 FLOP, 20 x 32 for exp, 32 for mul
    assert kept.total_flops == rebuilt.total_flops == 4 * 512 + 640 + 32
    assert (kept.budget, kept.budget_bytes, rebuilt.budget, rebuilt.budget_bytes) == ("None", None, "0.0", 384)


def test_every_node_has_a_row_and_its_decision(kept, rebuilt):
    decisions = {
        report: {row.name: row.decision for row in report.values if row.decision} for report in (kept, rebuilt)
    }
    assert decisions[kept] == {"primals_2": "saved", "e": "saved"}
    assert decisions[rebuilt] == {"primals_1": "saved", "primals_2": "saved", "a": "recomputed", "e": "recomputed"}
    assert " ".join(row.name for row in kept.values) == "primals_1 primals_2 tangents_1 a e y w_t g2 g3 g4"
    assert [row.name for row in kept.saved] == ["primals_2", "e"]
    assert [row.name for row in rebuilt.recomputed] == ["a", "e"]


def test_a_row_says_all_about_its_node(kept):
    row = next(row for row in kept.values if row.name == "e")
    assert (row.op, row.shape, row.dtype, row.side, row.kind, row.storage, row.size_bytes) == (
        "aten.exp.default", ("4", "8"), "float32", "forward", "pointwise", "e", 128
    )  # fmt: skip
    assert (row.flop, row.read_bytes, row.write_bytes, row.intensity) == (640, 128, 128, 2.5)
    assert (row.inputs, row.source, row.module) == (("a",), "train/model.py:4", "")
    assert row.reason
    view = next(row for row in kept.values if row.name == "w_t")
    assert (view.storage, view.cannot_save) == ("primals_2", "a view of primals_2, which is kept in its place")


def test_the_line_of_code_is_the_innermost_frames():
    node = joint("x = input 4\na = sin x @model.py:3\nreturn a |").node["a"]
    node.meta["stack_trace"] = (
        '  File "train.py", line 9, in step\n    loss = model(x)\n  File "model.py", line 3, in forward\n'
        "    return torch.sin(x)\n"
    )
    assert code_line(node) == "return torch.sin(x)"
    node.meta["stack_trace"] = f'  File "model.py", line 3, in forward\n    {"x + " * 40}x'
    assert len(code_line(node)) == 100 and code_line(node).endswith("…")
    node.meta.clear()
    assert code_line(node) == ""


def test_the_timeline_of_a_report_peaks_at_its_peak(kept):
    assert tuple(moment[:3] for moment in kept.timeline) == (
        ("forward", "a", 128), ("forward", "e", 128), ("forward", "y", 256),
        ("backward", "g2", 512), ("backward", "g3", 384), ("backward", "g4", 384),
    )  # fmt: skip


def test_a_symbolic_shape_is_written_with_its_symbol_and_a_size_by_its_type():
    rows = {row.name: row for row in report_of("x = input s4x8\nn = sym_size.int x 0\na = sin x\nreturn a n |").values}
    assert rows["a"].shape[1] == "8"
    assert rows["a"].shape[0].startswith("s")
    assert (rows["n"].shape, rows["n"].dtype, rows["n"].size_bytes) == ((), "SymInt", 0)


def test_the_module_is_the_path_that_dynamo_recorded():
    node = joint("x = input 4\na = sin x\nreturn a |").node["a"]
    stacks = {
        "": {},
        "blocks.3.mlp": {"1": ("L['self']", int), "2": ("L['self']._modules['blocks']._modules['3'].mlp", int)},
        "head": {"1": ("L['self'].head", int)},
        "model.head": {"1": ("G['model'].head", int)},
        "net.layers.0": {"1": ("L['net']._modules['layers']._modules['0']", int)},
    }
    for expected, stack in stacks.items():
        node.meta["nn_module_stack"] = stack
        assert module_path(node) == expected
    node.meta["fwd_nn_module_stack"] = stacks["head"]  # in backward that of the op whose gradient is computed
    assert module_path(node) == "net.layers.0"
    del node.meta["nn_module_stack"]
    assert module_path(node) == "head"


# Several graphs


def bounds(seconds, floor_bytes):
    return {"lower_bound_seconds": seconds, "floor_bound_bytes": floor_bytes}


def two_graphs(kept):
    """Peaks 100 and 50, saved 30 and 45."""
    first = replace(kept, peak_bytes=100, saved_bytes=30, recompute_flops=7, step_seconds=1.0, **bounds(0.75, 90))
    second = replace(kept, peak_bytes=50, saved_bytes=45, recompute_flops=4, step_seconds=0.5, **bounds(0.5, 40))
    return Explanation((first, second), ("a note",))


def test_totals_of_two_graphs_assume_that_both_run_in_one_step(kept):
    explanation = two_graphs(kept)
    assert (explanation.saved_bytes, explanation.recompute_flops, explanation.step_seconds) == (75, 11, 1.5)
    assert explanation.peak_bytes == 145  # 100 while the other's 45 are held; 50 + 30 is less
    tall = replace(explanation.graphs[1], peak_bytes=200)
    assert Explanation((explanation.graphs[0], tall)).peak_bytes == 230


def test_without_graphs_all_totals_are_zero_and_the_text_says_that_nothing_was_compiled():
    nothing = Explanation(())
    assert (nothing.peak_bytes, nothing.saved_bytes, nothing.recompute_flops, nothing.step_seconds) == (0, 0, 0, 0)
    assert str(nothing) == "recompile: no training graph was compiled yet"
    assert nothing.to_json()["graphs"] == []


# JSON


def test_a_report_survives_json(kept, rebuilt):
    exchanged = replace(kept, exchanges=(Exchange("blocks.*", 5, 4, 1e-6, -8),))
    turned = replace(kept, layers_turned=(LayerTurned("blocks.*", 5, 4, Turned(1e-6, 3, -8, 16)),))
    for report in (kept, exchanged, turned, replace(rebuilt, ended_by="model.py:3: a print")):
        assert GraphReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_an_explanation_as_json_has_the_totals_and_all_graphs(kept):
    data = json.loads(json.dumps(two_graphs(kept).to_json()))
    graphs = data.pop("graphs")
    assert data == {
        "schema": 7, "peak_bytes": 145, "saved_bytes": 75, "recompute_flops": 11, "step_seconds": 1.5,
        "lower_bound_seconds": 1.25, "floor_bound_bytes": 90, "notes": ["a note"],
    }  # fmt: skip
    assert [graph["peak_bytes"] for graph in graphs] == [100, 50]
    assert [row["name"] for row in graphs[0]["values"] if row["decision"] == "saved"] == ["primals_2", "e"]


# Text


def test_the_text_names_what_is_saved_with_its_size_source_and_reason(kept):
    text = str(Explanation((kept,)))
    assert text.startswith(
        "recompile: predicted peak 512 B over what is allocated when forward starts, 128 B saved for backward, "
        "0 FLOP recomputed\n"
    )
    assert "graph 1 of 1: budget None, planner save_all, hardware planner-h100" in text
    assert "planned in 0.25 s" in text
    assert "1 inputs and parameters are read again in backward" in text
    assert "saved: 1 values" in text
    assert "recomputed: 0 ops" in text
    row = next(line for line in text.splitlines() if line.split()[:1] == ["e"])
    for part in ("aten.exp.default", "4x8", "float32", "128 B", "640 FLOP", "2.5", "train/model.py:4"):
        assert part in row
    assert row.endswith(kept.saved[-1].reason)


def test_the_text_names_what_is_recomputed_and_its_share(rebuilt):
    text = str(Explanation((rebuilt,)))
    assert "budget 0.0 = 384 B" in text
    assert f"recomputation 1.15 kFLOP ({1152 / 2720:.1%} of the step's FLOP)" in text
    assert "recomputed: 2 ops" in text
    assert [line.split()[0] for line in text.splitlines() if "aten." in line] == ["a", "e"]


def test_the_text_says_how_far_from_optimal_the_plan_can_be(kept, rebuilt):
    text = str(Explanation((rebuilt,)))
    assert "at most 0.0% from optimal by this model: no plan within the budget takes less than 14.0 us; no peak" in text
    assert "no peak is below 384 B" in text
    slower = replace(kept, step_seconds=1.5, lower_bound_seconds=1.2, floor_bound_bytes=None)
    assert "at most 25.0% from optimal by this model: no plan takes less than 1.20 s\n" in str(Explanation((slower,)))
    assert "from optimal" not in str(Explanation((replace(kept, lower_bound_seconds=None),)))


def test_bounds_of_graphs_add_up_in_time_and_the_highest_counts_in_memory(kept):
    both = two_graphs(kept)
    assert (both.lower_bound_seconds, both.floor_bound_bytes) == (1.25, 90)
    unknown = replace(both.graphs[0], lower_bound_seconds=None, floor_bound_bytes=None)
    some = replace(both, graphs=(unknown, both.graphs[1]))
    assert (some.lower_bound_seconds, some.floor_bound_bytes) == (None, None)
    assert (Explanation(()).lower_bound_seconds, Explanation(()).floor_bound_bytes) == (0, 0)


def test_the_text_of_two_graphs_shows_notes_and_where_each_ends(kept):
    explanation = two_graphs(kept)
    broken = replace(explanation.graphs[0], ended_by="model.py:3: a print")
    text = str(Explanation((broken, explanation.graphs[1]), explanation.notes))
    assert "11 FLOP recomputed in 2 graphs, each planned on its own\na note\n" in text
    assert "graph 1 of 2" in text
    assert "graph 2 of 2" in text
    assert text.count("ends at a graph break: model.py:3: a print") == 1


def test_a_long_table_shows_the_largest_and_counts_the_rest(kept):
    (row,) = [row for row in kept.saved if row.name == "e"]
    sizes = range(1, MAX_ROWS + 11)
    many = tuple(replace(row, name=f"v{size}", size_bytes=size, source=f"model.py:{size}") for size in sizes)
    text = str(Explanation((replace(kept, values=many),)))
    assert f"saved: {MAX_ROWS + 10} values" in text
    assert "... and 10 more, 55 B; all are in to_json()" in text  # 1 + 2 + ... + 10
    assert " v10 " not in text.replace("\n", " \n ")
    assert "v11" in text


def test_what_is_recomputed_is_sorted_by_what_it_adds_to_the_step(rebuilt):
    """Alone both take a kernel's 2 us; exp runs inside of the kernel that reads it."""
    lines = str(Explanation((rebuilt,))).splitlines()
    head = next(line.split() for line in lines if line.startswith("name"))
    rows = [line for line in lines if "aten." in line]
    assert "adds" in head and [row.split()[0] for row in rows] == ["a", "e"]
    slower = tuple(replace(row, again_seconds=1e-3) if row.name == "e" else row for row in rebuilt.values)
    lines = str(Explanation((replace(rebuilt, values=slower),))).splitlines()
    assert [line.split()[0] for line in lines if "aten." in line] == ["e", "a"]
    assert "1.00 ms" in next(line for line in lines if line.startswith("e "))


def test_values_of_equal_layers_share_a_row_with_the_sum_of_their_sizes(kept):
    (row,) = [row for row in kept.saved if row.name == "e"]
    layers = tuple(replace(row, name=f"e_{layer}", size_bytes=2**20) for layer in range(6))
    [line] = [line for line in str(Explanation((replace(kept, values=layers),))).splitlines() if "e_0" in line]
    assert line.startswith("e_0 and 5 alike  aten.exp.default")
    assert "6.00 MiB" in line


def test_a_source_is_shortened_to_its_file_and_folder():
    assert short_source("/home/me/project/train/model.py:4") == "train/model.py:4"
    assert (short_source("model.py:4"), short_source("")) == ("model.py:4", "")


# Graphs


def test_networkx_gets_every_graph_with_its_decisions(kept, rebuilt):
    graph = Explanation((kept, rebuilt)).to_networkx()
    assert isinstance(graph, networkx.DiGraph)
    assert len(graph) == len(kept.values) + len(rebuilt.values)
    decisions = [
        (data["graph"], data["decision"]) for _, data in graph.nodes(data=True) if data["op"] == "aten.exp.default"
    ]
    assert sorted(decisions) == [(0, "saved"), (1, "recomputed")]
    assert networkx.number_weakly_connected_components(graph) == 2
    networkx.write_graphml(graph, io.BytesIO())
