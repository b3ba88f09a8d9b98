"""What decisions are worth, by simulations of the step with one of them, or those of a layer, turned around."""

from dataclasses import replace

import pytest

from recompile.joint import Budget
from recompile.options import Options
from recompile.planner.finish import plan_from
from recompile.report import planned
from recompile.report.explanation import Turned
from recompile.report.layer_worth import layers_worth
from recompile.report.turning import Decided
from recompile.report.worth import by_importance, groups_of, seen_elsewhere, turned_values
from recompile.report.worth_text import reason_text, unseen_text
from recompile.timeline import Timeline
from tests.notation import H100, annotated
from tests.test_planners import residual_chain
from tests.test_report import report_of


def test_a_kept_value_is_explained_by_what_the_step_would_be_without_it(kept):
    """Without e, a matmul of 512 FLOP and exp of 640 run again: the matmul in a kernel of 2 us, exp inside of g3's."""
    row = kept.saved[-1]
    turned = row.turned
    assert (row.name, turned.flop, turned.saved_bytes, turned.peak_bytes) == ("e", 512 + 640, -128, 384 - 512)
    assert turned.seconds == pytest.approx(2e-6, rel=0.01)
    assert row.reason == "without it 1.15 kFLOP run again and the step takes 2.0 us longer"


def test_a_rebuilt_value_is_explained_by_what_keeping_it_would_spare_and_by_the_budget(rebuilt):
    a, e = rebuilt.recomputed
    assert (a.turned.flop, e.turned.flop, a.turned.saved_bytes, e.turned.saved_bytes) == (-512, -512 - 640, 128, 128)
    assert a.again_seconds == pytest.approx(2e-6, rel=0.01)
    assert a.reason == "kept, it would spare 2.0 us and 512 FLOP; the peak would be 512 B, over the budget"
    assert e.reason == "kept, it would spare 2.0 us and 1.15 kFLOP; the peak would be 512 B, over the budget"


@pytest.mark.parametrize(
    ("decision", "turned", "expected"),
    [
        ("saved", Turned(4e-4, 21 * 10**9, -(2**28), -(2**28)),
         "without it 21.00 GFLOP run again and the step takes 400.0 us longer, for 256.00 MiB: 1.6 us per MiB"),
        ("saved", Turned(3.2e-4, 0, -(2**18), 0),
         "without it the step takes 320.0 us longer, for 256.00 KiB: 1280 us per MiB"),
        ("saved", Turned(-2e-6, 4 * 10**6, -(2**22), 0),
         "dropping it alone would make the step 2.0 us shorter, though 4.00 MFLOP run again: the search did not find "
         "this (0.20% of the step)"),
        ("saved", Turned(0.0, 0, -8, 2**30), "without it the step takes as long; the peak would be 2.00 GiB, over the "
         "budget (rebuilding it needs more at the peak than keeping it)"),
        ("saved", None, "small, or nothing can be kept in its place"),
        ("recomputed", Turned(-1.7e-4, -(10**9), 2**27, 2**27), "kept, it would spare 170.0 us and 1.00 GFLOP, for "
         "128.00 MiB: 1.3 us per MiB; the peak would be 1.12 GiB, over the budget less its margin"),
        ("recomputed", Turned(1.6e-4, -(10**9), 2**28, 2**28),
         "slower if kept: the step would take 160.0 us longer, with 256.00 MiB to be written and read again"),
        ("recomputed", Turned(2e-6, 0, 8, 0), "slower if kept: the step would take 2.0 us longer"),
        ("recomputed", Turned(0.0, 0, 2, 2), "not worth its memory: kept, the step would take as long"),
        ("recomputed", None, "computing it again adds 3.0 us"),
    ],
)  # fmt: skip
def test_reasons_lead_with_what_the_other_decision_would_change(kept, decision, turned, expected):
    """A plan of 1 GiB under a budget of 1.25 GiB, of which 1 % or so, here 0.15 GiB, is kept back."""
    graph = replace(kept, peak_bytes=2**30, budget_bytes=5 * 2**28, limit_bytes=int(1.1 * 2**30), step_seconds=1e-3)
    row = replace(kept.saved[-1], decision=decision, reason="", turned=turned, again_seconds=3e-6)
    assert reason_text(row, graph) == expected


def test_a_planners_own_reason_stands_before_what_its_decision_is_worth(kept):
    row = replace(kept.saved[-1], reason="a block boundary")
    assert reason_text(row, kept).startswith("a block boundary; without it 1.15 kFLOP run again and ")
    assert reason_text(replace(row, turned=None), kept) == "a block boundary"
    slower = replace(row, reason="a block boundary", turned=Turned(-6.2e-6, 0, -1024, -1024))
    assert reason_text(slower, replace(kept, step_seconds=0.062)) == (
        "a block boundary; yet dropping it alone would make the step 6.2 us shorter: the search did not find this "
        "(0.01% of the step)"
    )
    output = replace(row, reason="an output of forward: allocated anyway", turned=Turned(1e-3, 10, 0, 0))
    assert reason_text(output, kept) == "an output of forward: allocated anyway"


def test_values_alike_in_equal_layers_are_looked_at_once(kept):
    (row,) = [row for row in kept.saved if row.name == "e"]
    rows = [replace(row, name=f"e_{k}", module=f"blocks.{k}") for k in range(5)]
    rows += [replace(row, name=f"f_{k}", module=f"blocks.{k}") for k in range(5)]
    groups = groups_of(replace(kept, values=tuple(rows)))
    assert [[row.name for row in group] for group in groups.values()] == [
        [f"e_{k}" for k in range(5)], [f"f_{k}" for k in range(5)],
    ]  # fmt: skip
    by_rule = replace(rows[0], cannot_recompute="a random seed")
    assert groups_of(replace(kept, values=(by_rule,))) == {}


