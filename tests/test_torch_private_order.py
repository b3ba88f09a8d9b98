"""The graph's order for programs in which Inductor would store a library call's arguments late."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from recompile.torch_private_order import in_order, stores_arguments_late
from tests.notation import joint

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
    ],
)
def test_a_value_for_one_call_alone_waits_for_what_is_called_before_it(changes, is_late):
    text = LATE
    for old, new in changes.items():
        text = text.replace(old, new)
    assert stores_arguments_late(joint(text).module) == is_late


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
