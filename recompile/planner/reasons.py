"""Why each value of a plan is kept or computed again, in the prices that the cut sees."""

from __future__ import annotations

from recompile.planner.network import cut_network
from recompile.timeline import Timeline
from recompile.units import format_bytes, format_seconds


class Reasons:
    """Sentences for one graph; both prices of a value are what its choice adds to the step, fusion considered."""

    def __init__(self, timeline: Timeline):
        network = cut_network(timeline.joint, timeline.flow, timeline.hardware)
        self.timeline = timeline
        self.recompute_seconds = dict(zip(network.candidates, network.recompute_seconds, strict=True))
        self.save_seconds = dict(zip(network.candidates, network.save_seconds, strict=True))
        self.held_anyway = {timeline.flow.buffer[i] for i in timeline.flow.fwd_outputs}

    def for_saving(self, i: int) -> str:
        flow, note = self.timeline.flow, self.timeline.joint.notes[self.timeline.flow.nodes[i]]
        if note.cannot_recompute:
            return f"must not be recomputed: {note.cannot_recompute}"
        if flow.buffer[i] in self.held_anyway:
            return "an output of forward: allocated anyway"
        rebuild, keep = format_seconds(self.recompute_seconds[i] or 0.0), format_seconds(self.save_seconds[i] or 0.0)
        return f"rebuilding it would add {rebuild}, keeping it adds {keep} and {format_bytes(note.size_bytes)}"

    def for_recomputing(self, i: int) -> str:
        flow, note = self.timeline.flow, self.timeline.joint.notes[self.timeline.flow.nodes[i]]
        if note.cannot_save and len(flow.makes[i]) == 1:
            return f"cannot be saved: {note.cannot_save}"
        seconds = format_seconds(self.recompute_seconds.get(i) or 0.0)
        return f"rebuilding it adds {seconds} and spares {format_bytes(note.size_bytes)}"
