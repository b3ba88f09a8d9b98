"""Annotated joint graphs as files, so that planners can be compared without the model: ``JointGraph.save``, ``load``.

The format, version 1: one JSON object, gzipped where the file's name ends in ``.gz``. No pickle: reading runs no code
of the file's.

- ``format``, ``version``, and for people ``torch`` and ``recompile``, the versions that wrote it
- ``hardware``: what seconds are priced for (``Hardware.to_json``), or null
- ``num_fwd_outputs``; ``static_inputs``: names of the placeholders that stay allocated whatever happens
- ``nodes``, in graph order, each with ``name``, ``op`` (fx's), ``target``, ``args``, ``kwargs``, ``val`` (what it
  makes), ``meta`` (facts of the tracer) and ``note``, the fields of ``recompile.joint.Annotation``
- ``storages``: bytes and device of the memory behind tensors, which name it by its place
- ``stacks``: stack traces, which nodes name by their place
- ``attributes``: the bodies of higher-order ops, as lists of nodes, and constant tensors

How values are written is told in ``recompile.graph_values``.
"""

from __future__ import annotations

import gzip
import json
import keyword
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from recompile.graph_values import Reader, Unsupported, Writer, target_name, target_of
from recompile.hardware import Hardware
from recompile.joint import Annotation, JointGraph, Kind, Side, Work

FORMAT = "recompile joint graph"
VERSION = 1
GZIP_MAGIC = b"\x1f\x8b"
# Facts of the tracer that are plain values; those that PyTorch's own partitioner or reports read.
PLAIN_META = (
    "partitioner_tag", "ac_graph_id", "seq_nr", "autograd_backward", "is_gradient_acc", "mutation_region_id", "custom",
    "has_backward_hook", "saved_for_quantization", "saved_tensor_with_no_vc_check",
)  # fmt: skip
MODULE_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


# Writing


def save_joint_graph(joint: JointGraph, path: str | os.PathLike) -> None:
    """Write an annotated graph; see ``JointGraph.save``."""
    text = json.dumps(to_json(joint), allow_nan=False, separators=(",", ":"))
    target = Path(path)
    data = text.encode()
    # without a time in it, equal graphs give equal files
    target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)


def to_json(joint: JointGraph) -> dict[str, Any]:
    """An annotated graph as plain values. Raises ValueError, with the node, for what the format has no place for."""
    from recompile import __version__

    lines = _Lines(joint.graph.owning_module)
    nodes = lines.of_graph(joint.graph)
    for line, node in zip(nodes, joint.graph.nodes, strict=True):
        if node in joint.notes:
            note = joint.notes[node]
            line["note"] = {**asdict(note), "side": note.side.value, "kind": note.kind.value}
    return {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "recompile": __version__,
        "hardware": joint.hardware.to_json() if joint.hardware is not None else None,
        "num_fwd_outputs": joint.num_fwd_outputs,
        "static_inputs": [node.name for node in joint.nodes if node in joint.static_inputs],
        "nodes": nodes,
        "storages": lines.writer.storages,
        "stacks": list(lines.stacks),
        "attributes": lines.attributes,
    }


@dataclass
class _Lines:
    """The nodes of a graph and of the bodies inside it, line by line."""

    module: Any
    writer: Writer = field(default_factory=Writer)
    stacks: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def of_graph(self, graph: fx.Graph) -> list[dict[str, Any]]:
        return [self._of_node(node) for node in graph.nodes]

    def _of_node(self, node: fx.Node) -> dict[str, Any]:
        try:
            line = {
                "name": node.name,
                "op": node.op,
                "target": target_name(node.target) if node.op == "call_function" else str(node.target),
                "args": self.writer.value(tuple(node.args)),
            }
            if node.kwargs:
                line["kwargs"] = self.writer.value(dict(node.kwargs))
            if "val" in node.meta:
                line["val"] = self.writer.value(node.meta["val"])
            if node.op == "get_attr":
                self._add_attribute(node.target)
            return {**line, "meta": self._meta_of(node.meta)}
        except Unsupported as error:
            raise ValueError(f"the graph cannot be saved: node {node.name} ({node.target}) has {error}") from None

    def _add_attribute(self, path: str) -> None:
        if path in self.attributes:
            return
        value = self.module
        for name in path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, fx.GraphModule):
            self.attributes[path] = {}  # taken, before its own attributes come
            inside = _Lines(value, self.writer, self.stacks)
            self.attributes[path] = {"nodes": inside.of_graph(value.graph), "attributes": inside.attributes}
        elif isinstance(value, torch.Tensor):
            self.attributes[path] = {"value": self.writer.value(value.detach())}
        else:
            raise Unsupported(f"the attribute {path}, a {type(value).__name__}")

    def _meta_of(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if meta.get("stack_trace"):
            found["stack"] = self.stacks.setdefault(meta["stack_trace"], len(self.stacks))
        for key in MODULE_STACKS:
            if meta.get(key):
                found[key] = [[name, path, _type_name(kind)] for name, (path, kind) in meta[key].items()]
        if isinstance(meta.get("recompute"), CheckpointPolicy):
            found["recompute"] = meta["recompute"].name
        for key in PLAIN_META:
            if meta.get(key) is not None:
                try:
                    found[key] = self.writer.value(meta[key])
                except Unsupported:
                    continue  # somebody's own annotation, which no planner reads
        return found


def _type_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


# Reading


def load_joint_graph(path: str | os.PathLike) -> JointGraph:
    """Read what ``save_joint_graph`` wrote; see ``JointGraph.load``."""
    content = Path(path).read_bytes()
    try:
        text = gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
        data = json.loads(text)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"'{path}' is not JSON, or gzipped JSON: {error}. {_WHAT_WRITES_ONE}") from None
    check_version(data, path)
    try:
        return from_json(data)
    except Unsupported as error:
        raise ValueError(f"'{path}' cannot be read: it has {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"'{path}' says that it is a joint graph, but it is damaged: {type(error).__name__}: {error}"
        ) from error


