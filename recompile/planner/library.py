"""What each way to treat one segment costs, read off simulations of whole plans.

A plan treats every segment in some way: it saves some of its values, its *pattern*. From one simulation follow, per
segment, the bytes that the pattern keeps until backward gets there, the seconds of the kernels that work for it, and
how much more is alive while they run than what earlier segments keep. Since equal segments can try different patterns
in the same plan, one simulation of a network of n equal layers measures n patterns.
"""

from __future__ import annotations

from dataclasses import dataclass

from recompile.planner.pool import Candidate
from recompile.planner.segments import Segments
from recompile.timeline import Timeline


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

    def is_beaten_by(self, other: Piece) -> bool:
        return (
            other.saved_bytes <= self.saved_bytes
            and other.seconds <= self.seconds
            and other.forward_bytes <= self.forward_bytes
            and other.backward_bytes <= self.backward_bytes
            and other.needs_boundary <= self.needs_boundary
            and other.keeps_boundary >= self.keeps_boundary
        )


class Library:
    """Pieces by kind of segment, with the most careful figures of each; grows with every plan that is measured."""

    def __init__(self, timeline: Timeline, segments: Segments):
        self.timeline = timeline
        self.segments = segments
        self.pieces: dict[str, dict[tuple[frozenset[int], bool], Piece]] = {kind: {} for kind in segments.kind}
        self.gradient_bytes = gradients_of_later_segments(timeline, segments)

    def measure(self, candidate: Candidate) -> None:
        """Add the pieces of a plan, but for those beside a boundary that it rebuilds."""
        segments, flow, count = self.segments, self.timeline.flow, len(self.segments)
        kept_bytes = self._kept_bytes(candidate.saved)
        earlier = [0]
        for held in kept_bytes:
            earlier.append(earlier[-1] + held)
        seconds, forward, backward = [0.0] * count, [0] * count, [0] * count
        for moment in candidate.simulation.moments:
            k = segments.of_node[moment.node]
            seconds[k] += moment.seconds
            if moment.phase == "forward":
                forward[k] = max(forward[k], moment.live_bytes - earlier[k])
            else:
                backward[k] = max(backward[k], moment.live_bytes - earlier[k] - self.gradient_bytes[k])
        kept = [False, *(b in candidate.saved for b in segments.boundaries), False]
        rebuilt = [False, *(flow.op[b] in candidate.recomputed for b in segments.boundaries), False]
        for k in range(count):
            if all(not rebuilt[side] or kept[side] for side in (k, k + 1)):
                pattern = segments.pattern(k, candidate.saved)
                piece = Piece(
                    pattern, kept_bytes[k], seconds[k], forward[k], backward[k], kept[k], kept[k + 1]
                )  # fmt: skip
                self._add(segments.kind[k], piece)

    def best_of(self, kind: str) -> list[Piece]:
        """The pieces that no other beats in all respects, in a fixed order."""
        ordered = sorted(
            self.pieces[kind].values(),
            key=lambda p: (p.saved_bytes, p.seconds, p.backward_bytes, p.needs_boundary, sorted(p.pattern)),
        )
        best: list[Piece] = []
        for piece in ordered:
            if not any(piece.is_beaten_by(other) for other in best):
                best.append(piece)
        return best

    def _add(self, kind: str, piece: Piece) -> None:
        known = self.pieces[kind].get((piece.pattern, piece.needs_boundary), piece)
        self.pieces[kind][piece.pattern, piece.needs_boundary] = Piece(
            piece.pattern,
            max(piece.saved_bytes, known.saved_bytes),
            max(piece.seconds, known.seconds),
            max(piece.forward_bytes, known.forward_bytes),
            max(piece.backward_bytes, known.backward_bytes),
            piece.needs_boundary,
            piece.keeps_boundary,
        )

    def _kept_bytes(self, saved: frozenset[int]) -> list[int]:
        flow, segments = self.timeline.flow, self.segments
        outputs = {flow.buffer[i] for i in flow.fwd_outputs}
        kept = [0] * len(segments)
        for buffer in {flow.buffer[i] for i in saved} - outputs:
            if not flow.is_input[buffer]:
                kept[segments.of_node[buffer]] += flow.size_bytes[buffer]
        return kept


def gradients_of_later_segments(timeline: Timeline, segments: Segments) -> list[int]:
    """By segment: bytes of the gradients that exist when backward gets to it."""
    flow = timeline.flow
    made = [0] * len(segments)
    for buffer in {flow.buffer[i] for i in flow.bwd_outputs}:
        if not flow.is_input[buffer]:
            made[segments.of_node[buffer]] += flow.size_bytes[buffer]
    return [sum(made[k + 1 :]) for k in range(len(segments))]
