"""Runs partitioned joint graphs op by op instead of compiling them, so that a parity check takes milliseconds.

The graphs are the ones that Inductor would get: the same decompositions, the same joint-graph passes, the same call of
the partitioner. Only code generation is missing. Inductor's random ops are pure functions of their seed here too:
drawing the seeds a second time gives other masks, looking the same seed up twice gives the same mask.

    backend = interpreted(partitioner(0.1))
    torch.compile(model, backend=backend)(**inputs).loss.backward()
    backend.graphs[0].partition.backward_calls["aten.mm.default"]       # how often backward ran that op
    backend.graphs[0].replay(partitioner(0.0)).gradients                # another plan, without tracing again
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor import inductor_prims as _inductor_prims  # noqa: F401  (registers the random ops)
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode

RawPartitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def partitioner(budget: object, planner: str = "mincut") -> RawPartitioner:
    """The partitioner that ``backend="recompile"`` gives to Inductor."""
    from recompile.backend import Partitioner
    from recompile.options import Options

    return Partitioner(Options.parse({"memory_budget": budget, "planner": planner}))


def interpreted(partitioner: RawPartitioner, fallback_random: bool = False) -> InterpretedBackend:
    """A backend for torch.compile that partitions with `partitioner` and interprets both graphs."""
    return InterpretedBackend(partitioner, fallback_random)


class InterpretedBackend:
    """What was traced so far is in ``graphs``, in order: one entry for every graph that has a backward."""

    def __init__(self, partitioner: RawPartitioner, fallback_random: bool) -> None:
        self.partitioner = partitioner
        self.fallback_random = fallback_random
        self.graphs: list[Traced] = []
        self.inference_graphs: list[fx.GraphModule] = []
        self.inference_calls: Counter[str] = Counter()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        joints: list[Joint] = []  # a subgraph of a higher-order op comes before the graph that holds it
        traced: list[Traced] = []

        def compile_forward(forward: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            traced.append(Traced(joints[-1], joints[-1].partitions[0]))
            self.graphs.append(traced[-1])
            traced[-1].partition.forward = forward  # AOTAutograd may have edited it
            return boxed(traced[-1].run_forward)

        def compile_backward(backward: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            traced[-1].partition.backward = backward
            return boxed(traced[-1].run_backward)

        with inductor_environment(example_inputs, self.fallback_random, RecordingPartitioner(self.partitioner, joints)):
            return aot_autograd(
                fw_compiler=compile_forward,
                bw_compiler=compile_backward,
                inference_compiler=self._compile_inference,
                partition_fn=compile_fx.partition_fn,
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )(gm, example_inputs)

    def _compile_inference(self, gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        gm = compile_fx._recursive_joint_graph_passes(gm)
        self.inference_graphs.append(gm)
        return boxed(lambda args: OpByOp(gm, self.inference_calls).boxed_run(args))


@contextlib.contextmanager
def inductor_environment(
    example_inputs: Sequence[Any], fallback_random: bool, partitioner: CustomPartitionerFn
) -> Iterator[None]:
    """The settings and contexts in which Inductor traces and partitions."""
    fake_mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    with (
        inductor_config.patch(fallback_random=fallback_random, custom_partitioner_fn=partitioner),
        functorch_config.patch(unlift_effect_tokens=True),
        V.set_fake_mode(fake_mode),
        tracing(TracingContext.try_get() or TracingContext(fake_mode)),
    ):
        yield


class RecordingPartitioner(CustomPartitionerFn):
    """Keeps a copy of every joint graph before it hands it on."""

    def __init__(self, partitioner: RawPartitioner, joints: list[Joint]) -> None:
        self.partitioner = partitioner
        self.joints = joints

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        self.joints.append(Joint(gm, joint_inputs, kwargs, V.fake_mode, TracingContext.try_get()))
        partition = self.joints[-1].partitioned(self.partitioner)
        return partition.forward, partition.backward

    def uuid(self) -> None:
        return None


class Joint:
    """A joint graph as the partitioner got it, to be partitioned any number of times."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict, fake_mode: Any, context: Any) -> None:
        self.gm = gm
        self.inputs = inputs
        self.kwargs = kwargs
        self.fake_mode = fake_mode
        self.context = context
        self.partitions: list[Partition] = []

    def partitioned(self, partitioner: RawPartitioner) -> Partition:
        gm = fx.GraphModule(self.gm, copy.deepcopy(self.gm.graph))
        gm.meta.update(self.gm.meta)
        with V.set_fake_mode(self.fake_mode), tracing(self.context):
            forward, backward = partitioner(gm, self.inputs, **self.kwargs)
        for module in (forward, backward):
            module.graph.lint()
        num_saved = len(forward.graph.output_node().args[0]) - self.kwargs["num_fwd_outputs"]
        self.partitions.append(Partition(forward, backward, num_saved))
        return self.partitions[-1]


