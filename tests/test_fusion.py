"""What is stored and what fuses, on graphs of a few ops; kernels as text: ops of one kernel joined by +.

Tensors are on the device "meta", for which the rules of GPUs hold, unless a test says CPU.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompile.cpu_fusion import fuse_on_cpu
from recompile.dataflow import dataflow_of
from recompile.fusion import fuse
from recompile.inlining import fusion_facts, loop_shape, store_ops
from recompile.lifetimes import stored_buffers
from recompile.timeline import is_read_in_place
from tests.notation import annotated


def facts_of(text, device="meta"):
    graph = annotated(text, device=device)
    return fusion_facts(graph, dataflow_of(graph))


def forward_of(facts):
    """Forward as a program, with its outputs kept."""
    flow = facts.flow
    return range(len(flow.nodes)), frozenset(flow.buffer[i] for i in flow.fwd_outputs)


def stored(text, device="meta"):
    """The ops that write memory, each with the buffers that it reads."""
    facts = facts_of(text, device)
    name = [node.name for node in facts.flow.nodes]
    rows = store_ops(facts, *forward_of(facts))
    return ", ".join(f"{name[op.op]}({' '.join(name[b] for b in sorted(op.reads))})" for op in rows)


def kernels_of(facts):
    stored = store_ops(facts, *forward_of(facts))
    return fuse_on_cpu(facts, stored, forward_of(facts)[1]) if facts.loops_run_together else fuse(facts, stored)


def kernels(text, device="meta"):
    facts = facts_of(text, device)
    return " ".join("+".join(facts.flow.nodes[op.op].name for op in kernel.ops) for kernel in kernels_of(facts))


def in_memory(text, device="meta"):
    """The buffers that really occupy memory."""
    facts = facts_of(text, device)
    buffers = stored_buffers(kernels_of(facts), len(facts.flow.nodes), forward_of(facts)[1])
    return " ".join(facts.flow.nodes[buffer].name for buffer in sorted(buffers))


# What is stored


def test_a_chain_of_pointwise_ops_is_one_op_that_reads_the_input():
    text = "x = input 4x8\na = sin x\nb = exp a\ny = cos b\nreturn y |"
    assert stored(text) == "y(primals_1)"
    facts = facts_of(text)
    (only,) = store_ops(facts, *forward_of(facts))
    assert (len(only.members), only.flop) == (3, 3 * 20 * 32)


def test_what_an_extern_reads_is_stored_through_a_view_too():
    text = "x = input 4x8\nw = input 4x2\na = sin x\nb = exp a\nv = t b\ny = mm v w\nz = cos y\nreturn z |"
    assert stored(text) == "b(primals_1), y(primals_2 b), z(y)"


def test_an_inlined_value_makes_its_inputs_those_of_its_readers():
    text = "x = input 4\nu = input 4\na = add x u\nb = sin a\nc = mul a x\nreturn b c |"
    assert stored(text) == "b(primals_1 primals_2), c(primals_1 primals_2)"


COPIED_VIEW = """
    x = input 2x2x8
    u = input 2x2x8
    w = input 8x4
    a = {value}
    v = view a [4,8]
    y = mm v w
    {second}
    z = cos a
    return y z {also}|
