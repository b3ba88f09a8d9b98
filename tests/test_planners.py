"""Plans as text on small graphs, for every planner and several budgets; peaks are counted by hand in test_timeline."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recompile.dataflow import dataflow_of
from recompile.decide import decide
from recompile.errors import BudgetError, PlanError
from recompile.joint import Budget, Choice, Plan
from recompile.options import Options
from recompile.planner import full, mincut, save_all, stock
from recompile.planner.mincut import forget
from recompile.planner.separators import separators
from tests.notation import CHAIN, H100, annotated, plan_text

ALL = {"mincut": mincut, "stock": stock, "save_all": save_all, "full": full}

# Backward reads e. Saved, it is alive with y, t and g2: 4 x 128 bytes. Rebuilt from the inputs, it is not: 3 x 128.
KEPT, REBUILT = "saved: e | recomputed: -", "saved: - | recomputed: a e"
BOUNDARY = "saved: a | recomputed: e"  # as fast and large as KEPT, but e runs twice for nothing

DROPOUT = """
    x = input 256x1024
    w = param 1024x1024
    s = prims.inductor_seeds 1 cpu
    k = prims.inductor_lookup_seed s 0
    a = mm x w
    r = prims.inductor_random [256,1024] k 'rand'
    m = gt.Scalar r 0.5
    d = mul a m
    y = mm d w
    t = tangent 256x1024
    gd = mm t w'
    ga = mul gd m
    gx = mm ga w'
    gw = mm d' t
    return y | gx gw
"""
TRUE_RANDOM = DROPOUT.replace("k = prims.inductor_lookup_seed s 0\n", "").replace(
    "s = prims.inductor_seeds 1 cpu\n", ""
)
TRUE_RANDOM = TRUE_RANDOM.replace("prims.inductor_random [256,1024] k 'rand'", "rand_like a")
SHARES = (None, 0.9, 0.5, 0.1, 0.0)


@pytest.mark.parametrize("planner", ["save_all", "mincut", "stock"])
def test_a_result_that_only_backward_reads_is_saved_when_its_op_runs_in_forward(planner):
    """Like attention's log-sum-exp: without it backward would run the whole op again."""
    text = """
        x = input 256x1024
        s = sort x -1
        v = getitem s 0
        i = getitem s 1
        y = sin v
        t = tangent 256x1024
        g = gather t -1 i
        return y | g
    """
    assert plan_text(plan_of(text, planner=planner)) == "saved: i | recomputed: -"


def residual_chain(blocks, width=256):
    """x + exp(x u) v, so many times; per block backward reads its input and the exponential, four times as large."""
    forward, backward, gradients = [f"x0 = input {width}x8"], [f"t{blocks} = tangent {width}x8"], []
    for i in range(blocks):
        forward += [f"u{i} = param 8x32", f"v{i} = param 32x8", f"h{i} = mm x{i} u{i}", f"r{i} = exp h{i}"]
        forward += [f"m{i} = mm r{i} v{i}", f"x{i + 1} = add x{i} m{i}"]
    for i in reversed(range(blocks)):
        backward += [f"gv{i} = mm r{i}' t{i + 1}", f"gr{i} = mm t{i + 1} v{i}'", f"gh{i} = mul gr{i} r{i}"]
        backward += [f"gu{i} = mm x{i}' gh{i}", f"gx{i} = mm gh{i} u{i}'", f"t{i} = add t{i + 1} gx{i}"]
        gradients = [f"gu{i}", f"gv{i}", *gradients]
    return "\n".join([*forward, *backward, f"return x{blocks} | t0 {' '.join(gradients)}"])


def plan_of(text, budget=None, planner="mincut", device="cpu"):
    return decide(annotated(text, device=device), H100, Options.parse({"memory_budget": budget, "planner": planner}))[0]


def within(text, peak_bytes, planner=mincut):
    """The plan for a peak in bytes, by a search of its own."""
    forget()
    return planner(annotated(text), H100, Budget(peak_bytes))


def floor_of(text, planner=mincut):
    with pytest.raises(BudgetError) as raised:
        within(text, 0, planner)
    return raised.value.floor_bytes


# What each planner saves


@pytest.mark.parametrize(
    ("planner", "kept", "smallest"),
    [("mincut", KEPT, REBUILT), ("stock", KEPT, REBUILT), ("save_all", KEPT, KEPT), ("full", BOUNDARY, BOUNDARY)],
)
def test_the_fastest_and_the_smallest_plan_of_every_planner(planner, kept, smallest):
    assert (plan_text(plan_of(CHAIN, None, planner)), plan_text(plan_of(CHAIN, 0.0, planner))) == (kept, smallest)


