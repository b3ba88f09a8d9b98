"""PyTorch's private parts behind tracing: one training step as Inductor's partitioner would get it on a GPU.

Nothing is allocated. Two kinds of tensors without content take turns:

1. Dynamo captures the module, and AOTAutograd traces forward and backward, on fake CPU tensors. On ``meta``, torch has
   kernels for some composite ops (``nll_loss``) that hide them from autograd, and gradients come out as None; and
   autograd asks for a stream of fake CUDA tensors, which ends the process on a build of torch without CUDA.
2. Inductor's joint-graph passes and all that follows see fake tensors on ``cuda:0``.

What step 1 would otherwise take from the CPU is put right: attention is the op that the GPU would run, autocast casts
what it would there, and the bias gradient of a convolution is a sum of its own. A tensor that the model makes on the
CPU counts as on the GPU.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._dynamo.exc import ShortenTraceback
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import compile_fx, decomposition, pattern_matcher
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.fx_passes import joint_graph as joint_passes
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from recompile.attention import AttentionForGPU
from recompile.autocast import autocast_of_gpu
from recompile.torch_private_gpu import GPU, absent_generators, harmless_device_guard

CPU = torch.device("cpu")

TRACING_PATCHES = {"shape_padding": False}  # padding of matmuls is decided by a benchmark on the device


@dataclass(frozen=True)
class TracingState:
    """The contexts in which a graph's fake tensors are at home."""

    fake_mode: FakeTensorMode
    context: TracingContext

    @contextmanager
    def entered(self) -> Iterator[None]:
        with V.set_fake_mode(self.fake_mode), tracing(self.context):
            yield


