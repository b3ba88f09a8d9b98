"""Warm caches: equal options find their code and its explanation again, anything that changes a plan compiles anew.

A second process costs seconds, so most tests forget all that this process knows (``forget_all``) and keep the disk.
Models of matmuls alone go through Inductor in a fraction of a second: there is no C++ to compile.
"""

import functools
import importlib.util
import itertools
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import recompile
from recompile import planner
from recompile.backend import Partitioner
from recompile.options import Options
from recompile.step_memory import HOLDS_TANGENTS

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "empty_cache")


class Matmuls(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = [8, 64, 8, 64, 8]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Outcome:
    """One compilation: whether the disk had it, and what explain shows."""

    was_hit: bool
    explanation: recompile.Explanation

    @property
    def shown(self):
        return plan_of(self.explanation)


def plan_of(explanation):
    """Everything explain shows except how long planning took, which is not part of the decision."""
    shown = explanation.to_json()
    for graph in shown["graphs"]:
        del graph["planning_seconds"]
    return shown


def forget_all():
    """What a new process would not know."""
    torch._dynamo.reset()
    counters.clear()


def compiled_anew(options=None, *, model=None, x=None, **arguments):
    """Compile and run one step as a new process would."""
    forget_all()
    compiled = torch.compile(model or Matmuls(), backend="recompile", options=options or {}, **arguments)
    compiled(torch.ones(64, 8) if x is None else x).sum().backward()
    return Outcome(counters["aot_autograd"]["autograd_cache_hit"] >= 1, recompile.explain(compiled))


def saved_and_recomputed(outcome):
    [graph] = outcome.explanation.graphs
    return [row.name for row in graph.saved if row.kind != "input"], [row.name for row in graph.recomputed]


def record_files(folder):
    return sorted((folder / "recompile").glob("*.json"))


# Two processes

PROCESS = """
import json, sys
import torch
import recompile
from recompile.backend import Partitioner
from torch._dynamo.utils import counters

split, calls = Partitioner.__call__, []
def counted(self, *args, **kwargs):
    calls.append(1)
    return split(self, *args, **kwargs)
Partitioner.__call__ = counted

def decide(options):
    torch._dynamo.reset()
    counters.clear()
    calls.clear()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b, bias=False) for a, b in [(8, 64), (64, 8), (8, 64), (64, 8)]]
    compiled = torch.compile(torch.nn.Sequential(*layers), backend="recompile", options=options)
    answer = {"floor_bytes": None}
    try:
        compiled(torch.ones(64, 8)).sum().backward()
    except recompile.BudgetError as error:
        answer["floor_bytes"] = error.floor_bytes
    explanation = recompile.explain(compiled).to_json()
    for graph in explanation["graphs"]:
        del graph["planning_seconds"]
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    return answer | {"hits": hits, "partitioned": len(calls), "explanation": explanation}

print(json.dumps([decide(options) for options in json.loads(sys.argv[1])]))
"""


def test_a_second_process_finds_code_plan_and_errors_of_the_first_and_plans_other_options_anew(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROCESS)

    def process(*options):
        command = [sys.executable, str(script), json.dumps(options)]
        finished = subprocess.run(command, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout)

    default, tight = {"memory_budget": None}, {"memory_budget": 2}
    first, refused = process(default, tight)
    again, refused_again, *changed = process(
        default, tight, {"memory_budget": 0.0}, {"planner": "save_all"}, {"hardware": "h100"}
    )
    assert (first["hits"], first["partitioned"]) == (0, 1)
    assert (again["hits"], again["partitioned"]) == (1, 0)
    assert again["explanation"] == first["explanation"]
    assert first["explanation"]["graphs"][0]["values"]
    assert refused_again["floor_bytes"] == refused["floor_bytes"] > 2
    assert refused_again["explanation"]["graphs"] == []
    assert [(answer["hits"], answer["partitioned"]) for answer in changed] == [(0, 1)] * 3
    graphs = [answer["explanation"]["graphs"][0] for answer in changed]
    assert [(g["budget"], g["planner"], g["hardware"]) for g in graphs] == [
        ("0.0", "mincut", "cpu"),
        ("None", "save_all", "cpu"),
        ("None", "mincut", "h100"),
    ]


# Equal options


def test_equal_options_hit_without_a_call_of_the_partitioner_and_show_the_same(partitioner_calls):
    first, second = compiled_anew({"memory_budget": 0.0}), compiled_anew({"memory_budget": 0.0})
    assert (first.was_hit, second.was_hit) == (False, True)
    assert partitioner_calls == [0.0]
    assert second.shown == first.shown
    assert str(second.explanation) == str(first.explanation)
    assert saved_and_recomputed(second)[1] != []


def test_one_budget_in_three_spellings_is_one_budget():
    spellings = [200_000, "200KB", "0.2 MB"]
    assert [compiled_anew({"memory_budget": spelling}).was_hit for spelling in spellings] == [False, True, True]


def test_a_share_and_the_bytes_it_means_are_two_budgets():
    share = compiled_anew({"memory_budget": 0.5})
    bytes_meant = share.explanation.graphs[0].budget_bytes
    in_bytes = compiled_anew({"memory_budget": bytes_meant})
    assert not in_bytes.was_hit
    assert in_bytes.explanation.graphs[0].budget == str(bytes_meant)
    assert saved_and_recomputed(in_bytes) == saved_and_recomputed(share)


def test_a_record_says_nothing_of_how_loud_compilation_was():
    compiled_anew({"verbose": False})
    assert compiled_anew({"verbose": True}).was_hit


# Changed options, sources, hardware

CHANGES = [
    {"memory_budget": 0.0},
    {"memory_budget": 1_000_000},
    {"planner": "save_all"},
    {"planner": "full"},
    {"planner": "stock"},
    {"hardware": "h100"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_option_compiles_anew_and_going_back_finds_the_old_plan(change, partitioner_calls):
    before = compiled_anew()
    changed = compiled_anew(change)
    back, changed_again = compiled_anew(), compiled_anew(change)
    outcomes = (before, changed, back, changed_again)
    assert [outcome.was_hit for outcome in outcomes] == [False, False, True, True]
    assert len(partitioner_calls) == 2
    assert (back.shown, changed_again.shown) == (before.shown, changed.shown)
    assert changed.shown != before.shown


def test_an_edited_source_file_of_ours_compiles_anew(monkeypatch):
    compiled_anew()
    monkeypatch.setattr("recompile.options.sources_hash", lambda: "edited")
    assert not compiled_anew().was_hit
    assert compiled_anew().was_hit


def test_another_torch_compiles_anew(monkeypatch):
    options = Options.parse({})
    hardware = Partitioner(options).hardware
    before = options.fingerprint(hardware)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert options.fingerprint(hardware) != before


class RenamesAMatmul(CustomGraphPass):
    """A pass of the user's own, which Inductor's key knows by its uuid: an equal pass is another object."""

    def __call__(self, graph):
        graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[0]._rename("renamed")

    def uuid(self):
        return "renames a matmul"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda: {"joint_custom_post_pass": RenamesAMatmul()}, id="a pass"),
        pytest.param(lambda: {"fallback_random": True}, id="fallback_random", marks=pytest.mark.slow),
    ],
)
def test_an_option_of_inductor_that_changes_the_graph_has_a_record_of_its_own(change):
    def noisy(x):
        return torch.rand_like(x) @ (x @ x)

    arguments = {"model": noisy, "x": torch.ones(4, 4, requires_grad=True)} if "fallback_random" in change() else {}
    before, changed = compiled_anew(**arguments), compiled_anew(change(), **arguments)
    back, changed_again = compiled_anew(**arguments), compiled_anew(change(), **arguments)
    assert [outcome.was_hit for outcome in (changed, back, changed_again)] == [False, True, True]
    assert changed.shown != before.shown
    assert (back.shown, changed_again.shown) == (before.shown, changed.shown)


