"""Replay of emitted programs: hand-written ones of a few lines, blocks in units of 512 bytes (128 float32 values)."""

import textwrap

import pytest

from recompile.replay import (
    CPU,
    CUDA,
    Block,
    ExternSizes,
    ReplayError,
    Run,
    call_of,
    kernel_sources,
    replay,
    strided_bytes,
)

UNIT = 512
block_of = CUDA.block_of


def program(text):
    """The module around the body of `call`; `new(n)` stands for an allocation of n units."""
    for units in range(1, 9):
        text = text.replace(f"new({units})", f"empty_strided_cuda(({128 * units}, ), (1, ), torch.float32)")
    return "def call(self, args):\n" + textwrap.indent(textwrap.dedent(text).strip(), "    ")


def units(run):
    """(peak, live at each launch) in units."""
    return run.peak_bytes // UNIT, [launch.live_bytes // UNIT for launch in run.launches]


def test_a_buffer_is_free_after_its_del_and_what_is_returned_stays():
    run = replay(
        program(
            """
            x, = args
            args.clear()
            buf0 = new(3)
            k0.run(x, buf0, 384, stream=s)
            buf1 = new(2)
            k1.run(buf0, buf1, 256, stream=s)
            del buf0
            buf2 = new(1)
            k2.run(buf1, buf2, 128, stream=s)
            return (buf2, buf1, x, None)
            """
        ),
        [None],
    )
    assert units(run) == (5, [3, 5, 3])
    assert [block and block.num_bytes // UNIT for block in run.returned] == [1, 2, None, None]
    assert [launch.function for launch in run.launches] == ["k0.run", "k1.run", "k2.run"]
    assert [launch.names for launch in run.launches] == [("x", "buf0"), ("buf0", "buf1"), ("buf1", "buf2")]


def test_a_reused_buffer_is_the_same_block_under_another_name():
    run = replay(
        program(
            """
            buf0 = new(4)
            k0.run(buf0, stream=s)
            buf1 = buf0; del buf0  # reuse
            k1.run(buf1, stream=s)
            buf2 = reinterpret_tensor(buf1, (2, 256), (256, 1), 0); del buf1  # reuse
            k2.run(buf2, stream=s)
            return (buf2, reinterpret_tensor(buf2, (256, ), (1, ), 256), )
            """
        ),
        [],
    )
    assert units(run) == (4, [4, 4, 4])
    assert run.returned[0] is run.returned[1]


def test_arguments_are_free_once_their_names_are_gone_unless_somebody_holds_them():
    saved, tangent = block_of(3 * UNIT), block_of(2 * UNIT)
    backward = program(
        """
        weight, saved, tangent = args
        args.clear()
        buf0 = new(1)
        k0.run(weight, saved, tangent, buf0, stream=s)
        del saved
        del tangent
        buf1 = new(1)
        k1.run(buf0, buf1, stream=s)
        del buf0
        return (buf1, )
        """
    )
    assert units(replay(backward, [None, saved, tangent])) == (6, [6, 2])
    assert units(replay(backward, [None, saved, tangent], held=[tangent])) == (6, [6, 4])


def test_arguments_count_until_args_is_cleared():
    kept = program("x, = args\ndel x\nbuf0 = new(1)\nreturn (buf0, )")
    cleared = program("x, = args\nargs.clear()\ndel x\nbuf0 = new(1)\nreturn (buf0, )")
    assert replay(kept, [block_of(4 * UNIT)]).peak_bytes == 5 * UNIT
    assert replay(cleared, [block_of(4 * UNIT)]).peak_bytes == 4 * UNIT


def test_two_arguments_on_one_block_count_once():
    block = block_of(2 * UNIT)
    text = program("x, y = args\nargs.clear()\nk.run(x, y, stream=s)\ndel x\nbuf0 = new(1)\nreturn (buf0, y)")
    assert units(replay(text, [block, block])) == (3, [2])


def test_a_library_call_allocates_its_results_which_live_while_one_of_them_or_the_tuple_does():
    text = program(
        """
        x, = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = torch.ops.aten.attention.default(x, 0.0)
            buf1 = buf0[0]
            assert_size_stride(buf1, (128, ), (1, ), 'input')
            del buf0
            buf2 = new(1)
            extern_kernels.mm(buf1, x, out=buf2)
        return (buf2, )
        """
    )
    sizes = ExternSizes({"buf0": (2 * UNIT, 3 * UNIT, 0)}, {"buf0": 4 * UNIT})
    run = replay(text, [None], sizes)
    assert units(run) == (9, [9, 3])  # 2 + 3 and 4 of scratch; then 2 and the product's 1
    assert run.launches[0].names == ("x", "buf0")
    assert run.launches[1].names == ("buf1", "x", "buf2")


def test_streams_constants_and_sizes_take_no_memory():
    text = program("s = get_raw_stream(0)\nn = 4 + 1\nbuf0 = empty_strided_cpu((99, ), (1, ), torch.int64)\nreturn ()")
    assert replay(text, []) == Run(0, (), ())


@pytest.mark.parametrize(("num_bytes", "block"), [(0, 0), (1, 512), (512, 512), (513, 1024), (2**20 + 1, 2**20 + 512)])
def test_a_block_is_rounded_up_to_512_bytes(num_bytes, block):
    assert CUDA.rounded(num_bytes) == block == block_of(num_bytes).num_bytes
    assert CPU.rounded(num_bytes) == num_bytes


@pytest.mark.parametrize(
    ("allocation", "num_bytes"),
    [
        ("empty_strided_cuda((2, 3), (3, 1), torch.bfloat16)", 12),
        ("empty_strided_cuda((2, 3), (8, 1), torch.float32)", 44),  # a padded row, the last one cut short
        ("empty_strided_cuda((), (), torch.int64)", 8),
        ("empty_strided_cuda((5, 0), (1, 1), torch.float64)", 0),
        ("empty_strided_cuda((4, ), (1, ), torch.float8_e4m3fn)", 4),
    ],
)
def test_bytes_follow_from_sizes_strides_and_dtype(allocation, num_bytes):
    (statement,) = call_of(f"def call(args):\n    {allocation}").body
    assert strided_bytes(statement.value) == num_bytes


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("for i in x:\n        pass", "for i in x"),
        ("buf0 = torch.ops.aten.sort.default(x)", "nothing is known about what it allocates for buf0"),
        ("buf0 = empty_strided_cuda((s0, ), (1, ), torch.float32)", "must be plain"),
        ("buf0 = new(1)", "returns nothing"),
        ("buf0 = [1, 2]", r"buf0 = \[1, 2\]|\[1, 2\]"),
    ],
)
def test_what_has_no_rule_is_refused_with_the_statement(body, reason):
    with pytest.raises(ReplayError, match=reason):
        replay(program(body), [])


def test_a_wrong_number_of_arguments_is_refused():
    with pytest.raises(ReplayError, match="takes 2 arguments, 1 were given"):
        replay(program("x, y = args\nreturn (x, )"), [None])


def test_a_program_without_call_is_refused():
    with pytest.raises(ReplayError, match="no function `call`"):
        replay("import torch", [])


def test_kernels_are_found_by_name():
    source = (
        """k0 = async_compile.triton('k0', 'one', device_str='cuda')\nn = 3\nk1 = async_compile.triton('k1', 'two')"""
    )
    assert kernel_sources(source) == {"k0": "one", "k1": "two"}


def test_two_blocks_of_one_size_are_two():
    assert Block(512) != Block(512)
