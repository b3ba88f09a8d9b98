"""The summary of ``make bench`` from its records: verdicts, one table, and a picture a model."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.aims_text import ms, table
from benchmarks.peaks_text import gflop, mib
from benchmarks.verdicts import BUDGET_SLACK
from recompile.report.plot import new_figure

Row = dict[str, Any]
Point = tuple[float, float]  # bytes, seconds
TIME_SLACK = 0.02  # of a measured time: noise of a median of pairs
PROGRAM_SLACK = 0.001  # of a program's figures: rounding
CPU, GPU = "CPU", "GPU"
INCHES = (11.0, 4.5)
MIB = 2**20
NAMES = (
    "model", "configuration", "peak MiB", "step ms", "time / peer's", "recomputed GFLOP", "compile s", "planning s",
    "GPU: peak MiB", "GPU: roofline ms", "on or below, CPU", "on or below, GPU",
)  # fmt: skip
MODEL_NAMES = (
    "model", "on or below, CPU", "time / peers', CPU: median", "least", "most",
    "on or below, GPU", "time / peers', GPU: median", "least", "most",
)  # fmt: skip


def summary(records: Sequence[dict[str, Any]], command: str) -> str:
    """Markdown."""
    made = {key: values_text(record["made_with"][key] for record in records) for key in records[0]["made_with"]}
    parts = [
        f"# Ours and peers\n\nMade by `{command}` on {made['machine']}, one thread, torch {made['torch']}, Python "
        f"{made['python']}, {made['date']}. Peaks are over what is allocated when forward starts.",
        "\n".join(verdict_line(records, where) for where in (CPU, GPU)),
        table(MODEL_NAMES, [model_line(record) for record in records]),
        table(NAMES, [line for record in records for row in record["rows"] for line in lines_of(record, row)]),
        "\n".join(f"![{record['model']}](plots/{record['model']}.png)" for record in records),
    ]
    return "\n\n".join(parts) + "\n"


def values_text(values: Iterable[str]) -> str:
    """Each of some values once; models may have been run on several machines and days."""
    return " or ".join(sorted(set(values)))


# Verdicts


def points(row: Row, where: str) -> tuple[Point | None, Point | None]:
    """The peer's (peak bytes, seconds) and ours at its peak; None for what there is not."""
    if where == GPU:
        both = (row["graph"].get(name) for name in ("gpu", "our_gpu"))
        names = "code_bytes", "roofline_seconds"
    else:
        both = (row["peer"], row["ours"])
        names = "measured_bytes", "measured_seconds"
    theirs, ours = ((run[names[0]], run[names[1]]) if run and names[0] in run else None for run in both)
    return theirs, ours


def lost(row: Row, where: str) -> list[str] | None:
    """In what the peer wins: "peak", "time", "no plan"; nothing where ours is on or below its point.

    None where ours was not asked, or the peer failed. Of measured times the median ratio of the pairs counts.
    """
    theirs, ours = points(row, where)
    if theirs is None:
        return None
    if ours is None:
        was_asked = row["ours"] is not None if where == CPU else "our_gpu" in row["graph"]
        return ["no plan"] if was_asked else None
    ratio = time_ratio(row, where)
    slacks = (BUDGET_SLACK, TIME_SLACK) if where == CPU else (PROGRAM_SLACK, PROGRAM_SLACK)
    costs = (("peak", ours[0] / theirs[0]), ("time", ratio))
    return [name for (name, cost), slack in zip(costs, slacks, strict=True) if cost > 1 + slack]


def time_ratio(row: Row, where: str) -> float | None:
    """Ours over the peer's; of measured times the median of the pairs. None where there are not both."""
    theirs, ours = points(row, where)
    if theirs is None or ours is None:
        return None
    return statistics.median(row["ratios"]) if where == CPU else ours[1] / theirs[1]


def model_line(record: dict[str, Any]) -> list[str]:
    """A model's line of the first table: of how many peers ours is on or below, and our time over theirs."""
    cells = [record["model"]]
    for where in (CPU, GPU):
        told = [names for names in (lost(row, where) for row in record["rows"]) if names is not None]
        ratios = [ratio for ratio in (time_ratio(row, where) for row in record["rows"]) if ratio is not None]
        figures = (statistics.median(ratios), min(ratios), max(ratios)) if ratios else ()
        cells += [f"{told.count([])} of {len(told)}", *(f"{figure:.2f}" for figure in figures)]
        cells += ["-"] * (0 if ratios else 3)
    return cells


