"""The chart of the trade-off: its names stand where nothing else is drawn."""

import re
from dataclasses import replace

import pytest

from recompile.report.alternatives import frontier_rows, points_with
from recompile.report.charts import Frame
from recompile.report.frontier_chart import BASELINES, STAIRS, UPRIGHT, Box, around, frontier_chart, room_for
from recompile.tradeoff import FrontierPoint
from tests.test_report import report_of

FRAME = Frame(340, 300, 52, 16, 56, 42, (0.0, 1.0), (0.0, 1.0))


@pytest.fixture(scope="module")
def kept():
    return report_of(planner="save_all")


def test_a_name_stands_above_its_mark_and_elsewhere_where_that_is_taken():
    free = room_for(200.0, 150.0, 80.0, FRAME, [around(200.0, 150.0, 4)])
    assert free == Box(160.0, 130.0, 240.0, 144.0)
    aside = room_for(200.0, 150.0, 80.0, FRAME, [around(200.0, 150.0, 4), around(190.0, 138.0, 4)])
    assert aside == Box(200.0, 130.0, 280.0, 144.0)
    below = room_for(200.0, 150.0, 80.0, FRAME, [around(200.0, 150.0, 4), Box(0.0, 60.0, 340.0, 144.5)])
    assert below.top > 150.0
    line, stairs = Box(210.0, 56.0, 211.0, 258.0, UPRIGHT), Box(100.0, 137.0, 200.0, 138.0, STAIRS)
    assert room_for(200.0, 150.0, 80.0, FRAME, [around(200.0, 150.0, 4), line]).right <= 210
    crossed = room_for(200.0, 150.0, 300.0, FRAME, [around(200.0, 150.0, 4), line, stairs])
    assert crossed.left < 210 < crossed.right and not crossed.meets(stairs)  # too wide for anything but crossing a line
    corner = room_for(338.0, 57.0, 80.0, FRAME, [around(338.0, 57.0, 4)])
    assert corner.right <= 340 and corner.top >= 56  # inside of the chart


def test_no_name_covers_a_plan_or_another_name(kept):
    """Forty plans along a curve, with PyTorch's and the fastest almost at one place."""
    met = tuple(FrontierPoint(1500 + 190 * k, 2e-5 + 1.6e-5 * 0.9**k, 0, 0) for k in range(40))
    others = (("stock", FrontierPoint(9000, 2.04e-5, 0, 0)), ("save_all", FrontierPoint(10500, 2.1e-5, 0, 0)),
              ("full", FrontierPoint(2300, 3.4e-5, 0, 0)))  # fmt: skip
    graph = replace(kept, peak_bytes=4400, budget_bytes=4500, step_seconds=2.4e-5, frontier=met, baselines=others)
    for width, height in ((1030, 350), (340, 300)):
        text = frontier_chart(graph, points_with(graph), width, height, "narrow")
        dots = [
            around(float(x), float(y), 3.5) for x, y in re.findall(r'class="met" cx="([0-9.]+)" cy="([0-9.]+)"', text)
        ]
        names = re.findall(r'<text x="([0-9.]+)" y="([0-9.]+)" text-anchor="start" class="halo unit">([^<]+)<', text)
        assert len(dots) > 30 and len(names) == 3
        boxes = [Box(float(x), float(y) - 11, float(x) + 6.3 * len(name), float(y) + 3) for x, y, name in names]
        for k, box in enumerate(boxes):
            assert not any(box.meets(other) for other in (*dots, *boxes[:k]))


def test_other_planners_have_the_same_names_in_the_chart_and_in_the_table(kept):
    others = tuple((name, FrontierPoint(600 + k, 1e-5, 0, 0)) for k, name in enumerate(BASELINES))
    graph = replace(kept, frontier=(FrontierPoint(400, 3e-5, 0, 0),), baselines=others)
    chart, rows = frontier_chart(graph, points_with(graph), 1030, 350, "wide"), frontier_rows(graph)
    for name in ("PyTorch&#x27;s choice", "everything kept", "whole blocks again"):
        assert name in chart and name in rows
