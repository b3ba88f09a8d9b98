"""Where decisions are kept so that ``explain`` finds them: on the compiled object, and on disk beside the compiled
code.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from recompile.report.explanation import SCHEMA_VERSION, GraphReport
from recompile.torch_private import Compilation, compilations_of, record_dir
from recompile.whole_file import write_whole

_recording: contextvars.ContextVar[list[GraphReport] | None] = contextvars.ContextVar("recording", default=None)
ATTRIBUTE = "_recompile_records"
log = logging.getLogger("recompile")


@dataclass(frozen=True)
class Record:
    """One backend call: the graphs planned in it; ``missing`` when its code came from a cache without a record."""

    compilation: Compilation
    graphs: tuple[GraphReport, ...]
    missing: bool = False


# Wrappers of torch.compile that have records, so that an equal wrapper whose code Dynamo shares finds them.
_served: list[weakref.ref] = []


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


def attach(record: Record) -> None:
    """Keep a record on the torch.compile wrapper that asked for the compilation; it lives as long as that.

    A compilation with the same id as before (after ``torch._dynamo.reset()``) takes the earlier one's place.
    """
    wrapper = record.compilation.wrapper
    if wrapper is None:
        return
    if not hasattr(wrapper, ATTRIBUTE):
        setattr(wrapper, ATTRIBUTE, {})
        _served.append(weakref.ref(wrapper))
    key = record.compilation.code, record.compilation.compile_id
    getattr(wrapper, ATTRIBUTE)[key] = record


def own_records(wrapper: Any) -> list[Record]:
    """The records of what was compiled for a wrapper."""
    return list(getattr(wrapper, ATTRIBUTE, {}).values())


def shared_records(wrapper: Any, code: Any) -> list[Record]:
    """The records of equal wrappers whose compiled code Dynamo may run for this one.

    ``code`` is the code object of the function that was compiled; what follows its graph breaks is included.
    """
    _served[:] = [ref for ref in _served if ref() is not None]
    equal = [other for other in (ref() for ref in _served) if other is not wrapper and other == wrapper]
    found = [record for other in equal for record in own_records(other)]
    return [record for record in found if _is_part_of(record.compilation, code) and _is_live(record.compilation)]


def _is_part_of(compilation: Compilation, code: Any) -> bool:
    """Whether what was compiled is ``code`` or a continuation of it after a graph break."""
    if code is None or compilation.code is None:
        return False
    resumes = compilation.code.co_name.startswith(f"torch_dynamo_resume_in_{code.co_name}_at_")
    return compilation.code is code or (resumes and compilation.code.co_filename == code.co_filename)


def _is_live(compilation: Compilation) -> bool:
    """Whether Dynamo still holds the compiled code."""
    wanted = compilation.compile_id
    return any(backend is compilation.wrapper and i == wanted for backend, i in compilations_of(compilation.code))


def limits_of(compilation: Compilation) -> list[tuple[str, int]]:
    """The names and largest sizes that plans made earlier for the same code allow."""
    records = own_records(compilation.wrapper)
    earlier = [graph for record in records if record.compilation.code is compilation.code for graph in record.graphs]
    return [limit for graph in earlier for limit in graph.limits]


def store(key: str, bounds: Sequence[str], graphs: Sequence[GraphReport]) -> None:
    """Write a record beside Inductor's cache, whole or not at all.

    ``key`` and ``bounds``, the largest symbolic sizes that its guards allow, tell compiled code apart.
    """
    text = json.dumps({"schema": SCHEMA_VERSION, "graphs": [graph.to_json() for graph in graphs]})
    write_whole(record_dir() / file_name(key, bounds), text)


def file_name(key: str, bounds: Sequence[str]) -> str:
    """One file for each compiled code: several may share a key and differ in the sizes that they serve."""
    return f"{key}-{hashlib.sha256(repr(tuple(bounds)).encode()).hexdigest()[:16]}.json" if bounds else f"{key}.json"


def load(key: str, bounds: Sequence[str]) -> list[GraphReport] | None:
    """The stored record; None where there is none, or one that is damaged or of another version."""
    try:
        data = json.loads((record_dir() / file_name(key, bounds)).read_text())
        graphs = [GraphReport.from_json(graph) for graph in data["graphs"]]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("the record of a cached plan cannot be read (%s): %s", type(error).__name__, error)
        return None
    return graphs or None
