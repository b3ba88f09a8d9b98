"""What the benchmark says of results that were made up, and how it takes a peer that fails."""

import json
import subprocess
import types

import pytest
import torch

import recompile.gpu
from benchmarks import bench, bench_text, peaks
from benchmarks.bench import Comparison, Peer, Way
from benchmarks.bench_text import CPU, GPU
from benchmarks.models import Recipe, build
from benchmarks.peers import by_sac_ilp, in_groups
from benchmarks.store import Store, sources

MIB = 2**20


def figures(mebibytes, seconds):
    return {"measured_bytes": mebibytes * MIB, "measured_seconds": seconds, "compile_seconds": 30.0}


def ours(mebibytes, seconds):
    taken = {"recompute_flop": 2e9, "planning_seconds": 1.5}
    return {**figures(mebibytes, seconds), "budget": mebibytes * MIB, "taken": taken}


def program(mebibytes, milliseconds):
    return {"code_bytes": mebibytes * MIB, "roofline_seconds": milliseconds / 1e3}


def row(method="checkpoint", budget=None, peer=None, mine=None, ratios=None, graph=None, error=None):
    return {
        "method": method, "budget": budget, "peer": peer, "ours": mine, "ratios": ratios, "error": error,
        "graph": graph or {},
    }  # fmt: skip


def record(*rows):
    made = {"torch": "2.13.0", "python": "3.11.2", "machine": "2 x a processor", "date": "2026-11-30"}
    return {"model": "made up", "hardware": "h100", "made_with": made, "rows": list(rows)}


BOTH = {"recompute_flop": 3e9, "gpu": program(40, 2.0), "our_gpu": program(40, 1.9)}
GOOD = row(peer=figures(50, 0.2), mine=ours(49, 0.19), ratios=[0.9, 0.95, 1.4], graph=BOTH)


# Verdicts


def test_ours_is_on_or_below_when_neither_peak_nor_time_is_more():
    assert bench_text.lost(GOOD, CPU) == []
    assert bench_text.lost(GOOD, GPU) == []


def test_the_median_ratio_of_the_pairs_decides_not_the_times():
    slower = {**GOOD, "ratios": [0.9, 1.03, 1.1]}
    assert bench_text.lost(slower, CPU) == ["time"]
    assert bench_text.lost({**GOOD, "ratios": [0.9, 1.01, 1.1]}, CPU) == []  # noise


def test_a_peak_may_be_one_per_cent_over_for_the_allocator():
    assert bench_text.lost({**GOOD, "ours": ours(50.4, 0.1)}, CPU) == []
    assert bench_text.lost({**GOOD, "ours": ours(51, 0.1)}, CPU) == ["peak"]


def test_a_program_has_no_slack_but_rounding():
    graph = {**BOTH, "our_gpu": program(40.1, 2.01)}
    assert bench_text.lost({**GOOD, "graph": graph}, GPU) == ["peak", "time"]


def test_a_plan_that_ours_does_not_have_is_lost():
    refused = {**GOOD, "ours": {"budget": 1, "error": "BudgetError: the floor is higher"}, "ratios": None}
    assert bench_text.lost(refused, CPU) == ["no plan"]
    assert "BudgetError: the floor is higher" in bench_text.summary([record(refused)], "make bench")


def test_a_plan_for_the_gpu_that_ours_does_not_have_is_lost_and_told():
    found = {**GOOD, "graph": {"recompute_flop": 0, "gpu": program(40, 2.0), "our_gpu": {}, "error": "ValueError: no"}}
    assert bench_text.lost(found, GPU) == ["no plan"]
    assert "| 1.5 | ValueError: no | - | yes | **no: no plan** |" in bench_text.summary([record(found)], "make bench")


def test_a_peer_that_fails_on_the_cpu_alone_still_has_its_program_beside_ours():
    found = row("sqrt", error="RuntimeError: no compiler", graph=BOTH)
    text = bench_text.summary([record(found)], "make bench")
    assert "| made up | sqrt | RuntimeError: no compiler | - | - | 3.000 | - | - | 40.0 | 2.00 | - | - |" in text
    assert "| made up | ours at the peak of sqrt | - | - | - | - | - | - | 40.0 | 1.90 | - | yes |" in text


