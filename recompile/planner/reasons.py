"""Why a value of a plan is kept or computed again where a rule leaves no choice, or where it costs nothing."""

from __future__ import annotations

from recompile.timeline import Timeline


class Reasons:
    """Sentences for one graph; "" where prices decided: a report says what the choice is worth (report/worth.py)."""

    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        self.held_anyway = {timeline.flow.buffer[i] for i in timeline.flow.fwd_outputs}

    def for_saving(self, i: int) -> str:
        flow, note = self.timeline.flow, self.timeline.joint.notes[self.timeline.flow.nodes[i]]
        if note.cannot_recompute:
            return f"must not be recomputed: {note.cannot_recompute}"
        return "an output of forward: allocated anyway" if flow.buffer[i] in self.held_anyway else ""

    def for_recomputing(self, i: int) -> str:
        flow, note = self.timeline.flow, self.timeline.joint.notes[self.timeline.flow.nodes[i]]
        return f"cannot be saved: {note.cannot_save}" if note.cannot_save and len(flow.makes[i]) == 1 else ""
