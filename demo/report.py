"""What the demo shows: a table, a picture of memory over one step, a JSON file, and what follows from the figures."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.table import Table

from demo.training import ModelSize, Run

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one configuration; None where there is none."""

    name: str
    backend: str
    memory_budget: float | str | None
    budget_bytes: int | None
    peak_bytes: int
    predicted_peak_bytes: int | None
    saved_bytes: int | None
    step_seconds: float | None
    predicted_step_seconds: float | None
    recompute_flops: int | None
    compile_seconds: float
    first_loss: float
    last_loss: float
    losses: tuple[float, ...]


def row_of(run: Run, budget_bytes: int | None = None) -> Row:
    configuration, explanation = run.configuration, run.explanation
    return Row(
        name=configuration.name,
        backend=configuration.backend or "eager",
        memory_budget=configuration.memory_budget,
        budget_bytes=budget_bytes,
        peak_bytes=run.measurement.peak_bytes,
        predicted_peak_bytes=getattr(explanation, "peak_bytes", None),
        saved_bytes=getattr(explanation, "saved_bytes", None),
        step_seconds=run.median_step_seconds,
        predicted_step_seconds=getattr(explanation, "step_seconds", None),
        recompute_flops=getattr(explanation, "recompute_flops", None),
        compile_seconds=run.compile_seconds,
        first_loss=run.losses[0],
        last_loss=run.losses[-1],
        losses=tuple(run.losses),
    )


def table_of(rows: Iterable[Row]) -> Table:
    table = Table(title="One training step: forward and backward", caption="MiB is 2**20 bytes; peaks are increases.")
    table.add_column("Configuration", no_wrap=True)
    headings = (
        "Peak MiB\nmeasured",
        "Peak MiB\npredicted",
        "Step ms\nmedian",
        "GFLOP re-\ncomputed",
        "First\nloss",
        "Last\nloss",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            _number(row.peak_bytes, MIB, 1),
            _number(row.predicted_peak_bytes, MIB, 1),
            _number(row.step_seconds, 1e-3, 0),
            _number(row.recompute_flops, 1e9, 3),
            f"{row.first_loss:.3f}",
            f"{row.last_loss:.3f}",
        )
    return table


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def conclusions(rows: list[Row]) -> tuple[list[str], bool]:
    """Sentences that say what was seen, and whether every byte budget was respected by the measured peak."""
    sentences = []
    budgeted = [row for row in rows if row.budget_bytes is not None]
    for row in budgeted:
        verb = "was respected" if row.peak_bytes <= row.budget_bytes else "was NOT respected"
        sentences.append(f"The budget of {row.memory_budget} {verb}: {row.peak_bytes / MIB:.1f} MiB were measured.")
    by_budget = {row.memory_budget: row for row in rows if row.backend == "recompile"}
    if None in by_budget and 0.1 in by_budget:
        fastest, small = by_budget[None], by_budget[0.1]
        memory, duration = small.peak_bytes / fastest.peak_bytes, small.step_seconds / fastest.step_seconds
        sentences.append(
            f"At memory_budget=0.1 the step needs {memory:.0%} of the memory and {duration:.0%} of the time of "
            f"memory_budget=None, the fastest plan."
        )
    last_losses = [row.last_loss for row in rows]
    sentences.append(
        f"The loss falls from {rows[0].first_loss:.2f} to between {min(last_losses):.3f} and {max(last_losses):.3f}: "
        f"dropout draws other masks in eager mode than in compiled code."
    )
    return sentences, all(row.peak_bytes <= row.budget_bytes for row in budgeted)


def draw_memory(runs: list[Run], rows: list[Row], path: Path) -> None:
    """One panel for each configuration, with one scale of memory: what is allocated above that at the step's start."""
    num_columns = min(3, len(runs))
    num_rows = -(-len(runs) // num_columns)
    figure, panels = plt.subplots(
        num_rows, num_columns, sharey=True, squeeze=False, figsize=(4.2 * num_columns, 3 * num_rows + 0.6)
    )
    highest_mib = max(row.peak_bytes for row in rows) / MIB
    for panel, run, row in zip(panels.flat, runs, rows, strict=False):
        _draw_panel(panel, run, row, highest_mib)
    for panel in panels.flat[len(runs) :]:
        panel.set_visible(False)
    for panel in panels[-1]:
        panel.set_xlabel("time since the step began, ms")
    for panel in panels[:, 0]:
        panel.set_ylabel("live memory, MiB")
    by_label = {}
    for panel in panels.flat:
        by_label |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(by_label.values(), by_label.keys(), loc="upper center", ncols=len(by_label), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_panel(panel: Any, run: Run, row: Row, highest_mib: float) -> None:
    milliseconds = [seconds * 1e3 for seconds, _ in run.measurement.timeline]
    live_mib = [live_bytes / MIB for _, live_bytes in run.measurement.timeline]
    peak_mib = max(live_mib)
    peak_ms = milliseconds[live_mib.index(peak_mib)]
    panel.fill_between(milliseconds, live_mib, step="post", alpha=0.25, linewidth=0)
    panel.plot(milliseconds, live_mib, drawstyle="steps-post", linewidth=1, label="live memory (forward and backward)")
    panel.plot([peak_ms], [peak_mib], "v", color="tab:red", markersize=6, label="peak")
    panel.annotate(f"{peak_mib:.1f} MiB", (peak_ms, peak_mib), (0, 7), textcoords="offset points", ha="center")
    if row.budget_bytes is not None:
        panel.axhline(row.budget_bytes / MIB, color="black", linestyle="--", linewidth=1, label="budget in bytes")
    panel.set_title(row.name)
    panel.set_ylim(0, highest_mib * 1.18)
    panel.grid(alpha=0.3)


def write_results(rows: list[Row], size: ModelSize, text_name: str, path: Path) -> None:
    results = {
        "versions": {name: version(name) for name in ("torch", "transformers", "recompile")}
        | {"python": platform.python_version()},
        "machine": {"system": platform.system(), "machine": platform.machine(), "cpu_threads": torch.get_num_threads()},
        "text": text_name,
        "model": asdict(size),
        "configurations": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(results, indent=2) + "\n")
