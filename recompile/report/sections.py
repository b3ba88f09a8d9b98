"""What the HTML report shows of one graph: memory over the step, its layers, the trade-off, and every value."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from recompile.report.alternatives import frontier_section
from recompile.report.charts import AGAIN, BANDS, HALF, KEPT, NARROW, WIDE, layers_chart, other_bytes, timeline_chart
from recompile.report.explanation import Exchange, GraphReport, ValueRow
from recompile.report.layers import Fold, Treatment, folds_of, layers_of, place_of, ranges_text, treatments_of
from recompile.report.residents import residents_list
from recompile.report.tables import (
    again_table,
    code,
    code_of,
    kept_table,
    refusals_table,
    role_of,
    role_text,
    shape_text,
    short_op,
    source_of,
    spared_seconds,
    work_text,
)
from recompile.report.text import bound_text, reach_text, short_source
from recompile.units import format_bytes, format_flop, format_seconds

VALUES_SHOWN = 6  # of a layer, before "and n more"
LAYER_HEADS = (
    ("layers", ""), ("each keeps", " class=num"), ("mostly", ""), ("computes again", " class=num"), ("mostly", "")
)  # fmt: skip
SAME_SHARE = 1e-3  # of the step's time or peak: what differs by less is called the same
LEAST_LAYERS = 3  # of one kind for a chart of them


VALUES_TEXT = (
    "<p class=small>Values of one op, shape and line in equal layers share a row: figures are sums, below them what "
    "each has; what is headed “each” is of one. What a kept value <b>spares</b> is by how much longer the step takes "
    "without it; what an op that runs again <b>adds</b> is little inside of a kernel that waits for memory. FLOP/B is "
    "arithmetic intensity, operations per byte moved: what is low is cheap to compute again.</p>"
)
PLANNERS = {
    "mincut": "minimum cuts at every price of memory, simulated; the fastest that fits",
    "stock": "PyTorch's own choice",
    "save_all": "keeps everything",
    "full": "computes whole blocks again",
    "exact": "the best plan by the simulation, proven",
}


def graph_section(graph: GraphReport, title: str) -> str:
    """All of one graph, under a title if there are several."""
    values = f"<h2>Every value</h2>{VALUES_TEXT}{kept_table(graph)}{again_table(graph)}{refusals_table(graph)}"
    shown = memory_section(graph) + layers_section(graph) + frontier_section(graph) + f"<section>{values}</section>"
    heading = f'<h2 class="graph-title">{escape(title)}</h2>' if title else ""
    return f"<article>{heading}{about(graph, is_one_of_several=bool(title))}{shown}</article>"


def about(graph: GraphReport, is_one_of_several: bool) -> str:
    """Sentences on one graph that no chart shows; the header says some of it where there is but one."""
    asked = "" if graph.budget.isdigit() else f"{graph.budget} = "
    budget = graph.budget if graph.budget_bytes is None else f"{asked}{format_bytes(graph.budget_bytes)}"
    planner = f"{graph.planner} ({PLANNERS[graph.planner]})" if graph.planner in PLANNERS else graph.planner
    facts = [f"Budget {budget}; planner {planner}; times are for {graph.hardware}."]
    if graph.lower_bound_seconds is not None and is_one_of_several:
        text = bound_text(graph)
        facts.append(f"{text[0].upper()}{text[1:]}.")
    if graph.sizes:
        facts.append(f"Planned at the sizes {', '.join(graph.sizes)}; {reach_text(graph)}.")
    if graph.program_bytes is not None:
        facts.append(f"The program that Inductor made of it needs {format_bytes(graph.program_bytes)}.")
    if graph.ended_by:
        facts.append(f"Ends at a graph break: {graph.ended_by}.")
    return f'<p class="about">{escape(" ".join(facts))}</p>'


def memory_section(graph: GraphReport) -> str:
    legend = "".join(f'<li><i class="{css}"></i>{name}</li>' for css, name, _ in BANDS)
    charts = timeline_chart(graph, WIDE, 380, "wide") + timeline_chart(graph, NARROW, 330, "narrow")
    rows = {row.name: row for row in graph.values}
    peaks = "".join(
        f"<div><h3>Alive at {peak.phase}'s peak, {format_bytes(peak.live_bytes)}</h3>"
        f"<p class=small>while {code(peak.node)} runs{place_text(rows.get(peak.node))}</p>"
        f"{residents_list(graph, peak)}</div>"
        for peak in graph.peaks
    )
    return (
        f'<section><h2>Live memory over the step</h2><ul class="legend">{legend}</ul>'
        f'<div class="timeline">{charts}<script type="application/json">{moments_json(graph)}</script></div>'
        f"{spike_text(graph)}"
        f'<div class="columns">{peaks}</div></section>'
    )


def place_text(row: ValueRow | None) -> str:
    """What the op does, where, and the user's line, or that it is of its gradient."""
    if row is None:
        return ""
    role = f" ({escape(role_of(row))})" if role_of(row) else ""
    module = f" in {code(row.module)}" if row.module else ""
    gradient = " for the gradient of" if row.side == "backward" and row.source else ""
    return f"{role}{module}{gradient} {source_of(row.source)}{code_of(row)}"


