"""What a person can do about a plan, as sentences: each says what was seen, with its line, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from recompile.report.budget_advice import (
    Advice,
    a_larger_budget,
    a_smaller_budget,
    missed_decisions,
    no_budget_needed,
)
from recompile.report.explanation import GraphReport, PeakReport, ValueRow
from recompile.report.written_out import written_out
from recompile.units import format_bytes

if TYPE_CHECKING:
    from recompile.report.explanation import Explanation

# Share of a peak from which on one kind of value is named as its cause.
DOMINATES_SHARE = 0.5
# Share of a peak from which on the scores of attention are named: below it other values decide how high it is.
ATTENTION_SHARE = 0.25
# A peak within this share of the smallest one is called the smallest: plans do not come in finer steps.
AT_FLOOR_SHARE = 0.01
# Share of a peak from which on values that an opaque op pins are worth a sentence.
PINNED_SHARE = 0.01
# Ops that pick one score of each row, which is what a loss over classes does, in graphs before and after decomposition.
PICKS_A_CLASS = ("aten.gather.default", "aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
OPAQUE = ("a custom op (", "a higher-order op (")


def advice_for(explanation: Explanation) -> list[Advice]:
    """Advice on all graphs, the weightiest kind first, each once."""
    causes = (graph_break, class_scores, attention_scores, opaque_ops, at_the_floor)
    found = [advice for rule in causes for graph in explanation.graphs for advice in rule(graph)]
    found += no_budget_needed(explanation)
    budgets = (a_smaller_budget, a_larger_budget, missed_decisions)
    found += [advice for rule in budgets for graph in explanation.graphs for advice in rule(graph)]
    return list(dict.fromkeys(found))


def graph_break(graph: GraphReport) -> Iterator[Advice]:
    if not graph.ended_by:
        return
    source, _, reason = graph.ended_by.partition(": ")
    yield Advice(
        f"A graph ends at a graph break: {reason}.",
        "Each graph is planned on its own, so the budget holds for each and not for their sum: remove the break, or "
        "move it outside of the compiled function.",
        source,
    )


def class_scores(graph: GraphReport) -> Iterator[Advice]:
    """Logits over a large vocabulary, with their copies in float32 and their gradients."""
    rows = {row.name: row for row in graph.values}
    picked = [rows[row.inputs[0]] for row in graph.values if row.op in PICKS_A_CLASS and row.side == "forward"]
    extents = {extent_of(row.shape) for row in picked} - {None}
    if not graph.peaks or not extents:
        return
    peak, which = highest_peak(graph)
    alive = [(rows[name], size) for name, size, use in peak.alive if use != "gradient" and name in rows]
    scores = [(row, size) for row, size in alive if extent_of(row.shape) in extents]
    held = sum(size for _, size in scores)
    if held < DOMINATES_SHARE * peak.live_bytes:
        return
    largest = max(scores, key=lambda pair: pair[1])[0]
    yield Advice(
        f"The scores of {largest.shape[-1]} classes (logits, their copies and gradients) are {format_bytes(held)}, "
        f"{held / peak.live_bytes:.0%} of {which}.",
        "Recomputation cannot make them smaller: compute the last layer and the loss for slices of the batch, each "
        "under torch.utils.checkpoint, or use a loss that fuses both.",
        next((row.source for row in picked if row.source), largest.source),
    )


def highest_peak(graph: GraphReport) -> tuple[PeakReport, str]:
    """The highest of the graph's peaks and what to call it: where both read the same, neither phase has it alone."""
    peak = max(graph.peaks, key=lambda peak: peak.live_bytes)
    alike = [each for each in graph.peaks if format_bytes(each.live_bytes) == format_bytes(peak.live_bytes)]
    return peak, "the step's peak" if len(alike) > 1 else f"{peak.phase}'s peak, the highest"


def attention_scores(graph: GraphReport) -> Iterator[Advice]:
    """Attention as products and a softmax: a fused kernel makes no scores. Not said where they are returned."""
    found = list(written_out(graph))
    shapes = frozenset().union(*(scores.shapes for scores in found))
    if not graph.peaks or not shapes:
        return
    peak, which = highest_peak(graph)
    rows = {row.name: row for row in graph.values}
    alive = [(rows[name], size, use) for name, size, use in peak.alive if name in rows and rows[name].shape in shapes]
    held = sum(size for _, size, _ in alive)
    if held < ATTENTION_SHARE * peak.live_bytes or any(use == "output" for _, _, use in alive):
        return
    softmax = found[0].softmax
    yield Advice(
        f"Attention is written out: its scores and what is made of them, [..., {', '.join(softmax.shape[-2:])}] for "
        f"each head, are {format_bytes(held)}, {held / peak.live_bytes:.0%} of {which}.",
        "torch.nn.functional.scaled_dot_product_attention computes the same in fused kernels that keep none of them: "
        "its is_causal or attn_mask takes the place of a mask that is written out, its dropout_p that of dropout "
        '(transformers: attn_implementation="sdpa").',
        softmax.source,
    )


def extent_of(shape: tuple[str, ...]) -> tuple[str, str] | None:
    """Rows and classes of scores, whether the rows are one dimension or several; None for what has no rows."""
    if len(shape) < 2:
        return None
    rows = shape[:-1]
    return (str(math.prod(map(int, rows))) if all(size.isdigit() for size in rows) else "x".join(rows)), shape[-1]


def opaque_ops(graph: GraphReport) -> Iterator[Advice]:
    """Custom ops that must not run twice, and pin memory by that."""
    pinned: dict[tuple[str, str], list[ValueRow]] = {}
    for row in graph.values:
        reason = row.cannot_recompute or ""
        if row.decision == "saved" and reason.startswith(OPAQUE):
            pinned.setdefault((reason.partition("(")[2].partition(")")[0], row.source), []).append(row)
    for (name, source), rows in pinned.items():
        held = sum(row.size_bytes for row in rows)
        if held >= PINNED_SHARE * graph.peak_bytes:
            yield Advice(
                f"{format_bytes(held)} are kept because {name} may hide state and is not run twice.",
                "If it is a function of its inputs alone, say so: recompile.register_op(op, recompute=True, flop=...).",
                source,
            )


def at_the_floor(graph: GraphReport) -> Iterator[Advice]:
    """The smallest peak that was found, where it was a budget that asked for it."""
    smallest = graph.frontier[0].peak_bytes if len(graph.frontier) > 1 else None  # one plan alone leaves no choice
    if smallest is None or graph.budget_bytes is None or graph.peak_bytes > (1 + AT_FLOOR_SHARE) * smallest:
        return
    floor = graph.floor_bound_bytes
    bound = "" if floor is None else f" By this model no plan's can be below {format_bytes(floor)}."
    highest = max(graph.peaks, key=lambda peak: peak.live_bytes, default=None)
    where = "" if highest is None else f", reached in {highest.phase} at {highest.node}"
    rows = {row.name: row for row in graph.values}
    yield Advice(
        f"The peak of {format_bytes(graph.peak_bytes)}{where}, is the smallest that was found.{bound}",
        "For less, lower the batch size or the sequence length.",
        rows[highest.node].source if highest is not None and highest.node in rows else "",
    )
