"""All the memory that training a model takes on one GPU, itemised, so that the total compares with the GPU's size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from recompile.chip import HOPPER, blas_workspace_bytes
from recompile.units import format_bytes
from recompile.work import storage_bytes_of

# State that an optimizer keeps for one byte of trainable parameter: torch.optim holds it in the parameter's dtype.
STATE_PER_PARAMETER_BYTE = {"adamw": 2.0, "adam": 2.0, "sgd": 0.0, "sgd-momentum": 1.0, "none": 0.0}
# An assumption, to be replaced by what nvidia-smi shows for an idle process on the machine at hand: the CUDA context,
# loaded kernels, and library handles are outside of PyTorch's allocator.
CONTEXT_BYTES = 2**29
# An assumption: share of the allocator's peak that lies in blocks of segments that nothing else fits into.
FRAGMENTATION_SHARE = 0.03


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device while training, at the moment of the step's peak."""

    parameter_bytes: int
    buffer_bytes: int
    batch_bytes: int
    optimizer_bytes: int
    step_bytes: int  # the step's peak over what forward starts with: activations, temporaries, gradients
    gradient_bytes: int  # of all trainable parameters; in ``step_bytes`` as far as they exist at the peak
    workspace_bytes: int
    context_bytes: int
    fragmentation_bytes: int

    @property
    def total_bytes(self) -> int:
        """What to compare with the device's memory. After backward all gradients are alive, whatever the peak was."""
        outside = self.workspace_bytes + self.context_bytes + self.fragmentation_bytes
        return self.held_bytes + max(self.step_bytes, self.gradient_bytes) + outside

    @property
    def held_bytes(self) -> int:
        """What stays allocated between steps."""
        return self.parameter_bytes + self.buffer_bytes + self.batch_bytes + self.optimizer_bytes

    def with_step(self, step_bytes: int) -> Footprint:
        """The same training with another peak of its step."""
        allocated = self.held_bytes + max(step_bytes, self.gradient_bytes)
        return replace(self, step_bytes=step_bytes, fragmentation_bytes=math.ceil(FRAGMENTATION_SHARE * allocated))

    def step_bytes_within(self, memory_bytes: int) -> int:
        """The largest peak of the step with which the total stays within ``memory_bytes``; may be negative."""
        allocated = (memory_bytes - self.workspace_bytes - self.context_bytes) / (1 + FRAGMENTATION_SHARE)
        return math.floor(allocated) - self.held_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_bytes": self.total_bytes}

    def items(self) -> list[tuple[str, int]]:
        """Names for people and bytes, the total last."""
        return [
            ("parameters", self.parameter_bytes),
            ("buffers", self.buffer_bytes),
            ("batch", self.batch_bytes),
            ("optimizer state", self.optimizer_bytes),
            (f"step's peak (with gradients, {format_bytes(self.gradient_bytes)} in the end)", self.step_bytes),
            ("cuBLAS workspace", self.workspace_bytes),
            ("CUDA context, assumed", self.context_bytes),
            (f"fragmentation, assumed {FRAGMENTATION_SHARE:.0%}", self.fragmentation_bytes),
            ("total", self.total_bytes),
        ]

    def __str__(self) -> str:
        rows = self.items()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {format_bytes(size):>10}" for name, size in rows)


def state_bytes_per_parameter_byte(optimizer: str | float) -> float:
    """``"adamw"``, ``"sgd"``, ... or a number: bytes of optimizer state for each byte of trainable parameter.

    Raises ValueError naming what is accepted.
    """
    if isinstance(optimizer, int | float) and not isinstance(optimizer, bool) and optimizer >= 0:
        return float(optimizer)
    if isinstance(optimizer, str) and optimizer.lower() in STATE_PER_PARAMETER_BYTE:
        return STATE_PER_PARAMETER_BYTE[optimizer.lower()]
    names = ", ".join(STATE_PER_PARAMETER_BYTE)
    raise ValueError(
        f"optimizer={optimizer!r} is not known; accepted: one of {names}, or a number, the bytes of state for each "
        f"byte of trainable parameter"
    )


def footprint(
    model: torch.nn.Module,
    batch: Any,
    step_bytes: int,
    optimizer: str | float = "adamw",
    *,
    capability: tuple[int, int] = HOPPER,
    context_bytes: int = CONTEXT_BYTES,
) -> Footprint:
    """Itemise. ``step_bytes``: the predicted peak of the step; ``batch``: its inputs, on any device, meta included.

    Shared parameters count once. The optimizer is taken to update in place, as ``fused=True`` does.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainable_bytes = storage_bytes_of(trainable)
    held = storage_bytes_of(list(model.parameters())), storage_bytes_of(list(model.buffers()))
    state_bytes = int(trainable_bytes * state_bytes_per_parameter_byte(optimizer))
    batch_bytes = storage_bytes_of(list(_tensors(batch)))
    items = Footprint(
        parameter_bytes=held[0],
        buffer_bytes=held[1],
        batch_bytes=batch_bytes,
        optimizer_bytes=state_bytes,
        step_bytes=step_bytes,
        gradient_bytes=trainable_bytes,
        workspace_bytes=blas_workspace_bytes(capability),
        context_bytes=context_bytes,
        fragmentation_bytes=0,
    )
    return items.with_step(step_bytes)


def _tensors(batch: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
