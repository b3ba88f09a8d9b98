"""What the benchmarks of the planner say about results that were made up, and one tiny model run through."""

import json
import subprocess

import pytest
import torch

from benchmarks import aims, aims_text, peaks, peaks_text, verdicts
from benchmarks.models import Recipe, checkpointed
from benchmarks.reference import build
from benchmarks.store import Store, text_of
from recompile.planner import mincut

GIB = 2**30


# Verdicts


def test_a_peak_may_rise_by_two_per_cent_over_the_smallest_before_it():
    assert verdicts.rises([100, 80, 81, 60, 61]) == []
    assert verdicts.rises([100, 80, 81, 82, 60]) == [3]  # two small steps up are one large one


def test_a_budget_is_exceeded_beyond_one_per_cent():
    assert not verdicts.is_exceeded(101, 100)
    assert verdicts.is_exceeded(102, 100)


def test_a_prediction_may_be_off_by_two_per_cent_either_way():
    assert [verdicts.is_well_predicted(p, 100) for p in (97, 98.1, 100, 101.9, 103)] == [False, True, True, True, False]
    assert verdicts.prediction_error(95, 100) == pytest.approx(-0.05)


def test_no_worse_needs_both_costs():
    assert verdicts.is_no_worse((9, 5), (10, 5))
    assert not verdicts.is_no_worse((9, 6), (10, 5))


def test_ranks_correlate_whatever_the_scale():
    assert verdicts.rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert verdicts.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert verdicts.rank_correlation([1, 2], [1, 2]) is None
    assert verdicts.rank_correlation([1, 2, 3], [7, 7, 7]) is None


# Peaks

MIB = 2**20


def run(budget, measured, flop=100, predicted=None, key=None):
    return {
        "method": "recompile", "budget": budget, "key": key or f"{measured}/{flop}", "flop": flop, "total_flop": 100,
        "predicted_bytes": predicted or measured, "predicted_seconds": 0.5, "measured_bytes": measured,
        "measured_seconds": 0.5, "compile_seconds": 3.0, "as_planned": True,
    }  # fmt: skip


def peer(method, measured, flop):
    return {**run(None, measured, flop), "method": method}


ENDS = (run(1.0, 100), run(0.0, 50, 130))
BELOW = {"method": "recompile", "budget": 48, "floor_bytes": 51}
SIXTY = (run(60, 60, 120),)


def record(shares=ENDS, rivals=(), peers=(), below=BELOW, in_bytes=SIXTY):
    return {
        "model": "made up", "floor_bytes": 51, "shares": list(shares), "bytes": list(in_bytes), "rivals": list(rivals),
        "peers": list(peers), "below": below,
    }  # fmt: skip


def test_a_model_is_monotone_unless_a_smaller_share_peaks_higher():
    assert peaks_text.is_monotone(record())
    assert not peaks_text.is_monotone(record([run(1.0, 100), run(0.5, 60), run(0.0, 62)]))
    assert peaks_text.is_monotone(record([run(1.0, 100), {"budget": 0.0, "key": "x", "error": "died"}])) is None


def test_what_exceeds_its_budget_in_bytes_is_found():
    over, within = run(60, 61), run(70, 70)
    assert peaks_text.exceeded(record(in_bytes=[over, within])) == [over]
    assert peaks_text.exceeded(record(rivals=[run(80, 90)])) == [run(80, 90)]


def test_a_budget_below_the_floor_must_be_refused_with_the_floor():
    assert peaks_text.is_refused(record())
    assert not peaks_text.is_refused(record(below=run(48, 49)))
    assert not peaks_text.is_refused(record(below={"budget": 48, "floor_bytes": 77}))


def test_plans_that_several_budgets_share_count_once():
    assert len(peaks_text.distinct(record([run(1.0, 100), run(0.9, 100), run(0.0, 50, 130)]))) == 3


def test_ours_at_a_peers_peak_is_no_worse_when_neither_peak_nor_flop_is_more():
    good = record(rivals=[run(80, 79, 109)], peers=[peer("inductor", 80, 110)])
    assert peaks_text.verdicts_on(good, good["peers"][0]) == {"at_peak": True, "lower": True, "fewer": True}
    bad = record(rivals=[run(80, 79, 111)], peers=[peer("inductor", 80, 110)])
    assert peaks_text.verdicts_on(bad, bad["peers"][0]) == {"at_peak": False, "lower": False, "fewer": False}


