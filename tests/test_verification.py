"""Programs checked against a budget in bytes: by hand-written programs and attempts, and through Inductor."""

import itertools
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import recompile
from recompile.backend import within_budget
from recompile.decide import decide
from recompile.errors import BudgetError
from recompile.joint import Budget
from recompile.occupancy import occupancy_of
from recompile.options import Options
from recompile.records import Record
from recompile.replay import CPU, CUDA, ExternSizes
from recompile.report.explanation import Explanation
from recompile.report.rows import report_graph
from recompile.step_memory import Given, Half, replay_step
from recompile.timeline import Timeline
from recompile.torch_private import Compilation
from recompile.verification import program_bytes, program_over
from tests.notation import CHAIN, H100, annotated, plan_text

# A step's memory


def half(text, *given, results=()):
    source = "def call(self, args):\n" + textwrap.indent(textwrap.dedent(text).strip(), "    ")
    return Half(source, given, ExternSizes(dict(results)))


FORWARD = half(
    """
    x, = args
    args.clear()
    buf0 = empty_strided_cpu((100, ), (1, ), torch.float32)
    kernel(x, buf0)
    buf1 = torch.ops.aten.convolution.default(buf0)
    return (buf1, buf0, )
    """,
    Given(is_saved=True),
    results=[("buf1", (40,))],
)
BACKWARD = half(
    """
    saved, tangent = args
    args.clear()
    buf0 = empty_strided_cpu((100, ), (1, ), torch.float32)
    kernel(saved, tangent, buf0)
    return (buf0, )
    """,
    Given(is_saved=True),
    Given(is_saved=False, tangent_bytes=40),
)


def test_backward_starts_with_what_forward_saved_its_outputs_and_the_tangents():
    run = replay_step(FORWARD, BACKWARD, CPU)
    assert (run.forward.peak_bytes, run.backward.peak_bytes, run.saved_bytes) == (440, 400 + 40 + 40 + 400, 400)
    assert run.peak_bytes == 880


def test_blocks_of_a_gpu_are_rounded_up_and_what_it_has_on_the_cpu_is_not_counted():
    assert replay_step(FORWARD, BACKWARD, CUDA).peak_bytes == 512 + 512  # the convolution's result and the tangent


def test_a_backward_that_takes_more_than_forward_returns_is_refused():
    greedy = replace(BACKWARD, given=(Given(is_saved=True),) * 3)
    with pytest.raises(ValueError, match="forward returns 2 values, backward takes 3"):
        replay_step(FORWARD, greedy, CPU)


def test_what_cannot_be_replayed_is_not_known():
    cpu, unknown = torch.device("cpu"), replace(FORWARD, sizes=ExternSizes())
    assert program_bytes(FORWARD, BACKWARD, cpu) == 880
    assert program_bytes(unknown, BACKWARD, cpu) is None
    assert program_bytes(None, BACKWARD, cpu) is program_bytes(FORWARD, None, cpu) is None
    assert program_bytes(FORWARD, BACKWARD, torch.device("xpu")) is None


# Planned again


def attempts(*errors):
    """Compilations of CHAIN (peaks from 384 to 512 bytes), each program that much above its prediction; all options."""
    remaining, asked = iter(errors), []

    def attempt(options):
        asked.append(options)
        joint = annotated(CHAIN)
        plan, budget = decide(joint, H100, options)
        timeline = Timeline(joint, H100)
        simulation = timeline.simulate(frozenset())
        report = report_graph(
            joint, plan, simulation, occupancy_of(timeline, frozenset(), simulation), planner="mincut",
            hardware="h100", budget="", budget_bytes=budget.peak_bytes, planning_seconds=0.0, sizes=(), limits=(),
        )  # fmt: skip
        error = next(remaining)
        program = None if error is None else plan.peak_bytes + error
        return plan, Record(Compilation(None, None, ""), (replace(report, program_bytes=program),))

    return attempt, asked


def kept_back(asked):
    return [options.kept_back for options in asked]


@pytest.mark.parametrize("error", [None, -100, 0, 8])
def test_a_program_that_keeps_the_budget_or_is_not_known_is_taken(error):
    attempt, asked = attempts(error)
    plan, record = within_budget(attempt, Options(memory_budget=520))
    assert (plan.peak_bytes, kept_back(asked)) == (512, [0])
    assert record.graphs[0].program_bytes == (None if error is None else 512 + error)


