"""The command line."""

import json
import os
import subprocess
import sys

import pytest

import recompile
from recompile.__main__ import DOES_NOT_FIT, main

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FACTORIES = """
import torch, torch.nn as nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 16), nn.Linear(16, 100)

    def forward(self, tokens):
        h = self.head(self.embed(tokens).exp())
        return {"loss": nn.functional.cross_entropy(h.flatten(0, 1), tokens.flatten())}

class Loss(Net):
    def forward(self, tokens):
        return super().forward(tokens)["loss"]

def both(batch, length):
    assert torch.empty(0).device.type == "meta"
    return Loss(), torch.zeros(batch, length, dtype=torch.long)

def alone():
    return Loss()

def only_model(batch):
    return Loss()
"""


@pytest.fixture(autouse=True)
def factories(tmp_path, monkeypatch):
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("factories", None)


PLAN = ["plan", "factories:both", "--batch", "4x32", "--hardware", "h100", "--no-program"]


def test_a_plan_is_printed_as_json_or_text(capsys):
    assert main([*PLAN, "--json"]) == 0
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert shown["fits"] and shown["footprint"]["total_bytes"] > shown["peak_bytes"] > 0
    assert "building factories:both" in printed.err
    assert main(PLAN) == 0
    assert capsys.readouterr().out.startswith("recompile: predicted peak ")


def test_a_report_and_a_picture_are_written(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "report.html", tmp_path / "step.png"
    assert main([*PLAN, "--html", str(report), "--plot", str(picture)]) == 0
    assert report.read_text(encoding="utf-8").startswith("<!doctype html>") and picture.stat().st_size > 1000
    assert f"wrote {report}" in capsys.readouterr().err


def test_a_factory_without_numbers_gets_tokens(capsys):
    main([*PLAN, "--json"])
    main(["plan", "factories:alone", "--batch", "4x32", "--hardware", "h100", "--no-program", "--json"])
    first, second = (json.loads(part) for part in capsys.readouterr().out.replace("}\n{", "}\n\0{").split("\0"))
    assert first["peak_bytes"] == second["peak_bytes"]


def test_what_cannot_fit_exits_with_3_and_the_floor(capsys):
    assert main([*PLAN, "--memory-budget", "10B", "--json"]) == DOES_NOT_FIT == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out)["floor_bytes"] > 10
    assert "the smallest budget that it can keep is" in printed.err


def test_a_graph_is_saved_for_planners_that_have_no_model(capsys, tmp_path):
    out = tmp_path / "graph.json.gz"
    assert main(["graph", "factories:both", "--batch", "4x32", "--hardware", "h100", "--out", str(out)]) == 0
    joint = recompile.JointGraph.load(out)
    assert capsys.readouterr().out == f"wrote {out}: {len(joint.nodes)} nodes, priced for h100\n"
    assert main([*PLAN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == recompile.plan(joint).peak_bytes


def test_the_frontier_is_printed_and_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "frontier.png"
    assert main(["frontier", "factories:alone", "--batch", "4x32", "--hardware", "h100", "--plot", str(picture)]) == 0
    assert "plans on h100" in capsys.readouterr().out and picture.stat().st_size > 1000


def test_the_largest_batch_and_the_largest_length_are_found(capsys):
    for batch in ("?x32", "4x?"):
        asked = ["max-batch", "factories:both", "--batch", batch, "--hardware", "l4", "--memory", "1GiB", "--json"]
        assert main(asked) == 0
        printed = capsys.readouterr()
        shown = json.loads(printed.out)
        assert shown["size"] >= shown["size_without_recomputation"] > 0
        assert f"trying {shown['size']}" in printed.err


def test_the_known_hardware_is_listed_with_this_machines(capsys):
    assert main(["hardware", "--json"]) == 0
    names = [value["name"] for value in json.loads(capsys.readouterr().out)]
    assert "h100" in names and len(names) > 12


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "factories", "--hardware", "h100"], "must be package.module:function"),
        (["plan", "nowhere:f", "--hardware", "h100"], "No module named 'nowhere'"),
        (["plan", "factories:nothing", "--hardware", "h100"], "has no function 'nothing'"),
        (["plan", "factories:only_model", "--batch", "4", "--hardware", "h100"], "must return (model, batch)"),
        (["plan", "factories:alone", "--hardware", "h100"], "--batch is missing"),
        (["plan", "factories:both", "--batch", "4xmany", "--hardware", "h100"], "must be whole numbers"),
        (["max-batch", "factories:both", "--batch", "4x8", "--hardware", "h100"], "must have one ?"),
        (["plan", "factories:both", "--batch", "4x8", "--hardware", "h900"], "'h900' is not known"),
        (["plan", "factories:both", "--batch", "4x8"], "--hardware"),
        (["fly"], "fly"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_what_is_wrong(arguments, text, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert text in capsys.readouterr().err


def test_the_module_runs_as_a_program():
    outcome = subprocess.run(
        [sys.executable, "-m", "recompile", "hardware"], capture_output=True, text=True, env=os.environ, check=True
    )
    assert "h100" in outcome.stdout
