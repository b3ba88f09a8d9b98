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
    ways = {id(pieces): [_in_steps(piece, limit_bytes, step_bytes) for piece in pieces] for pieces in choices}
    best = np.full((2, NUM_STEPS + 1), np.inf)  # rows: boundary not kept, kept
    best[0, 0] = 0.0
    low, high = 0, 1  # best is infinite outside of these places
    bests = [best]
    for pieces, gradient in zip(choices, gradient_bytes, strict=True):
        after, either = np.full_like(best, np.inf), np.minimum(best[0], best[1])
        first, end = NUM_STEPS + 1, 0
        for piece, kept, most, left_bytes in ways[id(pieces)]:
            last = min(most, (left_bytes - gradient) // step_bytes, high - 1)
            if last >= low:
                seconds = (best[1] if piece.needs_boundary else either)[low : last + 1] + piece.seconds
                least = after[int(piece.keeps_boundary), low + kept : last + 1 + kept]
                np.minimum(least, seconds, out=least)
                first, end = min(first, low + kept), max(end, last + 1 + kept)
        best, low, high = after, first, end
        bests.append(best)
    if not np.isfinite(best).any():
        return None
    row, place = (int(i) for i in np.unravel_index(best.argmin(), best.shape))
    mixture: list[Piece] = []
    for k in reversed(range(len(choices))):
        seconds, before = bests[k + 1][row, place], bests[k]
        for piece, kept, most, left_bytes in ways[id(choices[k])]:  # the first that gives the least is taken
            earlier = place - kept
            most = min(most, (left_bytes - gradient_bytes[k]) // step_bytes)
            if piece.keeps_boundary == row and 0 <= earlier <= most:
                came_from = 1 if piece.needs_boundary else int(before[1, earlier] < before[0, earlier])
                if before[came_from, earlier] + piece.seconds == seconds:
                    break
        else:
            raise AssertionError("the least seconds are those of some piece")
        mixture.append(piece)
        row, place = came_from, earlier
    return mixture[::-1]


def _in_steps(piece: Piece, limit_bytes: int, step_bytes: int) -> tuple[Piece, int, int, int]:
    """A piece, the steps that it keeps, the most steps that may be kept before it for forward's sake, and the bytes
    that what is kept before it and gradients may take in backward.
    """
    kept = round(piece.saved_bytes / step_bytes)
    most = min((limit_bytes - piece.forward_bytes) // step_bytes, NUM_STEPS - kept)
    return piece, kept, most, limit_bytes - piece.backward_bytes