def verdict_line(records: Sequence[dict[str, Any]], where: str) -> str:
    """How many of the peers' points ours is on or below, and which it is not."""
    told = [(record["model"], row, lost(row, where)) for record in records for row in record["rows"]]
    known = [(model, row, names) for model, row, names in told if names is not None]
    wins = [f"{name_of(row)} on {model} ({' and '.join(names)})" for model, row, names in known if names]
    at = "measured on the CPU" if where == CPU else f"in Inductor's program for an absent {records[0]['hardware']}"
    line = f"- Ours is on or below the peer's point in (peak, time) for {len(known) - len(wins)} of {len(known)} peer "
    return f"{line}points, {at}." + (f" Peers win: {'; '.join(wins)}." if wins else "")


def name_of(row: Row) -> str:
    return row["method"] if row["budget"] is None else f"{row['method']} {row['budget']:g}"


# The table


def lines_of(record: dict[str, Any], row: Row) -> list[list[str]]:
    """The peer's line, and that of ours where it was asked."""
    peer, graph = row["peer"], row["graph"]
    extra = gflop(graph["recompute_flop"]) if "recompute_flop" in graph else "-"
    measured = [row["error"] or "-", "-", "-", extra, "-", "-"]
    if peer is not None:
        measured = [*measured_cells(peer, "-"), extra, f"{peer['compile_seconds']:.0f}", "-"]
    program = program_cells(graph.get("gpu"), graph.get("error"))
    lines = [[record["model"], name_of(row), *measured, *program, "-", "-"]]
    if row["ours"] is not None or "our_gpu" in graph:
        lines.append([record["model"], f"ours at the peak of {name_of(row)}", *our_cells(row)])
    return lines


def our_cells(row: Row) -> list[str]:
    ours, graph = row["ours"] or {}, row["graph"]
    measured = [ours.get("error", "-"), *["-"] * 5]
    if "measured_bytes" in ours:
        taken = ours["taken"]
        measured = [
            *measured_cells(ours, f"{statistics.median(row['ratios']):.2f}"), gflop(taken["recompute_flop"]),
            f"{ours['compile_seconds']:.0f}", f"{taken['planning_seconds']:.1f}",
        ]  # fmt: skip
    program = program_cells(graph.get("our_gpu"), graph.get("error"))
    return [*measured, *program, *(verdict(lost(row, where)) for where in (CPU, GPU))]


def measured_cells(run: dict[str, Any], ratio: str) -> list[str]:
    return [mib(run["measured_bytes"]), f"{run['measured_seconds'] * 1e3:.0f}", ratio]


def program_cells(program: dict[str, Any] | None, error: str | None) -> list[str]:
    if not program:
        return [error or "-", "-"]
    return [mib(program["code_bytes"]), ms(program["roofline_seconds"])]


def verdict(names: list[str] | None) -> str:
    if names is None:
        return "-"
    return f"**no: {', '.join(names)}**" if names else "yes"


# Pictures


def series(record: dict[str, Any], where: str) -> dict[str, list[tuple[str, float, float]]]:
    """What a panel shows: (label, MiB, ms) of the peers, and of ours with the label of the peer whose peak it has."""
    found: dict[str, list[tuple[str, float, float]]] = {"peers": [], "ours": []}
    for row in record["rows"]:
        for who, point in zip(found, points(row, where), strict=True):
            if point is not None:
                found[who].append((name_of(row), point[0] / MIB, point[1] * 1e3))
    return found


def draw(record: dict[str, Any], folder: Path) -> None:
    """Time against peak of one model, measured and in the GPU's program, as a PNG. Raises ImportError."""
    figure = new_figure("the benchmark's plot", INCHES)
    titles = {CPU: "measured on the CPU", GPU: f"Inductor's program for an absent {record['hardware']}"}
    for panel, where in zip(figure.subplots(1, 2), titles, strict=True):
        found = series(record, where)
        for number, (label, peak, time) in enumerate(found["peers"]):
            panel.plot([peak], [time], "s", color=f"C{number % 10}", markersize=7, label=label)
            for their, our_peak, our_time in found["ours"]:
                if their == label:
                    panel.plot([peak, our_peak], [time, our_time], color=f"C{number % 10}", linewidth=0.8, alpha=0.6)
                    panel.plot([our_peak], [our_time], "o", color=f"C{number % 10}", markersize=6)
        panel.set_title(f"{record['model']}, {titles[where]}", fontsize=10)
        panel.set_xlabel("peak of a step, MiB over what forward starts with")
        panel.set_ylabel("step, ms")
        panel.grid(alpha=0.3)
        if found["peers"]:
            panel.legend(fontsize=7, title="squares: peers; circles: ours at their peaks", title_fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{record['model']}.png", dpi=110)
