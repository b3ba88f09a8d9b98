"""PyTorch's private part behind saved graphs: tensors that have sizes and storages and no content."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses import FakeTensorMode


class FakeValues:
    """Makes fake tensors of one mode. Nothing is allocated, and the device need not be there."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def storage(self, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
        """The memory that one or more tensors look into."""
        with self.mode:
            return torch.empty(size_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def tensor(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int],
        offset: int, device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        """A tensor that looks into a storage; ``stride`` and ``offset`` in elements."""
        with self.mode, torch.no_grad():
            return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, list(shape), list(stride))
