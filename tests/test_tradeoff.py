"""The trade-off between peak and time, from one search."""

import itertools

import pytest

from recompile.tradeoff import Frontier, FrontierPoint, frontier_of
from tests.notation import CHAIN, H100, annotated

TWO = Frontier((FrontierPoint(2**30, 3e-3, 2**20, 5_000_000), FrontierPoint(3 * 2**30, 2e-3, 2**29, 0)), "h100")


def chain_of(num_blocks):
    """``num_blocks`` times two matmuls and an exp between them, on 2048 x 256; gradients are small beside that."""
    lines, last = ["x = input 2048x256"], "x"
    for i in range(num_blocks):
        lines += [f"v{i} = param 256x256", f"w{i} = param 256x256"]
        lines += [f"a{i} = mm {last} v{i}", f"e{i} = exp a{i}", f"y{i} = mm e{i} w{i}"]
        last = f"y{i}"
    lines.append("t = tangent 2048x256")
    gradient, gradients = "t", []
    for i in reversed(range(num_blocks)):
        source = f"y{i - 1}" if i else "x"
        lines += [f"gw{i} = mm e{i}' {gradient}", f"ge{i} = mm {gradient} w{i}'", f"ga{i} = mul ge{i} e{i}"]
        lines += [f"gv{i} = mm {source}' ga{i}", f"gx{i} = mm ga{i} v{i}'"]
        gradients += [f"gw{i}", f"gv{i}"]
        gradient = f"gx{i}"
    return "\n".join([*lines, f"return {last} | {' '.join(gradients)}"])


def test_a_graph_with_one_choice_has_two_points():
    """e kept, 512 bytes; rebuilt with the first matmul again, 384 bytes and its 2 x 4 x 8 x 8 FLOP and 20 a number."""
    points = frontier_of(annotated(CHAIN), H100).points
    assert [(p.peak_bytes, p.saved_bytes, p.recompute_flops) for p in points] == [
        (384, 0, 2 * 4 * 8 * 8 + 20 * 4 * 8),
        (512, 128, 0),
    ]


def test_peaks_rise_and_times_fall_from_point_to_point():
    points = frontier_of(annotated(chain_of(12)), H100).points
    assert len(points) >= 5
    for smaller, larger in itertools.pairwise(points):
        assert smaller.peak_bytes < larger.peak_bytes and smaller.step_seconds > larger.step_seconds


def test_every_point_has_a_lower_bound_that_its_plan_and_faster_ones_keep():
    points = frontier_of(annotated(chain_of(12)), H100).points
    assert all(0 < point.lower_bound_seconds <= point.step_seconds for point in points)
    bounds = [point.lower_bound_seconds for point in points]
    assert bounds == sorted(bounds, reverse=True)


def test_the_table_shows_how_far_from_optimal_a_plan_can_be():
    bounded = Frontier((FrontierPoint(2**30, 3e-3, 2**20, 0, 2.5e-3), FrontierPoint(2**31, 2e-3, 2**29, 0)), "h100")
    _, titles, *rows = str(bounded).splitlines()
    assert titles.endswith("at most above optimum")
    assert [row.split()[-1] for row in rows] == ["20.0%", "-"]


def test_the_table_has_a_row_a_plan():
    head, titles, *rows = str(TWO).splitlines()
    assert head == "recompile: 2 plans on h100; peaks over what forward starts with"
    assert titles.split() == ["peak", "step", "slower", "than", "fastest", "saved", "recomputed"]
    assert [" ".join(row.split()) for row in rows] == [
        "1.00 GiB 3.00 ms 50.0% 1.00 MiB 5.00 MFLOP",
        "3.00 GiB 2.00 ms 0.0% 512.00 MiB 0 FLOP",
    ]


def test_json_has_the_points_in_bytes_seconds_and_flop():
    assert TWO.to_json()["points"][0] == {
        "peak_bytes": 2**30, "step_seconds": 3e-3, "saved_bytes": 2**20, "recompute_flops": 5_000_000,
        "lower_bound_seconds": None,
    }  # fmt: skip


def test_a_plot_names_the_other_methods(tmp_path):
    pytest.importorskip("matplotlib")
    TWO.plot(tmp_path / "frontier.svg", [("PyTorch's budget 0.5", 2 * 2**30, 2.5e-3)])
    TWO.plot(tmp_path / "frontier.png")
    assert "PyTorch" in (tmp_path / "frontier.svg").read_text()
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
