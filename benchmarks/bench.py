"""Ours beside every peer in (peak, time): ``make bench``, two models in minutes, ``make bench-full``, all in hours.

Each run has a process of its own and no cache. A peer is compiled and measured; then ours, with the budget that leaves
the peer's measured peak when the margin for the prediction is off, is compiled in the same process from the same
weights, and steps of the two are timed in turns, so that whatever else the machine does slows both: the median of the
ratios counts. The same graphs are planned for a GPU
that is not here, where Inductor's own program has a peak and a roofline time (``recompile.gpu``). A peer that fails is
a row that says so. Runs are kept in results/bench, one JSON file each: none is made again while the planner, changed
or not, plans the same, and while what measures it and what makes its programs have not changed. Summaries are bench.md,
bench.json and plots, of ``make bench`` in out, of ``make bench-full`` beside this file.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache

import recompile.passes
from benchmarks.aims import Subject
from benchmarks.bench_text import draw, summary
from benchmarks.models import RECIPES
from benchmarks.peaks import (
    MEASURING_SOURCES,
    MODEL_SOURCES,
    NUM_MEASUREMENTS,
    NUM_TIMED_STEPS,
    Bench,
    Way,
    compiled,
    figures,
    in_child,
    made,
    not_run,
    note,
    peers_of,
    planned,
    seconds_of,
    stock_partition,
    traced,
)
from benchmarks.store import Store, environment, fingerprint, sources
from recompile.ahead import gpu
from recompile.backend import Partitioner
from recompile.decide import budget_bytes_for, predicted_bytes_within
from recompile.errors import BudgetError
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.options import Options, sources_hash
from recompile.planner import mincut
from recompile.trace import trace_step

HERE = Path(__file__).parent
STORE = Store(HERE / "results" / "bench")
HARDWARE = "h100"  # what the GPU's programs are for
NUM_PAIRS = 25  # steps of the peer and of ours, in turns
QUICK_MODELS = ("llama", "gpt")
FULL_MODELS = ("two-traversals", "experts", "resnet", "llama", "gpt", "vit", "bert", "t5")
NONE = Way("recompile", 1.0)  # the model as it is
# What makes a program of a plan.
EMITTING_SOURCES = (
    *Path(recompile.passes.__file__).parent.glob("*.py"), *Path(recompile.__file__).parent.glob("torch_private*.py"),
    Path(recompile.__file__).parent / "backend.py",
)  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A way to run a step, and whether ours is asked for a plan at its peak."""

    way: Way
    is_rival: bool = True


QUICK_PEERS = (
    Peer(Way("eager"), False), Peer(Way("inductor", 1.0), False), Peer(Way("inductor", 0.5)), Peer(Way("checkpoint")),
)  # fmt: skip


def full_peers(name: str) -> tuple[Peer, ...]:
    return tuple(map(Peer, (Way("eager"), *peers_of(name), Way("sqrt"), Way("sac-ilp"))))


# Measured on the CPU: in a process of its own


def run_of(name: str, peer: Peer) -> dict[str, Any]:
    """The peer's figures; where it is a rival, ours at its measured peak and both ones' times in turns.

    What the peer raises goes through. What ours raises, a refused budget among it, is its "error".
    """
    warm_up()
    theirs = compiled(name, peer.way)
    found: dict[str, Any] = {"peer": figures(peer.way, *theirs)}
    if not peer.is_rival:
        return found
    functorch_config.activation_memory_budget = 1.0  # what the peer may have set
    way = Way("recompile", budget_bytes_for(found["peer"]["measured_bytes"]))
    try:
        with fresh_cache():
            ours = compiled(name, way)
            found["ours"] = {"budget": way.budget, **figures(way, *ours)}
    except Exception as error:
        return {**found, "ours": {"budget": way.budget, "error": told(error)}}
    times = in_turns(*(functools.partial(seconds_of, module, step) for module, step, _ in (theirs, ours)))
    found["peer"]["measured_seconds"], found["ours"]["measured_seconds"] = map(
        statistics.median, zip(*times, strict=True)
    )
    return {**found, "ratios": [our / their for their, our in times]}


