"""The reference models that the planner is judged by, in bfloat16: attention written out, sizes of a few GiB a step.

| name         | layers | batch          | notes                                                            |
|--------------|--------|----------------|------------------------------------------------------------------|
| gpt-12x2048  | 12     | 2 x 2048       | width 1024, 16 heads, vocabulary 2048, dropout 0.1               |
| gpt-6x1024   | 6      | 2 x 1024       | the same                                                         |
| llama-4x2048 | 4      | 2 x 2048       | width 1024, 16 heads, feed-forward 2816, vocabulary 2048         |
| conv-8x32    | 8      | 32 x 3 x 32^2  | residual blocks of 128 channels with BatchNorm                   |

A name that ends in ``-nodrop`` is the model without dropout. Each module takes its batch and returns the loss.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, HEADS, WORDS = 1024, 16, 2048
FEED_FORWARD = 2816
BATCH = 2
CHANNELS, CLASSES = 128, 1000
IMAGES = (32, 3, 32, 32)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, float_softmax: bool = False
) -> torch.Tensor:
    """Scores and probabilities, (B, heads, L, L) each, are ordinary values. q, k, v: (B, heads, L, head size)."""
    length = q.shape[-2]
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~seen, float("-inf"))
    probabilities = scores.float().softmax(-1).to(q.dtype) if float_softmax else scores.softmax(-1)
    return F.dropout(probabilities, dropout) @ v


class GPTBlock(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return self.out(causal_attention(q, k, v, self.dropout).transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attend(self.norm1(x)), self.dropout)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout)


class GPT(nn.Module):
    def __init__(self, layers: int, dropout: float = 0.1):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class RMSNorm(nn.Module):
    """In float32 whatever the input is, as Llama has it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class LlamaBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, FEED_FORWARD, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED_FORWARD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = causal_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, float_softmax=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Llama(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(layers))
        self.norm, self.head = RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        size = WIDTH // HEADS
        place = torch.arange(tokens.shape[1], device=tokens.device).float()[:, None]
        rate = 10000 ** (-torch.arange(0, size, 2, device=tokens.device).float() / size)
        angle = torch.cat((place * rate[None], place * rate[None]), -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ConvNet(nn.Module):
    def __init__(self, blocks: int):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(blocks))
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.zeros(len(x), dtype=torch.long, device=x.device))


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Module and batch of a name such as ``gpt-6x1024`` or ``gpt-6x1024-nodrop``, both on meta."""
    kind, size, *variant = name.split("-")
    layers, length = map(int, size.split("x"))
    with torch.device("meta"):
        if kind == "conv":
            return ConvNet(layers).to(torch.bfloat16), torch.empty(IMAGES, dtype=torch.bfloat16)
        model = Llama(layers) if kind == "llama" else GPT(layers, 0.0 if variant == ["nodrop"] else 0.1)
        return model.to(torch.bfloat16), torch.empty(BATCH, length, dtype=torch.long)
