"""A planner of one's own, in use: python examples/custom_planner.py

A planner is a function from a joint graph, the hardware and a budget to a plan. This one is greedy: it begins with
everything kept, as eager mode does, and gives up the values that cost the fewest seconds per byte to compute again,
until the predicted peak fits. It is handed to torch.compile, then compared with the planner that recompile comes with.
"""

import torch
from small_gpt import SmallGPT

import recompile
from recompile.planner.finish import check_budget, plan_from
from recompile.planner.pool import Pool
from recompile.planner.save_all import save_all_set
from recompile.timeline import Timeline

NUM_TRIES = 50  # plans simulated at most: some milliseconds each


def greedy(joint: recompile.JointGraph, hardware: recompile.Hardware, budget: recompile.Budget) -> recompile.Plan:
    """Keep what takes longest to compute again per byte."""
    timeline = Timeline(joint, hardware)  # predicts peak and time of a plan; nodes go by their place in joint.nodes
    pool = Pool(timeline)  # simulates a set of nodes to save, made legal first: nothing is kept or run twice in error

    def seconds_per_byte(place: int) -> float:
        note = joint.notes[joint.nodes[place]]  # size, FLOP, seconds, and why it cannot be saved or recomputed
        return note.seconds / max(note.size_bytes, 1)

    dearest_last = sorted(save_all_set(joint, timeline.flow), key=seconds_per_byte)
    step = max(1, len(dearest_last) // NUM_TRIES)
    for num_given_up in range(0, len(dearest_last) + step, step):
        tried = pool.add(dearest_last[num_given_up:])
        if budget.peak_bytes is None or tried.peak_bytes <= budget.peak_bytes:
            return plan_from(timeline, tried.saved, tried.simulation, {})
    smallest = min(candidate.peak_bytes for candidate in pool.candidates.values())
    check_budget(budget, smallest, "greedy")  # raises BudgetError, which tells the user the smallest peak
    raise AssertionError("what fits was returned")


def main() -> None:
    torch.manual_seed(0)
    model, tokens = SmallGPT(), torch.randint(256, (4, 65))
    losses = {}
    for planner in (greedy, "mincut"):  # a function, or the name of one that is there
        compiled = torch.compile(model, backend="recompile", options={"planner": planner, "memory_budget": "3MiB"})
        loss = losses[planner] = compiled(tokens)
        loss.backward()
        plan = recompile.explain(compiled)  # works for any planner: what was kept and recomputed, and why
        print(
            f"{plan.graphs[0].planner:7} predicted peak {plan.peak_bytes / 2**20:.2f} MiB, step "
            f"{plan.step_seconds * 1e3:.2f} ms, {plan.recompute_flops / 1e6:.1f} MFLOP recomputed"
        )
    # whatever is kept, the result is that of the model as written
    assert all(torch.allclose(loss, model(tokens), atol=1e-4) for loss in losses.values())


if __name__ == "__main__":
    main()
