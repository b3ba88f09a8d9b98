"""Inductor's program for a GPU that is not there: its text, its peak, its launches, and no trace afterwards."""

import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

pytest.importorskip("triton")

from torch._dynamo import device_interface
from torch._inductor import compile_fx, config
from torch._inductor.codecache import CacheBase
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch.utils._triton import has_triton
from triton.runtime.driver import driver

from recompile import BudgetError
from recompile.chip import CHIPS, Chip, chip_for
from recompile.errors import OptionError
from recompile.gpu import dry_run, program_for, restrided
from recompile.hardware import named_hardware
from recompile.planner import save_all
from recompile.planner.finish import plan_from
from recompile.step_memory import HOLDS_TANGENTS, scratch_bytes
from recompile.timeline import Timeline
from recompile.torch_private_gpu import GPU, absent_gpu, cudnn_format, device_guards
from recompile.trace import trace_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
H100 = named_hardware()["h100"]


def two_matmuls(x, w1, w2):
    return (torch.tanh(x @ w1) @ w2).sum()


def operands():
    """x (256, 128), w1 (128, 512), w2 (512, 64) in float32; gradients for the weights."""
    return torch.randn(256, 128), *(torch.randn(*shape, requires_grad=True) for shape in ((128, 512), (512, 64)))


H, Y, W1, W2, SCALAR = 4 * 256 * 512, 4 * 256 * 64, 4 * 128 * 512, 4 * 512 * 64, 512  # bytes of blocks


class Block(nn.Module):
    """Attention and a feed-forward part, 64 wide, dropout in both."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class Stack(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()


@pytest.fixture(scope="module")
def traced_stack():
    return trace_step(Stack().bfloat16(), (torch.randn(4, 256, 64).bfloat16(),))


@pytest.fixture(scope="module")
def one_plan():
    return dry_run(two_matmuls, operands(), hardware="h100", planner="save_all").program


# Memory, by hand


def test_the_peaks_are_those_of_the_blocks_that_live_together(one_plan):
    # forward keeps h = tanh(x @ w1), written over its argument, while y = h @ w2 is summed up
    assert one_plan.forward_peak_bytes == H + Y + SCALAR
    assert one_plan.saved_bytes == H
    # backward: h, the loss that the caller holds, y's gradient, w2's gradient, h's gradient
    tangent = SCALAR if HOLDS_TANGENTS else 0
    assert one_plan.backward_peak_bytes == H + SCALAR + Y + W2 + H + tangent
    assert one_plan.peak_bytes == one_plan.backward_peak_bytes


def test_forwards_outputs_are_held_by_the_caller_and_parameters_and_batch_do_not_count():
    w = torch.randn(128, 128, requires_grad=True)
    program = dry_run(lambda x, w: x @ w, (torch.randn(4, 128), w), hardware="h100").program
    block = 4 * 4 * 128
    assert program.forward_peak_bytes == block
    assert program.saved_bytes == 0
    assert program.backward_peak_bytes == block + block + 4 * 128 * 128  # output, tangent, gradient


def test_a_value_that_forward_returns_and_saves_counts_once():
    program = dry_run(lambda x: x.exp(), (torch.randn(256, requires_grad=True),), hardware="h100").program
    assert (program.forward_peak_bytes, program.saved_bytes) == (1024, 0)
    assert program.backward_peak_bytes == 3 * 1024  # output, tangent, gradient


def test_backward_writes_over_what_was_saved_for_it_alone():
    """The last product's gradient takes its place. The first is not saved; two parameters are in its stead, so that the
    last is further back among what is saved than where everything is."""
    operands = [torch.randn(256, 64)] + [torch.randn(*s, requires_grad=True) for s in ((64, 64), (64,), (64, 64))]
    product, weights = 4 * 256 * 64, 4 * 64 * 64

    def summed(x, w1, b1, w2):
        return (torch.addmm(b1, x, w1).sin() @ w2).sin().sum()

    def without_the_first(joint, hardware, budget):
        timeline = Timeline(joint, hardware)
        flow = timeline.flow
        choices = [flow.index[c.node] for c in save_all(joint, hardware, budget).saved if c.node.op != "placeholder"]
        saved = frozenset(choices[1:])
        return plan_from(timeline, saved, timeline.simulate(saved), {})

    program = dry_run(summed, operands, hardware="h100", planner=without_the_first).program
    # the first sine, the last product, the gradient of the last weights, the loss and its tangent
    tangent = SCALAR if HOLDS_TANGENTS else 0
    assert program.backward_peak_bytes == 2 * product + weights + SCALAR + tangent


def with_noise(x):
    """A row's sum of random numbers, and the same numbers after it: long rows need them in memory."""
    noise = torch.rand_like(x)
    return x + noise * noise.sum(-1, keepdim=True)