def test_full_keeps_block_boundaries_and_rebuilds_the_blocks():
    assert plan_text(plan_of(residual_chain(3), planner="full")) == "saved: x1 x2 | recomputed: h0 r0 h1 r1 h2 r2"


@pytest.mark.parametrize("planner", ["save_all", "mincut", "stock"])
def test_without_a_budget_what_backward_reads_is_kept_and_nothing_recomputed(planner):
    assert plan_text(plan_of(residual_chain(3), planner=planner)) == "saved: r0 x1 r1 x2 r2 | recomputed: -"


def test_a_plan_knows_its_bytes_and_its_flop():
    kept, rebuilt = plan_of(CHAIN), plan_of(CHAIN, 0.0)
    assert (kept.peak_bytes, kept.saved_bytes, kept.recompute_flops) == (512, 128, 0)
    # 2 x 4 x 8 x 8 for a, 20 x 32 for e
    assert (rebuilt.peak_bytes, rebuilt.saved_bytes, rebuilt.recompute_flops) == (384, 0, 512 + 640)
    assert kept.step_seconds < rebuilt.step_seconds


def test_a_choice_that_prices_did_not_decide_has_a_reason():
    text = CHAIN.replace("return y |", "return y e |")
    reasons = {choice.node.name: choice.reason for choice in plan_of(text, planner="save_all").saved}
    assert reasons["primals_2"] == "an input of the graph: held by the caller anyway"
    assert reasons["e"] == "an output of forward: allocated anyway"
    reasons = {choice.node.name: choice.reason for choice in plan_of(DROPOUT).saved}
    assert reasons["s"] == "must not be recomputed: random seeds: drawn again they would differ"
    assert [choice.reason for choice in plan_of(CHAIN, 0.0).recomputed] == ["", ""]


def test_a_graph_whose_backward_needs_nothing_saves_nothing():
    text = "x = input 4\ny = mul x 2\nt = tangent 4\ng = mul t 2\nreturn y | g"
    assert {plan_text(plan_of(text, planner=planner)) for planner in ALL} == {"saved: - | recomputed: -"}


# Budgets in bytes


@pytest.mark.parametrize(
    ("peak_bytes", "expected"),
    [(384, REBUILT), (385, REBUILT), (511, REBUILT), (512, KEPT), (2**40, KEPT), (None, KEPT)],
)
def test_the_fastest_plan_that_fits_is_taken(peak_bytes, expected):
    assert plan_text(within(CHAIN, peak_bytes)) == expected


def test_one_byte_below_the_floor_is_refused_with_the_floor():
    assert [floor_of(CHAIN, planner) for planner in ALL.values()] == [384, 384, 512, 512]
    with pytest.raises(BudgetError, match=r"383 bytes asked, 384 is the smallest peak") as raised:
        within(CHAIN, 383)
    assert raised.value.floor_bytes == 384


@pytest.mark.parametrize("planner", ALL.values(), ids=ALL)
def test_the_floor_is_reachable_and_one_byte_less_is_not(planner):
    text = residual_chain(4)
    floor = floor_of(text, planner)
    assert within(text, floor, planner).peak_bytes == floor
    with pytest.raises(BudgetError) as raised:
        within(text, floor - 1, planner)
    assert raised.value.floor_bytes == floor


def test_over_a_sweep_no_peak_exceeds_its_budget_and_less_memory_is_never_more_peak_nor_faster():
    text = residual_chain(6)
    floor, top = floor_of(text), within(text, None).peak_bytes
    budgets = [floor + (top - floor) * step // 12 for step in range(13)]
    plans = [within(text, budget) for budget in budgets]
    peaks = [plan.peak_bytes for plan in plans]
    seconds = [plan.step_seconds for plan in plans]
    assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))
    assert peaks == sorted(peaks)
    assert all(slow >= fast * (1 - 1e-9) for slow, fast in itertools.pairwise(seconds))
    assert (len(set(peaks)) >= 5, floor < top / 2) == (True, True)  # the memory between the two ends is used


# What is free


def test_a_value_that_is_an_output_of_forward_is_kept_at_every_budget():
    text = CHAIN.replace("return y |", "return y e |")
    for budget in SHARES:
        plan = plan_of(text, budget)
        assert (plan_text(plan), plan.saved_bytes) == (KEPT, 0)


def test_an_output_that_backward_never_reads_is_not_called_saved():
    text = """
        x = input 4x8
        w = param 8x8
        a = mm x w
        b = mm a w
        y = exp b
        t = tangent 4x8
        g = mul t b
        h = mm g w'
        return a y | h
    """
    for planner in ("mincut", "stock", "save_all"):
        assert plan_text(plan_of(text, planner=planner)) == "saved: b | recomputed: -"


