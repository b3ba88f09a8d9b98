"""Measured peaks of training steps on the CPU, ours and those of peers: ``make peaks``, some hours on one core.

Every model is planned for shares of memory and for budgets in bytes; each different plan is compiled and measured once,
in a process of its own with nothing cached but machine code of equal kernels. Peers are Inductor's own budgets,
``torch.utils.checkpoint`` around every block, and a selective policy that keeps matmuls, all compiled by Inductor; at
each of their measured peaks ours is planned as well. Runs are kept by the text of the graphs that Inductor gets, so
that a changed planner makes anew what changed, and an interruption loses one run. Results are in results/peaks, the
summary in peaks.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recompile
from benchmarks.models import RECIPES, Batch, build, checkpointed
from benchmarks.peaks_text import summary
from benchmarks.peers import by_sac_ilp, in_groups
from benchmarks.store import Store, environment, fingerprint, sources, text_of
from recompile import records
from recompile.backend import Partitioner, inductor_patches
from recompile.errors import BudgetError
from recompile.options import Options, sources_hash
from recompile.torch_private_order import stores_arguments_late
from recompile.work import work_of
from tests.whole.interpret import Joint, interpreted

HERE = Path(__file__).parent
STORE = Store(HERE / "results" / "peaks")
MODEL_SOURCES = (
    *(HERE / name for name in ("models.py", "layers.py", "gpu.py")),
    HERE.parent / "tests" / "whole" / "models.py",
)
MEASURING_SOURCES = tuple(
    Path(recompile.__file__).parent / name for name in ("measurement.py", "torch_private_fusion.py")
)
ORDER_SOURCE = Path(recompile.__file__).parent / "torch_private_order.py"  # of programs that it has a say in
SHARES = tuple(step / 10 for step in range(10, -1, -1))
NUM_BETWEEN = 3  # budgets in bytes between the floor and the fastest plan's peak
BELOW_FLOOR = 0.97
NUM_MEASUREMENTS, NUM_TIMED_STEPS = 2, 3
# glibc gives freed memory back to the system, or not, as it happens to lie, and getting it again took a step of 65 ms
# up to 4 ms more; so it keeps it (the most that it takes for an answer: 2 GiB less a byte, 32 MiB). Peaks are counted
# by the allocator and don't change.
KEEPING_PAGES = {"MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_MMAP_THRESHOLD_": "33554432"}
ALL_RATIOS, RIGHT_WITH_DROPOUT = (1.0, 0.5, 0.25, 0.1, 0.0), (1.0, 0.5)  # lower ones draw dropout's masks again
MATMULS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))


@dataclass(frozen=True)
class Way:
    """How a step is run: "eager", or compiled by "recompile", by "inductor" as it is, or by Inductor with part of it
    checkpointed by hand: "checkpoint", "selective", "sqrt", "sac-ilp". A share, ratio or bytes.
    """

    method: str
    budget: float | int | None = None

    @property
    def label(self) -> str:
        return self.method if self.budget is None else f"{self.method}-{self.budget}"


def peers_of(name: str) -> list[Way]:
    ratios = RIGHT_WITH_DROPOUT if RECIPES[name].has_dropout else ALL_RATIOS
    return [*(Way("inductor", ratio) for ratio in ratios), Way("checkpoint"), Way("selective")]


def keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy that people write by hand: products are kept, all else is computed again."""
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def made(name: str, way: Way) -> tuple[torch.nn.Module, Batch]:
    """The model, with what the way changes about it."""
    module, batch = build(name)
    if way.method == "checkpoint":
        module = checkpointed(module, RECIPES[name].blocks, {})
    if way.method == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_matmuls)
        module = checkpointed(module, RECIPES[name].blocks, {"context_fn": contexts})
    if way.method == "sqrt":
        module = in_groups(module, RECIPES[name].blocks)
    if way.method == "sac-ilp":
        module = by_sac_ilp(module, batch)
    return module, batch


# Planning: in a process of its own, nothing is compiled


