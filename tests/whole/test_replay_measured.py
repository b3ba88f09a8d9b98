"""The replay against memory as it is: a program that Inductor emits for the CPU, replayed and run."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._inductor.graph import GraphLowering

import recompile
from recompile.replay import CPU, call_of, replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo", "empty_cache")]


class Block(nn.Module):
    def __init__(self, width=64, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = ((q @ k.transpose(-1, -2)) * 0.2).masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()


def num_arguments(source):
    return len(call_of(source).body[0].targets[0].elts)


@pytest.mark.parametrize("budget", [None, 0.0])
def test_the_replayed_peak_is_the_measured_one(budget, monkeypatch):
    sources = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(sources.append))
    model, x = nn.Sequential(Block(), Block(), Loss()), torch.randn(2, 128, 64)
    compiled = torch.compile(model, backend="recompile", options={"memory_budget": budget})

    def step():
        compiled(x).backward()
        model.zero_grad(set_to_none=True)

    step()
    forward, backward = sources[:2]
    first = replay(forward, [None] * num_arguments(forward), allocator=CPU)
    output, *saved = first.returned
    tangent = CPU.block_of(output.num_bytes)
    second = replay(backward, [*saved, tangent], held=[output], allocator=CPU)
    measured = recompile.measure(step).peak_bytes
    assert abs(max(first.peak_bytes, second.peak_bytes) - measured) <= 64  # a scalar or two of autograd
