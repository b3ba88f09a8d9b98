"""The HTML report's layers: what each keeps and computes again, and why, layers with the same decisions once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from recompile.report.charts import AGAIN, HALF, KEPT, NARROW, layers_chart
from recompile.report.explanation import GraphReport, ValueRow
from recompile.report.layer_text import exchange_text, layer_texts
from recompile.report.layers import (
    Fold,
    Layer,
    Treatment,
    folds_of,
    layers_of,
    place_of,
    ranges_text,
    stem_text,
    treatments_of,
)
from recompile.report.tables import (
    code,
    code_of,
    op_and_shape,
    role_text,
    short_op,
    source_of,
    spared_seconds,
    work_text,
)
from recompile.units import format_bytes, format_flop, format_seconds

VALUES_SHOWN = 12  # of a layer, before "and n smaller ones"
UNNEEDED_SHOWN = 8  # kinds of value that backward does without
LAYER_HEADS = (
    ("layers", ""), ("each keeps", " class=num"), ("mostly", ""), ("computes again", " class=num"), ("mostly", "")
)  # fmt: skip
MAIN_SHOWN = 3  # kinds of value, beside a layer
# Of kept values those are shown too that are small beside the others, and spare this share of the most of these.
SMALL_SHARE, DEAR_SHARE = 0.1, 0.5
DEAR_SHOWN = 2
LEAST_LAYERS = 3  # of one kind for a chart of them
# Sums of single figures within this share of what the whole plan does need no word.
ADDS_UP_SHARE = 0.1


def layers_section(graph: GraphReport) -> str:
    """Per kind of layer what is kept and why, layers with the same decisions once."""
    layers = layers_of(graph)
    if not layers:
        return ""
    heads = "".join(f"<th scope=col{css}>{name}</th>" for name, css in LAYER_HEADS)
    treatments = treatments_of(layers)
    body = "".join(layer_rows(graph, treatment, treatments) for treatment in treatments)
    return (
        f"<section><h2>Layer by layer</h2><p>{intro(graph)}</p>{layers_charts(layers)}"
        f'<table class="summary"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
        f"{overlap_text(graph)}{exchanges_list(graph)}</section>"
    )


def intro(graph: GraphReport) -> str:
    """How to read the rows, and what decides: never one value alone."""
    said = ["Layers with the same decisions share a row; figures are of one layer."]
    if graph.frontier:
        fits = "that fits the budget" if graph.limit_bytes is not None else "of them"
        said.append(f"The search compares whole plans, by simulations of the step, and takes the fastest {fits}.")
    if graph.layers_turned:
        said.append(
            "So whole layers come first: a row says what one of them would change if it were decided as others are."
        )
    said.append(
        "What one value <b>spares</b> alone, the time that the step would take longer without it, is a hint: such "
        "figures do not add up, since values of a layer share work."
    )
    return " ".join(said)


def layers_charts(layers: Sequence[Layer]) -> str:
    """Two charts for each kind of layer."""
    charts = ""
    for stem in dict.fromkeys(layer.stem for layer in layers if layer.number is not None):
        alike = [layer for layer in layers if layer.stem == stem]
        if len(alike) >= LEAST_LAYERS:
            pair = (
                layers_chart(alike, measure, width, 170, kind)
                for measure in (KEPT, AGAIN)
                for width, kind in ((HALF, "wide"), (NARROW, "narrow"))
            )
            charts += f'<div class="columns charts">{"".join(pair)}</div>'
    return charts


def overlap_text(graph: GraphReport) -> str:
    """Why the times of what is computed again are not what the plan costs over keeping everything."""
    everything, rows = dict(graph.baselines).get("save_all"), graph.recomputed
    singly = sum(row.again_seconds for row in rows)
    longer = graph.step_seconds - everything.step_seconds if everything is not None else singly
    if abs(singly - longer) <= ADDS_UP_SHARE * singly:
        return ""
    change = f"{format_seconds(abs(longer))} {'longer' if longer > 0 else 'shorter'}"
    return (
        f"<p class=small>Op by op, what is computed again adds {format_seconds(singly)}; the step takes {change} than "
        "with everything kept. Figures of single ops overlap: ops share kernels and memory traffic, and what is kept "
        "takes time too, to be written and read.</p>"
    )


def exchanges_list(graph: GraphReport) -> str:
    """Why these layers and not their neighbours: what the step would be if they changed places."""
    items = "".join(f"<li>{escape(exchange_text(graph, exchange))}</li>" for exchange in graph.exchanges)
    return f"<h3>If layers changed places</h3><ul class=exchanges>{items}</ul>" if items else ""


def layer_rows(graph: GraphReport, treatment: Treatment, treatments: Sequence[Treatment]) -> str:
    """What each of some layers keeps and computes again, below it what the layer as a whole is worth, and, folded away,
    value by value.
    """
    kept = main_values(treatment.kept, lambda fold: (fold.size_bytes, spared_seconds(fold)), kept_figures, bytes_text)
    again = main_values(treatment.again, lambda fold: fold.again_seconds, again_figures, seconds_text)
    keeps = format_bytes(sum(row.size_bytes for row in treatment.kept))
    why = (
        f"<div><h3>Kept: {len(treatment.kept)} values, {keeps}</h3>{kept_list(treatment.kept)}</div>"
        f"<div><h3>Computed again: {work_text(treatment.again)}</h3>{again_list(treatment.again)}"
        f"{unneeded_text(treatment.unneeded)}</div>"
    )
    whole = "".join(f"<li>{escape(text)}</li>" for text in layer_texts(graph, treatment, treatments))
    whole = f"<ul class=whole>{whole}</ul>" if whole else ""
    return (
        f'<tr><th scope="row">{title_of(treatment)}</th><td class="num" data-t="each keeps">{keeps}</td>'
        f'<td class="list">{kept}</td><td class="num" data-t="computes again">{work_cell(treatment.again)}</td>'
        f'<td class="list">{again}</td></tr><tr class="why"><td colspan="5">{whole}'
        f'<details><summary>value by value</summary><div class="columns">{why}</div></details></td></tr>'
    )


def work_cell(rows: Sequence[ValueRow]) -> str:
    """The time that computing again adds, and below it the work."""
    time, flop = (sum(getattr(row, name) for row in rows) for name in ("again_seconds", "flop"))
    return f"<span>{format_seconds(time)}<br><small>{len(rows)} ops, {format_flop(flop)}</small></span>"


def kept_figures(fold: Fold) -> str:
    """Bytes, and what they spare."""
    spares = f", spares {format_seconds(spared_seconds(fold))}" if spared_seconds(fold) > 0 else ""
    each = " each alone" if len(fold.rows) > 1 else " alone"
    return f", {format_bytes(fold.size_bytes)}<small>{spares}{each if spares else ''}</small>"


def again_figures(fold: Fold) -> str:
    """Seconds, and the work."""
    return f", {format_seconds(fold.again_seconds)}<small>, {format_flop(fold.flop)}</small>"


def bytes_text(folds: Sequence[Fold]) -> str:
    return format_bytes(sum(fold.size_bytes for fold in folds))


def seconds_text(folds: Sequence[Fold]) -> str:
    return format_seconds(sum(fold.again_seconds for fold in folds))


def main_values(
    rows: Sequence[ValueRow], weight: Callable[[Fold], Any], text: Callable[[Fold], str],
    total: Callable[[Sequence[Fold]], str],
) -> str:  # fmt: skip
    """The weightiest kinds of value, each with what it is, where it is made, and the HTML that ``text`` adds; then how
    many are left and their ``total``.
    """
    folds = sorted(folds_of(rows, also=lambda row: None), key=weight, reverse=True)
    items = []
    shown, rest = shown_and_rest(folds, MAIN_SHOWN)
    for fold in shown:
        times = f"{len(fold.rows)} × " if len(fold.rows) > 1 else ""
        place = source_of(fold.first.source) or code(place_of(fold.first.module).folded)
        where = role_text(fold.first)
        where += f" at {place}" if place else ""
        items.append(f"<li>{times}{code(short_op(fold.first.op))}{where}{text(fold)}</li>")
    if rest:
        items.append(f"<li><small>{rest_text(rest, total)}</small></li>")
    return f"<ul>{''.join(items)}</ul>" if items else "nothing"


def shown_and_rest(folds: Sequence[Fold], num: int) -> tuple[list[Fold], list[Fold]]:
    """The first ``num`` and, of what is kept, those behind them that are small but dear; then what is left."""
    shown, rest = list(folds[:num]), list(folds[num:])
    kept = [fold for fold in rest if fold.first.decision == "saved" and spared_seconds(fold) > 0]
    if not kept:
        return shown, rest
    small_bytes = SMALL_SHARE * min(fold.size_bytes for fold in shown)
    dear_seconds = DEAR_SHARE * max(map(spared_seconds, shown))
    dear = [fold for fold in kept if fold.size_bytes <= small_bytes and spared_seconds(fold) >= dear_seconds]
    dear = sorted(dear, key=spared_seconds, reverse=True)[:DEAR_SHOWN]
    return shown + dear, [fold for fold in rest if fold not in dear]


def rest_text(folds: Sequence[Fold], total: Callable[[Sequence[Fold]], str]) -> str:
    """``and 9 smaller ones: 36.02 MiB``"""
    num = sum(len(fold.rows) for fold in folds)
    return f"and {num} smaller {'ones' if num > 1 else 'one'}: {total(folds)}"


def title_of(treatment: Treatment) -> str:
    if not treatment.layers:
        return "outside of layers"
    count = f" <small>({len(treatment.layers)} layers)</small>" if len(treatment.layers) > 1 else ""
    return f"<code>{escape(stem_text(treatment.stem))}</code> {ranges_text(treatment.layers)}{count}"


def kept_list(rows: Sequence[ValueRow]) -> str:
    """The largest kept values with their reasons; of equally large ones those that spare most."""
    return values_list(
        rows,
        lambda fold: (fold.size_bytes, spared_seconds(fold)),
        lambda fold: format_bytes(fold.first.size_bytes),
        bytes_text,
        lambda row: code(op_and_shape(row)),
    )


def again_list(rows: Sequence[ValueRow]) -> str:
    """The dearest ops that run again, with their reasons."""
    return values_list(
        rows,
        lambda fold: fold.again_seconds,
        lambda fold: format_seconds(fold.first.again_seconds),
        seconds_text,
        lambda row: f"{code(op_and_shape(row))} <small>{format_bytes(row.size_bytes)}</small>",
    )


def unneeded_text(rows: Sequence[ValueRow]) -> str:
    """The largest values that are neither kept nor computed again."""
    folds = sorted(folds_of(rows, also=lambda row: None), key=lambda fold: -fold.first.size_bytes)
    if not folds:
        return ""
    items = []
    for fold in folds[:UNNEEDED_SHOWN]:
        times = f"{len(fold.rows)} × " if len(fold.rows) > 1 else ""
        items.append(
            f"<li>{code(fold.first.name)}{role_text(fold.first)} {code(op_and_shape(fold.first))} "
            f"<small>{times}{format_bytes(fold.first.size_bytes)}</small></li>"
        )
    rest = folds[UNNEEDED_SHOWN:]
    items += [f"<li><small>{rest_text(rest, bytes_text)}</small></li>"] if rest else []
    why = "What backward reads is kept, or made again without them; they live in forward alone, many within a kernel."
    return f"<h3>Neither: backward does without</h3><p class=small>{why}</p><ul>{''.join(items)}</ul>"


def values_list(
    rows: Sequence[ValueRow], weight: Callable[[Fold], Any], figure: Callable[[Fold], str],
    total: Callable[[Sequence[Fold]], str], what: Callable[[ValueRow], str],
) -> str:  # fmt: skip
    """The weightiest folds; ``figure`` is what each of their values has, ``total`` what the others have together,
    ``what`` HTML that says what a value is.
    """
    folds = sorted(folds_of(rows), key=weight, reverse=True)
    if not folds:
        return '<p class="none">nothing</p>'
    shown, rest = shown_and_rest(folds, VALUES_SHOWN)
    items = "".join(value_item(fold, figure(fold), what(fold.first)) for fold in shown)
    if rest:
        items += f'<li class="more">{rest_text(rest, total)}, in the tables below</li>'
    return f'<ul class="values">{items}</ul>'


def value_item(fold: Fold, figure: str, what: str) -> str:
    times = f"{len(fold.rows)} × " if len(fold.rows) > 1 else ""
    where = " · ".join(part for part in (code(fold.first.module), source_of(fold.first.source)) if part)
    reason = fold.first.reason
    return (
        f"<li><span>{code(fold.first.name)}{role_text(fold.first)} {what}</span>"
        f"<b>{times}{figure}</b><small>{where}{code_of(fold.first)}</small>"
        f"<em>{escape(f'{reason[:1].upper()}{reason[1:]}')}.</em></li>"
    )