def test_what_a_program_takes_beyond_the_budget_is_kept_back_and_planned_again():
    attempt, asked = attempts(30, 30)
    plan, record = within_budget(attempt, Options(memory_budget=520))
    assert (plan.peak_bytes, record.graphs[0].program_bytes) == (384, 414)
    assert kept_back(asked) == [0, 33 - (520 - 514)]  # a tenth more than the 30, less the margin that there was


def test_when_no_plan_fits_what_is_left_the_smallest_has_the_last_word():
    attempt, _ = attempts(140, 10)
    plan, _ = within_budget(attempt, Options(memory_budget=520))  # 520 - 154 is below the smallest
    assert plan.peak_bytes == 384
    attempt, asked = attempts(140, 140, 140)
    with pytest.raises(BudgetError, match=r"the program that Inductor makes of the smallest one needs 524 B") as raised:
        within_budget(attempt, Options(memory_budget=520))
    assert (raised.value.floor_bytes, len(asked)) == (524, 3)


def test_a_share_is_not_checked_and_a_refusal_of_the_budget_itself_stands():
    attempt, asked = attempts(1000)
    assert within_budget(attempt, Options(memory_budget=0.5))[0].peak_bytes == 384
    with pytest.raises(BudgetError, match="388 bytes"):
        within_budget(attempt, Options(memory_budget=380))
    assert kept_back(asked) == [0, 0]


@pytest.mark.parametrize(("needed_bytes", "is_over"), [(10_000, False), (10_005, False), (10_006, True)])
def test_a_program_may_need_a_few_scalars_more_than_the_budget(needed_bytes, is_over):
    graph = SimpleNamespace(program_bytes=needed_bytes)
    assert program_over([graph], Options(memory_budget=10_000)) is (graph if is_over else None)


def test_what_is_kept_back_leaves_the_smallest_plan_and_changes_the_cache_key():
    plan, budget = decide(annotated(CHAIN), H100, Options(memory_budget=520, kept_back=1000))
    assert (plan_text(plan), budget) == ("saved: - | recomputed: a e", Budget(384))
    assert Options(memory_budget=520).fingerprint(H100) != Options(memory_budget=520, kept_back=1).fingerprint(H100)


# Through Inductor: matmuls alone, no C++ is compiled


def matmuls():
    torch.manual_seed(0)
    sizes = [8, 64, 8, 64, 8]
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))


def trained(memory_budget):
    model = matmuls()
    compiled = torch.compile(model, backend="recompile", options={"memory_budget": memory_budget})
    x = torch.ones(16, 8)
    gradients = torch.ones(16, 8)

    def step():
        compiled(x).backward(gradients)

    step()
    measured = recompile.measure(step).peak_bytes
    (graph,) = recompile.explain(compiled).graphs
    return graph, measured


@pytest.mark.usefixtures("fresh_dynamo", "empty_cache")
def test_the_programs_peak_is_shown_and_found_again_with_the_cached_code(partitioner_calls):
    first, measured = trained(2**20)
    assert first.program_bytes is not None
    # here the gradients that exist are added to, outside of the program, and the tangent is the caller's
    assert measured <= first.program_bytes
    assert f"needs {first.program_bytes / 1024:.2f} KiB, by its allocations" in str(Explanation((first,)))
    torch._dynamo.reset()
    second, _ = trained(2**20)
    assert second.program_bytes == first.program_bytes
    assert len(partitioner_calls) == 1


@pytest.mark.usefixtures("fresh_dynamo", "empty_cache")
def test_a_missed_budget_is_planned_again_and_so_it_is_from_a_warm_cache(partitioner_calls, monkeypatch):
    """The first program seems to need 1 KiB more than it does."""
    known = program_bytes

    def pessimistic(forward, backward, device):
        monkeypatch.setattr("recompile.backend.program_bytes", known)
        return known(forward, backward, device) + 1024

    free, _ = trained(2**20)
    budget = free.program_bytes + 512
    monkeypatch.setattr("recompile.backend.program_bytes", pessimistic)
    torch._dynamo.reset()
    again, _ = trained(budget)
    assert partitioner_calls == [2**20, budget, budget]
    assert again.peak_bytes < free.peak_bytes
    torch._dynamo.reset()
    cached, _ = trained(budget)
    assert (cached.peak_bytes, len(partitioner_calls)) == (again.peak_bytes, 3)
