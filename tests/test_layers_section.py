"""What the report says of whole layers: sentences that say why, and what single figures do not add up to."""

from dataclasses import replace

import pytest

from recompile.report.explanation import Explanation, LayerTurned, Turned
from recompile.report.html import explanation_html
from recompile.report.layer_text import differing, layer_texts
from recompile.report.layer_worth import MOST_PAIRS, nearest, others_than
from recompile.report.layers import Treatment, folds_of, layers_of, treatments_of
from recompile.report.layers_section import (
    again_list,
    bytes_text,
    intro,
    kept_figures,
    kept_list,
    main_values,
    overlap_text,
    shown_and_rest,
    unneeded_text,
)
from recompile.tradeoff import FrontierPoint
from tests.test_html import layered, parsed
from tests.test_report import report_of

MIB = 2**20


@pytest.fixture(scope="module")
def kept():
    return report_of(planner="save_all")


def deep(kept, *turned, limit_bytes=2**30):
    """Six layers of which the first two keep their value, in a plan of 1000 MiB under a budget of 1 GiB."""
    graph = replace(layered(kept, range(6)), peak_bytes=1000 * MIB, budget_bytes=2**30, limit_bytes=limit_bytes)
    return replace(graph, layers_turned=turned)


def texts(graph):
    treatments = treatments_of(layers_of(graph))
    return [layer_texts(graph, treatment, treatments) for treatment in treatments]


def with_rows(graph, *rows):
    return replace(graph, values=(*graph.values, *rows))


def test_what_backward_does_without_is_listed_the_largest_first_and_by_its_layer(kept):
    graph = layered(kept, range(2))
    one = replace(graph.values[-1], decision="", reason="", turned=None)
    free = [replace(one, name=f"f{k}", storage=f"f{k}", size_bytes=k * MIB, shape=(str(k),)) for k in range(1, 11)]
    others = (
        replace(one, name="view", storage="f1", kind="view"),
        replace(one, name="back", storage="back", side="backward"),
        replace(one, name="empty", storage="empty", size_bytes=0),
        replace(free[0], module="blocks.7.mlp"),  # a layer without any decision
    )
    layers = layers_of(with_rows(graph, *free, *others))
    assert [(layer.number, [row.name for row in layer.unneeded]) for layer in layers if layer.number is not None] == [
        (0, []), (1, [f"f{k}" for k in range(1, 11)]),
    ]  # fmt: skip
    text = unneeded_text(layers[1].unneeded)
    assert text.index("<code>f10<") < text.index("<code>f4<") < text.index("<code>f3<")
    assert "10.00 MiB" in text and "and 2 smaller ones: 3.00 MiB" in text and "f2<" not in text
    assert unneeded_text(()) == ""


def test_every_value_of_a_layer_is_listed_up_to_a_dozen(kept):
    graph = layered(kept, [0])
    more = [replace(graph.values[-1], name=f"v{k}", shape=(str(k),)) for k in range(20)]
    text = kept_list(more[:12])
    assert all(f"<code>v{k}</code>" in text for k in range(12)) and "smaller" not in text
    assert "and 8 smaller ones: 8.00 MiB, in the tables below" in kept_list(more)


def test_what_is_computed_again_has_its_size_and_dtype(kept):
    graph = layered(kept, range(3))
    text = again_list([row for row in graph.values if row.name == "e_2"])
    assert "<small>1.00 MiB</small>" in text and "f32" in text


