"""Attention that is written out: found as a softmax between two products, with all that has the scores' shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from recompile.report.explanation import GraphReport, ValueRow
from recompile.work import words

PRODUCTS = ("bmm", "baddbmm", "matmul")
SOFTMAX = ("exp", "_softmax", "_safe_softmax")
# What the fused kernels do too: scales, masks, softmax, dropout, casts, and other ways to look at the same values.
FUSED = words(
    "view _unsafe_view reshape expand clone permute transpose unsqueeze squeeze alias mul div add sub rsub neg where "
    "masked_fill maximum convert_element_type _to_copy exp amax sum _softmax _safe_softmax gt ge lt le "
    "inductor_random native_dropout bernoulli getitem"
)
LOOK_UPS = ("embedding", "index")  # a bias that is looked up in a table is learned: its gradient has the scores' shape


@dataclass(frozen=True)
class Scores:
    """Values between the two products of an attention: their shapes, and the softmax among them."""

    shapes: frozenset[tuple[str, ...]]
    softmax: ValueRow


def op_of(row: ValueRow) -> str:
    """``bmm`` for ``aten.bmm.default``."""
    parts = row.op.split(".")
    return parts[1] if len(parts) == 3 else row.op


def written_out(graph: GraphReport) -> Iterator[Scores]:
    """Every attention of forward whose scores are values of the graph and that a fused kernel could compute."""
    rows = {row.name: row for row in graph.values if row.side != "backward"}
    users: dict[str, list[ValueRow]] = {}
    for row in rows.values():
        for name in row.inputs:
            users.setdefault(name, []).append(row)
    for row in rows.values():
        if op_of(row) in SOFTMAX and len(row.shape) > 2:
            above = between(row, lambda at: [rows[name] for name in at.inputs if name in rows])
            below = between(row, lambda at: users.get(at.name, []))
            if above is not None and below is not None and not has_learned_bias(above, rows):
                yield Scores(frozenset(at.shape for at in (*above, *below)), row)


def between(start: ValueRow, neighbours: Callable[[ValueRow], Sequence[ValueRow]]) -> list[ValueRow] | None:
    """The values of the scores' extent from a softmax to the nearest products; None without any product, and where
    something lies between that no fused kernel does.
    """
    found, pending, has_product = {start.name: start}, [start], False
    while pending:
        for row in neighbours(pending.pop()):
            if op_of(row) in PRODUCTS:
                has_product = True
                if row.shape[-2:] == start.shape[-2:]:
                    found.setdefault(row.name, row)
            elif row.shape[-2:] == start.shape[-2:] and len(row.shape) > 2 and row.name not in found:
                if op_of(row) not in FUSED:
                    return None
                found[row.name] = row
                pending.append(row)
    return list(found.values()) if has_product else None


def has_learned_bias(scores: Sequence[ValueRow], rows: Mapping[str, ValueRow]) -> bool:
    """Whether something is added to the scores that was looked up in a table."""
    names = {row.name for row in scores}
    pending = [
        rows[name] for row in scores if op_of(row) == "add" for name in row.inputs if name in rows and name not in names
    ]
    seen = set(names)
    while pending:
        row = pending.pop()
        if op_of(row) in LOOK_UPS:
            return True
        if row.name not in seen:
            seen.add(row.name)
            pending += [rows[name] for name in row.inputs if name in rows and name not in seen]
    return False
