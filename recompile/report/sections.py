"""What the HTML report shows of one graph: memory over the step, its layers, the trade-off, and every value."""

from __future__ import annotations

import json
from html import escape

from recompile.report.alternatives import frontier_section
from recompile.report.charts import BANDS, NARROW, WIDE, other_bytes, timeline_chart
from recompile.report.explanation import GraphReport
from recompile.report.layers_section import layers_section
from recompile.report.residents import residents_list
from recompile.report.tables import (
    MODEL_ITSELF,
    again_table,
    code,
    code_of,
    kept_table,
    refusals_table,
    role_of,
    short_op,
    source_of,
)
from recompile.report.text import bound_text, reach_text, short_source
from recompile.units import format_bytes, format_seconds

VALUES_TEXT = (
    "<p class=small>Values of one op, shape and line in equal layers share a row: figures are sums, below them what "
    "each has; what is headed “each” is of one. What a kept value <b>spares</b> is by how much longer the step takes "
    "without it alone; what an op that runs again <b>adds</b> is little inside of a kernel that waits for memory. "
    "FLOP/B is arithmetic intensity, operations per byte moved.</p>"
)
PLANNERS = {
    "mincut": "proposes plans by minimum cuts, simulates them, takes the fastest that fits",
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
    facts = [f"Budget {budget}{margin_text(graph)}; planner {planner}; times are for {graph.hardware}."]
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


def margin_text(graph: GraphReport) -> str:
    """What of a budget is held back."""
    if not graph.budget_bytes or graph.limit_bytes is None or graph.limit_bytes >= graph.budget_bytes:
        return ""
    return f", of which {1 - graph.limit_bytes / graph.budget_bytes:.1%} is held back for what the prediction misses"


def memory_section(graph: GraphReport) -> str:
    legend = "".join(f'<li><i class="{css}"></i>{name}</li>' for css, name, _ in BANDS)
    charts = timeline_chart(graph, WIDE, 380, "wide") + timeline_chart(graph, NARROW, 330, "narrow")
    peaks = "".join(
        f"<div><h3>Alive at {peak.phase}'s peak, {format_bytes(peak.live_bytes)}</h3>"
        f"<p class=small>{moment_text(graph, peak.moment)}</p>"
        f"{residents_list(graph, peak)}</div>"
        for peak in graph.peaks
    )
    return (
        f'<section><h2>Live memory over the step</h2><ul class="legend">{legend}</ul>'
        f'<div class="timeline">{charts}<script type="application/json">{moments_json(graph)}</script></div>'
        f"{spike_text(graph)}"
        f'<div class="columns">{peaks}</div></section>'
    )


def moment_text(graph: GraphReport, k: int) -> str:
    """Where in the model and when kernel k runs, what it does, and the user's line."""
    moment = graph.timeline[k]
    row = next((row for row in graph.values if row.name == moment.node), None)
    clock = sum(before.seconds for before in graph.timeline[:k])
    module = code(row.module) if row is not None and row.module else MODEL_ITSELF
    role = f" ({escape(role_of(row))})" if row is not None and role_of(row) else ""
    line = f": {source_of(row.source)}{code_of(row)}" if row is not None and row.source else ""
    when = f"{format_seconds(clock)} into the step"
    return f"in {moment.phase} of {module}, {when}, while {code(moment.node)}{role} runs{line}"


def spike_text(graph: GraphReport) -> str:
    """Where most temporaries are alive: what a chart shows as grey spikes."""
    sizes = [other_bytes(moment) for moment in graph.timeline]
    if not sizes or not max(sizes):
        return ""
    k = sizes.index(max(sizes))
    return (
        "<p class=small>Grey spikes are temporaries, alive for a few kernels. The largest: "
        f"{format_bytes(sizes[k])}, {moment_text(graph, k)}</p>"
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