def stock_partition(module: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    return min_cut_rematerialization_partition(module, inputs, **settings)


def traced(name: str, way: Way) -> Joint:
    """The joint graph of a step, as Inductor's partitioner gets it."""
    torch._dynamo.reset()
    module, batch = made(name, way)
    backend = interpreted(stock_partition)
    torch.compile(module, backend=backend, fullgraph=True)(**batch)
    (graph,) = backend.graphs
    return graph.joint


def planned(joint: Joint, way: Way) -> dict[str, Any]:
    """What a way makes of a joint graph: the key of its program, FLOP of both halves, and ours' predictions."""
    ratio = way.budget if way.method == "inductor" else 1.0
    options = Options.parse({"memory_budget": way.budget} if way.method == "recompile" else {})
    partitioner = Partitioner(options) if way.method == "recompile" else stock_partition
    patches = sorted(inductor_patches(options).items())
    try:
        with functorch_config.patch(activation_memory_budget=ratio), records.recording() as reports:
            partition = joint.partitioned(partitioner)
    except BudgetError as error:
        return {**asdict(way), "floor_bytes": error.floor_bytes}
    halves = partition.forward, partition.backward
    is_ordered = way.method == "recompile" and any(map(stores_arguments_late, halves))
    order = [sources(ORDER_SOURCE)] if is_ordered else []
    key = fingerprint(*map(text_of, halves), patches, sources(*MEASURING_SOURCES), torch.__version__, *order)
    found = {**asdict(way), "key": key, "flop": sum(map(flop_of, halves))}
    for report in reports:
        found |= {
            "predicted_bytes": report.peak_bytes, "predicted_seconds": report.step_seconds,
            "total_flop": report.total_flops, "recompute_flop": report.recompute_flops,
            "planning_seconds": report.planning_seconds, "saved": sorted(row.name for row in report.saved),
        }  # fmt: skip
    return found


def flop_of(module: fx.GraphModule) -> int:
    return sum(work_of(node).flop for node in module.graph.nodes if node.op == "call_function")


def plans_of(name: str) -> dict[str, Any]:
    """All that is asked of one model, but for what depends on measured peers."""
    joint = traced(name, Way("recompile"))
    shares = [planned(joint, Way("recompile", share)) for share in SHARES]
    fastest, smallest = shares[0]["predicted_bytes"], shares[-1]["predicted_bytes"]
    floor = planned(joint, Way("recompile", smallest // 2))["floor_bytes"]
    between = [floor + (fastest - floor) * step // (NUM_BETWEEN + 1) for step in range(1, NUM_BETWEEN + 1)]
    peers = []
    for way in peers_of(name):
        try:
            peers.append(planned(joint if way.method == "inductor" else traced(name, way), way))
        except Exception as error:  # a peer that cannot take the model is a result
            peers.append({**asdict(way), "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
    return {
        "shares": shares, "peers": peers, "floor_bytes": floor,
        "bytes": [planned(joint, Way("recompile", budget)) for budget in [floor, *between]],
        "below": planned(joint, Way("recompile", int(floor * BELOW_FLOOR))),
    }  # fmt: skip


def plans_in_bytes(name: str, budgets: Sequence[int]) -> list[dict[str, Any]]:
    joint = traced(name, Way("recompile"))
    return [planned(joint, Way("recompile", budget)) for budget in budgets]


# Measuring: in a process of its own


def compiled(name: str, way: Way) -> tuple[torch.nn.Module, Callable[[], None], Callable[..., Any]]:
    """The module, its training step, and what torch.compile returned (the module itself for eager)."""
    module, batch = made(name, way)
    if way.method == "eager":
        called = module
    elif way.method == "recompile":
        called = torch.compile(module, backend="recompile", options={"memory_budget": way.budget}, fullgraph=True)
    else:
        functorch_config.activation_memory_budget = way.budget if way.method == "inductor" else 1.0
        called = torch.compile(module, fullgraph=True)

    def step() -> None:
        called(**batch).backward()

    return module, step, called


def measured(name: str, way: Way) -> dict[str, Any]:
    return figures(way, *compiled(name, way))


def figures(way: Way, module: torch.nn.Module, step: Callable[[], None], called: Callable[..., Any]) -> dict[str, Any]:
    """Compile, warm up, and measure one step; the largest of some measurements, the median of some times."""
    started = time.perf_counter()
    step()
    compile_seconds = time.perf_counter() - started
    peaks, times = [], []
    for _ in range(NUM_MEASUREMENTS):
        module.zero_grad(set_to_none=True)
        peaks.append(recompile.measure(step, device="cpu").peak_bytes)
    for _ in range(NUM_TIMED_STEPS):
        times.append(seconds_of(module, step))
    found = {
        "measured_bytes": max(peaks),
        "measured_seconds": statistics.median(times),
        "compile_seconds": compile_seconds,
    }
    if way.method == "recompile":
        (graph,) = recompile.explain(called).graphs
        found["taken"] = {
            "predicted_bytes": graph.peak_bytes, "predicted_seconds": graph.step_seconds,
            "flop": graph.total_flops + graph.recompute_flops, "recompute_flop": graph.recompute_flops,
            "planning_seconds": graph.planning_seconds,
        }  # fmt: skip
        found["saved"] = sorted(row.name for row in graph.saved)
    return found


def seconds_of(module: torch.nn.Module, step: Callable[[], None]) -> float:
    """Processor seconds of one step, all gradients of which are made anew: what it waits for others is not its own.

    On its one thread of an idle machine that is the time it takes.
    """
    module.zero_grad(set_to_none=True)
    started = time.process_time()
    step()
    return time.process_time() - started


def in_child(task: str, name: str, arguments: Any, cache: str, program: str = "benchmarks.peaks") -> Any:
    """The result of a task in a process of its own. Raises CalledProcessError.

    ``cache``: a folder for machine code of C++ kernels, found again by their text; graphs and plans are not kept there.
    ``program``: the module that has the task.
    """
    command = [sys.executable, "-W", "ignore", "-m", program, "--task", task, name, json.dumps(arguments)]
    settings = {
        "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0", "TORCHINDUCTOR_CACHE_DIR": cache,
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", **KEEPING_PAGES,
    }  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, **settings}, cwd=HERE.parent, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def not_run(kind: str, name: str, arguments: Any) -> Any:
    """In place of a process where only what is stored is to be shown."""
    raise subprocess.CalledProcessError(1, kind, stderr="not run yet")


def task(kind: str, name: str, arguments: Any) -> Any:
    if kind == "plans":
        return plans_of(name)
    if kind == "bytes":
        return plans_in_bytes(name, arguments)
    return measured(name, Way(*arguments))


# One model after the other


class Bench:
    """Runs what is not in the store. ``child(task, model, arguments)`` runs a task, as ``in_child`` does."""

    def __init__(self, store: Store, child: Callable[[str, str, Any], Any]):
        self.store, self.child, self.stamp = store, child, {}  # what goes with every result
        asked = SHARES, NUM_BETWEEN, BELOW_FLOOR, ALL_RATIOS, RIGHT_WITH_DROPOUT
        self.version = fingerprint(sources_hash(with_report=False), sources(*MODEL_SOURCES), asked, torch.__version__)

    def kept(self, kind: str, name: str, key: str, arguments: Any) -> dict[str, Any]:
        """The result of a task from the store, or made now; a failure is told and not kept."""
        found = self.store.load(name, key)
        if found is None:
            started = time.perf_counter()
            try:
                made = self.child(kind, name.partition("--")[0], arguments)
            except subprocess.CalledProcessError as error:
                last = (error.stderr.strip().splitlines() or ["no message"])[-1]
                if self.child is not not_run:
                    note(f"{name} {arguments}: failed: {last}")
                return {"error": last}
            result = made if isinstance(made, dict) else {"plans": made}
            found = self.store.write(name, key, {**result, **self.stamp})
            note(f"{name} {arguments if arguments else ''}: {time.perf_counter() - started:.0f} s")
        return found

    def with_measurement(self, name: str, plan: dict[str, Any]) -> dict[str, Any]:
        """A plan and its measured step; a plan that another budget had as well is not run again.

        But for a budget in bytes that its program does not keep: there ``recompile`` plans again, and that plan counts.
        """
        if "key" not in plan:
            return plan
        kept = functools.partial(self.kept, "run", f"{name}--{plan['method']}")
        run, way = kept(plan["key"], [plan["method"], plan["budget"]]), [plan["method"], plan["budget"]]
        is_missed = plan["method"] == "recompile" and isinstance(plan["budget"], int)
        if is_missed and run.get("measured_bytes", 0) > plan["budget"]:
            run = kept(fingerprint(plan["key"], plan["budget"]), way)
            plan = {**plan, **run.get("taken", {}), "saved": run.get("saved")}
        same = run.get("saved") == plan.get("saved") if "saved" in run else None
        shown = {key: value for key, value in run.items() if key not in ("saved", "made_with", "taken")}
        return {**plan, **shown, "as_planned": same}

    def record(self, name: str) -> dict[str, Any]:
        """Everything about one model."""
        plans = self.kept("plans", f"{name}--plans", self.version, None)
        if "error" in plans:
            return {"model": name, **plans}
        run = functools.partial(self.with_measurement, name)
        record = {
            "model": name,
            "made_with": environment(),
            "floor_bytes": plans["floor_bytes"],
            "below": plans["below"],
        }
        record |= {part: [run(plan) for plan in plans[part]] for part in ("shares", "bytes", "peers")}
        budgets = sorted({peer["measured_bytes"] for peer in record["peers"] if "measured_bytes" in peer})
        key = fingerprint(self.version, budgets)
        rivals = self.kept("bytes", f"{name}--rivals", key, budgets)
        record["rivals"] = [run(plan) for plan in rivals.get("plans", ())]
        return record


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(RECIPES), help=f"{', '.join(RECIPES)}; all by default")
    parser.add_argument("--stored", action="store_true", help="run nothing: print what is there, write no summary")
    parser.add_argument("--task", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.task:
        kind, name, arguments = asked.task
        print(json.dumps(task(kind, name, json.loads(arguments))))
        return
    if asked.stored:
        print(summary([Bench(STORE, not_run).record(name) for name in asked.models]))
        return
    with tempfile.TemporaryDirectory() as cache:
        bench, found = Bench(STORE, functools.partial(in_child, cache=cache)), []
        for name in asked.models:
            found.append(bench.record(name))
            text = summary(found)
            (HERE / "peaks.md").write_text(text)
            (HERE / "peaks.json").write_text(json.dumps(found, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
