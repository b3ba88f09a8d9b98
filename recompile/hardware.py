"""What a device can do, as numbers with a source each: named devices, a JSON file of the user's own, or detection.

Rates are peaks for dense operands, never "with sparsity". Memory is the vendor's GB taken as 1e9 bytes, a few percent
less than the driver reports. The named values lie in hardware.json, in the format that a user's own file has.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def are_rates(value: Any) -> bool:
    return isinstance(value, Mapping) and "float32" in value and all(map(is_positive, value.values()))


# field -> (predicate, what the value must be), for the values as a JSON file has them
CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: isinstance(value, str) and value != "", "a name"),
    "flop_per_s": (are_rates, "a mapping of dtype names, float32 among them, to positive numbers"),
    "vector_flop_per_s": (is_positive, "a positive number"),
    "byte_per_s": (is_positive, "a positive number"),
    "host_byte_per_s": (is_positive, "a positive number"),
    "memory_bytes": (lambda value: is_positive(value) and value == int(value), "a positive whole number"),
    "launch_s": (lambda value: is_positive(value) or value == 0, "a number of seconds, 0 or more"),
    "source": (lambda value: isinstance(value, str), "a text that says where the numbers come from"),
    "counts_spills": (lambda value: isinstance(value, bool), "true or false"),
    "counts_fused": (lambda value: isinstance(value, bool), "true or false"),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. ``flop_per_s`` may be given as a mapping; it is kept as sorted pairs so that the value hashes."""

    name: str
    flop_per_s: tuple[tuple[str, float], ...]  # dense matmul rate by dtype name; any float8 is "float8"
    vector_flop_per_s: float  # float32 arithmetic outside matmuls, a fused multiply-add counted as two
    byte_per_s: float  # the device's own memory, reads and writes together
    host_byte_per_s: float  # between device and host memory, one way
    memory_bytes: int
    launch_s: float  # what one more kernel adds to a queue of kernels
    source: str  # where each number comes from, in words
    # Whether a plan's seconds hold what loops over long rows write for themselves and read again. False: for plans to
    # be compared with those of tools that price a kernel by its arguments and results alone. Memory counts it always.
    counts_spills: bool = True
    # Whether a plan's memory is what Inductor estimates rather than what is allocated: while a generated loop runs also
    # the values that fusion removed from it, and its results beside the inputs whose place they take.
    counts_fused: bool = False

    def __post_init__(self) -> None:
        is_kept_form = isinstance(self.flop_per_s, tuple) and all(isinstance(pair, tuple) for pair in self.flop_per_s)
        rates = dict(self.flop_per_s) if is_kept_form else self.flop_per_s
        for field in fields(self):
            value = rates if field.name == "flop_per_s" else getattr(self, field.name)
            is_valid, wanted = CHECKS[field.name]
            if not is_valid(value):
                raise ValueError(f"field '{field.name}' must be {wanted}, not {value!r}")
        object.__setattr__(self, "flop_per_s", tuple(sorted((dtype, float(rate)) for dtype, rate in rates.items())))
        object.__setattr__(self, "memory_bytes", int(self.memory_bytes))

    def matmul_flop_per_s(self, dtype: torch.dtype) -> float:
        """The dense matmul rate for operands of ``dtype``; float32's where the dtype has no entry."""
        name = str(dtype).removeprefix("torch.")
        rates = dict(self.flop_per_s)
        return rates.get("float8" if name.startswith("float8") else name, rates["float32"])

    def fingerprint(self) -> str:
        """The numbers and the name as one stable text, for cache keys."""
        return json.dumps({key: value for key, value in self.to_json().items() if key != "source"}, sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``; ``from_json`` takes them back."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"flop_per_s": dict(self.flop_per_s)}

    @classmethod
    def from_json(cls, values: Any, origin: str = "hardware") -> Hardware:
        """Read what ``to_json`` gives. ``origin`` is named in errors: the file or the option the values came from."""
        known = [field.name for field in fields(cls)]
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if not isinstance(values, Mapping):
            raise ValueError(f"{origin}: must be one object with the fields {', '.join(known)}")
        for problem, names in (
            ("missing", [name for name in needed if name not in values]),
            ("unknown", [str(name) for name in values if name not in known]),
        ):
            if names:
                raise ValueError(f"{origin}: {problem} field {', '.join(map(repr, names))}; it has {', '.join(known)}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from None


# Named devices


@functools.cache
def named_hardware() -> Mapping[str, Hardware]:
    """The devices known by name, in the order of hardware.json."""
    text = importlib.resources.files("recompile").joinpath("hardware.json").read_text(encoding="utf-8")
    values = [Hardware.from_json(entry, "hardware.json") for entry in json.loads(text)]
    return MappingProxyType({value.name: value for value in values})


# What torch.cuda.get_device_name answers -> name here. Exact, for "NVIDIA H200 NVL" is not an H200 SXM.
NAME_OF_DEVICE = MappingProxyType(
    {
        "A100-SXM4-40GB": "a100-40",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "A100-PCIE-40GB": "a100-40",  # the same data sheet figures as the SXM part
        "NVIDIA A100-PCIE-40GB": "a100-40",
        "A100-SXM-80GB": "a100-80",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA A100 80GB PCIe": "a100-80-pcie",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "AMD Instinct MI300X": "mi300x",
        "AMD Instinct MI300X OAM": "mi300x",
        "NVIDIA L4": "l4",
        "NVIDIA L40S": "l40s",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 5090": "rtx5090",
    }
)


def accepted() -> str:
    """What the option ``hardware`` may be, for error texts."""
    names = ", ".join([*named_hardware(), "cpu"])
    return f"one of {names}; the path of a JSON file; a dict of its fields; a Hardware; or None to detect"


def resolve(hardware: str | os.PathLike | Mapping[str, Any] | Hardware | None, device: torch.device) -> Hardware:
    """The Hardware that the option ``hardware`` means for a program on ``device``."""
    if hardware is None:
        return detect(device)
    if isinstance(hardware, Hardware):
        return hardware
    if isinstance(hardware, Mapping):
        return Hardware.from_json(hardware, "option 'hardware'")
    if isinstance(hardware, str) and hardware.lower() == "cpu":
        return detect(torch.device("cpu"))
    if isinstance(hardware, str) and hardware.lower() in named_hardware():
        return named_hardware()[hardware.lower()]
    if isinstance(hardware, os.PathLike) or (isinstance(hardware, str) and hardware.endswith(".json")):
        return read_hardware(Path(hardware))
    raise ValueError(f"option 'hardware': {hardware!r} is not known; accepted: {accepted()}")


def read_hardware(path: Path) -> Hardware:
    """Read one device from a JSON file of the user's own."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"option 'hardware': cannot read '{path}': {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"option 'hardware': '{path}' is not JSON: {error}") from error
    return Hardware.from_json(values, f"option 'hardware': '{path}'")


def detect(device: str | torch.device | None = None) -> Hardware:
    """The Hardware of a device of this machine: as ``calibrate`` measured it, else nominal. Nothing is timed here.

    None: the current CUDA device if there is one, else the CPU. Raises ValueError for a device that is not there.
    """
    from recompile.calibration import default_device, stored_path

    target = torch.device(device) if device is not None else default_device()
    value = nominal(target)
    stored = stored_path(target)
    return read_hardware(stored) if stored.exists() else value


def calibrate(device: str | torch.device | None = None, path: str | os.PathLike | None = None) -> Hardware:
    """Measure this machine's device and store the figures; see ``recompile.calibration.calibrate``."""
    from recompile.calibration import calibrate

    return calibrate(device, path)


def nominal(device: torch.device) -> Hardware:
    """The Hardware of a device of this machine, from its name and properties."""
    if device.type == "cpu":
        return cpu_hardware()
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        name = NAME_OF_DEVICE.get(properties.name)
        return named_hardware()[name] if name else hardware_from_properties(properties, torch.version.hip is not None)
    reason = "no CUDA device is available" if device.type == "cuda" else "only cpu and cuda can be detected"
    raise ValueError(f"option 'hardware': None, but '{device}' says nothing: {reason}; accepted: {accepted()}")


# A GPU that has no name here

# compute capability -> FLOP per clock and multiprocessor: float32, float16 matmul with float32 accumulation, float64.
# From the throughput tables of NVIDIA's CUDA programming guide and the white papers of each architecture. Capabilities
# 7.5, 8.6, 8.9 and 12.0 hold GeForce and professional parts: the GeForce rate is taken, half of the other's.
FLOP_PER_CLOCK = MappingProxyType(
    {
        (7, 0): (128, 1024, 64),
        (7, 5): (128, 512, 4),
        (8, 0): (128, 2048, 128),
        (8, 6): (256, 512, 4),
        (8, 9): (256, 512, 4),
        (9, 0): (256, 4096, 256),
        (10, 0): (256, 8192, 128),
        (12, 0): (256, 512, 4),
    }
)
HIP_FLOP_PER_CLOCK = (128, 1024, 128)  # per compute unit of AMD's CDNA2, from its white paper; later parts do more
FIRST_WITH_BFLOAT16, FIRST_WITH_FLOAT8 = (8, 0), (8, 9)
LAUNCH_S = 2e-6  # assumed gap between queued kernels, as in hardware.json
PCIE_BYTE_PER_S = 32e9  # PCIe Gen4 x16, one way


def hardware_from_properties(properties: Any, is_hip: bool = False) -> Hardware:
    """A nominal Hardware from ``torch.cuda.get_device_properties``: multiprocessors x clock x FLOP per clock."""
    capability = (properties.major, properties.minor)
    known = max((c for c in FLOP_PER_CLOCK if c <= capability), default=min(FLOP_PER_CLOCK))
    float32, float16, float64 = HIP_FLOP_PER_CLOCK if is_hip else FLOP_PER_CLOCK[known]
    clocks_per_s = properties.multi_processor_count * properties.clock_rate * 1e3  # clock_rate is in kHz
    per_clock = {"float64": float64, "float32": float32, "float16": float16}
    if is_hip or capability >= FIRST_WITH_BFLOAT16:
        per_clock |= {"bfloat16": float16, "tfloat32": float16 // 2}
    if not is_hip and capability >= FIRST_WITH_FLOAT8:
        per_clock |= {"float8": 2 * float16}
    bits_per_clock = 2 * properties.memory_bus_width  # two transfers a clock; memory_clock_rate is in kHz
    return Hardware(
        name=properties.name,
        flop_per_s={dtype: flop * clocks_per_s for dtype, flop in per_clock.items()},
        vector_flop_per_s=float32 * clocks_per_s,
        byte_per_s=properties.memory_clock_rate * 1e3 * bits_per_clock / 8,
        host_byte_per_s=PCIE_BYTE_PER_S,
        memory_bytes=properties.total_memory,
        launch_s=LAUNCH_S,
        source=(
            f"Nominal, from the driver's properties: {properties.multi_processor_count} multiprocessors at "
            f"{properties.clock_rate / 1e6:.2f} GHz, FLOP per clock as of "
            f"{'AMD CDNA2' if is_hip else f'compute capability {known[0]}.{known[1]}'}, memory clock times bus width. "
            f"PCIe Gen4 and the launch time are assumed."
        ),
    )


# The CPU

LANES = MappingProxyType({"AVX512": 16, "AVX2": 8, "SVE256": 8})  # float32 values in a vector register
DEFAULT_LANES = 4  # 128 bits: SSE, NEON, VSX
CPU_CLOCKS_PER_S = 2.5e9  # nominal: server parts run heavy vector code at 2 to 3 GHz
CPU_EFFICIENCY = 0.7  # of one multiply-add a clock and thread
AMX_BFLOAT16_SPEEDUP = 12.0  # bfloat16 matmul on tiles over float32; measured, see cpu_hardware
CPU_BYTE_PER_S_PER_THREAD, CPU_BYTE_PER_S_LIMIT = 8e9, 100e9
CPU_LAUNCH_S = 5e-6  # a call from Inductor's wrapper and an OpenMP region
UNKNOWN_MEMORY_BYTES = 16 * 2**30  # where the system does not say


def cpu_hardware() -> Hardware:
    """Nominal figures for the CPU this runs on, the same at every call: nothing is timed, so that plans repeat.

    From torch's thread count, the vector width it uses, and the constants above. Against the best of repeated runs on
    a machine of two threads with AVX-512 and AMX: float32 matmul of 1024 x 1024, 112 GFLOP/s nominal, 109 measured;
    bfloat16, 1344 and 1307; a copy of 256 MB, reads and writes together, 16 GB/s and 13.3, or 6 beside other programs.
    To measure again (2 * 1024**3 FLOP and 2 * 256 MB):

        python -m timeit -s "import torch; x = torch.randn(1024, 1024)" "x @ x"
        python -m timeit -s "import torch; x = torch.randn(64, 2**20); y = torch.empty_like(x)" "y.copy_(x)"
    """
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    lanes = LANES.get(capability, DEFAULT_LANES)
    vector_flop_per_s = threads * lanes * CPU_CLOCKS_PER_S * CPU_EFFICIENCY
    float32 = 2 * vector_flop_per_s
    has_tiles = getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16", False)
    byte_per_s = min(threads * CPU_BYTE_PER_S_PER_THREAD, CPU_BYTE_PER_S_LIMIT)
    return Hardware(
        name="cpu",
        flop_per_s={
            "float64": float32 / 2,
            "float32": float32,
            "bfloat16": float32 * (AMX_BFLOAT16_SPEEDUP if has_tiles else 1.0),
            "float16": float32,
        },
        vector_flop_per_s=vector_flop_per_s,
        byte_per_s=byte_per_s,
        host_byte_per_s=byte_per_s,
        memory_bytes=_memory_bytes(),
        launch_s=CPU_LAUNCH_S,
        source=(
            f"Nominal, not measured: {threads} threads x {lanes} float32 lanes ({capability}) x "
            f"{CPU_CLOCKS_PER_S / 1e9:.1f} GHz x {CPU_EFFICIENCY}, a multiply-add counted as two in matmuls"
            f"{f', bfloat16 on AMX tiles x {AMX_BFLOAT16_SPEEDUP:.0f}' if has_tiles else ''}; "
            f"{CPU_BYTE_PER_S_PER_THREAD / 1e9:.0f} GB/s a thread up to {CPU_BYTE_PER_S_LIMIT / 1e9:.0f}; "
            f"{CPU_LAUNCH_S * 1e6:.0f} us a kernel; memory as the system reports it, in whole GiB."
        ),
    )


def _memory_bytes() -> int:
    """The machine's memory in whole GiB, which no reboot changes, or a stated figure where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30 * 2**30
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY_BYTES
