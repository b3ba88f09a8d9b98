"""Segments, what their pieces cost, and mixtures of pieces: a chain by hand, the dynamic program by enumeration."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recompile.dataflow import dataflow_of
from recompile.planner.library import Library, Piece
from recompile.planner.mixture import fastest_mixture
from recompile.planner.pool import Pool
from recompile.planner.segments import segments_of
from recompile.timeline import Timeline
from tests.notation import H100, annotated

# Three times exp(x w), each with a backward that reads the exponential, and a sine. Every value is 128 bytes.
CHAIN = """
    x = input 4x8
    w1 = param 8x8
    w2 = param 8x8
    w3 = param 8x8
    a1 = mm x w1
    e1 = exp a1
    a2 = mm e1 w2
    e2 = exp a2
    a3 = mm e2 w3
    e3 = exp a3
    y = sin e3
    t = tangent 4x8
    c = cos e3
    gy = mul t c
    g3 = mul gy e3
    h3 = mm g3 w3'
    gw3 = mm e2' g3
    g2 = mul h3 e2
    h2 = mm g2 w2'
    gw2 = mm e1' g2
    g1 = mul h2 e1
    gw1 = mm x' g1
    return y | gw1 gw2 gw3
"""

WIDE_AND_NARROW = """
    x = input 4x8
    v = param 8x4
    narrow = mm x v
    u = param 4x8
    wide = mm narrow u
    e = exp wide
    y = mm e v
    t = tangent 4x4
    g = mm t v'
    h = mul g wide
    hn = mm h u'
    gn = mul hn narrow
    gu = mm narrow' h
    gv = mm x' gn
    return y | gu gv
