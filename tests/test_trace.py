"""Traces for a GPU on a machine without one: the graph that Inductor's partitioner would get, on fake CUDA tensors."""

import copy
import logging
import resource
import warnings
from collections import Counter

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._inductor import compile_fx, decomposition, pattern_matcher
from torch._inductor.fx_passes import joint_graph
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from recompile.torch_private_gpu import device_guards
from recompile.torch_private_trace import FolderOnCPU, new_fake_mode
from recompile.trace import as_fakes, trace_step

from .whole.interpret import interpreted, partitioner

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LOGGER = logging.getLogger("a model")
PATCHED = (
    (compile_fx, "_recursive_joint_graph_passes"),
    (decomposition, "is_gpu"),
    (pattern_matcher, "aot_function"),
    (joint_graph, "UniformValueConstantFolder"),
)


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.ones(width))
        self.scale = torch.ones(width)  # neither parameter nor buffer

    def forward(self, x):
        return (F.dropout(self.second(F.gelu(self.first(x))), 0.1, self.training) * self.scale + self.shift).sum()


def ops(trace, *parts):
    """Counts of the graph's ops whose names have one of the parts; of all without."""
    names = [str(node.target) for node in trace.module.graph.nodes if node.op == "call_function"]
    return Counter(name for name in names if not parts or any(part in name for part in parts))


def devices(trace):
    values = [node.meta["val"] for node in trace.module.graph.nodes if "val" in node.meta]
    return {str(value.device) for value in values if isinstance(value, torch.Tensor)}


def test_every_value_is_on_the_gpu_and_the_inputs_have_their_roles():
    trace = trace_step(Net(), (torch.randn(8, 64),))
    assert devices(trace) == {"cuda:0"}
    placeholders = trace.module.graph.find_nodes(op="placeholder")
    shapes = [tuple(node.meta["val"].shape) for node in placeholders]
    static = [shapes[i] for i in trace.static_inputs]
    # two weights and their biases, the buffer, the tensor that is neither
    assert sorted(static) == [(64,), (64,), (64,), (64, 128), (128,), (128, 64)]
    assert (trace.num_fwd_outputs, trace.user_visible_outputs) == (1, (0,))
    assert ops(trace, "inductor_random", "inductor_seeds") == {
        "prims.inductor_random.default": 1,
        "prims.inductor_seeds.default": 1,
    }


def test_the_graph_has_the_ops_that_torch_compile_hands_to_a_partitioner():
    model, x = Net(), torch.randn(8, 64)
    backend = interpreted(partitioner(None))
    torch.compile(model, backend=backend)(x)
    compiled = backend.graphs[0].joint.gm
    assert [str(n.target) for n in trace_step(model, (x,)).module.graph.nodes if n.op != "placeholder"] == [
        str(n.target) for n in compiled.graph.nodes if n.op != "placeholder"
    ]


def test_real_fake_and_meta_modules_give_the_same_graph():
    real = Net()
    with torch.device("meta"):
        meta = Net()
    with FakeTensorMode():
        fake = Net()
    x = torch.randn(8, 64)
    assert ops(trace_step(real, (x,))) == ops(trace_step(meta, (x,))) == ops(trace_step(fake, (x.to("meta"),)))


