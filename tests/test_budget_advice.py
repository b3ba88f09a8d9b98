"""Advice on other budgets, and on what the search missed."""

from dataclasses import replace

import pytest

from recompile.footprint import Footprint
from recompile.report.advice import advice_for
from recompile.report.budget_advice import missed_decisions
from recompile.report.explanation import Explanation, Turned
from recompile.report.html import breakable, explanation_html
from recompile.tradeoff import FrontierPoint
from tests.test_alternatives import among_others
from tests.test_report import report_of

GIB, MIB = 2**30, 2**20


@pytest.fixture(scope="module")
def kept():
    return report_of(planner="save_all")


def advice(*graphs, **more):
    return [str(advice) for advice in advice_for(Explanation(graphs, **more))]


def test_how_to_ask_for_less_and_for_a_faster_step_is_said_where_they_were_met(kept):
    assert advice(among_others(kept)) == [
        "A smaller peak can be had: 384 B, 128 B less, in a step of 30.0 us, 50.0% more. Ask for it: "
        'memory_budget="388B".',
        "A faster step can be had: 10.0 us, 50.0% less, at a peak of 700 B, 188 B more. Ask for it: "
        'memory_budget="707B".',
    ]


def test_less_is_three_plans_and_faster_is_two(kept):
    """A plan of 4 GiB and 22 ms among six others."""
    peaks = (1.5, 2.5, 3.1, 3.8, 4.5, 8.0)
    met = tuple(FrontierPoint(int(peak * GIB), (30 - 2 * peak) * 1e-3, 0, 0) for peak in peaks)
    smaller, faster = advice(replace(kept, peak_bytes=4 * GIB, step_seconds=0.022, frontier=met))
    assert smaller == (
        "A smaller peak can be had: 3.80 GiB, 204.80 MiB less, in a step of 22.40 ms, 1.8% more; 3.10 GiB, 921.60 MiB "
        "less, in a step of 23.80 ms, 8.2% more; the smallest that was met is 1.50 GiB, in a step of 27.00 ms, 22.7% "
        'more. Ask for one of them: memory_budget="3.84GiB", "3.14GiB" or "1.52GiB".'
    )
    assert faster == (
        "A faster step can be had: 21.00 ms, 4.5% less, at a peak of 4.50 GiB, 512.00 MiB more; the fastest that was "
        "met takes 14.00 ms, 36.4% less, at a peak of 8.00 GiB, 4.00 GiB more. Ask for one of them: "
        'memory_budget="4.55GiB" or "8.09GiB".'
    )


def test_a_step_that_is_about_five_percent_faster_stands_between_the_next_and_the_fastest(kept):
    peaks_and_times = ((4.1, 21.9), (4.6, 20.8), (8.0, 14.0))
    met = tuple(FrontierPoint(int(peak * GIB), ms * 1e-3, 0, 0) for peak, ms in peaks_and_times)
    (faster,) = advice(replace(kept, peak_bytes=4 * GIB, step_seconds=0.022, frontier=met))
    assert "had: 21.90 ms, 0.5% less, at a peak of 4.10 GiB, 102.40 MiB more; 20.80 ms, 5.5% less, at a peak" in faster
    assert faster.endswith('memory_budget="4.15GiB", "4.65GiB" or "8.09GiB".')


def test_a_budget_is_not_needed_where_the_gpu_has_room_for_the_fastest_plan(kept):
    """On an H100 of 80 GB; parameters and the like take 1 GiB."""
    met = (FrontierPoint(8 * GIB, 1e-2, 0, 0),)
    graph = replace(kept, hardware="h100", budget_bytes=4 * GIB, peak_bytes=4 * GIB, step_seconds=2e-2, frontier=met)
    graph = replace(graph, baselines=(("save_all", FrontierPoint(19 * GIB, 1.5e-2, 0, 0)),))
    needed = Footprint(GIB, 0, 0, 0, 4 * GIB, 0, 0, 0, 0)
    assert advice(graph, footprint=needed)[0] == (
        "No budget is needed to fit: of the GPU's 74.51 GiB all that training takes with the fastest plan that was met "
        "is 9.27 GiB, with everything kept 20.60 GiB. Unless something else needs the memory, leave memory_budget out: "
        "this planner then runs the fastest plan that it met, a step of 10.00 ms, 50.0% less "
        '("fastest plan met" in the table of the HTML report).'
    )
    large = replace(needed, parameter_bytes=70 * GIB)
    for other, footprint in ((graph, large), (graph, None), (replace(graph, budget_bytes=None), needed)):
        assert not any("No budget" in text for text in advice(other, footprint=footprint))


def test_decisions_that_the_search_missed_are_said_where_they_are_worth_something_together(kept):
    """Eleven masks of 2.5 us and one exponential of 6.2 us in a step of 23 ms, under a budget."""
    turned = Turned(-2.5e-6, 0, -4 * MIB, -4 * MIB)
    mask = replace(kept.saved[-1], op="aten.gt.Scalar", role="dropout mask", turned=turned)
    masks = [replace(mask, name=f"gt_{k}", module=f"blocks.{k}") for k in range(11)]
    other = replace(kept.saved[-1], decision="recomputed", turned=Turned(-6.2e-6, 0, 8 * MIB, 8 * MIB))
    over = replace(other, name="e_2", turned=Turned(-1e-3, 0, GIB, GIB))
    met = (FrontierPoint(GIB, 23e-3, 0, 0),)
    graph = replace(kept, values=(*masks, other, over), step_seconds=23e-3, peak_bytes=GIB, limit_bytes=GIB + 64 * MIB)
    graph = replace(graph, frontier=met)
    (found,) = missed_decisions(graph)
    assert found.seen == (
        "12 decisions would be faster the other way and fit, each simulated alone: 11 × dropout mask (gt) computed "
        "again, 2.5 us each; exp kept, 6.2 us. In sum 33.7 us, 0.1% of the step."
    )
    assert found.do.startswith("The search did not find this; ")
    assert list(missed_decisions(replace(graph, step_seconds=0.1))) == []  # less than 0.1 %
    assert list(missed_decisions(replace(graph, frontier=()))) == []  # nothing was searched for


def test_long_words_of_advice_break_after_underscores_and_short_ones_do_not():
    assert breakable("torch.nn.functional.scaled_dot_product_attention computes") == (
        "torch.nn.functional.scaled_<wbr>dot_<wbr>product_<wbr>attention computes"
    )
    assert breakable('memory_budget="4.58GiB"') == 'memory_budget="4.58GiB"'


def test_where_a_budget_goes_is_said_once_below_the_advice_that_names_one(kept):
    met = (FrontierPoint(384, 3e-5, 0, 1152), FrontierPoint(700, 1e-5, 128, 0))
    text = explanation_html(Explanation((replace(kept, step_seconds=2e-5, frontier=met),)))
    assert text.count("options={&quot;memory_budget&quot;: ...}") == 1
    assert "memory_budget is an option" not in explanation_html(Explanation((kept,)))
