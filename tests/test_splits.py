"""Into how many kernels Inductor splits a reduction: against its own rule, and in the simulator's seconds."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._inductor.choices import InductorChoices

from recompile.chip import CHIPS
from recompile.splits import _column_parts, _row_parts, num_kernels
from recompile.timeline import Timeline
from tests.notation import H100, annotated

CHIP = CHIPS["planner-h100"]


@pytest.mark.parametrize("name", ["h100", "a100-80", "b200"])
@pytest.mark.parametrize("is_row", [True, False])
def test_parts_of_a_reduction_are_those_that_inductor_makes(name, is_row):
    chip = CHIPS[name]
    device = SimpleNamespace(
        multi_processor_count=chip.num_multiprocessors,
        max_threads_per_multi_processor=chip.max_threads_per_multiprocessor,
        warp_size_or_default=32,
        major=chip.capability[0],
    )
    with mock.patch("torch._inductor.choices.DeviceProperties.create", return_value=device):
        for num_results in (1, 7, 128, 132, 200, 1000, 4096):
            for per_result in (33, 256, 1000, 4096, 8193, 32768, 100000, 2**20, 12345678):
                parts = InductorChoices.reduction_split_factor(torch.device("cuda"), per_result, num_results, is_row)
                assert (_row_parts if is_row else _column_parts)(num_results, per_result, chip) == parts


@pytest.mark.parametrize(
    ("num_results", "per_result", "is_row", "is_welford", "expected"),
    [
        (65536, 2048, True, False, 1),  # enough rows to keep the device busy
        (1024, 4096, False, False, 2),  # a bias's gradient
        (128, 32768, False, True, 3),  # a batch norm's variance: the parts' variances are split once more
        (1, 8192, True, False, 1),
        (1, 8193, True, False, 2),
    ],
)
def test_a_reduction_with_few_results_takes_several_kernels(num_results, per_result, is_row, is_welford, expected):
    assert num_kernels(num_results, per_result, is_row, is_welford, CHIP) == expected


def launches(text, device="meta"):
    """Of the kernels of forward, by their first op; nothing moves more than a few bytes."""
    timeline = Timeline(annotated(text, device=device), H100)
    flow, moments = timeline.flow, timeline.simulate(frozenset()).moments
    return " ".join(f"{flow.nodes[m.node].name}={round(m.seconds / H100.launch_s, 1)}" for m in moments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = sum.dim_IntList x [0]\nreturn y |", "y=2.0"),
        ("y = sum.dim_IntList x [0]\nz = sin y\nreturn y z |", "y=2.0 z=0.0"),  # the last kernel of y makes z too
        ("r = param 8 bfloat16\ny = sum.dim_IntList x [0]\nz = copy_ r y\nreturn y z |", "y=2.0 z=0.0"),
        ("y = sum.dim_IntList x [1]\nreturn y |", "y=1.0"),
    ],
)
def test_a_split_reduction_costs_a_launch_more_unless_a_kernel_goes_over_its_results(text, expected):
    assert launches(f"x = input 256x8 bfloat16\n{text}") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the readers of the variance and of the mean share no value, yet both go into the second kernel of both
        ("r = sin v\ns = cos m\nreturn r s |", "v=2.0 r=0.0 s=0.0"),
        ("r = sin v\na = sin q\nb = cos a\ns = mul m a\nreturn r b s a |", "v=2.0 r=0.0 a=0.0"),
        # a matrix product comes in between
        ("r = sin v\na = mm q w\ns = mul m a\nreturn r s |", "v=2.0 r=0.0 a=1.0 s=1.0"),
    ],
)
def test_the_last_kernel_of_a_split_reduction_takes_in_all_readers_that_need_nothing_later(text, expected):
    text = f"""
        x = input 4096x2 bfloat16
        q = input 1x2 bfloat16
        w = param 2x2 bfloat16
        v = var_mean.correction x [0] correction=0 keepdim=True
        v0 = getitem v 0
        m = getitem v 1
        {text.replace("sin v", "sin v0")}"""
    assert launches(text) == expected


def test_on_the_cpu_no_reduction_is_split():
    """One kernel of two loops, where a GPU has two kernels for the sum."""
    assert launches("x = input 256x8\ny = sum.dim_IntList x [0]\nz = sin y\nreturn y z |", "cpu") == "y=1.0"
