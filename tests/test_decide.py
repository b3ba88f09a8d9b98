"""From options to a plan: shares and bytes become a budget, and what a planner returns is checked."""

from dataclasses import replace

import pytest

from recompile.decide import decide
from recompile.errors import BudgetError, PlanError
from recompile.joint import Budget
from recompile.options import Options
from recompile.planner import mincut, save_all
from tests.notation import CHAIN, H100, annotated, plan_text

REBUILT = "saved: - | recomputed: a e"


def test_a_share_lies_between_the_floor_and_the_peak_of_the_fastest_plan():
    plan, budget = decide(annotated(CHAIN), H100, Options.parse({"memory_budget": 0.5}))
    assert (budget, plan_text(plan)) == (Budget(384 + (512 - 384) // 2), REBUILT)
    assert decide(annotated(CHAIN), H100, Options.parse({"memory_budget": 1.0}))[1] == Budget(512)
    assert decide(annotated(CHAIN), H100, Options.parse({"memory_budget": None}))[1] == Budget(None)


def test_a_budget_in_bytes_keeps_one_percent_back_and_the_floor_that_is_named_is_granted():
    assert decide(annotated(CHAIN), H100, Options.parse({"memory_budget": 606}))[1] == Budget(600)
    with pytest.raises(
        BudgetError, match=r"memory_budget=384 B: .* 388 B \(388 bytes\).* Raise memory_budget"
    ) as raised:
        decide(annotated(CHAIN), H100, Options.parse({"memory_budget": 384}))
    assert raised.value.floor_bytes == 388  # 384 x 1.01, rounded up
    plan, _ = decide(annotated(CHAIN), H100, Options.parse({"memory_budget": 388}))
    assert plan.peak_bytes == 384


def test_a_planner_of_ones_own_that_breaks_its_contract_is_told_so():
    def ignores_the_budget(joint, hardware, budget):
        return save_all(joint, hardware, Budget(None))

    for planner, told in (
        (ignores_the_budget, "peak of 512 bytes for a budget of 396"),
        (lambda *_: None, "a NoneType"),
    ):
        with pytest.raises(PlanError, match=told):
            decide(annotated(CHAIN), H100, Options.parse({"planner": planner, "memory_budget": 400}))


@pytest.mark.parametrize("planner", ["mincut", "stock", "save_all", "full", "exact"])
def test_the_plan_of_every_planner_carries_the_same_bounds(planner):
    """12 us, six kernels, are needed with e kept; 384 bytes are the least, with another matmul. See test_bounds."""
    plan, _ = decide(annotated(CHAIN), H100, Options.parse({"planner": planner}))
    assert (plan.lower_bound_seconds, plan.floor_bound_bytes) == (pytest.approx(12e-6, rel=1e-4), 384)


def test_a_tighter_budget_has_a_higher_bound_and_a_planner_s_own_figures_do_not_change_it():
    def claims_to_take_no_time(joint, hardware, budget):
        return replace(mincut(joint, hardware, budget), step_seconds=0.0)

    planners = ("mincut", mincut, claims_to_take_no_time)
    options = [Options.parse({"memory_budget": 389, "planner": planner}) for planner in planners]
    bounds = {decide(annotated(CHAIN), H100, option)[0].lower_bound_seconds for option in options}
    assert list(bounds) == pytest.approx([14e-6], rel=0.01)
