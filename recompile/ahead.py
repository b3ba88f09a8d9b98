"""Planning ahead of time: what a training step will need on a GPU that need not be there. Nothing runs.

``plan`` answers for one budget, ``frontier`` for all of them; ``recompile.fit`` for the largest batch that fits.
``joint_graph`` gives the annotated graph that they decide about, to be saved or handed to a planner; both take such a
graph in the model's place.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from recompile import records
from recompile.annotation import annotate
from recompile.backend import Partitioner, inductor_patches, prepare
from recompile.chip import CHIPS, HOPPER, Chip, chip_for
from recompile.decide import decide
from recompile.errors import OptionError
from recompile.footprint import footprint
from recompile.hardware import Hardware
from recompile.hardware import resolve as resolve_hardware
from recompile.joint import Cost, JointGraph
from recompile.options import Options
from recompile.report.explanation import Explanation
from recompile.report.planned import report_of
from recompile.trace import JointTrace, trace_step
from recompile.tradeoff import Frontier, frontier_of

CPU = torch.device("cpu")


def plan(
    model: Callable[..., Any] | JointGraph,
    *args: Any,
    hardware: str | Hardware | None = None,
    memory_budget: float | int | str | None = None,
    planner: str | Callable = "mincut",
    cost: Cost | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    optimizer: str | float = "adamw",
    program: bool | None = None,
    inductor: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """What ``torch.compile(model, backend="recompile")`` would decide for ``model(*args, **kwargs)`` on a GPU.

    ``model``: a module in the mode that is meant (train or eval), or a function; its tensors and the arguments may be
    real, fake or on meta, only their shapes and dtypes count, nothing of their size is allocated; a ``torch.Size``
    among the arguments stands for int64 tokens of that shape. ``hardware``: a name (``"h100"``), a file or a Hardware.
    ``cost``: a cost model for library calls, see ``recompile.cost``. ``loss``: from the model's result to a scalar;
    without it all results are outputs, as compiled. ``autocast``: the dtype of ``torch.autocast("cuda", dtype)`` around
    the call. ``optimizer``: for the footprint, see ``recompile.footprint``. ``program``: whether to have Inductor emit
    its program for the GPU, by default where the triton package is installed. ``inductor``: options of Inductor's.

    In the model's place may stand a ``JointGraph``: then there are no arguments, ``hardware`` is what the graph is
    priced for unless given, and the Explanation has the plan alone.

    The Explanation has one graph, ``.footprint``, and ``.program`` (a ``recompile.gpu.Program``). Raises OptionError
    for a bad option, BudgetError when no plan fits, ValueError where nothing wants a gradient, and what Dynamo raises,
    with the place, where the model cannot be traced in one graph.
    """
    if isinstance(model, JointGraph):
        refuse_beside_graph(
            args, {**kwargs, "loss": loss, "autocast": autocast, "program": program, "inductor": inductor}
        )
        return plan_of_graph(priced_as_asked(model, hardware, cost), memory_budget, planner)
    target, args, kwargs = gpu(hardware), as_tensors(args), as_tensors(kwargs)
    options = gpu_options(target, memory_budget, planner, inductor, cost)
    chip = chip_of(target, program)
    trace = trace_step(with_loss(model, loss), args, kwargs, dict(options.inductor), autocast)
    return explained(trace, options, target, model, (args, kwargs), optimizer, chip)


def explained(
    trace: JointTrace, options: Options, hardware: Hardware, model: Any, batch: Any, optimizer: str | float,
    chip: Chip | None,
) -> Explanation:  # fmt: skip
    """Plan a traced step, itemise its memory, and with a chip emit the program."""
    with records.recording() as reports:
        forward, backward = trace.split(Partitioner(options, hardware))
    explanation = Explanation((reports[-1],), () if chip is not None else (program_missing(hardware),))
    if chip is not None:
        from recompile.gpu import program_for

        emitted = program_for(forward, backward, trace, hardware, chip, inductor_patches(options))
        explanation = replace(explanation, program=emitted)
    if isinstance(model, torch.nn.Module):
        capability = CHIPS[hardware.name].capability if hardware.name in CHIPS else HOPPER
        needed = footprint(model, batch, explanation.peak_bytes, optimizer, capability=capability)
        explanation = replace(explanation, footprint=needed)
    return explanation


def plan_of_graph(joint: JointGraph, memory_budget: float | int | str | None, planner: str | Callable) -> Explanation:
    """Plan an annotated graph, as the backend's partitioner does, on the hardware that it is priced for."""
    options = gpu_options(joint.hardware, memory_budget, planner, None)
    started = time.perf_counter()
    decided, budget = decide(joint, joint.hardware, options)
    seconds = time.perf_counter() - started
    return Explanation((report_of(joint, joint.hardware, decided, budget, options, seconds),))


