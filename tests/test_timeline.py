"""Live bytes while each kernel runs, counted by hand beside each graph. 4 x 8 floats are 128 bytes, 8 x 8 are 256."""

from dataclasses import replace

import pytest

from recompile.timeline import Timeline, recomputed_ops
from tests.notation import CHAIN, H100, annotated


def timeline_of(text, device="meta", hardware=H100):
    return Timeline(annotated(text, device=device), hardware)


def indices(flow, text):
    return frozenset(i for i, node in enumerate(flow.nodes) if node.name in text.split())


def simulate(text, saved="", device="meta", hardware=H100):
    timeline = timeline_of(text, device, hardware)
    return timeline, timeline.simulate(indices(timeline.flow, saved))


def lives(text, saved="", device="meta", hardware=H100):
    """``kernel=bytes`` for every kernel, named by its first op; forward | backward."""
    timeline, simulation = simulate(text, saved, device, hardware)
    phases = (
        " ".join(f"{timeline.flow.nodes[m.node].name}={m.live_bytes}" for m in simulation.moments if m.phase == phase)
        for phase in ("forward", "backward")
    )
    return " | ".join(phases).strip()


# Forward


def test_temporaries_die_after_their_last_use_and_saved_values_stay():
    text = "x = input 4x8\nw = param 8x8\na = mm x w\nb = mm a w\nc = mm b w\nreturn c |"
    # a; a b; then a is gone: b c
    assert lives(text) == "a=128 b=256 c=256 |"
    # a saved: a; a b; a b c
    assert lives(text, saved="a") == "a=128 b=256 c=384 |"


def test_inlined_values_take_no_memory():
    assert lives("x = input 4x8\na = sin x\nb = exp a\ny = cos b\nreturn y |") == "y=128 |"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_is_computed_from_nothing_is_stored_at_the_end_and_read_by_no_loop(device):
    """Inductor returns it from a kernel of its own; a library call needs it before, and loops compute it even then."""
    mask = "x = input 4x8\nw = param 8x8\nf = full_like x 0.5\nm = exp f\na = mm x w\ny = mul a m\nreturn y |"
    assert lives(mask, saved="", device=device) == "a=128 y=128 |"
    assert lives(mask, saved="m", device=device) == "a=128 y=128 m=256 |"
    timeline, simulation = simulate(mask, "m", device)
    moved = {
        timeline.flow.nodes[m.node].name: (m.seconds - H100.launch_s) * H100.byte_per_s for m in simulation.moments
    }
    assert moved["y"] == pytest.approx(256)  # a is read and y written
    called = mask.replace("return y", "z = mm m w\nreturn y z")
    assert lives(called, saved="", device=device) == "m=128 a=256 y=256 z=384 |"


def test_on_the_cpu_a_program_runs_in_the_graphs_order_where_a_calls_argument_would_be_stored_late():
    """The two sums are one loop, which begins at the first: Inductor calls what it needs, c and z, before e."""
    text = """
        x = input 8x8
        w = param 8x8
        a = mul x x
        b = mm x w
        y = mm a b'
        s = sum y [0] True
        e = mm y w'
        c = mm y w
        z = mm c w
        v = add y z
        r = sum v [0] True
        return s e r |
    """
    # a; a b; a b y; y e; y e c; y e c z; y e z and both sums, 32 bytes each
    assert lives(text, device="cpu") == "a=256 b=512 y=768 e=512 c=768 z=1024 s=832 |"
    in_time = text.replace("a = mul x x", "").replace("y = mm", "a = mul x x\n        y = mm")
    # b; b a; b a y; y c; y c z; y z and the sums; y e and the sums
    assert lives(in_time, device="cpu") == "b=256 a=512 y=768 c=512 z=768 s=576 e=576 |"


def test_what_is_accumulated_into_zeros_takes_their_place_unless_they_are_read_again():
    text = """
        i = input 4 int64
        v = input 4x8
        z = full [16,8] 0.0
        g = index_put z [i] v True
        return g |
    """
    assert lives(text, device="cpu") == "z=512 g=512 |"
    assert lives(text.replace("return g", "h = mm z v'\n return g h"), device="cpu") == "z=512 g=1024 h=1280 |"


TWO_RESULTS = """
    x = input 4x8
    e = exp x
    d = native_dropout e 0.3 True
    a = getitem d 0
    m = getitem d 1
    y = sin a
    t = tangent 4x8
    g = mul t a
    k = mul g e
    c = prims.convert_element_type m torch.float32
    h = mul k c
    return y | h
"""


