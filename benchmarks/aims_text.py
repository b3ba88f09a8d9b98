"""The summary of ``make aims`` from its records: tables, and what holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.verdicts import is_no_worse, is_well_predicted, prediction_error, rank_correlation, yes

GIB = 2**30
ROUNDING = 0.002  # aims are given in two or three digits
CORRELATION_AIM = 0.95


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    parts = ["# Aims\n\nMade by `make aims`. GiB include parameters; `first` is the program of the plan for just the "
             "GiB asked, before it was planned again for what that missed. Each row's plan is the fastest found in the "
             "peak and the time that the row is in: those in roofline are planned as if nothing spilled, and `true` is "
             "what they take with spills. `prototype matched` asks for the prototype's GiB. All other plans are for "
             "code GiB and true time."]  # fmt: skip
    parts.append("## The table of aims\n\n" + table(ROW_NAMES, [aim_row(r) for m in records for r in m["rows"]]))
    duels = [(m["model"], duel) for m in records for duel in m["duels"]]
    parts.append("## Beside Inductor's own budgets\n\n" + table(DUEL_NAMES, [duel_row(*pair) for pair in duels]))
    parts.append("## Predictions\n\n" + table(PREDICTION_NAMES, [prediction_row(m) for m in records]))
    return "\n\n".join(parts) + "\n"


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3f}" if num_bytes < GIB else f"{num_bytes / GIB:.2f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def pair(gibibytes: float, milliseconds: float | None) -> str:
    return f"{gibibytes:g}/{milliseconds:g}" if milliseconds is not None else f"{gibibytes:g}"


# The aims

ROW_NAMES = (
    "model", "in", "asked GiB", "simulated GiB / ms", "first GiB", "code GiB", "est GiB", "roofline ms", "true ms",
    "aim", "aim reached", "prototype", "for its GiB: GiB / ms", "prototype matched", "tries",
)  # fmt: skip


def is_reached(row: dict[str, Any], gibibytes: float, milliseconds: float | None) -> bool:
    """Whether a row's program is within GiB and ms, in the peak and the time that its aim is stated in."""
    peak_bytes, seconds = stated(row, row["aim"])
    is_soon = milliseconds is None or seconds * 1e3 <= milliseconds * (1 + ROUNDING)
    return peak_bytes / GIB <= gibibytes * (1 + ROUNDING) and is_soon


def stated(plan: dict[str, Any], aim: dict[str, Any], of: str = "") -> tuple[float, float]:
    """Bytes and seconds of a plan's program in the peak and the time of an aim; "simulated_": as predicted."""
    return plan[f"{of}{aim['peak']}_bytes"], plan[f"{of}{aim['time']}_seconds"]


def is_matched(row: dict[str, Any]) -> bool:
    """Whether the plan for the aim or that for the prototype's GiB is within what the prototype reached."""
    return any(is_reached(row | plan, *row["aim"]["prototype"]) for plan in (row, row.get("for_prototype", {})))


def aim_row(row: dict[str, Any]) -> list[str]:
    aim = row["aim"]
    return [
        aim["model"], f"{aim['peak']} / {aim['time']}", "floor" if aim["ms"] is None else f"{aim['gib']:g}",
        shown_as_pair(*stated(row, aim, "simulated_")),
        gib(row["first_bytes"]) if "first_bytes" in row else "-", gib(row["code_bytes"]), gib(row["est_bytes"]),
        ms(row["roofline_seconds"]), ms(row["true_seconds"]), pair(aim["gib"], aim["ms"]),
        yes(is_reached(row, aim["gib"], aim["ms"])), pair(*aim["prototype"]),
        shown_as_pair(*stated(row["for_prototype"], aim)) if "for_prototype" in row else "-",
        yes(is_matched(row)), str(row.get("tries", 1)),
    ]  # fmt: skip


def shown_as_pair(num_bytes: float, seconds: float) -> str:
    return f"{gib(num_bytes)} / {ms(seconds)}"


# Beside Inductor