def test_a_budget_error_is_raised_again_from_warm_caches():
    def floor_bytes():
        with pytest.raises(recompile.BudgetError) as caught:
            compiled_anew({"memory_budget": 2})
        return caught.value.floor_bytes

    first = floor_bytes()
    enough = 2 * first if HOLDS_TANGENTS else first  # tangents that are held are not predicted
    compiled_anew({"memory_budget": enough})
    assert compiled_anew({"memory_budget": enough}).was_hit
    assert floor_bytes() == first


# Records on disk


def test_without_its_record_explain_says_so_instead_of_showing_nothing(empty_cache):
    compiled_anew()
    [file] = record_files(empty_cache)
    file.unlink()
    outcome = compiled_anew()
    assert outcome.was_hit
    assert outcome.explanation.graphs == ()
    assert "no longer has its record" in str(outcome.explanation)
    assert "no training graph was compiled yet" not in str(outcome.explanation)


@pytest.mark.parametrize("content", ["{", "", "[]", '[{"planner": "mincut"}]'], ids=["cut off", "empty", "none", "old"])
def test_a_damaged_record_is_no_record(empty_cache, content):
    compiled_anew()
    [file] = record_files(empty_cache)
    file.write_text(content)
    outcome = compiled_anew()
    assert outcome.was_hit
    assert "no longer has its record" in str(outcome.explanation)