def test_the_module_and_its_compiled_code_are_left_alone():
    model = Net()
    before, where = copy.deepcopy(model.state_dict()), model.first.weight.data_ptr()
    trace_step(model, (torch.randn(8, 64),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.first.weight.data_ptr() == where and model.first.weight.grad is None
    assert model.scale.device.type == "cpu"
    assert _debug_get_cache_entry_list(Net.forward.__code__) == []


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_torch_stays_changed(fails):
    before = [getattr(owner, name) for owner, name in PATCHED]
    model = nn.Linear(4, 4) if not fails else nn.Linear(5, 4)  # five columns times four rows
    if fails:
        with pytest.raises(Exception, match=r"shapes|size"):
            trace_step(model, (torch.randn(2, 4),))
    else:
        trace_step(model, (torch.randn(2, 4),))
    assert [getattr(owner, name) for owner, name in PATCHED] == before
    assert joint_graph.UniformValueConstantFolder is not FolderOnCPU
    guards = device_guards()
    assert guards is None or torch.version.cuda is not None or guards[1] is None
    assert not torch.cuda.is_available()


def test_a_weight_of_64_gib_takes_no_memory():
    with torch.device("meta"):
        model = nn.Linear(2**17, 2**17, bias=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = trace_step(model, (torch.empty(1, 2**17, device="meta"),))
    assert ops(trace, "mm")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_a_step_without_gradients_is_refused():
    with pytest.raises(ValueError, match="nothing to train"):
        trace_step(Net().requires_grad_(False), (torch.randn(8, 64),))


def test_a_graph_break_is_refused_with_its_place():
    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"test_trace\.py"):
        trace_step(broken, (torch.randn(3, requires_grad=True),))


def test_a_message_to_people_is_no_graph_break():
    def talkative(x):
        LOGGER.warning("so many rows: %d", x.shape[0])
        warnings.warn("deprecated", stacklevel=2)
        return x.exp().sum()

    assert "aten.exp.default" in ops(trace_step(talkative, (torch.randn(3, requires_grad=True),)))


def test_dropout_in_a_checkpointed_region_can_be_traced():
    def loss_of(x):
        return checkpoint(lambda x: F.dropout(x.exp(), 0.5).sin(), x, use_reentrant=False).sum()

    trace = trace_step(loss_of, (torch.randn(8, 8, requires_grad=True),))
    forward, backward = trace.split(partitioner(None))
    assert "exp" in str(backward.graph) and "exp" in str(forward.graph)


def test_shared_parameters_stay_shared():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    moved = as_fakes(model, new_fake_mode())
    assert moved[0].weight is moved[1].weight and moved[0].weight.device.type == "cpu"
    assert model[0].weight.device.type == "cpu"


# Attention


def qkv(dtype=torch.bfloat16, heads=4, length=16, head_dim=32, key_heads=None):
    return [
        torch.randn(2, count, length, head_dim, dtype=dtype, requires_grad=True)
        for count in (heads, key_heads or heads, key_heads or heads)
    ]


def attention_ops(function, *inputs):
    return sorted(name.split(".")[1] for name in ops(trace_step(function, inputs), "scaled_dot_product"))


FLASH = ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]
EFFICIENT = ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"]


@pytest.mark.parametrize(
    ("inputs", "options", "expected"),
    [
        (qkv(), {"is_causal": True}, FLASH),
        (qkv(torch.float16), {}, FLASH),
        (qkv(key_heads=2), {"enable_gqa": True}, FLASH),
        (qkv(head_dim=20), {}, FLASH),  # padded to 24
        (qkv(torch.float32), {"is_causal": True}, EFFICIENT),
        ([*qkv(), torch.ones(16, 16, dtype=torch.bool)], {}, EFFICIENT),
        ([*qkv(length=15), torch.zeros(15, 15, dtype=torch.bfloat16)], {}, EFFICIENT),
        (qkv(torch.float64), {}, []),  # written out
    ],
)
def test_attention_is_the_op_that_a_gpu_takes(inputs, options, expected):
    assert attention_ops(lambda *args: F.scaled_dot_product_attention(*args, **options).sum(), *inputs) == expected


def test_attention_written_out_becomes_the_op_where_inductor_knows_the_pattern():
    def attention(q, k, v):
        return torch.matmul(q, k.transpose(-2, -1)).div(8.0).softmax(-1).matmul(v).sum()

    assert attention_ops(attention, *qkv(torch.float16, length=128, head_dim=64)) == FLASH


def test_the_bias_gradient_of_a_convolution_is_a_sum_of_its_own_as_on_a_gpu():
    trace = trace_step(nn.Conv2d(3, 8, 3), (torch.randn(2, 3, 8, 8),))
    (node,) = trace.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution_backward.default, sort=False
    )
    assert node.args[-1] == [False, True, False]
