"""Fusions that Inductor is kept from making, seen in its program for a GPU that is not there."""

from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor_config

pytest.importorskip("triton")

from recompile.gpu import dry_run
from recompile.torch_private_fusion import LONGEST_WAIT, keeps_memory_waiting, keeps_summands_waiting, with_short_lives
from tests.notation import joint
from tests.whole.models import TwoTraversals

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_gradients_of_a_first_use_do_not_wait_for_those_of_the_second():
    """Inductor by itself sums the bias gradients of both uses in one kernel, and all that the first sum reads waits."""
    with torch.device("meta"):
        model, x = TwoTraversals(64, num_blocks=4, dropout=0.0), torch.empty(1, 4096, 64)
    run = dry_run(model, (x,), memory_budget=0.0, hardware="h100")
    wide_bytes, program = 4096 * 256 * 4, run.program
    assert program.peak_bytes <= run.report.peak_bytes * 1.02
    assert program.peak_bytes < 8 * wide_bytes  # one block's working set and a narrow value per block, not eight blocks


class TiedOutput(torch.nn.Module):
    """An embedding whose weight is the output layer's too, and wide logits."""

    def __init__(self, num_words=4096, width=64, num_layers=6):
        super().__init__()
        self.words = torch.nn.Embedding(num_words, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = x @ self.words.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_the_gradient_of_logits_does_not_wait_for_that_of_the_embedding():
    """Inductor by itself makes the tied weight's gradient in one call at the end, from the gradient of the logits."""
    with torch.device("meta"):
        model, tokens = TiedOutput(), torch.zeros(1, 1024, dtype=torch.int64)
    program = dry_run(model, (tokens,), memory_budget=0.0, hardware="h100").program
    logits_bytes = 1024 * 4096 * 4
    *_, last = [kernel for kernel in program.kernels if kernel.live_bytes > logits_bytes]
    named = [kernel.name for kernel in program.kernels]
    assert named.index(last.name) < len(named) / 2 and "extern_kernels.addmm" not in named[len(named) // 2 :]


def scheduled(name, place, ancestors=(), reads=(), writes=()):
    """A node of Inductor's scheduler as far as the rule looks at it; values are ``(name, bytes)``."""
    deps = ([SimpleNamespace(name=value, num_bytes=size) for value, size in values] for values in (reads, writes))
    return SimpleNamespace(
        min_order=place, max_order=place, ancestors=set(ancestors), get_operation_names=lambda: {name},
        read_writes=SimpleNamespace(**dict(zip(("reads", "writes"), deps, strict=True))),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("place", "ancestors", "written_bytes", "waits"),
    [
        (90, ["sum"], 8, False),  # runs in the sum's place
        (90, ["sum"], 16, True),  # what it makes would take more than the sum, from there on
        (90, ["sum", "late"], 8, True),  # needs something that is made long after
        (90, ["sum", "early"], 8, False),
        (20, ["sum", "late"], 8, False),  # near enough to wait for
    ],
)
def test_a_sum_waits_for_its_reader_only_if_that_cannot_run_at_once(place, ancestors, written_bytes, waits):
    total = scheduled("sum", 10, ["early"], reads=[("parts", 1000)], writes=[("total", 8)])
    reader = scheduled("reader", place, ancestors, reads=[("total", 8)], writes=[("new", written_bytes)])
    nodes = {"sum": total, "reader": reader, "early": scheduled("early", 2), "late": scheduled("late", 15)}
    assert keeps_memory_waiting(scheduler_of(nodes, parts=[total]), total, reader) == waits


def scheduler_of(nodes, **readers):
    """A scheduler of these nodes, with the readers of some values."""
    return SimpleNamespace(
        nodes=list(nodes.values()), name_to_node=nodes,
        name_to_buf={name: SimpleNamespace(users=[SimpleNamespace(node=node) for node in users])
                     for name, users in readers.items()},
        dep_size_hint=lambda dep: dep.num_bytes,
    )  # fmt: skip


def summing(num_summed, num_between, asked=None):
    """What Inductor is told of small sums for a graph with a sum that is read again after so many ops."""
    between = "\n".join(f"b{i} = sin {f'b{i - 1}' if i else 'x'}" for i in range(num_between))
    text = f"x = input {num_summed}x4x8\na = sum x [0]\n{between}\ny = add a b{num_between - 1}\nreturn y |"
    seen = with_short_lives(lambda graph: inductor_config.unroll_reductions_threshold, asked or {})
    return seen(joint(text).module)


def test_small_sums_are_not_unrolled_in_a_graph_where_one_is_read_far_behind_it():
    default = inductor_config.unroll_reductions_threshold
    assert default == 8
    assert summing(num_summed=2, num_between=LONGEST_WAIT) == 2
    assert summing(num_summed=7, num_between=LONGEST_WAIT) == 2
    assert summing(num_summed=2, num_between=LONGEST_WAIT - 1) == default  # near: unrolling it holds up little
    assert summing(num_summed=8, num_between=LONGEST_WAIT) == default  # never unrolled
    assert inductor_config.unroll_reductions_threshold == default


@pytest.mark.parametrize(("number", "rows"), [(0, 64), (1, 64), (0, 2), (1, 2)])
def test_variances_and_means_read_far_behind_them_are_no_small_sums(number, rows):
    """Two results of one op, as layer norm hands them to backward."""
    between = "\n".join(f"b{i} = sin {f'b{i - 1}' if i else 'x'}" for i in range(LONGEST_WAIT))
    text = f"x = input {rows}x8\nv = var_mean.correction x [0] correction=0\na = getitem v {number}\n{between}\n"
    graph = joint(f"{text}y = add a b{LONGEST_WAIT - 1}\nreturn y |").module
    assert not keeps_summands_waiting(graph)


def test_the_users_word_on_small_sums_counts():
    assert summing(num_summed=2, num_between=LONGEST_WAIT, asked={"unroll_reductions_threshold": 4}) == 4


@pytest.mark.parametrize("factor_bytes", [64, 2000])
def test_what_must_follow_a_producer_waits_with_it(factor_bytes):
    """A value is computed again for a product, and read once more far behind it. If it is made there, the product
    comes after that, and its other factor stays; else value and product (1000 + 16 bytes) are there all the time."""
    value = scheduled("value", 10, reads=[("kept", 1000)], writes=[("x", 1000)])
    product = scheduled("product", 12, ["value"], reads=[("x", 1000), ("factor", factor_bytes)], writes=[("w", 16)])
    late = scheduled("late", 80, writes=[("t", 8)])
    reader = scheduled("reader", 90, ["value", "late"], reads=[("x", 1000), ("t", 8), ("kept", 1000)])
    nodes = {node.get_operation_names().copy().pop(): node for node in (value, product, late, reader)}
    scheduler = scheduler_of(nodes, kept=[value, reader], factor=[product], x=[product, reader])
    assert keeps_memory_waiting(scheduler, value, reader) == (factor_bytes > 1016)


class NormalisedConvolutions(torch.nn.Module):
    def __init__(self, depth=3, channels=128):
        super().__init__()
        layers = (
            (torch.nn.Conv2d(channels, channels, 3, bias=False), torch.nn.BatchNorm2d(channels), torch.nn.ReLU())
            for _ in range(depth)
        )
        self.layers = torch.nn.Sequential(*(layer for block in layers for layer in block))

    def forward(self, x):
        return self.layers(x).mean()


def test_running_statistics_are_updated_where_the_statistics_are_made():
    with torch.device("meta"):
        model, x = NormalisedConvolutions(), torch.empty(8, 128, 64, 64)
    program = dry_run(model, (x,), memory_budget=0.5, hardware="h100").program
    updates = [kernel for kernel in program.kernels if any("copy_" in op for op in kernel.ops)]
    reducing = [kernel for kernel in updates if any("native_batch_norm" in op or "var_mean" in op for op in kernel.ops)]
    counting = [kernel for kernel in updates if kernel.moved_bytes == 16]  # one number of batches read and written
    assert len(reducing) == len(counting) == 3 and len(updates) == 6
