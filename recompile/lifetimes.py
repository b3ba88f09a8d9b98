"""Which buffers of a program occupy memory, and from which kernel to which.

One pass over the kernels as arrays; what depends on a kernel alone is computed once for all programs that have it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

import numpy as np

from recompile.kernels import ALWAYS_STORED, LOOPED, MADE, ROLES, Kernel, Schedule, batch_of

# What happens to a buffer while a kernel runs: bits of one number. WRITTEN: allocated by it; DIES: freed after it;
# FROM_LOOP: made by a generated loop, here or before; IN_STORAGE: part of a larger allocation, see ``slices``.
WRITTEN, DIES, FROM_LOOP, IN_STORAGE = 1, 2, 4, 8


def in_sequence(kernels: Sequence[Kernel]) -> Schedule:
    """The schedule of kernels that are given in the order in which they run."""
    return Schedule([batch_of([*enumerate(kernels)])], is_in_order=True)


def by_kernel(found: bytes, kernels: Sequence[Kernel]) -> list[bytes]:
    """Each kernel's part of ``fates``."""
    ends = [0, *accumulate(len(kernel.uses) for kernel in kernels)]
    return [found[start:end] for start, end in pairwise(ends)]


def fates(schedule: Schedule, num_buffers: int, kept: Collection[int], releasable: Collection[int]) -> bytes:
    """For each use of a buffer in a schedule what happens to the buffer, a byte made of the bits above.

    A buffer occupies memory unless it is read only inside the kernel that makes it. It dies after its last use unless
    it is in ``kept``, which outlive the program. ``releasable`` are alive when the program starts and die likewise.
    """
    buffers, users = schedule.uses // ROLES, schedule.users()
    made = (schedule.uses & MADE) > 0
    is_kept, is_stored, is_mortal, is_looped = np.zeros((4, num_buffers), dtype=bool)
    is_kept[list(kept)] = True
    is_stored[buffers[~made | ((schedule.uses & ALWAYS_STORED) > 0)]] = True
    written = made & (is_stored | is_kept)[buffers]
    is_mortal[buffers[written]] = True
    is_mortal[list(releasable)] = True
    is_looped[buffers[(schedule.uses & LOOPED) > 0]] = True
    last_user = np.zeros(num_buffers, dtype=np.int64)
    np.maximum.at(last_user, buffers, users)
    dies = (is_mortal & ~is_kept)[buffers] & (last_user[buffers] == users)
    return (WRITTEN * written + DIES * dies + FROM_LOOP * is_looped[buffers]).astype(np.uint8).tobytes()


def stored_buffers(kernels: Sequence[Kernel], num_buffers: int, kept: Collection[int]) -> set[int]:
    """Buffers that really occupy memory: all made ones but those read only inside the kernel that makes them."""
    schedule = in_sequence(kernels)
    found = zip((schedule.uses // ROLES).tolist(), fates(schedule, num_buffers, kept, ()), strict=True)
    return {buffer for buffer, bits in found if bits & WRITTEN}
