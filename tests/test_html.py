"""The report as text: what is in it, that it loads nothing, and that nothing of the user's becomes markup."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from recompile.decide import predicted_bytes_within
from recompile.footprint import Footprint
from recompile.report.advice import advice_for
from recompile.report.alternatives import budget_text, frontier_rows, next_steps, points_with
from recompile.report.charts import AGAIN, KEPT, Frame, layers_chart, left_or_right, ticks, timeline_chart, unit_for
from recompile.report.explanation import Exchange, Explanation, PeakReport, Turned
from recompile.report.html import explanation_html, headline
from recompile.report.layers import Fold, folds_of, layers_of, place_of, ranges_text, treatments_of
from recompile.report.residents import RESIDENTS_SHOWN, residents_list
from recompile.report.sections import again_figures, again_list, exchange_text, main_values, moments_json
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
from recompile.units import parse_bytes
from tests.test_report import report_of, two_graphs

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
VOID = ("meta", "link", "br", "input", "wbr", "img")


@pytest.fixture(scope="module")
def kept():
    return report_of(planner="save_all")


@pytest.fixture(scope="module")
def rebuilt():
    return report_of(budget=0.0)


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
        assert parsed(text).resources == ["data:,"]
        assert not re.search(r"https?://|@import|url\(", text)


def test_nothing_of_the_users_becomes_markup(rebuilt):
    hostile = replace(
        rebuilt, ended_by=f"{HOSTILE}: {HOSTILE}", planner=HOSTILE, hardware=HOSTILE, budget=HOSTILE,
        values=tuple(
            replace(row, module=HOSTILE, source=f"{HOSTILE}:3", reason=HOSTILE, op=HOSTILE, dtype=HOSTILE,
                    cannot_save=HOSTILE, shape=(HOSTILE,), code=HOSTILE)
            for row in rebuilt.values
        ),
    )  # fmt: skip
    text = explanation_html(Explanation((hostile,), (HOSTILE,)))
    assert parsed(text).resources == ["data:,"]
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
    assert "4 layers: <code>blocks.<wbr>*.<wbr>mlp</code>" in text
    assert "blocks.3: 640 FLOP computed again" in text


def test_rows_of_one_layer_keep_their_path(kept):
    folds = folds_of(layered(kept, [0, 1, 2], "a.{}.b").values[-3:])
    assert [(fold.module, fold.num_layers, fold.size_bytes) for fold in folds] == [("a.*.b", 3, 3 * 2**20)]
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
    assert PLACE.cell(fold).startswith("3 layers: <code>blocks.<wbr>*.<wbr>mlp</code>")
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
    shown = main_values(rows[::-1], lambda fold: fold.again_seconds, again_figures)
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
    assert "1 more of one kind" in text


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
    assert "layer * of blocks.*" in text
    assert 'class="figure"' not in layers_chart(layers_of(layered(kept, range(96))), KEPT, 340, 170, "narrow")


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


# Other plans


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
    assert "PyTorch&#x27;s own choice" in text and "everything kept" in text
    met = replace(graph, frontier=(*graph.frontier[:1], FrontierPoint(512, 2e-5, 128, 0), *graph.frontier[1:]))
    assert frontier_rows(met).count("512 B") == 1


def test_the_next_plans_are_the_nearest_with_the_budget_to_ask_for(kept):
    graph = among_others(kept)
    assert next_steps(graph) == (
        'The next smaller plan: 384 B, 128 B less, in 30.0 us, +50.0% (memory_budget="388B"). '
        'The next faster one: 700 B, 188 B more, in 10.0 us, -50.0% (memory_budget="707B").'
    )
    assert next_steps(replace(graph, frontier=())) == "No plan was met that is smaller or faster."


def test_a_budget_that_is_asked_for_lets_the_plan_through(kept):
    """One percent of it is kept back, and two decimals are rounded up."""
    for peak in (384, 1023, 4_471_291_000, 12_345_678, 2**40):
        asked = parse_bytes(re.fullmatch(r'memory_budget="(.+)"', budget_text(peak))[1])
        assert peak <= predicted_bytes_within(asked) <= 1.02 * peak + 2


def test_the_first_figures_are_beside_what_they_are_compared_with(kept):
    text = explanation_html(Explanation((among_others(kept),)))
    assert "+100.0% over the fastest plan found, 10.0 us" in text
    assert "+25.0% over everything kept, 16.0 us and 900 B" in text
    assert "+0.0% over the 2.72 kFLOP of a step without it" in text


def test_all_memory_of_training_stands_beside_the_peak(kept):
    needed = Footprint(2**30, 0, 0, 2**31, 512, 2**20, 0, 0, 0)
    text = explanation_html(Explanation((replace(kept, hardware="h100"),), footprint=needed))
    tile = text[text.index("all that training takes") :].partition("</div>")[0]
    assert "<b>3.00 GiB</b>" in tile and "4.0% of 74.51 GiB" in tile  # 3 of 80 GB
    assert text.index("peak of the step") < text.index("all that training takes") < text.index("kept for backward</dt>")


# Advice


SCORES = """
    x = input 256x16
    w = param 16x4096
    y = mm x w @model.py:3
    m = amax y [1] True @model.py:4
    s = sub y m @model.py:4
    i = input 256x1 int64
    p = gather s 1 i @model.py:4
    t = tangent 256x1
    g = mul s t
    gw = mm x' g
    return p | gw