def test_a_peak_that_ours_cannot_reach_is_one_that_it_is_worse_at():
    found = record(
        rivals=[{"method": "recompile", "budget": 40, "floor_bytes": 51}], peers=[peer("checkpoint", 40, 200)]
    )
    assert peaks_text.verdicts_on(found, found["peers"][0]) == {"at_peak": False, "lower": False, "fewer": False}
    assert "| checkpoint | 0.0 | 0.000 | 500 | refused |" in peaks_text.summary([found])


def test_lower_and_fewer_are_asked_of_all_our_plans():
    """The peer at (60, 125): the plan at (60, 120) has fewer FLOP, none has a lower peak without more."""
    found = record(peers=[peer("checkpoint", 60, 125)])
    assert peaks_text.verdicts_on(found, found["peers"][0]) == {"at_peak": None, "lower": False, "fewer": True}


def test_a_peer_that_failed_is_told_and_decides_nothing():
    failed = {"method": "selective", "budget": None, "error": "Unsupported: no"}
    found = record(peers=[failed])
    assert set(peaks_text.verdicts_on(found, failed).values()) == {None}
    assert "| selective | Unsupported: no |" in peaks_text.summary([found])


def test_the_summary_of_peaks_has_a_line_a_model_and_marks_what_is_off():
    text = peaks_text.summary([record([run(1.0, 100 * MIB, predicted=95 * MIB), run(0.0, 50 * MIB, 130)])])
    assert (
        "| made up | 3 | yes | yes | yes | **no** | 2 of 3 | -5.0% | +0.0% | yes | 0 of 0 | 0 of 0 | 0 of 0 |" in text
    )
    assert "| 1 | 95.0 | 100.0 | **-5.0%** | 0.000 | 500.0 | 500 | 3 |" in text


# Aims


def program(code, true, key="k", est=None, roofline=None, simulated=None):
    return {
        "key": key, "code_bytes": code * GIB, "est_bytes": (est or code) * GIB, "true_seconds": true / 1e3,
        "roofline_seconds": (roofline or true) / 1e3, "simulated_code_bytes": (simulated or code) * GIB,
        "simulated_est_bytes": (est or simulated or code) * GIB, "simulated_true_seconds": true / 1e3,
        "simulated_roofline_seconds": (roofline or true) / 1e3, "planning_seconds": 1.0,
    }  # fmt: skip


def aim_of(peak, time, gib, ms):
    return {"model": "m", "peak": peak, "time": time, "gib": gib, "ms": ms, "prototype": (9.0, 9.0)}


def test_an_aim_is_reached_in_the_peak_and_the_time_that_it_is_stated_in():
    row = {"aim": aim_of("est", "roofline", 2.0, 5.0), **program(1.8, 7.0, est=2.0, roofline=5.0)}
    assert aims_text.is_reached(row, 2.0, 5.0)
    assert not aims_text.is_reached({**row, "aim": aim_of("est", "true", 2.0, 5.0)}, 2.0, 5.0)
    assert not aims_text.is_reached({**row, "aim": aim_of("est", "roofline", 1.9, 5.0)}, 1.9, 5.0)
    assert aims_text.is_reached(row, 2.0, None)


def test_the_prototype_is_matched_by_the_plan_for_the_aim_or_by_that_for_its_own_gib():
    aim = aim_of("est", "true", 2.0, 5.0) | {"prototype": (3.0, 4.5)}
    row = {"aim": aim, **program(1.0, 5.0, est=2.0)}
    matched = [program(2.0, 4.4, est=3.0), program(2.0, 4.4, est=3.1), program(2.0, 4.6, est=3.0)]
    assert [aims_text.is_matched(row | {"for_prototype": plan}) for plan in matched] == [True, False, False]
    assert aims_text.is_matched(row | {"aim": aim | {"prototype": (2.1, 5.0)}})  # with no other plan, as a floor has
    text = aims_text.summary([{
        "model": "m", "fixed_bytes": 0, "rows": [row | {"for_prototype": {**matched[0], "key": "other"}}],
        "shares": [], "duels": [],
    }])  # fmt: skip
    assert "| m | est / true | 2 | 2.00 / 5.00 |" in text and "| 2/5 | yes | 3/4.5 | 3.00 / 4.40 | yes | 1 |" in text
    assert "| m | 2 | " in text  # both plans are predictions


