"""Where a graph is cut into stretches: at nodes that look alike, so that equal layers are cut at equal places."""

from __future__ import annotations

import numpy as np

from recompile.inlining import FusionFacts

# How far nodes are told apart by what they are computed from (steps back).
NEIGHBOURS_SEEN = 3


def looks_of(facts: FusionFacts) -> np.ndarray:
    """By node, a number that is equal for nodes that look equal: the same op on values of the same sizes, made by nodes
    that looked equal so far.
    """
    flow = facts.flow
    ops = [node.target if callable(node.target) else node.op for node in flow.nodes]
    looks = list(zip(ops, flow.numel, strict=True))
    for _ in range(NEIGHBOURS_SEEN):
        numbers: dict[tuple, int] = {}
        rows = [(looks[i], *(looks[a] for a in arguments)) for i, arguments in enumerate(flow.inputs)]
        looks = [numbers.setdefault(row, len(numbers)) for row in rows]
    return np.array(looks, dtype=np.int64)


def cut_alike(looks: np.ndarray, longest: int) -> np.ndarray:
    """Cut a sequence into stretches of at most ``longest``, equal parts of it at equal places; numbers from 0 on.

    Again and again the longest stretch is cut in its middle half at the node of the rarest look, and so are all others
    that have a node of that look; at every m-th such node where they are so frequent that little would be left.
    """
    is_cut = np.zeros(len(looks), dtype=bool)
    frequency = np.bincount(looks)
    while True:
        cuts = np.concatenate([[0], np.flatnonzero(is_cut), [len(looks)]])
        lengths = np.diff(cuts)
        if lengths.max(initial=0) <= longest:
            return np.cumsum(is_cut)
        start, length = cuts[lengths.argmax()], lengths.max()
        inner = np.arange(start + length // 4, start + length - length // 4)
        chosen = inner[frequency[looks[inner]].argmin()]
        alike = np.flatnonzero(looks == looks[chosen])
        is_cut[alike[:: max(1, longest * len(alike) // (2 * len(looks)))]] = True
        is_cut[0] = False
        if not is_cut[start + 1 : start + length].any():
            is_cut[chosen] = True
