"""Whether predicted seconds rank plans as the clock does, on the CPU: ``make clock``, some minutes a model.

All plans of a model are compiled in one process and run in turns, so that what slows the machine meets them alike; of
each the median counts. Plans that are predicted less than MIN_APART from each other are not told apart. One thread.
Results are in clock.md and clock.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

import recompile
from benchmarks.aims_text import table
from benchmarks.models import RECIPES, build
from benchmarks.store import environment
from benchmarks.verdicts import rank_correlation

HERE = Path(__file__).parent
MODELS = ("gpt", "llama", "resnet")
# What is compared: the trade-off from the fastest plan to the smallest, and whole blocks rebuilt.
PLANS: tuple[dict[str, Any], ...] = (
    {"memory_budget": None}, {"memory_budget": 0.3}, {"memory_budget": 0.0}, {"planner": "full"},
)  # fmt: skip
NUM_ROUNDS = 15
MIN_APART = 0.10


@dataclass(frozen=True)
class Timed:
    """One plan: its options as text, predicted seconds, and the median of the measured ones."""

    plan: str
    predicted_seconds: float
    measured_seconds: float


def compiled_step(name: str, options: dict[str, Any]) -> tuple[Callable[[], None], Any]:
    """A training step of a fresh model under the options, warmed up, and what torch.compile returned."""
    module, batch = build(name)
    called = torch.compile(module, backend="recompile", options=options, fullgraph=True)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        called(**batch).backward()

    step()
    return step, called


def timed(name: str) -> list[dict[str, Any]]:
    """Every plan of a model, run in turns."""
    steps, predicted = [], []
    for options in PLANS:
        step, called = compiled_step(name, options)
        steps.append(step)
        predicted.append(recompile.explain(called).step_seconds)
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(NUM_ROUNDS):
        for step, found in zip(steps, seconds, strict=True):
            started = time.perf_counter()
            step()
            found.append(time.perf_counter() - started)
    names = [" ".join(f"{key}={value}" for key, value in options.items()) for options in PLANS]
    found = zip(names, predicted, map(statistics.median, seconds), strict=True)
    return [vars(Timed(*row)) for row in found]


def pairs_in_order(plans: list[Timed]) -> tuple[int, int]:
    """Of the pairs predicted at least MIN_APART apart: how many the clock ranks alike, and how many there are."""
    apart = [
        (a, b)
        for a, b in combinations(sorted(plans, key=lambda plan: plan.predicted_seconds), 2)
        if b.predicted_seconds >= a.predicted_seconds * (1 + MIN_APART)
    ]
    return sum(a.measured_seconds < b.measured_seconds for a, b in apart), len(apart)


def summary(results: dict[str, list[Timed]]) -> str:
    """Markdown: what the clock says of each model, then every plan."""
    rows, runs = [], []
    for name, plans in results.items():
        alike, count = pairs_in_order(plans)
        ranks = rank_correlation([p.predicted_seconds for p in plans], [p.measured_seconds for p in plans])
        rows.append([name, str(len(plans)), "-" if ranks is None else f"{ranks:.3f}", f"{alike} of {count}"])
        base = plans[0]
        runs += [
            [
                name, p.plan, f"{p.predicted_seconds * 1e3:.1f}", f"{p.measured_seconds * 1e3:.1f}",
                f"{p.predicted_seconds / base.predicted_seconds:.3f}",
                f"{p.measured_seconds / base.measured_seconds:.3f}",
            ]
            for p in plans
        ]  # fmt: skip
    head = f"# Clock\n\nMade by `make clock`: medians of {NUM_ROUNDS} rounds in turns, one thread."
    pairs = f"pairs predicted {MIN_APART:.0%} apart in order"
    names = ("model", "plan", "predicted ms", "measured ms", "predicted, of the fastest", "measured, of the fastest")
    return "\n\n".join([head, table(("model", "plans", "rank correlation", pairs), rows), table(names, runs)]) + "\n"


def in_child(name: str, cache: str) -> list[Timed]:
    """The plans of a model, timed in a process of its own. Raises CalledProcessError."""
    settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.clock", "--child", name]
    done = subprocess.run(
        command, env={**os.environ, **settings}, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=True
    )
    return [Timed(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(timed(asked.child)))
        return
    results: dict[str, list[Timed]] = {}
    for name in asked.models:
        with tempfile.TemporaryDirectory() as cache:
            results[name] = in_child(name, cache)
    (HERE / "clock.md").write_text(summary(results))
    found = {name: [vars(plan) for plan in plans] for name, plans in results.items()}
    (HERE / "clock.json").write_text(json.dumps({"made_with": environment(), "models": found}, indent=1) + "\n")
    print(summary(results))


if __name__ == "__main__":
    main()
