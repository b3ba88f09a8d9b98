"""Transformer layers in the shapes that published figures are about; on meta, so of any size."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    """Causal self-attention of ``heads`` query and ``key_heads`` key heads over ``width`` inputs, with dropout.

    ``flash=False`` writes out scores and probabilities, (B, heads, L, L) each.
    """

    def __init__(self, width: int, heads: int, head_dim: int, key_heads: int, dropout: float, flash: bool):
        super().__init__()
        self.heads, self.key_heads, self.head_dim, self.dropout, self.flash = heads, key_heads, head_dim, dropout, flash
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        sizes = [self.heads * self.head_dim, self.key_heads * self.head_dim, self.key_heads * self.head_dim]
        q, k, v = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=-1)
        )
        if self.flash:
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.dropout, enable_gqa=self.key_heads != self.heads
            )
        else:
            mixed = self.written_out(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))

    def written_out(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.key_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.key_heads, dim=1) for part in (k, v))
        length = q.shape[-2]
        scores = (q @ k.transpose(-1, -2)) * self.head_dim**-0.5
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return F.dropout(probabilities, self.dropout, self.training) @ v


class GPTLayer(nn.Module):
    """LayerNorm, attention, LayerNorm, GELU; dropout 0.1 as in GPT-3's predecessors."""

    def __init__(self, width: int, heads: int, flash: bool, dropout: float = 0.1):
        super().__init__()
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), dropout
        self.attention = Attention(width, heads, width // heads, heads, dropout, flash)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class ShardedLayer(nn.Module):
    """One rank's share of a Llama layer under tensor and sequence parallelism over ``ranks``.

    The rank has its part of the sequence between blocks, and inside of them the whole sequence for its heads and its
    part of the feed-forward. A copy stands for the all-gather and a sum over parts for the reduce-scatter: the same
    bytes in memory, no time on the wire, and both may run again, as Megatron's gather in backward does.
    """

    def __init__(
        self, width: int, heads: int, key_heads: int, feed_forward: int, ranks: int, flash: bool, dropout: float = 0.0
    ):
        super().__init__()
        head_dim = width // heads
        self.ranks = ranks
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads // ranks, head_dim, max(1, key_heads // ranks), dropout, flash)
        self.gate, self.up = (nn.Linear(width, feed_forward // ranks, bias=False) for _ in range(2))
        self.down = nn.Linear(feed_forward // ranks, width, bias=False)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, self.ranks, 1)

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        return x.view(batch, self.ranks, length // self.ranks, width).sum(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scattered(self.attention(self.gathered(self.norm1(x))))
        h = self.gathered(self.norm2(x))
        return x + self.scattered(self.down(F.silu(self.gate(h)) * self.up(h)))


class Layers(nn.Module):
    """Equal layers one after the other, and a sum as the loss."""

    def __init__(self, make_layer, count: int):
        super().__init__()
        self.layers = nn.ModuleList(make_layer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()