"""


@pytest.mark.parametrize(
    ("value", "second", "reads"),
    [
        ("sin x", "vt = t v\n    g = mm vt y", "primals_1"),  # the view is computed from x, and z from x once more
        ("sin x", "g = sum.default a", "a"),  # the product is the view's one reader
        ("sin x", "g = cos v", "primals_1"),
        ("add x u", "vt = t v\n    g = mm vt y", "a"),  # two values go in: stored as soon as it is there
    ],
)
def test_a_view_with_several_readers_that_a_product_reads_is_written_in_place_of_its_value(value, second, reads):
    rows = stored(COPIED_VIEW.format(value=value, second=second, also="g "))
    assert f"z({reads})" in rows
    assert "y(primals_3 a)" in rows


def test_a_value_that_is_an_output_itself_is_in_memory_whatever_reads_a_view_of_it():
    rows = stored(COPIED_VIEW.format(value="sin x", second="vt = t v\n    g = mm vt y", also="g a "))
    assert "z(a)" in rows


def reused(num_inputs):
    """A pointwise value of so many inputs with two readers."""
    lines = [f"x{i} = input 4" for i in range(num_inputs)]
    lines += ["s1 = add x0 x1"] + [f"s{i} = add s{i - 1} x{i}" for i in range(2, num_inputs)]
    last = f"s{num_inputs - 1}"
    return "\n".join([*lines, f"y = sin {last}", f"z = cos {last}", "return y z |"])


def test_a_value_with_several_readers_is_stored_when_it_has_more_than_four_inputs():
    four, five = (" ".join(f"primals_{i + 1}" for i in range(count)) for count in (4, 5))
    assert stored(reused(4)) == f"y({four}), z({four})"
    assert stored(reused(5)) == f"s4({five}), y(s4), z(s4)"


def chain(length, readers):
    lines = ["x = input 4", "a1 = sin x"] + [f"a{i} = sin a{i - 1}" for i in range(2, length + 1)]
    lines += [f"y{i} = cos a{length}" for i in range(readers)]
    return "\n".join([*lines, f"return {' '.join(f'y{i}' for i in range(readers))} |"])


def test_a_value_with_several_readers_is_stored_when_it_takes_more_than_thirty_ops():
    assert stored(chain(30, readers=2)) == "y0(primals_1), y1(primals_1)"
    assert stored(chain(31, readers=2)) == "a31(primals_1), y0(a31), y1(a31)"


def test_a_value_of_more_than_a_hundred_ops_is_stored():
    assert stored(chain(99, readers=1)) == "y0(primals_1)"
    assert stored(chain(101, readers=1)) == "a101(primals_1), y0(a101)"


def test_random_numbers_are_stored_although_they_are_pointwise():
    text = "x = input 4\ns = input - int64\nr = prims.inductor_random [4] s 'rand'\ny = mul x r\nreturn y |"
    assert stored(text) == "r(primals_2), y(primals_1 r)"


def test_what_strides_show_a_view_of_is_stored():
    text = "x = input 32\na = sin x\nv = as_strided a [4,8] [8,1]\ny = cos v\nreturn y |"
    assert stored(text) == "a(primals_1), y(a)"
    assert stored(text.replace("as_strided a [4,8] [8,1]", "view a [4,8]")) == "y(primals_1)"


def test_on_the_cpu_a_reused_exponential_is_stored_and_a_reused_product_is_not():
    exponential = "x = input 4\na = exp x\nb = sin a\nc = cos a\nreturn b c |"
    product = exponential.replace("exp x", "mul x 2")
    assert stored(exponential) == "b(primals_1), c(primals_1)"
    assert stored(exponential, "cpu") == "a(primals_1), b(a), c(a)"
    assert stored(product, "cpu") == "b(primals_1), c(primals_1)"


# What fuses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = sin x\nz = cos x\nreturn y z |", "y+z"),  # share x
        ("u = input 4x8\ny = sin x\nz = cos u\nreturn y z |", "y z"),  # share nothing
        ("y = sin x\nv = slice x 0 0 2\nz = cos v\nreturn y z |", "y z"),  # share x, 32 and 16 elements
        ("y = sum x [1]\nz = sin x\nreturn y z |", "y+z"),  # a row reduction and its rows
        ("y = sum x [1]\nz = sin y\nreturn z y |", "y+z"),  # and its results
        ("y = sum x [0]\nz = sin x\nreturn y z |", "y z"),  # a column reduction
        ("y = sum x [0]\nz = amax x [0]\nreturn y z |", "y+z"),  # two of them
        ("y = sum x [0]\nz = sum x [1]\nreturn y z |", "y z"),
        ("v = view x [2,16]\ny = sum x [1]\nz = sum v [1]\nreturn y z |", "y z"),  # rows of 8 and of 16
        ("m = amax x [1] True\ns = sub x m\ne = exp s\nz = sum e [1] True\ny = div e z\nreturn y |", "m+z+y"),
        ("w = input 8x8\na = mm x w\ny = sin a\nreturn y |", "a y"),  # nothing fuses with a library call
    ],
)
def test_what_shares_memory_and_loops_shares_a_kernel(text, expected):
    assert kernels(f"x = input 4x8\n{text}") == expected


def test_a_kernel_takes_no_op_that_waits_for_another_kernel_which_waits_for_it():
    text = "x = input 8x8\nw = input 8x8\np = sin x\nm = mm p w\nq = add p m\nreturn p q |"
    assert kernels(text) == "p m q"  # p+q would need m, which needs p


def test_a_kernel_runs_after_all_that_its_ops_need():
    text = "x = input 8x8\nw = input 8x8\np = sin x\nm = mm w w\nq = add x m\nreturn p q |"
    assert kernels(text) == "m p+q"  # q joins p, so p waits for m


RANDOM = "s = input - int64\nr = prims.inductor_random [4,8] s 'rand'"


def test_two_kernels_that_an_op_reads_from_become_one():
    """Softmax and dropout: the random numbers share nothing with the row's maximum, the op after them links them."""
    assert kernels(f"x = input 4x8\n{RANDOM}\nm = amax x [1] True\nd = sub x m\ny = mul d r\nreturn y |") == "r+m+y"
    assert kernels(f"x = input 4x8\n{RANDOM}\nm = amax x [1] True\nd = sub x m\ny = sin d\nreturn r y |") == "r m+y"


