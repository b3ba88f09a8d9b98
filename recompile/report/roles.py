"""What values are, in words: by their op, and where the graph says more, by what they are made of and read by.

A role is told of what the graph leaves no doubt about: exp(x) / sum(exp(x)) is a softmax whatever its author called it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from recompile.report.explanation import ValueRow
from recompile.work import words

# As fx prints them.
SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
# What ops do, where their names do not say it; ``{dtype}`` is that of their result.
ROLES = {
    "addmm": "matmul plus bias", "mm": "matmul", "bmm": "batched matmul", "baddbmm": "batched matmul plus input",
    "convert_element_type": "cast to {dtype}", "_to_copy": "cast to {dtype}", "clone": "copy in another layout",
    "inductor_random": "random numbers", "inductor_seeds": "random seeds", "inductor_lookup_seed": "a random seed",
    "gt": "comparison: >", "ge": "comparison: ≥", "lt": "comparison: <", "le": "comparison: ≤", "ne": "comparison: ≠",
    "eq": "comparison: =", "amax": "maximum", "where": "choice by a mask", "full": "a constant", "iota": "0, 1, 2, …",
    "getitem": "one of several results", "rsqrt": "1/√", "native_layer_norm": "layer norm",
}  # fmt: skip
CASTS = ("convert_element_type", "_to_copy")
VIEWS = words("view _unsafe_view reshape expand permute transpose unsqueeze squeeze")
COMPARISONS = ("gt", "ge", "lt", "le")
MASK, MASKED, SOFTMAX, RESIDUAL = "dropout mask", "masked by dropout", "softmax", "residual sum"
MOST_STEPS = 2000  # of the search for the branch of a residual sum: a layer has a few hundred values


def short_op(op: str) -> str:
    """``addmm`` for ``aten.addmm.default``; the namespace stays where it is none of PyTorch's."""
    parts = op.split(".")
    if len(parts) != 3:
        return op
    return parts[1] if parts[0] in ("aten", "prims") else f"{parts[0]}.{parts[1]}"


def role_of(row: ValueRow) -> str:
    """What the value is, or what its op does, in words; "" where the op's name says it."""
    return row.role or ROLES.get(short_op(row.op), "").format(dtype=dtype_text(row))


def dtype_text(row: ValueRow) -> str:
    return SHORT_DTYPES.get(row.dtype, row.dtype)


@dataclass(frozen=True)
class Neighbours:
    """Rows by name, their places, and who reads them."""

    rows: Mapping[str, ValueRow]
    places: Mapping[str, int]
    users: Mapping[str, Sequence[ValueRow]]

    def inputs(self, row: ValueRow) -> list[ValueRow]:
        return [self.rows[name] for name in row.inputs]

    def readers(self, row: ValueRow) -> Iterator[ValueRow]:
        """What computes with a value, through casts and views of it."""
        for user in self.users.get(row.name, ()):
            yield from self.readers(user) if short_op(user.op) in (*CASTS, *VIEWS) else (user,)


def with_roles(rows: Sequence[ValueRow]) -> tuple[ValueRow, ...]:
    """The rows of a graph, in its order, with the roles that the graph tells."""
    users: dict[str, list[ValueRow]] = {}
    for row in rows:
        for name in row.inputs:
            users.setdefault(name, []).append(row)
    around = Neighbours({row.name: row for row in rows}, {row.name: k for k, row in enumerate(rows)}, users)
    roles: dict[str, str] = {}
    for row in rows:
        role = told_role(row, around, roles)
        if role:
            roles[row.name] = role
    return tuple(replace(row, role=roles.get(row.name, "")) for row in rows)


def told_role(row: ValueRow, around: Neighbours, roles: Mapping[str, str]) -> str:
    """The role of a row whose inputs have theirs; "" where the graph does not tell."""
    op, inputs = short_op(row.op), around.inputs(row)
    of_inputs = [roles.get(name, "") for name in row.inputs]
    first = of_inputs[0] if of_inputs else ""
    if op == "getitem":
        return f"one result of {short_op(inputs[0].op)}"
    if row.dtype in ("tuple", "list"):
        shapes = ["×".join(user.shape) for user in around.users.get(row.name, ()) if short_op(user.op) == "getitem"]
        return f"results {', '.join(shapes)}" if all(shapes) and shapes else ""
    if op in CASTS and first.startswith((MASK, MASKED, SOFTMAX, RESIDUAL)):
        return f"{first.partition(', cast')[0]}, cast to {dtype_text(row)}"
    if op in COMPARISONS and is_dropout_mask(row, inputs, around):
        return MASK
    if op == "mul" and any(role.startswith((MASK, MASKED)) for role in of_inputs):
        return MASKED if len(inputs) > 1 else f"{first.partition(', ')[0]}, scaled"
    if op == "div" and is_softmax(inputs):
        return SOFTMAX
    return RESIDUAL if op == "add" and row.side == "forward" and is_residual_sum(row, inputs, around) else ""


def is_dropout_mask(row: ValueRow, inputs: Sequence[ValueRow], around: Neighbours) -> bool:
    """Random numbers, cast or not, beside a constant, by which something is multiplied."""
    if len(inputs) != 1:
        return False
    made = inputs[0]
    while short_op(made.op) in CASTS:
        made = around.inputs(made)[0]
    is_random = short_op(made.op) == "inductor_random"
    return is_random and any(short_op(reader.op) == "mul" for reader in around.readers(row))


def is_softmax(inputs: Sequence[ValueRow]) -> bool:
    """exp(x) over its sum."""
    if len(inputs) != 2:
        return False
    above, below = inputs
    return short_op(above.op) == "exp" and short_op(below.op) == "sum" and below.inputs == (above.name,)


def is_residual_sum(row: ValueRow, inputs: Sequence[ValueRow], around: Neighbours) -> bool:
    """x + f(x) of one shape, with a library call in f: activations are written as such sums too, without one."""
    if len(inputs) != 2 or any(each.shape != row.shape for each in inputs):
        return False
    start, end = sorted(inputs, key=lambda each: around.places[each.name])
    pending, seen = [(end, end.kind == "extern")], set()
    while pending and len(seen) < MOST_STEPS:
        at, has_call = pending.pop()
        for before in around.inputs(at):
            if before.name == start.name and has_call:
                return True
            state = (before.name, has_call or before.kind == "extern")
            if around.places[before.name] > around.places[start.name] and state not in seen:
                seen.add(state)
                pending.append((before, state[1]))
    return False
