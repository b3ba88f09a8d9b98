"""The largest batch, or sequence, whose training step fits into a GPU that need not be there."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recompile.ahead import as_tensors, explained, gpu, gpu_options, with_loss
from recompile.decide import budget_bytes_for
from recompile.errors import BudgetError, OptionError
from recompile.footprint import Footprint
from recompile.hardware import Hardware
from recompile.report.explanation import Explanation
from recompile.trace import JointTrace, trace_step
from recompile.units import format_bytes, parse_bytes

LARGEST_SIZE = 2**24  # where the search gives up looking for a size that does not fit


@dataclass(frozen=True)
class Fit:
    """The largest size whose step fits, its plan, and the largest that fits when nothing is recomputed (0: none)."""

    size: int
    size_without_recomputation: int
    memory_bytes: int
    explanation: Explanation  # of the fastest plan of ``size`` that fits

    @property
    def footprint(self) -> Footprint:
        return self.explanation.footprint

    def to_json(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "size_without_recomputation": self.size_without_recomputation,
            "memory_bytes": self.memory_bytes,
            "explanation": self.explanation.to_json(),
        }

    def __str__(self) -> str:
        return (
            f"largest size within {format_bytes(self.memory_bytes)}: {self.size}; "
            f"without recomputation: {self.size_without_recomputation}\n{self.footprint}"
        )


def max_batch(
    model: torch.nn.Module,
    make_batch: Callable[[int], Any],
    *,
    hardware: str | Hardware,
    memory: int | str | None = None,
    planner: str | Callable = "mincut",
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    optimizer: str | float = "adamw",
) -> Fit:
    """The largest size whose training step fits into a GPU.

    ``make_batch(size)`` gives the model's arguments: a tensor, a tuple, or a dict of keyword arguments. The size may be
    the number of samples, the sequence length, or whatever else memory grows with. ``memory``: bytes or text such as
    ``"80GB"``, by default what the hardware has; ``Footprint.total_bytes`` is compared with it, parameters, optimizer
    state and allowances included. The other arguments are those of ``recompile.plan``. Every size that is tried is
    traced and planned. Raises BudgetError when size 1 does not fit, itemised.
    """
    target = gpu(hardware)
    memory_bytes = target.memory_bytes if memory is None else as_bytes(memory)
    steps = Steps(model, make_batch, target, planner, loss, autocast, optimizer)
    size = largest_within(lambda n: steps.needed_bytes(n, 0.0), memory_bytes)
    if size == 0:
        needed = steps.explanation(1, 0.0).footprint
        raise BudgetError(
            f"size 1 does not fit into {format_bytes(memory_bytes)}, whatever is recomputed:\n{needed}",
            needed.total_bytes,
        )
    unplanned = largest_within(lambda n: steps.needed_bytes(n, None, "save_all"), memory_bytes)
    spare = steps.explanation(size, 0.0).footprint.step_bytes_within(memory_bytes)
    return Fit(size, unplanned, memory_bytes, steps.explanation(size, spare))


class Steps:
    """The training steps of one model at several sizes, each traced and planned once."""

    def __init__(self, model, make_batch, hardware, planner, loss, autocast, optimizer):
        self.model, self.make_batch, self.hardware = model, make_batch, hardware
        self.planner, self.loss, self.autocast, self.optimizer = planner, loss, autocast, optimizer
        self.traces: dict[int, tuple[JointTrace, Any]] = {}

    def needed_bytes(self, size: int, memory_budget: float | None, planner: str | Callable | None = None) -> int:
        """All that training at this size takes, with what a budget in bytes keeps back for the prediction's error."""
        explanation = self.explanation(size, memory_budget, planner)
        return explanation.footprint.with_step(budget_bytes_for(explanation.peak_bytes)).total_bytes

    def explanation(
        self, size: int, memory_budget: float | int | None, planner: str | Callable | None = None
    ) -> Explanation:
        if size not in self.traces:
            args, kwargs = as_tensors(arguments_of(self.make_batch(size)))
            step = with_loss(self.model, self.loss)
            self.traces[size] = trace_step(step, args, kwargs, autocast=self.autocast), (args, kwargs)
        trace, batch = self.traces[size]
        options = gpu_options(self.hardware, memory_budget, planner or self.planner, None)
        return explained(trace, options, self.hardware, self.model, batch, self.optimizer, None)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments: a dict by keyword, a tuple by position, anything else as the only argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    is_sequence = isinstance(batch, tuple | list) and not isinstance(batch, torch.Size)
    return (tuple(batch), {}) if is_sequence else ((batch,), {})


def largest_within(needed_bytes: Callable[[int], int], limit: int) -> int:
    """The largest size from 1 to LARGEST_SIZE that needs at most ``limit`` bytes; 0 if there is none.

    ``needed_bytes`` must not fall as sizes grow. Each guess is where a parabola through the last three sizes meets the
    limit: memory grows with the batch, and with the square of the sequence at most. Every third guess doubles the size
    or halves the bracket, whatever the parabola says.
    """
    known = {1: needed_bytes(1)}
    if known[1] > limit:
        return 0
    fits, too_large = 1, LARGEST_SIZE + 1
    while too_large - fits > 1:
        size = next_size(known, fits, too_large, limit)
        known[size] = needed_bytes(size)
        fits, too_large = (size, too_large) if known[size] <= limit else (fits, size)
    return fits


def next_size(known: dict[int, int], fits: int, too_large: int, limit: int) -> int:
    """The next size to try, strictly between the largest that fits and the smallest that does not."""
    is_bracketed = too_large in known
    if len(known) < 3 or (len(known) > 3 and len(known) % 3 == 0):
        return (fits + too_large) // 2 if is_bracketed else min(2 * fits, too_large - 1)
    nearest = sorted(known, key=lambda size: abs(known[size] - limit))[:3]
    parabola = np.polynomial.Polynomial.fit(nearest, [known[size] for size in nearest], deg=2)
    between = range(fits + 1, min(too_large, 16 * fits + 1))
    place = bisect.bisect_right(between, limit + 0.5, key=parabola)
    return between[max(0, place - 1)]


def as_bytes(memory: int | str) -> int:
    """Bytes, or text such as "80GB". Raises OptionError."""
    try:
        value = parse_bytes(memory) if isinstance(memory, str) else int(memory)
    except (TypeError, ValueError) as error:
        raise OptionError(f"memory={memory!r}: {error}") from None
    if value <= 0:
        raise OptionError(f"memory={memory!r} must be more than nothing")
    return value
