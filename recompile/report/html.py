"""The report as one HTML file: styles, script and charts are in it, and nothing is loaded from anywhere.

All text of the user's (names, paths, reasons) is escaped where it is written. A content security policy in the file
itself keeps a browser from loading anything, and from running any script but report.js.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from recompile.hardware import named_hardware
from recompile.report.advice import advice_for
from recompile.report.charts import AGAIN, BANDS, KEPT, frontier_chart, layers_chart, timeline_chart
from recompile.report.explanation import GraphReport, ValueRow
from recompile.report.layers import Fold, Layer, Treatment, folds_of, layers_of, place_of, ranges_text, treatments_of
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
from recompile.report.text import bound_text, reach_text, share_above, short_source
from recompile.units import format_bytes, format_flop, format_seconds

if TYPE_CHECKING:
    from recompile.report.explanation import Explanation
    from recompile.tradeoff import Frontier

FOLDER = Path(__file__).parent
WIDE, HALF, NARROW = 1030, 497, 340  # px: a desktop's column, half of it, and a phone's of 390 less its margins
VALUES_SHOWN = 6  # of a layer, before "and n more"
LAYER_HEADS = (
    ("layers", ""), ("each keeps", " class=num"), ("mostly", ""), ("computes again", " class=num"), ("mostly", "")
)  # fmt: skip
LEAST_LAYERS = 3  # of one kind for a chart of them


def explanation_html(explanation: Explanation, frontier: Frontier | None = None) -> str:
    """The whole file. ``frontier``: in place of the plans that the planner met; ValueError for several graphs."""
    graphs = explanation.graphs
    if frontier is not None:
        if len(graphs) != 1:
            raise ValueError(f"a frontier belongs to one graph, and this explanation has {len(graphs)}")
        graphs = (replace(graphs[0], frontier=frontier.points),)
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    sections = [graph_section(explanation, graph, k) for k, graph in enumerate(graphs)]
    body = "".join([header(explanation), advice_section(explanation), *sections, whole_section(explanation), reading()])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>recompile: {escape(headline(explanation))}</title><style>{style}</style></head>"
        f"<body><main>{body}</main><div id='tip' role='status'></div><script>{script}</script></body></html>\n"
    )


# What comes first


def headline(explanation: Explanation) -> str:
    """The plan in a sentence."""
    graphs = explanation.counted
    if not graphs:
        return "no training graph was compiled yet"
    budget = graphs[0].budget_bytes if len(graphs) == 1 else None
    of = f" of {format_bytes(budget)}" if budget is not None else ""
    kept = sum(row.kind != "input" for graph in graphs for row in graph.saved)
    again = sum(len(graph.recomputed) for graph in graphs)
    total = sum(graph.total_flops for graph in graphs)
    share = explanation.recompute_flops / total if total else 0.0
    several = f" in {len(graphs)} graphs" if len(graphs) > 1 else ""
    return (
        f"peak {format_bytes(explanation.peak_bytes)}{of}: {kept} values kept, {again} ops computed again, "
        f"+{share:.1%} FLOP{several}"
    )


def header(explanation: Explanation) -> str:
    graphs = explanation.counted
    facts = []
    if graphs:
        facts = [f"planned for {graphs[0].hardware}", f"planner {graphs[0].planner}"]
        facts.append(f"{sum(graph.planning_seconds for graph in graphs):.1f} s to plan")
    text = headline(explanation)
    notes = "".join(f"<li>{escape(note)}</li>" for note in explanation.notes)
    return (
        f'<header><p class="eyebrow">recompile · {escape(" · ".join(facts))}</p><h1>{escape(text[0].upper() + text[1:])}'
        f"</h1><p>Bytes are over what is allocated when forward starts; all figures are predicted.</p>"
        f'{f"<ul class=notes>{notes}</ul>" if notes else ""}{tiles(explanation)}</header>'
    )


def tiles(explanation: Explanation) -> str:
    graphs = explanation.counted
    if not graphs:
        return ""
    peaks = [f"{peak.phase} {format_bytes(peak.live_bytes)}" for peak in graphs[0].peaks] if len(graphs) == 1 else []
    fastest = [min((p.step_seconds for p in graph.frontier), default=None) for graph in graphs]
    slower = "" if None in fastest else f"{share_above(explanation.step_seconds, sum(fastest))} over the fastest plan"
    bound, floor = explanation.lower_bound_seconds, explanation.floor_bound_bytes
    limits = "" if bound is None else f"at most {share_above(explanation.step_seconds, bound)} above the best possible"
    smallest = graphs[0].frontier[0].peak_bytes if len(graphs) == 1 and graphs[0].frontier else None
    num_kept = sum(row.kind != "input" for graph in graphs for row in graph.saved)
    num_again = sum(len(graph.recomputed) for graph in graphs)
    shown = [
        ("peak", format_bytes(explanation.peak_bytes), [" · ".join(peaks)], fill(explanation)),
        ("kept for backward", format_bytes(explanation.saved_bytes), [f"{num_kept} values"], ""),
        ("computed again", format_flop(explanation.recompute_flops), [f"{num_again} ops, in backward"], ""),
        ("step", format_seconds(explanation.step_seconds), [slower, limits], ""),
    ]
    if smallest is not None:
        below = [] if floor is None else [f"none can be below {format_bytes(floor)}"]
        shown.append(("smallest peak met", format_bytes(smallest), below, ""))
    items = (
        f"<div class=tile><dt>{name}</dt><dd><b>{value}</b>{bar}"
        f"{''.join(f'<span>{escape(text)}</span>' for text in texts if text)}</dd></div>"
        for name, value, texts, bar in shown
    )
    return f"<dl class=tiles>{''.join(items)}</dl>"


def fill(explanation: Explanation) -> str:
    """How much of the budget the peak takes, as a bar."""
    graphs = explanation.counted
    budget = graphs[0].budget_bytes if len(graphs) == 1 else None
    if not budget:
        return ""
    share = explanation.peak_bytes / budget
    return f'<span class="fill"><span style="width:{min(share, 1):.1%}"></span></span><span>{share:.1%} of the budget</span>'


def advice_section(explanation: Explanation) -> str:
    items = "".join(
        f"<li><b>{escape(advice.seen)}</b> {source_of(advice.source)}<br>{escape(advice.do)}</li>"
        for advice in advice_for(explanation)
    )
    return f'<section class="advice"><h2>What you can do</h2><ul>{items}</ul></section>' if items else ""


# One graph


def graph_section(explanation: Explanation, graph: GraphReport, number: int) -> str:
    parts = [memory_section(graph, number), layers_section(graph), frontier_section(graph)]
    parts.append(f"<section><h2>Every value</h2>{kept_table(graph)}{again_table(graph)}{refusals_table(graph)}</section>")
    if len(explanation.graphs) == 1:
        return about(graph) + "".join(parts)
    counted = "" if number not in explanation.left_out else " (for other inputs: not in the totals)"
    return (
        f'<div class="graph"><h2 class="graph-title">Graph {number + 1} of {len(explanation.graphs)}{counted}</h2>'
        f"{about(graph)}{''.join(parts)}</div>"
    )


def about(graph: GraphReport) -> str:
    """Sentences on one graph that no chart shows."""
    budget = graph.budget if graph.budget_bytes is None else f"{graph.budget} = {format_bytes(graph.budget_bytes)}"
    facts = [f"Budget {budget}, planner {graph.planner}, hardware {graph.hardware}."]
    if graph.lower_bound_seconds is not None:
        text = bound_text(graph)
        facts.append(f"{text[0].upper()}{text[1:]}.")
    if graph.sizes:
        facts.append(f"Planned at the sizes {', '.join(graph.sizes)}; {reach_text(graph)}.")
    if graph.ended_by:
        facts.append(f"Ends at a graph break: {graph.ended_by}.")
    return f'<p class="about">{escape(" ".join(facts))}</p>'


def memory_section(graph: GraphReport, number: int) -> str:
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
        "<section><h2>Layer by layer</h2><p>Layers with the same decisions share a row. What is kept is worth its memory "
        "by what would have to run again without it; where memory is dearer, more is computed again.</p>"
        f'{charts}<table class="summary"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></section>'
    )


def layer_rows(treatment: Treatment, by_name: dict[str, ValueRow]) -> str:
    """What each of some layers keeps and computes again, and below it, folded away, why."""
    kept = main_values(treatment.kept, lambda fold: fold.size_bytes, format_bytes)
    again = main_values(treatment.again, lambda fold: fold.seconds, None)
    keeps = format_bytes(sum(row.size_bytes for row in treatment.kept))
    return (
        f'<tr><th scope="row">{title_of(treatment)}</th><td class="num" data-t="each keeps">{keeps}</td>'
        f'<td class="list">{kept}</td><td class="num" data-t="computes again">{work_text(treatment.again)}</td>'
        f'<td class="list">{again}</td></tr><tr class="why"><td colspan="5"><details><summary>why</summary>'
        f'<div class="columns"><div><h3>Kept: {len(treatment.kept)} values</h3>{kept_list(treatment.kept, by_name)}</div>'
        f"<div><h3>Computed again: {len(treatment.again)} ops</h3>{again_list(treatment.again)}</div></div>"
        "</details></td></tr>"
    )


def main_values(
    rows: Sequence[ValueRow], weight: Callable[[Fold], float], text: Callable[[int], str] | None
) -> str:
    """The three weightiest kinds of value, each with where it is made; ``text`` shows their weights."""
    folds = sorted(folds_of(rows, also=lambda row: None), key=lambda fold: -weight(fold))
    items = []
    for fold in folds[:3]:
        rest = place_of(fold.first.module).rest or (fold.first.module if place_of(fold.first.module).layer is None else "")
        where = f" in {code(rest)}" if rest else f" at {source_of(fold.first.source)}" if fold.first.source else ""
        weighed = f", {text(weight(fold))}" if text else ""
        items.append(f"<li>{code(short_op(fold.first.op))}{where}{weighed}</li>")
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
        return f"Without it {work} more would run again. Its own price: {fold.first.reason}."

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


# All of training, and how to read it


def whole_section(explanation: Explanation) -> str:
    """The footprint of training and Inductor's own program, where the explanation has them."""
    parts = []
    if explanation.footprint is not None:
        hardware = named_hardware().get(explanation.graphs[0].hardware)
        has = f" of {format_bytes(hardware.memory_bytes)}" if hardware is not None else ""
        total = format_bytes(explanation.footprint.total_bytes)
        rows = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td class=num>{format_bytes(size)}</td></tr>'
            for name, size in explanation.footprint.items()
        )
        parts.append(f"<div><h3>All that training takes: {total}{has}</h3><table class=plain>{rows}</table></div>")
    if explanation.program is not None:
        parts.append(program_part(explanation))
    return f'<section><h2>On the device</h2><div class="columns">{"".join(parts)}</div></section>' if parts else ""


