"""The report as text: what is in it, that it loads nothing, and that nothing of the user's becomes markup."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from recompile.report.charts import (
    AGAIN,
    KEPT,
    Frame,
    figures_of,
    layers_chart,
    left_or_right,
    ticks,
    timeline_chart,
    unit_for,
)
from recompile.report.explanation import Exchange, Explanation, PeakReport, Turned
from recompile.report.html import explanation_html, headline
from recompile.report.layer_text import exchange_text
from recompile.report.layers import Fold, folds_of, layers_of, place_of, ranges_text, treatments_of
from recompile.report.layers_section import again_figures, again_list, main_values, seconds_text
from recompile.report.residents import RESIDENTS_SHOWN, residents_list
from recompile.report.sections import about, moment_text, moments_json
from recompile.report.tables import (
    ADDS,
    FLOP,
    PLACE,
    PRICE,
    SIZE,
    SPARES,
    name_of,
    refusals_of,
    refusals_table,
    role_of,
    short_op,
    work_text,
)
from recompile.tradeoff import Frontier, FrontierPoint
from tests.test_report import two_graphs

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
VOID = ("meta", "link", "br", "input", "wbr", "img")


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of order; collects what names a resource."""

    def __init__(self):
        super().__init__()
        self.open, self.resources = [], []

    def handle_starttag(self, tag, attrs):
        self.resources += [value for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.open[-5:], self.getpos())


def parsed(text):
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser


def layered(kept, numbers, name="blocks.{}.mlp", is_kept=lambda k: k < 2):
    """A report whose value e is repeated in layers: kept in the first two, computed again in the others."""
    (row,) = [row for row in kept.saved if row.name == "e"]
    rows = [
        replace(
            row, name=f"e_{k}", module=name.format(k), inputs=(), size_bytes=2**20,
            decision="saved" if is_kept(k) else "recomputed",
        )
        for k in numbers
    ]  # fmt: skip
    return replace(kept, values=(*kept.values, *rows))


# The file


def test_the_file_is_well_formed_and_names_no_resource(kept, rebuilt):
    for explanation in (Explanation((rebuilt,)), two_graphs(kept), Explanation(())):
        text = explanation_html(explanation)
        assert parsed(text).resources == ["data:,", "#reading"]
        assert not re.search(r"https?://|@import|url\(", text)


def test_nothing_of_the_users_becomes_markup(rebuilt):
    hostile = replace(
        rebuilt, ended_by=f"{HOSTILE}: {HOSTILE}", planner=HOSTILE, hardware=HOSTILE, budget=HOSTILE,
        values=tuple(
            replace(row, module=HOSTILE, source=f"{HOSTILE}:3", reason=HOSTILE, op=HOSTILE, dtype=HOSTILE,
                    cannot_save=HOSTILE, shape=(HOSTILE,), code=HOSTILE, role=HOSTILE)
            for row in rebuilt.values
        ),
    )  # fmt: skip
    text = explanation_html(Explanation((hostile,), (HOSTILE,)))
    assert parsed(text).resources == ["data:,", "#reading"]
    assert "<script>alert" not in text and "<img" not in text
    assert "&lt;/script&gt;" in text


def test_a_graph_without_kernels_or_decisions_has_a_report(kept):
    empty = replace(
        kept, timeline=(), peaks=(), values=(), peak_bytes=0, saved_bytes=0, step_seconds=0.0, total_flops=0,
        lower_bound_seconds=None, floor_bound_bytes=None,
    )  # fmt: skip
    assert "0 values kept" in explanation_html(Explanation((empty,)))
    parsed(explanation_html(Explanation((replace(empty, frontier=(FrontierPoint(0, 0.0, 0, 0),)),))))


def test_to_html_writes_the_file(kept, tmp_path):
    Explanation((kept,)).to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_headline_is_the_plan_in_a_sentence(kept, rebuilt):
    assert headline(Explanation((rebuilt,))) == (
        "peak 384 B of 384 B: 0 values kept, 2 ops computed again, +42.4% FLOP"  # 1152 of 2720
    )
    assert headline(two_graphs(kept)) == "peak 145 B: 2 values kept, 0 ops computed again, +0.2% FLOP in 2 graphs"
    assert headline(Explanation(())) == "no training graph was compiled yet"


def test_both_peaks_are_marked_with_what_is_alive(kept):
    text = explanation_html(Explanation((kept,)))
    for shown in (
        "forward's peak 256 B",
        "backward's peak 512 B",
        "Alive at backward&#x27;s peak, 512 B",
        "gradient",
        "<code>tangents_1</code>",
    ):
        assert shown in text or shown.replace("&#x27;", "'") in text or shown.replace("'", "&#x27;") in text, shown


