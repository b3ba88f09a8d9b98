"""Whether plans reach the aims set for the reference models, on a GPU that is not there: ``make aims``.

Nothing runs on a GPU and nothing of a model's size is allocated. A plan becomes Inductor's own program
(``recompile.gpu``), and that program's figures count: ``code``, the peak replayed from its allocations; ``est``,
Inductor's estimate of it; ``roofline``, the sum over its kernels; ``true``, the same with what kernels spill. GiB are
with parameters. A row is planned for the time and the peak that it is in, those in "roofline" with ``counts_spills``
off, those in "est" with ``counts_fused`` on, for the GiB of the aim and for those of the prototype; a row without ms is
the smallest plan. A plan whose program misses the GiB that were asked for is planned again for that much less, and for
more where that leaves room.

Programs are kept by their graphs' text, so a changed planner makes only those anew that changed; a model is planned
anew when any source but the report's changed. Results are in results/aims, the summary in aims.md beside this file.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import recompile.gpu
from benchmarks.aims_text import summary
from benchmarks.reference import build
from benchmarks.store import Store, fingerprint, sources, text_of
from recompile.ahead import annotated, gpu
from recompile.backend import WITH_A_BUDGET, Partitioner, inductor_patches
from recompile.errors import BudgetError
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.options import Options, sources_hash
from recompile.planner import mincut
from recompile.planner.finish import made_legal, plan_from
from recompile.planner.mincut import forget
from recompile.planner.stock import stock_saved_set
from recompile.timeline import Timeline
from recompile.trace import JointTrace, trace_step
from recompile.tradeoff import FrontierPoint, frontier_of

HERE = Path(__file__).parent
STORE = Store(HERE / "results" / "aims")
HARDWARE = "planner-h100"
GIB = 2**30
MAX_TRIES = 6  # plans for one row, each asked for what the program before it missed by less
UNUSED_SHARE = 0.005  # of the GiB asked for: with more left over a plan for a larger peak is tried
SLACK = 0.001  # of the GiB asked for: rounding of the aims
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)  # plans for the rank correlation, beside those of the rows
PROGRAM_SOURCES = ("gpu.py", "replay.py", "torch_private_gpu.py", "torch_private_lowering.py", "work.py")


@dataclass(frozen=True)
class Aim:
    """A row of the table: GiB with parameters and ms, in which peak and which time. ``ms`` None: the floor."""

    model: str
    peak: str  # "est" or "code"
    time: str  # "roofline" or "true"
    gib: float
    ms: float | None
    prototype: tuple[float, float | None]


AIMS = (
    Aim("gpt-6x1024", "code", "roofline", 1.1, 4.25, (1.19, 4.26)),
    Aim("gpt-6x1024", "code", "roofline", 0.62, 4.45, (0.66, 4.64)),
    Aim("gpt-6x1024", "code", "roofline", 0.55, 4.65, (0.58, 4.84)),
    Aim("llama-4x2048", "est", "roofline", 2.7, 7.1, (2.80, 7.11)),
    Aim("llama-4x2048", "est", "roofline", 1.6, 7.6, (1.70, 7.63)),
    Aim("llama-4x2048", "est", "roofline", 1.3, 7.8, (1.41, 7.80)),
    Aim("llama-4x2048", "est", "roofline", 1.0, 9.0, (1.02, 9.39)),
    Aim("conv-8x32", "est", "roofline", 0.15, 1.75, (0.149, 1.91)),
    Aim("gpt-12x2048", "est", "roofline", 8.5, 21.0, (8.98, 21.10)),
    Aim("gpt-12x2048", "est", "roofline", 5.5, 22.9, (5.74, 23.02)),
    Aim("gpt-12x2048", "est", "roofline", 2.8, 23.9, (3.23, 23.93)),
    Aim("gpt-12x2048", "est", "roofline", 2.5, 24.5, (2.63, 25.00)),
    Aim("gpt-12x2048", "est", "roofline", 2.1, None, (2.36, 32.3)),
    Aim("gpt-12x2048", "est", "true", 9.0, 23.0, (9.95, 23.0)),
    Aim("gpt-12x2048", "est", "true", 6.0, 24.3, (6.67, 24.5)),
    Aim("gpt-12x2048", "est", "true", 5.0, 26.0, (5.37, 26.7)),
)

# Inductor's budgets below 0.5 draw dropout's masks again in backward: their gradients are wrong.
ALL_RATIOS, RIGHT_WITH_DROPOUT = (1.0, 0.5, 0.2, 0.1, 0.0), (1.0, 0.5)
MODELS = ("gpt-6x1024", "llama-4x2048", "conv-8x32", "gpt-6x1024-nodrop", "gpt-12x2048", "gpt-12x2048-nodrop")


def ratios_of(model: str) -> tuple[float, ...]:
    has_dropout = model.startswith("gpt") and not model.endswith("-nodrop")
    return RIGHT_WITH_DROPOUT if has_dropout else ALL_RATIOS


def keep(names: Iterable[str]) -> Callable[[JointGraph, Any, Budget], Plan]:
    """A planner that saves the nodes of these names, whatever the budget."""
    wanted = frozenset(names)

    def planner(joint: JointGraph, hardware: Any, budget: Budget) -> Plan:
        timeline = Timeline(joint, hardware)
        flow = timeline.flow
        chosen = (i for i, node in enumerate(flow.nodes) if node.name in wanted and not flow.is_input[i])
        saved = made_legal(joint, flow, frozenset(chosen))
        return plan_from(timeline, saved, timeline.simulate(saved), {})

    return planner


def stock_partition(module: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    return min_cut_rematerialization_partition(module, inputs, **settings)


def silent(text: str) -> None:
    """Notes that nobody reads."""


class Subject:
    """One step, traced and annotated once for a GPU that is not here. ``fixed_bytes`` are added to all peaks."""

    def __init__(
        self, name: str, trace: JointTrace, hardware: Hardware, fixed_bytes: int, store: Store,
        note: Callable[[str], None] = silent,
    ):  # fmt: skip
        self.name, self.trace, self.fixed_bytes, self.store, self.note = name, trace, fixed_bytes, store, note
        self.hardware = hardware
        self.hardware_of = {
            (peak, time): replace(hardware, counts_spills=time == "true", counts_fused=peak == "est")
            for peak in ("code", "est")
            for time in ("true", "roofline")
        }
        self.sources = sources(*(Path(recompile.gpu.__file__).parent / file for file in PROGRAM_SOURCES))

    @functools.cached_property
    def joint(self) -> JointGraph:
        return annotated(self.trace, self.hardware)

    @functools.cached_property
    def timelines(self) -> dict[tuple[str, str], Timeline]:
        """By the peak and the time that count."""
        return {counts: Timeline(self.joint, hardware) for counts, hardware in self.hardware_of.items()}

    # Plans

    def plan(self, limit_bytes: int | None, by: str = "true", peak: str = "code") -> dict[str, Any]:
        """The planner's answer within so many bytes over parameters, or its floor where that is more; its program.

        The fastest by "true" or "roofline" seconds, within the peak in "code" or "est".
        """
        hardware, started = self.hardware_of[peak, by], time.perf_counter()
        try:
            plan = mincut(self.joint, hardware, Budget(limit_bytes))
        except BudgetError as error:
            plan = mincut(self.joint, hardware, Budget(error.floor_bytes))
        seconds = time.perf_counter() - started
        return {**self.simulated(plan), "planning_seconds": seconds, **self.program_of(plan)}

    def simulated(self, plan: Plan) -> dict[str, Any]:
        """Both peaks and both times by our own simulation, whichever the plan was made for."""
        index = self.timelines["code", "true"].flow.index
        saved = frozenset(index[choice.node] for choice in plan.saved if choice.node.op != "placeholder")
        made = {counts: timeline.simulate(saved) for counts, timeline in self.timelines.items()}
        peaks = {
            f"simulated_{peak}_bytes": made[peak, "true"].peak_bytes + self.fixed_bytes for peak in ("code", "est")
        }
        seconds = {f"simulated_{time}_seconds": made["code", time].step_seconds for time in ("true", "roofline")}
        return {**peaks, **seconds, "recompute_flop": plan.recompute_flops}

    def plan_for(self, asked_bytes: float, peak: str, by: str = "true") -> dict[str, Any]:
        """A plan whose program's peak (``code`` or ``est``, parameters included) is within what is asked, if found.

        The fastest by ``by`` ("true" or "roofline" seconds), and of several found that one.
        """
        limit, tried = int(asked_bytes * (1 + SLACK)) - self.fixed_bytes, []  # all that is accepted
        fits, misses = None, None  # simulated bytes: the most that did, the least that did not
        while len(tried) < MAX_TRIES:
            tried.append(self.plan(max(limit, 0), by, peak))
            excess = tried[-1][f"{peak}_bytes"] - asked_bytes * (1 + SLACK)
            simulated = tried[-1][f"simulated_{peak}_bytes"] - self.fixed_bytes
            if excess > 0:
                if simulated > limit:
                    break  # the smallest plan
                misses = simulated  # and so does every limit between the two: it has the same plan
            else:
                fits = max(limit, simulated)
                if misses is None or -excess < UNUSED_SHARE * asked_bytes:
                    break
            limit = misses - int(excess) - 1 if fits is None else (fits + misses) // 2
        fitting = [plan for plan in tried if plan[f"{peak}_bytes"] <= asked_bytes * (1 + SLACK)]
        best = min(fitting or tried[-1:], key=lambda plan: plan[f"{by}_seconds"])
        return {**best, "tries": len(tried), "first_bytes": tried[0][f"{peak}_bytes"]}

    def stock(self, ratio: float) -> dict[str, Any]:
        """Inductor at one of its budgets: its program, and its saved set in our simulation where that is legal."""
        timeline = self.timelines["code", "true"]
        saved = stock_saved_set(self.joint, timeline.flow, ratio)
        legal = made_legal(self.joint, timeline.flow, saved)
        plan = plan_from(timeline, legal, timeline.simulate(legal), {})
        with functorch_config.patch(activation_memory_budget=ratio):
            halves = self.trace.split(stock_partition)
        return {"ratio": ratio, **self.simulated(plan), **self.program(f"inductor-{ratio}", halves, {})}

    # Programs

    def program_of(self, plan: Plan) -> dict[str, Any]:
        names = sorted(choice.node.name for choice in plan.saved)
        options = Options.parse({"planner": keep(names), "hardware": self.hardware, **WITH_A_BUDGET})
        halves = self.trace.split(Partitioner(options, self.hardware))
        return self.program("recompile", halves, inductor_patches(options))

    def program(
        self, by: str, halves: tuple[fx.GraphModule, fx.GraphModule], patches: dict[str, Any]
    ) -> dict[str, Any]:
        """Figures of Inductor's program for the two halves; made once."""
        key = fingerprint(*map(text_of, halves), sorted(patches.items()), self.sources, torch.__version__)
        name = f"{self.name}-{by}"
        found = self.store.load(name, key)
        if found is None:
            self.note(f"{name} {key}: a new program")
            made = recompile.gpu.program_for(
                *halves, self.trace, self.hardware, None, patches, short_lives=by == "recompile"
            )
            found = self.store.write(name, key, {
                "code_bytes": made.peak_bytes + self.fixed_bytes,
                "est_bytes": made.estimated_peak_bytes + self.fixed_bytes,
                "roofline_seconds": made.seconds, "true_seconds": made.seconds_with_spills,
                "num_launches": made.num_launches, "saved_bytes": made.saved_bytes,
                "spilled_bytes": sum(kernel.spilled_bytes for kernel in made.kernels),
            })  # fmt: skip
        return {"key": key, **{name: value for name, value in found.items() if name != "made_with"}}

    # What is asked of a model

    def rows(self) -> list[dict[str, Any]]:
        """Its rows of the table of aims."""
        found = []
        for aim in AIMS:
            if aim.model == self.name:
                row = {"aim": asdict(aim), **self.answer(aim, aim.gib)}
                if aim.ms is not None:
                    row["for_prototype"] = self.answer(aim, aim.prototype[0])
                found.append(row)
        return found

    def answer(self, aim: Aim, gib: float) -> dict[str, Any]:
        """The plan for so many GiB in the peak and the time of an aim; for its floor the smallest."""
        if aim.ms is None:
            return self.plan(0, aim.time, aim.peak)
        return self.plan_for(gib * GIB, aim.peak, aim.time)

    def duels(self) -> list[dict[str, Any]]:
        """Inductor's own budgets, each with our plans for its peak and for its time."""
        points = frontier_of(self.joint, self.hardware).points
        found = []
        for ratio in ratios_of(self.name):
            stock = self.stock(ratio)
            same_peak, same_time = self.plan_for(stock["code_bytes"], "code"), self.plan_within(stock, points)
            found.append({"inductor": stock, "same_peak": same_peak, "same_time": same_time})
        return found

    def plan_within(self, stock: dict[str, Any], points: Iterable[FrontierPoint]) -> dict[str, Any] | None:
        """The smallest plan whose program takes no longer than Inductor's, if found: the last one tried otherwise."""
        seconds, plan = stock["simulated_true_seconds"], None
        for _ in range(MAX_TRIES):
            fast_enough = [point.peak_bytes for point in points if point.step_seconds <= seconds]
            if not fast_enough:
                break
            plan = self.plan(min(fast_enough))
            if plan["true_seconds"] <= stock["true_seconds"]:
                break
            seconds = plan["simulated_true_seconds"] * stock["true_seconds"] / plan["true_seconds"]
        return plan

    def shares(self) -> list[dict[str, Any]]:
        """Plans over the whole range, for the rank correlation."""
        fastest = mincut(self.joint, self.hardware, Budget(None)).peak_bytes
        floor = self.plan(0)["simulated_code_bytes"] - self.fixed_bytes
        return [{"share": share, **self.plan(floor + int(share * (fastest - floor)))} for share in SHARES]


