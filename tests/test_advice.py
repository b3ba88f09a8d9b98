"""What a report advises, and when it keeps silent."""

from dataclasses import replace

import pytest

from recompile.report.advice import advice_for, highest_peak
from recompile.report.explanation import Explanation
from tests.test_report import report_of

SCORES = """
    x = input 256x16
    w = param 16x4096
    y = mm x w @model.py:3
    m = amax y [1] True @model.py:4
    s = sub y m @model.py:4
    i = input 256x1 int64
    p = gather s 1 i @model.py:4
    t = tangent 256x1
    g = mul s t
    gw = mm x' g
    return p | gw
"""


def advice(*graphs):
    return [str(advice) for advice in advice_for(Explanation(graphs))]


def test_scores_that_fill_the_peak_are_named_with_the_line_of_the_loss():
    (text,) = advice(report_of(SCORES, planner="save_all"))
    assert text.startswith("The scores of 4096 classes (logits, their copies and gradients) are ")
    assert "of backward's peak" in text or "of forward's peak" in text
    assert "(model.py:" in text


def test_scores_beside_something_larger_are_not():
    """A hidden layer of 4096 before 16 classes."""
    hidden = SCORES.replace("16x4096", "4096x16").replace("y = mm x w", "h = exp x\ny = mm h w")
    text = hidden.replace("256x16", "256x4096").replace("gw = mm x' g", "gw = mm h' g")
    assert advice(report_of(text, planner="save_all")) == []


ATTENTION = """
    q = input 2x64x8
    k = input 2x8x64
    v = input 2x64x8
    s = bmm q k
    m = mul s 0.35
    x = amax m [-1] True
    d = sub m x
    e = exp d @model.py:7
    n = sum.dim_IntList e [-1] True
    p = div e n
    y = bmm p v
    t = tangent 2x64x8
    vt = transpose.int v 1 2
    gp = bmm t vt
    gs = mul gp p
    gq = bmm gs q
    return y | gq None None
"""


def test_attention_that_is_written_out_is_named_with_the_fused_one_and_the_line_of_its_softmax():
    text = advice(report_of(ATTENTION, planner="save_all"))[0]
    assert "is_causal or attn_mask takes the place of a mask that is written out, its dropout_p that of dropout" in text
    assert text.startswith("Attention is written out: its scores and what is made of them, [..., 64, 64] for each head")
    assert "(model.py:7) torch.nn.functional.scaled_dot_product_attention computes the same" in text


def test_a_mask_that_is_added_to_the_scores_changes_nothing():
    """It is made by ops that no attention kernel has, and as large as the scores of one head."""
    mask = """
        i = input 2x64x64 int64
        b = bitwise_and.Scalar i 1
        c = eq.Scalar b 0
        z = full [2,64,64] 0.0
        r = full [2,64,64] -9.0
        f = where.self c z r
        a = mul s 0.35
        m = add a f
    """
    text = ATTENTION.replace("    m = mul s 0.35", mask)
    assert "Attention is written out" in advice(report_of(text, planner="save_all"))[0]


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("m = mul s 0.35", "m = tanh s"),  # no fused kernel caps scores
        (
            "m = mul s 0.35",
            "w = param 9x1\ni = input 64x64 int64\nb = embedding w i\nc = squeeze.dim b -1\nm = add s c",
        ),
        ("return y |", "return y p |"),  # the caller wants the weights
        ("y = bmm p v", "y = mul p 2.0\nz = sum.dim_IntList v [-1]"),  # no second product
        ("s = bmm q k", "s = add q k"),
    ],
)
def test_attention_that_no_fused_kernel_can_do_is_not(written, instead):
    text = ATTENTION.replace(written, instead)
    if instead == "s = add q k":
        text = text.replace("2x64x8", "2x64x64").replace("2x8x64", "2x64x64")
    if "y = mul p" in instead:
        text = text.replace("t = tangent 2x64x8", "t = tangent 2x64x64").replace("gp = bmm t vt", "gp = mul t p")
    assert not any("Attention" in sentence for sentence in advice(report_of(text, planner="save_all")))


def test_attention_beside_something_larger_is_not():
    """Scores of 16 KiB each beside hidden values of 2 MiB."""
    text = ATTENTION.replace("y = bmm p v", "h = input 512x1024\nu = exp h\ny = bmm p v")
    text = text.replace("t = tangent 2x64x8", "t = tangent 2x64x8\nr = tangent 512x1024").replace(
        "gq = bmm gs q", "gq = bmm gs q\nw = mul r u"
    )
    text = text.replace("return y | gq None None", "return y u | gq None None w")
    assert advice(report_of(text, planner="save_all")) == []


def test_a_graph_break_is_named_with_its_line(kept):
    (text,) = advice(replace(kept, ended_by="model.py:3: a print"))
    assert text.startswith("A graph ends at a graph break: a print. (model.py:3) Each graph is planned on its own")


def test_an_opaque_op_that_pins_memory_is_named_with_its_line(kept):
    reason = "a custom op (my::op) that may hide state; see recompile.register_op"
    rows = [replace(row, cannot_recompute=reason) if row.name == "e" else row for row in kept.values]
    (text,) = advice(replace(kept, values=tuple(rows)))
    assert text == (
        "128 B are kept because my::op may hide state and is not run twice. (train/model.py:4) If it is a function of "
        "its inputs alone, say so: recompile.register_op(op, recompute=True, flop=...)."
    )


def test_the_smallest_peak_is_said_to_be_it(rebuilt, kept):
    text = advice(rebuilt)[0]
    assert text.startswith("The peak of 384 B, reached in backward at ")
    assert "is the smallest that was found. By this model no plan's can be below 384 B." in text
    assert advice(kept) == []


def test_the_text_for_terminals_has_the_advice(rebuilt):
    assert "\nadvice: The peak of 384 B" in str(Explanation((rebuilt,)))


def test_a_peak_that_both_phases_reach_is_the_steps(kept):
    forward, backward = kept.peaks
    assert highest_peak(replace(kept, peaks=(forward, replace(backward, live_bytes=forward.live_bytes))))[1] == (
        "the step's peak"
    )
    higher = replace(backward, live_bytes=2 * forward.live_bytes)
    assert highest_peak(replace(kept, peaks=(forward, higher))) == (higher, "backward's peak, the highest")
