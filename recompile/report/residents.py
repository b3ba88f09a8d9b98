"""What is alive at a peak, as a list: the largest groups of values with their share of it."""

from __future__ import annotations

from recompile.report.explanation import GraphReport, PeakReport, ValueRow
from recompile.report.layers import Fold, place_of
from recompile.report.tables import MODEL_ITSELF, code, code_of, role_text, shape_text, short_op, source_of
from recompile.units import format_bytes

RESIDENTS_SHOWN = 6
# Of a peak, for a group of values that is named; and for the largest of each use, which is named before others.
LEAST_SHARE_SHOWN, LEAST_SHARE_OF_A_USE = 0.01, 0.001
USE_NAMES = {
    "saved": "kept for backward",
    "rebuilt": "computed again",
    "gradient": "gradient",
    "output": "output of forward",
    "temporary": "temporary",
}
USES_NAMES = {
    **USE_NAMES, "gradient": "gradients", "output": "outputs of forward", "temporary": "temporaries",
}  # fmt: skip


def residents_list(graph: GraphReport, peak: PeakReport) -> str:
    """What is alive at a peak: the largest groups of values with their share of it."""
    rows = {row.name: row for row in graph.values}
    groups: dict[tuple, list[tuple[ValueRow, int]]] = {}
    for name, size, use in peak.alive:
        row = rows[name]
        groups.setdefault((use, row.op, row.shape, row.source, place_of(row.module).folded), []).append((row, size))
    ordered = sorted(groups.items(), key=lambda item: -sum(size for _, size in item[1]))
    named = set()
    shown, rest = [], []
    for (use, *_), group in ordered:
        share = sum(size for _, size in group) / (peak.live_bytes or 1)
        is_large = len(shown) < RESIDENTS_SHOWN and share >= LEAST_SHARE_SHOWN
        is_named = is_large or (use not in named and share >= LEAST_SHARE_OF_A_USE)
        (shown if is_named else rest).append((use, group))
        named.add(use)
    items = [resident(use, group, peak.live_bytes) for use, group in shown]
    if rest:
        count, size = sum(len(group) for _, group in rest), sum(size for _, group in rest for _, size in group)
        kinds = f", of {len(rest)} kinds" if len(rest) > 1 else ""
        text = f"and {count} smaller {'ones' if count > 1 else 'one'}{kinds}"
        items.append(f'<li class="more"><span>{text}</span><b>{format_bytes(size)}</b></li>')
    if peak.shared_bytes > 0:
        text = "written in place over values that die there"
        items.append(f'<li class="more"><span>{text}</span><b>−{format_bytes(peak.shared_bytes)}</b></li>')
    if peak.shared_bytes < 0:
        text = "needed by the kernel itself"
        items.append(f'<li class="more"><span>{text}</span><b>{format_bytes(-peak.shared_bytes)}</b></li>')
    return f'{uses_text(peak)}<ul class="residents">{"".join(items)}</ul>'


def uses_text(peak: PeakReport) -> str:
    """What a peak is made of, by use, the largest first."""
    sizes: dict[str, int] = {}
    for _, size, use in peak.alive:
        sizes[use] = sizes.get(use, 0) + size
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    text = " · ".join(f"{format_bytes(size)} {USES_NAMES[use]}" for use, size in ordered if size)
    return f'<p class="small">{text}</p>' if text else ""


def resident(use: str, group: list[tuple[ValueRow, int]], live_bytes: int) -> str:
    first, size = group[0][0], sum(size for _, size in group)
    fold = Fold(tuple(row for row, _ in group))
    times = f"{len(group)} × " if len(group) > 1 else ""
    share = size / live_bytes if live_bytes else 0.0
    name = first.name if first.kind == "input" else short_op(first.op)
    return (
        f'<li><span class="what"><i class="{use}"></i>{times}{code(name)} '
        f"{code(shape_text(first))}{role_text(first)}</span><b>{format_bytes(size)}</b>"
        f'<span class="where">{USE_NAMES[use]} · {code(fold.module) or MODEL_ITSELF} '
        f'{source_of(first.source)}{code_of(first)}</span><span class="share">{share_text(share)}</span>'
        f'<span class="bar"><span class="{use}" style="width:{min(share, 1):.1%}"></span></span></li>'
    )


def share_text(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "&lt; 1%"
