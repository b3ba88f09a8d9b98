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
    """One way to treat a segment. ``forward_bytes``, ``backward_bytes``: alive beyond what earlier segments keep (and,
    in backward, beyond the gradients that later segments made) while its kernels run; None: no kernel runs."""

    pattern: frozenset[int]
    saved_bytes: int
    seconds: float
    forward_bytes: int
    backward_bytes: int

    def is_beaten_by(self, other: Piece) -> bool:
        return (
            other.saved_bytes <= self.saved_bytes
            and other.seconds <= self.seconds
            and other.forward_bytes <= self.forward_bytes
            and other.backward_bytes <= self.backward_bytes
        )


class Library:
    """Pieces by kind of segment, the most careful figure of each pattern; grows with every plan that is measured."""

    def __init__(self, timeline: Timeline, segments: Segments):
        self.timeline = timeline
        self.segments = segments
        flow = timeline.flow
        self.pieces: dict[str, dict[frozenset[int], Piece]] = {kind: {} for kind in segments.kind}
        self.gradient_bytes = [0] * (len(segments) + 1)  # by segment: gradients made in later ones
        returned = {flow.buffer[i] for i in flow.bwd_outputs}
        for buffer in returned:
            if not flow.is_input[buffer]:
                self.gradient_bytes[segments.of_node[buffer]] += flow.size_bytes[buffer]
        later = 0
        for k in reversed(range(len(segments))):
            own, self.gradient_bytes[k] = self.gradient_bytes[k], later
            later += own

    def measure(self, candidate: Candidate) -> None:
        """Add the pieces of a plan that saves the boundaries on both sides of them."""
        segments, flow = self.segments, self.timeline.flow
        kept_bytes = self._kept_bytes(candidate.saved)
        earlier = [0]
        for held in kept_bytes:
            earlier.append(earlier[-1] + held)
        seconds = [0.0] * len(segments)
        forward = [0] * len(segments)
        backward = [0] * len(segments)
        for moment in candidate.simulation.moments:
            k = segments.of_node[moment.node]
            seconds[k] += moment.seconds
            if moment.phase == "forward":
                forward[k] = max(forward[k], moment.live_bytes - earlier[k])
            else:
                backward[k] = max(backward[k], moment.live_bytes - earlier[k] - self.gradient_bytes[k])
        available = [flow.is_input[b] or b in candidate.saved for b in segments.boundaries]
        for k in range(len(segments)):
            if all(available[max(0, k - 1) : k + 1]):
                pattern = segments.pattern(k, candidate.saved)
                self._add(segments.kind[k], Piece(pattern, kept_bytes[k], seconds[k], forward[k], backward[k]))

    def best_of(self, kind: str) -> list[Piece]:
        """The pieces that no other beats in all respects, in a fixed order."""
        ordered = sorted(
            self.pieces[kind].values(), key=lambda p: (p.saved_bytes, p.seconds, p.backward_bytes, sorted(p.pattern))
        )
        best: list[Piece] = []
        for piece in ordered:
            if not any(piece.is_beaten_by(other) for other in best):
                best.append(piece)
        return best

    def _add(self, kind: str, piece: Piece) -> None:
        known = self.pieces[kind].get(piece.pattern)
        if known is not None:
            piece = Piece(
                piece.pattern,
                max(piece.saved_bytes, known.saved_bytes),
                max(piece.seconds, known.seconds),
                max(piece.forward_bytes, known.forward_bytes),
                max(piece.backward_bytes, known.backward_bytes),
            )
        self.pieces[kind][piece.pattern] = piece

    def _kept_bytes(self, saved: frozenset[int]) -> list[int]:
        flow, segments = self.timeline.flow, self.segments
        outputs = {flow.buffer[i] for i in flow.fwd_outputs}
        kept = [0] * len(segments)
        for buffer in {flow.buffer[i] for i in saved} - outputs:
            if not flow.is_input[buffer]:
                kept[segments.of_node[buffer]] += flow.size_bytes[buffer]
        return kept
