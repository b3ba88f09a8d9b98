"""The exact planner against enumeration of all plans."""

import pytest
from hypothesis import HealthCheck, assume, given, settings

from recompile.errors import BudgetError, PlanError
from recompile.joint import Budget
from recompile.planner.exact import MAX_NODES, exact, optimum
from recompile.planner.mincut import forget
from recompile.timeline import Timeline
from tests.notation import CHAIN, H100, annotated, plan_text
from tests.random_graphs import joint_texts, legal_sets
from tests.test_planners import DROPOUT, residual_chain
from tests.test_timeline import TWO_RESULTS

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)


def plans_of(text):
    """The annotated graph and (seconds, peak) of every plan."""
    graph = annotated(text.replace(" cpu\n", " meta\n"), device="meta")
    timeline = Timeline(graph, H100)
    sets = legal_sets(graph, timeline.flow) or []
    simulated = [timeline.simulate(saved) for saved in sets]
    return graph, [(plan.step_seconds, plan.peak_bytes) for plan in simulated]


def check(graph, plans):
    forget()
    peaks = sorted({peak for _, peak in plans})
    for limit in (None, peaks[0], peaks[len(peaks) // 2], (peaks[0] + peaks[-1]) // 2):
        best = min(plan for plan in plans if limit is None or plan[1] <= limit)
        plan = exact(graph, H100, Budget(limit))
        assert plan.step_seconds == pytest.approx(best[0], rel=1e-8) and plan.peak_bytes <= best[1]
    with pytest.raises(BudgetError) as raised:
        exact(graph, H100, Budget(peaks[0] - 1))
    assert raised.value.floor_bytes == peaks[0]


@RELAXED
@given(text=joint_texts())
def test_of_a_random_graph_the_best_of_all_plans_is_found(text):
    graph, plans = plans_of(text)
    assume(plans)
    check(graph, plans)


@pytest.mark.parametrize(
    "text", [CHAIN, DROPOUT, TWO_RESULTS, residual_chain(3)], ids=["chain", "dropout", "two results", "residual"]
)
def test_of_a_known_graph_the_best_of_all_plans_is_found(text):
    check(*plans_of(text))


def test_the_plan_is_a_plan_like_any_other():
    assert plan_text(exact(annotated(CHAIN), H100, Budget(384))) == "saved: - | recomputed: a e"


def test_branches_that_cannot_win_are_not_simulated():
    forget()
    graph = annotated(residual_chain(3))
    flow = Timeline(graph, H100).flow
    found = optimum(graph, H100, Budget(None))
    assert 10 * found.num_plans < len(legal_sets(graph, flow, most=12))


def test_a_graph_that_is_too_large_is_refused_with_its_size_and_the_limit():
    with pytest.raises(PlanError, match=rf"at most {MAX_NODES} nodes, and this one has 1\d\d: use 'mincut'"):
        exact(annotated(residual_chain(10)), H100, Budget(None))