def test_what_is_rebuilt_inside_its_reader_from_an_output_is_not_saved():
    text = CHAIN.replace("return y |", "return y a |")  # g3 reads a instead of e: as fast, and e is not kept
    assert plan_text(plan_of(text)) == "saved: a | recomputed: e"


def test_views_of_one_value_are_kept_by_it_once():
    text = """
        x = input 4x8
        w = param 8x8
        a = mm x w
        s = split a 2
        p = getitem s 0
        q = getitem s 1
        y = sum.default a
        t = tangent 2x8
        g = mul t p
        h = mul g q
        return y | h
    """
    for planner in ("mincut", "stock", "save_all"):
        plan = plan_of(text, planner=planner)
        assert (plan_text(plan), plan.saved_bytes) == ("saved: a | recomputed: -", 128)


# Block boundaries


def test_the_boundaries_of_a_residual_chain_are_its_sums():
    flow = dataflow_of(annotated(residual_chain(4)))
    # Nothing in forward reads x4. x0, an input, is as alive in the first block as x1 in the second.
    assert " ".join(flow.nodes[i].name for i in separators(flow)) == "x1 x2 x3"


def test_of_boundaries_with_no_library_call_between_them_the_smallest_then_the_first_is_taken():
    text = """
        x = input 4x8
        w = param 8x8
        v = param 8x8 bfloat16
        a = mm x w
        c = prims.convert_element_type a torch.bfloat16
        d = mul c 2
        y = mm d v
        z = exp y
        return z |
    """
    flow = dataflow_of(annotated(text))
    assert " ".join(flow.nodes[i].name for i in separators(flow)) == "c y"


# A planner of the user's own


def keep_only(*names, recompute=()):
    """A planner that saves the nodes of these names and says that it recomputes those others."""

    def planner(joint, hardware, budget):
        node = {node.name: node for node in joint.nodes}
        kept = tuple(Choice(node[name], "by hand") for name in names)
        return Plan(kept, tuple(Choice(node[name], "by hand") for name in recompute), 1000, 0, 0, 0.0)

    return planner


def test_a_function_is_a_planner_and_sees_bytes_only():
    asked = []

    def planner(joint, hardware, budget):
        asked.append(budget.peak_bytes)
        return save_all(joint, hardware, Budget(None))

    assert plan_text(plan_of(CHAIN, 0.5, planner)) == KEPT
    assert asked == [None, 0, 512]  # its fastest, its smallest, and what half way means


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (keep_only("d", recompute=["s", "k", "r", "m"]), "recomputes s, which must not be recomputed: random seeds"),
        (keep_only("d"), "recomputes s, which must not be recomputed: random seeds"),  # whether it says so or not
    ],
)
def test_a_planner_that_leaves_out_what_must_be_saved_is_refused(planner, message):
    with pytest.raises(PlanError, match=f"planner '.*planner' {message}"):
        plan_of(DROPOUT, planner=planner)


def test_a_planner_that_saves_what_cannot_be_saved_is_refused():
    text = "x = input 4x8\nv = var_mean.dim x [1]\nm = getitem v 0\nt = tangent 4\ng = mul t m\nreturn m | g"
    with pytest.raises(PlanError, match=r"planner '.*planner' saves v, which cannot be saved: several outputs"):
        plan_of(text, planner=keep_only("v"))


# The same plan every time

PRINT_PLANS = """
from tests.test_planners import DROPOUT, plan_of, plan_text, residual_chain
for text in (residual_chain(6), DROPOUT):
    for budget in (None, 0.4, 0.0):
        plan = plan_of(text, budget)
        print(plan_text(plan), plan.peak_bytes, plan.step_seconds)
"""


def plans_under_hash_seed(seed):
    root, environment = Path(__file__).parents[1], {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", PRINT_PLANS]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True).stdout


def test_two_processes_with_two_hash_seeds_make_the_same_plans():
    first, second = plans_under_hash_seed("1"), plans_under_hash_seed("2")
    assert (first, first.count("saved:")) == (second, 6)


def test_budgets_asked_in_any_order_get_the_same_plans():
    text = residual_chain(4)
    budgets = [None, 200_000, 120_000, 150_000]
    alone = {budget: plan_text(within(text, budget)) for budget in budgets}
    graph = annotated(text)
    forget()
    together = {budget: plan_text(mincut(graph, H100, Budget(budget))) for budget in reversed(budgets)}
    assert together == alone