def test_beside_inductor_peak_and_true_time_count():
    theirs = {"ratio": 0.5, **program(2.0, 6.0)}
    slower = {"inductor": theirs, "same_peak": program(2.0, 6.1), "same_time": program(2.1, 6.0)}
    assert aims_text.verdicts_of(slower) == {"no_slower": False, "lower": False, "both": False}
    equal = {"inductor": theirs, "same_peak": program(2.0, 5.9), "same_time": None}
    assert aims_text.verdicts_of(equal) == {"no_slower": True, "lower": False, "both": False}
    better = {"inductor": theirs, "same_peak": program(2.0, 6.0), "same_time": program(1.9, 6.0)}
    assert aims_text.verdicts_of(better) == {"no_slower": True, "lower": True, "both": True}


def test_the_summary_of_aims_counts_each_program_once():
    plans = [program(4 - i / 2, 5.0 + i, key=str(i)) for i in range(4)]
    found = {
        "model": "m", "fixed_bytes": 0, "rows": [{"aim": aim_of("code", "true", 4.0, 5.0), **plans[0]}],
        "shares": [{"share": 0.5, **plan} for plan in plans], "duels": [],
    }  # fmt: skip
    text = aims_text.summary([found])
    assert "| m | 4 | 1.000 | yes | 1.000 | 4 of 4 |" in text
    assert "| m | code / true | 4 | 4.00 / 5.00 |" in text


def test_a_row_shows_the_simulated_time_that_it_is_in_and_the_prediction_the_true_one():
    plans = [program(4 - i / 2, 7.0 + i, key=str(i), roofline=5.0) for i in range(4)]
    rows = [{"aim": aim_of("code", "roofline", 4.0, 5.0), **plan} for plan in plans]
    text = aims_text.summary([{"model": "m", "fixed_bytes": 0, "rows": rows, "shares": [], "duels": []}])
    assert "| m | code / roofline | 4 | 4.00 / 5.00 |" in text
    assert "| m | 4 | 1.000 | yes |" in text and "| 4 of 4 | +0.0% | +0.0% | 1.0 |" in text


def test_a_row_is_planned_for_the_peak_and_the_time_that_it_is_in_and_for_the_gib_of_the_prototype(
    tmp_path, monkeypatch
):
    asked = []

    def planner(joint, hardware, budget):
        asked.append((hardware.counts_spills, hardware.counts_fused, budget.peak_bytes))
        return mincut(joint, hardware, budget)

    monkeypatch.setattr(aims, "mincut", planner)
    monkeypatch.setattr(aims.Subject, "program", lambda self, by, halves, patches: program(0.0, 1.0, roofline=1.0))
    monkeypatch.setattr(aims, "build", lambda name: (torch.nn.Linear(4, 4, device="meta"), torch.empty(2, 4)))
    aims_in = [aims.Aim("tiny", *kind, 1.0, 9.0, (2.0, 9.0)) for kind in (("code", "roofline"), ("est", "true"))]
    monkeypatch.setattr(aims, "AIMS", [*aims_in, aims.Aim("tiny", "est", "roofline", 1.0, None, (2.0, None))])
    rows = aims.reference("tiny", Store(tmp_path)).rows()
    one, two = (int(gib * GIB * (1 + aims.SLACK)) - 80 for gib in (1, 2))  # less the bytes of the parameters
    assert [kind for *kind, _ in asked] == [[False, False]] * 2 + [[True, True]] * 2 + [[False, True]] * 2
    assert [limit for *_, limit in asked][:4] == [one, two, one, two]
    assert [row["simulated_true_seconds"] >= row["simulated_roofline_seconds"] > 0 for row in rows] == [True] * 3