@dataclass
class Partition:
    """Forward and backward graphs, with counts of every op that they ran."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_saved: int  # forward returns these after its own outputs: tensors first, then sizes
    forward_calls: Counter[str] = field(default_factory=Counter)
    backward_calls: Counter[str] = field(default_factory=Counter)
    saved: list[Any] = field(default_factory=list)  # of the latest forward
    forward_peak_bytes: int = 0  # of the latest run; storages that the caller passed to forward are not counted
    backward_peak_bytes: int = 0  # of the latest run; the saved values are counted, the caller's storages are not
    _callers: frozenset[int] = frozenset()

    def run_forward(self, args: list[Any]) -> Sequence[Any]:
        self._callers = frozenset(storage for arg in args for storage in storages(arg))
        interpreter = OpByOp(self.forward, self.forward_calls, self._callers)
        outputs = interpreter.boxed_run(args)
        self.forward_peak_bytes = interpreter.peak_bytes
        self.saved = list(outputs[len(outputs) - self.num_saved :])
        return outputs

    def run_backward(self, args: list[Any]) -> Sequence[Any]:
        interpreter = OpByOp(self.backward, self.backward_calls, self._callers)
        gradients = interpreter.boxed_run(args)
        self.backward_peak_bytes = interpreter.peak_bytes
        return gradients

    def step(self, primals: Sequence[Any], tangents: Sequence[Any], random_state: torch.Tensor) -> Step:
        """Forward and backward on copies of the inputs, the way that AOTAutograd calls the two."""
        primals = [copied(primal) for primal in primals]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random_state)
            outputs = self.run_forward(list(primals))
            sizes = [value for value in self.saved if isinstance(value, int | float)]
            others = [value for value in self.saved if not isinstance(value, int | float)]  # tensors, then objects
            gradients = self.run_backward([*sizes, *others, *map(copied, tangents)])
        return Step(self, list(outputs[: len(outputs) - self.num_saved]), list(gradients), primals)


@dataclass(frozen=True)
class Step:
    """One forward and backward: what they returned, and the inputs as they were left."""

    partition: Partition
    outputs: list[Any]
    gradients: list[Any]
    primals: list[Any]


class Traced:
    """A joint graph of the user's model, its partition, and what its first step was called with and returned."""

    def __init__(self, joint: Joint, partition: Partition) -> None:
        self.joint = joint
        self.partition = partition
        self.primals: list[Any] = []
        self.tangents: list[Any] = []
        self.random_state: torch.Tensor | None = None
        self.step = Step(partition, [], [], [])

    def run_forward(self, args: list[Any]) -> Sequence[Any]:
        first, primals = not self.primals, list(args)
        if first:
            self.primals = [copied(arg) for arg in args]
            self.random_state = torch.get_rng_state()
        outputs = self.partition.run_forward(args)
        if first:
            self.step.outputs.extend(map(copied, outputs[: len(outputs) - self.partition.num_saved]))
            self.step.primals.extend(map(copied, primals))
        return outputs

    def run_backward(self, args: list[Any]) -> Sequence[Any]:
        first = not self.tangents
        if first:
            self.tangents = [copied(arg) for arg in args[self.partition.num_saved :]]
        gradients = self.partition.run_backward(args)
        if first:
            self.step.gradients.extend(map(copied, gradients))
        return gradients

    def replay(self, partitioner: RawPartitioner) -> Step:
        """The recorded step with another plan, the same random numbers, and nothing traced again.

        Not for graphs with ordered side effects: AOTAutograd edits those after the partitioner.
        """
        return self.joint.partitioned(partitioner).step(self.primals, self.tangents, self.random_state)


class OpByOp(fx.Interpreter):
    """Runs a graph, frees each value after its last use, counts calls and live bytes."""

    def __init__(self, gm: fx.GraphModule, calls: Counter[str], callers: frozenset[int] = frozenset()) -> None:
        super().__init__(gm)
        self.calls = calls
        self.values = LiveValues(callers)

    @property
    def peak_bytes(self) -> int:
        return self.values.peak_bytes

    def boxed_run(self, args_list: list[Any]) -> Any:
        placeholders = self.graph.find_nodes(op="placeholder")
        assert len(placeholders) == len(args_list), f"{len(placeholders)} placeholders, {len(args_list)} arguments"
        for placeholder, arg in zip(placeholders, args_list, strict=True):
            self.values[placeholder] = arg
        args_list.clear()
        return self.run(initial_env=self.values)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls[op_name(target)] += 1
        return RANDOM_OPS.get(target, super().call_function)(target, args, kwargs)


def random_from_seed(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    size, seed, mode = args  # mode: "rand" or "randn"
    return getattr(torch, mode)(size, generator=generator_from(seed), dtype=torch.float32, device=seed.device)


def randint_from_seed(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    low, high, size, seed = args
    return torch.randint(low, high, size, generator=generator_from(seed), device=seed.device)


def generator_from(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(device=seed.device).manual_seed(int(seed))


RANDOM_OPS = {  # inductor_seeds draws from the default generator and inductor_lookup_seed indexes: right as they are
    torch.ops.prims.inductor_random.default: random_from_seed,
    torch.ops.prims.inductor_randint.default: randint_from_seed,
}


class LiveValues(dict):
    """The values of a running graph by node, and the bytes behind them: each storage once, the caller's never."""

    def __init__(self, callers: frozenset[int]) -> None:
        super().__init__()
        self.callers = callers
        self.num_holders: Counter[int] = Counter()
        self.live_bytes = 0
        self.peak_bytes = 0

    def __setitem__(self, node: fx.Node, value: Any) -> None:
        super().__setitem__(node, value)
        for storage, num_bytes in storages(value).items():
            self.num_holders[storage] += 1
            if self.num_holders[storage] == 1 and storage not in self.callers:
                self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __delitem__(self, node: fx.Node) -> None:
        for storage, num_bytes in storages(self[node]).items():
            self.num_holders[storage] -= 1
            if self.num_holders[storage] == 0 and storage not in self.callers:
                self.live_bytes -= num_bytes
        super().__delitem__(node)


def storages(value: Any) -> dict[int, int]:
    """Bytes by storage for the tensors in a value."""
    leaves = pytree.tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    return {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}


def copied(value: Any) -> Any:
    """A copy with the same sizes and strides; numbers as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if torch._debug_has_internal_overlap(value):  # an expanded tensor: writing to it is not defined
        return value.clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def op_name(target: Any) -> str:
    """``aten.mm.default``, ``getitem``."""
    return str(target) if isinstance(target, torch._ops.OperatorBase) else target.__name__


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks a function as one that takes its arguments in a list and empties it."""

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True
    return call
