"""Saved joint graphs: what planners decide about them is what they decide about the original."""

import gzip
import json
import operator
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

import recompile
from recompile.annotation import annotate
from recompile.joint import Budget, JointGraph
from recompile.planner import BY_NAME
from recompile.report.rows import module_path
from recompile.rules import source_line
from tests.notation import CHAIN, H100, annotated, plan_text
from tests.whole import models

PLANNERS = ("mincut", "stock", "save_all", "full")

# Views, several outputs, a user's wish, a scalar, an infinite argument, dtypes, a gradient that is None.
MIXED = """
    x = input 4x8 bfloat16
    w = param 8x8 bfloat16
    a = mm x w
    f = prims.convert_element_type.default a torch.float32 @model.py:7
    v = var_mean.correction f [1] correction=0 keepdim=True
    m = getitem v 0
    e = exp f !must_recompute @model.py:8
    c = clamp.default e min=float('-inf') max=2.5
    r = view c (32,)
    s = sum.default r
    t = tangent - float32
    g = expand t [32]
    g1 = view g [4,8]
    g2 = mul g1 e
    g3 = mul g2 m
    g4 = prims.convert_element_type.default g3 torch.bfloat16
    gw = mm x' g4
    return s | gw None
"""


def saved_and_loaded(joint, tmp_path, name="graph.json"):
    joint.save(tmp_path / name)
    return JointGraph.load(tmp_path / name)


def facts(joint):
    """Everything about a graph that does not name its nodes as objects."""
    return [
        (
            node.op, node.name, str(node.target), str(node.args), str(node.kwargs), str(node.meta.get("val")),
            source_line(node), module_path(node), node.meta.get("recompute"), joint.notes[node],
            node in joint.static_inputs,
        )
        for node in joint.nodes
    ]  # fmt: skip


def decisions(joint):
    """What the simple planners decide where nothing limits them."""
    plans = [(name, BY_NAME[name](joint, joint.hardware, Budget(None))) for name in PLANNERS if name != "mincut"]
    return [(name, plan_text(p), p.peak_bytes, p.step_seconds, p.recompute_flops) for name, p in plans]


@pytest.mark.parametrize("text", [CHAIN, MIXED], ids=["chain", "mixed"])
@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_a_loaded_graph_has_the_same_nodes_values_and_notes(text, name, tmp_path):
    joint = annotated(text)
    loaded = saved_and_loaded(joint, tmp_path, name)
    assert facts(loaded) == facts(joint)
    assert (loaded.num_fwd_outputs, loaded.hardware) == (joint.num_fwd_outputs, H100)
    assert str(loaded.graph.output_node().args) == str(joint.graph.output_node().args)


def test_views_share_their_bases_storage_after_loading(tmp_path):
    loaded = saved_and_loaded(annotated(MIXED), tmp_path)
    value = {node.name: node.meta["val"] for node in loaded.nodes}
    assert value["r"].untyped_storage()._cdata == value["c"].untyped_storage()._cdata
    assert value["c"].untyped_storage()._cdata != value["e"].untyped_storage()._cdata


def test_the_body_of_a_higher_order_op_and_constants_are_kept(tmp_path):
    mode = FakeTensorMode()
    with mode:
        constant, flag = torch.empty(8), torch.empty((), dtype=torch.bool)
        values = [torch.empty(4, 8) for _ in range(7)]
    body = torch.fx.Graph()
    argument = body.placeholder("arg0_1")
    argument.meta["val"] = values[0]
    result = body.call_function(torch.ops.aten.exp.default, (argument,))
    result.meta["val"] = values[1]
    body.output((result,))
    graph = torch.fx.Graph()
    x, pred, tangent = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    inner, kept = graph.get_attr("body"), graph.get_attr("constant")
    picked = graph.call_function(torch.ops.higher_order.cond, (pred, inner, inner, (x,)))
    first = graph.call_function(operator.getitem, (picked, 0))
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (first, kept))
    gradient = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, first))
    for node, value in zip((x, tangent, first, scaled, gradient), values[2:], strict=True):
        node.meta["val"] = value
    pred.meta["val"], kept.meta["val"], picked.meta["val"] = flag, constant, (first.meta["val"],)
    graph.output((scaled, gradient, None))
    root = {"body": torch.fx.GraphModule({}, body), "constant": constant}
    joint = annotate(torch.fx.GraphModule(root, graph), 1, H100)
    loaded = saved_and_loaded(joint, tmp_path)
    assert facts(loaded) == facts(joint)
    module = loaded.graph.owning_module
    assert [str(node.target) for node in module.body.graph.nodes] == ["arg0_1", "aten.exp.default", "output"]
    assert module.constant.shape == (8,)
    assert decisions(loaded) == decisions(joint)