def test_a_plan_is_asked_for_less_where_its_program_misses_and_for_more_where_that_left_room(monkeypatch):
    """The program takes 2 GiB more than simulated above 5.1 and 1 GiB more up to there; the smallest plan takes 3."""
    subject, asked = aims.Subject.__new__(aims.Subject), []
    subject.fixed_bytes = 0

    def plan(limit, by, peak):
        asked.append(limit / GIB)
        simulated = max(limit / GIB, 3.0)
        return program(simulated + (2 if simulated > 5.1 else 1), 100 - simulated, simulated=simulated)

    subject.plan = plan
    found = subject.plan_for(6.5 * GIB, "code")
    assert asked == pytest.approx([6.5, 4.5, 5.5, 5.0, 5.25, 5.12], abs=0.02)
    assert found["code_bytes"] == pytest.approx(6.0 * GIB, rel=0.01) and found["tries"] == 6
    asked.clear()
    assert subject.plan_for(2 * GIB, "code")["code_bytes"] == 4 * GIB  # nothing is smaller
    assert asked == [int(2 * GIB * (1 + aims.SLACK)) / GIB]  # once, for all that would be accepted


def test_after_a_plan_that_leaves_room_and_misses_another_plan_is_asked_for():
    """Plans take 3 or 5 GiB, their programs 1.6 more: of the two only the smaller one keeps to 6.5 GiB."""
    subject, asked = aims.Subject.__new__(aims.Subject), []
    subject.fixed_bytes = 0

    def plan(limit, by, peak):
        asked.append(limit / GIB)
        simulated = 5.0 if limit >= 5 * GIB else 3.0
        return program(simulated + 1.6, 100 - simulated, simulated=simulated)

    subject.plan = plan
    found = subject.plan_for(6.5 * GIB, "code")
    assert found["code_bytes"] == 4.6 * GIB and found["first_bytes"] == 6.6 * GIB
    assert asked[:2] == pytest.approx([6.5, 4.9], abs=0.02)


def test_a_reference_model_has_the_size_that_its_name_says():
    model, batch = build("gpt-6x1024")
    assert len(model.blocks) == 6 and batch.shape == (2, 1024) and batch.device.type == "meta"
    assert model.blocks[0].dropout == 0.1 and build("gpt-6x1024-nodrop")[0].blocks[0].dropout == 0.0


# Results that are there already


def test_results_are_found_again_by_their_key_alone(tmp_path):
    store = Store(tmp_path)
    assert store.load("mlp", "a") is None
    store.write("mlp", "a", {"measured_bytes": 7})
    assert store.load("mlp", "a")["measured_bytes"] == 7 and store.load("mlp", "a")["made_with"]["torch"]
    assert store.load("mlp", "b") is None
    store.path("mlp", "a").write_text("{ cut sho")
    assert store.load("mlp", "a") is None


def plan(budget, key, flop=100):
    return {
        "method": "recompile", "budget": budget, "key": key, "flop": flop, "predicted_bytes": 50, "saved": ["a"],
        "total_flop": 100, "recompute_flop": 0, "predicted_seconds": 1.0,
    }  # fmt: skip


class Child:
    """In place of processes: answers from a table, and counts what it was asked."""

    def __init__(self, plans):
        self.plans, self.asked = plans, []

    def __call__(self, kind, name, arguments):
        self.asked.append((kind, name))
        if kind == "plans":
            return self.plans
        if kind == "bytes":
            return [plan(budget, "two") for budget in arguments]
        return {"measured_bytes": 50, "measured_seconds": 1.0, "compile_seconds": 1.0, "saved": ["a"]}


PLANS = {
    "floor_bytes": 40, "shares": [plan(1.0, "one"), plan(0.5, "two"), plan(0.4, "two")],
    "bytes": [plan(55, "two")], "peers": [{**plan(None, "three"), "method": "checkpoint"}],
    "below": {"method": "recompile", "budget": 39, "floor_bytes": 40},
}  # fmt: skip


def test_equal_plans_run_once_and_nothing_runs_twice(tmp_path):
    first, again = Child(PLANS), Child(PLANS)
    made = peaks.Bench(Store(tmp_path), first).record("mlp")
    assert [kind for kind, _ in first.asked] == ["plans", "run", "run", "run", "bytes"]  # one, two, three
    assert [run["budget"] for run in made["rivals"]] == [50]
    assert peaks.Bench(Store(tmp_path), again).record("mlp") == made
    assert again.asked == []


