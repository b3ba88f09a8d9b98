"""Which piece for which segment: the fastest combination whose peak fits, by dynamic programming over the bytes kept.

State: the bytes that the segments so far keep for backward, in NUM_STEPS steps up to the limit, and whether the
boundary after them is kept. A piece may be taken for segment k if what is kept before it, what it needs while it runs
in forward and in backward, and the gradients that exist by then fit, and if the boundary that it needs is kept.
O(segments x pieces x steps), milliseconds. Exact for the pieces' figures; the plan that comes out is simulated before
anybody believes it.
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
    shape = (2, NUM_STEPS + 1)  # boundary not kept, kept
    best = np.full(shape, np.inf)
    best[0, 0] = 0.0
    low, high = 0, 1  # best is infinite outside of these places
    taken: list[tuple[np.ndarray, np.ndarray]] = []  # per segment its piece, and the better row before it
    for pieces, gradient in zip(choices, gradient_bytes, strict=True):
        after, chosen = np.full(shape, np.inf), np.full(shape, -1, dtype=np.int32)
        rows, either = best[1] < best[0], np.minimum(best[0], best[1])
        first, end = NUM_STEPS + 1, 0
        for number, piece in enumerate(pieces):
            needed = max(piece.forward_bytes, piece.backward_bytes + gradient)
            kept = round(piece.saved_bytes / step_bytes)
            last = min((limit_bytes - needed) // step_bytes, NUM_STEPS - kept, high - 1)  # place before this segment
            if last >= low:
                seconds = (best[1] if piece.needs_boundary else either)[low : last + 1] + piece.seconds
                place = (int(piece.keeps_boundary), slice(low + kept, last + 1 + kept))
                better = seconds < after[place]
                np.copyto(after[place], seconds, where=better)
                np.copyto(chosen[place], number, where=better)
                first, end = min(first, low + kept), max(end, last + 1 + kept)
        taken.append((chosen, rows))
        best, low, high = after, first, end
    if not np.isfinite(best).any():
        return None
    row, place = (int(i) for i in np.unravel_index(best.argmin(), shape))
    mixture: list[Piece] = []
    for pieces, (chosen, rows) in zip(reversed(choices), reversed(taken), strict=True):
        piece = pieces[chosen[row, place]]
        mixture.append(piece)
        place -= round(piece.saved_bytes / step_bytes)
        row = 1 if piece.needs_boundary else int(rows[place])
    return mixture[::-1]
