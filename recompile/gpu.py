"""The program that Inductor would emit for a GPU that need not be there, and what that program would cost.

    program = dry_run(model, (tokens,), memory_budget=0.5, hardware="h100").program
    program.peak_bytes, program.num_launches, program.seconds
    program.forward_source, program.triton_sources()

Peaks come from a replay of the emitted program (``recompile.replay``) and mean what ``torch.cuda.max_memory_allocated()
- torch.cuda.memory_allocated()`` shows around one step: the increase over what was allocated when forward started.
Parameters and the batch are not in it; saved activations, forward's outputs, tangents, gradients and temporaries are,
each as a block of the caching allocator. Not in it: workspaces of cuDNN and cuBLAS (``blas_workspace_bytes`` states the
one that torch keeps once the first matmul has run), and gradients that exist already.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.fx as fx

from recompile import records
from recompile.backend import Partitioner, inductor_patches
from recompile.chip import Chip, blas_workspace_bytes, chip_for
from recompile.cost import dtype_of
from recompile.hardware import Hardware
from recompile.hardware import resolve as resolve_hardware
from recompile.joint import Kind
from recompile.options import Options
from recompile.replay import ExternSizes, Run, kernel_sources
from recompile.report.explanation import GraphReport
from recompile.step_memory import Half, given_to, is_saved, placeholders, replay_step, scratch_bytes
from recompile.torch_private import storage_key
from recompile.torch_private_gpu import compile_kernel
from recompile.torch_private_lowering import Lowered, LoweredKernel, lower
from recompile.trace import JointTrace, trace_step
from recompile.work import kind_of, work_of


@dataclass(frozen=True)
class Kernel:
    """One launch of the program, in order.

    ``moved_bytes``: the least it must read and write, by Inductor's count (0 for what only prepares memory, and for a
    random op under a saved generator). ``flop``: that of its ops, an op that several kernels compute counted in each.
    ``seconds``: the slower of its arithmetic and its traffic, and a launch. ``live_bytes``: allocated while it runs.
    ``ops``: the graph ops that it computes. ``spilled_bytes``: what it writes for itself and reads again in a later
    pass over long rows, which Inductor does not count; ``spill_seconds``: what that adds to ``seconds``.
    """

    name: str
    phase: str  # "forward" or "backward"
    is_extern: bool
    ops: tuple[str, ...]
    flop: int
    moved_bytes: int
    seconds: float
    live_bytes: int
    spilled_bytes: int
    spill_seconds: float


@dataclass(frozen=True)
class Program:
    """Forward and backward as Inductor emits them for a chip. Bytes, seconds and FLOP are those of one step."""

    chip: Chip
    kernels: tuple[Kernel, ...]
    forward_peak_bytes: int
    backward_peak_bytes: int
    estimated_peak_bytes: int  # Inductor's own estimate, which does not see what is freed within a kernel
    saved_bytes: int  # what forward leaves for backward and nobody else holds
    forward_source: str
    backward_source: str

    def to_json(self) -> dict[str, Any]:
        """Plain values: totals, the emitted text of both halves, and the kernels in order."""
        totals = ("peak_bytes", "num_launches", "moved_bytes", "flop", "seconds", "blas_workspace_bytes")
        return {**{name: getattr(self, name) for name in totals}, **asdict(self)}

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    @property
    def num_launches(self) -> int:
        return len(self.kernels)

    @property
    def moved_bytes(self) -> int:
        return sum(kernel.moved_bytes for kernel in self.kernels)

    @property
    def flop(self) -> int:
        return sum(kernel.flop for kernel in self.kernels)

    @property
    def seconds(self) -> float:
        """The sum of the kernels' roofline times."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def seconds_with_spills(self) -> float:
        """The same with what kernels write and read again for themselves."""
        return sum(kernel.seconds + kernel.spill_seconds for kernel in self.kernels)

    @property
    def blas_workspace_bytes(self) -> int:
        """What torch allocates for cuBLAS at the process's first matmul and keeps; in no peak here."""
        return blas_workspace_bytes(self.chip.capability)

    def triton_sources(self, phase: str | None = None) -> dict[str, str]:
        """The text of each Triton kernel by name, of one phase ("forward", "backward") or of both.

        Forward and backward name their kernels independently: with both, the names have the phase before them.
        """
        sources = {"forward": self.forward_source, "backward": self.backward_source}
        if phase is not None:
            return kernel_sources(sources[phase])
        return {f"{p}.{name}": text for p, source in sources.items() for name, text in kernel_sources(source).items()}

    def compiled_kernels(self, phase: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each Triton kernel compiled for the chip, a second or so apiece: (name, {"ptx": str, "cubin": bytes, ...}).

        The first of the configurations that Inductor would choose from on the device. Raises what Triton raises.
        """
        for name, text in self.triton_sources(phase).items():
            yield name, compile_kernel(text, self.chip)


@dataclass(frozen=True)
class DryRun:
    """What was planned for a step, ``report.peak_bytes`` and more, and the program that came of it."""

    report: GraphReport
    program: Program


def dry_run(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    chip: Chip | None = None,
    trace: JointTrace | None = None,
    **options: Any,
) -> DryRun:
    """Trace a training step, plan it, and emit the program for a GPU; nothing runs, no weight is allocated.

    ``options`` are those of the backend (``memory_budget``, ``planner``, ``hardware``, Inductor's own). ``chip``: what
    code is generated for, by default the one that the hardware names. ``trace``: what ``trace_step`` returned for the
    same step, so that several plans of it share one. Raises OptionError for an option or hardware that is not known,
    ValueError for a step without gradients, BudgetError when no plan fits, and what ``trace_step`` raises.
    """
    parsed = Options.parse(options)
    if parsed.hardware is None or parsed.memory_budget == "auto":
        raise ValueError("the dry run looks at no device: give hardware=, such as 'h100', and no memory_budget='auto'")
    hardware = resolve_hardware(parsed.hardware, torch.device("cpu"))
    chip = chip or chip_for(hardware.name)
    trace = trace or trace_step(model, args, kwargs, dict(parsed.inductor))
    with records.recording() as reports:
        forward, backward = trace.split(Partitioner(parsed, hardware))
    program = program_for(forward, backward, trace, hardware, chip, inductor_patches(parsed))
    return DryRun(reports[-1], program)


def program_for(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    trace: JointTrace,
    hardware: Hardware,
    chip: Chip | None = None,
    inductor: Mapping[str, Any] | None = None,
    short_lives: bool = True,
) -> Program:
    """Inductor's program for the two halves of a traced step, as ``trace.split`` returns them; they are not changed.

    ``hardware`` prices the kernels. ``inductor``: Inductor's options; ``recompile`` sets ``backend.WITH_A_BUDGET``
    wherever there is a memory budget, so give that here too.
    ``short_lives``: without the fusions that ``recompile`` keeps Inductor from making; False for Inductor by itself.
    """
    chip = chip or chip_for(hardware.name)
    compiled = functools.partial(
        lower, chip=chip, state=trace.state, config_patches=dict(inductor or {}), short_lives=short_lives
    )
    lowered_forward = compiled(
        copied(forward),
        [node.meta["val"] for node in placeholders(forward)],
        is_backward=False,
        user_visible_outputs=trace.user_visible_outputs,
        static_inputs=trace.static_inputs,
    )
    num_saved = len(saved_of(forward, trace.num_fwd_outputs))
    inputs = restrided(backward, lowered_forward.output_strides[trace.num_fwd_outputs :])
    lowered_backward = compiled(
        copied(backward), inputs, is_backward=True, user_visible_outputs=(), static_inputs=range(num_saved),
        donated=donated_of(forward, backward, trace.num_fwd_outputs),
    )  # fmt: skip
    return assemble(forward, backward, (lowered_forward, lowered_backward), hardware, chip)


def assemble(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    lowered: tuple[Lowered, Lowered],
    hardware: Hardware,
    chip: Chip,
) -> Program:
    """Replay both programs, the second from where the first left off, and price their kernels."""
    first, second = lowered
    runs = replay_step(
        Half(first.source, given_to(forward), extern_sizes(first)),
        Half(second.source, given_to(backward), extern_sizes(second)),
    )
    run_forward, run_backward = runs.forward, runs.backward
    kernels = [
        *priced(run_forward, first, "forward", hardware),
        *priced(run_backward, second, "backward", hardware),
    ]
    return Program(
        chip=chip,
        kernels=tuple(kernels),
        forward_peak_bytes=run_forward.peak_bytes,
        backward_peak_bytes=run_backward.peak_bytes,
        estimated_peak_bytes=max(first.estimated_peak_bytes, second.estimated_peak_bytes),
        saved_bytes=runs.saved_bytes,
        forward_source=first.source,
        backward_source=second.source,
    )


# Between forward and backward


def copied(module: fx.GraphModule) -> fx.GraphModule:
    twin = fx.GraphModule(module, copy.deepcopy(module.graph))
    twin.meta.update(module.meta)
    return twin


def saved_of(forward: fx.GraphModule, num_fwd_outputs: int) -> list[fx.Node]:
    """What forward returns for backward: tensors, then sizes, of which a trace with constant sizes has none."""
    return list(forward.graph.output_node().args[0][num_fwd_outputs:])


def donated_of(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> list[int]:
    """Positions of what is saved for backward alone, so that backward may write over it.

    As AOTAutograd finds its donated buffers (``collect_fw_donated_buffer_idxs`` in graph_compile.py).
    """
    returned = [*forward.graph.output_node().args[0][:num_fwd_outputs], *backward.graph.output_node().args[0]]
    held = {storage_of(node) for node in [*placeholders(forward), *returned]}
    return [i for i, node in enumerate(saved_of(forward, num_fwd_outputs)) if storage_of(node) not in held]


def storage_of(node: Any) -> int | None:
    """None where there is no tensor."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return storage_key(val) if isinstance(val, torch.Tensor) else None


def restrided(backward: fx.GraphModule, strides: Sequence[tuple[int, ...] | None]) -> list[Any]:
    """Backward's arguments with the strides that the compiled forward gives what it saves, as AOTAutograd has them."""
    remaining = iter(strides)
    inputs = []
    for node in placeholders(backward):
        value = node.meta["val"]
        wanted = next(remaining) if is_saved(node) else None
        if wanted is not None and tuple(value.stride()) != wanted:
            value = value.new_empty_strided(value.shape, wanted)
        inputs.append(value)
    return inputs


def extern_sizes(lowered: Lowered) -> ExternSizes:
    scratch = {name: scratch_bytes(op) for name, op in lowered.extern_ops.items()}
    return ExternSizes(lowered.result_bytes, scratch)


# Prices


def priced(run: Run, lowered: Lowered, phase: str, hardware: Hardware) -> list[Kernel]:
    """The launches of a program with what Inductor's scheduler knows about each.

    Launches come in the scheduler's order, one or more for each step of it; a step is found by what it writes. What
    belongs to no step (filling a workspace with zeros) costs a launch.
    """
    kernels, position = [], 0
    for launch in run.launches:
        names = set(launch.names)
        found = next((i for i in range(position, len(lowered.kernels)) if lowered.kernels[i].buffers & names), None)
        step = NO_STEP if found is None else lowered.kernels[found]
        position = position if found is None else found + 1
        kernels.append(
            Kernel(
                name=launch.function.removesuffix(".run"),
                phase=phase,
                is_extern=not launch.function.endswith(".run"),
                ops=tuple(dict.fromkeys(str(node.target) for node in step.origins)),
                flop=sum(flop_of(step).values()),
                moved_bytes=step.moved_bytes,
                seconds=step_seconds(step, hardware),
                live_bytes=launch.live_bytes,
                spilled_bytes=step.spilled_bytes,
                spill_seconds=spill_seconds(step, hardware),
            )
        )
    return kernels


NO_STEP = LoweredKernel(frozenset(), False, 0, ())


def flop_of(step: LoweredKernel) -> dict[fx.Node, int]:
    """FLOP of each op in a step of the scheduler; of a library call, the library's op alone."""
    kinds = (Kind.EXTERN,) if step.is_extern else (Kind.POINTWISE, Kind.REDUCTION)
    return {node: work_of(node).flop for node in step.origins if kind_of(node) in kinds}


def step_seconds(step: LoweredKernel, hardware: Hardware) -> float:
    """Roofline: the slower of arithmetic and traffic, and a launch. Matmul rates for library calls, else vector."""
    arithmetic = 0.0
    for node, flop in flop_of(step).items():
        rate = hardware.matmul_flop_per_s(dtype_of(node)) if step.is_extern else hardware.vector_flop_per_s
        arithmetic += flop / rate
    return max(arithmetic, step.moved_bytes / hardware.byte_per_s) + hardware.launch_s


def spill_seconds(step: LoweredKernel, hardware: Hardware) -> float:
    """What writing and reading the spilled bytes adds to a kernel's roofline; nothing where arithmetic takes longer."""
    moved = step.moved_bytes + 2 * step.spilled_bytes
    return max(0.0, moved / hardware.byte_per_s + hardware.launch_s - step_seconds(step, hardware))
