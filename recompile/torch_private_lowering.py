"""Inductor's lowering for a GPU that is not there: from a graph to the text of the program and what is known about it.

Written against torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch._inductor.config as inductor_config
import torch.fx as fx
from torch._inductor import compile_fx, ir
from torch._inductor import graph as inductor_graph
from torch._inductor import utils as inductor_utils
from torch._inductor.choices import InductorChoices
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.memory import prepare_planning_info
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from recompile.chip import Chip
from recompile.torch_private_emitted import extern_ops_of, result_bytes_of
from recompile.torch_private_fusion import short_lives as short_lived
from recompile.torch_private_gpu import absent_gpu

# What must not be left to the user's settings: each would run something on the device, or emit another kind of program.
LOWERING_PATCHES = {
    "autotune_local_cache": False,
    "bundle_triton_into_fx_graph_cache": False,
    "compile_threads": 1,
    "coordinate_descent_tuning": False,
    "cpp_wrapper": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "memory_planning": False,
    "triton.autotune_at_compile_time": False,
    "triton.cudagraphs": False,
}


@dataclass(frozen=True)
class LoweredKernel:
    """One of the scheduler's steps in the program's order.

    ``buffers``: names of what it writes, in the words of the program. ``moved_bytes``: what it must at least read and
    write. ``origins``: the ops of the graph that it computes. ``spilled_bytes``: what it writes to memory although
    nobody else reads it, because a later pass over the same rows does; ``moved_bytes`` does not count it.
    """

    buffers: frozenset[str]
    is_extern: bool
    moved_bytes: int
    origins: tuple[fx.Node, ...]
    spilled_bytes: int = 0


@dataclass(frozen=True)
class Lowered:
    """What Inductor made of one graph.

    ``result_bytes``: for each name that a library call's result gets, the bytes of the tensors in it. ``extern_ops``:
    the op behind such a name. ``output_strides``: per output, None where it is no tensor. ``estimated_peak_bytes``:
    Inductor's own figure (``estimate_peak_memory`` in torch/_inductor/memory.py), which counts what lives within one
    kernel too, inputs that are freed, and nothing that is there for good.
    """

    source: str
    kernels: tuple[LoweredKernel, ...]
    result_bytes: Mapping[str, tuple[int, ...]]
    extern_ops: Mapping[str, fx.Node]
    output_strides: tuple[tuple[int, ...] | None, ...]
    estimated_peak_bytes: int = 0


class _Captured(BaseException):
    """Carries generated code out of Inductor before it is loaded; no ``except Exception`` may keep it."""

    def __init__(self, lowered: Lowered):
        super().__init__("captured")
        self.lowered = lowered


def lower(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    chip: Chip,
    state: Any,
    is_backward: bool,
    user_visible_outputs: Sequence[int],
    static_inputs: Sequence[int],
    config_patches: Mapping[str, Any],
    short_lives: bool = True,
    donated: Sequence[int] = (),
) -> Lowered:
    """Inductor's program for a graph whose values lie on ``GPU``. The module is changed: Inductor's passes edit it.

    ``inputs``: fake tensors, one a placeholder. ``state``: the fake mode and tracing context it was traced in.
    ``user_visible_outputs``: positions of outputs whose strides must stay as they are. ``donated``: positions of inputs
    that nobody else holds, so that the program may write over them. Inductor's steps from here to
    the text of the program are all its own (``codegen_and_compile``); only loading the text is left out.
    """
    module.graph.output_node().meta["user_visible_output_idxs"] = list(user_visible_outputs)
    settings = {
        "cudagraphs": inductor_utils.BoxedBool(False),
        "static_input_idxs": list(static_inputs),
        "is_backward": is_backward,
        "is_inference": False,
        "graph_id": 0,
    }
    with (
        short_lived(module) if short_lives else V.set_choices_handler(InductorChoices()),
        absent_gpu(chip),
        inductor_config.patch({**config_patches, **LOWERING_PATCHES}),
        state.entered(),
        disable_current_modes(),
        DebugContext(),
        mock.patch.object(GraphLowering, "compile_to_module", _capture),
        mock.patch.object(inductor_graph, "get_donated_idxs", lambda: list(donated)),
    ):
        try:
            compile_fx._InProcessFxCompile().codegen_and_compile(module, list(inputs), (), settings)
        except _Captured as captured:
            return captured.lowered
    raise RuntimeError("Inductor made no program: it did not come to compile_to_module")


def _capture(graph: GraphLowering) -> Any:
    """In place of ``GraphLowering.compile_to_module``: take the program and the facts about it, and leave."""
    wrapper, _ = graph.codegen()
    kernels = tuple(_kernel_facts(node, graph) for node in graph.scheduler.nodes if not _runs_nothing(node))
    strides = tuple(_strides_of(output) for output in graph.graph_outputs)
    peak_bytes = _estimated_peak_bytes(graph)
    raise _Captured(Lowered(wrapper.value, kernels, result_bytes_of(graph), extern_ops_of(graph), strides, peak_bytes))


def _estimated_peak_bytes(graph: GraphLowering) -> int:
    scheduler = graph.scheduler
    inputs, outputs = OrderedSet(graph.graph_inputs), OrderedSet(graph.get_output_names())
    estimated, _ = prepare_planning_info(
        scheduler.nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs
    )
    return int(estimated)


def _runs_nothing(node: BaseSchedulerNode) -> bool:
    is_picking = isinstance(node, ExternKernelSchedulerNode) and isinstance(node.node, ir.MultiOutput)
    return is_picking or isinstance(node, NopKernelSchedulerNode)


def _kernel_facts(node: BaseSchedulerNode, graph: GraphLowering) -> LoweredKernel:
    written = {name for output in node.get_outputs() for name in [output.get_name(), *output.get_mutations()]}
    origins = {
        origin: None for member in node.get_nodes() if member.node is not None for origin in member.node.get_origins()
    }
    return LoweredKernel(
        buffers=frozenset(written),
        is_extern=isinstance(node, ExternKernelSchedulerNode),
        moved_bytes=int(node.get_read_write_buffers_sizes()),
        origins=tuple(origins),
        spilled_bytes=_spilled_bytes(node, graph),
    )


def _spilled_bytes(node: BaseSchedulerNode, graph: GraphLowering) -> int:
    """Bytes of the buffers that a fused kernel allocates for itself: read by no other step, and not optimised away."""
    if not isinstance(node, FusedSchedulerNode):
        return 0
    members, removed = set(node.get_nodes()), graph.removed_buffers | graph.inplaced_to_remove
    spilled = [
        buffer.node
        for buffer in node.get_outputs()
        if buffer.get_name() not in removed and all(user.node in members for user in buffer.users)
    ]
    return sum(int(buffer.get_layout().storage_size()) * buffer.get_dtype().itemsize for buffer in spilled)


def _strides_of(output: Any) -> tuple[int, ...] | None:
    if not isinstance(output, ir.IRNode) or not output.has_tensor_output():
        return None
    return tuple(int(stride) for stride in output.get_layout().stride)
