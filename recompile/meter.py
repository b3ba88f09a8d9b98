"""Measures the first training steps of a callable, beside what was predicted for them, and says what to set.

A step begins when the callable is called and ends with the backward of what it returned: hooks on the result find that
out, so nothing in the loop needs to say so. It is measured as ``recompile.measure`` does, from the allocator's events
on the CPU and from CUDA's statistics on a GPU, and so counts all that is allocated meanwhile, in the compiled function
or not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from recompile.decide import PREDICTION_MARGIN
from recompile.measurement import Recording, start_recording
from recompile.options import free_bytes
from recompile.report.explanation import Explanation
from recompile.units import format_bytes

NUM_WARMUP_CALLS = 1  # the first one holds what the compiler allocates
NUM_STEPS = 2
# Of what is free when a step begins, the share that it is advised to plan for: the allocator's blocks leave gaps, and
# other libraries allocate too. An assumption; recompile.footprint allows 3 % for the gaps alone.
USABLE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class StepPeak:
    """One measured step: bytes over what was allocated when its forward started, and its wall time in seconds."""

    number: int  # of the call, from 1 on
    predicted_bytes: int
    measured_bytes: int
    seconds: float

    @property
    def excess(self) -> float:
        """How far the measured peak is over the predicted one, as a share of the predicted one."""
        return self.measured_bytes / self.predicted_bytes - 1 if self.predicted_bytes else 0.0


class Meter:
    """The state of watching one callable. ``is_done`` once enough steps were measured: from then on calls pass through.

    ``explanation`` gives what was planned for the callable so far. ``when_done`` is called once, with this meter.
    """

    def __init__(
        self, explanation: Callable[[], Explanation], device: torch.device, num_steps: int = NUM_STEPS,
        when_done: Callable[[Meter], None] = lambda meter: None,
    ):  # fmt: skip
        self.explanation = explanation
        self.device = device
        self.num_steps = num_steps
        self.when_done = when_done
        self.steps: list[StepPeak] = []
        self.free_bytes: int | None = None  # on the device when the last step that was looked at began
        self.num_calls = 0
        self.is_done = num_steps == 0
        self._recording: Recording | None = None
        self._has_ended = False
        self._num_graphs = self._step_number = 0

    def call(self, function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function, and measure the step that begins with it if it is one of the first."""
        self.num_calls += 1
        self.settle()
        if self.is_done:
            return function(*args, **kwargs)
        self.free_bytes = free_bytes(self.device)
        if self.num_calls <= NUM_WARMUP_CALLS or not self._start():
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            self.settle()
            raise
        wanted = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not wanted:
            self.settle()  # evaluation
        recording = self._recording
        for tensor in wanted:
            tensor.register_hook(lambda gradient: self._expect_end(recording))
        return result

    def settle(self) -> None:
        """Take in the last step if its backward has ended, else drop it. On the CPU the recording goes on till then."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if not self._has_ended:
            recording.cancel()
            return
        measured, explanation = recording.stop(), self.explanation()
        if len(explanation.graphs) != self._num_graphs or not explanation.graphs:
            return  # something was compiled meanwhile
        self.steps.append(StepPeak(self._step_number, explanation.peak_bytes, measured.peak_bytes, measured.seconds))
        if len(self.steps) == self.num_steps:
            self.is_done = True
            self.when_done(self)

    def _start(self) -> bool:
        self._num_graphs, self._step_number, self._has_ended = len(self.explanation().graphs), self.num_calls, False
        try:
            self._recording = start_recording(self.device)
        except RuntimeError as error:
            warnings.warn(f"recompile: steps cannot be measured: {error}", RuntimeWarning, stacklevel=4)
            self.is_done = True
            return False
        return True

    def _expect_end(self, recording: Recording | None) -> None:
        """Backward has begun; autograd calls back when it has ended."""
        if recording is not None and recording is self._recording:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(recording))

    def _end(self, recording: Recording) -> None:
        if recording is self._recording and not self._has_ended:
            recording.mark_end()
            self._has_ended = True


# What to say


def table(steps: Iterable[StepPeak]) -> str:
    """Predicted beside measured peaks, a line a step."""
    lines = ["recompile: peak over what is allocated when forward starts", "step    predicted     measured  difference"]
    lines += [
        f"{step.number:4}  {format_bytes(step.predicted_bytes):>11}  {format_bytes(step.measured_bytes):>11}"
        f"  {step.excess:>+10.1%}"
        for step in steps
    ]
    return "\n".join(lines)


def budget_text(num_bytes: int) -> str:
    """Bytes as an option value, rounded down to a hundredth of a unit: ``"11.40GiB"``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f'"{math.floor(100 * num_bytes / size) / 100:.2f}{unit}"'
    return str(num_bytes)