_WHAT_WRITES_ONE = "Files of joint graphs are written by JointGraph.save or `python -m recompile graph`"


def check_version(data: Any, path: str | os.PathLike) -> None:
    """Refuse what is no joint graph, or one of another version of the format."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"'{path}' is JSON, but no joint graph: it lacks \"format\": {FORMAT!r}. {_WHAT_WRITES_ONE}")
    if data.get("version") != VERSION:
        raise ValueError(
            f"'{path}' has version {data.get('version')!r} of the format, and this recompile reads version {VERSION}: "
            f"save it again, or read it with recompile {data.get('recompile')}, which wrote it"
        )


def from_json(data: Mapping[str, Any]) -> JointGraph:
    """The annotated graph, its values fake tensors on the devices that they were on."""
    reader = Reader(data["storages"])
    module = _module_of(data["nodes"], data["attributes"], data["stacks"], reader)
    nodes = list(module.graph.nodes)
    notes = {node: _note_of(line["note"]) for node, line in zip(nodes, data["nodes"], strict=True) if "note" in line}
    if set(nodes) - set(notes) != {nodes[-1]}:
        raise Unsupported("nodes without a note")
    by_name = {node.name: node for node in nodes}
    return JointGraph(
        module.graph,
        notes,
        data["num_fwd_outputs"],
        frozenset(by_name[name] for name in data["static_inputs"]),
        Hardware.from_json(data["hardware"]) if data["hardware"] is not None else None,
    )


def _note_of(line: Mapping[str, Any]) -> Annotation:
    return Annotation(**{**line, "side": Side(line["side"]), "kind": Kind(line["kind"]), "work": Work(**line["work"])})


def _module_of(
    lines: Sequence[Mapping[str, Any]], attributes: Mapping[str, Any], stacks: Sequence[str], reader: Reader
) -> fx.GraphModule:
    """A graph and what it refers to. Names become code when fx makes a module of it: ``_node_of`` checks them."""
    root: dict[str, Any] = {}
    for path, attribute in attributes.items():
        is_value = "value" in attribute
        outer, reader.nodes = reader.nodes, {}
        root[path] = (
            reader.value(attribute["value"])
            if is_value
            else _module_of(attribute["nodes"], attribute["attributes"], stacks, reader)
        )
        reader.nodes = outer
    graph = fx.Graph()
    for line in lines:
        node = _node_of(line, graph, reader)
        node.meta = _meta_of(line["meta"], stacks, reader)
        if "val" in line:
            node.meta["val"] = reader.value(line["val"])
        reader.nodes[line["name"]] = node
    return fx.GraphModule(root, graph)


def _node_of(line: Mapping[str, Any], graph: fx.Graph, reader: Reader) -> fx.Node:
    name, op, target = line["name"], line["op"], line["target"]
    args, kwargs = reader.value(line["args"]), reader.value(line.get("kwargs", {"dict": []}))
    names = [name, *target.split(".")] if op in ("placeholder", "get_attr") else [name]
    if op not in ("placeholder", "get_attr", "call_function", "output"):
        raise Unsupported(f"a node of the kind {op!r}")
    for word in [*names, *kwargs]:
        if not isinstance(word, str) or not word.isidentifier() or keyword.iskeyword(word):
            raise Unsupported(f"{word!r} in the place of a name")
    node = graph.create_node(op, target_of(target) if op == "call_function" else target, args, kwargs, name)
    if node.name != name:
        node.name = name  # such as "sum", which fx avoids but passes may give
    return node


def _meta_of(line: Mapping[str, Any], stacks: Sequence[str], reader: Reader) -> dict[str, Any]:
    meta: dict[str, Any] = {key: reader.value(line[key]) for key in PLAIN_META if key in line}
    if "stack" in line:
        meta["stack_trace"] = stacks[line["stack"]]
    for key in MODULE_STACKS:
        if key in line:
            meta[key] = {name: (path, kind) for name, path, kind in line[key]}
    if "recompute" in line:
        meta["recompute"] = CheckpointPolicy[line["recompute"]]
    return meta