def test_a_peak_is_told_by_phase_module_and_time_and_the_largest_spike_too(kept):
    """g2 is the fourth kernel, of 2 us each."""
    rows = [replace(row, module="blocks.11.mlp") if row.name == "g2" else row for row in kept.values]
    said = moment_text(replace(kept, values=tuple(rows)), 3)
    assert said == (
        "in backward of <code>blocks.11.mlp</code>, 6.0 us into the step, while <code>g2</code> (matmul) runs"
    )
    assert moment_text(kept, 0).startswith("in forward of the model itself, 0.0 us into the step, while <code>a</code>")
    assert re.search(r"The largest: \d+ B, in backward of the model itself, ", explanation_html(Explanation((kept,))))


def test_what_is_held_back_of_a_budget_is_said(kept):
    graph = replace(kept, budget="1024", budget_bytes=1024, limit_bytes=1013)
    assert "Budget 1.00 KiB, of which 1.1% is held back for what the prediction misses; planner" in about(graph, False)
    assert "held back" not in about(replace(graph, limit_bytes=1024), False)
    assert "held back" not in about(kept, False)


def test_the_tooltip_has_an_entry_a_kernel(kept):
    assert moments_json(kept).count("forward: ") == 3
    assert '"backward: mul g3","","384 B"' in moments_json(kept)


def test_a_planner_that_met_no_plans_says_how_to_show_them_and_takes_a_frontier(kept):
    text = explanation_html(Explanation((kept,)))
    assert "This planner meets no other plans" in text
    others = Frontier((FrontierPoint(384, 3e-5, 0, 1152), FrontierPoint(512, 1e-5, 128, 0)), "planner-h100")
    assert "Trade-off between peak memory and time" in explanation_html(Explanation((kept,)), others)
    with pytest.raises(ValueError, match="belongs to one graph, and this explanation has 2"):
        explanation_html(two_graphs(kept), others)


# Layers


def test_a_path_is_folded_at_its_first_number():
    assert place_of("blocks.3.mlp.0").folded == "blocks.*.mlp.0"
    assert (place_of("blocks.3.mlp.0").layer, place_of("head").layer) == (3, None)
    assert (place_of("head").folded, place_of("").folded, place_of("0.norm").folded) == ("head", "", "*.norm")


def test_numbers_are_written_as_ranges():
    assert ranges_text([7, 0, 1, 2, 3]) == "0–3, 7"
    assert ranges_text([4]) == "4"


def test_layers_with_the_same_decisions_share_a_treatment(kept):
    shown = treatments_of(layers_of(layered(kept, range(6))))
    assert [(t.stem, t.layers, len(t.kept), len(t.again)) for t in shown] == [
        ("blocks.*", (0, 1), 1, 0), ("blocks.*", (2, 3, 4, 5), 0, 1), ("", (), 1, 0),
    ]  # fmt: skip
    text = explanation_html(Explanation((layered(kept, range(6)),)))
    assert "<code>blocks</code> 2–5 <small>(4 layers)</small>" in text
    assert "<code>blocks.<wbr>*.<wbr>mlp</code> <small>layers 2–5</small>" in text
    assert "blocks.3: 640 FLOP computed again" in text
    assert 'data-find="blocks.2.mlp blocks.3.mlp blocks.4.mlp blocks.5.mlp"' in text


def test_rows_of_one_layer_keep_their_path(kept):
    folds = folds_of(layered(kept, [0, 1, 2], "a.{}.b").values[-3:])
    assert [(fold.module, fold.layers, fold.size_bytes) for fold in folds] == [("a.*.b", [0, 1, 2], 3 * 2**20)]
    assert folds_of(layered(kept, [7], "a.{}.b").values[-1:])[0].module == "a.7.b"


def test_why_these_layers_and_not_their_neighbours_is_said_by_what_an_exchange_would_change(kept):
    graph = replace(kept, step_seconds=0.02, peak_bytes=2**30)
    for seconds, peak_bytes, said in (
        (1.9e-5, 2**20, "as long a step, the same peak. Either would do."),
        (-1e-4, 2**20, "a step 100.0 us shorter, the same peak."),
        (0.0, 2**28, "as long a step, a peak 256.00 MiB higher."),
    ):
        text = exchange_text(graph, Exchange("blocks.*", 5, 4, seconds, peak_bytes))
        assert text == f"blocks 5 treated as 4 is, and 4 as 5: {said}"
    deep = replace(layered(graph, range(6)), exchanges=(Exchange("blocks.*", 1, 2, 0.0, 0),))
    assert "<li>blocks 1 treated as 2 is, and 2 as 1: as long a step" in explanation_html(Explanation((deep,)))


# Tables


def folded(row, **changes):
    """Three values of equal layers, and what their fold shows in a column."""
    rows = [replace(row, name=f"v{k}", module=f"blocks.{k}.mlp", **changes) for k in range(3)]
    return Fold(tuple(rows))


