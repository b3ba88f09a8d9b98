"""Tiny models with random weights, all on the CPU and the same at every call.

Each factory returns ``(module in training mode, inputs, loss)``: ``loss(module(**inputs))`` is a scalar. `dropout` is
the probability of every dropout that the architecture has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

WORDS = 64
WIDTH = 32
LENGTH = 16
BATCH = 2

Model = tuple[nn.Module, dict[str, torch.Tensor], Callable[[Any], torch.Tensor]]


def gpt2(dropout: float = 0.0) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model, inputs, loss = language_model(GPT2LMHeadModel, config)
    model.loss_type = "ForCausalLM"  # transformers finds none for this class and logs that, which breaks the graph
    return model, inputs, loss


def llama(dropout: float = 0.0) -> Model:
    """Grouped-query attention: four heads of queries share two of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
        use_cache=False,
        attn_implementation="eager",
    )
    return language_model(LlamaForCausalLM, config)


def bert(dropout: float = 0.0) -> Model:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )
    return language_model(BertForMaskedLM, config)


def vit(dropout: float = 0.0) -> Model:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=5,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = ViTForImageClassification(config).train()
    nn.init.normal_(model.classifier.weight, std=0.2)
    inputs = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(5, (BATCH,))}
    return model, inputs, loss_of_output


def t5(dropout: float = 0.0) -> Model:
    """Encoder and decoder with cross-attention; the encoder's layers share one table of position biases."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    return language_model(T5ForConditionalGeneration, config)


def language_model(kind: type[nn.Module], config: Any) -> Model:
    torch.manual_seed(0)
    model = kind(config).train()
    tokens = torch.randint(1, WORDS, (BATCH, LENGTH))
    return model, {"input_ids": tokens, "labels": tokens.clone()}, loss_of_output


def loss_of_output(output: Any) -> torch.Tensor:
    return output.loss


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut, with in-place ReLUs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)), inplace=True)


class ConvNet(nn.Module):
    """`momentum` is that of the last norm: None averages over all steps and breaks the graph."""

    def __init__(self, channels: int, dropout: float, momentum: float | None) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.MaxPool2d(2)
        )
        self.blocks = nn.Sequential(ResidualBlock(channels), ResidualBlock(channels))
        self.norm = nn.BatchNorm2d(channels, momentum=momentum)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.blocks(self.stem(images))))
        return F.cross_entropy(self.head(self.dropout(x.mean((2, 3)))), labels)


def resnet(dropout: float = 0.0, momentum: float | None = 0.1) -> Model:
    torch.manual_seed(0)
    model = ConvNet(8, dropout, momentum).train()
    return model, {"images": torch.randn(4, 3, 16, 16), "labels": torch.randint(5, (4,))}, identity


def resnet_with_cumulative_average(dropout: float = 0.0) -> Model:
    return resnet(dropout, momentum=None)


class Block(nn.Module):
    """An MLP with a norm and a shortcut."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class TwoTraversals(nn.Module):
    """The same blocks applied twice."""

    def __init__(self, width: int, num_blocks: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x


def two_traversals(dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    model = TwoTraversals(WIDTH, num_blocks=2, dropout=dropout).train()
    return model, {"x": torch.randn(BATCH, LENGTH, WIDTH)}, mean_square


class TiedEmbedding(nn.Module):
    """One matrix is the embedding and the head."""

    def __init__(self, words: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.block = Block(width, dropout)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten())


def tied_embedding(dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    model = TiedEmbedding(WORDS, WIDTH, dropout).train()
    return model, {"tokens": torch.randint(WORDS, (BATCH, LENGTH))}, identity


def identity(output: torch.Tensor) -> torch.Tensor:
    return output


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


MODELS: dict[str, Callable[..., Model]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "resnet": resnet,
    "resnet_with_cumulative_average": resnet_with_cumulative_average,
    "two_traversals": two_traversals,
    "tied_embedding": tied_embedding,
}
