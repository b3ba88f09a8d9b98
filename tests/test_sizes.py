"""What symbolic sizes count as."""

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from recompile.annotation import annotate
from recompile.sizes import AT_HINTS, UNBACKED_SIZE, Sizes, symbols_in
from tests.notation import H100, annotated, joint

TWO_SYMBOLS = """
    x = input s6x8
    y = input s4x8
    a = cat [x,y]
    n = sym_size.int x 0
    m = sym_size.int y 0
    d = operator.sub n m
    h = operator.floordiv n 2
    s = slice a 0 0 h
    t = slice a 0 0 d
    return a s t |
"""


@pytest.fixture(scope="module")
def graph():
    return joint(TWO_SYMBOLS)


def shapes(graph, sizes):
    return [sizes.shape(graph.node[name].meta["val"])[0] for name in ("x", "y", "a", "s", "t")]


def test_sizes_are_taken_at_the_hints_unless_numbers_are_given(graph):
    x, y = symbols_in(graph.module.graph)
    assert [x.hint, y.hint, shapes(graph, AT_HINTS)] == [6, 4, [6, 4, 10, 3, 2]]
    assert shapes(graph, Sizes({x.symbol: 20})) == [20, 4, 24, 10, 16]


def test_a_size_that_falls_as_another_grows_counts_at_its_largest(graph):
    """``t`` has x - y rows, and y may be as small as 2 (0 and 1 are specialised)."""
    x, y = symbols_in(graph.module.graph)
    assert shapes(graph, Sizes({x.symbol: 20, y.symbol: 10})) == [20, 10, 30, 10, 18]


def test_taking_sizes_guards_nothing(graph):
    x, _ = symbols_in(graph.module.graph)
    before = len(x.example.node.shape_env.guards)
    shapes(graph, Sizes({x.symbol: 20}))
    assert len(x.example.node.shape_env.guards) == before


def test_a_size_that_depends_on_data_counts_at_the_stated_guess_or_its_upper_bound():
    env = ShapeEnv()
    free, bounded = env.create_unbacked_symint(), env.create_unbacked_symint()
    torch._check(bounded <= 12)
    assert [AT_HINTS.number(size) for size in (7, free, bounded, bounded * 8)] == [7, UNBACKED_SIZE, 12, 96]


def test_sizes_are_named_for_people(graph):
    symbols = symbols_in(graph.module.graph)
    sizes = Sizes({symbols[0].symbol: 20})
    assert sizes.named(symbols) == (f"{symbols[0].name}=20", f"{symbols[1].name}=4")


def test_the_facts_about_a_graph_follow_its_sizes():
    text = """
        x = input s4x8
        w = param 8x16
        y = mm x w
        return y |
    """
    built = joint(text)
    (rows,) = symbols_in(built.module.graph)
    notes = annotate(built.module, 1, H100, built.params, Sizes({rows.symbol: 100})).notes
    y = notes[built.node["y"]]
    assert (y.size_bytes, y.numel, y.work.flop) == (100 * 16 * 4, 100 * 16, 2 * 100 * 8 * 16)
    assert next(n.numel for node, n in annotated(text).notes.items() if node.name == "y") == 4 * 16
