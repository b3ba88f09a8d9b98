"""The torch.compile backend and the partitioner object that Inductor calls."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from recompile import records
from recompile.annotation import annotate, inputs_to_snapshot
from recompile.dynamic import SizedPlan, has_outgrown, plan_at_sizes
from recompile.hardware import Hardware
from recompile.hardware import resolve as resolve_hardware
from recompile.joint import JointGraph
from recompile.meter import Meter, add_advice, table, warning_text
from recompile.options import Options
from recompile.passes import snapshot_overwritten, split_joint
from recompile.progress import told_to
from recompile.report.explanation import Explanation
from recompile.report.planned import report_of
from recompile.rules import is_random
from recompile.sizes import Sizes, symbols_in
from recompile.torch_private import (
    Compilation,
    CustomPartitionerFn,
    compilation_at_hand,
    compile_with_inductor,
    fx_graph_cse,
    guard_at_most,
    num_cached_codes_loaded,
    recorded_cache_keys,
    region_budgets,
    size_symbols,
    upper_bounds,
)
from recompile.torch_private_emitted import Emitted
from recompile.units import format_bytes
from recompile.verification import NUM_TRIES, keeping_back, program_bytes, program_over, refusal

log = logging.getLogger("recompile")


def recompile(
    model: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Backend for ``torch.compile(model, backend="recompile", options={...})``.

    Training graphs are split under ``memory_budget`` and handed to Inductor; graphs that need no gradient go to plain
    Inductor. Options: see ``recompile.options``; all others are Inductor's. Raises OptionError (a ValueError) for an
    option it does not know, BudgetError when no plan fits.
    """
    parsed = Options.parse(options, mode)
    if not needs_gradient(model, example_inputs):
        return compile_with_inductor(model, list(example_inputs), dict(parsed.inductor), None)
    device = device_of(example_inputs)
    parsed = parsed.with_auto_resolved(device)
    compilation = compilation_at_hand()
    has_grown = has_outgrown(size_symbols(symbolic(example_inputs)), records.limits_of(compilation))
    hardware = resolve_hardware(parsed.hardware, device)
    attempt = functools.partial(compiled_once, model, list(example_inputs), compilation, hardware, device, has_grown)
    compiled, record = within_budget(attempt, parsed)
    records.attach(record)
    if parsed.verbose:
        for graph in record.graphs:
            peak, budget = format_bytes(graph.peak_bytes), graph.budget
            log.warning("recompile: predicted peak %s with memory_budget=%s", peak, budget)
        if len(records.own_records(compilation.wrapper)) <= 1:  # what follows a graph break runs in the same step
            return metered(compiled, compilation.wrapper, record, device)
    return compiled


def within_budget(attempt: Callable[[Options], tuple[Any, records.Record]], asked: Options) -> tuple[Any, Any]:
    """Compiled code whose program keeps a budget in bytes, and its record: planned again where one does not.

    Raises BudgetError when no plan fits, or the program of the smallest one does not.
    """
    options, predicted = asked, None
    for tries_left in reversed(range(NUM_TRIES)):
        compiled, record = attempt(options)
        over = program_over(record.graphs, options)
        if over is None:
            return compiled, record
        if over.peak_bytes == predicted:
            break  # the smallest plan already
        options, predicted = keeping_back(options, over, is_last=tries_left == 1), over.peak_bytes
    raise refusal(asked, over)


def compiled_once(
    model: fx.GraphModule, inputs: list[Any], compilation: Compilation, hardware: Hardware, device: torch.device,
    has_grown: bool, options: Options,
) -> tuple[Any, records.Record]:  # fmt: skip
    """One plan compiled, or found in a cache, and its record; with a budget in bytes the program's peak is in it."""
    partitioner, emitted = Partitioner(options, hardware, has_grown), Emitted()
    num_loaded = num_cached_codes_loaded()
    is_checked = isinstance(options.memory_budget, int)
    with records.recording() as graphs, recorded_cache_keys() as keys:
        patches = inductor_patches(options)
        compiled = compile_with_inductor(model, inputs, patches, partitioner, emitted if is_checked else None)
    was_cached = num_cached_codes_loaded() > num_loaded  # then the partitioner was not called
    if is_checked and len(graphs) == 1:
        peak_bytes = program_bytes(emitted.forward, emitted.backward, device)
        graphs = [replace(graphs[0], program_bytes=peak_bytes)]
    bounds = upper_bounds(symbolic(inputs))  # they tell apart what one key holds for several sizes
    if graphs and keys:
        records.store(keys[0], bounds, graphs)
    elif was_cached and keys:
        graphs = records.load(keys[0], bounds) or []
    ended_by = graph_break_of(model)
    shown = tuple(replace(graph, ended_by=ended_by) for graph in graphs)
    return compiled, records.Record(compilation, shown, missing=was_cached and not graphs)


