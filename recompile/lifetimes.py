"""Which buffers of a program occupy memory, and from which kernel to which.

One pass over the kernels as arrays; what depends on a kernel alone is computed once for all programs that have it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from recompile.kernels import ALWAYS_STORED, LOOPED, MADE, Kernel, joined_uses

# What happens to a buffer while a kernel runs: bits of one number. WRITTEN: allocated by it; DIES: freed after it;
# FROM_LOOP: made by a generated loop, here or before.
WRITTEN, DIES, FROM_LOOP = 1, 2, 4


def lifetimes(
    kernels: Sequence[Kernel], num_buffers: int, kept: Collection[int], releasable: Collection[int]
) -> list[bytes]:
    """For each kernel what happens to the buffers in its ``touches``, a byte for each, made of the bits above.

    A buffer occupies memory unless it is read only inside the kernel that makes it. It dies after its last use unless
    it is in ``kept``, which outlive the program. ``releasable`` are alive when the program starts and die likewise.
    """
    if not kernels:
        return []
    buffers, roles, counts = joined_uses(kernels)
    ends, user = np.cumsum(counts), np.repeat(np.arange(len(kernels)), counts)
    made = (roles & MADE) > 0
    is_kept, is_stored, is_mortal, is_looped = np.zeros((4, num_buffers), dtype=bool)
    is_kept[list(kept)] = True
    is_stored[buffers[~made | ((roles & ALWAYS_STORED) > 0)]] = True
    written = made & (is_stored | is_kept)[buffers]
    is_mortal[buffers[written]] = True
    is_mortal[list(releasable)] = True
    is_looped[buffers[(roles & LOOPED) > 0]] = True
    last_user = np.zeros(num_buffers, dtype=np.int64)
    last_user[buffers] = user  # of several users of a buffer the last one stays
    dies = (is_mortal & ~is_kept)[buffers] & (last_user[buffers] == user)
    fate = (WRITTEN * written + DIES * dies + FROM_LOOP * is_looped[buffers]).astype(np.uint8).tobytes()
    return [fate[start:end] for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]


def stored_buffers(kernels: Sequence[Kernel], num_buffers: int, kept: Collection[int]) -> set[int]:
    """Buffers that really occupy memory: all made ones but those read only inside the kernel that makes them."""
    fates = lifetimes(kernels, num_buffers, kept, ())
    pairs = (
        pair
        for kernel, fate in zip(kernels, fates, strict=True)
        for pair in zip(kernel.touches.tolist(), fate, strict=True)
    )
    return {buffer for buffer, bits in pairs if bits & WRITTEN}