def test_figures_of_several_values_are_sums_with_what_each_has(kept):
    fold = folded(kept.saved[-1], size_bytes=2**20, flop=1000, again_seconds=2e-6)
    assert [column.cell(fold) for column in (SIZE, FLOP, ADDS)] == [
        "3.00 MiB<br><small>3 × 1.00 MiB</small>", "3.00 kFLOP<br><small>3 × 1.00 kFLOP</small>",
        "6.0 us<br><small>3 × 2.0 us</small>",
    ]  # fmt: skip
    assert SIZE.cell(Fold(fold.rows[:1])) == "1.00 MiB"
    assert PLACE.cell(fold).startswith("<code>blocks.<wbr>*.<wbr>mlp</code> <small>layers 0–2</small>")
    assert PLACE.cell(Fold(fold.rows[:1])).startswith("<code>blocks.<wbr>0.<wbr>mlp</code>")


def test_a_kept_value_has_a_price_that_memory_would_have_to_be_worth(kept):
    row = replace(kept.saved[-1], turned=Turned(4e-4, 10**9, -(2**28), -(2**28)))
    fold = Fold((row,))
    assert (SPARES.cell(fold), PRICE.cell(fold)) == ("400.0 us", "1.6")
    for turned in (None, Turned(-2e-6, 0, -(2**20), 0), Turned(2e-6, 0, 0, 0)):
        assert PRICE.cell(Fold((replace(row, turned=turned),))) == "–"


def test_ops_that_a_newcomer_cannot_read_are_explained_and_stand_beside_their_line_of_code(kept):
    row = replace(kept.saved[-1], op="prims.convert_element_type.default", dtype="bfloat16", code="y = <x>.float()")
    assert role_of(row) == "cast to bf16"
    assert role_of(kept.saved[-1]) == ""  # exp
    assert "cast to bf16" in name_of(Fold((row,)))
    assert PLACE.cell(Fold((row,))).endswith('<small class="line"><code>y = &lt;x&gt;.float()</code></small>')


def test_what_is_computed_again_is_ranked_by_what_it_adds_to_the_step(kept):
    """An op of many FLOP and little time alone, fused, comes after a matmul."""
    (row,) = [row for row in kept.saved if row.name == "e"]
    rows = [
        replace(row, name="m", op="aten.addmm.default", decision="recomputed", again_seconds=4e-5, seconds=1e-5),
        replace(row, name="p", op="aten.mul.Tensor", decision="recomputed", again_seconds=1e-6, seconds=9e-5),
    ]
    shown = main_values(rows[::-1], lambda fold: fold.again_seconds, again_figures, seconds_text)
    assert shown.index("addmm") < shown.index("mul")
    assert "40.0 us" in shown
    assert work_text(rows) == "2 ops, 1.28 kFLOP, 41.0 us"
    assert again_list(rows).index(">m<") < again_list(rows).index(">p<")


def test_values_alive_at_a_peak_are_apart_by_line_and_every_use_is_named(kept):
    names = [f"v{k}" for k in range(8)]
    rows = [replace(kept.saved[-1], name=name, source=f"model.py:{k % 7}") for k, name in enumerate(names)]
    small = replace(kept.saved[-1], name="g", op="aten.mm.default", source="model.py:9")
    alive = (*((name, 100, "saved") for name in names), ("g", 1, "gradient"))
    peak = PeakReport("backward", 0, "g", 801, 0, alive)
    text = residents_list(replace(kept, values=(*rows, small)), peak)
    assert "2 × <code>exp</code>" in text and "3 × " not in text  # lines 0 and 7 % 7 alone are one
    assert text.count("kept for backward · the model itself") == RESIDENTS_SHOWN
    assert "gradient · the model itself" in text
    assert "800 B kept for backward · 1 B gradients" in text
    assert "and 1 smaller one<" in text and "&lt; 1%" in text
    tiny = residents_list(replace(kept, values=(*rows, small)), replace(peak, live_bytes=80100))
    assert "gradient ·" not in tiny and "and 7 smaller ones, of 7 kinds" in tiny  # of two bytes nobody wants a row


def test_refusals_leave_out_views_and_inputs_and_fold_reasons_that_name_others(kept):
    assert refusals_of(kept) == []
    seeds, cast = (row for row in kept.values if row.name in ("a", "e"))
    seeds = replace(seeds, cannot_recompute="random seeds: drawn again they would differ")
    casts = [
        replace(
            cast, name=f"c{k}", cannot_save=f"a cast of primals_{k}, a parameter or buffer that is allocated anyway"
        )
        for k in range(3)
    ]
    shown = refusals_of(replace(kept, values=(seeds, *casts)))
    assert [(r.what, r.reason, len(r.fold.rows)) for r in shown] == [
        ("saved", "a cast of another value, a parameter or buffer that is allocated anyway", 3),
        ("computed again", "random seeds: drawn again they would differ", 1),
    ]