@pytest.mark.parametrize("length, spilled_bytes", [(1024, 0), (4096, 4 * 64 * 4096)])
def test_what_a_kernel_writes_for_itself_and_reads_again_is_counted_apart(length, spilled_bytes):
    """Of 64 rows the random numbers in float32, in rows that a looped kernel passes over twice."""
    x = torch.randn(64, length, requires_grad=True)
    program = dry_run(with_noise, (x,), hardware=H100).program
    spilling = [kernel for kernel in program.kernels if kernel.phase == "forward" and kernel.spilled_bytes]
    assert sum(kernel.spilled_bytes for kernel in spilling) == spilled_bytes
    for kernel in spilling:
        assert kernel.spill_seconds == pytest.approx(2 * spilled_bytes / H100.byte_per_s)
    extra = sum(kernel.spill_seconds for kernel in program.kernels)
    assert program.seconds_with_spills == pytest.approx(program.seconds + extra)


def test_inductors_own_estimate_counts_what_lives_within_a_kernel_too(one_plan):
    """In backward: w2's gradient, h, and h's gradient before and after that of tanh; not the loss, which is outside."""
    assert one_plan.estimated_peak_bytes == W2 + 3 * H


def test_the_peak_falls_as_the_budget_does(traced_stack):
    runs = [dry_run(Stack(), trace=traced_stack, hardware="h100", memory_budget=share) for share in (None, 0.5, 0.0)]
    peaks = [run.program.peak_bytes for run in runs]
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[2] < 0.75 * peaks[0]
    for run in runs:
        assert run.report.peak_bytes == pytest.approx(run.program.peak_bytes, rel=0.25)


def test_a_plan_may_be_given_as_two_graphs(traced_stack):
    from recompile.backend import Partitioner
    from recompile.options import Options

    forward, backward = traced_stack.split(Partitioner(Options.parse({"memory_budget": 0.5, "hardware": "h100"})))
    text = forward.code, backward.code
    given = program_for(forward, backward, traced_stack, H100, inductor={"allow_buffer_reuse": False})
    own = dry_run(Stack(), trace=traced_stack, hardware="h100", memory_budget=0.5).program
    assert (given.peak_bytes, given.kernels) == (own.peak_bytes, own.kernels)
    assert (forward.code, backward.code) == text


