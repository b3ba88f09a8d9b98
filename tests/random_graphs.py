"""Random small joint graphs in the notation and every legal plan of a graph: for properties that hold for all plans."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from recompile.dataflow import Dataflow, needed_by_backward, rebuilt_in_backward
from recompile.joint import JointGraph

ROWS, WIDTH = 2048, 512  # fake tensors: large enough that traffic counts beside launches

# Per op its lines; {n} is a fresh name, {a} and {b} are ROWS x WIDTH values, w a square parameter.
FORWARD_OPS = {
    "mm": "{n} = mm {a} w",
    "exp": "{n} = exp {a}",
    "add": "{n} = add {a} {b}",
    "mul": "{n} = mul {a} {b}",
    "softmax": "{n}m = amax {a} [1] True\n{n}s = sub {a} {n}m\n{n}e = exp {n}s\n{n}z = sum.dim_IntList {n}e [1] True\n"
    "{n} = div {n}e {n}z",
    "view": "{n}v = view {a} [512,2048]\n{n}w = sin {n}v\n{n} = view {n}w [2048,512]",
    "norm": "{n}v = var_mean.correction {a} [1] correction=0 keepdim=True\n{n}m = getitem {n}v 1\n{n} = sub {a} {n}m",
    "dropout": "{n}k = prims.inductor_lookup_seed seeds 0\n{n}r = prims.inductor_random [2048,512] {n}k 'rand'\n"
    "{n}g = gt.Scalar {n}r 0.5\n{n} = mul {a} {n}g",
    "columns": "{n}c = cos {a}\n{n}m = mean.dim {n}c [0] True\n{n} = sub {a} {n}m",
    "skip": "{n}e = exp {a}\n{n}c = cat [{n}e,{b}] 1\n{n} = mm {n}c u",
    "mask": "{n}e = full_like x 0.5\n{n}f = cos {n}e\n{n} = mul {a} {n}f",
    "half": "{n}h = prims.convert_element_type {a} torch.bfloat16\n{n} = prims.convert_element_type {n}h torch.float32",
}
BACKWARD_OPS = {
    "mm": "{n} = mm {g} w'",
    "weight": "{n}o = mm {a}' {g}\n{n} = mul {g} {a}",
    "mul": "{n} = mul {g} {a}",
    "add": "{n} = add {g} {h}",
    "softmax": "{n}p = mul {g} {a}\n{n}z = sum.dim_IntList {n}p [1] True\n{n}q = mul {a} {n}z\n{n} = sub {n}p {n}q",
    "scale": "{n}c = mul {g} {a}\n{n}o = sum.dim_IntList {n}c [0]\n{n} = cos {g}",
    "bias": "{n}o = sum.dim_IntList {g} [0]\n{n} = sin {g}",
    "chain": "{n} = mul {g} {a}\n{n}o = sum.dim_IntList {n} [0]",
}


@st.composite
def joint_texts(draw, num_forward: int = 5, num_backward: int = 6) -> str:
    """A graph in the notation whose forward and backward are drawn op by op; backward reads values of forward."""
    lines = [
        "x = input 2048x512",
        "w = param 512x512",
        "u = param 1024x512",
        "t = tangent 2048x512",
        "seeds = prims.inductor_seeds 4 cpu",
    ]
    values = ["x"]
    for position in range(draw(st.integers(1, num_forward))):
        op = draw(st.sampled_from(sorted(FORWARD_OPS)))
        recent = st.sampled_from(values[-3:])
        lines.append(FORWARD_OPS[op].format(n=f"f{position}", a=draw(recent), b=draw(recent)))
        values.append(f"f{position}")
    output, gradients, returned = values[-1], ["t"], []
    made = [
        line.split()[0] for line in "\n".join(lines[5:]).splitlines() if "getitem" in line or "var_mean" not in line
    ]
    readable = [name for name in made if name in values or name[-1] in "seg"] or ["x"]
    for position in range(draw(st.integers(1, num_backward))):
        op = draw(st.sampled_from(sorted(BACKWARD_OPS)))
        recent = st.sampled_from(gradients[-2:])
        name, read = f"b{position}", draw(st.sampled_from([*readable, "x"]))
        lines.append(BACKWARD_OPS[op].format(n=name, g=draw(recent), h=draw(recent), a=read))
        gradients.append(name)
        if f"{name}o =" in lines[-1]:
            returned.append(f"{name}o")
    kept = [name for name in readable if name != output and draw(st.integers(0, 9)) == 0]
    return "\n".join([*lines, f"return {' '.join([output, *kept])} | {' '.join([gradients[-1], *returned])}"])


def legal_sets(joint: JointGraph, flow: Dataflow, most: int = 10) -> list[frozenset[int]] | None:
    """Every legal set of saved nodes, those that nothing reads left out; None where more than ``most`` can be saved."""
    notes = [joint.notes[node] for node in flow.nodes]
    seen, pending = set(), list(needed_by_backward(flow))
    while pending:
        i = pending.pop()
        if i not in seen and not flow.is_input[i]:
            seen.add(i)
            pending += flow.inputs[i]
    savable = sorted(i for i in seen if notes[i].cannot_save is None)
    if len(savable) > most:
        return None
    subsets = (frozenset(subset) for n in range(len(savable) + 1) for subset in itertools.combinations(savable, n))
    return [subset for subset in subsets if is_legal(flow, notes, subset)]


def is_legal(flow: Dataflow, notes: list, saved: frozenset[int]) -> bool:
    """Whether nothing is rebuilt that must not be, and every saved value is read."""
    rebuilt, _ = rebuilt_in_backward(flow, saved)
    read = {a for i in rebuilt for a in flow.inputs[i]} | set(needed_by_backward(flow))
    return saved <= read and all(notes[i].cannot_recompute is None for i in rebuilt)
