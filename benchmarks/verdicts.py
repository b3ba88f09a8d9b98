"""What measured results say: pure functions of numbers, shared by the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from scipy.stats import spearmanr

MONOTONE_SLACK = 0.02  # a smaller budget may not raise the peak by more
BUDGET_SLACK = 0.01  # for the allocator
PREDICTION_SLACK = 0.02  # the most that a prediction may be off, and the most that it may be too low


def rises(peaks: Sequence[int], slack: float = MONOTONE_SLACK) -> list[int]:
    """Places at which a peak lies above the smallest before it; ``peaks`` from the largest budget to the smallest."""
    return [i for i in range(1, len(peaks)) if peaks[i] > min(peaks[:i]) * (1 + slack)]


def is_exceeded(peak_bytes: float, budget_bytes: float, slack: float = BUDGET_SLACK) -> bool:
    return peak_bytes > budget_bytes * (1 + slack)


def prediction_error(predicted: float, actual: float) -> float:
    """Relative; negative where the prediction was too low."""
    return predicted / actual - 1


def is_well_predicted(predicted: float, actual: float, slack: float = PREDICTION_SLACK) -> bool:
    return abs(prediction_error(predicted, actual)) <= slack


def is_no_worse(ours: tuple[float, float], theirs: tuple[float, float], slack: float = 0.0) -> bool:
    """Whether both costs, such as (peak bytes, seconds), are at most theirs."""
    return all(a <= b * (1 + slack) for a, b in zip(ours, theirs, strict=True))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's; None for fewer than three pairs, or where one side does not vary."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return float(spearmanr(first, second).statistic)


def yes(holds: bool | None) -> str:
    return "-" if holds is None else "yes" if holds else "**no**"