DUEL_NAMES = (
    "model", "Inductor's budget", "its code GiB", "its roofline / true ms", "ours at its peak: GiB",
    "roofline / true ms", "no slower", "ours at its time: GiB", "roofline / true ms", "lower", "both",
)  # fmt: skip


def duel_row(model: str, duel: dict[str, Any]) -> list[str]:
    theirs, same_peak, same_time = duel["inductor"], duel["same_peak"], duel["same_time"]
    found = verdicts_of(duel)
    return [
        model, f"{theirs['ratio']:g}", gib(theirs["code_bytes"]), times(theirs),
        gib(same_peak["code_bytes"]), times(same_peak), yes(found["no_slower"]),
        gib(same_time["code_bytes"]) if same_time else "-", times(same_time) if same_time else "-",
        yes(found["lower"]), yes(found["both"]),
    ]  # fmt: skip


def times(program: dict[str, Any]) -> str:
    return f"{ms(program['roofline_seconds'])} / {ms(program['true_seconds'])}"


def cost(program: dict[str, Any]) -> tuple[float, float]:
    return program["code_bytes"], program["true_seconds"]


def verdicts_of(duel: dict[str, Any]) -> dict[str, bool]:
    """``no_slower``: ours within its peak takes no longer. ``lower``: ours within its time has a lower peak."""
    theirs = cost(duel["inductor"])
    ours = [cost(plan) for plan in (duel["same_peak"], duel["same_time"]) if plan]
    no_slower = any(is_no_worse(plan, theirs) for plan in ours)
    lower = any(is_no_worse(plan, theirs) and plan[0] < theirs[0] for plan in ours)
    return {"no_slower": no_slower, "lower": lower, "both": no_slower and lower}


# Predictions

PREDICTION_NAMES = (
    "model", "plans", "rank correlation with true ms", ">= 0.95", "with roofline ms", "code GiB within 2 %",
    "most too low", "most too high", "est GiB within 2 %", "seconds: most too low", "most too high",
    "slowest planning s",
)  # fmt: skip


def distinct_plans(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every program of ours with its prediction, once."""
    ours = [*record["rows"], *record["shares"]]
    ours += [row["for_prototype"] for row in record["rows"] if "for_prototype" in row]
    ours += [duel[which] for duel in record["duels"] for which in ("same_peak", "same_time") if duel[which]]
    return list({plan["key"]: plan for plan in ours}.values())


def prediction_row(record: dict[str, Any]) -> list[str]:
    plans = distinct_plans(record)
    fixed = record.get("fixed_bytes", 0)
    peaks, estimates = (
        [(plan[f"simulated_{peak}_bytes"] - fixed, plan[f"{peak}_bytes"] - fixed) for plan in plans]
        for peak in ("code", "est")
    )
    if not plans:
        return [record["model"], "0", *["-"] * (len(PREDICTION_NAMES) - 2)]
    peak_errors = [prediction_error(*peak) for peak in peaks]
    time_errors = [prediction_error(plan["simulated_true_seconds"], plan["true_seconds"]) for plan in plans]
    predicted = [plan["simulated_true_seconds"] for plan in plans]
    true, plain = (
        rank_correlation(predicted, [plan[f"{kind}_seconds"] for plan in plans]) for kind in ("true", "roofline")
    )
    return [
        record["model"], str(len(plans)), shown(true), yes(None if true is None else true >= CORRELATION_AIM),
        shown(plain), f"{sum(is_well_predicted(*peak) for peak in peaks)} of {len(peaks)}",
        f"{min(peak_errors):+.1%}", f"{max(peak_errors):+.1%}",
        f"{sum(is_well_predicted(*estimate) for estimate in estimates)} of {len(estimates)}",
        f"{min(time_errors):+.1%}", f"{max(time_errors):+.1%}",
        f"{max(plan['planning_seconds'] for plan in plans):.1f}",
    ]  # fmt: skip


def shown(correlation: float | None) -> str:
    return "-" if correlation is None else f"{correlation:.3f}"
