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
FLOATS = ("float64", "float32", "float16", "bfloat16")
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
    rows = {row.name: row for row in graph.values if row.side == "forward"}
    users: dict[str, list[ValueRow]] = {}
    for row in rows.values():
        for name in row.inputs:
            users.setdefault(name, []).append(row)
    for row in rows.values():
        if op_of(row) in SOFTMAX and len(row.shape) > 2:
            above = path_to_product(row, lambda at: [rows[name] for name in at.inputs if name in rows])
            below = path_to_product(row, lambda at: users.get(at.name, []))
            path = {at.name: at for at in (*above, *below)}
            are_fused = all(op_of(at) in FUSED for at in path.values() if op_of(at) not in PRODUCTS)
            if above and below and are_fused and not has_learned_bias(path, rows):
                yield Scores(frozenset(at.shape for at in path.values()), row)


def path_to_product(start: ValueRow, neighbours: Callable[[ValueRow], Sequence[ValueRow]]) -> list[ValueRow]:
    """The values of the scores' extent that lie between a softmax and a product, the one that makes the scores too;
    none where there is no product. What leads nowhere, as masks do, is left out.
    """
    order, seen = [start], {start.name}
    for row in order:  # grows
        for at in neighbours(row):
            if is_of_extent(at, start) and op_of(at) not in PRODUCTS and at.name not in seen:
                seen.add(at.name)
                order.append(at)
    found: dict[str, ValueRow] = {}
    has_grown = True
    while has_grown:
        has_grown = False
        for row in reversed(order):
            products = [at for at in neighbours(row) if op_of(at) in PRODUCTS]
            if row.name not in found and (products or any(at.name in found for at in neighbours(row))):
                found[row.name], has_grown = row, True
                found.update((at.name, at) for at in products if is_of_extent(at, start))
    return list(found.values())


def is_of_extent(row: ValueRow, other: ValueRow) -> bool:
    return len(row.shape) > 2 and row.shape[-2:] == other.shape[-2:]


def has_learned_bias(path: Mapping[str, ValueRow], rows: Mapping[str, ValueRow]) -> bool:
    """Whether something is added to the scores that was looked up in a table of numbers."""
    pending = [
        rows[name]
        for row in path.values()
        if op_of(row) == "add"
        for name in row.inputs
        if name in rows and name not in path
    ]
    seen = set(path)
    while pending:
        row = pending.pop()
        if row.name in seen or row.dtype not in FLOATS:  # a mask is no more than that
            continue
        if op_of(row) in LOOK_UPS:
            return True
        seen.add(row.name)
        pending += [rows[name] for name in row.inputs if name in rows]
    return False
