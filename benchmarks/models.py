"""Training steps for the CPU: small enough to compile within a minute on one core, activations of some tens of MiB.

``build(name)`` gives the same weights and batch at every call. Each module takes its batch by keyword and returns the
scalar loss. ``checkpointed`` wraps the blocks that people checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu import Language, Shape
from benchmarks.layers import GPTLayer, ShardedLayer
from tests.whole.models import Block, ResidualBlock, TwoTraversals

SEED = 0
WORDS, WIDTH, HEADS, LENGTH, BATCH = 256, 128, 8, 256, 2
DROPOUT = 0.1
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How to make a step: ``make`` returns the module and its batch. ``blocks``: the types that are checkpointed."""

    make: Callable[[], tuple[nn.Module, Batch]]
    blocks: tuple[str, ...]
    has_dropout: bool = False


def tokens() -> torch.Tensor:
    return torch.randint(1, WORDS, (BATCH, LENGTH))


# Language models


def gpt(dropout: float = DROPOUT) -> tuple[nn.Module, Batch]:
    shape = Shape(4, WIDTH, HEADS, LENGTH, BATCH, WORDS)
    return Language(lambda: GPTLayer(WIDTH, HEADS, flash=False, dropout=dropout), shape), {"tokens": tokens()}


def llama() -> tuple[nn.Module, Batch]:
    """SwiGLU; eight heads of queries share two of keys and values."""
    shape = Shape(4, WIDTH, HEADS, LENGTH, BATCH, WORDS)
    return Language(lambda: ShardedLayer(WIDTH, HEADS, 2, 352, 1, flash=False), shape), {"tokens": tokens()}


class LossOf(nn.Module):
    """A model of transformers; its loss alone is returned, so that nothing else is an output."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss


def bert() -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH, hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT, attn_implementation="eager",
    )  # fmt: skip
    ids = tokens()
    return LossOf(BertForMaskedLM(config)), {"input_ids": ids, "labels": ids}


def vit() -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=64, patch_size=4, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
        attn_implementation="eager",
        problem_type="single_label_classification",  # which the first call would write, and Dynamo compile again for
    )  # fmt: skip
    images, labels = torch.randn(BATCH, 3, 64, 64), torch.randint(10, (BATCH,))
    return LossOf(ViTForImageClassification(config)), {"pixel_values": images, "labels": labels}


def t5() -> tuple[nn.Module, Batch]:
    """Encoder and decoder with cross-attention; one table of position biases serves all layers of each."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, num_layers=3, num_decoder_layers=3,
        num_heads=HEADS, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        attn_implementation="eager",
    )  # fmt: skip
    ids = tokens()
    return LossOf(T5ForConditionalGeneration(config)), {"input_ids": ids, "labels": ids}


# Others


class ResNet(nn.Module):
    """Residual blocks with BatchNorm at two resolutions."""

    def __init__(self, channels: int = 32):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.fine = nn.Sequential(*(ResidualBlock(channels) for _ in range(3)))
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.coarse = nn.Sequential(*(ResidualBlock(2 * channels) for _ in range(3)))
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.coarse(self.down(self.fine(F.relu(self.stem(images)))))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet() -> tuple[nn.Module, Batch]:
    return ResNet(), {"images": torch.randn(4, 3, 64, 64), "labels": torch.randint(10, (4,))}


class TwoConvolutions(nn.Module):
    """The step of a U-net at one resolution (Ronneberger et al. 2015), with GroupNorm."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Down over three halvings and up again; each resolution's result skips to the way up."""

    def __init__(self, channels: tuple[int, ...] = (16, 32, 64, 128)):
        super().__init__()
        wider = list(itertools.pairwise(channels))
        self.first = TwoConvolutions(3, channels[0])
        self.downs = nn.ModuleList(TwoConvolutions(a, b) for a, b in wider)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(wider))
        self.merges = nn.ModuleList(TwoConvolutions(2 * a, a) for a, b in reversed(wider))
        self.last = nn.Conv2d(channels[0], 3, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images)
        skipped = []
        for down in self.downs:
            skipped.append(x)
            x = down(F.avg_pool2d(x, 2))
        for up, merge in zip(self.ups, self.merges, strict=True):
            x = merge(torch.cat((skipped.pop(), up(x)), 1))
        return F.mse_loss(self.last(x), images)


def unet() -> tuple[nn.Module, Batch]:
    return UNet(), {"images": torch.randn(4, 3, 64, 64)}


class MeanSquare(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


def two_traversals() -> tuple[nn.Module, Batch]:
    """The same four blocks twice in one graph."""
    return MeanSquare(TwoTraversals(WIDTH, 4, 0.0)), {"x": torch.randn(8, LENGTH, WIDTH)}


class Experts(nn.Module):
    """A mixture of experts in which each expert picks its tokens (Zhou et al. 2022), so that all sizes are constant."""

    def __init__(self, width: int = WIDTH, experts: int = 4, hidden: int = 2 * WIDTH):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, -2)
        num_experts, width = self.up.shape[0], rows.shape[1]
        picked_share, picked = self.router(rows).softmax(-1).t().topk(2 * len(rows) // num_experts, dim=-1)
        made = torch.bmm(F.silu(torch.bmm(rows[picked], self.up)), self.down) * picked_share[..., None]
        return x + torch.zeros_like(rows).index_add(0, picked.flatten(), made.reshape(-1, width)).view_as(x)


class DenseAndExperts(nn.Module):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Block(WIDTH, 0.0), Experts()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def experts() -> tuple[nn.Module, Batch]:
    return DenseAndExperts(), {"x": torch.randn(4, LENGTH, WIDTH)}


class Layers(nn.Sequential):
    """Some layers of the deep net: what people would checkpoint together."""

    def __init__(self, count: int = 8, width: int = 64):
        super().__init__(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.GELU())))


def mlp() -> tuple[nn.Module, Batch]:
    """64 layers whose inputs are as large as all that is in them: what lies between layers dominates."""
    return MeanSquare(nn.Sequential(*(Layers() for _ in range(8)))), {"x": torch.randn(2048, 64)}


RECIPES = {  # the quickest to compile first
    "two-traversals": Recipe(two_traversals, ("Block",)),
    "experts": Recipe(experts, ("Block", "Experts")),
    "resnet": Recipe(resnet, ("ResidualBlock",)),
    "llama": Recipe(llama, ("ShardedLayer",)),
    "gpt": Recipe(gpt, ("GPTLayer",), has_dropout=True),
    "unet": Recipe(unet, ("TwoConvolutions",)),
    "mlp": Recipe(mlp, ("Layers",)),
    "vit": Recipe(vit, ("ViTLayer",)),
    "bert": Recipe(bert, ("BertLayer",), has_dropout=True),
    "t5": Recipe(t5, ("T5Block",)),
}


def build(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(SEED)
    module, batch = RECIPES[name].make()
    return module.train(), batch


class Checkpointed(nn.Module):
    """A block whose activations are dropped and computed again in backward, by ``torch.utils.checkpoint``."""

    def __init__(self, block: nn.Module, settings: dict[str, Any]):
        super().__init__()
        self.block, self.settings = block, settings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **self.settings, **kwargs)


def checkpointed(module: nn.Module, blocks: tuple[str, ...], settings: dict[str, Any]) -> nn.Module:
    """The module with every block of these types checkpointed, in place; ``settings`` are torch.utils.checkpoint's."""
    for name, child in module.named_children():
        if type(child).__name__ in blocks:
            setattr(module, name, Checkpointed(child, settings))
        else:
            checkpointed(child, blocks, settings)
    return module