def metered(compiled: Callable[..., Any], wrapper: Any, record: records.Record, device: torch.device) -> Callable:
    """Compiled code whose first steps are measured and logged beside what was predicted; see ``recompile.meter``."""

    def explanation() -> Explanation:
        found = records.own_records(wrapper) or [record]
        return Explanation(tuple(graph for part in found for graph in part.graphs))

    def log_steps(meter: Meter) -> None:
        for text in filter(None, (table(meter.steps), warning_text(meter.steps, explanation()))):
            log.warning("%s", text)

    meter = Meter(explanation, device, when_done=log_steps)

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        try:
            return meter.call(compiled, args, {})
        except BaseException as error:
            add_advice(error, meter)
            raise

    return call


def needs_gradient(model: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether this is a training graph: gradients are on, here or in a part of it, and some input wants one."""
    turned_on = any(node.target is torch._C._set_grad_enabled and node.args[0] for node in model.graph.nodes)
    wanted = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
    return wanted and (turned_on or torch.is_grad_enabled())


def symbolic(inputs: Sequence[Any]) -> list[torch.SymInt]:
    return [value for value in inputs if isinstance(value, torch.SymInt)]


def device_of(inputs: Sequence[Any]) -> torch.device:
    """The device that is planned for: an accelerator if any input is on one, else the CPU."""
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def graph_break_of(model: fx.GraphModule) -> str:
    """Where and why Dynamo ended this graph early; "" when it did not."""
    reason = getattr(model, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    where = f"{reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}" if reason.user_stack else "unknown place"
    return f"{where}: {str(reason.reason).splitlines()[0]}"


# What Inductor is told where memory is scarce: otherwise it keeps dead buffers for later ones.
WITH_A_BUDGET = {"allow_buffer_reuse": False}


def inductor_patches(options: Options) -> dict[str, Any]:
    """Inductor's options for a training graph: the user's, and with a budget those that save memory."""
    return (WITH_A_BUDGET if options.memory_budget is not None else {}) | dict(options.inductor)


class Partitioner(CustomPartitionerFn):
    """Splits joint graphs for one set of options and one hardware. Immutable; its identity is its fingerprint.

    ``has_grown``: sizes outgrew an earlier plan for the same code, so that this one leaves room.
    """

    def __init__(self, options: Options, hardware: Hardware | None = None, has_grown: bool = False):
        self.options = options
        self.hardware = hardware or resolve_hardware(options.hardware, torch.device("cpu"))
        self.has_grown = has_grown
        self._uuid = options.fingerprint(self.hardware) + ("-grown" if has_grown else "")

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None, **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:  # fmt: skip
        """The forward and backward modules of a joint graph. ``joint_inputs`` and the compiler's name are not used."""
        started = time.perf_counter()
        prepare(joint, num_fwd_outputs)
        placeholders = joint.graph.find_nodes(op="placeholder")
        static = [placeholders[i] for i in static_lifetime_input_indices or ()]
        options = self.options.with_region_budget(region_budgets(joint.graph))

        def annotate_at(sizes: Sizes) -> JointGraph:
            return annotate(joint, num_fwd_outputs, self.hardware, static, sizes, options.cost)

        with told_to(logged if self.options.verbose else None):
            decided = plan_at_sizes(annotate_at, symbols_in(joint.graph), self.hardware, options, self.has_grown)
        for symbol, limit in decided.limits:
            guard_at_most(symbol, limit)
        self._record(decided, options, time.perf_counter() - started)
        order = {node: position for position, node in enumerate(joint.graph.nodes)}
        saved = sorted({choice.node for choice in decided.plan.saved}, key=order.__getitem__)
        random_ops = [node for node in order if is_random(node)]
        return split_joint(joint, saved, num_fwd_outputs, static, random_ops)

    def _record(self, decided: SizedPlan, options: Options, seconds: float) -> None:
        sizes = decided.sizes.named(symbols_in(decided.joint.graph))
        limits = tuple((symbol.name, limit) for symbol, limit in decided.limits)
        plan, budget = decided.plan, decided.budget
        records.add(report_of(decided.joint, self.hardware, plan, budget, options, seconds, sizes, limits))

    def uuid(self) -> str:
        """Inductor's cache key for this partitioner: our sources, options, hardware and torch's version."""
        return self._uuid

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_fingerprint, (self._uuid,)

    def __deepcopy__(self, memo: Any) -> Partitioner:
        return self


def logged(message: str) -> None:
    log.warning("recompile: %s", message)


def _by_fingerprint(uuid: str) -> Partitioner:
    """Partitioners are pickled into cache keys only; there is nothing to bring back."""
    raise TypeError(f"the partitioner {uuid[:12]} was pickled as a cache key and cannot be unpickled")


def prepare(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Clean a joint graph before it is annotated, in place."""
    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)  # equal computations of forward and backward become one value to decide on
    snapshot_overwritten(joint.graph, inputs_to_snapshot(joint.graph, num_fwd_outputs))
    joint.recompile()
