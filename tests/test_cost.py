import pytest
import torch

import recompile
from recompile.cost import roofline_seconds
from recompile.hardware import Hardware
from recompile.joint import Kind, Work
from recompile.options import Options
from tests.notation import CHAIN, annotated

HARDWARE = Hardware(
    name="round",
    flop_per_s={"float32": 1e12, "bfloat16": 10e12},
    vector_flop_per_s=0.5e12,
    byte_per_s=1e9,
    host_byte_per_s=1e8,
    memory_bytes=10**9,
    launch_s=1e-6,
    source="round numbers",
)


def seconds(work, kind, dtype=torch.float32):
    return roofline_seconds(work, HARDWARE, dtype, kind)


@pytest.mark.parametrize("kind", [Kind.INPUT, Kind.VIEW, Kind.VALUE, Kind.OUTPUT])
def test_what_runs_nothing_takes_no_time(kind):
    assert seconds(Work(10**12, 10**9, 10**9), kind) == 0.0


def test_a_library_call_bound_by_arithmetic_runs_at_the_matmul_rate_of_its_dtype():
    work = Work(10**12, 1000, 1000)
    assert seconds(work, Kind.EXTERN) == pytest.approx(1 + 1e-6)
    assert seconds(work, Kind.EXTERN, torch.bfloat16) == pytest.approx(0.1 + 1e-6)


@pytest.mark.parametrize("kind", [Kind.EXTERN, Kind.POINTWISE, Kind.REDUCTION])
def test_an_op_bound_by_memory_takes_as_long_as_what_it_reads_and_writes(kind):
    assert seconds(Work(1000, 10**9, 10**9), kind) == pytest.approx(2 + 1e-6)


@pytest.mark.parametrize("kind", [Kind.POINTWISE, Kind.REDUCTION])
def test_generated_code_runs_at_the_vector_rate_whatever_its_dtype(kind):
    assert seconds(Work(10**12, 8, 8), kind, torch.bfloat16) == pytest.approx(2 + 1e-6)


def test_an_op_that_does_nothing_still_takes_a_launch():
    assert seconds(Work(0, 0, 0), Kind.POINTWISE) == 1e-6


# A cost model of the user's own


def twice(node, note, hardware):
    return 2 * note.seconds


def test_a_cost_model_prices_library_calls_and_nothing_else():
    text = "x = input 4x8\nw = param 8x8\na = mm x w\ne = exp a\nt = tangent 4x8\ng = mul t e\nreturn e | g"
    plain = annotated(text)
    dear = plain.priced_for(plain.hardware, cost=twice)
    changed = {node.name: dear.notes[node].seconds / note.seconds for node, note in plain.notes.items() if note.seconds}
    assert changed == {"a": 2.0, "e": 1.0, "g": 1.0}


def test_a_plan_follows_the_cost_model():
    """Where matmuls cost nothing, e is rebuilt by one: it peaks at 384 bytes and not at 512."""
    joint = annotated(CHAIN)
    assert recompile.plan(joint).peak_bytes == 512
    assert recompile.plan(joint, cost=lambda node, note, hardware: 0).peak_bytes == 384


@pytest.mark.parametrize("answer", [-1.0, float("nan"), None, True])
def test_an_answer_that_is_no_number_of_seconds_is_refused_with_the_op(answer):
    joint = annotated("x = input 4x8\nw = param 8x8\na = mm x w\nt = tangent 4x8\ng = mm t w'\nreturn a | g")
    with pytest.raises(recompile.OptionError, match=r"for a \(aten\.mm\.default\); it must give seconds, 0 or more"):
        recompile.plan(joint, cost=lambda node, note, hardware: answer)


def test_a_cost_model_that_is_no_function_is_refused():
    with pytest.raises(recompile.OptionError, match="cost=3 is not accepted"):
        Options.parse({"cost": 3})


def test_cost_models_have_cache_keys_of_their_own():
    keys = {Options.parse({"cost": cost}).fingerprint(HARDWARE) for cost in (None, twice)}
    assert len(keys) == 2
    assert keys == {Options.parse({"cost": cost}).fingerprint(HARDWARE) for cost in (None, twice)}
