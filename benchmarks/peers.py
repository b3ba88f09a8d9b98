"""Plans of other methods, as changes of a module: a classical sqrt(N) plan, and the one of torch's own ILP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch._subclasses import FakeTensorMode

from benchmarks.models import Checkpointed
from recompile.trace import as_fakes

SAC_SHARE = 0.5  # of the peak that the ILP's own baseline has: what it is given as its budget
GIB = 2**30


# Where blocks return more than what the next one starts from: which of its arguments the results are. T5's first block
# makes the position biases that all later ones add, of self-attention and of cross-attention.
RESULT_PLACES = {"T5Block": (0, 2, 5)}


class Chain(nn.Module):
    """Blocks one after the other: results of one are arguments of the next, the first if nothing else is known, and all
    get the same other arguments."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.places = RESULT_PLACES.get(type(blocks[0]).__name__, (0,))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            result = block(*args, **kwargs)
            next_args = list(args)
            for place, value in zip(self.places, result if isinstance(result, tuple) else (result,), strict=True):
                next_args[place] = value
            args = tuple(next_args)
        return result


def in_groups(module: nn.Module, blocks: tuple[str, ...]) -> nn.Module:
    """The module with every run of N blocks in groups of about sqrt(N), each checkpointed as one (Chen et al. 2016).

    In place. ``blocks``: names of their types. Runs are lists (nn.ModuleList, nn.Sequential) of nothing else; a model
    that does not just chain its blocks fails when it is called. Raises ValueError where there is no run.
    """
    runs = [
        (path, run)
        for path, run in module.named_modules()
        if isinstance(run, nn.ModuleList | nn.Sequential)
        and len(run) > 1
        and all(type(block).__name__ in blocks for block in run)
    ]
    if not runs:
        raise ValueError(f"no list of blocks ({', '.join(blocks)}) to group")
    for path, run in runs:
        size, members = math.ceil(math.sqrt(len(run))), list(run)
        groups = [Checkpointed(Chain(members[i : i + size]), {}) for i in range(0, len(members), size)]
        grouped = nn.Sequential(*groups) if isinstance(run, nn.Sequential) else nn.ModuleList(groups)
        module.set_submodule(path, grouped)
    return module


def by_sac_ilp(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> nn.Module:
    """The module with what ``torch.distributed._tools.sac_ilp`` picks checkpointed, at half of its own baseline's peak.

    Of a module that it picks all is computed again, not the part that the ILP asks for. In place. Raises ImportError
    without pulp and pwlf, and AssertionError where there is no CUDA device, which torch's estimate of time asks.
    """
    from torch.distributed._tools.ilp_utils import get_peak_memory_runtime_baseline
    from torch.distributed._tools.sac_ilp import sac_milp

    graph = sac_graph(module, batch)
    budget = SAC_SHARE * get_peak_memory_runtime_baseline(graph)[0] / GIB
    decisions, _, peak_bytes = sac_milp(graph, budget)
    if peak_bytes < 0:
        raise ValueError(f"the ILP has no plan within {budget:.4f} GiB")
    for name in decisions:
        path = name.partition(".")[2]  # the root's type comes first
        module.set_submodule(path, Checkpointed(module.get_submodule(path), {}))
    return module


def sac_graph(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """What the ILP decides about: memory and time of each module, from steps on fake tensors as torch's tests do it."""
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    mode = FakeTensorMode()
    device = next(module.parameters()).device
    module, batch = as_fakes((module, dict(batch)), mode)
    memory, runtime, tradeoff = MemTracker(), RuntimeEstimator(), SACEstimator()
    memory.track_external(module)
    with mode:
        with memory:
            for number in range(2):  # the second with gradients there
                module(**batch).backward()
                if number == 0:
                    memory.reset_mod_stats()
        with runtime("operator-level-cost-model"):
            module(**batch).backward()
        with tradeoff("operator-level-cost-model"):
            module(**batch)
        return parse_module_info(aggregate_stats(module, memory, runtime, tradeoff, device))
