"""What well-known models keep for backward under well-known policies, beside published figures: ``make tables``.

"eager" is what autograd's saved-tensor hooks see on meta tensors. All else are plans, simulated on annotated joint
graphs of all layers; nothing is allocated. Bytes are those of activations: parameters, their gradients and the batch
are not in them. Writes tables.json and tables.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.layers import GPTLayer, Layers, ShardedLayer
from recompile.ahead import annotated, gpu
from recompile.attention import AttentionForGPU
from recompile.errors import BudgetError
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan, Planner
from recompile.planner import full, mincut, save_all
from recompile.planner.finish import check_budget, made_legal, plan_from
from recompile.planner.mincut import forget
from recompile.planner.save_all import save_all_set
from recompile.timeline import Timeline
from recompile.torch_private import is_tangent
from recompile.trace import trace_step

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cost:
    """A step of some layers: bytes over parameters and batch, predicted seconds, FLOP."""

    saved_bytes: float
    peak_bytes: float
    seconds: float
    recompute_flop: float
    flop: float

    @property
    def extra_flop(self) -> float:
        return self.recompute_flop / (self.flop - self.recompute_flop)


def selective(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
    """Selective recomputation (Korthikanti et al. 2022, section 5): attention's core is rebuilt, the rest kept.

    Of what eager PyTorch saves, everything that has the sequence length in two dimensions is dropped.
    """
    timeline = Timeline(joint, hardware)
    kept = frozenset(i for i in save_all_set(joint, timeline.flow) if not is_core(timeline.flow.nodes[i]))
    saved = made_legal(joint, timeline.flow, kept)
    simulation = timeline.simulate(saved)
    check_budget(budget, simulation.peak_bytes, "selective")
    return plan_from(timeline, saved, simulation, {})


def is_core(node: Any) -> bool:
    """Whether a value has scores' shape: the last two dimensions equal and long."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dim() >= 3 and val.shape[-1] == val.shape[-2] > 1