def test_a_refusal_says_what_is_ruled_out(kept):
    rows = [replace(row, cannot_save="a write into a buffer") if row.name == "e" else row for row in kept.values]
    text = refusals_table(replace(kept, values=tuple(rows)))
    assert "No choice, by a rule: 1 values" in text
    assert "ruled out" in text and "keeping it" in text and "because it is" in text and "a write into a buffer" in text


def test_ops_are_named_without_what_everybody_knows():
    assert [short_op(op) for op in ("aten.mul.Tensor", "prims.iota.default", "my.op.default", "getitem", "input")] == [
        "mul", "iota", "my.op", "getitem", "input",
    ]  # fmt: skip


# Charts


def test_ticks_are_round_numbers():
    assert ticks(0, 4.6, 5) == [0, 1, 2, 3, 4]
    assert ticks(1.4, 2.1, 3) == pytest.approx([1.5, 1.75, 2.0])
    assert ticks(3, 3, 4) == [3]
    assert unit_for(5e6, (("MiB", 2**20), ("B", 1))) == ("MiB", 2**20)
    assert unit_for(0, (("MiB", 2**20), ("B", 1))) == ("B", 1)


def test_the_axis_of_layers_ends_above_the_highest_bar_and_small_bars_have_figures(kept):
    """Bars of 640 FLOP, the fourth a thousand times lower: it is drawn 2 px high."""
    rows = layered(kept, range(4), is_kept=lambda k: False)
    low = [replace(row, flop=1) if row.name == "e_3" else row for row in rows.values]
    layers = layers_of(replace(kept, values=tuple(row for row in low if row.module)))
    text = layers_chart(layers, AGAIN, 497, 170, "wide")
    heights = [float(height) for height in re.findall(r'class="rebuilt"[^>]* height="([\d.]+)"', text)]
    assert heights[3] == 2.0
    assert max(heights) < 170 - 40 - 38  # the axis
    assert [text.count(f">{figure}</text>") for figure in ("640", "1")] == [3, 2]  # layer 1's number is one too
    assert ">750</text>" in text or ">800</text>" in text or ">1000</text>" in text
    assert "layer of blocks<" in text
    many = layers_chart(layers_of(layered(kept, range(96))), KEPT, 340, 170, "narrow")
    assert many.count('class="figure halo"') == 2  # of the first, and of what is in no layer


def test_figures_above_bars_have_fewer_digits_where_there_is_little_room():
    values = [70.39, 35.49, 0.39, 0.0]
    assert figures_of(values, 40.0) == ["70.4", "35.5", "0.39", ""]
    assert figures_of(values, 14.0) == ["70", "35", "<1", ""]
    assert figures_of([444.0, 444.0, 444.0, 56.0, 444.0, 7.0], 10.0) == ["444", "", "", "56", "", "7"]


def test_both_peaks_are_seen_and_are_no_violations_of_the_budget(kept):
    text = timeline_chart(kept, 340, 330, "narrow")
    assert re.findall(r'<circle[^>]*class="([a-z ]+)"', text) == ["peak", "peak ring"]


def test_a_name_stands_beside_its_line_where_there_is_room():
    frame = Frame(340, 330, 52, 14, 74, 42, (0.0, 1.0), (0.0, 1.0))
    name = "forward's peak 4.43 GiB"  # 23 characters of about 7 px
    assert left_or_right(300.0, frame, name, wants_left=True) == (294.0, "end")
    assert left_or_right(100.0, frame, name, wants_left=True) == (106.0, "start")
    assert left_or_right(100.0, frame, name, wants_left=False) == (106.0, "start")
    assert left_or_right(300.0, frame, name, wants_left=False) == (294.0, "end")
    long = "this plan: 4.45 GiB, 23.03 ms"
    at, anchor = left_or_right(150.0, frame, long, wants_left=False)
    assert anchor == "start" and 0 < at < 150 < at + 7 * len(long) <= 340  # across the line, inside of the chart


# Pictures and graphs


def test_the_timeline_is_drawn_with_its_peaks(kept, tmp_path):
    pytest.importorskip("matplotlib")
    two_graphs(kept).plot(tmp_path / "step.svg")
    Explanation((kept,)).plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to plot"):
        Explanation(()).plot(tmp_path / "none.png")


def test_graphml_is_read_back_by_networkx(rebuilt, tmp_path):
    import networkx

    Explanation((rebuilt,)).to_graphml(tmp_path / "graph.graphml")
    graph = networkx.read_graphml(tmp_path / "graph.graphml")
    assert graph.nodes["0.e"]["decision"] == "recomputed"
    assert set(graph.predecessors("0.e")) == {"0.a"}
