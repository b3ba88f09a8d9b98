"""The programs that Inductor emits while it compiles, and what their library calls allocate: what a replay needs."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._inductor import ir
from torch._inductor.graph import GraphLowering

from recompile.replay import ExternSizes
from recompile.step_memory import Half, given_to, scratch_bytes
from recompile.torch_private import record_dir
from recompile.whole_file import write_whole

log = logging.getLogger("recompile")


def result_bytes_of(graph: GraphLowering) -> dict[str, tuple[int, ...]]:
    """For each name that a library call's result gets, the bytes of the tensors in it.

    Sums are among them: of those that a kernel makes for rows and for columns at once, it leaves the latter in parts,
    and the program itself adds these up (codegen/simd.py, "Call mix order reduction kernel").
    """
    sums = [b for b in graph.buffers if isinstance(b, ir.ComputedBuffer) and isinstance(b.data, ir.Reduction)]
    return {
        **{buffer.get_name(): (_laid_bytes(buffer),) for buffer in sums},
        **{buffer.get_name(): _result_bytes(buffer) for buffer in _externs(graph)},
    }


def extern_ops_of(graph: GraphLowering) -> dict[str, fx.Node]:
    """The op behind such a name, where it is known."""
    ops = {buffer.get_name(): op_of(buffer) for buffer in _externs(graph)}
    return {name: op for name, op in ops.items() if op is not None}


def _externs(graph: GraphLowering) -> list[ir.ExternKernel]:
    return [buffer for buffer in graph.buffers if isinstance(buffer, ir.ExternKernel)]


def _result_bytes(buffer: ir.ExternKernel) -> tuple[int, ...]:
    """Bytes of each tensor that a library call returns, 0 for what is none."""
    if isinstance(buffer.get_output_spec(), ir.FixedLayout | ir.FlexibleLayout):
        return (_laid_bytes(buffer),)
    op = op_of(buffer)
    made = op.meta.get("val") if op is not None else None
    made = made if isinstance(made, tuple | list) else (made,)
    return tuple(val.untyped_storage().nbytes() if isinstance(val, torch.Tensor) else 0 for val in made)


def _laid_bytes(buffer: ir.Buffer) -> int:
    layout = buffer.get_layout()
    return int(layout.storage_size()) * layout.dtype.itemsize


def op_of(buffer: ir.ExternKernel) -> fx.Node | None:
    """The op of the graph that a library call was made for, among all that went into it."""
    called = getattr(buffer, "op_overload", None)
    found = next((origin for origin in buffer.get_origins() if origin.target is called), None)
    return found if found is not None else buffer.get_origin_node()


@dataclass
class Emitted:
    """The programs of one compilation, as Inductor emits them; None for what it never came to, or emitted unseen."""

    forward: Half | None = None
    backward: Half | None = None


def recording(inner_compile: Callable[..., Any], emitted: Emitted) -> Callable[..., Any]:
    """The compilation of one graph, with its program kept in ``emitted``.

    Programs with symbolic sizes, or in C++, are not kept. A graph whose code comes from Inductor's cache is not lowered
    again: what its library calls allocate was stored beside the cache when it was, under the text of the program.
    """

    @functools.wraps(inner_compile)
    def compiled(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if has_symbolic_sizes(module):
            return inner_compile(module, *args, **kwargs)
        given = given_to(module)
        with _lowered() as lowered:
            code = inner_compile(module, *args, **kwargs)
        source = getattr(code, "source_code", None)
        if source:
            sizes = lowered.get(source) or _load(source)
            half = Half(source, given, sizes) if sizes is not None else None
            setattr(emitted, "backward" if kwargs.get("is_backward") else "forward", half)
        return code

    return compiled


def has_symbolic_sizes(module: fx.GraphModule) -> bool:
    """Whether a size in the graph is a symbol, so that its program's bytes are known at run time only."""
    values = [value for node in module.graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = [*values, *(size for tensor in tensors for size in tensor.shape)]
    return any(isinstance(size, torch.SymInt) for size in sizes)


@contextmanager
def _lowered() -> Iterator[dict[str, ExternSizes]]:
    """Collects, by the text of each program emitted in the block, the sizes of its library calls' results."""
    codegen, found = GraphLowering.codegen, {}

    def kept(graph: GraphLowering) -> Any:
        code = codegen(graph)
        if graph.cpp_wrapper:
            return code  # the program is in C++
        scratch = {name: scratch_bytes(op) for name, op in extern_ops_of(graph).items()}
        found[code[0].value] = sizes = ExternSizes(result_bytes_of(graph), scratch)
        _store(code[0].value, sizes)
        return code

    with mock.patch.object(GraphLowering, "codegen", kept):
        yield found


def _place(source: str) -> pathlib.Path:
    return record_dir() / f"program-{hashlib.sha256(source.encode()).hexdigest()}.json"


def _store(source: str, sizes: ExternSizes) -> None:
    write_whole(_place(source), json.dumps({"results": dict(sizes.results), "scratch": dict(sizes.scratch)}))


def _load(source: str) -> ExternSizes | None:
    """What was stored for a program; None where nothing was, or what is there cannot be read."""
    try:
        found = json.loads(_place(source).read_text())
        return ExternSizes({name: tuple(sizes) for name, sizes in found["results"].items()}, found["scratch"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("what is known of a cached program cannot be read (%s): %s", type(error).__name__, error)
        return None
