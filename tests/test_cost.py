import pytest
import torch

from recompile.cost import roofline_seconds
from recompile.hardware import Hardware
from recompile.joint import Kind, Work

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
