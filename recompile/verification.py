"""Whether the program that Inductor made of a plan keeps the budget in bytes, and what to plan next where it does not.

A plan is chosen by a prediction of Inductor's fusion and lifetimes. The program that comes of it can be replayed
(``recompile.replay``), which is exact but for what library calls allocate within themselves. Where it needs more than
the budget, what the prediction missed is kept back and the graph is planned again; when no plan fits what is left, the
smallest one has the last word.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from recompile.decide import predicted_bytes_within
from recompile.errors import BudgetError
from recompile.options import Options
from recompile.replay import CPU, CUDA, ReplayError
from recompile.report.explanation import GraphReport
from recompile.step_memory import Half, replay_step
from recompile.units import format_bytes

NUM_TRIES = 4  # programs made for one budget at most, the last of the smallest plan
EXTRA = 1.1  # of what was missed is kept back: another plan may miss a little more

TOLERANCE = 0.0005  # of the budget: a few scalars, far below what an allocator's blocks are rounded to

log = logging.getLogger("recompile")


def program_bytes(forward: Half | None, backward: Half | None, device: torch.device) -> int | None:
    """The peak of the emitted programs; None where one is missing or has something that the replay has no rule for."""
    if forward is None or backward is None or device.type not in ("cpu", "cuda"):
        return None
    try:
        return replay_step(forward, backward, CPU if device.type == "cpu" else CUDA).peak_bytes
    except (ReplayError, ValueError) as error:
        log.info("the peak of Inductor's program could not be checked: %s", error)
        return None


def program_over(graphs: Sequence[GraphReport], options: Options) -> GraphReport | None:
    """The graph whose program needs more than a budget in bytes; None where all keep it, or nothing is known."""
    if not isinstance(options.memory_budget, int):
        return None
    accepted_bytes = options.memory_budget * (1 + TOLERANCE)
    over = [graph for graph in graphs if graph.program_bytes and graph.program_bytes > accepted_bytes]
    return over[0] if over else None


def keeping_back(options: Options, over: GraphReport, is_last: bool) -> Options:
    """Options for another plan after a program that needs more than the budget; the last one is the smallest plan."""
    if is_last:
        return replace(options, kept_back=options.memory_budget)
    error_bytes = int(EXTRA * (over.program_bytes - over.peak_bytes))
    beyond_margin = error_bytes - (options.memory_budget - predicted_bytes_within(options.memory_budget))
    return replace(
        options, kept_back=max(beyond_margin, options.kept_back + over.program_bytes - options.memory_budget)
    )


def refusal(options: Options, over: GraphReport) -> BudgetError:
    """When the program of the smallest plan needs more than the budget."""
    return BudgetError(
        f"no plan of {options.planner_name()!r} keeps the step's peak within memory_budget="
        f"{format_bytes(options.memory_budget)}: the program that Inductor makes of the smallest one needs "
        f"{format_bytes(over.program_bytes)} ({over.program_bytes} bytes) over what is allocated when forward starts. "
        f"Raise memory_budget to at least that, or lower the batch size or sequence length.",
        over.program_bytes,
    )