def test_a_peer_that_failed_or_that_ours_was_not_asked_about_decides_nothing():
    failed, alone = row("sqrt", error="ValueError: no blocks"), row("eager", peer=figures(60, 0.3))
    assert [bench_text.lost(found, where) for found in (failed, alone) for where in (CPU, GPU)] == [None] * 4
    line = bench_text.verdict_line([record(failed, alone, GOOD)], CPU)
    assert line == "- Ours is on or below the peer's point in (peak, time) for 1 of 1 peer points, measured on the CPU."


def test_a_peer_that_wins_is_named():
    worse = {**GOOD, "method": "inductor", "budget": 0.5, "ratios": [1.2]}
    line = bench_text.verdict_line([record(GOOD, worse)], CPU)
    assert "1 of 2 peer points" in line and line.endswith("Peers win: inductor 0.5 on made up (time).")


# The table and the picture


def test_the_table_has_a_line_for_the_peer_and_one_for_ours():
    text = bench_text.summary([record(GOOD)], "make bench")
    assert "| made up | checkpoint | 50.0 | 200 | - | 3.000 | 30 | - | 40.0 | 2.00 | - | - |" in text
    mine = (
        "| made up | ours at the peak of checkpoint | 49.0 | 190 | 0.95 | 2.000 | 30 | 1.5 | 40.0 | 1.90 | yes | yes |"
    )
    assert mine in text
    assert "2 x a processor, one thread, torch 2.13.0" in text


def test_a_model_s_line_counts_peers_and_has_the_median_the_least_and_the_most_of_the_ratios():
    """The row of which ours has no plan counts as lost and has no time; one that failed does not count at all."""
    slower = {**GOOD, "ratios": [1.2], "graph": {**BOTH, "our_gpu": program(40, 2.2)}}
    refused = {**GOOD, "ours": {"budget": 1, "error": "refused"}, "ratios": None, "graph": {"recompute_flop": 0}}
    made = record(GOOD, slower, refused, row("sqrt", error="no"))
    assert bench_text.model_line(made) == [
        "made up", "1 of 3", "1.07", "0.95", "1.20", "1 of 2", "1.02", "0.95", "1.10",
    ]  # fmt: skip
    alone = record(row("eager", peer=figures(60, 0.3), graph={"recompute_flop": 0}))
    assert bench_text.model_line(alone) == ["made up", "0 of 0", "-", "-", "-", "0 of 0", "-", "-", "-"]
    assert len(bench_text.MODEL_NAMES) == 9


def test_every_line_of_the_table_has_every_column():
    failed = row("sac-ilp", error="ImportError: Please install pulp package.", graph={"error": "the same"})
    refused = {**GOOD, "ours": {"budget": 1, "error": "refused"}, "ratios": None}
    alone = row("eager", peer=figures(60, 0.3), graph={"recompute_flop": 0})
    made = record(failed, refused, alone, GOOD)
    lines = [line for found in made["rows"] for line in bench_text.lines_of(made, found)]
    assert [len(line) for line in lines] == [len(bench_text.NAMES)] * 6


def test_all_machines_and_days_are_named():
    first, second = record(GOOD), record(GOOD)
    second["made_with"] = {**second["made_with"], "machine": "3 x another", "date": "2026-12-01"}
    text = bench_text.summary([first, second, first], "make bench")
    assert " on 2 x a processor or 3 x another, one thread, torch 2.13.0," in text
    assert "2026-11-30 or 2026-12-01. " in text


def test_a_picture_has_what_was_measured_and_what_has_a_program():
    made = record(row("eager", peer=figures(60, 0.3)), row("sqrt", error="no"), GOOD)
    measured = {"peers": [("eager", 60, 300), ("checkpoint", 50, 200)], "ours": [("checkpoint", 49, 190)]}
    assert bench_text.series(made, CPU) == measured
    assert bench_text.series(made, GPU) == {"peers": [("checkpoint", 40, 2.0)], "ours": [("checkpoint", 40, 1.9)]}


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    bench_text.draw(record(row("sqrt", error="no"), GOOD), tmp_path / "plots")
    assert (tmp_path / "plots" / "made up.png").stat().st_size > 1000


# Runs


def test_pairs_alternate_in_who_goes_first():
    order = []

    def timed(name):
        return lambda: order.append(name) or float(len(order))

    assert bench.in_turns(timed("peer"), timed("ours"), pairs=3) == [(1, 2), (4, 3), (5, 6)]
    assert order == ["peer", "ours", "ours", "peer", "peer", "ours"]


