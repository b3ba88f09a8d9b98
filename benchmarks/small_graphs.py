"""Small training steps, single blocks of well-known models among them, on which the optimum can be found."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

TOKENS, WIDTH, HEADS = 1024, 512, 8


class GPTFeedForward(nn.Module):
    """x + MLP(LayerNorm(x)) with GELU, and dropout where ``dropout`` > 0."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class Attention(nn.Module):
    """One causal self-attention, written out, on projections made elsewhere: softmax(q k' / sqrt(d)) v."""

    def forward(self, q, k, v):
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return scores.softmax(-1) @ v


class SelfAttention(nn.Module):
    """x + W attention(QKV x), without a norm."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).view(1, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = Attention()(q, k, v).transpose(1, 2).reshape(1, TOKENS, WIDTH)
        return x + self.out(mixed)


class RMSNorm(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaFeedForward(nn.Module):
    """x + down(silu(gate(y)) * up(y)), y = RMSNorm(x)."""

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class NormChain(nn.Module):
    """Matmuls with an RMSNorm before each."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(RMSNorm(), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(num_layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class ConvBlock(nn.Module):
    """relu(x + BatchNorm(conv(x)))."""

    def __init__(self, channels: int = 64):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


def perceptron(activation: type[nn.Module], num_layers: int) -> nn.Module:
    return nn.Sequential(*(m for _ in range(num_layers) for m in (nn.Linear(WIDTH, WIDTH), activation())))


class ResidualChain(nn.Module):
    """x + down(activation(up(x))), ``num_layers`` times; many rows of few columns, so that weights are small."""

    def __init__(self, activation: type[nn.Module], num_layers: int, width: int = 128):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width, bias=False), activation(), nn.Linear(4 * width, width, bias=False)
            )
            for _ in range(num_layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Loss(nn.Module):
    """Cross-entropy of a linear head: scores of many words."""

    def __init__(self, words: int = 4096):
        super().__init__()
        self.head, self.words = nn.Linear(WIDTH, words, bias=False), words

    def forward(self, x, targets):
        return F.cross_entropy(self.head(x), targets)


def hidden(*shape: int) -> torch.Tensor:
    return torch.empty(*shape or (TOKENS, WIDTH), requires_grad=True)


def heads() -> tuple[torch.Tensor, ...]:
    return tuple(hidden(1, HEADS, TOKENS, WIDTH // HEADS) for _ in range(3))


# name -> what makes the module and its arguments, under a meta device
STEPS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "GPT feed-forward": lambda: (GPTFeedForward(), (hidden(),)),
    "GPT feed-forward, dropout": lambda: (GPTFeedForward(0.1), (hidden(),)),
    "attention": lambda: (Attention(), heads()),
    "self-attention": lambda: (SelfAttention(), (hidden(1, TOKENS, WIDTH),)),
    "Llama feed-forward": lambda: (LlamaFeedForward(), (hidden(),)),
    "RMSNorm and matmul, 2 layers": lambda: (NormChain(2), (hidden(),)),
    "conv, BatchNorm, residual": lambda: (ConvBlock(), (hidden(32, 64, 32, 32),)),
    "MLP, tanh, 5 layers": lambda: (perceptron(nn.Tanh, 5), (hidden(),)),
    "MLP, GELU, 2 layers": lambda: (perceptron(nn.GELU, 2), (hidden(),)),
    "MLP, SiLU, 2 layers": lambda: (perceptron(nn.SiLU, 2), (hidden(),)),
    "residual MLP, ReLU, 3 layers": lambda: (ResidualChain(nn.ReLU, 3), (hidden(8 * TOKENS, 128),)),
    "residual MLP, tanh, 3 layers": lambda: (ResidualChain(nn.Tanh, 3), (hidden(8 * TOKENS, 128),)),
    "residual MLP, SiLU, 2 layers": lambda: (ResidualChain(nn.SiLU, 2), (hidden(8 * TOKENS, 128),)),
    "cross-entropy": lambda: (Loss(), (hidden(), torch.empty(TOKENS, dtype=torch.long))),
}
