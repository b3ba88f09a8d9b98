"""The cut against two oracles, enumeration and networkx, and on graphs that are long or wide."""

from itertools import combinations

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompile.mincut import INFINITE, LARGEST_TOTAL, ContradictionError, CutChoice, choose_saved, scale_to_integers

MAX_VALUES = 7
COSTS = st.one_of(st.integers(0, 9), st.just(INFINITE))


@st.composite
def problems(draw):
    """Recompute costs, save costs, uses (a value is used by later ones), needs."""
    count = draw(st.integers(1, MAX_VALUES))
    recompute = draw(st.lists(COSTS, min_size=count, max_size=count))
    save = draw(st.lists(COSTS, min_size=count, max_size=count))
    pairs = list(combinations(range(count), 2))
    uses = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    needed = draw(st.lists(st.integers(0, count - 1), unique=True))
    return recompute, save, sorted(uses), sorted(needed)


def rebuilt(saved, uses, needed):
    """What must be computed again to have all that is needed, given what is saved."""
    pending, found = list(needed), set()
    while pending:
        value = pending.pop()
        if value not in saved and value not in found:
            found.add(value)
            pending.extend(v for v, user in uses if user == value)
    return found


def cost_of(saved, recompute, save, uses, needed):
    costs = [save[v] for v in saved] + [recompute[v] for v in rebuilt(saved, uses, needed)]
    return None if INFINITE in costs else sum(costs)


def cheapest(recompute, save, uses, needed):
    """The least cost over all sets of saved values; None if each needs what is forbidden."""
    values = range(len(save))
    choices = [set(saved) for size in range(len(save) + 1) for saved in combinations(values, size)]
    costs = [cost_of(saved, recompute, save, uses, needed) for saved in choices]
    return min((cost for cost in costs if cost is not None), default=None)


def cut_by_networkx(recompute, save, uses, needed):
    graph = networkx.DiGraph()
    graph.add_nodes_from(("source", "sink"))

    def add(start, end, cost):  # networkx takes an edge without capacity as infinite
        graph.add_edge(start, end, **({} if cost == INFINITE else {"capacity": cost}))

    for value, (again, keep) in enumerate(zip(recompute, save, strict=True)):
        add("source", ("enter", value), again)
        add(("enter", value), ("leave", value), keep)
    for value, user in uses:
        add(("leave", value), ("enter", user), INFINITE)
    for value in needed:
        add(("leave", value), "sink", INFINITE)
    return networkx.minimum_cut(graph, "source", "sink")[0]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(problems())
def test_no_set_of_saved_values_is_cheaper_than_the_chosen_one(problem):
    expected = cheapest(*problem)
    if expected is None:
        with pytest.raises(ContradictionError):
            choose_saved(*problem)
        return
    choice = choose_saved(*problem)
    assert (choice.cost, cost_of(set(choice.saved), *problem)) == (expected, expected)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(problems())
def test_the_cost_is_the_minimum_cut_of_networkx(problem):
    try:
        choice = choose_saved(*problem)
    except ContradictionError:
        with pytest.raises(networkx.NetworkXUnbounded):
            cut_by_networkx(*problem)
    else:
        assert choice.cost == cut_by_networkx(*problem)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(problems())
def test_a_contradiction_leads_from_a_pinned_value_through_unsavable_ones_to_a_need(problem):
    recompute, save, uses, needed = problem
    try:
        choose_saved(*problem)
    except ContradictionError as error:
        assert recompute[error.path[0]] == INFINITE
        assert all(save[value] == INFINITE for value in error.path)
        assert set(zip(error.path, error.path[1:], strict=False)) <= set(uses)
        assert error.path[-1] in needed


def test_a_contradiction_names_the_path():
    with pytest.raises(ContradictionError, match=r"values \[0, 2\] can be neither saved nor recomputed") as raised:
        choose_saved([INFINITE, 1, 1], [INFINITE, 1, INFINITE], [(0, 1), (0, 2)], [1, 2])
    assert raised.value.path == (0, 2)


def test_a_forbidden_value_that_nothing_needs_is_no_contradiction():
    assert choose_saved([INFINITE, 3], [INFINITE, 2], [], [1]) == CutChoice(cost=2, saved=(1,))


@pytest.mark.parametrize(
    ("problem", "saved"),
    [
        (([5], [0], [], []), ()),  # needed by nothing
        (([5, 5], [0, 1], [(0, 1)], [1]), (1,)),  # 0 is only needed to rebuild 1, which is saved
    ],
)
def test_what_is_free_to_save_is_not_saved_when_backward_never_reads_it(problem, saved):
    assert choose_saved(*problem).saved == saved