def test_the_file_of_a_graph_is_the_same_whenever_it_is_written(tmp_path):
    joint = annotated(MIXED)
    for name in ("a.json.gz", "b.json.gz"):
        joint.save(tmp_path / name)
    saved_and_loaded(joint, tmp_path, "c.json.gz").save(tmp_path / "d.json.gz")
    first, *others = ((tmp_path / f"{name}.json.gz").read_bytes() for name in "abd")
    assert all(other == first for other in others)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "make",
    [
        models.gpt2,
        pytest.param(models.llama, marks=pytest.mark.slow),
        pytest.param(models.resnet, marks=pytest.mark.slow),
    ],
)
def test_planners_decide_the_same_about_a_loaded_graph(make, tmp_path):
    if make is not models.resnet:
        pytest.importorskip("transformers")
    model, inputs, loss = make(0.1)
    joint = recompile.joint_graph(model, hardware="h100", loss=loss, **inputs)
    loaded = saved_and_loaded(joint, tmp_path, "graph.json.gz")
    assert facts(loaded) == facts(joint)
    assert decisions(loaded) == decisions(joint)
    tight, tight_again = (recompile.plan(graph, memory_budget=0.3).graphs[0] for graph in (joint, loaded))
    assert (tight.values, tight.timeline) == (tight_again.values, tight_again.timeline)


IN_A_FRESH_PROCESS = """
import json, sys
import recompile
joint = recompile.JointGraph.load(sys.argv[1])
plans = [recompile.plan(joint, planner=planner) for planner in sys.argv[2:]]
print(json.dumps([[p.peak_bytes, p.step_seconds, [row.name for row in p.graphs[0].saved]] for p in plans]))
"""


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_process_without_the_model_plans_the_same(tmp_path):
    class Local(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

        def forward(self, x):
            return torch.nn.functional.dropout(self.down(self.up(x).exp().sin())).square().mean()

    joint = recompile.joint_graph(Local(), torch.empty(256, 16), hardware="l40s")
    joint.save(tmp_path / "graph.json.gz")
    asked = [sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path / "graph.json.gz"), *PLANNERS]
    outcome = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=tmp_path, env=os.environ)
    here = [recompile.plan(joint, planner=planner) for planner in PLANNERS]
    assert json.loads(outcome.stdout) == [
        [p.peak_bytes, p.step_seconds, [row.name for row in p.graphs[0].saved]] for p in here
    ]


# What plan and frontier make of a graph


def test_a_graph_is_planned_in_the_models_place():
    joint = annotated(CHAIN)
    free, tight = recompile.plan(joint), recompile.plan(joint, memory_budget=400)
    assert (free.peak_bytes, tight.peak_bytes) == (512, 384)
    assert [row.name for row in free.graphs[0].saved if row.kind != "input"] == ["e"]
    assert [point.peak_bytes for point in recompile.frontier(joint).points] == [384, 512]


def test_a_graph_can_be_priced_for_other_hardware():
    joint = annotated(CHAIN)
    slower = joint.priced_for("l4")
    assert slower.hardware.name == "l4" and joint.hardware is H100
    assert recompile.plan(joint, hardware="l4").step_seconds == recompile.plan(slower).step_seconds
    annotated_there = annotated(CHAIN, hardware=slower.hardware)
    assert [note.seconds for note in slower.notes.values()] == [n.seconds for n in annotated_there.notes.values()]


