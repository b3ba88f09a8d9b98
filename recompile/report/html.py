"""The report as one HTML file: styles, script and charts are in it, and nothing is loaded from anywhere.

All text of the user's (names, paths, reasons) is escaped where it is written. A content security policy in the file
itself keeps a browser from loading anything, and from running any script but report.js.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from recompile.hardware import named_hardware
from recompile.report.advice import advice_for
from recompile.report.glossary import reading
from recompile.report.sections import graph_section
from recompile.report.tables import source_of
from recompile.report.text import share_above
from recompile.units import format_bytes, format_flop, format_seconds

if TYPE_CHECKING:
    from recompile.report.explanation import Explanation
    from recompile.tradeoff import Frontier

FOLDER = Path(__file__).parent
SAME_SHARE = 1e-3  # of a time: what differs by less is called the same
LONG_WORD = re.compile(r"[\w.]{30,}")
OPTION_TEXT = (
    "memory_budget is an option of the backend: <code>torch.compile(model, backend=&quot;recompile&quot;, "
    "options={&quot;memory_budget&quot;: ...})</code>"
)


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
    sections = [graph_section(graph, title_of(explanation, k)) for k, graph in enumerate(graphs)]
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
        f'<header><p class="eyebrow">recompile · {escape(" · ".join(facts))}</p>'
        f"<h1>{escape(text[0].upper() + text[1:])}</h1>"
        "<p>Bytes are over what is allocated when forward starts: parameters, optimizer state and the batch are there "
        "already. All figures are predicted by a model of the step; nothing was measured. Words are explained "
        '<a href="#reading">at the end</a>.</p>'
        f"{f'<ul class=notes>{notes}</ul>' if notes else ''}{tiles(explanation)}</header>"
    )


def tiles(explanation: Explanation) -> str:
    graphs = explanation.counted
    if not graphs:
        return ""
    peaks = [f"{peak.phase} {format_bytes(peak.live_bytes)}" for peak in graphs[0].peaks] if len(graphs) == 1 else []
    floor = explanation.floor_bound_bytes
    smallest = graphs[0].frontier[0].peak_bytes if len(graphs) == 1 and graphs[0].frontier else None
    num_kept = sum(row.kind != "input" for graph in graphs for row in graph.saved)
    shown = [("peak of the step", format_bytes(explanation.peak_bytes), [" · ".join(peaks)], fill(explanation))]
    shown += [training_tile(explanation)] if explanation.footprint is not None else []
    shown += [
        ("kept for backward", format_bytes(explanation.saved_bytes), [f"{num_kept} values"], ""),
        ("computed again", format_flop(explanation.recompute_flops), again_facts(explanation), ""),
        ("step", format_seconds(explanation.step_seconds), step_facts(explanation), ""),
    ]
    if smallest is not None:
        below = [] if floor is None else [f"none can be below {format_bytes(floor)}"]
        shown.append(("smallest peak found", format_bytes(smallest), below, ""))
    items = (
        f"<div class=tile><dt>{name}</dt><dd><b>{value}</b>{bar}"
        f"{''.join(f'<span>{escape(text)}</span>' for text in texts if text)}</dd></div>"
        for name, value, texts, bar in shown
    )
    return f"<dl class=tiles>{''.join(items)}</dl>"


def training_tile(explanation: Explanation) -> tuple[str, str, list[str], str]:
    """All that training takes of the GPU, which is what runs out, and what it would take with everything kept."""
    total = explanation.footprint.total_bytes
    hardware = named_hardware().get(explanation.graphs[0].hardware)
    everything = dict(explanation.graphs[0].baselines).get("save_all") if len(explanation.graphs) == 1 else None
    facts = ["parameters, optimizer and CUDA included: listed at the end"]
    if everything is not None:
        all_kept = explanation.footprint.with_step(everything.peak_bytes).total_bytes
        fits = "" if hardware is None else f": {fit_text(all_kept, hardware.memory_bytes)}"
        facts.append(f"{format_bytes(all_kept)} with everything kept{fits}")
    if hardware is None:
        return "all that training takes", format_bytes(total), facts, ""
    share = total / hardware.memory_bytes
    text = f"{share:.1%} of {format_bytes(hardware.memory_bytes)}"
    return "all that training takes", format_bytes(total), facts, bar_of(share, text)


def fit_text(total_bytes: int, memory_bytes: int) -> str:
    return "needs no budget to fit" if total_bytes <= memory_bytes else "more than there is"


def again_facts(explanation: Explanation) -> list[str]:
    graphs = explanation.counted
    total = sum(graph.total_flops for graph in graphs)
    num = f"{sum(len(graph.recomputed) for graph in graphs)} ops, in backward"
    if not total:
        return [num]
    return [num, f"+{explanation.recompute_flops / total:.1%} FLOP over the {format_flop(total)} of a step without it"]


def step_facts(explanation: Explanation) -> list[str]:
    """The step beside the fastest plan, beside keeping everything, and beside what no plan undercuts."""
    graphs, seconds = explanation.counted, explanation.step_seconds
    facts = []
    fastest = [min((p.step_seconds for p in graph.frontier), default=None) for graph in graphs]
    if None not in fastest:
        share = share_above(seconds, sum(fastest))
        facts.append(f"+{share} time over the fastest plan found, {format_seconds(sum(fastest))}")
    everything = [dict(graph.baselines).get("save_all") for graph in graphs]
    if None not in everything:
        all_kept = sum(point.step_seconds for point in everything)
        change = seconds / all_kept - 1 if all_kept else 0.0
        peak = f" and {format_bytes(everything[0].peak_bytes)}" if len(graphs) == 1 else ""
        why = ""
        if None not in fastest and all_kept > (1 + SAME_SHARE) * sum(fastest):
            why = " (slower than the fastest: it writes and reads what is cheap to compute again)"
        facts.append(f"{change:+.1%} time over everything kept, {format_seconds(all_kept)}{peak}{why}")
    bound = explanation.lower_bound_seconds
    if bound is not None:
        within = " within the budget" if any(graph.limit_bytes is not None for graph in graphs) else ""
        best = f"none{within} can be below {format_seconds(bound)}"
        facts.append(f"at most {share_above(seconds, bound)} more time than the best possible: {best}")
    return facts


def fill(explanation: Explanation) -> str:
    """How much of the budget the peak takes, as a bar."""
    graphs = explanation.counted
    budget = graphs[0].budget_bytes if len(graphs) == 1 else None
    if not budget:
        return ""
    share = explanation.peak_bytes / budget
    return bar_of(share, f"{share:.1%} of the budget of {format_bytes(budget)}")


def bar_of(share: float, text: str) -> str:
    bar = f'<span class="fill"><span style="width:{min(share, 1):.1%}"></span></span>'
    return f"{bar}<span>{escape(text)}</span>"


def title_of(explanation: Explanation, number: int) -> str:
    """Of one of several graphs; "" where there is one."""
    if len(explanation.graphs) == 1:
        return ""
    counted = "" if number not in explanation.left_out else " (for other inputs: not in the totals)"
    return f"Graph {number + 1} of {len(explanation.graphs)}{counted}"


def advice_section(explanation: Explanation) -> str:
    found = advice_for(explanation)
    items = "".join(
        f"<li><b>{escape(advice.seen)}</b> {source_of(advice.source)}<br>{breakable(escape(advice.do))}</li>"
        for advice in found
    )
    where = f"<p class=small>{OPTION_TEXT}</p>" if any("memory_budget" in advice.do for advice in found) else ""
    return f'<section class="advice"><h2>What you can do</h2><ul>{items}</ul>{where}</section>' if items else ""


def breakable(text: str) -> str:
    """Long words may be broken after underscores, as on a phone."""
    return LONG_WORD.sub(lambda word: word[0].replace("_", "_<wbr>"), text)


# All of training


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
    """Inductor's program beside the prediction, and which of them to trust."""
    program = explanation.program
    rows = [
        ("peak", format_bytes(explanation.peak_bytes), format_bytes(program.peak_bytes)),
        ("step", format_seconds(explanation.step_seconds), format_seconds(program.seconds)),
    ]
    text = (
        "The program was emitted for the GPU and not run. Its peak is a replay of its allocations: where the peaks "
        "differ, trust that one. Its time is a sum over its kernels of a launch and the longer of their arithmetic and "
        "their memory traffic."
    )
    spilled = sum(kernel.spilled_bytes for kernel in program.kernels)
    hardware = named_hardware().get(explanation.graphs[0].hardware)
    if spilled and hardware is not None and hardware.counts_spills:
        with_spills = format_seconds(program.seconds_with_spills)
        apart = abs(program.seconds_with_spills / explanation.step_seconds - 1)
        rows.append(("step, all traffic counted", format_seconds(explanation.step_seconds), with_spills))
        text += (
            f" Inductor does not count the {format_bytes(spilled)} that kernels write for themselves and read again "
            "where rows (of a softmax, of a layer norm) are too long for registers. This report's time has them, and "
            f"so has the last row: trust these two. They differ by {apart:.1%}: a measured step may differ from "
            "either by as much."
        )
    body = "".join(f'<tr><th scope="row">{n}</th><td class=num>{a}</td><td class=num>{b}</td></tr>' for n, a, b in rows)
    return (
        f"<div><h3>Beside Inductor's program for {escape(program.chip.device_name)}</h3><table class=plain>"
        f"<tr><td></td><th scope=col class=num>this report</th><th scope=col class=num>its program</th></tr>"
        f"{body}</table><p class=small>{text}</p></div>"
    )
