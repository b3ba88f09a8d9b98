"""What code generation for an NVIDIA GPU asks of the chip: facts that ``Hardware`` does not hold, by hardware name.

Limits of a multiprocessor: NVIDIA, CUDA C++ Programming Guide 13, "Technical Specifications per Compute Capability".
Numbers of multiprocessors: the data sheet or architecture white paper of each part.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

WARP_SIZE = 32  # threads, on every capability
REGISTERS_PER_MULTIPROCESSOR = 65536  # 32-bit ones, from capability 5.0 on
MAX_THREADS_PER_BLOCK = 1024

# capability -> resident threads of a multiprocessor, shared memory that one block may ask for in bytes
LIMITS = MappingProxyType(
    {
        (8, 0): (2048, 163 * 1024),
        (8, 6): (1536, 99 * 1024),
        (8, 9): (1536, 99 * 1024),
        (9, 0): (2048, 227 * 1024),
        (10, 0): (2048, 227 * 1024),
        (12, 0): (1536, 99 * 1024),
    }
)


# What torch gives cuBLAS for each handle and stream unless CUBLAS_WORKSPACE_CONFIG says otherwise
# (parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp): 32 MiB from Hopper on, before it :4096:2:16:8.
HOPPER = (9, 0)
BLAS_WORKSPACE_BYTES_FROM_HOPPER = 32 * 2**20
BLAS_WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024


def blas_workspace_bytes(capability: tuple[int, int]) -> int:
    """What torch allocates for cuBLAS at a process's first matmul and keeps."""
    return BLAS_WORKSPACE_BYTES_FROM_HOPPER if capability >= HOPPER else BLAS_WORKSPACE_BYTES


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU as a code generator sees it. ``device_name`` is what the driver calls it."""

    device_name: str
    capability: tuple[int, int]
    num_multiprocessors: int

    def __post_init__(self) -> None:
        if self.capability not in LIMITS:
            known = ", ".join(f"{major}.{minor}" for major, minor in LIMITS)
            raise ValueError(f"compute capability {self.capability!r} is not known; known are {known}")

    @property
    def max_threads_per_multiprocessor(self) -> int:
        return LIMITS[self.capability][0]

    @property
    def shared_bytes_per_block(self) -> int:
        return LIMITS[self.capability][1]

    @property
    def architecture(self) -> int:
        """The number in ``sm_90``."""
        return 10 * self.capability[0] + self.capability[1]


CHIPS = MappingProxyType(
    {
        "a100-40": Chip("NVIDIA A100-SXM4-40GB", (8, 0), 108),
        "a100-80": Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108),
        "a100-80-pcie": Chip("NVIDIA A100 80GB PCIe", (8, 0), 108),
        "h100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 132),
        "h100-pcie": Chip("NVIDIA H100 PCIe", (9, 0), 114),
        "planner-h100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 132),  # the round figures that planners are compared by
        "h200": Chip("NVIDIA H200", (9, 0), 132),
        "b200": Chip("NVIDIA B200", (10, 0), 148),
        "l4": Chip("NVIDIA L4", (8, 9), 58),
        "l40s": Chip("NVIDIA L40S", (8, 9), 142),
        "rtx4090": Chip("NVIDIA GeForce RTX 4090", (8, 9), 128),
        "rtx5090": Chip("NVIDIA GeForce RTX 5090", (12, 0), 170),
    }
)


def chip_for(hardware_name: str) -> Chip:
    """The chip behind a named Hardware; raises ValueError for one that code cannot be generated for."""
    if hardware_name in CHIPS:
        return CHIPS[hardware_name]
    raise ValueError(
        f"no chip is known for hardware {hardware_name!r}: pass chip=, for example recompile.chip.CHIPS['h100']; "
        f"known are {', '.join(CHIPS)}"
    )
