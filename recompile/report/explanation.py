"""What was decided, as plain values: made when a graph is planned, stored beside the code, shown later."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from recompile.joint import FrontierPoint

if TYPE_CHECKING:
    from recompile.footprint import Footprint
    from recompile.gpu import Program
    from recompile.tradeoff import Frontier

SCHEMA_VERSION = 7  # of records and of to_json(): docs/report-schema.md


@dataclass(frozen=True, slots=True)
class Turned:
    """What would change if one value alone were decided the other way, by simulation; above 0 what would be more."""

    seconds: float  # of the step
    flop: int  # computed again
    saved_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class LayerTurned:
    """What would change if one layer alone were decided as an equal one is, by simulation."""

    stem: str  # "blocks.*"
    layer: int
    like: int
    turned: Turned


@dataclass(frozen=True, slots=True)
class Exchange:
    """What would change if two equal layers changed places in the plan, by simulation; above 0 what would be more."""

    stem: str  # "blocks.*"
    layer: int
    other: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One node of the joint graph, with what was decided about it ("saved", "recomputed" or "").

    ``code``: the line that made it. ``again_seconds``: what computing it again adds to the step, fusion considered.
    ``turned`` is found for one of the values that are alike in equal layers with the same decisions, and None for what
    was not looked at.
    ``role``: what it is in words, "softmax" or "dropout mask", where the graph leaves no doubt.
    """

    name: str
    op: str
    shape: tuple[str, ...]
    dtype: str
    side: str
    kind: str
    storage: str
    size_bytes: int
    flop: int
    read_bytes: int
    write_bytes: int
    intensity: float
    seconds: float
    cannot_save: str | None
    cannot_recompute: str | None
    inputs: tuple[str, ...]
    source: str
    module: str
    decision: str
    reason: str
    code: str = ""
    again_seconds: float = 0.0
    turned: Turned | None = None
    role: str = ""


