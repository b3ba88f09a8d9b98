"""One training step as a joint graph for a GPU that need not be there: nothing runs, no weight is allocated.

``trace_step`` goes the way of torch.compile, through Dynamo, AOTAutograd and Inductor's joint-graph passes, up to where
the partitioner is called. What that takes beside PyTorch's public functions is in ``torch_private_trace``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils._pytree as pytree

from recompile.torch_private_trace import JointTrace, new_fake_mode, trace_joint

__all__ = ["JointTrace", "as_fakes", "trace_step"]


def trace_step(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    inductor: Mapping[str, Any] | None = None,
    autocast: torch.dtype | None = None,
) -> JointTrace:
    """The joint graph of ``model(*args, **kwargs)`` and its backward, every value a fake tensor on ``cuda:0``.

    ``model``: an ``nn.Module`` in the mode (train or eval) that is meant, or a function of its arguments. Parameters
    and arguments may be real, fake or on meta; none is changed or read, only shapes, strides and dtypes count. Sizes
    are taken as constants. ``inductor``: options of Inductor's, as for torch.compile. ``autocast``: the dtype of
    ``torch.autocast("cuda", dtype)`` around the call; without it, what is on around this one. Raises ValueError if
    nothing wants a gradient, and what Dynamo raises, among it torch._dynamo.exc.Unsupported, with the place, for a
    graph break.
    """
    mode = new_fake_mode()
    model, args, kwargs = as_fakes((model, tuple(args), dict(kwargs or {})), mode)
    traced = trace_joint(model, args, kwargs, mode, inductor or {}, autocast)
    if traced is None:
        raise ValueError("nothing to train: no parameter and no argument that the result depends on wants a gradient")
    return traced


def as_fakes(value: Any, mode: AbstractContextManager) -> Any:
    """A deep copy with fake CPU tensors in place of all tensors; what shares a tensor shares one afterwards.

    ``mode``: torch's FakeTensorMode that they belong to.
    """
    memo = {}
    for tensor in tensors_in(value):
        if id(tensor) not in memo:
            memo[id(tensor)] = without_content(tensor, mode)
    return copy.deepcopy(value, memo)


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in containers and in modules, those that are plain attributes of modules included."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch.nn.Module):
            for module in leaf.modules():
                found = pytree.tree_leaves([vars(module), dict(module._parameters), dict(module._buffers)])
                yield from (item for item in found if isinstance(item, torch.Tensor))


def without_content(tensor: torch.Tensor, mode: AbstractContextManager) -> torch.Tensor:
    """A fake tensor like ``tensor``: shape, strides, dtype, whether it is a parameter, whether it wants a gradient."""
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)