PEERS = (Peer(Way("eager"), False), Peer(Way("checkpoint")))
GRAPHS = [{"recompute_flop": 0}, BOTH]


class Child:
    """In place of processes; counts what it was asked. ``fails``: the methods that end with an error; ``saved``: what
    the planner keeps today."""

    def __init__(self, *fails, saved=("a", "b")):
        self.fails, self.asked, self.plan = fails, [], {"saved": list(saved)}

    def __call__(self, kind, name, arguments):
        self.asked.append((kind, name))
        if kind == "graphs":
            return GRAPHS
        if kind == "plans":
            return {"plans": [self.plan["saved"]] * len(arguments)}
        if arguments[0] in self.fails:
            raise subprocess.CalledProcessError(1, "python", stderr="Traceback\nRuntimeError: not this one")
        found = {"peer": figures(50, 0.2)}
        return {**found, "ours": {**ours(49, 0.1), **self.plan}, "ratios": [0.5]} if arguments[2] else found


def test_nothing_runs_twice(tmp_path):
    first, again = Child(), Child()
    made = Comparison(Store(tmp_path), first).record_of("llama", PEERS)
    assert first.asked == [("run", "llama"), ("run", "llama"), ("graphs", "llama")]
    assert Comparison(Store(tmp_path), again).record_of("llama", PEERS) == made and again.asked == []
    assert [bench_text.lost(found, CPU) for found in made["rows"]] == [None, []]


@pytest.mark.parametrize(("saved", "asked"), [("ab", ["plans", "graphs"]), ("a", ["plans", "run", "graphs"])])
def test_a_changed_planner_makes_anew_what_it_plans_otherwise(saved, asked, tmp_path, monkeypatch):
    """The graph's programs are made anew either way; the run with an equal plan stays what it was measured as."""
    Comparison(Store(tmp_path), Child()).record_of("llama", PEERS)
    monkeypatch.setattr(bench, "sources_hash", lambda with_report: "edited")
    today = Child(saved=saved)
    made = Comparison(Store(tmp_path), today).record_of("llama", PEERS)
    assert [kind for kind, _ in today.asked] == asked
    assert made["rows"][1]["ours"]["saved"] == list(saved)
    again = Child()
    assert Comparison(Store(tmp_path), again).record_of("llama", PEERS) == made and again.asked == []


@pytest.mark.parametrize(("saved", "asked"), [(None, ["plans"]), (["a"], ["plans", "run"])])
def test_a_refused_budget_is_the_same_plan_while_it_is_refused(saved, asked, tmp_path, monkeypatch):
    store, child = Store(tmp_path), Child()
    Comparison(store, child).record_of("llama", PEERS)
    (path,) = tmp_path.glob("llama--checkpoint-*")
    path.write_text(json.dumps({**json.loads(path.read_text()), "ours": {"budget": 9, "error": "BudgetError"}}))
    monkeypatch.setattr(bench, "sources_hash", lambda with_report: "edited")
    child.asked, child.plan = [], {"saved": saved}
    Comparison(store, child).record_of("llama", PEERS)
    assert [kind for kind, _ in child.asked] == [*asked, "graphs"]


def test_plans_of_a_model_at_several_budgets_are_those_that_each_alone_would_get(monkeypatch):
    monkeypatch.setitem(peaks.RECIPES, "tiny", Recipe(tiny, ("Sequential",)))
    budgets = [500_000, 850_000, 9_000_000]
    alone = [peaks.planned(peaks.traced("tiny", bench.NONE), Way("recompile", budget)) for budget in budgets]
    assert "saved" in alone[1] and alone[1]["saved"] != alone[2]["saved"]
    assert bench.saved_within("tiny", budgets) == [None, alone[1]["saved"], alone[2]["saved"]]


def test_a_result_that_is_kept_on_stays_of_its_day(tmp_path):
    store = Store(tmp_path)
    first = store.write("a", "key", {"x": 1, "made_with": {"date": "2026-01-01"}})
    assert first == {"x": 1, "made_with": {"date": "2026-01-01"}} == store.load("a", "key")


def test_texts_of_sources_are_the_same_wherever_the_files_lie(tmp_path):
    here, there = [tmp_path / "1a", tmp_path / "2b"], [tmp_path / "4a", tmp_path / "3b"]
    for first, second in (here, there):
        first.write_text("x = 1")
        second.write_text("y = 2")
    assert sources(*here) == sources(*there) and sources(*here) != sources(here[0])


