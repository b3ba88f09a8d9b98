"""The pause of the garbage collector: it ends as it found it, and garbage does not pile up."""

import gc
import weakref

from recompile import collector
from recompile.collector import collector_paused
from recompile.cpu_fusion import CpuFusion
from recompile.hardware import detect
from recompile.planner.pool import Pool
from recompile.timeline import Timeline
from tests.notation import annotated

CHAIN = """
    x = input 64x64
    a = exp x
    b = sin a
    y = sum b [0]
    t = tangent 64
    c = cos a
    g = mul c t
    h = mul g a
    return y | h
"""


class Cycle:
    def __init__(self):
        self.me = self


def test_the_collector_is_off_within_and_as_before_afterwards():
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_garbage_of_pauses_is_collected_once_it_is_much(monkeypatch):
    """Fifty pauses that leave a cycle each, of a hundred objects more or less: a few are left at a time."""
    monkeypatch.setattr(collector, "MOST_MOVED", 1000)
    left = []
    for _ in range(50):
        with collector_paused():
            cycle = Cycle()
            cycle.held = [Cycle() for _ in range(100)]
            left.append(weakref.ref(cycle))
            del cycle
    assert sum(ref() is not None for ref in left) < 20


def test_a_simulated_step_leaves_no_cycles(monkeypatch):
    """What a plan fuses on the CPU held itself: 50 MB a budget, until somebody collected all."""
    visited = []
    in_order = CpuFusion.in_order
    monkeypatch.setattr(CpuFusion, "in_order", lambda self, groups: visited.append(1) or in_order(self, groups))
    pool = Pool(Timeline(annotated(CHAIN, hardware=detect()), detect()))
    gc.collect()
    gc.disable()
    try:
        pool.add([])
        assert visited
        assert gc.collect() == 0
    finally:
        gc.enable()