@pytest.mark.parametrize(
    ("problem", "choice"),
    [
        (([2], [2], [], [0]), CutChoice(2, ())),  # as dear to save as to recompute: recomputed
        (([9, 0], [2, 2], [(0, 1)], [1]), CutChoice(2, (0,))),  # 1 is rebuilt from 0 for nothing: saved earliest
        (([0, 0], [0, 0], [(0, 1)], [0, 1]), CutChoice(0, ())),
        (([9, 9, 0], [1, 1, 2], [(0, 2), (1, 2)], [2]), CutChoice(2, (0, 1))),
    ],
)
def test_of_equally_dear_choices_the_one_that_recomputes_most_is_taken(problem, choice):
    assert choose_saved(*problem) == choice


def test_the_order_of_uses_and_needs_and_repetitions_do_not_matter():
    recompute, save = [INFINITE, 4, 4, 4], [3, 2, 2, 3]
    uses = [(0, 1), (0, 2), (1, 3), (2, 3)]
    expected = choose_saved(recompute, save, uses, [2, 3])
    assert choose_saved(recompute, save, uses[::-1] + uses, [3, 2, 3]) == expected


@pytest.mark.parametrize(
    ("recompute", "save", "message"),
    [
        ([1], [1, 2], "1 recompute costs but 2 save costs"),
        ([-1], [1], "non-negative"),
        ([1], [-1], "non-negative"),
        ([LARGEST_TOTAL], [1], f"at most {LARGEST_TOTAL}; see scale_to_integers"),
    ],
)
def test_costs_out_of_range_are_refused(recompute, save, message):
    with pytest.raises(ValueError, match=message):
        choose_saved(recompute, save, [], [0])


def test_costs_up_to_the_largest_total_are_exact():
    half = LARGEST_TOTAL // 2
    assert choose_saved([INFINITE, half], [half, INFINITE], [(0, 1)], [1]) == CutChoice(LARGEST_TOTAL, (0,))


# Scaling


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.one_of(st.none(), st.just(0.0), st.floats(1e-12, 1e6))))
def test_scaled_costs_fit_and_keep_their_order(seconds):
    scaled = scale_to_integers(seconds)
    finite = [(value, cost) for value, cost in zip(seconds, scaled, strict=True) if value is not None]
    assert [cost == INFINITE for cost in scaled] == [value is None for value in seconds]
    assert sum(cost for _, cost in finite) <= LARGEST_TOTAL
    assert all((cost == 0) == (value == 0) for value, cost in finite)
    ordered = [cost for _, cost in sorted(finite)]
    assert ordered == sorted(ordered)


def test_scaled_costs_keep_their_ratio_and_nothing_positive_becomes_free():
    one, three, tiny, free, forbidden = scale_to_integers([1.0, 3.0, 1e-15, 0.0, None])
    assert (tiny, free, forbidden) == (1, 0, INFINITE)
    assert three / one == pytest.approx(3, rel=1e-8)
    assert one == pytest.approx(LARGEST_TOTAL / 4, rel=1e-8)


# Long and wide graphs: the whole point is that they are solved at all


def test_a_chain_of_3000_needed_values_saves_those_that_must_not_be_recomputed():
    count, every = 3000, 10
    recompute = [INFINITE if v % every == 0 else 1 for v in range(count)]
    choice = choose_saved(recompute, [2] * count, [(v, v + 1) for v in range(count - 1)], range(count))
    assert choice == CutChoice(cost=300 * 2 + 2700 * 1, saved=tuple(range(0, count, every)))


def test_a_chain_of_3000_values_of_which_the_last_is_needed_is_cut_at_its_cheapest_place():
    count = 3000
    save = [50] * count
    save[2990] = 3  # 3 to save and nine values of 1 to rebuild
    choice = choose_saved([INFINITE] + [1] * (count - 1), save, [(v, v + 1) for v in range(count - 1)], [count - 1])
    assert choice == CutChoice(cost=3 + 9, saved=(2990,))


def test_32_parallel_chains_are_each_cut_at_their_cheapest_place():
    chains, length = 32, 100
    first = [INFINITE] + [1] * (length - 1)
    save = [50] * length
    save[90] = 3
    uses = [(c * length + v, c * length + v + 1) for c in range(chains) for v in range(length - 1)]
    needed = [c * length + length - 1 for c in range(chains)]
    choice = choose_saved(first * chains, save * chains, uses, needed)
    assert choice == CutChoice(chains * (3 + 9), tuple(c * length + 90 for c in range(chains)))


def test_one_value_with_1000_users_is_saved_instead_of_them():
    users = range(1, 1001)
    choice = choose_saved([INFINITE] + [1] * 1000, [10] + [2] * 1000, [(0, user) for user in users], users)
    assert choice == CutChoice(cost=10 + 1000, saved=(0,))
