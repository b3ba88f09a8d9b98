"""One small training function, held against eager and under every plan. For the tests of tests/whole/test_cases_*.py.

A case is a function that returns ``(module or function, inputs)``. It is traced once, with the least memory, and its
steps are compared with eager's. The first step is then replayed under every plan and must agree, to the last bit, with
the plan that saves everything.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree
from torch._guards import tracing
from torch._inductor.virtualized import V
from torch.testing import assert_close

from recompile import records
from recompile.annotation import annotate
from recompile.backend import Partitioner, prepare
from recompile.decide import PREDICTION_MARGIN, resolve_budget
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan
from recompile.options import Options
from recompile.planner import full, mincut, stock
from recompile.planner.finish import plan_from
from recompile.planner.mincut import forget
from recompile.report.explanation import GraphReport
from recompile.timeline import Timeline

from .interpret import InterpretedBackend, RawPartitioner, Step, Traced, interpreted, partitioner, storages

SHARES = (None, 0.75, 0.5, 0.25, 0.1, 0.0)
OTHER_PLANNERS = {"full": full, "stock": stock}
SEED = 7
TOLERANCE = 1e-5  # relative to a tensor's largest element: Inductor's decompositions round differently from eager

Function = Callable[..., Any]
Case = Callable[[], tuple[Function, tuple[Any, ...]]]


@pytest.fixture
def quick() -> Iterator[None]:
    """Dynamo has no code of an earlier test. Tensors of a few elements gain nothing from a second thread."""
    torch._dynamo.reset()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()  # a sixth of the time would go to looking for garbage among graphs that are kept
    yield
    gc.enable()
    torch.set_num_threads(num_threads)
    torch._dynamo.reset()


@dataclass(frozen=True)
class Trained:
    """What some steps left behind."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor  # the generator's, afterwards


