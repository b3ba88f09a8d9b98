"""Annotated graphs as networkx DiGraphs, for people's own analyses. Attributes are plain values: GraphML can hold
them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import networkx

from recompile.report.explanation import ValueRow
from recompile.report.roles import with_roles
from recompile.report.rows import value_row

if TYPE_CHECKING:
    from recompile.joint import JointGraph
    from recompile.report.explanation import Explanation


def joint_graph_to_networkx(joint: JointGraph) -> networkx.DiGraph:
    """One vertex per node, named as in the fx graph; edges from a value to what reads it."""
    graph = networkx.DiGraph()
    nodes = joint.nodes
    for row in with_roles([value_row(node, joint.notes[node], nodes) for node in nodes]):
        graph.add_node(row.name, **vertex_attributes(row))
    graph.add_edges_from((argument.name, node.name) for node in nodes for argument in node.all_input_nodes)
    return graph


def explanation_to_networkx(explanation: Explanation) -> networkx.DiGraph:
    """Vertices are ``"number.name"``, so that several graphs fit into one."""
    graph = networkx.DiGraph()
    for number, report in enumerate(explanation.graphs):
        for row in report.values:
            graph.add_node(f"{number}.{row.name}", graph=number, **vertex_attributes(row))
        for row in report.values:
            graph.add_edges_from((f"{number}.{source}", f"{number}.{row.name}") for source in row.inputs)
    return graph


def vertex_attributes(row: ValueRow) -> dict[str, Any]:
    """A row without its edges; None and tuples as text, what turning it would change under names of its own."""
    values = asdict(row)
    del values["name"], values["inputs"]
    turned = values.pop("turned") or {}
    values |= {f"turned_{key}": value for key, value in turned.items()}
    values["shape"] = "x".join(row.shape)
    return {key: "" if value is None else value for key, value in values.items()}