def test_an_op_that_runs_again_for_one_result_drops_the_one_that_was_saved():
    """Backward starts with a, y and t, 384. It makes e; then m, 32 bytes, and for a moment a second a."""
    assert lives(TWO_RESULTS, saved="a") == "e=128 d=288 y=256 | e=512 d=672 h=544"
    assert lives(TWO_RESULTS, saved="a m") == "e=128 d=288 y=288 | h=416"


def test_who_reads_the_saved_result_does_not_wait_for_the_op_that_makes_it_again():
    """k shares a loop with e, which d reads; if k had to wait for d there would be no order. k takes a's place: y, t, e
    and k, 512; then y, k, e, m and a second a; then y, k, m and h."""
    assert lives(TWO_RESULTS.replace("| h", "| k h"), saved="a") == "e=128 d=288 y=256 | e=512 d=544 h=416"


def test_what_only_its_kernel_reads_takes_no_memory_where_rows_stay_in_registers_or_are_held_one_at_a_time():
    """y alone; C++ holds a row of e for its second loop, but m and z, 16 bytes each, are in memory."""
    text = "x = input 4x8\nm = amax x [1] True\ns = sub x m\ne = exp s\nz = sum e [1] True\ny = div e z\nreturn y |"
    assert (lives(text), lives(text, device="cpu")) == ("m=128 |", "m=160 |")


def test_on_the_cpu_random_numbers_and_sums_read_in_another_loop_are_in_memory():
    """r is drawn by flat index, in a loop of its own; the sum of p, 16 bytes, is read in a loop beside it; y is written
    over r."""
    text = """
        x = input 4x8
        s = input - int64
        r = prims.inductor_random [4,8] s 'rand'
        p = add x r
        m = sum p [1] True
        y = div r m
        return y |
    """
    assert (lives(text), lives(text, device="cpu")) == ("r=128 |", "r=128 m=144 |")


def test_on_the_cpu_what_dies_in_a_loop_is_freed_when_a_library_call_follows():
    """b sums a's columns, 32 bytes, and d has 1,024. On a GPU a, 128 bytes, is freed between the two; in C++ both loops
    are one function, and a is freed after that."""
    text = """
        x = input 4x8
        w = param 8x8
        v = input 32x1
        a = mm x w
        b = sum a [0] True
        d = mul b v
        e = mm d w
        return e |
    """
    assert lives(text) == "a=128 b=160 d=1056 e=2048 |"
    assert lives(text, device="cpu") == "a=128 b=160 d=1184 e=2048 |"


@pytest.mark.parametrize(
    ("length", "counts_spills", "moved_rows"), [(1024, True, 2), (2048, True, 4), (2048, False, 2)]
)
def test_what_a_kernel_spills_it_writes_and_reads_again(length, counts_spills, moved_rows):
    """x is read and y written; rows of 2048 are summed in a loop, and r, which has to be there after it, spilled. Its
    bytes, beside those of y and m, are there whether its traffic is counted or not."""
    text = f"""
        x = input 512x{length}
        s = input - int64
        r = prims.inductor_random [512,{length}] s 'rand'
        p = add x r
        m = sum p [1] True
        y = div r m
        return y |
    """
    timeline = Timeline(annotated(text, device="meta"), replace(H100, counts_spills=counts_spills))
    (kernel,) = timeline.simulate(frozenset()).moments
    moved_bytes = moved_rows * 512 * length * 4 + 8  # and the seed
    assert kernel.seconds == pytest.approx(moved_bytes / H100.byte_per_s + H100.launch_s)
    assert kernel.live_bytes == 512 * length * 4 * (2 if length == 2048 else 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = mm x w\ny = sin a\nreturn y |", "a=128 y=128"),  # y takes the place of a
        ("y = sin x\nreturn y |", "y=128"),  # not that of an input: it is not counted, y is
        ("a = mm x w\ny = mm a w\nreturn y |", "a=128 y=256"),  # a library call writes elsewhere
        ("a = mm x w\ny = sum a [1]\nreturn y |", "a=128 y=144"),  # 4 floats do not fit exactly
        ("a = mm x w\ny = sin a\nz = mm a w\nreturn y z |", "a=128 y=256 z=384"),  # a is read later
        ("a = mm x w\ny = sin a\nz = cos a\nreturn y z |", "a=128 y=384"),  # z reads a too, in the same kernel
        ("a = mm x w\ny = sin a\nz = add a y\nreturn y z |", "a=128 y=256"),  # z is last: y before it has read a
        ("a = mm x w\ny = sin a\nreturn a y |", "a=128 y=256"),  # a is an output
    ],
)
def test_a_result_takes_the_place_of_an_input_that_dies_with_it(text, expected):
    assert lives(f"x = input 4x8\nw = param 8x8\n{text}") == f"{expected} |"


