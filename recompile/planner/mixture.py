"""Which piece for which segment: the fastest combination whose peak fits, by dynamic programming over the bytes kept.

State: the bytes that the segments so far keep for backward, in NUM_STEPS steps up to the limit. A piece may be taken
for segment k if what is kept before it, what it needs while it runs in forward and in backward, and the gradients that
exist by then fit. O(segments x pieces x steps), milliseconds. Exact for the pieces' figures; the plan that comes out
is simulated before anybody believes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from recompile.planner.library import Piece

NUM_STEPS = 2048  # of bytes, per limit: 0.05 % each


def fastest_mixture(
    choices: Sequence[Sequence[Piece]], gradient_bytes: Sequence[int], limit_bytes: int
) -> list[Piece] | None:
    """One piece per segment, in order, with the least sum of seconds; None when nothing fits.

    ``choices[k]``: the pieces of segment k. ``gradient_bytes[k]``: alive while backward is at segment k.
    """
    step_bytes = max(1, math.ceil(limit_bytes / NUM_STEPS))
    best = np.full(NUM_STEPS + 1, np.inf)
    best[0] = 0.0
    taken: list[np.ndarray] = []
    for k, pieces in enumerate(choices):
        after = np.full(NUM_STEPS + 1, np.inf)
        chosen = np.full(NUM_STEPS + 1, -1, dtype=np.int32)
        for number, piece in enumerate(pieces):
            needed = max(piece.forward_bytes, piece.backward_bytes + gradient_bytes[k])
            room = (limit_bytes - needed) // step_bytes  # the most that may be kept before this segment
            kept = round(piece.saved_bytes / step_bytes)
            count = min(room, NUM_STEPS - kept) + 1
            if count <= 0:
                continue
            seconds = best[:count] + piece.seconds
            target = after[kept : kept + count]
            better = seconds < target
            target[better] = seconds[better]
            chosen[kept : kept + count][better] = number
        best = after
        taken.append(chosen)
    if not np.isfinite(best).any():
        return None
    place = int(np.argmin(best))
    mixture: list[Piece] = []
    for k in reversed(range(len(choices))):
        piece = choices[k][taken[k][place]]
        mixture.append(piece)
        place -= round(piece.saved_bytes / step_bytes)
    return mixture[::-1]
