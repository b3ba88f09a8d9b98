"""The report as text: what is in it, that it loads nothing, and that nothing of the user's becomes markup."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from recompile.report.advice import advice_for
from recompile.report.charts import ticks, unit_for
from recompile.report.explanation import Explanation
from recompile.report.html import explanation_html, headline
from recompile.report.layers import folds_of, layers_of, place_of, ranges_text, treatments_of
from recompile.report.sections import moments_json
from recompile.report.tables import behind_of, refusals_of, short_op
from recompile.tradeoff import Frontier, FrontierPoint
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
                    cannot_save=HOSTILE, shape=(HOSTILE,))
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
    assert "4 × <code>blocks.<wbr>*.<wbr>mlp</code>" in text
    assert "blocks.3: 640 FLOP computed again" in text


def test_rows_of_one_layer_keep_their_path(kept):
    folds = folds_of(layered(kept, [0, 1, 2], "a.{}.b").values[-3:])
    assert [(fold.module, fold.num_layers, fold.size_bytes) for fold in folds] == [("a.*.b", 3, 3 * 2**20)]
    assert folds_of(layered(kept, [7], "a.{}.b").values[-1:])[0].module == "a.7.b"


# Tables


def test_what_would_run_again_without_a_value_goes_back_to_others_that_are_kept(kept):
    """e is exp of a, a matmul of inputs: without e both run again."""
    rows = {row.name: row for row in kept.values}
    assert [row.name for row in behind_of(rows["e"], rows)] == ["e", "a"]
    rows["a"] = replace(rows["a"], decision="recomputed")
    assert [row.name for row in behind_of(rows["e"], rows)] == ["e"]


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