def test_inductors_estimate_counts_results_beside_what_they_are_written_over_and_what_fusion_removed():
    text = "x = input 4x8\nw = param 8x8\na = mm x w\nm = sum a [1] True\ny = div a m\nz = mm y w\nreturn z |"
    assert lives(text) == "a=128 m=128 z=256 |"  # y takes the place of a, m stays in the kernel
    estimate = replace(H100, counts_fused=True)
    assert lives(text, hardware=estimate) == "a=128 m=272 z=256 |"  # a, m (4 floats) and y


def test_a_result_that_nothing_reads_dies_at_once():
    text = "x = input 4x8\nw = param 8x8\nk = topk x 2\ni = getitem k 0\nj = getitem k 1\ny = mm i' x\nreturn y |"
    # i: 4 x 2 floats, 32 bytes; j: 4 x 2 integers, 64 bytes; y: 2 x 8 floats, 64 bytes beside i
    assert lives(text) == "k=96 y=96 |"


# Backward


def test_saved_values_and_tangents_die_after_their_last_use_in_backward():
    # forward: a; e in the place of a; e y. Backward holds y (an output), e, t:
    # y e t g2 = 512; t is gone, g3 takes a place: y e g2 = 384; y g3 g4 = 384
    assert lives(CHAIN, saved="e") == "a=128 e=128 y=256 | g2=512 g3=384 g4=384"


def test_a_rebuilt_value_lives_from_where_it_is_rebuilt():
    # forward keeps y alone at its end. Backward: y t g2 = 384; y g2 a = 384 (e is inlined into g3); y g2 a with g3 in
    # the place of one of them = 384; y g3 g4 = 384
    assert lives(CHAIN) == "a=128 e=128 y=256 | g2=384 a=384 g3=384 g4=384"


def test_a_gradient_is_held_to_the_end():
    text = CHAIN.replace("g2 = mm t w'", "gw = mm x' t\ng2 = mm t w'").replace("| g4", "| gw g4")
    # the lines of the test before last, with gw (256) beside: y e t gw = 640; then 512 + 256; 384 + 256; 384 + 256
    assert lives(text, saved="e") == "a=128 e=128 y=256 | gw=640 g2=768 g3=640 g4=640"


def test_the_memory_of_a_tangent_is_not_overwritten():
    text = "x = input 4x8\ny = sin x\nt = tangent 4x8\ng = mul t 2\nreturn y | g"
    assert lives(text) == "y=128 | g=384"  # y, t, g: Inductor writes in place only over what backward owns


def test_a_tangent_that_is_returned_as_a_gradient_is_held_to_the_end():
    text = """
        x = input 4x8
        z = input 4x8
        y = add x z
        t = tangent 4x8
        b = mm t' t        # 8 x 8
        g = mm t b         # 4 x 8, the last that reads t
        h = mm g b
        return y | t h
    """
    # y t b = 512; y t b g = 640; t stays: y t b g h = 768
    assert lives(text) == "y=128 | b=512 g=640 h=768"


def test_each_phase_has_its_own_peak():
    text = """
        x = input 4x8
        u = param 8x64
        a = mm x u          # 4 x 64: 1024 bytes
        y = mm a u'         # 4 x 8
        t = tangent 4x8
        w = param 8x8
        g = mm t w
        return y | g
    """
    _, simulation = simulate(text)
    assert (simulation.peak_of("forward"), simulation.peak_of("backward")) == (1024 + 128, 128 * 3)
    assert simulation.peak_bytes == 1024 + 128


# What is handed over


def test_outputs_and_inputs_are_not_counted_as_saved():
    assert simulate(CHAIN, saved="e")[1].saved_bytes == 128
    assert simulate(CHAIN, saved="e y")[1].saved_bytes == 128
    assert simulate(CHAIN, saved="a e")[1].saved_bytes == 256


def test_a_saved_base_counts_once_for_all_its_views():
    text = """
        x = input 4x8
        w = param 8x8
        a = mm x w
        s = split a 2
        p = getitem s 0
        q = getitem s 1
        y = sum.default a
        t = tangent 2x8
        g = mul t p
        h = mul g q
        return y | h
    """
    timeline, simulation = simulate(text, saved="a")
    assert simulation.saved_bytes == 128
    assert recomputed_ops(timeline.flow, indices(timeline.flow, "a")) == []  # views are no recomputation


