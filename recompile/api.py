"""The public functions that people call besides torch.compile."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from recompile import records
from recompile.backend import recompile
from recompile.errors import OptionError
from recompile.options import Options
from recompile.report.explanation import Explanation
from recompile.torch_private import backends_of


def explain(compiled: Any) -> Explanation:
    """What was decided for every training graph compiled so far for ``compiled``.

    ``compiled`` is what ``torch.compile(..., backend="recompile")`` or ``@recompile.remat`` returned, or a module whose
    submodules were compiled in place. Call it after the first forward. Raises TypeError for anything else.
    """
    pairs = [(backend, code) for backend, code in backends_of(compiled) if is_ours(backend)]
    if not pairs:
        raise TypeError(not_compiled_text(compiled))
    found = []
    for number, (backend, code) in enumerate(pairs):
        own = records.own_records(backend)
        # of several modules compiled in place each counts once: with its own code, or with that of its equals
        chosen = own if own and len(pairs) > 1 else own + records.shared_records(backend, code)
        found += [(number, record) for record in chosen]
    placed = [((number, record.compilation.code), record, graph) for number, record in found for graph in record.graphs]
    graphs = tuple(graph for _, _, graph in placed)
    left_out = not_the_largest([(function, record) for function, record, _ in placed])
    notes = []
    breaks = [graph.ended_by for graph in graphs if graph.ended_by]
    if breaks:
        notes.append(
            f"{len(breaks)} graph break(s): the budget holds for each graph on its own, not for their sum. "
            f"Breaks: {'; '.join(breaks)}"
        )
    if left_out:
        notes.append(
            f"{len(left_out)} graph(s) are compilations of a function for other inputs; the totals count the largest"
        )
    if any(record.missing for _, record in found):
        notes.append(
            "some compiled code came from a cache that no longer has its record; "
            "clear the Inductor cache to see its plan"
        )
    return Explanation(graphs, tuple(notes), left_out)


def not_the_largest(placed: list[tuple[Any, records.Record]]) -> frozenset[int]:
    """Places of graphs whose function has another record with a higher peak (or an equal one that came first)."""
    best: dict[Any, records.Record] = {}
    for function, record in placed:
        if function not in best or peak_of(record) > peak_of(best[function]):
            best[function] = record
    return frozenset(place for place, (function, record) in enumerate(placed) if best[function] is not record)


def peak_of(record: records.Record) -> int:
    return max((graph.peak_bytes for graph in record.graphs), default=0)


def is_ours(backend: Any) -> bool:
    """Whether a torch.compile wrapper, or the backend function itself, leads to this project's backend."""
    return getattr(backend, "compiler_fn", backend) is recompile


def not_compiled_text(compiled: Any) -> str:
    text = "explain() takes what torch.compile(..., backend='recompile') or recompile.remat returned, got "
    if inspect.isclass(compiled):
        return f"{text}the class {compiled.__name__}; ask for one of its instances"
    if backends_of(compiled):
        return f"{text}a {type(compiled).__name__} compiled by another backend"
    return f"{text}a {type(compiled).__name__} that is not compiled"


def remat(target: Any = None, /, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any) -> Any:
    """Compile a module class, a module or a function with activation rematerialisation; as decorator or call.

    ``@remat`` or ``@remat(memory_budget=0.3)``. Options are those of the backend (``memory_budget``, ``planner``,
    ``hardware``, ``reserve``, ``verbose``, ``mode``, and Inductor's); ``dynamic`` and ``fullgraph`` are
    torch.compile's. A class comes back as itself, its instances compile on their first call; a module comes back as
    itself, compiled in place; a function comes back wrapped. Raises OptionError at once for a bad option, TypeError
    for other targets.
    """
    Options.parse(options)
    if dynamic not in (None, True, False) or fullgraph not in (True, False):
        raise OptionError(f"dynamic={dynamic!r} and fullgraph={fullgraph!r} must be True or False; dynamic may be None")
    arguments = {"backend": "recompile", "dynamic": dynamic, "fullgraph": fullgraph, "options": dict(options)}
    if target is None:
        return functools.partial(_apply, arguments=arguments)
    return _apply(target, arguments=arguments)


def _apply(target: Any, *, arguments: dict[str, Any]) -> Any:
    if inspect.isclass(target) and issubclass(target, torch.nn.Module):
        target._compiled_call_impl = _CompileOnFirstCall(arguments)
        return target
    if isinstance(target, torch.nn.Module):
        target.compile(**arguments)
        return target
    if callable(target) and not inspect.isclass(target):
        return torch.compile(target, **arguments)
    raise TypeError(f"remat takes an nn.Module class, an nn.Module or a function, got {target!r}")


class _CompileOnFirstCall:
    """What ``nn.Module.__call__`` finds on a decorated class: compiles the instance in place the first time.

    A non-data descriptor: ``nn.Module.compile`` stores its result on the instance, which then wins. It is never pickled
    or copied (``nn.Module.__getstate__`` drops it), so copies compile for themselves.
    """

    def __init__(self, arguments: dict[str, Any]):
        self.arguments = arguments

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Callable | None:
        if module is None:
            return None
        module.compile(**self.arguments)
        return module.__dict__["_compiled_call_impl"]
