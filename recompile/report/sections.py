"""What the HTML report shows of one graph: memory over the step, its layers, the trade-off, and every value."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape

from recompile.report.charts import AGAIN, BANDS, KEPT, frontier_chart, layers_chart, timeline_chart
from recompile.report.explanation import GraphReport, ValueRow
from recompile.report.layers import Fold, Treatment, folds_of, layers_of, place_of, ranges_text, treatments_of
from recompile.report.tables import (
    again_table,
    behind_of,
    code,
    frontier_rows,
    kept_table,
    refusals_table,
    residents_list,
    shape_text,
    short_op,
    source_of,
    work_text,
)
from recompile.report.text import bound_text, reach_text, short_source
from recompile.units import format_bytes

WIDE, HALF, NARROW = 1030, 497, 340  # px: a desktop's column, half of it, and a phone's of 390 less its margins
VALUES_SHOWN = 6  # of a layer, before "and n more"
LAYER_HEADS = (
    ("layers", ""), ("each keeps", " class=num"), ("mostly", ""), ("computes again", " class=num"), ("mostly", "")
)  # fmt: skip
LEAST_LAYERS = 3  # of one kind for a chart of them


def graph_section(graph: GraphReport, title: str) -> str:
    """All of one graph, under a title if there are several."""
    values = f"<h2>Every value</h2>{kept_table(graph)}{again_table(graph)}{refusals_table(graph)}"
    shown = memory_section(graph) + layers_section(graph) + frontier_section(graph) + f"<section>{values}</section>"
    heading = f'<h2 class="graph-title">{escape(title)}</h2>' if title else ""
    return f"<article>{heading}{about(graph)}{shown}</article>"


def about(graph: GraphReport) -> str:
    """Sentences on one graph that no chart shows."""
    asked = "" if graph.budget.isdigit() else f"{graph.budget} = "
    budget = graph.budget if graph.budget_bytes is None else f"{asked}{format_bytes(graph.budget_bytes)}"
    facts = [f"Budget {budget}, planner {graph.planner}, hardware {graph.hardware}."]
    if graph.lower_bound_seconds is not None:
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
        f'<div class="columns">{peaks}</div></section>'
    )


def place_text(row: ValueRow | None) -> str:
    if row is None:
        return ""
    module = f" in {code(row.module)}" if row.module else ""
    return f"{module} {source_of(row.source)}"


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
    by_name = {row.name: row for row in graph.values}
    heads = "".join(f"<th scope=col{css}>{name}</th>" for name, css in LAYER_HEADS)
    body = "".join(layer_rows(treatment, by_name) for treatment in treatments_of(layers))
    return (
        "<section><h2>Layer by layer</h2><p>Layers with the same decisions share a row. Beside what is kept "
        "stands what would run again without it: that is what its memory buys.</p>"
        f'{charts}<table class="summary"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></section>'
    )


def layer_rows(treatment: Treatment, by_name: dict[str, ValueRow]) -> str:
    """What each of some layers keeps and computes again, and below it, folded away, why."""

    def worth(fold: Fold) -> str:
        work = work_text(behind_of(fold.first, by_name))
        return f", {format_bytes(fold.size_bytes)} <small>else {work} again</small>"

    kept = main_values(treatment.kept, lambda fold: fold.size_bytes, worth)
    again = main_values(treatment.again, lambda fold: fold.seconds, lambda fold: "")
    keeps = format_bytes(sum(row.size_bytes for row in treatment.kept))
    why = (
        f"<div><h3>Kept: {len(treatment.kept)} values</h3>{kept_list(treatment.kept, by_name)}</div>"
        f"<div><h3>Computed again: {len(treatment.again)} ops</h3>{again_list(treatment.again)}</div>"
    )
    return (
        f'<tr><th scope="row">{title_of(treatment)}</th><td class="num" data-t="each keeps">{keeps}</td>'
        f'<td class="list">{kept}</td><td class="num" data-t="computes again">{work_text(treatment.again)}</td>'
        f'<td class="list">{again}</td></tr><tr class="why"><td colspan="5"><details><summary>why</summary>'
        f'<div class="columns">{why}</div></details></td></tr>'
    )


def main_values(rows: Sequence[ValueRow], weight: Callable[[Fold], float], text: Callable[[Fold], str]) -> str:
    """The three weightiest kinds of value, each with where it is made and the HTML that ``text`` adds."""
    folds = sorted(folds_of(rows, also=lambda row: None), key=lambda fold: -weight(fold))
    items = []
    for fold in folds[:3]:
        place = place_of(fold.first.module)
        rest = place.rest or (place.stem if place.layer is None else "")
        where = f" in {code(rest)}" if rest else f" at {source_of(fold.first.source)}" if fold.first.source else ""
        items.append(f"<li>{code(short_op(fold.first.op))}{where}{text(fold)}</li>")
    return f"<ul>{''.join(items)}</ul>" if items else "nothing"


def title_of(treatment: Treatment) -> str:
    if not treatment.layers:
        return "outside of layers"
    stem = treatment.stem.removesuffix("*").rstrip(".") or "layers"
    count = f" <small>({len(treatment.layers)} layers)</small>" if len(treatment.layers) > 1 else ""
    return f"<code>{escape(stem)}</code> {ranges_text(treatment.layers)}{count}"


def kept_list(rows: Sequence[ValueRow], by_name: dict[str, ValueRow]) -> str:
    """The largest kept values, with what would run again without each and its reason."""

    def why(fold: Fold) -> str:
        work = work_text(behind_of(fold.first, by_name))
        reason = fold.first.reason
        shown = f"Its own price: {reason}" if reason.startswith("rebuilding") else f"{reason[:1].upper()}{reason[1:]}"
        return f"Without it {work} more would run again. {shown}."

    return values_list(rows, lambda fold: fold.size_bytes, why)


def again_list(rows: Sequence[ValueRow]) -> str:
    """The dearest ops that run again, with their reasons."""
    return values_list(rows, lambda fold: fold.seconds, lambda fold: fold.first.reason)


def values_list(rows: Sequence[ValueRow], weight: Callable[[Fold], float], why: Callable[[Fold], str]) -> str:
    folds = sorted(folds_of(rows), key=lambda fold: -weight(fold))
    if not folds:
        return '<p class="none">nothing</p>'
    items = "".join(value_item(fold, why(fold)) for fold in folds[:VALUES_SHOWN])
    rest = folds[VALUES_SHOWN:]
    if rest:
        count, size = sum(len(fold.rows) for fold in rest), format_bytes(sum(fold.size_bytes for fold in rest))
        items += f'<li class="more">and {count} more, {size}: in the tables below</li>'
    return f'<ul class="values">{items}</ul>'


def value_item(fold: Fold, why: str) -> str:
    times = f"{len(fold.rows)} × " if len(fold.rows) > 1 else ""
    rest = place_of(fold.first.module).rest or fold.first.module
    where = " · ".join(part for part in (code(rest), source_of(fold.first.source)) if part)
    return (
        f"<li><span>{times}{code(short_op(fold.first.op))} <code>{escape(shape_text(fold.first))}</code></span>"
        f"<b>{format_bytes(fold.size_bytes)}</b><small>{where}</small><em>{escape(why)}</em></li>"
    )


def frontier_section(graph: GraphReport) -> str:
    if not graph.frontier:
        return (
            "<section><h2>Trade-off between memory and time</h2><p class=small>This planner meets no other plans. "
            "<code>to_html(path, frontier=recompile.frontier(...))</code> shows them.</p></section>"
        )
    charts = frontier_chart(graph, graph.frontier, WIDE, 330, "wide")
    charts += frontier_chart(graph, graph.frontier, NARROW, 280, "narrow")
    legend = (
        '<ul class="legend"><li><i class="met"></i>plans met on the way</li><li><i class="dot"></i>this plan</li>'
        '<li><i class="barred"></i>no plan can be here, by this model</li></ul>'
    )
    return (
        f"<section><h2>Trade-off between memory and time</h2><p>{escape(next_step(graph))}</p>{legend}{charts}"
        f"<details><summary>as a table</summary>{frontier_rows(graph.frontier)}</details></section>"
    )


def next_step(graph: GraphReport) -> str:
    """What more memory buys, and what less costs."""
    larger = [p for p in graph.frontier if p.step_seconds < 0.98 * graph.step_seconds]
    smaller = [p for p in graph.frontier if p.peak_bytes < 0.9 * graph.peak_bytes]
    said = []
    if larger:
        more = larger[0].peak_bytes - graph.peak_bytes
        faster = 1 - larger[0].step_seconds / graph.step_seconds
        said.append(f"{format_bytes(more)} more memory would spare {faster:.1%} of the step's time")
    if smaller:
        less, slower = graph.peak_bytes - smaller[-1].peak_bytes, smaller[-1].step_seconds / graph.step_seconds - 1
        said.append(f"{format_bytes(less)} less would add {slower:.1%}")
    if not said:
        return "No plan was met that needs a tenth less memory, or that is 2 % faster."
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}."
