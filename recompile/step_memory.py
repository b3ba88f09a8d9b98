"""The most that one training step holds by the two programs that Inductor emitted for it, replayed one after the other.

What forward returns for backward goes on living, forward's caller has its outputs, and autograd brings the tangents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from recompile.replay import CUDA, Allocator, Block, ExternSizes, Run, replay
from recompile.torch_private import is_tangent
from recompile.versions import parse_release

# Whether AOTAutograd's backward keeps the tangents to its end: seen in torch 2.11 and not in 2.13 and 2.14, by counting
# who holds a tangent's storage after the compiled backward has cleared its arguments. 2.12 was not looked at.
HOLDS_TANGENTS = parse_release(torch.__version__) < (2, 13)


@dataclass(frozen=True)
class Given:
    """One argument of a program. ``tangent_bytes``: of a tangent, else None."""

    is_saved: bool  # handed on by forward, if this is backward
    tangent_bytes: int | None = None


@dataclass(frozen=True)
class Half:
    """Forward or backward as Inductor emitted it: its text, its arguments, and what its library calls allocate."""

    source: str
    given: tuple[Given, ...]
    sizes: ExternSizes


@dataclass(frozen=True)
class StepRun:
    """The replays of both halves. ``saved_bytes``: what forward leaves for backward and nobody else holds."""

    forward: Run
    backward: Run
    saved_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward.peak_bytes, self.backward.peak_bytes)


def replay_step(forward: Half, backward: Half, allocator: Allocator = CUDA) -> StepRun:
    """Replay forward, and backward from where it left off. Raises ReplayError, and ValueError if they don't match."""
    first = replay(forward.source, [None] * len(forward.given), forward.sizes, allocator=allocator)
    num_saved = sum(given.is_saved for given in backward.given)
    num_outputs = len(first.returned) - num_saved
    if num_outputs < 0:
        raise ValueError(f"forward returns {len(first.returned)} values, backward takes {num_saved} from it")
    outputs, saved = first.returned[:num_outputs], first.returned[num_outputs:]
    inputs = backward_blocks(backward.given, saved, allocator)
    tangents = [block for given, block in zip(backward.given, inputs, strict=True) if given.tangent_bytes is not None]
    held = [*outputs, *(tangents if HOLDS_TANGENTS else [])]  # forward's caller has its outputs
    held = [block for block in held if block is not None]
    second = replay(backward.source, inputs, backward.sizes, held, allocator)
    saved_bytes = sum(block.num_bytes for block in {*saved} - {*outputs} if block is not None)
    return StepRun(first, second, saved_bytes)


def backward_blocks(
    arguments: Sequence[Given], saved: Sequence[Block | None], allocator: Allocator
) -> list[Block | None]:
    """The block behind each of backward's arguments: what forward saved, in order, and new ones for the tangents."""
    remaining, blocks = iter(saved), []
    for given in arguments:
        if given.tangent_bytes is not None:
            blocks.append(allocator.block_of(given.tangent_bytes))
        else:
            blocks.append(next(remaining) if given.is_saved else None)
    return blocks


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.find_nodes(op="placeholder")


def given_to(module: fx.GraphModule) -> tuple[Given, ...]:
    """The arguments of a half, as its graph states them."""
    return tuple(
        Given(is_saved(node), node.meta["val"].untyped_storage().nbytes() if is_tangent(node) else None)
        for node in placeholders(module)
    )


def is_saved(node: fx.Node) -> bool:
    """Whether a placeholder of backward takes what forward saved: it is no tangent and no random generator."""
    return not is_tangent(node) and not isinstance(node.meta["val"], torch.Generator)


def scratch_bytes(node: fx.Node) -> int:
    """Bytes that a library call allocates and frees within itself: known for flash attention's backward alone.

    ``mha_bwd`` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: float32 sums for the query's
    gradient and a float32 a row, rows rounded up to 128 and heads to 32 (64 above 128); with grouped queries, gradients
    of keys and values for each query head.
    """
    if node.target is not torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
        return 0
    query, key = node.args[1].meta["val"], node.args[2].meta["val"]
    batch, heads, length, head_dim = query.shape
    rows = math.ceil(length / 128) * 128
    step = 32 if head_dim <= 128 else 64
    sums = 4 * batch * heads * rows * (math.ceil(head_dim / step) * step + 1)
    key_heads, key_length = key.shape[1], key.shape[2]
    expanded = 2 * batch * key_length * heads * head_dim * key.dtype.itemsize if key_heads != heads else 0
    return sums + expanded
