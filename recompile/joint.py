"""The facts about a joint forward/backward graph: frozen values that analysis fills in and decisions read.

Units: bytes, seconds, FLOP. Sizes that depend on symbols are taken at their hint, the size seen when the graph was
traced, unless the annotation was asked for others.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.fx as fx

if TYPE_CHECKING:
    import networkx

    from recompile.hardware import Hardware


class Side(enum.Enum):
    """Where a node of the joint graph runs when nothing is recomputed."""

    FORWARD = "forward"  # an output of forward, or an effect in forward, needs it
    BACKWARD = "backward"  # a tangent reaches it
    EITHER = "either"  # only backward needs it and no tangent reaches it: it runs once, on either side


@dataclass(frozen=True, slots=True)
class Work:
    """What one execution of an op costs, from shapes alone."""

    flop: int
    read_bytes: int
    write_bytes: int

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP per byte moved; 0.0 for an op that moves nothing."""
        moved = self.read_bytes + self.write_bytes
        return self.flop / moved if moved else 0.0


class Kind(enum.Enum):
    """How a compiler executes an op; it decides what fuses and what is stored."""

    INPUT = "input"
    VIEW = "view"  # another way to look at existing storage: runs nothing
    POINTWISE = "pointwise"  # each output element from O(1) input elements: fuses into its readers
    REDUCTION = "reduction"  # fuses with pointwise neighbours, its result is stored
    EXTERN = "extern"  # a library call (matmul, convolution, attention): reads and writes memory
    VALUE = "value"  # not a tensor: sizes, seeds' containers, tuples picked apart by getitem
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Annotation:
    """Everything known about one node.

    ``storage`` is the index, in graph order, of the node that first owned the memory behind the value: a view has its
    base's. ``size_bytes`` is what keeping the value keeps alive, so a slice counts the whole storage it looks into.
    ``numel`` counts the elements of the value, of the first one where an op returns several.
    ``cannot_save`` and ``cannot_recompute`` are noun phrases shown to the user, or None when allowed.
    """

    side: Side
    kind: Kind
    storage: int
    size_bytes: int
    numel: int
    work: Work
    seconds: float
    cannot_save: str | None = None
    cannot_recompute: str | None = None


@dataclass(frozen=True, eq=False)
class JointGraph:
    """A joint graph and its notes. ``graph`` is read, never changed, by analyses and planners.

    ``hardware`` is what the notes' seconds are priced for; planners are given the same.
    """

    graph: fx.Graph
    notes: Mapping[fx.Node, Annotation]
    num_fwd_outputs: int
    static_inputs: frozenset[fx.Node] = field(default_factory=frozenset)
    hardware: Hardware | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """Nodes in graph order, the output node left out."""
        return [node for node in self.graph.nodes if node.op != "output"]

    @property
    def fwd_outputs(self) -> list[fx.Node]:
        """The nodes that forward returns, in order, without repetition."""
        return self._outputs()[0]

    @property
    def bwd_outputs(self) -> list[fx.Node]:
        """The nodes that backward returns (gradients), in order, without repetition."""
        return self._outputs()[1]

    def _outputs(self) -> tuple[list[fx.Node], list[fx.Node]]:
        returned = list(self.graph.output_node().args[0])
        forward, backward = returned[: self.num_fwd_outputs], returned[self.num_fwd_outputs :]
        return tuple(list(dict.fromkeys(v for v in part if isinstance(v, fx.Node))) for part in (forward, backward))

    def save(self, path: str | os.PathLike) -> None:
        """Write the graph to a file of JSON, gzipped if the name ends in ``.gz``: its ops, arguments, shapes, strides,
        dtypes and devices, source lines and modules, and every note. ``load`` gives it back; no tensor's content is in
        it, the model's source lines are.

        Raises ValueError, with the node, for sizes that vary, sparse tensors, and arguments that are no data.
        """
        from recompile.graph_file import save_joint_graph

        save_joint_graph(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> JointGraph:
        """Read what ``save`` wrote: planners decide about it as about the original, without the model's code or the
        device. Its values are fake tensors. The file is data, not pickle: nothing in it is run.

        Raises ValueError for a file that is none, or of another version, and for an op that is not registered here.
        """
        from recompile.graph_file import load_joint_graph

        return load_joint_graph(path)

    def priced_for(self, hardware: str | Hardware, cost: Cost | None = None) -> JointGraph:
        """The same graph with seconds for another device, by name, JSON file or value, or by a cost model of one's own.

        ``cost``: see ``recompile.cost``. Everything but the seconds is left as it is, so ops that another device would
        run by other kernels (attention) stay what they were.
        """
        from recompile.cost import priced

        return priced(self, hardware, cost)

    def to_networkx(self) -> networkx.DiGraph:
        """A DiGraph with one vertex per node name; vertex attributes are the annotation's fields as plain values."""
        from recompile.report.graph import joint_graph_to_networkx

        return joint_graph_to_networkx(self)

    def to_table(self) -> str:
        """The annotated nodes as a text table, one row a node."""
        from recompile.report.text import joint_graph_table

        return joint_graph_table(self)


@dataclass(frozen=True, slots=True)
class Budget:
    """The bytes that one step may add to what was allocated when forward started; None: as fast as possible."""

    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One saved or recomputed value and why, for people; "" where its price decided, which reports look up."""

    node: fx.Node
    reason: str


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan: bytes over what is allocated when forward starts, predicted seconds of forward and backward."""

    peak_bytes: int
    step_seconds: float
    saved_bytes: int
    recompute_flops: int
    lower_bound_seconds: float | None = None  # no plan with this peak or a smaller one is faster by the same prediction


@dataclass(frozen=True)
class Plan:
    """A decision: what is kept from forward to backward, what is computed again, and what that is predicted to need.

    ``lower_bound_seconds``: no plan within the budget is faster by the same prediction; ``floor_bound_bytes``: none has
    a smaller peak. ``decide`` fills both in for every planner (None: not known). ``frontier``: the plans that the
    planner met on the way and that no other beats, from the smallest peak to the fastest; empty where it keeps none.
    ``baselines``: what other planners would do without a budget, by name, where the search has met it anyway.
    """

    saved: tuple[Choice, ...]
    recomputed: tuple[Choice, ...]
    peak_bytes: int
    saved_bytes: int
    recompute_flops: int
    step_seconds: float
    lower_bound_seconds: float | None = None
    floor_bound_bytes: int | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    baselines: tuple[tuple[str, FrontierPoint], ...] = ()


Planner = Callable[["JointGraph", "Hardware", Budget], Plan]
Cost = Callable[[fx.Node, Annotation, "Hardware"], float]
Pass = Callable[[fx.Graph], int]