def test_two_kernels_of_different_loops_stay_two():
    text = f"x = input 4x8\n{RANDOM}\nm = amax x [0] True\nd = sub x m\ny = mul d r\nreturn y |"
    assert kernels(text) == "m r+y"


def test_kernels_between_which_a_library_call_stands_stay_two():
    text = "x = input 8x8\nw = input 8x8\np = sin x\nm = mm p w\nq = sum m [1] True\ny = sub p q\nreturn p y |"
    assert kernels(text) == "p m q+y"


def test_kernels_between_which_another_kernel_stands_stay_two():
    text = f"x = input 4x8\n{RANDOM}\np = sin x\nc = sum p [0] True\na = add r c\ny = add a p\nreturn p y |"
    assert kernels(text) == "p c r+y"


def test_of_two_kernels_that_become_one_the_ops_of_the_one_that_the_other_needs_come_first():
    """y joins p and m, with which it shares as much as with q and z, so what it reads of q and z has to be there."""
    text = """
        x = input 4x8
        s = input - int64
        p = prims.inductor_random [4,8] s 'rand'
        m = amax p [1] True
        q = prims.inductor_random [4,8] s 'rand'
        z = sum q [1] True
        d = sub p m
        e = sub q z
        y = mul d e
        return y |
    """
    assert kernels(text) == "q+z+p+m+y"


def test_random_numbers_of_different_seeds_share_nothing():
    one = "prims.inductor_lookup_seed seeds {n}\nr{n} = prims.inductor_random [4,8] k{n} 'rand'"
    draws = "\n".join(f"k{n} = {one.format(n=n)}" for n in range(2))
    assert kernels(f"seeds = prims.inductor_seeds 2 meta\n{draws}\nreturn r0 r1 |") == "seeds r0 r1"


@st.composite
def programs(draw):
    """Random forward programs of pointwise ops, row sums and matmuls on 8 x 8 values."""
    values, lines = ["x", "w"], ["x = input 8x8", "w = input 8x8"]
    for number in range(draw(st.integers(1, 9))):
        first, second = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        op = draw(st.sampled_from([f"add {first} {second}", f"mm {first} {second}", f"sin {first}", "sum"]))
        name = f"v{number}"
        if op == "sum":
            lines += [f"{name}s = sum {first} [1] True", f"{name} = sub {first} {name}s"]
        else:
            lines.append(f"{name} = {op}")
        values.append(name)
    outputs = draw(st.lists(st.sampled_from(values[2:]), min_size=1, max_size=3, unique=True))
    return "\n".join([*lines, f"return {' '.join(outputs)} |"])


@settings(max_examples=80, derandomize=True, deadline=None)
@given(programs())
def test_kernels_hold_every_stored_op_once_and_read_only_what_was_made_before(text):
    facts = facts_of(text)
    rows = store_ops(facts, *forward_of(facts))
    made_somewhere = {buffer for op in rows for buffer in op.makes}
    made, seen = set(), []
    for kernel in fuse(facts, rows):
        assert not kernel.is_extern or len(kernel.ops) == 1
        for op in kernel.ops:
            assert op.reads & made_somewhere <= made
            made.update(op.makes)
            seen.append(op.op)
    assert sorted(seen) == sorted(op.op for op in rows)
    assert forward_of(facts)[1] <= made


# What occupies memory


def test_a_buffer_read_only_inside_its_kernel_takes_no_memory():
    text = "x = input 4x8\nm = amax x [1] True\ns = sub x m\nz = sum s [1] True\ny = div s z\nreturn y |"
    assert (kernels(text), in_memory(text)) == ("m+z+y", "y")


def looped(length):
    """Random numbers, stored by themselves, that are read before and after a row of so many was summed."""
    return f"""
        x = input 4x{length}
        s = input - int64
        r = prims.inductor_random [4,{length}] s 'rand'
        p = add x r
        m = sum p [1] True
        y = div r m
        return y |
    """


def test_a_value_read_after_a_reduction_over_more_than_1024_elements_is_spilled():
    assert kernels(looped(1024)) == kernels(looped(1025)) == "r+m+y"
    assert (in_memory(looped(1024)), in_memory(looped(1025))) == ("y", "r y")


def test_on_the_cpu_every_reduced_row_is_a_loop_that_holds_a_row():
    text = "x = input 4x8\nm = amax x [1] True\ns = sub x m\ne = exp s\nz = sum e [1] True\ny = div e z\nreturn y |"
    assert (kernels(text, "cpu"), in_memory(text, "cpu")) == ("m+e+z+y", "m z y")  # exp is dear: computed once
    assert (kernels(text), in_memory(text)) == ("m+z+y", "y")


# Loop nests