def spike_text(graph: GraphReport) -> str:
    """Where most temporaries are alive: what a chart shows as grey spikes."""
    sizes = [other_bytes(moment) for moment in graph.timeline]
    if not sizes or not max(sizes):
        return ""
    k = sizes.index(max(sizes))
    moment, row = graph.timeline[k], next((row for row in graph.values if row.name == graph.timeline[k].node), None)
    clock = sum(moment.seconds for moment in graph.timeline[:k])
    return (
        f"<p class=small>Grey spikes are temporaries, alive for a few kernels. Most are {format_bytes(sizes[k])}, at "
        f"{format_seconds(clock)} while {code(moment.node)} runs{place_text(row)}</p>"
    )


def moments_json(graph: GraphReport) -> str:
    """For the tooltip: per kernel its end in seconds, a line of text, and bytes by band."""
    rows = {row.name: row for row in graph.values}
    clock, found = 0.0, []
    for moment in graph.timeline:
        clock += moment.seconds
        row = rows.get(moment.node)
        where = " · ".join(part for part in (row.module, short_source(row.source)) if part) if row else ""
        bands = [format_bytes(part(moment)) for _, _, part in BANDS]
        name = f"{moment.phase}: {short_op(row.op) if row else ''} {moment.node}"
        found.append([float(f"{clock:.6g}"), name, where, format_bytes(moment.live_bytes), *bands])
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def layers_section(graph: GraphReport) -> str:
    """Per kind of layer what is kept and why, layers with the same decisions once."""
    layers = layers_of(graph)
    if not layers:
        return ""
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
    heads = "".join(f"<th scope=col{css}>{name}</th>" for name, css in LAYER_HEADS)
    body = "".join(layer_rows(treatment) for treatment in treatments_of(layers))
    return (
        "<section><h2>Layer by layer</h2><p>Layers with the same decisions share a row; figures are of one layer. What "
        "a value spares is by how much longer the step would take without it, what it is made of computed again as far "
        "as need be. Memory goes to what spares most per MiB, until the budget is full: that is why layers differ.</p>"
        f'{charts}<table class="summary"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
        f"{exchanges_list(graph)}</section>"
    )


def exchanges_list(graph: GraphReport) -> str:
    """Why these layers and not their neighbours: what the step would be if they changed places."""
    items = "".join(f"<li>{escape(exchange_text(graph, exchange))}</li>" for exchange in graph.exchanges)
    return f"<h3>If layers changed places</h3><ul class=exchanges>{items}</ul>" if items else ""


def exchange_text(graph: GraphReport, exchange: Exchange) -> str:
    """``blocks 5 treated as 4 is, and 4 as 5: as long a step, the same peak. Either would do.``"""
    stem = exchange.stem.removesuffix("*").rstrip(".") or "layers"
    is_as_long = abs(exchange.seconds) <= SAME_SHARE * graph.step_seconds
    is_as_high = abs(exchange.peak_bytes) <= SAME_SHARE * graph.peak_bytes
    time = "as long a step" if is_as_long else f"a step {change(exchange.seconds, format_seconds, 'longer', 'shorter')}"
    peak = "the same peak" if is_as_high else f"a peak {change(exchange.peak_bytes, format_bytes, 'higher', 'lower')}"
    either = " Either would do." if is_as_long and is_as_high else ""
    a, b = exchange.layer, exchange.other
    return f"{stem} {a} treated as {b} is, and {b} as {a}: {time}, {peak}.{either}"


def change(value: float, text: Callable[[Any], str], more: str, less: str) -> str:
    return f"{text(abs(value))} {more if value > 0 else less}"


