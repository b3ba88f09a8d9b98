"""One training step as a joint graph for a GPU that need not be there: nothing runs, no weight is allocated.

``trace_step`` goes the way of torch.compile, through Dynamo, AOTAutograd and Inductor's joint-graph passes, up to where
the partitioner is called. What that takes beside PyTorch's public functions is in ``torch_private_trace``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from recompile.torch_private_trace import JointTrace, trace_joint

__all__ = ["JointTrace", "on_meta", "trace_step"]


def trace_step(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    inductor: Mapping[str, Any] | None = None,
) -> JointTrace:
    """The joint graph of ``model(*args, **kwargs)`` and its backward, every value a fake tensor on ``cuda:0``.

    ``model``: an ``nn.Module`` in the mode (train or eval) that is meant, or a function of its arguments. Parameters
    and arguments may be real, fake or on meta; none is changed or read, only shapes, strides and dtypes count. Sizes
    are taken as constants. ``inductor``: options of Inductor's, as for torch.compile. Raises ValueError if nothing
    wants a gradient, and what Dynamo raises, among it torch._dynamo.exc.Unsupported, with the place, for a graph break.
    """
    model, args, kwargs = on_meta((model, tuple(args), dict(kwargs or {})))
    traced = trace_joint(model, args, kwargs, inductor or {})
    if traced is None:
        raise ValueError("nothing to train: no parameter and no argument that the result depends on wants a gradient")
    return traced


def on_meta(value: Any) -> Any:
    """A deep copy with tensors on meta in place of all others; what shares a tensor shares one afterwards."""
    memo = {}
    for tensor in tensors_in(value):
        if id(tensor) not in memo:
            memo[id(tensor)] = without_content(tensor)
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


def without_content(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on meta like ``tensor`` in shape, strides and dtype; a parameter for a parameter."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)