def test_a_budget_in_bytes_that_is_missed_is_run_by_itself_and_what_was_planned_again_counts(tmp_path):
    class PlansAgain(Child):
        def __call__(self, kind, name, arguments):
            found = super().__call__(kind, name, arguments)
            taken = {"predicted_bytes": 44, "predicted_seconds": 2.0, "flop": 120}
            is_missed = kind == "run" and arguments[1] == 45
            return {**found, "measured_bytes": 45, "saved": ["b"], "taken": taken} if is_missed else found

    child = PlansAgain({**PLANS, "bytes": [plan(55, "two"), plan(45, "two")]})
    kept, missed = peaks.Bench(Store(tmp_path), child).record("mlp")["bytes"]
    assert (kept["measured_bytes"], kept["flop"], kept["predicted_bytes"]) == (50, 100, 50)
    assert (missed["measured_bytes"], missed["flop"], missed["predicted_bytes"]) == (45, 120, 44)
    assert kept["as_planned"] and missed["as_planned"]


def test_a_changed_planner_reruns_what_changed(tmp_path):
    peaks.Bench(Store(tmp_path), Child(PLANS)).record("mlp")
    changed = {**PLANS, "shares": [plan(1.0, "one"), plan(0.5, "two"), plan(0.4, "new")]}
    bench = peaks.Bench(Store(tmp_path), Child(changed))
    bench.version = "of other sources"
    bench.record("mlp")
    assert [kind for kind, _ in bench.child.asked] == ["plans", "run", "bytes"]


def test_a_run_that_died_is_told_and_tried_again(tmp_path, capsys):
    def dies(kind, name, arguments):
        raise subprocess.CalledProcessError(1, "python", stderr="Traceback\nRuntimeError: no compiler")

    found = peaks.Bench(Store(tmp_path), dies).kept("run", "mlp--recompile", "k", ["recompile", 0.5])
    assert found == {"error": "RuntimeError: no compiler"}
    assert "no compiler" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_equal_texts_are_equal_graphs():
    def traced(function, size):
        from torch.fx.experimental.proxy_tensor import make_fx

        return text_of(make_fx(function, tracing_mode="fake")(torch.ones(size)))

    assert traced(torch.sin, 4) == traced(torch.sin, 4)
    assert traced(torch.sin, 4) != traced(torch.cos, 4)
    assert traced(torch.sin, 4) != traced(torch.sin, 5)


# A tiny model


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "ab")
        )

    def forward(self, x):
        return self.layers(x).square().mean()


TINY = Recipe(lambda: (Tiny(), {"x": torch.randn(512, 64)}), ("Linear",))


def test_blocks_are_checkpointed_wherever_they_are():
    module = checkpointed(Tiny(), ("Linear",), {})
    assert [type(m).__name__ for m in module.layers[1]] == ["Checkpointed", "GELU"]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo", "empty_cache")
def test_a_tiny_model_goes_through(tmp_path, monkeypatch):
    """Within this process: what a child would do is done here."""
    monkeypatch.setitem(peaks.RECIPES, "tiny", TINY)
    monkeypatch.setattr(peaks, "SHARES", (1.0, 0.0))

    def here(kind, name, arguments):
        torch._dynamo.reset()
        return json.loads(json.dumps(peaks.task(kind, name, arguments)))

    made = peaks.Bench(Store(tmp_path), here).record("tiny")
    assert peaks_text.is_monotone(made) is not None  # of so small a model the peak is predicted badly
    assert peaks_text.is_refused(made) and peaks_text.exceeded(made) == []
    assert all(run["as_planned"] for run in made["shares"])
    assert [peer for peer in made["peers"] if "measured_bytes" not in peer] == []
    assert "| tiny |" in peaks_text.summary([made])


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_program_is_made_once_for_a_plan(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    tiny = lambda name: (Tiny().to("meta"), torch.empty(512, 64, device="meta"))  # noqa: E731
    monkeypatch.setattr(aims, "build", tiny)
    notes = []
    subject = aims.reference("tiny", Store(tmp_path), notes.append)
    first, again = subject.plan(None), subject.plan(None)
    assert len(notes) == 1 and first["key"] == again["key"] and first["code_bytes"] > subject.fixed_bytes
    assert first["true_seconds"] >= first["roofline_seconds"] > 0
    assert subject.stock(1.0)["est_bytes"] > subject.fixed_bytes