def test_what_says_how_to_trace_is_refused_beside_a_graph():
    with pytest.raises(recompile.OptionError, match="argument 1, autocast: a JointGraph was traced already"):
        recompile.plan(annotated(CHAIN), torch.ones(1), autocast=torch.bfloat16)
    with pytest.raises(recompile.OptionError, match="loss: a JointGraph was traced already"):
        recompile.frontier(annotated(CHAIN), loss=torch.sum)


def test_unknown_hardware_is_refused_by_name():
    with pytest.raises(recompile.OptionError, match="'h900' is not known"):
        recompile.plan(annotated(CHAIN), hardware="h900")


# What cannot be saved or read


def test_sizes_that_vary_are_refused_with_the_node(tmp_path):
    joint = annotated("x = input s4x8\ne = exp x\nt = tangent s4x8\ng = mul t e\nreturn e | g")
    with pytest.raises(ValueError, match=r"node primals_1 .* has the size s\d+, which varies.*dynamic=False"):
        joint.save(tmp_path / "graph.json")


def edited(tmp_path, change):
    """The path of a saved chain after a change to its JSON."""
    annotated(CHAIN).save(tmp_path / "graph.json")
    data = json.loads((tmp_path / "graph.json").read_text())
    change(data)
    (tmp_path / "graph.json").write_text(json.dumps(data))
    return tmp_path / "graph.json"


def node_of(data, name):
    return next(line for line in data["nodes"] if line["name"] == name)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.update(version=99), "has version 99 of the format, and this recompile reads version 1"),
        (lambda data: data.update(format="other"), "no joint graph"),
        (lambda data: node_of(data, "e").update(target="aten.no_such_op.default"), "the op 'aten.no_such_op.default'"),
        (lambda data: node_of(data, "e").update(target="operator.system"), "the op 'operator.system'"),
        (lambda data: node_of(data, "e").update(target="import_module.mm.default"), "import the library that defines"),
        (lambda data: node_of(data, "e").update(target="os.system"), "the op 'os.system'"),
        (lambda data: node_of(data, "e").update(op="call_module", target="exp"), "a node of the kind 'call_module'"),
        (lambda data: node_of(data, "primals_1").update(target="x=print(1)"), "'x=print(1)' in the place of a name"),
        (lambda data: node_of(data, "e").update(name="e; print(1)"), "in the place of a name"),
        (lambda data: node_of(data, "e").update(kwargs={"dict": [["out)=1", 2]]}), "in the place of a name"),
        (lambda data: node_of(data, "e").update(args={"pickle": "x"}), "a value of an unknown kind 'pickle'"),
        (lambda data: node_of(data, "e").pop("note"), "nodes without a note"),
        (lambda data: data.pop("storages"), "damaged: KeyError: 'storages'"),
        (lambda data: data["storages"].clear(), "damaged: IndexError"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(change, text, tmp_path):
    with pytest.raises(ValueError, match=r"graph\.json") as error:
        JointGraph.load(edited(tmp_path, change))
    assert text in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04pickle", gzip.compress(b"[1]", mtime=0)[:-9], b"[1, 2]", b'{"a": 1}']
)
def test_what_is_no_joint_graph_says_what_writes_one(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=r"written by JointGraph\.save or `python -m recompile graph`"):
        JointGraph.load(tmp_path / "file")


def test_ops_that_a_library_registered_are_found_once_it_is_imported(tmp_path):
    path = edited(tmp_path, lambda data: node_of(data, "e").update(target="graph_file.later.default"))
    with pytest.raises(ValueError, match="import the library that defines it"):
        JointGraph.load(path)
    with torch.library._scoped_library("graph_file", "FRAGMENT") as library:
        library.define("later(Tensor x) -> Tensor")
        (node,) = [node for node in JointGraph.load(path).nodes if node.name == "e"]
        assert str(node.target) == "graph_file.later.default"
