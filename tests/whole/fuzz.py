"""Checks random training functions: eager's numbers, and the same bits whatever is saved and whatever is recomputed.

``python -m tests.whole.fuzz --examples 10000 --seed 1`` looks further than the tests do, in processes of 250 examples
each, for what Dynamo and Hypothesis keep of each example adds up; a program that fails is shown in its smallest form.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from torch._functorch.partitioners import min_cut_rematerialization_partition

from recompile.backend import Partitioner
from recompile.dataflow import dataflow_of
from recompile.hardware import Hardware
from recompile.joint import Budget, JointGraph, Plan, Side
from recompile.options import Options
from recompile.planner.finish import made_legal, plan_from
from recompile.timeline import Timeline

from .interpret import RawPartitioner, Traced, interpreted, partitioner
from .programs import LINES, Instruction, Program, example_inputs, numbers, rendered

SEED = 7
EXAMPLES_PER_PROCESS = 250
SEEDS_PER_RUN = 1000  # a part's seed is the run's times this, plus its number
PLANS = ((None, "full"), (None, "stock"), (None, "mincut"), (0.5, "mincut"), (0.0, "mincut"))
NUM_RANDOM_PLANS = 2
TOLERANCE = 1e-4  # of the largest number in a tensor: Inductor's decompositions round differently from eager's kernels
ROUNDED_TOLERANCE = 0.05  # the same with bfloat16 inside
NOISE = 1e-5  # relative; where it moves eager's numbers beyond the tolerance, eager is no measure
SETTINGS = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
)  # fmt: skip

instructions = st.builds(Instruction, st.sampled_from(list(LINES)), st.integers(0, 7), st.integers(0, 7))
programs = st.builds(rendered, st.lists(instructions, min_size=3, max_size=14), st.lists(st.integers(0, 7), max_size=4))
plan_seeds = st.integers(0, 99)


class NotComparable(Exception):
    """Eager PyTorch refuses the program, or no gradient comes of it, or PyTorch cannot trace it."""


@dataclass(frozen=True)
class Outcome:
    """All that a step leaves behind: outputs, gradients, inputs and buffers by name, and the generator's state."""

    values: dict[str, torch.Tensor | None]
    random_state: torch.Tensor


def trained(program: Program, compiled: Callable[[Any], Any] = lambda model: model, noise: int = 0) -> Outcome:
    """One step of training; ``noise`` other than 0 disturbs parameters and inputs by about NOISE."""
    model, (x, y) = program.model(), example_inputs()
    with torch.no_grad():
        for tensor in (x, y, *model.parameters(), model.stat, model.state):
            tensor *= 1 + (NOISE * numbers(*tensor.shape, start=1000 * noise) if noise else 0)
    torch.manual_seed(SEED)
    h = y * 0.9
    outputs = compiled(model)(x, y, h)
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        raise NotComparable("no output wants a gradient")
    torch.autograd.backward(differentiable, [numbers(*output.shape, start=17) for output in differentiable])
    values = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    values |= {"input x": x, "input h": h.detach(), "gradient of y": y.grad}
    values |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    values |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return Outcome(values, torch.get_rng_state())


def check(program: Program, fallback_random: bool, plan_seed: int) -> None:
    """Raises AssertionError where a plan changes what the step leaves behind, NotComparable where there is no step."""
    try:
        with warnings.catch_warnings():  # eager writes to memory that elements share; AOTAutograd does otherwise
            warnings.filterwarnings("error", message="Use of .* on expanded tensors is deprecated")
            eager = trained(program)
    except (RuntimeError, IndexError, UserWarning) as error:
        raise NotComparable(f"eager: {str(error)[:60]}") from None
    torch._dynamo.reset()
    backend = interpreted(partitioner(0.0), fallback_random)
    try:
        actual = trained(program, lambda model: torch.compile(model, backend=backend))
    except Exception as error:
        if by_pytorch(program, fallback_random) is not None:
            raise
        raise NotComparable(f"PyTorch: {str(error)[:60]}") from None
    if fallback_random or not program.is_random:
        assert_like_eager(program, actual, eager)
    for graph in backend.graphs:
        if graph.tangents:
            check_plans(graph, plan_seed)


def by_pytorch(program: Program, fallback_random: bool) -> Outcome | None:
    """The step where PyTorch's own partitioner splits the graphs; None where it does not run."""
    torch._dynamo.reset()
    backend = interpreted(min_cut_rematerialization_partition, fallback_random)
    try:
        return trained(program, lambda model: torch.compile(model, backend=backend))
    except Exception:
        return None


def assert_like_eager(program: Program, actual: Outcome, eager: Outcome) -> None:
    different = differences(program, actual, eager)
    if not different:
        is_left_alike = torch.equal(actual.random_state, eager.random_state)
        if not is_left_alike and program.is_random:  # a draw that nobody reads is dropped, whoever splits the graph
            pytorch = by_pytorch(program, fallback_random=True)
            is_left_alike = pytorch is not None and torch.equal(actual.random_state, pytorch.random_state)
        assert is_left_alike, "the generator is left in another state than eager's and PyTorch's"
        return
    disturbed = [trained(program, noise=noise) for noise in (1, 2, 3)]
    unstable = {name for other in disturbed for name in differences(program, other, eager)}
    different = [name for name in different if name not in unstable]
    if different and program.is_random:  # AOTAutograd draws into a strided tensor in another order than eager
        pytorch = by_pytorch(program, fallback_random=True)
        different = list(different if pytorch is None else set(different) & set(differences(program, actual, pytorch)))
    assert not different, f"unlike eager: {', '.join(different)}\n{actual.values}\n{eager.values}"


