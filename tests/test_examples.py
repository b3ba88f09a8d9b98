"""The worked examples run; graphs are interpreted where one goes through torch.compile."""

import inspect
import runpy
import sys

import pytest
import torch

import recompile
from recompile.joint import Budget
from tests.documents import ROOT
from tests.notation import CHAIN, H100, annotated

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def example(monkeypatch):
    """Reads an example, as Python would that runs it, without running its main."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")
    for name in ("small_gpt", "custom_planner"):
        sys.modules.pop(name, None)


def cells_of(printed):
    """The cells of a table, row by row."""
    rows = (line.replace("┃", "│").strip("│ ") for line in printed.splitlines() if "│" in line or "┃" in line)
    return [[cell.strip() for cell in row.split("│")] for row in rows]


def test_the_custom_planner_is_short_and_gives_up_the_cheapest_bytes_first(example):
    greedy = example("custom_planner")["greedy"]
    assert len(inspect.getsource(greedy).splitlines()) < 40
    plans = [greedy(annotated(CHAIN), H100, Budget(limit)) for limit in (None, 400)]
    assert [plan.peak_bytes for plan in plans] == [512, 384]
    with pytest.raises(recompile.BudgetError) as error:
        greedy(annotated(CHAIN), H100, Budget(100))
    assert error.value.floor_bytes == 384


def test_the_custom_planner_trains_beside_mincut(example, capsys, handed_to_inductor):
    example("custom_planner")["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["greedy", "mincut"]
    assert all(float(line.split()[3]) <= 3.0 for line in lines)  # MiB


@pytest.mark.slow
def test_the_custom_planner_trains_in_generated_code(example, capsys):
    example("custom_planner")["main"]()
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_planners_are_compared_on_a_saved_graph(example, capsys, tmp_path):
    make = example("compare_planners")
    with torch.device("meta"):
        model, tokens = example("small_gpt")["SmallGPT"](layers=1, width=32), torch.empty(4, 65, dtype=torch.int64)
    recompile.joint_graph(model, tokens, hardware="l4").save(tmp_path / "graph.json")
    make["main"](str(tmp_path / "graph.json"))
    head, *rows = cells_of(capsys.readouterr().out)
    assert [row[0] for row in rows] == [
        "mincut",
        "stock",
        "save_all",
        "full",
        "greedy (yours)",
        "no plan is faster than",
    ]
    mincut, bound = rows[0][1:], rows[-1][1:]
    assert len(head) == 5 and all(float(b) <= float(s) for s, b in zip(mincut, bound, strict=True))
    for row in rows[1:-1]:
        assert all(cell == "does not fit" or float(cell) >= float(b) for cell, b in zip(row[1:], bound, strict=True))


@pytest.mark.slow
def test_two_gpus_find_their_batches(example, capsys):
    module = example("two_gpus")
    with torch.device("meta"):
        module["main"](example("small_gpt")["SmallGPT"](layers=1, width=256, words=8000))
    printed = capsys.readouterr().out
    assert [row[:2] for row in cells_of(printed)[1:]] == [
        [gpu, plan] for gpu in ("h100", "l40s") for plan in ("fastest", "half the memory", "least memory")
    ]
    assert "plans on l40s" in printed
    sizes = [
        [int(word) for word in line.replace(",", "").split() if word.isdigit()] for line in printed.splitlines()[-2:]
    ]
    assert sizes[0] > sizes[1] and all(with_it > without > 0 for with_it, without in sizes)  # 80 GB and 48 GB