def layer_rows(treatment: Treatment) -> str:
    """What each of some layers keeps and computes again, and below it, folded away, why."""
    kept = main_values(treatment.kept, lambda fold: (fold.size_bytes, spared_seconds(fold)), kept_figures)
    again = main_values(treatment.again, lambda fold: fold.again_seconds, again_figures)
    keeps = format_bytes(sum(row.size_bytes for row in treatment.kept))
    why = (
        f"<div><h3>Kept: {len(treatment.kept)} values, {keeps}</h3>{kept_list(treatment.kept)}</div>"
        f"<div><h3>Computed again: {work_text(treatment.again)}</h3>{again_list(treatment.again)}</div>"
    )
    return (
        f'<tr><th scope="row">{title_of(treatment)}</th><td class="num" data-t="each keeps">{keeps}</td>'
        f'<td class="list">{kept}</td><td class="num" data-t="computes again">{work_cell(treatment.again)}</td>'
        f'<td class="list">{again}</td></tr><tr class="why"><td colspan="5"><details><summary>why</summary>'
        f'<div class="columns">{why}</div></details></td></tr>'
    )


def work_cell(rows: Sequence[ValueRow]) -> str:
    """The time that computing again adds, and below it the work."""
    time, flop = (sum(getattr(row, name) for row in rows) for name in ("again_seconds", "flop"))
    return f"<span>{format_seconds(time)}<br><small>{len(rows)} ops, {format_flop(flop)}</small></span>"


def kept_figures(fold: Fold) -> str:
    """Bytes, and what they spare."""
    spares = f", spares {format_seconds(spared_seconds(fold))}" if spared_seconds(fold) > 0 else ""
    each = " each" if spares and len(fold.rows) > 1 else ""
    return f", {format_bytes(fold.size_bytes)}<small>{spares}{each}</small>"


def again_figures(fold: Fold) -> str:
    """Seconds, and the work."""
    return f", {format_seconds(fold.again_seconds)}<small>, {format_flop(fold.flop)}</small>"


def main_values(rows: Sequence[ValueRow], weight: Callable[[Fold], Any], text: Callable[[Fold], str]) -> str:
    """The three weightiest kinds of value, each with what it is, where it is made, and the HTML that ``text`` adds."""
    folds = sorted(folds_of(rows, also=lambda row: None), key=weight, reverse=True)
    items = []
    for fold in folds[:3]:
        times = f"{len(fold.rows)} × " if len(fold.rows) > 1 else ""
        place = source_of(fold.first.source) or code(place_of(fold.first.module).folded)
        where = f" <small>{role_of(fold.first)}</small>" if role_of(fold.first) else ""
        where += f" at {place}" if place else ""
        items.append(f"<li>{times}{code(short_op(fold.first.op))}{where}{text(fold)}</li>")
    return f"<ul>{''.join(items)}</ul>" if items else "nothing"


def title_of(treatment: Treatment) -> str:
    if not treatment.layers:
        return "outside of layers"
    stem = treatment.stem.removesuffix("*").rstrip(".") or "layers"
    count = f" <small>({len(treatment.layers)} layers)</small>" if len(treatment.layers) > 1 else ""
    return f"<code>{escape(stem)}</code> {ranges_text(treatment.layers)}{count}"


def kept_list(rows: Sequence[ValueRow]) -> str:
    """The largest kept values with their reasons; of equally large ones those that spare most."""
    return values_list(
        rows, lambda fold: (fold.size_bytes, spared_seconds(fold)), lambda fold: format_bytes(fold.first.size_bytes)
    )


def again_list(rows: Sequence[ValueRow]) -> str:
    """The dearest ops that run again, with their reasons."""
    return values_list(rows, lambda fold: fold.again_seconds, lambda fold: format_seconds(fold.first.again_seconds))


def values_list(rows: Sequence[ValueRow], weight: Callable[[Fold], Any], figure: Callable[[Fold], str]) -> str:
    """The weightiest folds; ``figure`` is what each of their values has."""
    folds = sorted(folds_of(rows), key=weight, reverse=True)
    if not folds:
        return '<p class="none">nothing</p>'
    items = "".join(value_item(fold, figure(fold)) for fold in folds[:VALUES_SHOWN])
    rest = folds[VALUES_SHOWN:]
    if rest:
        items += f'<li class="more">and {sum(len(fold.rows) for fold in rest)} more: in the tables below</li>'
    return f'<ul class="values">{items}</ul>'


def value_item(fold: Fold, figure: str) -> str:
    times = f"{len(fold.rows)} × " if len(fold.rows) > 1 else ""
    where = " · ".join(part for part in (code(fold.first.module), source_of(fold.first.source)) if part)
    reason = fold.first.reason
    return (
        f"<li><span>{code(fold.first.name)}{role_text(fold.first)} {code(shape_text(fold.first))}</span>"
        f"<b>{times}{figure}</b><small>{where}{code_of(fold.first)}</small>"
        f"<em>{escape(f'{reason[:1].upper()}{reason[1:]}')}.</em></li>"
    )
