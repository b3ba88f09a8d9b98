"""What values are called: only what the graph leaves no doubt about."""

import pytest

from recompile.report.roles import role_of
from tests.test_report import report_of

DROPOUT = """
    x = input 4x8
    s = input 2 int64
    l = prims.inductor_lookup_seed s 0
    r = prims.inductor_random [4,8] l 'rand'
    f = prims.convert_element_type r torch.bfloat16
    b = gt.Scalar f 0.1
    c = prims.convert_element_type b torch.float32
    m = {mask}
    y = mul m 1.1
    t = tangent 4x8
    g = mul t c
    return y | g None
"""
SOFTMAX = """
    x = input 4x8
    e = exp x
    s = sum.dim_IntList {summed} [-1] True
    p = div e s
    h = prims.convert_element_type p torch.bfloat16
    t = tangent 4x8
    g = mul t p
    return h | g
"""
BLOCK = """
    x = input 4x8
    w = param 8x8
    a = exp x
    f = {branch}
    n = sin f
    y = add a n
    t = tangent 4x8
    g = mul t a
    return y | g None
"""


def roles(text):
    return {row.name: row.role for row in report_of(text, planner="save_all").values if row.role}


def test_a_comparison_of_random_numbers_that_something_is_multiplied_by_is_a_dropout_mask():
    assert roles(DROPOUT.format(mask="mul c x")) == {
        "b": "dropout mask", "c": "dropout mask, cast to f32", "m": "masked by dropout",
        "y": "masked by dropout, scaled", "g": "masked by dropout",
    }  # fmt: skip
    text = DROPOUT.format(mask="add c x").replace("g = mul t c", "g = sin t")
    assert roles(text) == {}  # nothing is multiplied by it


def test_an_exponential_over_its_sum_is_a_softmax():
    assert roles(SOFTMAX.format(summed="e")) == {"p": "softmax", "h": "softmax, cast to bf16"}
    assert roles(SOFTMAX.format(summed="x")) == {}


@pytest.mark.parametrize(("branch", "role"), [("mm a w", {"y": "residual sum"}), ("mul a a", {})])
def test_a_residual_sum_has_a_library_call_beside_it_and_a_gelu_is_none(branch, role):
    assert roles(BLOCK.format(branch=branch)) == role


def test_several_results_are_named_by_their_shapes_and_their_op():
    text = """
        x = input 4x8
        v = var_mean.correction x [1] keepdim=True
        o = getitem v 0
        m = getitem v 1
        y = mul o m
        t = tangent 4x1
        g = mul t o
        return y | g
    """
    rows = {row.name: row for row in report_of(text, planner="save_all").values}
    assert roles(text) == {"v": "results 4×1, 4×1", "o": "one result of var_mean", "m": "one result of var_mean"}
    assert role_of(rows["y"]) == ""