def differences(program: Program, actual: Outcome, expected: Outcome) -> list[str]:
    tolerance = ROUNDED_TOLERANCE if program.is_rounded else TOLERANCE
    return [name for name, value in expected.values.items() if not are_close(actual.values[name], value, tolerance)]


def are_close(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> bool:
    if actual is None or expected is None:
        return all(value is None or not value.any() for value in (actual, expected))
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.is_floating_point() or expected.numel() == 0:
        return torch.equal(actual, expected)
    allowed = tolerance * max(1.0, float(expected.nan_to_num(0, 0, 0).abs().max()))
    return torch.allclose(actual, expected, rtol=0, atol=allowed, equal_nan=True)


def check_plans(graph: Traced, plan_seed: int) -> None:
    """Every plan leaves the bits that saving everything leaves."""
    reference = replayed(graph, partitioner(None, "save_all"))
    plans = {f"{planner} at {budget}": partitioner(budget, planner) for budget, planner in PLANS}
    for number in range(NUM_RANDOM_PLANS):
        plans[f"random plan {number}"] = random_partitioner(NUM_RANDOM_PLANS * plan_seed + number)
    for name, plan in plans.items():
        values = replayed(graph, plan)
        for kind, expected in reference.items():
            for i, (value, right) in enumerate(zip(values[kind], expected, strict=True)):
                assert same_bits(value, right), f"{name}: {kind} {i} is not that of save_all\n{value}\n{right}"


def replayed(graph: Traced, plan: RawPartitioner) -> dict[str, list[Any]]:
    """What a step of the graph returns and leaves behind, the generator's state included."""
    partition = graph.joint.partitioned(plan)
    states = []
    run_backward = partition.run_backward

    def run_backward_and_look(args: list[Any]) -> Any:
        gradients = run_backward(args)
        states.append(torch.get_rng_state())
        return gradients

    partition.run_backward = run_backward_and_look
    step = partition.step(graph.primals, graph.tangents, graph.random_state)
    return {"output": step.outputs, "gradient": step.gradients, "input": step.primals, "random state": states}


def same_bits(actual: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return type(actual) is type(expected) and actual == expected
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    return torch.equal(bits(actual), bits(expected))


def bits(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype).copy_(value).reshape(-1).view(torch.uint8)


def random_partitioner(seed: int) -> Partitioner:
    """The partitioner of this backend with a plan drawn at random."""

    def random_plan(joint: JointGraph, hardware: Hardware, budget: Budget) -> Plan:
        return drawn_plan(joint, hardware, seed)

    return Partitioner(Options.parse({"memory_budget": None, "planner": random_plan}))


def drawn_plan(joint: JointGraph, hardware: Hardware, seed: int) -> Plan:
    """A plan that keeps any of the values that forward can hand to backward."""
    numbers_ = random.Random(seed)
    timeline, flow = Timeline(joint, hardware), dataflow_of(joint)
    share = numbers_.choice((0.1, 0.3, 0.6))
    drawn = [i for i in range(len(flow.nodes)) if flow.side[i] is not Side.BACKWARD and numbers_.random() < share]
    saved = made_legal(joint, flow, frozenset(drawn))
    return plan_from(timeline, saved, timeline.simulate(saved), {})


def fuzz(examples: int, seed: int | None = None) -> Counter[str]:
    """Check this many programs, always the same ones unless there is a seed. Returns what became of them."""
    seen: Counter[str] = Counter()

    @settings(SETTINGS, max_examples=examples, derandomize=seed is None)
    @given(programs, st.booleans(), plan_seeds)
    def every_plan_is_right(program: Program, fallback_random: bool, plan_seed: int) -> None:
        note(f"{program.source}\n{fallback_random=} {plan_seed=}")
        try:
            check(program, fallback_random or not program.is_random, plan_seed)
            seen["checked"] += 1
        except NotComparable as reason:
            seen[str(reason)] += 1

    if seed is not None:
        every_plan_is_right = with_seed(seed)(every_plan_is_right)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread gains nothing on tensors of a few numbers
    try:
        every_plan_is_right()
    finally:
        torch.set_num_threads(num_threads)
        torch._dynamo.reset()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    started = time.perf_counter()
    seen: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    num_parts = -(-asked.examples // EXAMPLES_PER_PROCESS)
    for part in range(num_parts):
        with context.Pool(1) as pool:
            seed = SEEDS_PER_RUN * asked.seed + part
            seen += pool.apply(fuzz, (min(EXAMPLES_PER_PROCESS, asked.examples - sum(seen.values())), seed))
        print(f"{sum(seen.values())} examples, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    print(f"seed {asked.seed}: {sum(seen.values())} examples in {seconds:.0f} s, torch {torch.__version__}")
    for what, count in seen.most_common():
        print(f"{count:6} {what}")


if __name__ == "__main__":
    main()
