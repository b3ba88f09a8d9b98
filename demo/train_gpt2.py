"""Trains a small GPT-2 on real text: eager, plain Inductor, and recompile under four memory budgets.

    python -m demo.train_gpt2 [--text FILE] [--steps 30] [--out demo/out]

Every configuration starts from the same weights and sees the same batches in the same order. At the end: a table of
the measured peak, the step time, what is recomputed and the losses; `memory.png` with the live memory over one step;
`results.json` with all figures. The exit code is 1 if the budget in bytes was not respected by the measured peak.

`--check` trains without dropout instead and compares the losses of every configuration with those of eager mode.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import recompile
from demo.report import MIB, Row, conclusions, draw_memory, row_of, table_of, write_results
from demo.text import cut_into_batches, load_text
from demo.training import SEED, Configuration, ModelSize, Run, measure_step, start_run, time_steps, train

DROPOUT = 0.1
NUM_TIMING_ROUNDS = 7
BUDGET_MIB = 40  # For the default size with dropout: between the smallest peak and that of the fastest plan.
LARGEST_LOSS_DIFFERENCE = 1e-4  # Sums in another order, in float32, over 30 steps.
CONFIGURATIONS = {
    "eager": Configuration("eager", None),
    "inductor": Configuration("Inductor", "inductor"),
    "none": Configuration("recompile None", "recompile", None),
    "0.5": Configuration("recompile 0.5", "recompile", 0.5),
    "0.1": Configuration("recompile 0.1", "recompile", 0.1),
}
BYTES = "bytes"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console()
    with compile_cache_of_this_run():
        try:
            return demonstrate(options, console) if not options.check else check(options, console)
        except (OSError, ValueError, recompile.BudgetError) as error:
            console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
            return 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.train_gpt2", description="Trains a small GPT-2 on real text.")
    parser.add_argument("--text", type=Path, help="a text file (default: the English help topics of Python)")
    parser.add_argument(
        "--steps", type=positive, default=30, help="optimizer steps for each configuration (default 30)"
    )
    parser.add_argument("--out", type=Path, default=Path("demo/out"), help="folder for the results (default demo/out)")
    parser.add_argument("--check", action="store_true", help="no dropout, and compare all losses with eager mode's")
    parser.add_argument("--budget-mib", type=positive, help="the budget in bytes, in MiB (default: fits the model)")
    parser.add_argument("--only", nargs="+", choices=[*CONFIGURATIONS, BYTES], help="run these configurations alone")
    for size in fields(ModelSize):
        flag = "--" + size.name.removeprefix("num_").replace("_", "-")
        parser.add_argument(flag, dest=size.name, type=positive, default=size.default, help=f"default {size.default}")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def demonstrate(options: argparse.Namespace, console: Console) -> int:
    size, text_name, batches = prepare(options)
    console.print(introduction(size, text_name, options.steps), soft_wrap=True)
    with progress_bar(console) as progress:
        runs = train_all(options, size, DROPOUT, batches, progress)
        timing = progress.add_task("timing all in turn", total=NUM_TIMING_ROUNDS * len(runs))
        time_steps(runs, batches[0], NUM_TIMING_ROUNDS, lambda: progress.advance(timing))
    rows = [row_of(run, budget_bytes_of(run)) for run in runs]
    return show(options, size, text_name, runs, rows, console)


def show(
    options: argparse.Namespace, size: ModelSize, text_name: str, runs: list[Run], rows: list[Row], console: Console
) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    draw_memory(runs, rows, options.out / "memory.png")
    write_results(rows, size, text_name, options.out / "results.json")
    console.print(table_of(rows))
    sentences, budgets_respected = conclusions(rows)
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{options.out / 'memory.png'} shows the memory over one step; results.json beside it has the figures."
    )
    return 0 if budgets_respected else 1


def check(options: argparse.Namespace, console: Console) -> int:
    """Without dropout every configuration computes the same losses: 1 if one is further from eager's than rounding."""
    size, text_name, batches = prepare(options)
    options.only = options.only and list(dict.fromkeys(["eager", *options.only]))
    console.print(introduction(size, text_name, options.steps) + " Without dropout.", soft_wrap=True)
    with progress_bar(console) as progress:
        eager, *others = train_all(options, size, 0.0, batches, progress)
    largest = 0.0
    for run in others:
        difference = max(abs(loss - eagers) for loss, eagers in zip(run.losses, eager.losses, strict=True))
        console.print(f"{run.configuration.name}: losses differ from eager mode's by at most {difference:.2e}")
        largest = max(largest, difference)
    verdict = "within" if largest <= LARGEST_LOSS_DIFFERENCE else "ABOVE"
    console.print(f"Largest difference: {largest:.2e}, {verdict} {LARGEST_LOSS_DIFFERENCE:.0e}.")
    return 0 if largest <= LARGEST_LOSS_DIFFERENCE else 1