@dataclass(frozen=True)
class JointTrace:
    """A joint graph on ``cuda:0`` after Inductor's joint-graph passes, and what the partitioner is told with it."""

    module: fx.GraphModule
    num_fwd_outputs: int
    static_inputs: tuple[int, ...]
    user_visible_outputs: tuple[int, ...]
    state: TracingState

    def copied(self) -> fx.GraphModule:
        """The joint graph, to be changed at will."""
        module = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        module.meta.update(self.module.meta)
        return module

    def split(self, partitioner: Callable[..., Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward by a partitioner, which gets a copy of the joint graph.

        Where a random op is drawn again from a saved state, a generator without use stands for the GPU's.
        """
        module = self.copied()
        inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        with self.state.entered(), absent_generators(), harmless_device_guard():
            return partitioner(
                module,
                inputs,
                num_fwd_outputs=self.num_fwd_outputs,
                static_lifetime_input_indices=list(self.static_inputs),
            )


class _Traced(ShortenTraceback):
    """Ends a compilation once the joint graph is known, so that Dynamo keeps nothing of it."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


def new_fake_mode() -> FakeTensorMode:
    """Where the fake tensors of one trace belong."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def trace_joint(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode,
    config_patches: Mapping[str, Any], autocast: torch.dtype | None,
) -> JointTrace | None:  # fmt: skip
    """Trace ``model(*args, **kwargs)``, on fake CPU tensors of ``mode``, up to the partitioner.

    None if nothing wants a gradient. Raises what Dynamo raises, among it torch._dynamo.exc.Unsupported for a graph
    break.
    """
    recorder = _Recorder()

    def backend(captured: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with AttentionForGPU():
            compile_on_cpu(captured, inputs, recorder, config_patches)
        raise _Traced

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    try:
        with (
            torch._dynamo.config.patch(
                recompile_limit=2**20, accumulated_recompile_limit=2**20, ignore_logging_functions=messages()
            ),
            torch.enable_grad(),
            autocast_of_gpu(autocast),
            mode,
        ):
            compiled(*args, **kwargs)
    except _Traced:
        pass
    return recorder.trace()


def messages() -> set[Callable[..., Any]]:
    """What only tells people something: no message is worth a graph break in a trace that runs nothing."""
    levels = ("debug", "info", "warning", "error", "critical", "exception", "log")
    methods = {value for value in vars(logging.Logger).values() if callable(value)}  # also those of other packages
    return methods | {getattr(logging, level) for level in levels} | {warnings.warn}


def compile_on_cpu(
    captured: fx.GraphModule, inputs: Sequence[Any], recorder: _Recorder, config_patches: Mapping[str, Any]
) -> None:
    """Inductor's own way from a captured graph to forward and backward; autocast for CUDA becomes the CPU's."""
    for part in captured.modules():
        if isinstance(part, fx.GraphModule):
            use_autocast_of_cpu(part.graph)
            part.recompile()
    patches = {**config_patches, **TRACING_PATCHES, "custom_partitioner_fn": recorder}
    with (
        inductor_config.patch(patches),
        functorch_config.patch(enable_autograd_cache=False),
        absent_generators(),  # checkpointed dropout is drawn again from a saved state
        mock.patch.object(decomposition, "is_gpu", lambda device_type: True),
        mock.patch.object(compile_fx, "_recursive_joint_graph_passes", passes_on_gpu),
        mock.patch.object(joint_passes, "UniformValueConstantFolder", FolderOnCPU),
        mock.patch.object(pattern_matcher, "aot_function", aot_function_on_cpu),
    ):
        compile_fx.compile_fx(captured, list(inputs), inner_compile=recorder.inner_compile)


def use_autocast_of_cpu(graph: fx.Graph) -> None:
    """Have ``torch.autocast("cuda", ...)`` in a captured graph be for the CPU, in place."""
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast and node.args[0] == "cuda":
            node.args = ("cpu", *node.args[1:])


class _Recorder(CustomPartitionerFn):
    """Stands in for the partitioner and for the compiler of its graphs, and keeps what they are told."""

    def __init__(self) -> None:
        self.joint: tuple[fx.GraphModule, int, Sequence[int], TracingState] | None = None
        self.user_visible_outputs: tuple[int, ...] = ()

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None, **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:  # fmt: skip
        state = TracingState(V.fake_mode, TracingContext.get())
        module = fx.GraphModule(joint, copy.deepcopy(joint.graph))
        module.meta.update(joint.meta)
        self.joint = module, num_fwd_outputs, tuple(static_lifetime_input_indices or ()), state
        from functorch.compile import default_partition

        return default_partition(
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )

    def uuid(self) -> None:
        return None

    def inner_compile(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """In place of ``compile_fx_inner``: forward comes first, and its output node says which outputs users see."""
        if not self.user_visible_outputs:
            self.user_visible_outputs = tuple(module.graph.output_node().meta.get("user_visible_output_idxs", ()))
        return lambda arguments: None

    def trace(self) -> JointTrace | None:
        if self.joint is None:
            return None
        module, num_fwd_outputs, static_inputs, state = self.joint
        return JointTrace(module, num_fwd_outputs, static_inputs, self.user_visible_outputs, state)


# From one device to another


def with_device(value: Any, source: torch.device, target: torch.device, mode: FakeTensorMode) -> Any:
    """A value with fake tensors on ``target`` in place of those on ``source``; equal tensors give equal ones."""
    if isinstance(value, torch.Tensor) and value.device == source:
        with mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=target, requires_grad=value.requires_grad
            )
    return value


def replace_devices(graph: fx.Graph, replaced: Callable[[torch.device], torch.device]) -> None:
    """Replace the devices among the arguments of a graph's nodes, in place."""
    for node in graph.nodes:
        node.args, node.kwargs = devices_replaced(node, replaced)


def devices_replaced(node: fx.Node, replaced: Callable[[torch.device], torch.device]) -> tuple[Any, Any]:
    """A node's arguments with its devices replaced."""

    def visit(argument: Any) -> Any:
        return replaced(argument) if isinstance(argument, torch.device) else argument

    return fx.node.map_aggregate(node.args, visit), fx.node.map_aggregate(node.kwargs, visit)


def move_to_gpu(module: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Put a traced graph on ``cuda:0``, in place: its values and the devices among its arguments.

    Values that shared a storage share one afterwards: views are taken of the moved base.
    """
    storages: dict[int, torch.Tensor] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage._cdata not in storages:
            with mode:
                storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=GPU)
        with mode, torch.no_grad():
            twin = torch.empty(0, dtype=value.dtype, device=GPU)
            twin.set_(storages[storage._cdata].untyped_storage(), value.storage_offset(), value.shape, value.stride())
        return twin

    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            replace_devices(part.graph, lambda device: GPU if device.type == "cpu" else device)
            for node in part.graph.nodes:
                if "val" in node.meta:
                    node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
            part.recompile()


run_joint_passes = compile_fx._recursive_joint_graph_passes


def passes_on_gpu(module: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """Inductor's joint-graph passes on a graph that was traced on the CPU and is on the GPU from here on."""
    move_to_gpu(module, V.fake_mode)
    with harmless_device_guard():
        return run_joint_passes(module, *args, **kwargs)


class FolderOnCPU(joint_passes.UniformValueConstantFolder):
    """Inductor's folding of constants, which computes them: on the CPU, as there is no GPU."""

    def _deduce_value(self, node: fx.Node) -> Any:
        arguments = node.args, node.kwargs
        node.args, node.kwargs = devices_replaced(node, lambda device: CPU)
        try:
            return super()._deduce_value(node)
        finally:
            node.args, node.kwargs = arguments


trace_autograd = pattern_matcher.aot_function


def aot_function_on_cpu(function: Callable[..., Any], *compilers: Any, partition_fn: Any, **settings: Any) -> Any:
    """AOTAutograd as Inductor's patterns use it to trace what they matched: on the CPU, the graph then on the GPU."""

    def partition_on_gpu(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        move_to_gpu(joint, detect_fake_mode(inputs))
        return partition_fn(joint, inputs, **kwargs)

    traced = trace_autograd(function, *compilers, partition_fn=partition_on_gpu, **settings)

    def call(*args: Any) -> Any:
        mode = detect_fake_mode(args)
        return traced(*(with_device(arg, GPU, CPU, mode) for arg in args))

    return call