"""


def advice(*graphs):
    return [str(advice) for advice in advice_for(Explanation(graphs))]


def test_scores_that_fill_the_peak_are_named_with_the_line_of_the_loss():
    (text,) = advice(report_of(SCORES, planner="save_all"))
    assert text.startswith("The scores of 4096 classes (logits, their copies and gradients) are ")
    assert "of backward's peak" in text or "of forward's peak" in text
    assert "(model.py:" in text


def test_scores_beside_something_larger_are_not():
    """A hidden layer of 4096 before 16 classes."""
    hidden = SCORES.replace("16x4096", "4096x16").replace("y = mm x w", "h = exp x\ny = mm h w")
    text = hidden.replace("256x16", "256x4096").replace("gw = mm x' g", "gw = mm h' g")
    assert advice(report_of(text, planner="save_all")) == []


ATTENTION = """
    q = input 2x64x8
    k = input 2x8x64
    v = input 2x64x8
    s = bmm q k
    m = mul s 0.35
    x = amax m [-1] True
    d = sub m x
    e = exp d @model.py:7
    n = sum.dim_IntList e [-1] True
    p = div e n
    y = bmm p v
    t = tangent 2x64x8
    vt = transpose.int v 1 2
    gp = bmm t vt
    gs = mul gp p
    gq = bmm gs q
    return y | gq None None
"""


def test_attention_that_is_written_out_is_named_with_the_fused_one_and_the_line_of_its_softmax():
    text = advice(report_of(ATTENTION, planner="save_all"))[0]
    assert text.startswith("Attention is written out: its scores and what is made of them, [..., 64, 64] for each head")
    assert "(model.py:7) torch.nn.functional.scaled_dot_product_attention computes the same" in text


def test_a_mask_that_is_added_to_the_scores_changes_nothing():
    """It is made by ops that no attention kernel has, and as large as the scores of one head."""
    mask = """
        i = input 2x64x64 int64
        b = bitwise_and.Scalar i 1
        c = eq.Scalar b 0
        z = full [2,64,64] 0.0
        r = full [2,64,64] -9.0
        f = where.self c z r
        a = mul s 0.35
        m = add a f
    """
    text = ATTENTION.replace("    m = mul s 0.35", mask)
    assert "Attention is written out" in advice(report_of(text, planner="save_all"))[0]


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("m = mul s 0.35", "m = tanh s"),  # no fused kernel caps scores
        (
            "m = mul s 0.35",
            "w = param 9x1\ni = input 64x64 int64\nb = embedding w i\nc = squeeze.dim b -1\nm = add s c",
        ),
        ("return y |", "return y p |"),  # the caller wants the weights
        ("y = bmm p v", "y = mul p 2.0\nz = sum.dim_IntList v [-1]"),  # no second product
        ("s = bmm q k", "s = add q k"),
    ],
)
def test_attention_that_no_fused_kernel_can_do_is_not(written, instead):
    text = ATTENTION.replace(written, instead)
    if instead == "s = add q k":
        text = text.replace("2x64x8", "2x64x64").replace("2x8x64", "2x64x64")
    if "y = mul p" in instead:
        text = text.replace("t = tangent 2x64x8", "t = tangent 2x64x64").replace("gp = bmm t vt", "gp = mul t p")
    assert not any("Attention" in sentence for sentence in advice(report_of(text, planner="save_all")))


def test_attention_beside_something_larger_is_not():
    """Scores of 16 KiB each beside hidden values of 2 MiB."""
    text = ATTENTION.replace("y = bmm p v", "h = input 512x1024\nu = exp h\ny = bmm p v")
    text = text.replace("t = tangent 2x64x8", "t = tangent 2x64x8\nr = tangent 512x1024").replace(
        "gq = bmm gs q", "gq = bmm gs q\nw = mul r u"
    )
    text = text.replace("return y | gq None None", "return y u | gq None None w")
    assert advice(report_of(text, planner="save_all")) == []


def test_how_to_ask_for_less_is_said_where_less_was_met(kept):
    (text,) = advice(among_others(kept))
    assert text == (
        "A smaller peak can be had: 384 B, 128 B less, in a step of 30.0 us, 50.0% more. Ask for it: "
        'memory_budget="388B".'
    )
    smallest = FrontierPoint(200, 6e-5, 0, 1152)
    (text,) = advice(replace(kept, step_seconds=2e-5, frontier=(smallest, *among_others(kept).frontier)))
    assert "; the smallest that was met is 200 B, in a step of 60.0 us, 200.0% more. Ask" in text


def test_a_graph_break_is_named_with_its_line(kept):
    (text,) = advice(replace(kept, ended_by="model.py:3: a print"))
    assert text.startswith("A graph ends at a graph break: a print. (model.py:3) Each graph is planned on its own")


def test_an_opaque_op_that_pins_memory_is_named_with_its_line(kept):
    reason = "a custom op (my::op) that may hide state; see recompile.register_op"
    rows = [replace(row, cannot_recompute=reason) if row.name == "e" else row for row in kept.values]
    (text,) = advice(replace(kept, values=tuple(rows)))
    assert text == (
        "128 B are kept because my::op may hide state and is not run twice. (train/model.py:4) If it is a function of "
        "its inputs alone, say so: recompile.register_op(op, recompute=True, flop=...)."
    )


def test_the_smallest_peak_is_said_to_be_it(rebuilt, kept):
    (text,) = advice(rebuilt)
    assert text.startswith("The peak of 384 B, reached in backward at ")
    assert "is the smallest that was found. By this model no plan's can be below 384 B." in text
    assert advice(kept) == []


def test_the_text_for_terminals_has_the_advice(rebuilt):
    assert "\nadvice: The peak of 384 B" in str(Explanation((rebuilt,)))


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