def test_what_runs_only_in_backward_is_no_recomputation():
    text = "x = input 4\na = sin x\nt = tangent 4\nb = cos x\nc = mul a b\ng = mul t c\nreturn a | g"
    timeline = timeline_of(text)
    flow = timeline.flow
    again = {saved: recomputed_ops(flow, indices(flow, saved)) for saved in ("", "a", "c")}
    assert {saved: [flow.nodes[i].name for i in ops] for saved, ops in again.items()} == {"": ["a"], "a": [], "c": []}


# Seconds on planner-h100: 3 TB/s, 700 TFLOP/s, 2 us a kernel


def test_a_fused_chain_moves_its_input_and_its_output_only():
    text = "x = input 1024x1024\na = sin x\nb = exp a\ny = cos b\nreturn y |"
    assert simulate(text)[1].step_seconds == pytest.approx(2 * 2**22 / 3e12 + 2e-6)


def test_a_library_call_takes_its_own_seconds():
    text = "x = input 1024x1024\na = mm x x\nreturn a |"
    # 2**31 FLOP, 3.1 us; 2 x 4 MiB moved, 2.8 us
    assert simulate(text)[1].step_seconds == pytest.approx(2**31 / 700e12 + 2e-6)


def test_arithmetic_decides_for_a_kernel_with_enough_of_it():
    names = [f"a{i}" for i in range(60)]
    steps = [f"{name} = sin {before}" for name, before in zip(names, ["x", *names], strict=False)]
    text = "\n".join(["x = input 1024x1024", *steps, "return a59 |"])
    # 60 sines of 20 FLOP an element: 1200 x 2**20 FLOP are 1.8 us, 8 MiB are 2.8 us; at a tenth of the rate 18 us
    slow = type(H100)(**{**H100.to_json(), "vector_flop_per_s": 70e12})
    assert Timeline(annotated(text, slow), slow).simulate(frozenset()).step_seconds == pytest.approx(
        1200 * 2**20 / 70e12 + 2e-6
    )


def test_sizes_cost_no_time():
    text = "x = input {}x8\nn = sym_size.int x 0\nk = operator.mul n 8\na = sin x\ny = view a [k]\nreturn y |"
    static = "x = input 4x8\na = sin x\ny = view a [32]\nreturn y |"
    assert simulate(text.format("s4"))[1].step_seconds == simulate(static)[1].step_seconds


def test_a_convolution_on_the_cpu_keeps_channels_last_copies_of_its_inputs_for_backward():
    text = """
        x = input 2x3x8x8
        w = param 4x3x3x3
        y = convolution x w None [1,1] [1,1] [1,1] False [0,0] 1
        t = tangent 2x4x8x8
        g = convolution_backward t x w None [1,1] [1,1] [1,1] False [0,0] 1 [False,True,False]
        gw = getitem g 1
        return y | gw
    """
    graph = annotated(text)
    timeline = Timeline(graph, H100)
    # x is 2 x 3 x 8 x 8 x 4 = 1,536 bytes, w is 4 x 27 x 4 = 432; y is an output, allocated anyway
    assert timeline.simulate(frozenset()).saved_bytes == 1536 + 432


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_scalar_may_be_reduced_over_a_dimension_it_does_not_have(device):
    text = """
        x = input 8
        t = tangent -
        e = exp x
        s = select.int e 0 0
        m = max.dim s -1
        v = getitem m 0
        g = mul t e
        return v | g
    """
    assert lives(text, device=device) == lives(text.replace("max.dim s -1", "max.dim s 0"), device=device)
    assert lives(text, device=device)


@pytest.mark.parametrize(("device", "read_bytes", "written_bytes"), [("meta", 32, 32), ("cpu", 32 * 24, 32 * 88)])
def test_masks_take_loops_of_cpp_longer_than_their_bytes(device, read_bytes, written_bytes):
    text = "x = input 4x8\nt = tangent 4x8\nm = gt.Scalar x 0.0\ny = sin x\ng = mul t m\nreturn y | g"
    timeline, simulation = simulate(text, saved="m", device=device)
    forward, backward = (moment.seconds for moment in simulation.moments)
    rate, launch = timeline.hardware.byte_per_s, timeline.hardware.launch_s
    assert forward - launch == pytest.approx((128 + 128 + written_bytes) / rate)  # reads x, writes y and m
    assert backward - launch == pytest.approx((128 + read_bytes + 128) / rate)  # reads t and m, writes g
