"""Every option: what is accepted, how it is refused, and what it does to the cache key."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import recompile.passes
from recompile import options as options_module
from recompile.errors import BudgetError, OptionError, PlanError
from recompile.hardware import named_hardware
from recompile.options import Options, callable_key, sources_hash
from recompile.planner import BY_NAME, save_all
from recompile.torch_private import ShortenTraceback

H100 = named_hardware()["h100"]
BUDGETS = 'None, a float from 0.0 to 1.0 (a share), bytes as an int or as text such as "12GiB", or "auto"'


def parse(mode=None, **options):
    return Options.parse(options, mode)


# Accepted


def test_without_options_everything_has_its_default():
    assert Options.parse() == Options.parse({}) == Options(None, "mincut", None, None, 0, False, ())


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None), ("auto", "auto"), (0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (2, 2), (10**12, 10**12),
        ("1.5GiB", 3 * 2**29), ("800MB", 800_000_000),
    ],
)  # fmt: skip
def test_a_memory_budget_is_nothing_a_share_bytes_or_auto(given, kept):
    parsed = parse(memory_budget=given).memory_budget
    assert (parsed, type(parsed)) == (kept, type(kept))


def test_planners_go_by_name_or_are_functions():
    def mine(joint, hardware, budget): ...

    assert [parse(planner=name).planner_function() for name in BY_NAME] == list(BY_NAME.values())
    assert parse(planner="save_all").planner_name() == "save_all"
    assert parse(planner=mine).planner_function() is mine
    assert "mine" in parse(planner=mine).planner_name()


def test_hardware_is_resolved_when_it_is_named_and_detected_later_when_it_is_not():
    assert parse(hardware="h100").hardware == parse(hardware=H100).hardware == H100
    assert parse().hardware is None


def test_reserve_is_bytes():
    parsed = [parse(memory_budget="auto", reserve=given).reserve for given in (0, 512, "512MiB")]
    assert parsed == [0, 512, 2**29]


def test_reserve_without_auto_is_refused_rather_than_ignored():
    with pytest.raises(OptionError, match="reserve='512MiB' has no meaning without memory_budget='auto'"):
        parse(reserve="512MiB", memory_budget=0.5)
    assert parse(reserve=0).reserve == 0


def test_a_dash_in_a_name_is_an_underscore():
    assert Options.parse({"memory-budget": 0.5, "max-autotune": True}) == parse(memory_budget=0.5, max_autotune=True)


def test_options_of_inductor_are_handed_on_in_a_fixed_order():
    parsed = Options.parse({"shape_padding": True, "triton.cudagraphs": False, "max_autotune": True})
    assert parsed.inductor == (("max_autotune", True), ("shape_padding", True), ("triton.cudagraphs", False))


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead", "default"])
def test_a_mode_stands_for_inductors_options_of_that_mode_wherever_it_is_given(mode):
    expected = tuple(sorted(torch._inductor.list_mode_options(mode).items()))
    assert parse(mode).inductor == Options.parse({"mode": mode}).inductor == expected
    assert Options.parse({"mode": mode}, mode).inductor == expected


# Refused


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"memory_budget": 1.5}, ["memory_budget=1.5", BUDGETS]),
        ({"memory_budget": -0.1}, ["memory_budget=-0.1", BUDGETS]),
        ({"memory_budget": float("nan")}, ["memory_budget=nan", BUDGETS]),
        ({"memory_budget": -5}, ["memory_budget=-5", BUDGETS]),
        ({"memory_budget": 0}, ["memory_budget=0", BUDGETS, "Write 0.0 if you mean a share"]),
        ({"memory_budget": 1}, ["memory_budget=1", BUDGETS, "Write 1.0 if you mean a share"]),
        ({"memory_budget": True}, ["memory_budget=True", BUDGETS]),
        ({"memory_budget": "12"}, ["memory_budget='12'", BUDGETS]),
        ({"memory_budget": "5iB"}, ["memory_budget='5iB'", BUDGETS]),
        ({"memory_budget": [1]}, ["memory_budget=[1]", BUDGETS]),
        ({"planner": "best"}, ["planner='best'", "'mincut', 'stock', 'save_all', 'full', 'exact', or a function"]),
        ({"planner": None}, ["planner=None", "'mincut'"]),
        ({"hardware": "h1000"}, ["hardware", "'h1000'", "h100", "a JSON file", "None to detect"]),
        ({"hardware": 3}, ["hardware", "3", "None to detect"]),
        ({"hardware": "missing.json"}, ["hardware", "'missing.json'"]),
        ({"reserve": -1}, ["reserve=-1", 'bytes as an int or as text such as "512MiB"']),
        ({"reserve": 0.5}, ["reserve=0.5", '"512MiB"']),
        ({"reserve": True}, ["reserve=True", '"512MiB"']),
        ({"reserve": "lots"}, ["reserve='lots'", "write a number and one of B, KB"]),
        ({"verbose": 1}, ["verbose=1", "True and False"]),
        ({"mode": "fast"}, ["mode='fast'", "'default'", "'max-autotune'"]),
        ({"mode": ["default"]}, ["mode=['default']", "'default'"]),
        ({"memory_bugdet": 0.5}, ["'memory_bugdet' is unknown", "memory_budget", "every option of Inductor"]),
        ({"max_autotun": True}, ["'max_autotun' is unknown", "Similar: ", "max_autotune"]),
        ({3: True}, ["'3' is unknown"]),
        ({"max_autotune": 1}, ["max_autotune=1", "must be a bool", "got a int"]),
        ({"max_fusion_size": "8"}, ["max_fusion_size='8'", "must be a int", "got a str"]),
        ({"memory-budget": 0.1, "memory_budget": 0.9}, ["memory_budget", "memory-budget"]),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name_with_what_is_accepted(options, parts):
    with pytest.raises(OptionError) as raised:
        Options.parse(options)
    assert [part for part in parts if part not in str(raised.value)] == []


def test_two_modes_that_differ_are_refused():
    with pytest.raises(OptionError, match=r"mode='default' and options\['mode'\]='max-autotune' contradict"):
        Options.parse({"mode": "max-autotune"}, "default")


def test_errors_are_the_builtin_kinds_and_pass_dynamo_unwrapped():
    assert issubclass(OptionError, ValueError)
    assert issubclass(BudgetError, RuntimeError)
    assert issubclass(PlanError, RuntimeError)
    assert all(issubclass(kind, ShortenTraceback) for kind in (OptionError, BudgetError, PlanError))


# Auto


def test_auto_is_what_is_free_less_the_reserve_and_never_negative(monkeypatch):
    monkeypatch.setattr(options_module, "free_bytes", lambda device: 1000)
    cpu = torch.device("cpu")
    assert parse(memory_budget="auto").with_auto_resolved(cpu).memory_budget == 1000
    resolved = parse(memory_budget="auto", reserve=300).with_auto_resolved(cpu)
    assert (resolved.memory_budget, resolved.reserve) == (700, 300)
    assert parse(memory_budget="auto", reserve=3000).with_auto_resolved(cpu).memory_budget == 0
    assert parse(memory_budget=0.5).with_auto_resolved(cpu).memory_budget == 0.5


def test_the_cpu_has_free_memory():
    assert 2**20 < options_module.free_bytes(torch.device("cpu")) < 2**50


# The key of caches


def fingerprint(hardware=H100, **options):
    return Options.parse(options).fingerprint(hardware)


def test_equal_options_have_one_fingerprint():
    assert fingerprint() == fingerprint() == fingerprint(memory_budget=None, planner="mincut")
    assert fingerprint(memory_budget="1GiB") == fingerprint(memory_budget=2**30)


def test_every_option_that_a_plan_depends_on_is_in_the_fingerprint():
    changed = [
        {"memory_budget": 0.5},
        {"memory_budget": 0.25},
        {"memory_budget": 2},
        {"planner": "full"},
        {"reserve": 1, "memory_budget": "auto"},
    ]
    fingerprints = [fingerprint(), *(fingerprint(**options) for options in changed)]
    fingerprints += [fingerprint(named_hardware()["a100-80"])]
    assert len(set(fingerprints)) == len(fingerprints)


def test_a_share_of_one_and_one_byte_budget_differ():
    assert Options(memory_budget=1.0).fingerprint(H100) != Options(memory_budget=1).fingerprint(H100)


def test_torchs_version_and_our_sources_are_in_the_fingerprint(monkeypatch, tmp_path):
    before = fingerprint()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert fingerprint() != before
    monkeypatch.undo()
    monkeypatch.setattr(recompile.passes, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "__init__.py").write_text("first = 1")
    first = sources_hash()
    (tmp_path / "__init__.py").write_text("first = 2")
    assert len({first, sources_hash()}) == 2
    before_report = sources_hash(), sources_hash(with_report=False)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "html.py").write_text("first = 1")
    assert sources_hash() != before_report[0]
    assert sources_hash(with_report=False) == before_report[1]
    monkeypatch.undo()
    assert fingerprint() == before


def defined(source):
    """The function that a source file defines, as a user's module would."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("mine", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.planner


