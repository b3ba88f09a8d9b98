"""Budgets in bytes for graphs whose sizes vary: at which sizes such a graph is planned, and up to which its plan holds.

A plan is made at the largest sizes known: what the user declared with ``mark_dynamic(max=)``, else what the first trace
met. It serves larger ones as long as its predicted peak stays within the budget, which is found by predicting it again
at sizes that grow together; beyond that a guard makes Dynamo compile anew. Peaks are taken to grow with sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from recompile.decide import decide
from recompile.errors import BudgetError
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.options import Options
from recompile.sizes import AT_HINTS, Sizes
from recompile.timeline import Timeline
from recompile.torch_private import SizeSymbol

# Once a size has outgrown a plan, more growth is likely, and Dynamo compiles a function 8 times at most: plan for sizes
# this many times larger than the one at hand, if that fits.
HEADROOM = (2.0, 1.25, 1.0)
MAX_GROWTH = 1024.0  # how far a plan's reach is followed
NUM_BISECTIONS = 4  # the reach is found to a sixteenth


@dataclass(frozen=True)
class SizedPlan:
    """A plan, what it was made for, and up to which sizes it keeps a budget in bytes; no limits where it is none."""

    joint: JointGraph
    plan: Plan
    budget: Budget
    sizes: Sizes
    limits: tuple[tuple[SizeSymbol, int], ...]


def plan_at_sizes(
    annotate_at: Callable[[Sizes], JointGraph],
    symbols: Sequence[SizeSymbol],
    hardware: Hardware,
    options: Options,
    has_grown: bool,
) -> SizedPlan:
    """Decide at the largest sizes known. ``has_grown``: a plan made earlier for this code was too small.

    Raises BudgetError, with the sizes, when no plan fits at them.
    """
    backed = [symbol for symbol in symbols if symbol.hint is not None]
    if not isinstance(options.memory_budget, int) or not backed:
        joint = annotate_at(AT_HINTS)
        return SizedPlan(joint, *decide(joint, hardware, options), AT_HINTS, ())
    for factor in HEADROOM if has_grown else (1.0,):
        sizes = largest_sizes(backed, factor)
        joint = annotate_at(sizes)
        try:
            plan, budget = decide(joint, hardware, options)
        except BudgetError as error:
            refused = error
            continue
        return SizedPlan(joint, plan, budget, sizes, limits_of(annotate_at, plan, budget, backed, hardware, factor))
    raise BudgetError(f"{refused} This is for the sizes {', '.join(sizes.named(backed))}.", refused.floor_bytes)


def largest_sizes(symbols: Iterable[SizeSymbol], factor: float = 1.0) -> Sizes:
    """The largest size known for each symbol; those without a declared maximum times a factor."""
    return Sizes({symbol.symbol: grown(symbol, factor) for symbol in symbols})


def grown(symbol: SizeSymbol, factor: float) -> int:
    """The declared maximum, or the hint times a factor, as far as the checks in the user's code let it grow."""
    if symbol.declared_max is not None:
        return symbol.declared_max
    larger = math.floor(symbol.hint * factor)
    return larger if symbol.upper_bound is None else max(symbol.hint, min(larger, symbol.upper_bound))


def limits_of(
    annotate_at: Callable[[Sizes], JointGraph],
    plan: Plan,
    budget: Budget,
    symbols: Sequence[SizeSymbol],
    hardware: Hardware,
    factor: float,
) -> tuple[tuple[SizeSymbol, int], ...]:
    """How large each symbol may get before the plan's predicted peak leaves the budget; all may get there at once.

    ``factor``: the growth that the plan was made for.
    """
    saved = [choice.node for choice in plan.saved if choice.node.op != "placeholder"]

    def fits(factor: float) -> bool:
        timeline = Timeline(annotate_at(largest_sizes(symbols, factor)), hardware)
        kept = frozenset(timeline.flow.index[node] for node in saved)
        return timeline.simulate(kept).peak_bytes <= budget.peak_bytes

    can_grow = [symbol for symbol in symbols if symbol.declared_max is None]
    reach = largest_factor(fits, factor) if can_grow else 1.0
    return tuple((symbol, grown(symbol, reach)) for symbol in symbols)


def largest_factor(fits: Callable[[float], bool], low: float) -> float:
    """The largest growth that fits, from ``low``, which does, to MAX_GROWTH: doubled while it fits, then bisected."""
    while fits(2 * low):
        low *= 2
        if low >= MAX_GROWTH:
            return low
    high = 2 * low
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def has_outgrown(sizes: Iterable[SizeSymbol], earlier: Iterable[tuple[str, int]]) -> bool:
    """Whether a size at hand is larger than any plan made earlier allows. ``earlier``: names and limits."""
    largest: dict[str, int] = {}
    for name, limit in earlier:
        largest[name] = max(limit, largest.get(name, 0))
    return any(size.hint is not None and size.hint > largest.get(size.name, size.hint) for size in sizes)
