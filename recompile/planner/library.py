"""What each way to treat one segment costs, read off simulations of whole plans.

A plan treats every segment in some way: it saves some of its values, its *pattern*. From one simulation follow, per
segment, the bytes that the pattern keeps until backward gets there, the seconds of the kernels that work for it, and
how much more is alive while they run than what earlier segments keep. Since equal segments can try different patterns
in the same plan, one simulation of a network of n equal layers measures n patterns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recompile.planner.pool import Candidate
from recompile.planner.segments import Segments
from recompile.timeline import Simulation, Timeline


@dataclass(frozen=True, slots=True)
class Piece:
    """One way to treat a segment.

    ``forward_bytes``, ``backward_bytes``: alive while its kernels run, beyond what earlier segments keep and, in
    backward, beyond the gradients that later segments made. ``needs_boundary``: whether the boundary before it must be
    kept; ``keeps_boundary``: whether it keeps the one after it.
    """

    pattern: frozenset[int]
    saved_bytes: int
    seconds: float
    forward_bytes: int
    backward_bytes: int
    needs_boundary: bool = False
    keeps_boundary: bool = True

    def is_as_careful_as(self, other: Piece) -> bool:
        """Whether no figure of the other, the same way to treat a segment, is above this one's."""
        return (
            other.saved_bytes <= self.saved_bytes
            and other.seconds <= self.seconds
            and other.forward_bytes <= self.forward_bytes
            and other.backward_bytes <= self.backward_bytes
            and other.keeps_boundary == self.keeps_boundary
        )

    @property
    def costs(self) -> tuple[float, ...]:
        """What to have less of."""
        return (
            self.saved_bytes, self.seconds, self.forward_bytes, self.backward_bytes, self.needs_boundary,
            not self.keeps_boundary,
        )  # fmt: skip


class Library:
    """Pieces by kind of segment, with the most careful figures of each; grows with every plan that is measured."""

    def __init__(self, timeline: Timeline, segments: Segments):
        self.timeline = timeline
        self.segments = segments
        self.pieces: dict[str, dict[tuple[frozenset[int], bool], Piece]] = {kind: {} for kind in segments.kind}
        self.gradient_bytes = gradients_of_later_segments(timeline, segments)
        self._best: dict[str, list[Piece]] = {}
        self._segment_of_node = np.array(segments.of_node)
        self._buffer = np.array(timeline.flow.buffer)
        self._bytes_to_keep = bytes_to_keep(timeline)

    def copied(self) -> Library:
        """A library of its own with the same pieces."""
        other = copy.copy(self)
        other.pieces = {kind: dict(pieces) for kind, pieces in self.pieces.items()}
        other._best = dict(self._best)
        return other

    def measure(self, candidate: Candidate) -> None:
        """Add the pieces of a plan, but for those beside a boundary that it rebuilds."""
        segments, flow, count = self.segments, self.timeline.flow, len(self.segments)
        kept_bytes, patterns = self._kept_bytes(candidate.saved), segments.patterns(candidate.saved)
        seconds, forward, backward = self._read_off(candidate.simulation, kept_bytes)
        kept = [False, *(b in candidate.saved for b in segments.boundaries), False]
        rebuilt = [False, *(flow.op[b] in candidate.recomputed for b in segments.boundaries), False]
        for k in range(count):
            if all(not rebuilt[side] or kept[side] for side in (k, k + 1)):
                piece = Piece(
                    patterns[k], kept_bytes[k], seconds[k], forward[k], backward[k], kept[k], kept[k + 1]
                )  # fmt: skip
                self._add(segments.kind[k], piece)

    def _read_off(self, simulation: Simulation, kept_bytes: list[int]) -> tuple[list[float], list[int], list[int]]:
        """Per segment: seconds, and the most bytes beyond what is not its own, in forward and in backward."""
        count, place = len(kept_bytes), self._segment_of_node[np.array(simulation.nodes)]
        earlier = np.cumsum([0, *kept_bytes])[:-1]
        own = np.array(simulation.live_bytes) - earlier[place]
        is_forward = np.arange(len(place)) < simulation.num_forward
        own[~is_forward] -= np.array(self.gradient_bytes)[place[~is_forward]]
        forward, backward = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        np.maximum.at(forward, place[is_forward], own[is_forward])
        np.maximum.at(backward, place[~is_forward], own[~is_forward])
        seconds = np.bincount(place, weights=simulation.seconds, minlength=count)
        return seconds.tolist(), forward.tolist(), backward.tolist()

    def best_of(self, kind: str) -> list[Piece]:
        """The pieces that no other beats in all respects, in a fixed order."""
        if kind not in self._best:
            pieces = sorted(self.pieces[kind].values(), key=lambda piece: (piece.costs, sorted(piece.pattern)))
            self._best[kind] = [piece for piece, keep in zip(pieces, unbeaten(pieces), strict=True) if keep]
        return self._best[kind]

    def _add(self, kind: str, piece: Piece) -> None:
        key = (piece.pattern, piece.needs_boundary)
        known = self.pieces[kind].get(key)
        if known is not None and known.is_as_careful_as(piece):
            return
        careful = piece if known is None else Piece(
            piece.pattern,
            max(piece.saved_bytes, known.saved_bytes),
            max(piece.seconds, known.seconds),
            max(piece.forward_bytes, known.forward_bytes),
            max(piece.backward_bytes, known.backward_bytes),
            piece.needs_boundary,
            piece.keeps_boundary,
        )  # fmt: skip
        self.pieces[kind][key] = careful
        self._best.pop(kind, None)

    def _kept_bytes(self, saved: frozenset[int]) -> list[int]:
        """Per segment: bytes of its values that are kept for backward alone."""
        buffers = np.unique(self._buffer[list(saved)]) if saved else np.zeros(0, dtype=np.int64)
        kept = np.zeros(len(self.segments), dtype=np.int64)
        np.add.at(kept, self._segment_of_node[buffers], self._bytes_to_keep[buffers])
        return kept.tolist()


def unbeaten(pieces: Sequence[Piece]) -> list[bool]:
    """Which pieces, sorted by their costs, no earlier one equals or betters in every cost."""
    costs = np.array([piece.costs for piece in pieces], dtype=float).reshape(len(pieces), -1)
    is_no_dearer = np.ones((len(pieces), len(pieces)), dtype=bool)  # [j, k]: piece j than piece k
    for column in costs.T:
        is_no_dearer &= column[:, None] <= column
    return (~np.triu(is_no_dearer, k=1).any(axis=0)).tolist()


def bytes_to_keep(timeline: Timeline) -> np.ndarray:
    """By buffer: what keeping it adds, 0 for inputs and outputs of forward, which are alive anyway."""
    flow = timeline.flow
    found = np.array(flow.size_bytes, dtype=np.int64)
    found[np.array(flow.is_input)] = 0
    found[[flow.buffer[i] for i in flow.fwd_outputs]] = 0
    return found


def gradients_of_later_segments(timeline: Timeline, segments: Segments) -> list[int]:
    """By segment: bytes of the gradients that exist when backward gets to it."""
    flow = timeline.flow
    made = [0] * len(segments)
    for buffer in {flow.buffer[i] for i in flow.bwd_outputs}:
        if not flow.is_input[buffer]:
            made[segments.of_node[buffer]] += flow.size_bytes[buffer]
    return [sum(made[k + 1 :]) for k in range(len(segments))]