"""


def cut_at(text, *boundaries):
    joint = annotated(text)
    flow = dataflow_of(joint)
    place = {node.name: i for i, node in enumerate(flow.nodes)}
    return joint, flow, segments_of(flow, [place[name] for name in boundaries])


def names_of(flow, segments, k):
    """Forward's and backward's ops of a segment, in graph order."""
    return " ".join(n.name for i, n in enumerate(flow.nodes) if flow.is_op[i] and segments.of_node[i] == k)


def test_ops_belong_to_the_segment_that_they_work_for():
    _, flow, segments = cut_at(CHAIN, "e1", "e2", "e3")
    assert [names_of(flow, segments, k) for k in range(len(segments))] == [
        "a1 e1 gw2 g1 gw1",
        "a2 e2 gw3 g2 h2",
        "a3 e3 c gy g3 h3",
        "y",
    ]


def test_layers_that_do_the_same_are_equal():
    _, _, segments = cut_at(CHAIN, "e1", "e2", "e3")
    assert segments.kind[1] == segments.kind[2] != segments.kind[0]


@pytest.mark.parametrize(
    "changed", [CHAIN.replace("e2 = exp", "e2 = sin"), CHAIN.replace("a2 = mm e1 w2", "a2 = mm x w2")]
)
def test_another_op_or_another_source_makes_another_kind(changed):
    _, _, segments = cut_at(changed, "e1", "e2", "e3")
    assert segments.kind[1] != segments.kind[2]


def test_layers_that_differ_in_a_constant_are_not_equal():
    doubled = CHAIN.replace("e2 = exp a2", "b2 = mul a2 2\ne2 = exp b2").replace("e3 = exp", "b3 = mul a3 3\ne3 = exp")
    _, _, different = cut_at(doubled.replace("exp a3", "exp b3"), "e1", "e2", "e3")
    _, _, alike = cut_at(doubled.replace("exp a3", "exp b3").replace("a3 3", "a3 2"), "e1", "e2", "e3")
    assert different.kind[1] != different.kind[2] and alike.kind[1] == alike.kind[2]


def test_layers_with_random_numbers_of_their_own_are_equal():
    text = CHAIN.replace("x = input 4x8", "x = input 4x8\ns = prims.inductor_seeds 2 cpu")
    for k in (2, 3):
        drawn = f"k{k} = prims.inductor_lookup_seed s {k - 2}\nr{k} = prims.inductor_random [4,8] k{k} 'rand'\n"
        text = text.replace(f"e{k} = exp a{k}", f"{drawn}d{k} = mul a{k} r{k}\ne{k} = exp d{k}")
    _, _, segments = cut_at(text, "e1", "e2", "e3")
    assert segments.kind[1] == segments.kind[2]


def test_a_pattern_of_one_layer_can_be_placed_in_an_equal_one():
    _, flow, segments = cut_at(CHAIN, "e1", "e2", "e3")
    a2 = next(i for i, node in enumerate(flow.nodes) if node.name == "a2")
    pattern = segments.patterns(frozenset({a2, 4}))[1]
    assert [flow.nodes[i].name for i in segments.placed(2, pattern)] == ["a3"]


def test_what_a_plan_saves_is_told_by_segment():
    """The first segment has a1 and e1 at its end, the others have theirs alone; gw3 is no node of forward."""
    _, flow, segments = cut_at(CHAIN, "e1", "e2", "e3")
    place = {node.name: i for i, node in enumerate(flow.nodes)}
    saved = frozenset(place[name] for name in ("a1", "e1", "e3", "gw3"))
    first = frozenset({place["a1"], place["e1"]})
    assert segments.patterns(saved) == [first, frozenset(), frozenset({1}), frozenset()]
    assert segments.patterns(frozenset()) == [frozenset()] * 4


# Pieces


def test_pieces_say_what_their_segment_keeps_and_needs():
    """Each layer keeps its exponential. One kernel makes e3 and y, over a3: e1 and e2, which are earlier segments', and
    256 bytes are alive. gw3, 256 bytes, is made where backward reads e2, and alive when it is at the first layer."""
    joint, flow, segments = cut_at(CHAIN, "e1", "e2", "e3")
    timeline = Timeline(joint, H100)
    library = Library(timeline, segments)
    place = {node.name: i for i, node in enumerate(flow.nodes)}
    candidate = Pool(timeline).add({place["e1"], place["e2"], place["e3"]})
    library.measure(candidate)
    pieces = [next(iter(library.pieces[kind].values())) for kind in segments.kind]
    assert [piece.saved_bytes for piece in pieces] == [128, 128, 128, 0]
    assert (pieces[2].forward_bytes, pieces[3].forward_bytes) == (256, 0)
    assert library.gradient_bytes == [256, 0, 0, 0]
    live = {flow.nodes[m.node].name: m.live_bytes for m in candidate.simulation.moments if m.phase == "backward"}
    # of the two equal layers the second needs most: its own e2, y, g3, h3 and gw3 of 256 bytes; e1 is the first one's
    assert pieces[1].backward_bytes == live["gw3"] - 128 == 4 * 128 + 256
    total = pieces[0].seconds + 2 * pieces[1].seconds + pieces[3].seconds
    assert total == pytest.approx(candidate.step_seconds, rel=0.1)


def test_the_careful_figure_of_a_pattern_counts():
    joint, _, segments = cut_at(CHAIN, "e1", "e2", "e3")
    library = Library(Timeline(joint, H100), segments)
    kind = segments.kind[0]
    library._add(kind, Piece(frozenset({1}), 1, 5.0, 10, 20))
    library._add(kind, Piece(frozenset({1}), 2, 4.0, 12, 18))
    assert library.best_of(kind) == [Piece(frozenset({1}), 2, 5.0, 12, 20)]


def test_pieces_that_another_beats_in_all_respects_are_left_out():
    joint, _, segments = cut_at(CHAIN, "e1", "e2", "e3")
    library, kind = Library(Timeline(joint, H100), segments), segments.kind[0]
    small, fast = Piece(frozenset({1}), 1, 5.0, 10, 20), Piece(frozenset({2}), 2, 4.0, 10, 20)
    for piece in (fast, Piece(frozenset({3}), 2, 5.0, 10, 20), small):
        library._add(kind, piece)
    assert library.best_of(kind) == [small, fast]


# Mixtures


def piece(name, saved_bytes, seconds, forward_bytes=0, backward_bytes=0):
    return Piece(frozenset({name}), saved_bytes, seconds, forward_bytes, backward_bytes)


@st.composite
def problems(draw):
    """Pieces for up to four segments, gradients and a limit of at most NUM_STEPS bytes, so that steps are bytes."""
    number = st.integers(0, 30)
    numbers = st.tuples(number, number, number, number)
    choices = draw(st.lists(st.lists(numbers, min_size=1, max_size=3), min_size=1, max_size=4))
    pieces = [[piece(i, s, float(t), f, b) for i, (s, t, f, b) in enumerate(row)] for row in choices]
    return pieces, draw(st.lists(number, min_size=len(pieces), max_size=len(pieces))), draw(st.integers(0, 120))


def fits(mixture, gradients, limit):
    kept = 0
    for chosen, gradient in zip(mixture, gradients, strict=True):
        if kept + max(chosen.forward_bytes, chosen.backward_bytes + gradient) > limit:
            return False
        kept += chosen.saved_bytes
    return True


@given(problems())
def test_the_fastest_mixture_is_that_of_enumeration(problem):
    choices, gradients, limit = problem
    fitting = [mixture for mixture in itertools.product(*choices) if fits(mixture, gradients, limit)]
    found = fastest_mixture(choices, gradients, limit)
    if not fitting:
        assert found is None
    else:
        assert fits(found, gradients, limit)
        assert sum(p.seconds for p in found) == min(sum(p.seconds for p in mixture) for mixture in fitting)


def test_segments_before_a_dear_one_take_the_small_piece():
    """The second segment needs all that there is; what the others keep is no matter to it."""
    small, fast, dear = piece(0, 0, 2.0, 10, 10), piece(1, 10, 1.0, 10, 10), piece(2, 10, 1.0, 20, 20)
    assert fastest_mixture([[small, fast], [dear], [small, fast]], [0, 0, 0], 20) == [small, dear, fast]


def test_a_copied_library_learns_alone():
    joint, _, segments = cut_at(WIDE_AND_NARROW)
    pool = Pool(Timeline(joint, H100))
    library = Library(pool.timeline, segments)
    copied = library.copied()
    copied.measure(pool.add([]))
    assert [len(pieces) for pieces in copied.pieces.values()] == [1]
    assert [len(pieces) for pieces in library.pieces.values()] == [0]
