"""The programs in docs/recipes run as they stand: interpreted, and among the slow tests in generated code."""

import re

import pytest

import recompile
from tests.documents import ROOT, python_blocks, run_blocks

RECIPES = ROOT / "docs" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.md") if path.stem != "README")
NEEDS = {"trainer": ("transformers", "accelerate"), "lightning": ("lightning",)}
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(name, tmp_path, monkeypatch):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    return run_blocks(RECIPES / f"{name}.md")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs(name, tmp_path, monkeypatch, handed_to_inductor, capsys):
    namespace = run(name, tmp_path, monkeypatch)
    assert handed_to_inductor, "nothing was compiled"
    OUTCOMES.get(name, lambda namespace, printed: None)(namespace, capsys.readouterr().out)


def amp_trains(namespace, printed):
    losses = namespace["losses"]
    assert losses[-1] < 0.9 * losses[0]


def blocks_have_their_own_budgets(namespace, printed):
    graphs = recompile.explain(namespace["model"]).graphs
    assert [graph.budget for graph in graphs] == ["0.0", "0.0", "1.0", "1.0"]
    assert max(graph.saved_bytes for graph in graphs[:2]) < 0.7 * min(graph.saved_bytes for graph in graphs[2:])
    assert len(namespace["watched"].steps) == 2


def memory_is_advised_on(namespace, printed):
    assert "the smallest budget that it can keep is" in printed
    assert "recompile: out of memory in a step that was predicted to add" in printed


OUTCOMES = {"amp": amp_trains, "regional": blocks_have_their_own_budgets, "out_of_memory": memory_is_advised_on}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_in_generated_code(name, tmp_path, monkeypatch):
    run(name, tmp_path, monkeypatch)


def test_every_recipe_is_one_program_and_in_the_index():
    assert all(len(python_blocks(RECIPES / f"{name}.md")) == 1 for name in NAMES)
    linked = re.findall(r"\]\((\w+)\.md\)", (RECIPES / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == NAMES
