"""docs/report-schema.md names every key that ``to_json()`` can hold, and none that it cannot."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from recompile.chip import chip_for
from recompile.footprint import Footprint
from recompile.gpu import Kernel, Program
from recompile.report.explanation import SCHEMA_VERSION, Exchange, Explanation, LayerTurned, Moment, Turned
from tests.test_report import report_of

DOC = Path(__file__).parent.parent / "docs/report-schema.md"
OF_THE_COMMAND = {"fits", "floor_bytes", "error"}
VALUES_NAMED = {"true", "false", "null", "live_bytes"}


@pytest.fixture(scope="module")
def data():
    kernel = Kernel("k", "forward", False, ("aten.mm.default",), 1, 1, 1.0, 1, 0, 0.0)
    program = Program(chip_for("h100"), (kernel,), 1, 1, 1, 1, "", "")
    footprint = Footprint(1, 1, 1, 1, 1, 1, 1, 1, 1)
    graph = replace(
        report_of(budget=0.0),
        layers_turned=(LayerTurned("blocks.*", 5, 4, Turned(0.0, 0, 0, 0)),),
        exchanges=(Exchange("blocks.*", 5, 4, 0.0, 0),),
    )
    return Explanation((graph,), ("a note",), footprint=footprint, program=program).to_json()


def keys_in(value):
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in keys_in(inner)}
    if isinstance(value, list | tuple):
        return {key for inner in value for key in keys_in(inner)}
    return set()


def named_in_doc():
    return set(re.findall(r"`([a-z_]+)`", DOC.read_text(encoding="utf-8")))


def test_every_key_is_described(data):
    keys = keys_in(data)
    assert len(keys) > 60
    assert sorted((keys | set(Moment._fields)) - named_in_doc()) == []


def test_no_key_is_described_that_does_not_exist(data):
    assert sorted(named_in_doc() - keys_in(data) - set(Moment._fields) - OF_THE_COMMAND - VALUES_NAMED) == []


def test_the_version_that_is_described_is_this_one():
    assert f"Version {SCHEMA_VERSION} (`" in DOC.read_text(encoding="utf-8")


def test_every_list_of_the_graph_has_an_entry_here_so_that_its_keys_are_seen(data):
    graph = data["graphs"][0]
    assert all(graph[name] for name in ("values", "timeline", "peaks", "frontier"))
    assert asdict(report_of(budget=0.0)).keys() == graph.keys()