def test_backward_reads_what_it_is_given_with_the_strides_of_the_compiled_forward():
    trace = trace_step(nn.Conv2d(8, 16, 3), (torch.randn(2, 8, 16, 16, requires_grad=True),))
    from recompile.backend import Partitioner
    from recompile.options import Options

    _, backward = trace.split(Partitioner(Options.parse({"hardware": "h100"})))
    saved = [node for node in backward.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    strides = [tuple(reversed(node.meta["val"].stride())) for node in saved]
    assert [tuple(value.stride()) for value in restrided(backward, strides)][: len(saved)] == strides


# Kernels


def test_each_launch_has_its_work_and_its_roofline_time(one_plan):
    first = one_plan.kernels[0]
    assert (first.name, first.phase, first.is_extern) == ("extern_kernels.mm", "forward", True)
    assert first.flop == 2 * 256 * 128 * 512
    assert first.moved_bytes == 4 * (256 * 128 + 128 * 512 + 256 * 512)
    assert first.seconds == pytest.approx(first.flop / 67e12 + 2e-6)  # arithmetic outweighs traffic
    pointwise = one_plan.kernels[1]
    assert pointwise.moved_bytes == 2 * H
    assert pointwise.seconds == pytest.approx(2 * H / 3.35e12 + 2e-6)
    assert one_plan.num_launches == len(one_plan.kernels)
    assert one_plan.seconds == pytest.approx(sum(kernel.seconds for kernel in one_plan.kernels))
    assert [k.name for k in one_plan.kernels if k.is_extern] == ["extern_kernels.mm"] * 5


def test_every_launch_is_one_that_the_scheduler_knows(traced_stack):
    program = dry_run(Stack(), trace=traced_stack, hardware="h100").program
    assert [kernel.name for kernel in program.kernels if not kernel.ops and not kernel.is_extern] == []
    attention = [kernel for kernel in program.kernels if "flash" in kernel.name]
    assert [kernel.phase for kernel in attention] == ["forward"] * 3 + ["backward"] * 3
    assert attention[0].flop == 2 * 2 * (4 * 4) * 256 * 256 * 16  # two products a head


def test_backward_computes_tanh_again_only_where_it_was_not_saved(one_plan):
    full = dry_run(two_matmuls, operands(), hardware="h100", planner="full").program
    assert "tanh" in "".join(one_plan.triton_sources("forward").values())
    assert not any("libdevice.tanh(" in text for text in one_plan.triton_sources("backward").values())
    assert any("libdevice.tanh(" in text for text in full.triton_sources("backward").values())


@pytest.mark.parametrize(("hardware", "target"), [("a100-80", ".target sm_80"), ("h100", ".target sm_90")])
def test_kernels_compile_for_the_chip(hardware, target):
    program = dry_run(two_matmuls, operands(), hardware=hardware).program
    made = dict(program.compiled_kernels("backward"))
    assert made.keys() == program.triton_sources("backward").keys() != set()
    for binary in made.values():
        assert target in binary["ptx"]
        assert binary["cubin"][:4] == b"\x7fELF"


def test_convolutions_are_channels_last_as_on_a_gpu():
    images, weight = torch.empty(2, 8, 4, 4), torch.empty(16, 8, 3, 3)
    assert cudnn_format(images, weight, None) is torch.contiguous_format
    last = images.to(memory_format=torch.channels_last)
    assert cudnn_format(last, weight, None) is torch.channels_last
    assert cudnn_format(last.double(), weight.double(), None) is torch.contiguous_format


def test_flash_attentions_backward_sums_in_float32():
    graph = torch.fx.Graph()
    shapes = [(2, 4, 200, 40), (2, 4, 200, 40), (2, 2, 200, 40)]  # gradient, query, key: grouped queries
    nodes = [graph.placeholder(name) for name in ("grad", "query", "key")]
    for node, shape in zip(nodes, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16)
    call = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention_backward.default, tuple(nodes))
    rows, head = 256, 64  # 200 and 40, rounded up
    assert scratch_bytes(call) == 4 * 2 * 4 * rows * (head + 1) + 2 * (2 * 200 * 4 * 40 * 2)
    assert scratch_bytes(graph.call_function(torch.ops.aten.mm.default, (nodes[0], nodes[1]))) == 0


def test_attention_with_dropout_is_drawn_again_from_a_saved_generator():
    def step(x, w):
        q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return torch.sin(mixed.transpose(1, 2)).float().sum()

    operands = torch.randn(2, 128, 64).bfloat16(), torch.randn(64, 192).bfloat16().requires_grad_()
    program = dry_run(step, operands, hardware="h100", planner="full").program
    attention = [kernel for kernel in program.kernels if kernel.is_extern and "mm" not in kernel.name]
    assert [(kernel.phase, kernel.name.split(".")[-1]) for kernel in attention] == [
        ("forward", "graphsafe_run_with_rng_state"),
        ("backward", "graphsafe_run_with_rng_state"),
        ("backward", "default"),
    ]
    # the product (2, 128, 192) that is kept, the result, a float32 a row and two numbers of the generator
    assert attention[0].live_bytes == 2 * 2 * 128 * 192 + 2 * 2 * 128 * 64 + 4 * 2 * 4 * 128 + 2 * 512