class Moment(NamedTuple):
    """One kernel of the predicted step. ``live_bytes`` are allocated while it runs, among them saved values, values
    computed again, and gradients that backward returns.
    """

    phase: str  # "forward" or "backward"
    node: str  # the kernel's first op
    live_bytes: int
    seconds: float
    saved_bytes: int
    rebuilt_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class PeakReport:
    """The kernel of a phase at which most is alive. ``alive``: (node that owns it, bytes, what it is there for), the
    largest first; what for is a value of ``recompile.occupancy.Use``. They exceed ``live_bytes`` by ``shared_bytes``,
    what is written in place; where that is negative the kernel needs so much beyond its results.
    """

    phase: str
    moment: int  # its place in the timeline
    node: str
    live_bytes: int
    shared_bytes: int
    alive: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph: its predicted step and every node."""

    planner: str
    hardware: str
    budget: str
    budget_bytes: int | None
    peak_bytes: int
    saved_bytes: int
    recompute_flops: int
    total_flops: int
    step_seconds: float
    lower_bound_seconds: float | None  # no plan within the budget is faster by the same prediction
    floor_bound_bytes: int | None  # none has a smaller peak
    planning_seconds: float
    ended_by: str  # why Dynamo ended the graph: "" for its natural end
    sizes: tuple[str, ...]  # symbolic sizes and the values that the plan was made for: "s77=64"
    limits: tuple[tuple[str, int], ...]  # up to which of them it keeps a budget in bytes and serves: ("s77", 80)
    values: tuple[ValueRow, ...]
    timeline: tuple[Moment, ...]  # one entry a kernel, in the order of the predicted step
    peaks: tuple[PeakReport, ...]  # forward's and backward's
    frontier: tuple[FrontierPoint, ...]  # plans met while this one was sought, the smallest first; () for some planners
    baselines: tuple[tuple[str, FrontierPoint], ...] = ()  # by planner, without a budget; () for some planners
    limit_bytes: int | None = None  # what the planner was given: of a budget in bytes a margin is held back
    layers_turned: tuple[LayerTurned, ...] = ()  # a layer of every treatment beside one of the most frequent
    exchanges: tuple[Exchange, ...] = ()  # a layer of every treatment with the nearest one of the most frequent
    program_bytes: int | None = None  # peak of the programs that Inductor emitted, replayed; None: not looked at

    @property
    def saved(self) -> tuple[ValueRow, ...]:
        return tuple(row for row in self.values if row.decision == "saved")

    @property
    def recomputed(self) -> tuple[ValueRow, ...]:
        return tuple(row for row in self.values if row.decision == "recomputed")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GraphReport:
        rows = tuple(map(row_from_json, data["values"]))
        peaks = (PeakReport(**{**peak, "alive": tuple(map(tuple, peak["alive"]))}) for peak in data["peaks"])
        plain = {f.name: data[f.name] for f in fields(cls)}
        rebuilt = {
            "values": rows,
            "timeline": tuple(Moment(*moment) for moment in data["timeline"]),
            "peaks": tuple(peaks),
            "frontier": tuple(FrontierPoint(**point) for point in data["frontier"]),
            "baselines": tuple((name, FrontierPoint(**point)) for name, point in data["baselines"]),
            "layers_turned": tuple(
                LayerTurned(**{**layer, "turned": Turned(**layer["turned"])}) for layer in data["layers_turned"]
            ),
            "exchanges": tuple(Exchange(**exchange) for exchange in data["exchanges"]),
            "sizes": tuple(data["sizes"]),
            "limits": tuple(map(tuple, data["limits"])),
        }
        return cls(**{**plain, **rebuilt})


def row_from_json(row: dict[str, Any]) -> ValueRow:
    turned = row["turned"] and Turned(**row["turned"])
    return ValueRow(**{**row, "shape": tuple(row["shape"]), "inputs": tuple(row["inputs"]), "turned": turned})


@dataclass(frozen=True)
class Explanation:
    """Every graph that was planned for one compiled function, and their totals. ``str()`` is a readable table.

    Bytes are increases over what is allocated when forward starts. With several graphs each is planned on its own and
    the totals assume that all of them run in one step, except where one function was compiled for different inputs.
    """

    graphs: tuple[GraphReport, ...]
    notes: tuple[str, ...] = ()
    left_out: frozenset[int] = frozenset()  # places in ``graphs`` that the totals leave out
    footprint: Footprint | None = None  # of ``recompile.plan``: all that training takes, itemised
    program: Program | None = None  # of ``recompile.plan``: what Inductor emits for the GPU, with its peak and time

    @property
    def counted(self) -> tuple[GraphReport, ...]:
        """The graphs that the totals count: of compilations of one function for different inputs, the largest."""
        return tuple(graph for place, graph in enumerate(self.graphs) if place not in self.left_out)

    @property
    def saved_bytes(self) -> int:
        """Bytes handed from forward to backward, inputs and outputs of forward not counted."""
        return sum(graph.saved_bytes for graph in self.counted)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak: the highest of one graph's peak on top of what the others have saved."""
        return max((graph.peak_bytes + self.saved_bytes - graph.saved_bytes for graph in self.counted), default=0)

    @property
    def recompute_flops(self) -> int:
        """FLOP that backward spends on values that forward had computed."""
        return sum(graph.recompute_flops for graph in self.counted)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of forward and backward on the hardware that the plan was made for."""
        return sum(graph.step_seconds for graph in self.counted)

    @property
    def lower_bound_seconds(self) -> float | None:
        """Seconds that no plan within the budget undercuts by the same prediction; None where a graph has no bound."""
        bounds = [graph.lower_bound_seconds for graph in self.counted]
        return None if None in bounds else sum(bounds)

    @property
    def floor_bound_bytes(self) -> int | None:
        """Bytes that the predicted peak of no plan undercuts: the highest of the graphs'; None where one has none."""
        bounds = [graph.floor_bound_bytes for graph in self.counted]
        return None if None in bounds else max(bounds, default=0)

    def __str__(self) -> str:
        from recompile.report.text import explanation_text

        return explanation_text(self)

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``: totals, notes, and per graph every node with its decision and reason.

        docs/report-schema.md says what every key means. ``schema`` is its version.
        """
        ahead = {"footprint": self.footprint, "program": self.program}
        return {
            "schema": SCHEMA_VERSION,
            "peak_bytes": self.peak_bytes,
            "saved_bytes": self.saved_bytes,
            "recompute_flops": self.recompute_flops,
            "step_seconds": self.step_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "floor_bound_bytes": self.floor_bound_bytes,
            "notes": list(self.notes),
            **{name: value.to_json() for name, value in ahead.items() if value is not None},
            "graphs": [graph.to_json() for graph in self.graphs],
        }

    def to_networkx(self):
        """One DiGraph of all planned graphs; vertices are named ``"graph number.node name"``."""
        from recompile.report.graph import explanation_to_networkx

        return explanation_to_networkx(self)

    def to_graphml(self, path: str | os.PathLike) -> None:
        """Write the graph of ``to_networkx()`` as GraphML, which Gephi, yEd and igraph read."""
        import networkx

        networkx.write_graphml(self.to_networkx(), path)

    def to_html(self, path: str | os.PathLike, frontier: Frontier | None = None) -> None:
        """Write a report that a browser opens without network: one file, nothing is loaded into it.

        ``frontier``: the trade-off to show this plan on, from ``recompile.frontier``. The plans that the planner met
        are shown without it; the planners "stock", "save_all", "full" and "exact" meet none. It is for explanations of
        one graph: ValueError otherwise.
        """
        from recompile.report.html import explanation_html

        with open(path, "w", encoding="utf-8") as file:
            file.write(explanation_html(self, frontier))

    def plot(self, path: str | os.PathLike) -> None:
        """Write a picture (PNG, SVG or PDF, by the ending): live memory over the step. Needs matplotlib."""
        from recompile.report.plot import plot_timeline

        plot_timeline(self, path)
