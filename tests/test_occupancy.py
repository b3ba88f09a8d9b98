"""What is alive and what it is there for; every sum is the simulation's."""

from hypothesis import given, settings

from recompile.lifetimes import DIES
from recompile.occupancy import Use, backward_of, forward_of, occupancy_of, split_exactly
from recompile.timeline import Timeline
from tests.notation import CHAIN, H100, annotated
from tests.random_graphs import joint_texts, legal_sets


def occupancy(saved, text=CHAIN):
    timeline = Timeline(annotated(text), H100)
    indices = frozenset(i for i, node in enumerate(timeline.flow.nodes) if node.name in saved)
    names = [node.name for node in timeline.flow.nodes]
    return occupancy_of(timeline, indices, timeline.simulate(indices)), names


def columns(found):
    return {use.value: list(column) for use, column in found.bytes_of.items() if any(column)}


def peaks(found, names):
    return [
        f"{peak.phase} at {names[peak.node]} {peak.live_bytes}: "
        + " ".join(f"{names[r.node]}={r.use.value}" for r in peak.residents)
        for peak in found.peaks
    ]


def test_bytes_by_use_at_every_kernel_of_a_plan_that_keeps_a_value():
    """Values are of 128 bytes each. Forward runs a, e, which is written over a, and y; backward g2, g3 and g4."""
    found, names = occupancy({"e"})
    assert columns(found) == {
        "saved": [0, 128, 128, 128, 128, 0],
        "output": [0, 0, 128, 128, 128, 128],
        "gradient": [0, 0, 0, 0, 0, 128],
        "temporary": [128, 0, 0, 256, 128, 128],
    }
    assert peaks(found, names) == [
        "forward at y 256: e=saved y=output",
        "backward at g2 512: tangents_1=temporary e=saved y=output g2=temporary",
    ]


def test_what_backward_computes_again_is_told_from_other_temporaries():
    """Backward runs g2, a again, exp and the product in one kernel that writes over g2, and g4."""
    found, names = occupancy(set())
    assert columns(found) == {
        "rebuilt": [0, 0, 0, 0, 128, 128, 0],
        "output": [0, 0, 128, 128, 128, 128, 128],
        "gradient": [0, 0, 0, 0, 0, 0, 128],
        "temporary": [128, 128, 128, 256, 128, 128, 128],
    }
    assert peaks(found, names) == [
        "forward at y 256: e=temporary y=output",
        "backward at g2 384: tangents_1=temporary y=output g2=temporary",
    ]


def test_uses_give_way_in_order_and_add_up():
    held = {Use.SAVED: 100, Use.REBUILT: 10, Use.GRADIENT: 0, Use.OUTPUT: 5, Use.TEMPORARY: 20}
    assert split_exactly(held, 135) == held
    assert split_exactly(held, 150)[Use.TEMPORARY] == 35
    less = split_exactly(held, 95)
    assert (less[Use.TEMPORARY], less[Use.REBUILT], less[Use.SAVED]) == (0, 0, 90)
    assert sum(less.values()) == 95


@given(joint_texts())
@settings(max_examples=40, deadline=None)
def test_all_plans_of_random_graphs_add_up_to_the_simulation(text):
    timeline = Timeline(annotated(text), H100)
    for saved in (legal_sets(timeline.joint, timeline.flow, most=8) or [])[:12]:
        simulation = timeline.simulate(saved)
        found = occupancy_of(timeline, saved, simulation)
        assert [sum(row) for row in zip(*found.bytes_of.values(), strict=True)] == list(simulation.live_bytes)
        assert [peak.live_bytes for peak in found.peaks] == [
            simulation.peak_of(phase) for phase in ("forward", "backward") if simulation.peak_of(phase)
        ]
        for peak in found.peaks:
            assert 0 <= peak.shared_bytes <= dying_bytes(timeline, saved, peak, simulation.num_forward)


def dying_bytes(timeline, saved, peak, num_forward):
    """What the kernel at the peak may write over, and what loops before it did that run together with it."""
    program = forward_of(timeline, saved) if peak.phase == "forward" else backward_of(timeline, saved)
    place = peak.moment - (0 if peak.phase == "forward" else num_forward)
    first = place
    while program.loops_run_together and first and not any(k.is_extern for k in program.kernels[first - 1 : place + 1]):
        first -= 1
    kernels, fates = program.kernels[first : place + 1], program.fates[first : place + 1]
    pairs = (
        pair for k, fate in zip(kernels, fates, strict=True) for pair in zip(k.touches.tolist(), fate, strict=True)
    )
    return sum(timeline.flow.size_bytes[buffer] for buffer, bits in pairs if bits & DIES)