def test_a_peer_that_fails_is_a_row_and_is_tried_again(tmp_path):
    failing, healed = Child("checkpoint"), Child()
    made = Comparison(Store(tmp_path), failing).record_of("llama", PEERS)
    assert [found["error"] for found in made["rows"]] == [None, "RuntimeError: not this one"]
    assert "| llama | checkpoint | RuntimeError: not this one |" in bench_text.summary([made], "make bench")
    Comparison(Store(tmp_path), healed).record_of("llama", PEERS)
    assert healed.asked == [("run", "llama")]


def test_the_quick_set_is_six_configurations_and_the_full_one_has_every_peer():
    assert sum(1 + peer.is_rival for peer in bench.QUICK_PEERS) == 6
    labels = [peer.way.label for peer in bench.full_peers("llama")]
    ratios = [f"inductor-{ratio}" for ratio in (1.0, 0.5, 0.25, 0.1, 0.0)]
    assert labels == ["eager", *ratios, "checkpoint", "selective", "sqrt", "sac-ilp"]


# Peers


def tiny():
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(5)]
    return Tiny(torch.nn.Sequential(*layers)), {"x": torch.randn(512, 64)}


class Tiny(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x).square().mean()


def test_five_blocks_are_grouped_by_three_and_two_and_compute_the_same():
    plain, batch = tiny()
    grouped = in_groups(tiny()[0], ("Sequential",))
    assert [len(group.block.blocks) for group in grouped.layers] == [3, 2]
    losses = [module(**batch) for module in (plain, grouped)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    grads = [[p.grad for p in module.parameters()] for module in (plain, grouped)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", ["llama", "experts", "resnet", "two-traversals", "t5"])
def test_the_models_of_the_benchmark_compute_the_same_in_groups(name):
    module, batch = build(name)
    expected = module(**batch)
    module, batch = build(name)
    grouped = in_groups(module, bench.RECIPES[name].blocks)
    assert torch.equal(grouped(**batch), expected)


def test_a_model_without_a_list_of_blocks_cannot_be_grouped():
    with pytest.raises(ValueError, match="no list of blocks"):
        in_groups(tiny()[0], ("Attention",))


def test_the_ilp_says_what_it_needs():
    if torch.cuda.is_available():
        pytest.skip("it may run here")
    with pytest.raises((ImportError, AssertionError)):
        by_sac_ilp(*tiny())


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_target_has_all_that_its_plans_and_programs_ask_for(tmp_path, monkeypatch):
    monkeypatch.setitem(peaks.RECIPES, "tiny", Recipe(tiny, ("Sequential",)))
    target = bench.Target("tiny", bench.NONE, Store(tmp_path))
    made = types.SimpleNamespace(
        peak_bytes=100, estimated_peak_bytes=120, seconds=1e-3, seconds_with_spills=1e-3, num_launches=3,
        saved_bytes=10, kernels=(),
    )  # fmt: skip
    monkeypatch.setattr(recompile.gpu, "program_for", lambda *args, **kwargs: made)
    assert target.by_inductor(0.5)["code_bytes"] == 100
    assert target.plan_for(100, "code", "roofline")["roofline_seconds"] == 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_tiny_model_is_planned_beside_its_peers_without_compiling(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setitem(peaks.RECIPES, "tiny", Recipe(tiny, ("Sequential",)))
    peers = [Peer(Way("eager")), Peer(Way("inductor", 0.5)), Peer(Way("sqrt")), Peer(Way("none-such", 1.0))]
    monkeypatch.setattr(bench, "planned", fails_for("none-such"))
    found = json.loads(json.dumps(bench.graphs_of("tiny", peers, Store(tmp_path))))
    assert found[0] == {"recompute_flop": 0}
    assert found[2]["recompute_flop"] > found[1]["recompute_flop"] >= 0
    for graph in found[1:3]:
        assert graph["our_gpu"]["code_bytes"] <= graph["gpu"]["code_bytes"] * 1.001
    assert found[3] == {"error": "RuntimeError: not this one"}


def fails_for(method):
    def planned(joint, way):
        if way.method == method:
            raise RuntimeError("not this one\nand more")
        return peaks.planned(joint, way)

    return planned
