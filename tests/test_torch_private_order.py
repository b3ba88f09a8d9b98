"""The graph's order for programs in which Inductor would store a library call's arguments late."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompile.dataflow import backward_order, dataflow_of, forward_order
from recompile.joint import Side
from recompile.late import LateArguments
from recompile.planner.finish import made_legal
from recompile.torch_private_order import in_order, stores_arguments_late
from tests.notation import annotated, joint
from tests.test_passes import split

LATE = """
    x = input 4x8
    w = param 8x8
    a = mul x x
    b = mm x w
    y = mm a b'
    return y | y
"""


@pytest.mark.parametrize(
    ("changes", "is_late"),
    [
        ({}, True),
        ({"mm a b'": "mm a2 b'", "a = mul x x": "a = mul x x\n    a2 = view a [4,8]"}, True),  # through a view
        ({"y = mm a b'": "c = add a 1\n    y = mm c b'"}, False),  # c stands after b
        ({"return y |": "c = add a 1\n    return c |"}, False),  # with two readers a is stored where it stands
        ({"b = mm x w": "b = exp x"}, False),  # no call between the two
        ({"a = mul x x": "a = cumsum x 1"}, False),  # a library call's result is there at once
        ({"a =": "n = _conj 1j\n    p = mul x n\n    a =", "y |": "y p |"}, True),  # n is a view of a number
    ],
)
def test_a_value_for_one_call_alone_waits_for_what_is_called_before_it(changes, is_late):
    text = LATE
    for old, new in changes.items():
        text = text.replace(old, new)
    assert stores_arguments_late(joint(text).module) == is_late
    flow = dataflow_of(annotated(text))
    program = np.array(forward_order(flow, frozenset()))
    assert LateArguments(flow).any_in(program, {flow.buffer[i] for i in flow.fwd_outputs}) == is_late


@st.composite
def products(draw):
    """Joint graphs of products and loops, each of what was computed shortly before, and what to save of forward."""
    lines, results = ["x = input 8x8", "w = param 8x8", "t = tangent 8x8"], []
    for prefix, names in (("f", ["x", "w"]), ("g", ["t", "f0", "f1"])):
        for number in range(draw(st.integers(5, 9))):
            one, two = (draw(st.sampled_from(names[-4:])) for _ in range(2))
            op = draw(st.sampled_from([f"mm {one} {two}", f"sin {one}", f"mul {one} {two}", f"view {one} [8,8]"]))
            names.append(f"{prefix}{number}")
            lines.append(f"{names[-1]} = {op}")
        results.append(names[-1])
    return "\n".join([*lines, f"return {results[0]} | {results[1]}"]), draw(st.sets(st.integers(0, 8), max_size=2))


def test_what_is_made_of_a_plan_and_what_is_said_of_it_before_agree():
    """Of both halves of drawn graphs, whatever is saved."""
    met = set()

    @settings(max_examples=150, derandomize=True, deadline=None)
    @given(products())
    def check(drawn):
        text, numbers = drawn
        graph = annotated(text)
        flow = dataflow_of(graph)
        able = [i for i, side in enumerate(flow.side) if side is not Side.BACKWARD and not flow.is_input[i]]
        saved = made_legal(graph, flow, frozenset(able[k % len(able)] for k in numbers))
        forward, backward = split(joint(text), " ".join(flow.nodes[i].name for i in saved))
        held, returned = ({flow.buffer[i] for i in kept} for kept in ([*saved, *flow.fwd_outputs], flow.bwd_outputs))
        programs = (forward_order(flow, saved), held), (backward_order(flow, saved), returned)
        said = tuple(LateArguments(flow).any_in(np.array(program, dtype=int), kept) for program, kept in programs)
        assert said == (stores_arguments_late(forward), stores_arguments_late(backward))
        met.add(said)

    check()
    assert [{*half} for half in zip(*met, strict=True)] == [{False, True}] * 2


@dataclass(frozen=True)
class Dep:
    name: str


@dataclass(frozen=True)
class Op:
    """A node of the graph."""

    number: int
    target: str = "op"


@dataclass(eq=False)
class Scheduled:
    """A node of Inductor's scheduler as far as the order looks at it: what it makes, reads and is computed from."""

    name: str
    reads: tuple[str, ...]
    ops: tuple[int, ...]
    is_call: bool = False

    @property
    def unmet_dependencies(self):
        return {Dep(name) for name in self.reads}

    @property
    def node(self):
        ops = [Op(k) for k in self.ops]
        return SimpleNamespace(origins=ops, get_origins=lambda: ops, get_origin_node=lambda: ops[-1])

    def get_nodes(self):
        return [self]

    def get_buffer_names(self):
        return {self.name}

    def is_extern(self):
        return self.is_call


@dataclass(eq=False)
class Fused:
    """Several of them."""

    parts: tuple[Scheduled, ...]

    @property
    def unmet_dependencies(self):
        return set().union(*(part.unmet_dependencies for part in self.parts))

    def get_nodes(self):
        return list(self.parts)

    def get_buffer_names(self):
        return {part.name for part in self.parts}


def order_of(*nodes):
    return ["+".join(sorted(node.get_buffer_names())) for node in in_order(nodes, {Op(k): k for k in range(10)})]


def test_what_a_call_reads_is_computed_where_the_graph_has_it_and_so_is_its_copy():
    """As a U-net's: op 5 is the call, 1 the gradient that it reads, 3 and 4 rebuild its other argument."""
    total = Scheduled("total", (), (0,))
    again = Scheduled("again", (), (3,), is_call=True)
    joined = Scheduled("joined", ("again",), (4,))
    gradient, copy = Scheduled("gradient", ("total",), (0, 1)), Scheduled("copy", ("gradient",), (0, 1, 2, 5))
    call = Scheduled("call", ("joined", "copy"), (0, 1, 2, 4, 5), is_call=True)
    found = order_of(total, again, joined, gradient, copy, call)
    assert found == ["total", "gradient", "copy", "again", "joined", "call"]


def test_nothing_runs_before_what_it_depends_on_and_fused_loops_stand_where_the_first_does():
    first, second = Scheduled("first", (), (1,)), Scheduled("second", ("made",), (8,))
    made = Scheduled("made", (), (6,), is_call=True)
    assert order_of(made, Fused((first, second)), Scheduled("other", (), (4,))) == ["other", "made", "first+second"]