def test_a_layer_decided_as_others_are_is_why_it_is_as_it_is(kept):
    less = LayerTurned("blocks.*", 1, 2, Turned(4e-4, 10**9, -400 * MIB, -400 * MIB))
    more = LayerTurned("blocks.*", 2, 1, Turned(-4e-4, -(10**9), 400 * MIB, 400 * MIB))
    assert texts(deep(kept, less, more)) == [
        ["Decided as layers 2–5 are, each would keep 400.00 MiB less, and the step take 400.0 us longer: 1 us per MiB. "
         "It would fit, but is slower."],
        ["Decided as layers 0–1 are, each would keep 400.00 MiB more, and the step take 400.0 us shorter: 1 us per "
         "MiB. It would not fit: the peak would be 1.37 GiB, over the budget."],
        [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("turned", "expected"),
    [
        (Turned(-4e-4, 0, MIB, MIB), "the step take 400.0 us shorter: 400 us per MiB. It would fit: the search did not "
         "find this."),
        (Turned(-4e-4, 0, -MIB, -MIB), "each would keep 1.00 MiB less, and the step take 400.0 us shorter. It would "
         "fit: the search did not find this."),
        (Turned(0.0, 0, 0, 0), "each would keep as much, and the step take as long. It would fit."),
        (Turned(1e-4, 0, -MIB, 100 * MIB), "It would not fit: the peak would be 1.07 GiB, over the budget (rebuilding "
         "it needs more at the peak than keeping it)."),
    ],
)  # fmt: skip
def test_what_would_fit_and_be_faster_was_not_found_and_a_peak_that_rises_says_why(kept, turned, expected):
    (text,) = texts(deep(kept, LayerTurned("blocks.*", 1, 2, turned)))[0]
    assert text.endswith(expected)
    (text,) = texts(deep(kept, LayerTurned("blocks.*", 1, 2, turned), limit_bytes=None))[0]
    assert "fit" not in text  # there is nothing to fit into


def test_what_single_decisions_sum_up_to_is_said_where_the_layer_does_something_else(kept):
    """Two values of a layer that spare 300 us each, and 400 together."""
    graph = deep(kept, LayerTurned("blocks.*", 1, 2, Turned(4e-4, 0, -2 * MIB, -2 * MIB)))
    turned = Turned(3e-4, 0, -MIB, -MIB)
    rows = [replace(row, turned=turned) if row.module else row for row in graph.values]
    twins = [replace(row, name=f"{row.name}_twin", op="aten.sin.default") for row in rows if row.module]
    (text,) = texts(replace(graph, values=(*rows, *twins)))[0]
    assert text.endswith(
        "One by one, the 2 values that differ make it 600.0 us longer in sum: they share work, so the layer counts."
    )
    alone = replace(graph, values=(*rows, *(replace(row, turned=Turned(1e-4, 0, -MIB, -MIB)) for row in twins)))
    assert "One by one" not in texts(alone)[0][0]  # 300 and 100 are 400


def test_sums_of_single_decisions_are_not_said_of_the_other_sign_or_where_one_was_not_looked_at(kept):
    """Two values that spare 300 us each, in layers that are 400 us longer without them."""
    graph = deep(kept, LayerTurned("blocks.*", 1, 2, Turned(4e-4, 0, -2 * MIB, -2 * MIB)))

    def said(first, second):
        rows = [replace(row, turned=first) if row.module else row for row in graph.values]
        twins = [
            replace(row, name=f"{row.name}_twin", op="aten.sin.default", turned=second) for row in rows if row.module
        ]
        return "One by one" in texts(replace(graph, values=(*rows, *twins)))[0][0]

    spares, costs = Turned(3e-4, 0, -MIB, -MIB), Turned(-5e-4, 0, -MIB, -MIB)
    assert said(spares, spares)
    assert not said(spares, costs) and not said(spares, None)


def test_a_value_that_a_layer_does_not_need_is_counted_among_those_that_differ(kept):
    """Layers 2 to 5 compute the value again; without that row they do not need it."""
    graph = deep(kept)
    first, second = treatments_of(layers_of(graph))[:2]
    (row,), (again,) = first.kept, second.again
    assert (differing(first, second), differing(second, first)) == ([row], [again])
    assert differing(replace(second, again=()), first) == [None]


def test_of_many_treatments_those_are_compared_that_keep_most_or_least(kept):
    (row,) = [row for row in kept.saved if row.name == "e"]

    def treatment(layer, size):
        return Treatment("blocks.*", (layer,), (replace(row, size_bytes=size),), ())

    usual, *others = [treatment(k, 100 * MIB + (k - 1) ** 3) for k in range(1, MOST_PAIRS + 3)]
    assert others_than(usual, [usual, *others]) == others[1:]  # in their order
    assert nearest((3, 8), (0, 5, 6)) == (3, 5)


def test_whole_layers_stand_in_the_open_and_single_values_are_folded_away(kept):
    graph = deep(kept, LayerTurned("blocks.*", 1, 2, Turned(4e-4, 0, -MIB, -MIB)))
    text = explanation_html(Explanation((graph,)))
    parsed(text)
    assert text.index("<ul class=whole><li>Decided as layers 2–5 are") < text.index("<summary>value by value</summary>")


def test_the_search_is_said_to_compare_plans_where_there_was_one(kept):
    assert "do not add up, since values of a layer share work" in intro(kept)
    assert "The search" not in intro(kept)
    met = replace(deep(kept), frontier=(FrontierPoint(1, 1.0, 1, 1),))
    assert "takes the fastest that fits the budget." in intro(met)
    assert "takes the fastest of them." in intro(replace(met, limit_bytes=None))


def test_times_of_single_ops_are_beside_what_the_plan_costs_over_keeping_everything(kept):
    rows = [replace(row, decision="recomputed", again_seconds=2e-6) if row.name == "e" else row for row in kept.values]
    graph = replace(kept, values=tuple(rows), step_seconds=2e-5)
    faster = replace(graph, baselines=(("save_all", FrontierPoint(1, 1.9e-5, 1, 0)),))
    assert "computed again adds 2.0 us; the step takes 1.0 us longer than with everything kept" in overlap_text(faster)
    assert "ops share kernels" in overlap_text(faster)
    slower = replace(graph, baselines=(("save_all", FrontierPoint(1, 2.1e-5, 1, 0)),))
    assert "the step takes 1.0 us shorter than" in overlap_text(slower)
    as_much = replace(graph, baselines=(("save_all", FrontierPoint(1, 1.8e-5, 1, 0)),))
    assert [overlap_text(graph), overlap_text(as_much), overlap_text(kept)] == ["", "", ""]


def test_what_is_not_named_is_counted_with_its_bytes(kept):
    ops = ("exp", "sin", "cos", "tan", "neg")
    rows = [
        replace(kept.saved[-1], name=op, op=f"aten.{op}.default", size_bytes=MIB * (5 - k)) for k, op in enumerate(ops)
    ]
    shown = main_values(rows, lambda fold: fold.size_bytes, kept_figures, bytes_text)
    assert shown_and_rest(folds_of(rows), 3)[1] == folds_of(rows)[3:]
    assert "tan" not in shown and "and 2 smaller ones: 3.00 MiB" in shown


def test_kept_values_that_are_small_but_spare_much_are_named_beside_the_large_ones(kept):
    """Beside three of a MiB that spare 100 us at most: 50 us are much, 49 are not, and neither is half a MiB small."""
    values = (("exp", MIB, 1e-4), ("sin", MIB, 0.0), ("cos", MIB, 0.0), ("tan", MIB // 2, 3e-4), ("neg", 1024, 4.9e-5),
              ("amax", 2048, 5e-5), ("sum", 1024, 3e-4))  # fmt: skip
    rows = [
        replace(kept.saved[-1], name=op, op=f"aten.{op}.default", size_bytes=size, turned=Turned(seconds, 0, -size, 0))
        for op, size, seconds in values
    ]
    shown, rest = shown_and_rest(folds_of(rows), 3)
    assert [fold.first.name for fold in shown] == ["exp", "sin", "cos", "sum", "amax"]
    assert [fold.first.name for fold in rest] == ["tan", "neg"]
    again = [replace(row, decision="recomputed") for row in rows]
    assert len(shown_and_rest(folds_of(again), 3)[0]) == 3
