"""What no planner may compute again, what none may keep, and what users' policies say."""

import pytest

from recompile.errors import PlanError
from tests.notation import CHAIN, plan_text
from tests.test_planners import ALL, BOUNDARY, DROPOUT, KEPT, REBUILT, SHARES, TRUE_RANDOM, plan_of


def test_dropout_saves_its_seeds_and_never_draws_them_again():
    for budget in SHARES:
        assert plan_text(plan_of(DROPOUT, budget)) == "saved: s d | recomputed: k r m"


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("meta", "saved: m d | recomputed: -"),
        (
            "cpu",
            "saved: r d | recomputed: m",
        ),  # a library has written r; to write bools takes C++ longer than to compare
    ],
)
def test_random_numbers_without_a_seed_are_kept_as_they_are_or_by_the_mask_made_of_them(device, expected):
    for budget in SHARES:
        assert plan_text(plan_of(TRUE_RANDOM, budget, device=device)) == expected


@pytest.mark.parametrize("planner", ALL)
def test_no_planner_draws_seeds_again_whatever_the_budget(planner):
    plans = [plan_of(DROPOUT, budget, planner) for budget in SHARES]
    assert "s" not in {choice.node.name for plan in plans for choice in plan.recomputed}


@pytest.mark.parametrize(
    ("op", "policy", "budget", "expected"),
    [
        ("e = exp a", "!must_recompute", None, BOUNDARY),
        ("e = exp a", "!must_save", 0.0, KEPT),
        ("a = mm x w", "!must_save", 0.0, KEPT),  # a is not run again, which is what was asked for
        ("e = exp a", "!prefer_save", 0.0, REBUILT),
        ("e = exp a", "!prefer_recompute", None, KEPT),
    ],
)
def test_what_the_user_s_policy_says_is_done_and_what_it_prefers_is_a_hint(op, policy, budget, expected):
    assert plan_text(plan_of(CHAIN.replace(op, f"{op} {policy}"), budget)) == expected


def test_must_save_on_everything_saves_the_bases_of_views():
    text = """
        x = input 4x8 
        w = param 8x8
        v = t w !must_save            # a view of an input
        a = mm x v !must_save
        b = view a [32] !must_save    # a view of a
        e = exp b !must_save
        y = sum.default e !must_save
        t = tangent 32
        g = mul t e
        h = mul g b
        gx = mm x v
        return y | h gx
    """  # fmt: skip
    assert plan_text(plan_of(text, 0.0)) == "saved: a e | recomputed: -"


@pytest.mark.parametrize("planner", ALL)
def test_a_contradiction_names_both_nodes_both_lines_and_the_way_out(planner):
    text = """
        x = input 4x8
        s = prims.inductor_seed cpu !must_recompute @model.py:3
        r = prims.inductor_random [4,8] s 'rand' !must_recompute @model.py:4
        y = mul x r
        t = tangent 4x8
        g = mul t r
        return y | g
    """
    with pytest.raises(PlanError) as raised:
        plan_of(text, planner=planner)
    for part in ("r (model.py:4)", "s (model.py:3)", "MUST_RECOMPUTE", "drawn again", "policy of one of them"):
        assert part in str(raised.value)