def reference(name: str, store: Store = STORE, note: Callable[[str], None] = silent) -> Subject:
    """A reference model on the hardware of the aims; its peaks include its parameters."""
    model, batch = build(name)
    parameter_bytes = sum(p.numel() * p.itemsize for p in model.parameters())
    return Subject(name, trace_step(model, (batch,)), gpu(HARDWARE), parameter_bytes, store, note)


PARTS: dict[str, Callable[[Subject], list[dict[str, Any]]]] = {
    "rows": Subject.rows, "duels": Subject.duels, "shares": Subject.shares,
}  # fmt: skip


def record_of(name: str, parts: Iterable[str] = PARTS, store: Store = STORE) -> dict[str, Any]:
    """The parts asked for of a model's record, those made anew of which any source of ours changed since."""
    key = fingerprint(
        sources_hash(with_report=False), sources(Path(__file__), HERE / "reference.py"), torch.__version__
    )
    record: dict[str, Any] = {"model": name, "hardware": HARDWARE, **{part: [] for part in PARTS}}
    subject = None
    for part in parts:
        found = store.load(f"model-{name}-{part}", key)
        if found is None:
            started = time.perf_counter()
            subject = subject or reference(name, store, note)
            made = {"fixed_bytes": subject.fixed_bytes, part: PARTS[part](subject)}
            found = store.write(f"model-{name}-{part}", key, made)
            note(f"{name}, {part}: {time.perf_counter() - started:.0f} s")
        record |= found
    forget()
    return record


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"{', '.join(MODELS)}; all by default")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    asked = parser.parse_args()
    records = []
    for name in asked.models:
        records.append(record_of(name, asked.parts))
        text = summary(records)
        (HERE / "aims.md").write_text(text)
        (HERE / "aims.json").write_text(json.dumps(records, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
