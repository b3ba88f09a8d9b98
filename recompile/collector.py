"""Python's garbage collector kept from walking a traced model again and again while a plan is searched for."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass

# Objects that pauses moved to the oldest generation before all garbage is collected: a few hundred MB with what they
# hold, and 0.6 s.
MOST_MOVED = 1_000_000


@dataclass
class Moved:
    """Objects that went to the oldest generation without Python counting them, since all garbage was collected."""

    count: int = 0


MOVED = Moved()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: there are next to no cycles to collect, and each pass walks all of a traced
    model. What was made goes to the oldest generation: the pass over the young ones that would follow walks all of it.
    So does what was young before, and so that no garbage is among that it is collected first. Graphs are cycles, and
    Python collects the oldest generation by what it put there itself: where pauses moved much, the next one begins with
    a collection of all.
    """
    was_on = gc.isenabled()
    if was_on and MOVED.count > MOST_MOVED:
        gc.collect()
        MOVED.count = 0
    elif was_on:
        gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # else somebody keeps objects frozen
                MOVED.count += gc.get_count()[0]
                gc.freeze()
                gc.unfreeze()
            gc.enable()