def frontier(
    model: Callable[..., Any] | JointGraph,
    *args: Any,
    hardware: str | Hardware | None = None,
    cost: Cost | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    inductor: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Frontier:
    """The whole trade-off between peak and time of ``model(*args, **kwargs)`` on a GPU; arguments as for ``plan``."""
    settings = {"hardware": hardware, "cost": cost, "loss": loss, "autocast": autocast, "inductor": inductor}
    if isinstance(model, JointGraph):
        refuse_beside_graph(args, {**kwargs, "loss": loss, "autocast": autocast, "inductor": inductor})
        joint = priced_as_asked(model, hardware, cost)
    else:
        joint = joint_graph(model, *args, **settings, **kwargs)
    return frontier_of(joint, joint.hardware)


def joint_graph(
    model: Callable[..., Any],
    *args: Any,
    hardware: str | Hardware | None = None,
    cost: Cost | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    inductor: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> JointGraph:
    """The annotated graph of one training step, forward and backward, of ``model(*args, **kwargs)`` on a GPU.

    What ``plan`` decides about: give it to a planner, or ``save`` it and compare planners where the model is not.
    Arguments and errors as for ``plan``; sizes are taken as constants.
    """
    target, args, kwargs = gpu(hardware), as_tensors(args), as_tensors(kwargs)
    options = gpu_options(target, None, "mincut", inductor, cost)
    trace = trace_step(with_loss(model, loss), args, kwargs, dict(options.inductor), autocast)
    return annotated(trace, target, cost)


def annotated(trace: JointTrace, hardware: Hardware, cost: Cost | None = None) -> JointGraph:
    """The facts about a traced step, as the backend's partitioner sees them."""
    module = trace.copied()
    prepare(module, trace.num_fwd_outputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    static = [placeholders[i] for i in trace.static_inputs]
    return annotate(module, trace.num_fwd_outputs, hardware, static, cost=cost)


def refuse_beside_graph(args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """A graph has been traced: what says how to trace one has no meaning beside it."""
    names = [f"argument {number}" for number, _ in enumerate(args, start=1)]
    names += [name for name, value in given.items() if value is not None]
    if names:
        raise OptionError(f"{', '.join(names)}: a JointGraph was traced already; give these to recompile.joint_graph()")


def priced_as_asked(joint: JointGraph, hardware: str | Hardware | None, cost: Cost | None) -> JointGraph:
    """A graph with the seconds that are asked for; its own where none are."""
    if hardware is None and cost is None and joint.hardware is not None:
        return joint
    if hardware is None and joint.hardware is None:
        raise OptionError("hardware=None: this graph does not say what it is priced for; give a name such as 'h100'")
    try:
        return joint.priced_for(hardware if hardware is not None else joint.hardware, cost)
    except ValueError as error:
        raise OptionError(str(error)) from None


# Options


def gpu(hardware: str | Hardware) -> Hardware:
    """The hardware that is planned for; refused if it is none, or the CPU."""
    try:
        value = resolve_hardware(hardware, CPU) if hardware is not None else None
    except ValueError as error:
        raise OptionError(str(error)) from None
    if value is None or value.name == "cpu":
        raise OptionError(
            f"hardware={hardware!r}: planning ahead is for GPUs; give a name such as 'h100', a JSON file or a "
            f"Hardware. For this machine's CPU compile the model and ask recompile.explain()"
        )
    return value


def gpu_options(
    hardware: Hardware, memory_budget: float | int | str | None, planner: str | Callable, inductor: Mapping | None,
    cost: Cost | None = None,
) -> Options:  # fmt: skip
    """Checked options of the backend; "auto" is the whole of a GPU that nothing else uses."""
    if memory_budget == "auto":
        raise OptionError("memory_budget='auto' asks a device what is free: give bytes, or ask recompile.max_batch()")
    given = {"memory_budget": memory_budget, "planner": planner, "hardware": hardware, "cost": cost}
    return Options.parse({**given, **(inductor or {})})


def with_loss(model: Callable[..., Any], loss: Callable[[Any], torch.Tensor] | None) -> Callable[..., Any]:
    """The model, or the model and the loss of its result as one module."""
    return model if loss is None else _WithLoss(model, loss)


class _WithLoss(torch.nn.Module):
    def __init__(self, model: Callable[..., Any], loss: Callable[[Any], torch.Tensor]):
        super().__init__()
        self.model, self.loss = model, loss
        self.train(getattr(model, "training", True))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss(self.model(*args, **kwargs))


def program_missing(hardware: Hardware) -> str:
    """Why an explanation has a prediction and no program."""
    if hardware.name not in CHIPS:
        return f"no program of Inductor's: code can be generated for {', '.join(CHIPS)}, not for {hardware.name}"
    if not triton_is_installed():
        return "no program of Inductor's: it needs the triton package, pip install 'recompile[gpu-dry-run]'"
    return "no program of Inductor's was asked for"


def as_tensors(value: Any) -> Any:
    """Token ids on meta in place of every torch.Size among arguments."""
    if isinstance(value, torch.Size):
        return torch.empty(value, dtype=torch.int64, device="meta")
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(as_tensors(item) for item in value)
    return {key: as_tensors(item) for key, item in value.items()} if type(value) is dict else value


def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def chip_of(hardware: Hardware, program: bool | None) -> Chip | None:
    """What Inductor generates code for; None where nobody asked and it cannot be, ValueError where it was asked for."""
    if program is False or (program is None and (hardware.name not in CHIPS or not triton_is_installed())):
        return None
    if not triton_is_installed():
        raise OptionError("program=True needs the triton package: pip install 'recompile[gpu-dry-run]'")
    return chip_for(hardware.name)