def program_part(explanation: Explanation) -> str:
    program = explanation.program
    rows = [
        ("peak", format_bytes(explanation.peak_bytes), format_bytes(program.peak_bytes)),
        ("step", format_seconds(explanation.step_seconds), format_seconds(program.seconds)),
        ("kernels", str(sum(len(graph.timeline) for graph in explanation.graphs)), str(program.num_launches)),
    ]
    body = "".join(f'<tr><th scope="row">{n}</th><td class=num>{a}</td><td class=num>{b}</td></tr>' for n, a, b in rows)
    return (
        f"<div><h3>Beside Inductor's program for {escape(program.chip.device_name)}</h3><table class=plain><tr><td></td>"
        f"<th scope=col class=num>predicted</th><th scope=col class=num>emitted</th></tr>{body}</table></div>"
    )


def reading() -> str:
    return (
        '<section><details class="reading"><summary>How to read this</summary><dl>'
        "<dt>peak</dt><dd>The most bytes alive at once in forward and backward, over what is allocated when forward "
        "starts: kept values, temporaries, outputs and gradients. Parameters and optimizer state are not in it.</dd>"
        "<dt>kept</dt><dd>Handed from forward to backward. Inputs and parameters are allocated anyway and not counted.</dd>"
        "<dt>computed again</dt><dd>Run in forward and a second time in backward. What only backward needs runs once and "
        "is not in it.</dd>"
        "<dt>reason</dt><dd>Seconds are what the choice adds to the step, fusion considered and its inputs at hand: 0.0 us "
        "where the value is written anyway, or computed inside of a kernel that waits for memory. The plan weighs chains "
        "of values, so one whose own price is low may be kept: it spares what it is computed from.</dd>"
        "<dt>else run again</dt><dd>What would be computed again if the value were not kept, back to others that are.</dd>"
        "<dt>FLOP/B</dt><dd>Arithmetic intensity: operations per byte moved. What is low is cheap to compute again.</dd>"
        "<dt>time</dt><dd>Of each op run alone; fused it takes less.</dd>"
        "<dt>no plan can be here</dt><dd>A proven bound within the model of the step that plans are chosen by.</dd>"
        "</dl></details></section>"
    )
