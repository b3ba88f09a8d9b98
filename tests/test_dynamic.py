"""Budgets in bytes where sizes vary.

On CHAIN with a dynamic number of rows, where keeping e takes 128 bytes a row at the peak and rebuilding it 96.
"""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

import recompile
from recompile.annotation import annotate
from recompile.dynamic import has_outgrown, largest_factor, plan_at_sizes
from recompile.errors import BudgetError
from recompile.options import Options
from recompile.sizes import symbols_in
from recompile.torch_private import guard_at_most, upper_bounds
from tests.notation import CHAIN, H100, joint, plan_text

KEPT, REBUILT = "saved: e | recomputed: -", "saved: - | recomputed: a e"
BUDGET = 1034  # 1023 less than a per cent: 7 rows with e kept, 10 with e rebuilt


def decided(num_rows, budget=BUDGET, has_grown=False, prepare=lambda symbols: symbols):
    built = joint(CHAIN.replace("4x8", f"s{num_rows}x8"))
    symbols = prepare(symbols_in(built.module.graph))

    def annotate_at(sizes):
        return annotate(built.module, 1, H100, built.params, sizes)

    return plan_at_sizes(annotate_at, symbols, H100, Options.parse({"memory_budget": budget}), has_grown)


def numbers(decided):
    return list(decided.sizes.values.values()), [limit for _, limit in decided.limits]


def test_a_plan_for_the_traced_size_serves_larger_ones_while_it_fits():
    outcome = decided(4)
    assert (plan_text(outcome.plan), outcome.plan.peak_bytes) == (KEPT, 4 * 128)
    assert numbers(outcome) == ([4], [7])


def test_a_larger_traced_size_gets_a_smaller_plan():
    outcome = decided(9)
    assert (plan_text(outcome.plan), outcome.plan.peak_bytes) == (REBUILT, 9 * 96)
    assert numbers(outcome) == ([9], [10])


def test_a_size_for_which_nothing_fits_is_refused_with_the_size_and_the_floor():
    with pytest.raises(BudgetError, match=r"This is for the sizes s\d+=11\.") as error:
        decided(11)
    assert error.value.floor_bytes == 1067  # 11 rows of 96 bytes, and a per cent


@pytest.mark.parametrize(
    ("num_rows", "planned_at", "plan", "limit"),
    [(3, 6, KEPT, 7), (4, 8, REBUILT, 10), (8, 10, REBUILT, 10), (10, 10, REBUILT, 10)],
)
def test_once_outgrown_a_plan_leaves_room_for_twice_the_size_or_a_quarter_more_if_that_fits(
    num_rows, planned_at, plan, limit
):
    outcome = decided(num_rows, has_grown=True)
    assert (plan_text(outcome.plan), numbers(outcome)) == (plan, ([planned_at], [limit]))


@pytest.mark.parametrize("budget", [None, 0.0, 1.0])
def test_other_budgets_are_planned_at_the_traced_sizes_and_limit_nothing(budget):
    assert numbers(decided(4, budget)) == ([], [])


def test_a_declared_maximum_is_what_is_planned_for():
    def declared(symbols):
        return [replace(symbols[0], declared_max=10, upper_bound=10)]

    outcome = decided(4, prepare=declared)
    assert (plan_text(outcome.plan), numbers(outcome)) == (REBUILT, ([10], [10]))
    with pytest.raises(BudgetError, match=r"sizes s\d+=11\."):
        decided(4, prepare=lambda symbols: [replace(symbols[0], declared_max=11, upper_bound=11)])


def test_a_bound_from_the_users_checks_limits_growth():
    outcome = decided(4, prepare=lambda symbols: [replace(symbols[0], upper_bound=6)])
    assert numbers(outcome) == ([4], [6])


@pytest.mark.parametrize(("largest", "found"), [(1.0, 1.0), (1.5, 1.5), (6.1, 6.0), (8.0, 8.0), (1e9, 1024.0)])
def test_the_reach_is_found_to_a_sixteenth_of_a_doubling(largest, found):
    assert largest_factor(lambda factor: factor <= largest, 1.0) == found


def test_a_guard_limits_what_a_graph_serves():
    (rows,) = symbols_in(joint(CHAIN.replace("4x8", "s4x8")).module.graph)
    assert upper_bounds([rows.example]) == (f"{rows.name}<=None",)
    guard_at_most(rows, 7)
    assert upper_bounds([rows.example, 3]) == (f"{rows.name}<=7",)


def test_sizes_have_grown_when_one_exceeds_the_largest_earlier_limit():
    (rows,) = symbols_in(joint(CHAIN.replace("4x8", "s4x8")).module.graph)
    cases = {(): False, ((rows.name, 3),): True, ((rows.name, 3), (rows.name, 4)): False, (("s0", 1),): False}
    assert {earlier: has_outgrown([rows], earlier) for earlier in cases} == cases


# Through Inductor and its cache


def tanhs(x, w):
    for _ in range(8):
        x = (x @ w).tanh().exp()
    return x.square().mean()


def grown(budget, *rows):
    """Compile as a new process would and train on more and more rows. Per call: hits so far, limit, whether it fits."""
    torch._dynamo.reset()
    counters.clear()
    w = torch.eye(16).requires_grad_()
    compiled = torch.compile(tanhs, backend="recompile", options={"memory_budget": budget})
    outcomes = []
    for number in rows:
        x = torch.ones(number, 16)
        torch._dynamo.mark_dynamic(x, 0)
        peak_bytes = recompile.measure(lambda x=x: compiled(x, w).backward()).peak_bytes
        w.grad = None
        latest = list(recompile.explain(compiled).graphs)[-1]
        outcomes.append((counters["aot_autograd"]["autograd_cache_hit"], latest.limits[0][1], peak_bytes <= budget))
    return outcomes


def test_a_budget_in_bytes_holds_for_sizes_that_grow_in_this_process_and_from_the_cache(fresh_dynamo, empty_cache):
    """A call beyond a plan's limit, and a cached plan of a smaller size, get a plan of their own."""
    budget = 1_000_000
    (_, first, fits), (_, second, also_fits), (_, third, still_fits) = grown(budget, 100, 1600, 50)
    assert (fits, also_fits, still_fits) == (True, True, True)
    assert 100 < first < 1600 <= second == third
    assert grown(budget, 100, 1600, 50) == [(1, first, True), (2, second, True), (2, second, True)]
    [(num_hits, limit, fits)] = grown(budget, 1700)
    assert (num_hits, fits) == (0, True) and limit >= 1700
    with pytest.raises(recompile.BudgetError, match="This is for the sizes"):
        grown(budget, 100, 3_000)
