"""How long the planner takes as a model gets deeper: ``make speed``, some minutes, half of which is tracing.

GPTs of one width and more and more layers, each in a process of its own on one thread: seconds of the processor to
annotate the traced graph, to search it, to answer one budget of that search (its middle), and for the whole frontier
with its bounds (the search included). Memory is the process's peak, and how much of that the search added.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.reference import build
from recompile.ahead import annotated, gpu
from recompile.joint import Budget
from recompile.planner.mincut import Search
from recompile.trace import trace_step
from recompile.tradeoff import frontier_of_search
from recompile.units import BYTES_PER_UNIT

HERE = Path(__file__).parent
HARDWARE = "planner-h100"
LAYERS = (6, 12, 24, 96)
LENGTH = 2048
MIB = BYTES_PER_UNIT["MIB"]
RU_MAXRSS_BYTES = BYTES_PER_UNIT["KIB"]  # its unit on Linux (getrusage(2))
COLUMNS = (
    "layers", "nodes", "trace s", "annotate s", "search s", "plans", "answer s", "search + answer s", "frontier s",
    "peak MiB", "search MiB",
)  # fmt: skip
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and the seconds of the processor that it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RU_MAXRSS_BYTES


def measured(layers: int) -> dict[str, float]:
    """One model's row, in the order of COLUMNS."""
    hardware = gpu(HARDWARE)
    with torch.device("meta"):
        model, batch = build(f"gpt-{layers}x{LENGTH}")
    traced, trace_s = timed(lambda: trace_step(model, (batch,)))
    joint, annotate_s = timed(lambda: annotated(traced, hardware))
    gc.collect()
    before = peak_bytes()
    search, search_s = timed(lambda: Search(joint, hardware))
    added = peak_bytes() - before
    plans = search.pool.frontier()
    middle = Budget((plans[0].peak_bytes + plans[-1].peak_bytes) // 2)
    _, answer_s = timed(lambda: search.answer(middle))
    _, bounds_s = timed(lambda: frontier_of_search(search, hardware))
    figures = (
        layers, len(joint.notes), trace_s, annotate_s, search_s, len(search.pool.candidates), answer_s,
        search_s + answer_s, search_s + bounds_s, peak_bytes() / MIB, added / MIB,
    )  # fmt: skip
    return dict(zip(COLUMNS, figures, strict=True))


def in_child(layers: int) -> dict[str, float]:
    """``measured`` in a process of its own, without what another model left in caches."""
    command = [sys.executable, "-m", "benchmarks.speed", "--child", str(layers)]
    with tempfile.TemporaryDirectory() as cache:
        settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(
            command, env={**os.environ, **settings}, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def row(figures: dict[str, float]) -> str:
    """Figures under COLUMNS; seconds have two decimals, the rest none."""
    cells = (f"{figures[name]:.{2 if name.endswith(' s') else 0}f}".rjust(len(name)) for name in COLUMNS)
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*", type=int, default=list(LAYERS), help="how many, of each model")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measured(asked.child)))
        return
    print("  ".join(COLUMNS))
    for layers in asked.layers:
        print(row(in_child(layers)), flush=True)


if __name__ == "__main__":
    main()