def warm_up() -> None:
    """What the first compilation in a process pays for all: imports, tests of the C++ compiler, its headers."""
    torch.compile(lambda x: x.sin().sum())(torch.ones(16, requires_grad=True)).backward()


def in_turns(
    first: Callable[[], float], second: Callable[[], float], pairs: int = NUM_PAIRS
) -> list[tuple[float, float]]:
    """Both ones' seconds, pair by pair; which of the two goes first alternates."""
    found = []
    for number in range(pairs):
        if number % 2:
            later = second()
            found.append((first(), later))
        else:
            found.append((first(), second()))
    return found


def told(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


# Graphs, and programs for the GPU: in a process of its own, nothing is compiled


class Target(Subject):
    """The step of one way for the GPU that is not here. Bytes are over its parameters."""

    def __init__(self, name: str, way: Way, store: Store):
        module, batch = made(name, way)
        super().__init__(f"{name}--gpu", trace_step(module, (), batch), gpu(HARDWARE), 0, store)

    def by_inductor(self, ratio: float) -> dict[str, Any]:
        with functorch_config.patch(activation_memory_budget=ratio):
            halves = self.trace.split(stock_partition)
        return self.program("inductor", halves, {})


def graphs_of(name: str, peers: Iterable[Peer], store: Store = STORE) -> list[dict[str, Any]]:
    """For each peer: FLOP that it computes again, its program for the GPU, and ours at that program's peak."""
    plain, target = traced(name, NONE), Target(name, NONE, store)
    total_flop = planned(plain, NONE)["total_flop"]
    found: list[dict[str, Any]] = []
    for peer in peers:
        way = peer.way
        if way.method == "eager":  # no joint graph, no program; autograd computes nothing again
            found.append({"recompute_flop": 0})
            continue
        is_plain = way.method == "inductor"
        row: dict[str, Any] = {}
        found.append(row)
        try:
            row["recompute_flop"] = planned(plain if is_plain else traced(name, way), way)["flop"] - total_flop
            ratio = way.budget if is_plain else 1.0
            row["gpu"] = (target if is_plain else Target(name, way, store)).by_inductor(ratio)
            if peer.is_rival:
                row["our_gpu"] = {}  # in case that there is no plan
                row["our_gpu"] = target.plan_for(row["gpu"]["code_bytes"], "code", "roofline")
        except Exception as error:
            row["error"] = told(error)
    return found


def saved_within(name: str, budgets: Iterable[int]) -> list[list[str] | None]:
    """What our planner keeps of a model at each budget, None where nothing fits; planned by one search."""
    found: list[list[str] | None] = []

    def planner(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
        for asked in budgets:
            try:
                plan = mincut(joint, hardware, Budget(predicted_bytes_within(asked)))
                found.append(sorted(choice.node.name for choice in plan.saved))
            except BudgetError:
                found.append(None)
        return mincut(joint, hardware, budget)

    traced(name, NONE).partitioned(Partitioner(Options.parse({"planner": planner})))
    return found


METHOD = (made, compiled, figures, seconds_of, in_child, run_of, in_turns, Target, graphs_of)  # what results depend on


# One model after the other


class Comparison(Bench):
    """Runs what is not in the store, as ``Bench`` does, and what the planner, changed since, would plan otherwise."""

    def __init__(self, store: Store, child: Callable[[str, str, Any], Any]):
        super().__init__(store, child)
        texts = sources(*MODEL_SOURCES, *MEASURING_SOURCES, *EMITTING_SOURCES, HERE / "peers.py")
        settings = NUM_PAIRS, NUM_MEASUREMENTS, NUM_TIMED_STEPS, torch.__version__
        self.method = fingerprint(texts, *map(inspect.getsource, METHOD), *settings)
        self.stamp = {"version": fingerprint(sources_hash(with_report=False), torch.__version__)}

    def record_of(self, name: str, peers: Sequence[Peer]) -> dict[str, Any]:
        """Everything about one model."""
        asked = [[peer.way.method, peer.way.budget, peer.is_rival] for peer in peers]
        keys = [
            (f"{name}--{peer.way.label}", fingerprint(self.method, arguments))
            for peer, arguments in zip(peers, asked, strict=True)
        ]
        graphs_key = f"{name}--graphs", fingerprint(self.method, inspect.getsource(Subject), asked)
        if self.child is not not_run:
            self.drop_outdated(name, keys, graphs_key)
        rows, made_with = [], []
        for peer, key, arguments in zip(peers, keys, asked, strict=True):
            run = self.kept("run", *key, arguments)
            shown = {part: run.get(part) for part in ("peer", "ours", "ratios", "error")}
            rows.append({**asdict(peer.way), **shown})
            made_with += [run["made_with"]] if "made_with" in run else []
        graphs = self.kept("graphs", *graphs_key, asked)
        for row, graph in zip(rows, graphs.get("plans", [{"error": graphs.get("error")}] * len(rows)), strict=True):
            row["graph"] = graph
        last = max(made_with, key=lambda made: made["date"], default=environment())
        return {"model": name, "hardware": HARDWARE, "made_with": last, "rows": rows}

    def drop_outdated(self, name: str, runs: Sequence[tuple[str, str]], graphs: tuple[str, str]) -> None:
        """Of results of other sources of ours keep the runs whose plan is the same today."""
        stored = {key: self.store.load(*key) for key in (*runs, graphs)}
        outdated = {key: found for key, found in stored.items() if found and found["version"] != self.stamp["version"]}
        planned = {key: found["ours"] for key, found in outdated.items() if "ours" in found}
        budgets = [ours["budget"] for ours in planned.values()]
        try:
            plans = self.child("plans", name, budgets)["plans"] if budgets else ()
            today = dict(zip(planned, plans, strict=True))
        except subprocess.CalledProcessError:  # the runs will tell
            today = {}
        for key, found in outdated.items():
            if key != graphs and (key not in planned or today.get(key, "?") == planned[key].get("saved")):
                self.store.write(*key, {**found, **self.stamp})
            else:
                self.store.path(*key).unlink()


def child(kind: str, name: str, arguments: Any) -> Any:
    """A task in a process of its own, with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        return in_child(kind, name, arguments, cache, "benchmarks.bench")


def task(kind: str, name: str, arguments: Any) -> Any:
    if kind == "graphs":
        return graphs_of(name, [peer_of(*asked) for asked in arguments])
    if kind == "plans":
        return {"plans": saved_within(name, arguments)}
    return run_of(name, peer_of(*arguments))


def peer_of(method: str, budget: float | None, is_rival: bool) -> Peer:
    return Peer(Way(method, budget), is_rival)


def write(records: Sequence[dict[str, Any]], folder: Path, command: str) -> str:
    """The summary of all records so far and its pictures."""
    folder.mkdir(exist_ok=True)
    text = summary(records, command)
    (folder / "bench.md").write_text(text)
    (folder / "bench.json").write_text(json.dumps(records, indent=1) + "\n")
    try:
        draw(records[-1], folder / "plots")
    except ImportError as error:
        note(f"no plot: {error}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"{', '.join(RECIPES)}; by default all of the comparison")
    parser.add_argument("--quick", action="store_true", help="two models, six configurations each")
    parser.add_argument("--stored", action="store_true", help="run nothing: print what is there, write no summary")
    parser.add_argument("--task", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.task:
        kind, name, arguments = asked.task
        print(json.dumps(task(kind, name, json.loads(arguments))))
        return
    command = "make bench" if asked.quick else "make bench-full"
    comparison = Comparison(STORE, not_run if asked.stored else child)
    records, text = [], ""
    for name in asked.models or (QUICK_MODELS if asked.quick else FULL_MODELS):
        records.append(comparison.record_of(name, QUICK_PEERS if asked.quick else full_peers(name)))
        if not asked.stored:
            text = write(records, HERE / "out" if asked.quick else HERE, command)
    print(text or summary(records, command))


if __name__ == "__main__":
    main()