def warning_text(steps: Iterable[StepPeak], explanation: Explanation) -> str:
    """The next budget to try, where a step needed more than its budget, or its prediction, and its margin; else ""."""
    worst = max(steps, key=lambda step: step.measured_bytes, default=None)
    budgets = [graph.budget_bytes for graph in explanation.counted if graph.budget.isdigit()]
    if worst is None or not worst.predicted_bytes:
        return ""
    asked = max(budgets, default=None)
    allowed = asked if asked is not None else math.floor(worst.predicted_bytes * (1 + PREDICTION_MARGIN))
    if worst.measured_bytes <= allowed:
        return ""
    within = asked if asked is not None else worst.predicted_bytes
    following = within * worst.predicted_bytes // worst.measured_bytes
    floor_bytes = explanation.floor_bound_bytes or 0
    advice = (
        f"to stay within {format_bytes(within)}, try memory_budget={budget_text(following)}"
        if following > floor_bytes
        else f"no plan needs less than {format_bytes(floor_bytes)}: lower the batch size or the sequence length"
    )
    promised = f"memory_budget={format_bytes(asked)}" if asked is not None else "the prediction"
    return (
        f"recompile: the step needed {format_bytes(worst.measured_bytes)}, more than {promised}"
        f" ({format_bytes(worst.predicted_bytes)} predicted). What is not compiled counts too. {advice[0].upper()}"
        f"{advice[1:]}."
    )


def out_of_memory_text(explanation: Explanation, available_bytes: int | None) -> str:
    """What to set after running out of memory. ``available_bytes``: what was free when the step began, if known."""
    if not explanation.graphs:
        return (
            "recompile: out of memory before anything was planned. Plan ahead, without running: recompile.plan() and "
            "recompile.max_batch() say what a step needs and which batch fits."
        )
    floor_bytes, peak_bytes = explanation.floor_bound_bytes or 0, explanation.peak_bytes
    usable = math.floor(USABLE_SHARE * available_bytes) if available_bytes is not None else None
    known = f", {format_bytes(available_bytes)} were free when it began" if available_bytes is not None else ""
    text = (
        f"recompile: out of memory in a step that was predicted to add {format_bytes(peak_bytes)}{known}; no plan adds "
        f"less than {format_bytes(floor_bytes)}. "
    )
    if usable is not None and usable <= floor_bytes:
        return f"{text}Lower the batch size or the sequence length: recompile.max_batch() finds what fits."
    following = (floor_bytes + peak_bytes) // 2 if usable is None or usable >= peak_bytes else usable
    return (
        f'{text}Try memory_budget={budget_text(following)}, or "auto" for what is free when the model is compiled; '
        f"recompile.max_batch() finds the largest batch that fits."
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU."""
    is_on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or is_on_cpu


def add_advice(error: BaseException, meter: Meter) -> None:
    """Note on an error what to set, once, if it is about memory."""
    if is_out_of_memory(error) and not any("recompile: out of memory" in n for n in getattr(error, "__notes__", ())):
        error.add_note(out_of_memory_text(meter.explanation(), meter.free_bytes))