def trained(case: Case, compiled: Callable[[Function], Function] = lambda f: f, num_steps: int = 2) -> Trained:
    """Gradients accumulate over the steps; each step has random numbers of its own."""
    torch.manual_seed(0)
    function, inputs = case()
    model, outputs = compiled(function), []
    for step in range(num_steps):
        torch.manual_seed(SEED + step)
        result = model(*inputs)
        loss_of(result).backward()
        outputs += [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(result)]
    named = [(f"input {i}", value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    buffers = [(f"{name} as left", value.detach()) for name, value in named]
    if isinstance(function, nn.Module):
        named += function.named_parameters()
        buffers += function.named_buffers()
    return Trained(outputs, {name: value.grad for name, value in named}, dict(buffers), torch.get_rng_state())


def loss_of(result: Any) -> torch.Tensor:
    """A sum with weights, so that every element has a gradient of its own."""
    terms = []
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            weights = torch.linspace(0.5, 1.5, max(real.numel(), 1))[: real.numel()].view(real.shape)
            terms.append((real * weights.to(real.dtype)).sum().float())
    return sum(terms)


def check(
    case: Case, *, like_eager: bool = True, fallback_random: bool = False, num_steps: int = 2, num_graphs: int = 1,
    tolerance: float = TOLERANCE, **compile_options: Any,
) -> InterpretedBackend:  # fmt: skip
    """Compare a case with eager and every plan with every other; returns the backend that traced it.

    ``like_eager=False``: the case draws Inductor's own random numbers, which eager has not.
    """
    backend = interpreted(partitioner(0.0), fallback_random)
    result = trained(case, functools.partial(torch.compile, backend=backend, **compile_options), num_steps)
    if like_eager:
        assert_alike(result, trained(case, num_steps=num_steps), tolerance)
    assert len(backend.graphs) == num_graphs
    for graph in backend.graphs:
        check_replays(graph)
    return backend


def check_replays(graph: Traced) -> None:
    """Every plan of a traced step agrees with the plan that saves everything, and with the step itself."""
    expected = graph.replay(partitioner(None, "save_all"))
    wrong = [f"as traced: {what}" for what in differences(graph.step, expected)]
    for name, step in replays(graph):
        wrong += [f"{name}: {what}" for what in differences(step, expected)]
    assert not wrong, "\n".join(wrong)


def replays(graph: Traced) -> Iterator[tuple[str, Step]]:
    """The step under every planner and every budget; plans that save the same values are replayed once."""
    seen = set()
    for name, saved, _ in plans_of(graph):
        if saved not in seen:
            seen.add(saved)
            yield name, graph.replay(saving(saved))


def plans_of(graph: Traced) -> Iterator[tuple[str, frozenset[str], RawPartitioner]]:
    """What is asked for, the names of what that saves, and the partitioner to ask. One budget is in bytes, between the
    fastest plan and the floor. The graph is annotated once for all."""
    hardware = partitioner(None).hardware
    with annotated_once(graph) as joint:
        peaks = [planned(joint, share).peak_bytes for share in (None, 0.0)]
        for budget in (*SHARES, between(*peaks)):
            yield f"budget {budget}", names_in(planned(joint, budget)), partitioner(budget)
        for name, planner in OTHER_PLANNERS.items():
            yield f"planner {name}", names_in(planner(joint, hardware, Budget(None))), partitioner(None, name)


@contextlib.contextmanager
def annotated_once(graph: Traced) -> Iterator[JointGraph]:
    """The joint graph of a traced step, to plan it for several budgets: what is searched is searched once."""
    gm, num_fwd_outputs = fx.GraphModule(graph.joint.gm, copy.deepcopy(graph.joint.gm.graph)), num_outputs_of(graph)
    with V.set_fake_mode(graph.joint.fake_mode), tracing(graph.joint.context):
        prepare(gm, num_fwd_outputs)
        try:
            yield annotate(gm, num_fwd_outputs, partitioner(None).hardware, static_inputs_of(graph, gm))
        finally:  # the next graph is another one, whether a plan of this was refused or not
            forget()
            plan_once.cache_clear()


plan_once = functools.lru_cache(maxsize=None)(mincut)


def planned(joint: JointGraph, budget: object) -> Plan:
    """The plan that a partitioner with this ``memory_budget`` makes of the graph."""
    hardware = partitioner(None).hardware
    return plan_once(joint, hardware, resolve_budget(Options(budget), joint, hardware, plan_once))


def saving(names: frozenset[str]) -> RawPartitioner:
    """A partitioner that saves these values: a plan made before, without its search."""

    def same_again(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
        timeline = Timeline(joint, hardware)
        values = enumerate(timeline.flow.nodes)
        saved = frozenset(i for i, node in values if node.name in names and node.op != "placeholder")
        plan = plan_from(timeline, saved, timeline.simulate(saved), {})
        assert names_in(plan) == names
        return plan

    return Partitioner(Options.parse({"memory_budget": None, "planner": same_again}))


def num_outputs_of(graph: Traced) -> int:
    return graph.joint.kwargs["num_fwd_outputs"]


def static_inputs_of(graph: Traced, gm: fx.GraphModule) -> list[fx.Node]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [placeholders[i] for i in graph.joint.kwargs.get("static_lifetime_input_indices") or ()]


def names_in(plan: Plan) -> frozenset[str]:
    return frozenset(choice.node.name for choice in plan.saved)


def between(fastest_bytes: int, floor_bytes: int) -> int:
    """A budget in bytes that some plan keeps; 0 and 1 are no budgets in bytes."""
    return max(math.ceil((fastest_bytes + floor_bytes) / 2 * (1 + PREDICTION_MARGIN)), 2)


def report_of(graph: Traced, budget: object, planner: str = "mincut") -> GraphReport:
    """What ``explain`` would show of one plan of a traced graph."""
    with records.recording() as reports:
        graph.joint.partitioned(partitioner(budget, planner))
    (report,) = reports
    return report


def reasons_not_to_recompute(graph: Traced, op: str) -> set[str | None]:
    """What ``explain`` says about every node of an op."""
    return {row.cannot_recompute for row in report_of(graph, None).values if op in row.op}


def assert_alike(actual: Trained, expected: Trained, tolerance: float) -> None:
    """Relative to each tensor's largest element. Gradients below a thousandth of the largest one are zero but for
    rounding (the bias before a norm)."""
    for index, (value, other) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        assert_close_within(f"output {index}", value, other, tolerance * largest_in(other))
    assert torch.equal(actual.random_state, expected.random_state), "the generator is not left as eager leaves it"
    assert actual.gradients.keys() == expected.gradients.keys() and actual.buffers.keys() == expected.buffers.keys()
    least = 1e-3 * max(map(largest_in, expected.gradients.values()), default=0.0)
    for name, other in expected.gradients.items():
        bound = tolerance * max(largest_in(other), least)
        assert_close_within(f"gradient of {name}", actual.gradients[name], other, bound)
    for name, other in expected.buffers.items():
        assert_close_within(name, actual.buffers[name], other, tolerance * largest_in(other))


def largest_in(value: Any) -> float:
    """The largest finite absolute value in a tensor; 0 where there is none."""
    if not isinstance(value, torch.Tensor) or not value.numel() or value.dtype is torch.bool:
        return 0.0
    return value.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item()


def assert_close_within(name: str, actual: Any, expected: Any, bound: float) -> None:
    if not isinstance(expected, torch.Tensor):
        assert actual is None if expected is None else actual == expected, name
        return
    assert actual is not None, f"{name} is missing"
    assert_close(actual, expected, rtol=0.0, atol=bound, equal_nan=True, msg=lambda text: f"{name}: {text}")


def differences(actual: Step, expected: Step) -> list[str]:
    """What differs between two steps, to the last bit."""
    found = []
    for part in ("outputs", "gradients", "primals"):
        pairs = zip(getattr(actual, part), getattr(expected, part), strict=True)
        found += [f"{part}[{i}]" for i, (value, other) in enumerate(pairs) if not have_same_bits(value, other)]
    return found


def have_same_bits(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        same_kind = value.dtype == other.dtype and value.shape == other.shape
        return same_kind and torch.equal(bits_of(value), bits_of(other))
    return value == other


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """Equal for NaN and NaN, not for zero and minus zero."""
    return value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def kept_bytes(step: Step) -> int:
    """Bytes that forward handed to backward and that neither its inputs nor its outputs hold."""
    elsewhere = storages([*step.primals, *step.outputs])
    return sum(size for storage, size in storages(step.partition.saved).items() if storage not in elsewhere)