@pytest.mark.parametrize(
    ("op", "outer", "inner", "reduces_rows"),
    [
        ("sin x", 24, 1, False),
        ("sum x [2]", 6, 4, True),
        ("sum x [-1]", 6, 4, True),
        ("sum x [1,2]", 2, 12, True),
        ("sum x [0]", 12, 2, False),
        ("sum x [1]", 8, 3, False),
        ("sum.default x", 1, 24, True),
        ("argmax x 2", 6, 4, True),
        ("amax x []", 1, 24, True),
        ("cumsum x 2", 24, 1, True),
    ],
)
def test_a_reduction_loops_over_its_results_and_the_elements_of_each(op, outer, inner, reduces_rows):
    notes = annotated(f"x = input 2x3x4\ny = {op}\nreturn y |").notes
    shape = loop_shape(next(node for node in notes if node.name == "y"), notes)
    assert (shape.outer, shape.inner, shape.reduces_rows, shape.numel) == (outer, inner, reduces_rows, outer * inner)


# Loops in C++: what Inductor 2.13 makes of the same functions


def test_on_the_cpu_a_sum_between_two_loops_keeps_them_apart():
    """The loop over all 512 elements of p is no loop over rows, as that of the sum is; y needs the sum."""
    text = "x = input 64x8\np = sin x\ns = sum p [1] True\ny = div p s\nreturn p y |"
    assert (kernels(text), kernels(text, "cpu")) == ("p+s+y", "p s+y")


def test_on_the_cpu_a_sum_over_columns_is_a_loop_of_its_own():
    text = "x = input 64x8\np = sin x\ns = sum p [0] True\ny = div p s\nreturn p y |"
    assert kernels(text, "cpu") == "p s y"


def test_on_the_cpu_rows_that_are_scaled_are_summed_in_the_loop_that_scales_them():
    """p reads r once a row, so its loops are those of the sum."""
    text = "x = input 64x8\nr = input 64x1\np = mul x r\ns = sum p [1] True\ny = div p s\nreturn p y |"
    assert kernels(text, "cpu") == "p+s+y"


@pytest.mark.parametrize(("starts", "found"), [((0, 0), "p+q"), ((8, 8), "p+q"), ((0, 8), "p q")])
@pytest.mark.parametrize("of", ["x", "m"])  # m is computed in both
def test_on_the_cpu_two_parts_of_a_value_are_two_reads(of, starts, found):
    one, two = (f"slice {of} 1 {start} {start + 8}" for start in starts)
    text = f"x = input 64x16\nm = mul x 2\na = {one}\nb = {two}\np = sin a\nq = cos b\nreturn p q |"
    assert kernels(text, "cpu") == found


def test_on_the_cpu_what_shares_most_is_fused_first():
    """b shares u with a, u and v with d, which needs a library call that needs a: with a it could not run beside d."""
    text = """
        u = input 64x8
        v = input 64x8
        w = input 8x8
        a = sin u
        b = mul u v
        c = mm a w
        d = addcmul c u v
        return a b d |
    """
    assert (kernels(text), kernels(text, "cpu")) == ("a+b c d", "a c b+d")


@pytest.mark.parametrize(("op", "found"), [("log", "e(primals_1), y(primals_2 e)"), ("sin", "y(primals_1 primals_2)")])
def test_on_the_cpu_a_dear_value_is_stored_for_a_reader_that_spreads_it(op, found):
    text = f"r = input 1x8\nx = input 64x8\ne = {op} r\ny = add e x\nreturn y |"
    assert (stored(text), stored(text, "cpu")) == ("y(primals_1 primals_2)", found)


def test_a_scatter_computes_what_it_writes_on_its_way():
    text = """
        x = input 64x8
        i = input 64 int64
        z = full [16,8] 0
        j = abs i
        v = mul x 2
        y = index_put z [j] v True
        return y |
    """
    assert stored(text, "cpu") == "z(), y(primals_1 primals_2 z)"
    # With another reader the zeros cannot be written over: each writes into a copy, which is where zeros are computed.
    both = text.replace("return y", "w = index_put z [i] v True\nreturn y w")
    assert stored(both, "cpu") == "y(primals_1 primals_2), w(primals_1 primals_2)"


def test_on_the_cpu_only_what_is_read_in_the_order_of_writing_is_written_over():
    """The copy of a's transpose takes memory of its own."""
    for text, both in (("y = sin a", 1), ("t = t a\ny = clone t memory_format=torch.contiguous_format", 2)):
        facts = facts_of(f"x = input 64x8\nw = input 8x8\na = mm x w\n{text}\nreturn y |", "cpu")
        (op,) = (op for op in store_ops(facts, *forward_of(facts)) if not op.is_extern)
        assert is_read_in_place(op, *op.reads) == (both == 1)
