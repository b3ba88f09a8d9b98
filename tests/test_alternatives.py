"""The plan of a report among other plans: rows, the next steps, the budgets to ask for."""

import re
from dataclasses import replace

import pytest

from recompile.chip import chip_for
from recompile.decide import budget_bytes_for, predicted_bytes_within
from recompile.footprint import Footprint
from recompile.gpu import Kernel, Program
from recompile.report.alternatives import budget_text, fastest_by_budget, frontier_rows, next_steps, points_with
from recompile.report.explanation import Explanation
from recompile.report.html import explanation_html
from recompile.tradeoff import FrontierPoint
from recompile.units import parse_bytes
from tests.test_report import report_of


@pytest.fixture(scope="module")
def kept():
    return report_of(planner="save_all")


def among_others(kept):
    """A plan of 512 bytes and 20 us among two that were met and two that others would make."""
    met = (FrontierPoint(384, 3e-5, 0, 1152), FrontierPoint(700, 1e-5, 128, 0))
    baselines = (("stock", FrontierPoint(700, 1.5e-5, 256, 0)), ("save_all", FrontierPoint(900, 1.6e-5, 256, 0)))
    return replace(kept, step_seconds=2e-5, frontier=met, baselines=baselines)


def test_this_plan_is_a_row_of_the_trade_off_and_a_step_of_the_stairs(kept):
    graph = among_others(kept)
    assert [point.peak_bytes for point in points_with(graph)] == [384, 512, 700]
    text = frontier_rows(graph)
    assert text.count("<tr class=this>") == 1
    row = text[text.index("<tr class=this>") :].partition("</tr>")[0]
    assert "this plan" in row and "512 B" in row and "100.0%" in row  # over the fastest
    assert "PyTorch&#x27;s choice" in text and "everything kept" in text
    assert "<code>memory_budget=&quot;518B&quot;</code>" in row  # 512 and 1 %
    assert "<code>planner=&quot;save_all&quot;</code>" in text
    assert "<code>memory_budget=&quot;707B&quot;</code> or none" in text and text.count("fastest plan met</b>") == 1
    met = replace(graph, frontier=(*graph.frontier[:1], FrontierPoint(512, 2e-5, 128, 0), *graph.frontier[1:]))
    assert frontier_rows(met).count("512 B") == 1


def test_of_plans_that_the_same_budget_asks_for_the_fastest_is_a_row(kept):
    """Peaks that differ by less than 10 MiB, two decimals of a GiB."""
    peaks_and_times = ((3.1, 26), (3.7601, 24.02), (3.7602, 24.01), (4.0001, 22.5), (5.0, 20))
    met = tuple(FrontierPoint(int(peak * 2**30), ms * 1e-3, 0, 0) for peak, ms in peaks_and_times)
    graph = replace(kept, peak_bytes=4 * 2**30, step_seconds=22.6e-3, frontier=met)
    assert fastest_by_budget(graph) == [met[0], *met[2:]]
    assert fastest_by_budget(replace(graph, step_seconds=22.4e-3)) == [met[0], met[2], met[4]]  # this plan is faster


def test_the_next_plans_are_the_nearest_with_the_budget_to_ask_for(kept):
    graph = among_others(kept)
    assert next_steps(graph) == (
        'The next smaller plan: 384 B, 128 B less, in 30.0 us, +50.0% (memory_budget="388B"). '
        'The next faster one: 700 B, 188 B more, in 10.0 us, -50.0% (memory_budget="707B").'
    )
    assert next_steps(replace(graph, frontier=())) == "No plan was met that is smaller or faster."


def test_a_budget_that_is_asked_for_lets_the_plan_through(kept):
    """One percent of it is kept back, and two decimals are rounded up."""
    for peak in (1, 99, 384, 1023, 4_471_291_000):
        assert (
            predicted_bytes_within(budget_bytes_for(peak)) >= peak > predicted_bytes_within(budget_bytes_for(peak) - 1)
        )
    for peak in (384, 1023, 4_471_291_000, 12_345_678, 2**40):
        asked = parse_bytes(re.fullmatch(r'memory_budget="(.+)"', budget_text(peak))[1])
        assert peak <= predicted_bytes_within(asked) <= 1.02 * peak + 2


def test_the_first_figures_are_beside_what_they_are_compared_with(kept):
    text = explanation_html(Explanation((among_others(kept),)))
    assert "+100.0% time over the fastest plan found, 10.0 us" in text
    why = "(slower than the fastest: it writes and reads what is cheap to compute again)"
    assert f"+25.0% time over everything kept, 16.0 us and 900 B {why}" in text
    assert "+0.0% FLOP over the 2.72 kFLOP of a step without it" in text


def test_all_memory_of_training_stands_beside_the_peak(kept):
    needed = Footprint(2**30, 0, 0, 2**31, 512, 2**20, 0, 0, 0)
    text = explanation_html(Explanation((replace(kept, hardware="h100"),), footprint=needed))
    tile = text[text.index("all that training takes") :].partition("</div>")[0]
    assert "<b>3.00 GiB</b>" in tile and "4.0% of 74.51 GiB" in tile  # 3 of 80 GB
    assert "with everything kept" not in tile
    for peak_bytes, said in ((2**31, "5.15 GiB with everything kept: needs no budget to fit"),
                             (2**37, "134.93 GiB with everything kept: more than there is")):  # fmt: skip
        graph = replace(kept, hardware="h100", baselines=(("save_all", FrontierPoint(peak_bytes, 1.0, 0, 0)),))
        assert said in explanation_html(Explanation((graph,), footprint=needed))
    assert text.index("peak of the step") < text.index("all that training takes") < text.index("kept for backward</dt>")


def test_the_times_of_this_report_and_of_inductors_program_are_reconciled(kept):
    """A kernel of 1 ms that spills 1 GiB in another 0.5 ms."""
    kernel = Kernel("k", "forward", False, (), 0, 0, 1e-3, 0, 2**30, 5e-4)
    graph = replace(kept, hardware="h100", step_seconds=1.4e-3)
    program = Program(chip_for("h100"), (kernel,), 1, 1, 1, 1, "", "")
    text = explanation_html(Explanation((graph,), program=program)).partition("Beside Inductor")[2]
    assert "step, all traffic counted</th><td class=num>1.40 ms</td><td class=num>1.50 ms</td>" in text
    assert "does not count the 1.00 GiB" in text and "trust these two. They differ by 7.1%" in text
    for other, kernels in ((replace(graph, hardware="mine"), (kernel,)), (graph, (replace(kernel, spilled_bytes=0),))):
        text = explanation_html(Explanation((other,), program=replace(program, kernels=kernels)))
        assert "all traffic counted" not in text and "Its peak is a replay of its allocations" in text