def test_a_value_that_nothing_can_stand_in_for_is_not_turned():
    """o is one result of an op that must not run twice, and whose tuple cannot be kept: without o there is no plan."""
    text = """
        x = input 4x8
        d = native_dropout x 0.5 True !must_save
        o = getitem d 0
        y = mul o 2
        t = tangent 4x8
        g = mul t o
        return y | g
    """
    (row,) = report_of(text, planner="save_all").saved
    assert (row.name, row.turned, row.reason) == ("o", None, "small, or nothing can be kept in its place")


def layered_chain(kept_names):
    """A report of four equal blocks that keeps what is named, and the plan."""
    graph = annotated(residual_chain(4))
    timeline = Timeline(graph, H100)
    kept = indices_of(timeline, kept_names)
    simulation = timeline.simulate(kept)
    plan = plan_from(timeline, kept, simulation, {})
    report = planned.report_of(graph, H100, plan, Budget(None), Options.parse({}), 0.0)
    values = [replace(row, module=f"blocks.{row.name[1]}") if row.name[0] in "hrm" else row for row in report.values]
    return replace(report, values=tuple(values)), Decided(timeline, kept, simulation)


def indices_of(timeline, names):
    index = {node.name: i for i, node in enumerate(timeline.flow.nodes)}
    return frozenset(map(index.get, names.split()))


def test_layers_that_are_treated_otherwise_are_exchanged_with_their_nearest_neighbour():
    """Of four equal blocks the second does not keep its exponential: simulated as if it were the first instead."""
    report, plan = layered_chain("x1 x2 x3 r0 r2 r3")
    after = plan.timeline.simulate(indices_of(plan.timeline, "x1 x2 x3 r1 r2 r3"))
    _, (found,) = layers_worth(report, plan)
    assert (found.stem, found.layer, found.other) == ("blocks.*", 1, 0)
    assert found.seconds == after.step_seconds - plan.simulation.step_seconds
    assert found.peak_bytes == after.peak_bytes - plan.simulation.peak_bytes
    assert report.exchanges == ()  # without modules there are no layers


def test_a_layer_of_every_treatment_is_simulated_as_its_neighbour_is_decided_and_that_one_as_it_is():
    report, plan = layered_chain("x1 x2 x3 r0 r2 r3")
    turns, _ = layers_worth(report, plan)
    assert [(turn.stem, turn.layer, turn.like) for turn in turns] == [("blocks.*", 1, 0), ("blocks.*", 0, 1)]
    for turn, names in zip(turns, ("x1 x2 x3 r0 r1 r2 r3", "x1 x2 x3 r2 r3"), strict=True):
        after = plan.timeline.simulate(indices_of(plan.timeline, names))
        assert turn.turned.seconds == after.step_seconds - plan.simulation.step_seconds
        assert turn.turned.saved_bytes == after.saved_bytes - plan.simulation.saved_bytes != 0
        assert turn.turned.peak_bytes == after.peak_bytes - plan.simulation.peak_bytes
    assert layers_worth(*layered_chain("x1 x2 x3 r0 r1 r2 r3")) == ((), ())  # all alike


def test_no_more_values_are_simulated_than_are_left_and_only_layers_that_are_treated_alike_share_what_is_found():
    report, plan = layered_chain("x1 x2 x3 r0 r2 r3")
    groups = groups_of(report)
    none, one, every = (turned_values(report, plan, groups, num_left) for num_left in (0, 1, 1000))
    assert none == {}
    assert (
        list(one) == ["r0", "r2", "r3"] and len(set(map(id, one.values()))) == 1
    )  # what the second block does not keep
    assert every.keys() == {row.name for rows in groups.values() for row in rows}
    for (_, _), rows in groups.items():
        assert len({id(every[row.name]) for row in rows}) == 1
    assert every["r1"] is not every["r0"]


def test_what_is_decided_differently_in_equal_layers_is_looked_at_first_whatever_its_size():
    report, _ = layered_chain("x1 x2 x3 r0 r2 r3")
    large = [replace(row, size_bytes=2**20) if row.name in ("m0", "m1", "m2", "m3") else row for row in report.values]
    first = by_importance(report, groups_of(replace(report, values=tuple(large))))
    assert [[row.name for row in rows] for rows in first[:2]] == [["r0", "r2", "r3"], ["r1"]]


def test_a_kept_value_that_was_not_simulated_says_whose_figure_it_shows_and_has_none_of_its_own(kept):
    """Blocks 0 and 2 keep e alike; only block 0 keeps f too, so that both are treated otherwise."""
    (row,) = [row for row in kept.saved if row.name == "e"]
    rows = [replace(row, name=f"e_{k}", module=f"blocks.{k}", reason="", turned=None) for k in (0, 2)]
    rows.append(replace(rows[0], name="f_0", op="aten.sin.default", module="blocks.0"))
    groups = groups_of(replace(kept, values=tuple(rows)))
    others = seen_elsewhere(groups, {"e_0": Turned(4e-4, 0, -(2**20), 0)})
    assert {name: other and other.name for name, other in others.items()} == {"f_0": None, "e_2": "e_0"}
    assert unseen_text(rows[1], kept, others["e_2"]) == (
        "not simulated here; in layer 0, decided otherwise, without it the step takes 400.0 us "
        "longer, for 1.00 MiB: 400 us per MiB"
    )
    assert unseen_text(rows[2], kept, None) == "not simulated by itself"
    again = replace(rows[1], decision="recomputed", again_seconds=3e-6, turned=None)
    assert unseen_text(again, kept, others["e_2"]) == "computing it again adds 3.0 us"
