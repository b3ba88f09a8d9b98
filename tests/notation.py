"""A notation for hand-written joint graphs, one line a node: a test shows the whole graph and the whole outcome.

    x = input 4x8               a placeholder primals_1; `param` is one that the model owns, `tangent` one of backward
    w = param 8x8 bfloat16      a dtype, float32 unless given; `s4x8` is a symbol with hint 4, `-` a scalar
    a = mm x w                  torch.ops.aten; its first overload unless given: sum a [1], sum.default a
    s = prims.inductor_seeds 1 cpu
    g = mm x' t                 x' is a node x_t, aten.t of x
    v = var_mean.correction a [1] correction=0
    m = getitem v 0
    e = exp a !must_save @model.py:7      a checkpoint policy and the user's source line
    return e | g None           forward's outputs | backward's

Arguments contain no spaces and are Python with names of nodes: cat [a,e] 1. Nodes are named as in the notation.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import CheckpointPolicy

import recompile.torch_private  # noqa: F401  registers Inductor's prims
from recompile.annotation import annotate
from recompile.hardware import Hardware, named_hardware
from recompile.joint import JointGraph, Plan
from recompile.torch_private import is_tangent

PLACEHOLDERS = ("input", "param", "tangent")
H100 = named_hardware()["planner-h100"]  # 700 TFLOP/s, 3 TB/s, 2 us a kernel

NAMED_DIMENSIONS = ("Dimname", "names")  # torch 2.11 lists these overloads of select and full first

# A matmul, exp and another matmul; a and e are 128 bytes each. The step peaks at 512 bytes with e kept, 384 rebuilt.
CHAIN = """
    x = input 4x8
    w = param 8x8
    a = mm x w
    e = exp a
    y = mm e w
    t = tangent 4x8
    g2 = mm t w'
    g3 = mul g2 e
    g4 = mm g3 w'
    return y | g4
"""


class Joint(NamedTuple):
    """A joint graph as AOTAutograd hands it to a partitioner; ``node`` maps the notation's names to nodes."""

    module: fx.GraphModule
    num_fwd_outputs: int
    node: dict[str, fx.Node]
    params: tuple[fx.Node, ...]


def joint(text: str, device: str = "cpu") -> Joint:
    """Build the graph; every op is executed on fake tensors, its inputs on ``device``, for its ``meta["val"]``."""
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    lines = [line for line in lines if line]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph, node = fx.Graph(), {}
    inputs = [line for line in lines if line[2] in PLACEHOLDERS]
    for kind, prefix in (("primal", "primals"), ("tangent", "tangents")):
        chosen = [line for line in inputs if (line[2] == "tangent") == (kind == "tangent")]
        for number, (name, _, _, shape, *dtype) in enumerate(chosen, start=1):
            node[name] = graph.placeholder(f"{prefix}_{number}")
            node[name].meta["val"] = fake_input(mode, shape, getattr(torch, *dtype or ["float32"]), device)
    for name, _, op, *words in (line for line in lines if line[1:2] == ["="] and line not in inputs):
        node[name] = call(graph, mode, node, name, op, words)
    forward, backward = (part.split() for part in " ".join(lines[-1][1:]).split("|"))
    graph.output(tuple(None if name == "None" else node[name] for name in forward + backward))
    graph.lint()
    params = tuple(node[line[0]] for line in inputs if line[2] == "param")
    return Joint(fx.GraphModule({}, graph), len(forward), node, params)


def annotated(text: str, hardware: Hardware = H100, device: str = "cpu") -> JointGraph:
    """The annotated graph of a notation."""
    parsed = joint(text, device)
    return annotate(parsed.module, parsed.num_fwd_outputs, hardware, parsed.params)


def fake_input(mode: FakeTensorMode, shape: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor like ``4x8``; sizes written ``s4`` become symbols."""
    sizes = [] if shape == "-" else shape.split("x")
    real = torch.empty([int(size.lstrip("s")) for size in sizes], dtype=dtype, device=device)
    dynamic = [DimDynamic.DYNAMIC if size.startswith("s") else DimDynamic.STATIC for size in sizes]
    return mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))


def call(
    graph: fx.Graph, mode: FakeTensorMode, node: dict[str, fx.Node], name: str, op: str, words: list[str]
) -> fx.Node:
    """Add one op to the graph and execute it."""
    args, kwargs, meta = [], {}, {}
    for word in words:
        key, is_keyword, value = word.partition("=")
        if word.startswith("!"):
            meta["recompute"] = CheckpointPolicy[word[1:].upper()]
        elif word.startswith("@"):
            path, _, line = word[1:].partition(":")
            meta["stack_trace"] = f'  File "{path}", line {line}, in forward\n    ...'
        elif is_keyword:
            kwargs[key] = value_of(value, node)
        elif word.endswith("'") and word[:-1] in node:
            transposed = f"{word[:-1]}_t"
            if transposed not in node:
                node[transposed] = call(graph, mode, node, transposed, "t", [word[:-1]])
            args.append(node[transposed])
        else:
            args.append(value_of(word, node))
    target = target_of(op)
    made = graph.create_node("call_function", target, tuple(args), kwargs, name=name)
    assert made.name == name, f"{name} is taken or no good name for a node"
    real_args, real_kwargs = fx.map_arg((made.args, made.kwargs), lambda argument: argument.meta["val"])
    with mode:
        made.meta = {"val": target(*real_args, **real_kwargs), **meta}
    return made


def value_of(word: str, node: dict[str, fx.Node]) -> Any:
    """An argument: a node by name, a device, or a Python expression of nodes and ``torch``."""
    return torch.device(word) if word in ("cpu", "meta") else eval(word, {"torch": torch, **node})


def target_of(op: str) -> Any:
    """The op that a word names: aten unless a namespace is given, and without an overload torch's first one."""
    namespace, _, rest = op.partition(".")
    if op == "getitem" or namespace == "operator":
        return getattr(operator, rest or op)
    if namespace not in ("aten", "prims", "_c10d_functional", "notation", "higher_order"):
        namespace, rest = "aten", op
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    if isinstance(packet, torch._ops.HigherOrderOperator):
        return packet
    return getattr(packet, overload or next(name for name in packet.overloads() if name not in NAMED_DIMENSIONS))


def plan_text(plan: Plan) -> str:
    """``saved: a | recomputed: e``, in graph order; inputs, which cost nothing to keep, are left out."""
    saved = [choice.node.name for choice in plan.saved if choice.node.op != "placeholder"]
    return f"saved: {' '.join(saved) or '-'} | recomputed: {' '.join(c.node.name for c in plan.recomputed) or '-'}"


def order_text(graph: fx.Graph) -> str:
    """The ops of a backward graph in order; a star: no tangent reaches it, so it is rebuilt from what was saved."""
    reached: set[fx.Node] = set()
    words = []
    for node in graph.nodes:
        if is_tangent(node) or any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
        if node.op == "call_function":
            words.append(node.name if node in reached else f"{node.name}*")
    return " ".join(words)
