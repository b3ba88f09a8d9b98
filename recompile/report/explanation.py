"""What was decided, as plain values: made when a graph is planned, stored beside the code, shown later."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.fx as fx

from recompile.joint import Annotation, Choice, FrontierPoint, JointGraph, Plan
from recompile.occupancy import Occupancy, Use
from recompile.rules import source_line
from recompile.timeline import Simulation

if TYPE_CHECKING:
    from recompile.footprint import Footprint
    from recompile.gpu import Program
    from recompile.tradeoff import Frontier

SCHEMA_VERSION = 6  # of records and of to_json(): docs/report-schema.md
CODE_WIDTH = 100  # characters of a source line: enough to recognise it


@dataclass(frozen=True, slots=True)
class Turned:
    """What would change if one value alone were decided the other way, by simulation; above 0 what would be more."""

    seconds: float  # of the step
    flop: int  # computed again
    saved_bytes: int
    peak_bytes: int


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
    ``turned`` is found for one of the values that are alike in equal layers, and None for what was not looked at.
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


def report_graph(
    joint: JointGraph, plan: Plan, simulation: Simulation, occupancy: Occupancy, *, planner: str, hardware: str,
    budget: str, budget_bytes: int | None, planning_seconds: float, sizes: tuple[str, ...],
    limits: tuple[tuple[str, int], ...],
) -> GraphReport:  # fmt: skip
    """The report of one planned graph."""
    decided = {choice.node: ("saved", choice) for choice in plan.saved}
    decided |= {choice.node: ("recomputed", choice) for choice in plan.recomputed}
    nodes = joint.nodes
    rows = tuple(value_row(node, joint.notes[node], nodes, *decided.get(node, ("", None))) for node in nodes)
    return GraphReport(
        planner=planner,
        hardware=hardware,
        budget=budget,
        budget_bytes=budget_bytes,
        peak_bytes=plan.peak_bytes,
        saved_bytes=plan.saved_bytes,
        recompute_flops=plan.recompute_flops,
        total_flops=sum(joint.notes[node].work.flop for node in nodes),
        step_seconds=plan.step_seconds,
        lower_bound_seconds=plan.lower_bound_seconds,
        floor_bound_bytes=plan.floor_bound_bytes,
        planning_seconds=planning_seconds,
        ended_by="",
        sizes=sizes,
        limits=limits,
        values=rows,
        timeline=moments_of(nodes, simulation, occupancy),
        peaks=tuple(
            PeakReport(
                phase=peak.phase,
                moment=peak.moment,
                node=nodes[peak.node].name,
                live_bytes=peak.live_bytes,
                shared_bytes=peak.shared_bytes,
                alive=tuple((nodes[r.node].name, r.size_bytes, r.use.value) for r in peak.residents),
            )
            for peak in occupancy.peaks
        ),
        frontier=plan.frontier,
        baselines=plan.baselines,
    )


def moments_of(nodes: Sequence[fx.Node], simulation: Simulation, occupancy: Occupancy) -> tuple[Moment, ...]:
    """The simulation's kernels with bytes by use."""
    columns = (occupancy.bytes_of[use] for use in (Use.SAVED, Use.REBUILT, Use.GRADIENT))
    rows = zip(simulation.moments, *columns, strict=True)
    return tuple(Moment(m.phase, nodes[m.node].name, m.live_bytes, m.seconds, *held) for m, *held in rows)


def value_row(
    node: fx.Node, note: Annotation, nodes: Sequence[fx.Node], decision: str = "", choice: Choice | None = None
) -> ValueRow:
    """A node and its annotation as plain values."""
    val = node.meta.get("val")
    is_tensor = isinstance(val, torch.Tensor)
    return ValueRow(
        name=node.name,
        op="input" if node.op == "placeholder" else str(node.target if node.op == "get_attr" else _op_name(node)),
        shape=tuple(str(size) for size in val.shape) if is_tensor else (),
        dtype=str(val.dtype).removeprefix("torch.") if is_tensor else type(val).__name__,
        side=note.side.value,
        kind=note.kind.value,
        storage=nodes[note.storage].name,
        size_bytes=note.size_bytes,
        flop=note.work.flop,
        read_bytes=note.work.read_bytes,
        write_bytes=note.work.write_bytes,
        intensity=note.work.intensity,
        seconds=note.seconds,
        cannot_save=note.cannot_save,
        cannot_recompute=note.cannot_recompute,
        inputs=tuple(argument.name for argument in node.all_input_nodes),
        source=source_line(node),
        module=module_path(node),
        decision=decision,
        reason=choice.reason if choice else "",
        code=code_line(node),
    )


def code_line(node: fx.Node) -> str:
    """The text of the user's line that made the node, cut to ``CODE_WIDTH``; "" where the tracer kept none."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    frames = [k for k, line in enumerate(lines) if line.strip().startswith("File ")]
    text = lines[frames[-1] + 1].strip() if frames and frames[-1] + 1 < len(lines) else ""
    return text if len(text) <= CODE_WIDTH else f"{text[: CODE_WIDTH - 1]}…"


def _op_name(node: fx.Node) -> str:
    return (
        str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__name__", str(node.target))
    )


def module_path(node: fx.Node) -> str:
    """The module that computed the node, as Dynamo recorded it: ``blocks.3.mlp``; "" where unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = re.sub(r"^[LG]\['(\w+)'\]", r"\1", list(stack.values())[-1][0])  # a local or a global of the function
    path = re.sub(r"^self\b", "", path)
    for prefix in ("_modules[", "]", "'", '"'):
        path = path.replace(prefix, "")
    return path.strip(".")