def prepare(options: argparse.Namespace) -> tuple[ModelSize, str, torch.Tensor]:
    size = ModelSize(**{field.name: getattr(options, field.name) for field in fields(ModelSize)})
    text_name, text = load_text(options.text)
    return size, text_name, cut_into_batches(text, options.steps, size.batch_size, size.sequence_length, SEED)


def introduction(size: ModelSize, text_name: str, num_steps: int) -> str:
    return (
        f"GPT-2 of {size.num_layers} layers, width {size.width}, {size.num_heads} heads, on {text_name}: "
        f"{num_steps} steps of {size.batch_size} sequences of {size.sequence_length} bytes."
    )


def train_all(
    options: argparse.Namespace, size: ModelSize, dropout: float, batches: torch.Tensor, progress: Progress
) -> list[Run]:
    chosen = options.only or [*CONFIGURATIONS, BYTES]
    runs: dict[str, Run] = {}
    task = progress.add_task("", total=len(chosen) * len(batches))
    for name in chosen:
        configuration = CONFIGURATIONS.get(name) or in_bytes(options, size, runs)
        progress.update(task, description=configuration.name)
        run = runs[name] = start_run(configuration, size, dropout)
        train(run, batches, lambda: progress.advance(task))
        measure_step(run, batches[0])
        progress.console.print(summary(run), markup=False, highlight=False)
    progress.update(task, description="training")
    return list(runs.values())


def summary(run: Run) -> str:
    return (
        f"{run.configuration.name}: first step {run.compile_seconds:.0f} s, loss {run.losses[0]:.3f} to "
        f"{run.losses[-1]:.3f}, peak {run.measurement.peak_bytes / MIB:.1f} MiB"
    )


def in_bytes(options: argparse.Namespace, size: ModelSize, runs: dict[str, Run]) -> Configuration:
    """The configuration with a budget in bytes: the one asked for, or one between the peaks of 0.5 and 0.1."""
    budget_mib = options.budget_mib
    if budget_mib is None and size == ModelSize() and not options.check:
        budget_mib = BUDGET_MIB
    if budget_mib is None:
        if not {"0.5", "0.1"} <= runs.keys():
            raise ValueError(
                "without --budget-mib, bytes needs 0.5 and 0.1 before it in --only: its budget lies between"
            )
        budget_mib = (runs["0.5"].measurement.peak_bytes + runs["0.1"].measurement.peak_bytes) // 2 // MIB
    return Configuration(f"recompile {budget_mib}MiB", "recompile", f"{budget_mib}MiB")


def budget_bytes_of(run: Run) -> int | None:
    budget = run.configuration.memory_budget
    return int(budget.removesuffix("MiB")) * MIB if isinstance(budget, str) else None


def progress_bar(console: Console) -> Progress:
    columns = TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


@contextmanager
def compile_cache_of_this_run() -> Iterator[None]:
    """Inductor's cache in a fresh folder that is removed afterwards, so that every run really compiles."""
    variable = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(variable)
    with tempfile.TemporaryDirectory(prefix="recompile-demo-", ignore_cleanup_errors=True) as folder:
        os.environ[variable] = folder
        try:
            yield
        finally:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before


if __name__ == "__main__":
    sys.exit(main())
