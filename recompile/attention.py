"""Which kernel ``F.scaled_dot_product_attention`` runs on an NVIDIA GPU, so that a trace made elsewhere has its op.

torch chooses by device when it is called, and on a CPU takes an op that no GPU has. The rules are those of
``can_use_flash_attention`` and ``can_use_mem_efficient_attention`` (aten/src/ATen/native/transformers/cuda/
sdp_utils.cpp) in torch's default order, flash, then memory-efficient, then written out. Not modelled: cuDNN's kernel,
which newer torches prefer on some data-center GPUs (it saves the same tensors), nested tensors, and settings under
``torch.nn.attention.sdpa_kernel``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

FLASH_DTYPES = (torch.float16, torch.bfloat16)
EFFICIENT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_FLASH_HEAD_DIM = 256
FLASH_ALIGNMENT = 8  # elements of the head dimension, pad_last_dim<8> in attention.cpp
ATTENTION = (
    F.scaled_dot_product_attention,
    aten.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
)
BIAS_ALIGNMENT = 16  # elements of a mask's last dimension, pad_bias<16> in attention.cpp


class AttentionForGPU(TorchFunctionMode):
    """While it is active, ``F.scaled_dot_product_attention`` is what it would be on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping | None = None
    ) -> Any:
        chosen = attention_on_gpu if func in ATTENTION else func
        return chosen(*args, **(kwargs or {}))


def attention_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the op that a GPU takes. query: (B, heads, L, D); key, value: (B, key heads, S, D)."""
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    if can_use_flash(query, key, value, attn_mask, is_causal, enable_gqa):
        padded = (padded_to(tensor, FLASH_ALIGNMENT) for tensor in (query, key, value))
        mixed = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return mixed[..., : value.shape[-1]]
    if can_use_efficient(query, key, value):
        bias = None if attn_mask is None else bias_of(attn_mask, query, key)
        wants_gradient = any(tensor.requires_grad for tensor in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, wants_gradient, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def can_use_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Whether the flash kernel takes these; GPUs of compute capability 8.0 or newer."""
    heads_fit = query.shape[-3] == key.shape[-3] == value.shape[-3] or enable_gqa
    is_square = query.shape[-2] == key.shape[-2]
    return (
        attn_mask is None
        and are_alike(query, key, value)
        and query.dtype in FLASH_DTYPES
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= LARGEST_FLASH_HEAD_DIM
        and heads_fit
        and (is_square or not is_causal)
    )


def can_use_efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the memory-efficient kernel takes these: as many key heads as query heads, no grouped queries."""
    return (
        are_alike(query, key, value)
        and query.dtype in EFFICIENT_DTYPES
        and query.shape[-3] == key.shape[-3] == value.shape[-3]
        and query.shape[-1] == key.shape[-1]
    )


def are_alike(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Four dimensions, one batch size and one dtype."""
    tensors = (query, key, value)
    return (
        all(tensor.dim() == 4 for tensor in tensors)
        and len({tensor.shape[0] for tensor in tensors}) == 1
        and len({tensor.dtype for tensor in tensors}) == 1
    )


def padded_to(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """The tensor with zeros added so that its last dimension is a multiple."""
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def bias_of(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as what is added to the scores, (B, heads, L, S): rows start at multiples the kernel asks for."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    length = key.shape[-2]
    return padded_to(mask, BIAS_ALIGNMENT)[..., :length].expand(*query.shape[:-1], length)
