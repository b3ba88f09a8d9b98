"""Where decisions are kept so that ``explain`` finds them: on the compiled object, and on disk beside the compiled
code.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from recompile.report.explanation import SCHEMA_VERSION, GraphReport
from recompile.torch_private import config_fingerprint, record_dir

_recording: contextvars.ContextVar[list[GraphReport] | None] = contextvars.ContextVar("recording", default=None)
ATTRIBUTE = "_recompile_records"


@dataclass
class Record:
    """One backend call: the graphs planned in it, or ``missing`` when the code came from a cache without its record."""

    code: Any
    graphs: list[GraphReport]
    missing: bool = False


@dataclass
class _Served:
    """Wrappers of torch.compile that have records, so that an equal wrapper that reuses their code finds them."""

    wrappers: list[weakref.ref] = field(default_factory=list)


_served = _Served()


@contextmanager
def recording() -> Iterator[list[GraphReport]]:
    """Collects what partitioners add while the block runs."""
    graphs: list[GraphReport] = []
    token = _recording.set(graphs)
    try:
        yield graphs
    finally:
        _recording.reset(token)


def add(report: GraphReport) -> None:
    """Called by a partitioner for every graph it splits; without a recording the report is dropped."""
    graphs = _recording.get()
    if graphs is not None:
        graphs.append(report)


def attach(wrapper: Any, record: Record) -> None:
    """Keep a record on the torch.compile wrapper that asked for the compilation; it lives as long as that."""
    if wrapper is None:
        return
    if not hasattr(wrapper, ATTRIBUTE):
        setattr(wrapper, ATTRIBUTE, [])
        _served.wrappers.append(weakref.ref(wrapper))
    getattr(wrapper, ATTRIBUTE).append(record)


def records_of(wrapper: Any, code: Any) -> list[Record]:
    """The records of a wrapper, or of an equal one whose compiled code Dynamo reuses for it."""
    own = getattr(wrapper, ATTRIBUTE, None)
    if own:
        return list(own)
    _served.wrappers = [ref for ref in _served.wrappers if ref() is not None]
    for ref in _served.wrappers:
        other = ref()
        if other == wrapper and any(record.code is code for record in getattr(other, ATTRIBUTE)):
            return list(getattr(other, ATTRIBUTE))
    return []


def key_of(graph: fx.GraphModule, inputs: Sequence[Any], fingerprint: str) -> str:
    """What determines a decision: the traced program, its inputs' metadata, the modes it is traced in, and our
    options.
    """
    autocast = [
        (device, torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))) for device in ("cpu", "cuda")
    ]
    parts = [
        str(SCHEMA_VERSION),
        fingerprint,
        config_fingerprint(),
        graph.print_readable(print_output=False),
        repr(autocast),
        repr([_describe(value) for value in inputs]),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _describe(value: Any) -> tuple:
    if isinstance(value, torch.Tensor):
        kind = type(value).__name__
        return (
            kind,
            str(tuple(value.shape)),
            str(value.dtype),
            str(value.device),
            value.requires_grad,
            str(value.layout),
        )
    return type(value).__name__, str(value)


def store(key: str, graphs: Sequence[GraphReport]) -> None:
    """Write a record beside Inductor's cache, whole or not at all."""
    folder = record_dir()
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        json.dump([graph.to_json() for graph in graphs], file)
    os.replace(name, folder / f"{key}.json")


def load(key: str) -> list[GraphReport] | None:
    """The stored record, or None where there is none."""
    path = record_dir() / f"{key}.json"
    if not path.exists():
        return None
    return [GraphReport.from_json(data) for data in json.loads(path.read_text())]