def test_records_lie_beside_inductors_cache_so_that_clearing_one_clears_the_other(empty_cache):
    compiled_anew()
    [file] = record_files(empty_cache)
    assert json.loads(file.read_text())["graphs"][0]["planner"] == "mincut"
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no temporary file is left behind"


def test_a_model_that_moved_by_two_lines_is_still_explained(tmp_path):
    def outcome_of(text):
        path = tmp_path / "moving.py"
        path.write_text(text)
        specification = importlib.util.spec_from_file_location("moving", path)
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return compiled_anew(model=module.square_twice, x=torch.ones(4, 4, requires_grad=True))

    source = "def square_twice(x):\n    return (x @ x) @ (x @ x)\n"
    first, moved = outcome_of(source), outcome_of("# A comment.\n\n" + source)
    assert saved_and_recomputed(moved) == saved_and_recomputed(first)
    assert moved.explanation.notes == ()


def test_a_graph_from_the_cache_ends_where_this_function_ends_it():
    def broken(x):
        squared = x @ x @ x
        torch._dynamo.graph_break()
        return squared @ squared

    def whole(x):
        squared = x @ x @ x
        return squared

    x = torch.ones(4, 4, requires_grad=True)
    first, second = compiled_anew(model=broken, x=x), compiled_anew(model=whole, x=x)
    assert second.was_hit
    assert [bool(graph.ended_by) for graph in first.explanation.graphs] == [True, False]
    assert [graph.ended_by for graph in second.explanation.graphs] == [""]
    assert second.explanation.notes == ()


def test_a_dynamic_graph_is_explained_whatever_batch_size_comes_first():
    first = compiled_anew(x=torch.ones(64, 8), dynamic=True)
    second = compiled_anew(x=torch.ones(5, 8), dynamic=True)
    assert second.was_hit
    assert saved_and_recomputed(second) == saved_and_recomputed(first)


# Planners of the user's own


def keeps_all(joint, hardware, budget):
    return planner.save_all(joint, hardware, budget)


def keeps_boundaries(joint, hardware, budget):
    return planner.full(joint, hardware, budget)


def closure_over(chosen):
    def closure(joint, hardware, budget):
        return chosen(joint, hardware, budget)

    return closure


def without_source(name):
    names = {"planner": planner}
    exec(f"def chosen(joint, hardware, budget):\n    return planner.{name}(joint, hardware, budget)", names)
    return names["chosen"]


def test_a_planner_function_is_known_by_its_name_and_source():
    assert not compiled_anew({"planner": keeps_all}).was_hit
    again, other = compiled_anew({"planner": keeps_all}), compiled_anew({"planner": keeps_boundaries})
    assert (again.was_hit, other.was_hit) == (True, False)
    assert again.explanation.graphs[0].planner == "keeps_all"


LAMBDAS = [lambda *known: planner.save_all(*known), lambda *known: planner.full(*known)]
UNREADABLE = {
    "two lambdas of one line": LAMBDAS,
    "one function over two values": [closure_over(planner.save_all), closure_over(planner.full)],
    "no source to read": [without_source("save_all"), without_source("full")],
    "a partial": [functools.partial(keeps_all), functools.partial(keeps_boundaries)],
}


@pytest.mark.parametrize("planners", UNREADABLE.values(), ids=UNREADABLE)
def test_a_planner_that_its_source_does_not_tell_apart_never_hits(planners, partitioner_calls):
    one, other = planners
    outcomes = [compiled_anew({"planner": chosen}) for chosen in (one, other, one)]
    assert [outcome.was_hit for outcome in outcomes] == [False] * 3
    assert len(partitioner_calls) == 3


# The partitioner as a part of Inductor's key


def test_partitioners_of_equal_options_are_one_key_and_of_others_are_not():
    keys = [Partitioner(Options.parse({"memory_budget": budget})) for budget in (0.5, 0.5, 0.25)]
    assert keys[0].uuid() == keys[1].uuid() != keys[2].uuid()
    assert pickle.dumps(keys[0]) == pickle.dumps(keys[1]) != pickle.dumps(keys[2])


def test_a_partitioner_cannot_be_brought_back_from_a_key():
    with pytest.raises(TypeError, match="cannot be unpickled"):
        pickle.loads(pickle.dumps(Partitioner(Options.parse({}))))
