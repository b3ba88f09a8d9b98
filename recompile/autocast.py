"""``torch.autocast`` as a GPU applies it, for a trace that is made on the CPU.

Autocast keeps two lists of ops: those that run in the low precision and those that run in float32. The CPU's float32
list is much shorter than CUDA's, so that a softmax or a LayerNorm traced there would stay in bfloat16 and every size
after it would be wrong. While ``autocast_of_gpu`` is entered, the CPU's list is CUDA's (aten/src/ATen/autocast_mode.h,
AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE), and autocast for "cuda" around the caller counts for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

from recompile.work import words

# Composite losses (cosine_embedding_loss, hinge_embedding_loss, ...) end in ops of this list.
FLOAT32_ON_CUDA = words("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm group_norm cosine_similarity cosine_embedding_loss nll_loss
    nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList
    norm.Scalar norm.ScalarOpt_dim
    """)
LOW_PRECISION = (torch.bfloat16, torch.float16)
AUTOCAST_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def autocast_of_gpu(dtype: torch.dtype | None = None) -> Iterator[None]:
    """The CPU casts what CUDA would; restored on the way out.

    On with ``dtype``, or as it is on around the caller, for CUDA or for the CPU: without CUDA at hand,
    ``torch.autocast("cuda")`` turns itself off.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in sorted(FLOAT32_ON_CUDA):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU"):
            library.impl(op, in_float32(op), "AutocastCPU")
    try:
        with autocast_on_cpu(dtype):
            yield
    finally:
        library._destroy()


def autocast_on_cpu(dtype: torch.dtype | None) -> Any:
    """Autocast for the CPU with ``dtype``, or as it is set for CUDA around the caller."""
    if dtype is None and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def in_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with its low-precision arguments in float32. One that asks for a dtype itself, as ``sum`` may, gets it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        asks = kwargs.get("dtype") is not None or any(isinstance(argument, torch.dtype) for argument in args)
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_ON_CPU):
            return op(*args, **kwargs) if asks else op(*tree_map(widened, args), **tree_map(widened, kwargs))

    return call


def widened(value: Any) -> Any:
    """A low-precision tensor in float32, all else as it is."""
    is_low = isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION
    return value.to(torch.float32) if is_low else value
