"""What if: one model on two GPUs that are not here. python examples/two_gpus.py

Nothing runs and no weight is allocated: the model is made on meta, and recompile traces one training step of it as
for the GPU. Then it answers three questions for each: what does a step need, what does less memory cost, and which
batch fits?
"""

import torch
from rich.console import Console
from rich.table import Table
from small_gpt import SmallGPT

import recompile

GPUS = ("h100", "l40s")
LENGTH = 1024


def batch_of(size: int) -> torch.Tensor:
    return torch.empty(size, LENGTH + 1, dtype=torch.int64, device="meta")


def plans_for(joint: recompile.JointGraph, gpu: str) -> list[tuple[str, recompile.Explanation]]:
    """The fastest plan, the fastest half way down to the smallest peak, and the one with the smallest."""
    shares = {"fastest": None, "half the memory": 0.5, "least memory": 0.0}
    return [(name, recompile.plan(joint, hardware=gpu, memory_budget=share)) for name, share in shares.items()]


def main(model: torch.nn.Module) -> None:
    # One graph serves both: it is traced once, then priced for each. Where attention is a call of
    # F.scaled_dot_product_attention, trace with hardware=gpu for each: GPUs differ in the op that they run.
    joint = recompile.joint_graph(model, batch_of(8), hardware=GPUS[0])
    table = Table("GPU", "plan", "peak, GiB", "step, ms", "slower than possible, at most", title="A step of 8 x 1024")
    for gpu in GPUS:
        for name, plan in plans_for(joint, gpu):
            gap = plan.step_seconds / plan.lower_bound_seconds - 1
            table.add_row(gpu, name, f"{plan.peak_bytes / 2**30:.2f}", f"{plan.step_seconds * 1e3:.1f}", f"{gap:.1%}")
    Console(width=100).print(table)

    # All plans worth having; .plot("frontier.png") draws them.
    print(recompile.frontier(joint, hardware=GPUS[1]))

    # The largest batch that trains in what the GPU has, with AdamW; some ten sizes are traced for that.
    for gpu in GPUS:
        fit = recompile.max_batch(model, batch_of, hardware=gpu)
        print(f"{gpu}: batch {fit.size}, without recomputation {fit.size_without_recomputation}")


if __name__ == "__main__":
    with torch.device("meta"):
        main(SmallGPT(layers=2, width=1024, heads=16, words=32_000))