# Refusals


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ValueError, "give hardware="),
        ({"hardware": "h100", "memory_budget": "auto"}, ValueError, "auto"),
        ({"hardware": "h100", "memory_budgets": 1}, OptionError, "memory_budgets"),
        ({"hardware": "mi300x"}, ValueError, "no chip is known for hardware 'mi300x'"),
        ({"hardware": "h100", "memory_budget": "1KiB"}, BudgetError, "smallest budget"),
    ],
)
def test_what_cannot_be_answered_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        dry_run(two_matmuls, operands(), **options)


def test_an_unknown_capability_is_refused():
    with pytest.raises(ValueError, match=r"8\.0, 8\.6"):
        Chip("NVIDIA V100", (7, 0), 80)
    assert chip_for("h100").architecture == 90


def test_every_named_nvidia_part_has_its_chip():
    assert set(named_hardware()) - set(CHIPS) == {"mi300x"}


# No trace


def answers():
    """What torch and Triton say about CUDA, and what the dry run changes meanwhile."""
    guards = device_guards()
    return {
        "available": torch.cuda.is_available(),
        "count": torch.cuda.device_count(),
        "functions": [getattr(torch.cuda, name) for name in ("get_device_properties", "current_device")],
        "triton": has_triton(),
        "driver": driver._active,
        "generators": torch.cuda.default_generators,
        "interface": device_interface.get_interface_for_device("cuda"),
        "interfaces": dict(device_interface.device_interfaces),
        "workers": dict(device_interface.caching_worker_device_properties),
        "properties": DeviceProperties.create.cache_info().currsize,
        "system": CacheBase.get_system()["hash"],
        "module": GraphLowering.compile_to_module,
        "context": compile_fx.get_cuda_device_context,
        "config": config.get_config_copy(),
        "guards": None if guards is None else list(guards),
        "format": torch._C._conv_determine_backend_memory_format,
    }


def test_nothing_is_left_behind():
    before = answers()
    dry_run(two_matmuls, operands(), hardware="h100")
    assert answers() == before
    with pytest.raises((AssertionError, RuntimeError), match=r"not compiled with CUDA|NVIDIA driver"):
        torch.cuda.get_device_properties(0)


def test_nothing_is_left_behind_by_an_error():
    before = answers()
    with pytest.raises(ZeroDivisionError), absent_gpu(CHIPS["h100"]):
        assert torch.cuda.is_available() and has_triton()
        assert torch.cuda.get_device_properties(0).multi_processor_count == 132
        assert torch.empty(2, device="meta").device != GPU
        1 / 0  # noqa: B018
    assert answers() == before


def test_it_is_refused_inside_itself():
    with absent_gpu(CHIPS["h100"]), pytest.raises(RuntimeError, match="inside itself"), absent_gpu(CHIPS["h100"]):
        pass
    assert not torch.cuda.is_available()


def test_other_threads_see_no_gpu_meanwhile_and_a_second_dry_run_waits():
    order, seen = [], []

    def second():
        seen.append(torch.cuda.is_available())
        with absent_gpu(CHIPS["a100-80"]):
            order.append("second")
            seen.append(torch.cuda.get_device_capability())

    with absent_gpu(CHIPS["h100"]):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.2)
        assert thread.is_alive()
        order.append("first")
    thread.join()
    assert (order, seen) == (["first", "second"], [False, (8, 0)])


def test_the_cpu_compiles_as_ever_afterwards():
    dry_run(two_matmuls, operands(), hardware="h100")
    x, w1, w2 = operands()
    backend_ran = []

    def backend(module, inputs):
        backend_ran.append({str(value.device) for value in inputs})
        return module.forward

    loss = torch.compile(two_matmuls, backend=backend)(x, w1, w2)
    assert backend_ran == [{"cpu"}] and torch.equal(loss, two_matmuls(x, w1, w2))
