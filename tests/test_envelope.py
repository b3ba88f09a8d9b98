"""The lower envelope of saved sets against enumeration: every set that some price makes cheapest, and no other."""

from itertools import combinations

import pytest

from recompile.dataflow import dataflow_of
from recompile.planner.envelope import envelope
from recompile.planner.finish import made_legal
from recompile.planner.network import cut_network
from tests.notation import H100, annotated
from tests.test_planners import residual_chain
from tests.test_segments import CHAIN


def network_of(text):
    joint = annotated(text)
    flow = dataflow_of(joint)
    return joint, flow, cut_network(joint, flow, H100)


def lines_of(joint, flow, network):
    """Every legal saved set with its seconds and bytes."""
    savable = [i for i, s in zip(network.candidates, network.save_seconds, strict=True) if s is not None]
    sets = {
        made_legal(joint, flow, frozenset(saved))
        for size in range(len(savable) + 1)
        for saved in combinations(savable, size)
    }
    return [network.cost_of(saved) for saved in sets]


@pytest.mark.parametrize("text", [CHAIN, residual_chain(2, 64), residual_chain(2, 4096)])
def test_at_every_price_one_of_the_cuts_is_the_cheapest_of_all_sets(text):
    joint, flow, network = network_of(text)
    lines = lines_of(joint, flow, network)
    cuts = envelope(network)
    top = cuts[-1].price
    for price in [0.0, *(top * 10.0**-k for k in range(12))]:
        cheapest = min(seconds + price * held for seconds, held in lines)
        assert min(cut.cost_at(price) for cut in cuts) == pytest.approx(cheapest, rel=1e-5)


def test_cuts_come_from_the_most_bytes_to_the_fewest_and_each_has_its_price():
    _, _, network = network_of(residual_chain(3, 4096))
    cuts = envelope(network)
    assert len(cuts) >= 2
    assert [cut.held_bytes for cut in cuts] == sorted((cut.held_bytes for cut in cuts), reverse=True)
    for cut in cuts:
        assert cut.cost_at(cut.price) == pytest.approx(min(other.cost_at(cut.price) for other in cuts), rel=1e-5)


def test_forced_boundaries_are_in_every_cut():
    _, flow, network = network_of(residual_chain(3))
    boundaries = frozenset(i for i, node in enumerate(flow.nodes) if node.name in ("x1", "x2"))
    assert all(boundaries <= cut.saved for cut in envelope(network, boundaries))


def test_no_more_cuts_are_tried_than_allowed():
    _, _, network = network_of(residual_chain(3, 4096))
    assert len(envelope(network, most_cuts=2)) == 2
