"""What only a GPU can show: Triton kernels with the right gradients, and budgets respected by CUDA's own statistics."""

import pytest
import torch

import recompile

pytestmark = pytest.mark.gpu
MIB = 2**20


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


def small_model() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(256, 8) for _ in range(4))).cuda()
    return model, torch.randn(4, 512, 256, device="cuda")


def gradients_of(model: torch.nn.Module, call, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    call(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("budget", [None, 0.5, 0.0])
def test_gradients_equal_eager_mode_on_cuda(budget):
    torch._dynamo.reset()
    model, x = small_model()
    expected = gradients_of(model, model, x)
    compiled = torch.compile(model, backend="recompile", options={"memory_budget": budget})
    for got, wanted in zip(gradients_of(model, compiled, x), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-5)


def test_a_budget_in_bytes_holds_for_cudas_own_statistics():
    torch._dynamo.reset()
    model, x = small_model()
    fastest = torch.compile(model, backend="recompile")
    gradients_of(model, fastest, x)
    budget = int(recompile.explain(fastest).peak_bytes * 0.6)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="recompile", options={"memory_budget": budget})
    gradients_of(model, compiled, x)
    model.zero_grad()
    measured = recompile.measure(lambda: compiled(x).square().mean().backward(), device="cuda")
    workspace = 32 * MIB  # cuBLAS allocates it once per handle, through the same allocator
    assert measured.peak_bytes <= budget + workspace


def test_watched_steps_are_measured_by_cudas_own_statistics():
    torch._dynamo.reset()
    model, x = small_model()
    compiled = torch.compile(model, backend="recompile")
    with recompile.watch(compiled) as step:
        for _ in range(4):
            gradients_of(model, step, x)
    assert len(step.steps) == 2
    assert all(abs(peak.measured_bytes - peak.predicted_bytes) < 0.1 * peak.predicted_bytes for peak in step.steps)