def test_a_planner_function_is_known_by_its_source(tmp_path):
    for name, limit in (("a", 1), ("b", 2), ("c", 1)):
        (tmp_path / f"{name}.py").write_text(f"def planner(joint, hardware, budget):\n    return {limit}\n")
    first, edited, same = (callable_key(defined(tmp_path / f"{name}.py")) for name in "abc")
    assert first == same != edited
    assert first != "mincut"


def with_limit(limit):
    def planner(joint, hardware, budget):
        return save_all(joint, hardware, limit)

    return planner


@pytest.mark.parametrize("planner", [with_limit(1), eval("lambda joint, hardware, budget: None"), BUDGETS.join])
def test_a_planner_whose_source_does_not_say_all_never_has_the_same_key_twice(planner):
    assert callable_key(planner) != callable_key(planner)


PRINT_FINGERPRINTS = """
from tests.test_options import fingerprints
print(*fingerprints())
"""


def fingerprints():
    given = ({}, {"memory_budget": 0.5}, {"planner": save_all}, {"hardware": "a100-80"})
    return [Options.parse(options).fingerprint(H100) for options in given]


def test_another_process_computes_the_same_fingerprints():
    run = subprocess.run(
        [sys.executable, "-c", PRINT_FINGERPRINTS],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == fingerprints()


def test_a_region_budget_replaces_the_option_and_two_in_one_graph_are_refused():
    assert parse(memory_budget="1GiB").with_region_budget([]).memory_budget == 2**30
    assert parse(memory_budget="1GiB").with_region_budget([0.5]).memory_budget == 0.5
    with pytest.raises(OptionError, match=r"several budgets, \[0.1, 0.5\]"):
        parse().with_region_budget([0.1, 0.5])