def smallest(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
    """The plan with the smallest peak that our planner finds."""
    try:
        return mincut(joint, hardware, Budget(0))
    except BudgetError as error:
        return mincut(joint, hardware, Budget(error.floor_bytes))


POLICIES: dict[str, Planner] = {
    "save all": save_all,
    "full": full,
    "selective": selective,
    "ours, fastest": mincut,
    "ours, smallest": smallest,
}


class Model:
    """``layers`` equal layers on a batch."""

    def __init__(
        self, make_layer: Callable[[], Any], layers: int, shape: tuple[int, ...], dtype: torch.dtype, hardware: str
    ):
        with torch.device("meta"):
            self.module = Layers(make_layer, layers).to(dtype)
            self.args = (torch.empty(shape, dtype=dtype, requires_grad=True),)
        self.hardware = gpu(hardware)
        self.joint = without_weight_gradients(annotated(trace_step(self.module, self.args), self.hardware))

    def cost(self, policy: str) -> Cost:
        plan = POLICIES[policy](self.joint, self.hardware, Budget(None))
        flop = sum(self.joint.notes[node].work.flop for node in self.joint.nodes)
        return Cost(
            plan.saved_bytes, plan.peak_bytes, plan.step_seconds, plan.recompute_flops, flop + plan.recompute_flops
        )

    def eager_bytes(self) -> int:
        """What eager PyTorch saves."""
        return saved_in_eager(self.module, self.args)


def without_weight_gradients(joint: JointGraph) -> JointGraph:
    """The graph with the gradients of parameters in memory that is there already, as optimizers over shards have it."""
    primals = [node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    returned = joint.graph.output_node().args[0][joint.num_fwd_outputs :]
    weights = {
        joint.notes[gradient].storage
        for primal, gradient in zip(primals, returned, strict=False)
        if primal in joint.static_inputs and gradient is not None
    }
    notes = {
        node: replace(note, size_bytes=0) if note.storage in weights else note for node, note in joint.notes.items()
    }
    return replace(joint, notes=notes)


class DropoutOfGPU(TorchFunctionMode):
    """Eager dropout as on a GPU, which keeps a mask of booleans; elsewhere the mask has the dtype of the input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout and kwargs["training"]:  # F.dropout passes its arguments on by keyword
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        return func(*args, **(kwargs or {}))


def saved_in_eager(module: Layers, args: tuple[torch.Tensor]) -> int:
    """Bytes of the storages that autograd keeps, parameters left out, with the attention that a GPU would run."""
    held: dict[int, int] = {}
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            held[storage._cdata] = storage.nbytes()
        return tensor

    with AttentionForGPU(), DropoutOfGPU(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module(*args)
    assert loss.requires_grad  # the graph, and with it every storage, is alive until here
    return sum(held.values())


# The tables


def gpt3() -> list[dict[str, Any]]:
    """GPT-3 175B, 96 layers of width 12288 and 96 heads, batch 1 x 2048, fp16."""
    rows = []
    for attention, flash in (("naive", False), ("flash", True)):
        model = Model(lambda flash=flash: GPTLayer(12288, 96, flash), 96, (1, 2048, 12288), torch.float16, "a100-80")
        rows.append(gpt3_row(attention, "eager", model.eager_bytes(), None, 0.0))
        for policy in policies(flash):
            cost = model.cost(policy)
            rows.append(gpt3_row(attention, policy, cost.saved_bytes, cost.peak_bytes / 1e9, cost.extra_flop))
        forget()
    return rows


def policies(flash: bool) -> list[str]:
    """Those that differ: flash attention has no written-out core that selective recomputation could drop."""
    return [policy for policy in POLICIES if not (flash and policy == "selective")]


PUBLISHED_GPT3 = {  # GB a layer, GB in all
    ("naive", "eager"): (2.0, 192.0), ("naive", "full"): (None, 13.5), ("flash", "eager"): (0.5, 48.0),
    ("flash", "full"): (None, 2.5),
}  # fmt: skip


def gpt3_row(attention: str, policy: str, saved_bytes: float, peak: float | None, extra: float) -> dict:
    known = PUBLISHED_GPT3.get((attention, policy), (None, None))
    return {
        "attention": attention, "policy": policy, "GB a layer": saved_bytes / 96e9, "published GB a layer": known[0],
        "saved GB": saved_bytes / 1e9, "published GB": known[1], "peak GB": peak, "extra FLOP": extra,
    }  # fmt: skip


def seventy_billion() -> list[dict[str, Any]]:
    """70B at 64K on 8 x A100-80GB: one rank of tensor parallel 8 with sequence parallel, bf16."""
    published = {
        "save all": (None, 0.0, None), "full": (1850.0, 0.334, 14.2), "selective": (1410.0, 0.028, 24.5),
    }  # fmt: skip
    rows = []
    for attention, flash in (("naive", False), ("flash", True)):
        model = Model(
            lambda flash=flash: ShardedLayer(8192, 64, 8, 28672, 8, flash), 80, (1, 65536 // 8, 8192), torch.bfloat16,
            "a100-80",
        )  # fmt: skip
        for policy in policies(flash):
            cost, known = model.cost(policy), published.get(policy, (None, None, None))
            rows.append({
                "attention": attention, "policy": policy, "peak GB": cost.peak_bytes / 1e9, "published GB": known[2],
                "extra FLOP": cost.extra_flop, "published extra": known[1], "step ms": cost.seconds * 1e3,
                "published ms": known[0],
            })  # fmt: skip
        forget()
    return rows


def sequences() -> list[dict[str, Any]]:
    """Activation peak of one layer of width 4096 and 32 heads, batch 1, bf16, against the sequence length."""
    rows = []
    for length in [512 * 2**i for i in range(9)]:
        row: dict[str, Any] = {"sequence": length}
        for name, flash in (("naive", False), ("flash", True)):
            with torch.device("meta"):
                module = Layers(lambda flash=flash: GPTLayer(4096, 32, flash), 1).to(torch.bfloat16)
                x = torch.empty(1, length, 4096, dtype=torch.bfloat16, requires_grad=True)
            target = gpu("h100")
            joint = without_weight_gradients(annotated(trace_step(module, (x,)), target))
            for policy in ("save all", "ours, smallest"):
                row[f"{name}, {policy} GB"] = POLICIES[policy](joint, target, Budget(None)).peak_bytes / 1e9
                forget()
        rows.append(row)
    return rows


TABLES = {"gpt3": gpt3, "70b": seventy_billion, "sequence": sequences}


def markdown(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(shown(name, row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1%}" if "extra" in name else f"{value:.4g}"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", default=list(TABLES), help=f"{', '.join(TABLES)}; all by default")
    asked = parser.parse_args()
    file = HERE / "tables.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for name in asked.tables:
        started = time.perf_counter()
        rows = TABLES[name]()
        results[name] = {
            "title": TABLES[name].__doc__, "rows": rows, "torch": torch.__version__,
            "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
            "seconds": round(time.perf_counter() - started),
        }  # fmt: skip
        print(f"{name}: {results[name]['seconds']} s", file=sys.stderr, flush=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
    text = [f"## {results[name]['title']}\n\n{markdown(results[name]['rows'])}\n" for name in TABLES if name in results]
    (HERE / "tables.md").write_text("# Tables\n\nMade by `make tables`.\n\n" + "\n".join(text))
    print((HERE / "tables.md").read_text())


if __name__ == "__main__":
    main()
