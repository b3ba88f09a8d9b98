"""Measures what a device really does and keeps the result, so that plans for this machine use its own figures.

Every rate is the best of several runs: other programs can only slow a run down. What cannot be measured from here keeps
the nominal figure of ``recompile.hardware``, and ``source`` says which is which.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from recompile.hardware import Hardware, nominal

FOLDER_VARIABLE = "RECOMPILE_HARDWARE_DIR"
NUM_RUNS = 10
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # far beyond the last cache: 256 MiB and 1 GiB
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}  # large enough for the full rate: 2 GFLOP and 1.1 TFLOP
MEASURED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NUM_LAUNCHES = 1000
HOST_COPY_BYTES = 2**28


def calibrate(device: str | torch.device | None = None, path: str | os.PathLike | None = None) -> Hardware:
    """Measure copy bandwidth and matmul rates, on CUDA launch time and host link too, and store the result as JSON.

    ``device``: None takes the current CUDA device if there is one, else the CPU. ``path``: None stores it where
    ``hardware=None`` finds it for this device from then on; delete the file to go back to nominal figures. Takes some
    seconds; run it on an idle machine. Raises ValueError for a device that is not there.
    """
    target = torch.device(device) if device is not None else default_device()
    base = nominal(target)
    seconds_of = _seconds_on_cuda if target.type == "cuda" else _seconds_on_cpu
    rates = dict(base.flop_per_s) | matmul_rates(target, seconds_of)
    measured = replace(base, flop_per_s=rates, byte_per_s=copy_rate(target, seconds_of))
    words = "matmul rates and copy bandwidth measured"
    if target.type == "cuda":
        measured = replace(measured, launch_s=launch_seconds(target), host_byte_per_s=host_rate(target, seconds_of))
        words = "matmul rates, copy bandwidth, launch time and host link measured"
    today = time.strftime("%Y-%m-%d")
    measured = replace(measured, source=f"{words} on {today}, best of {NUM_RUNS} runs; the rest: {base.source}")
    file = Path(path) if path is not None else stored_path(target)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(measured.to_json(), indent=2) + "\n", encoding="utf-8")
    return measured


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def stored_path(device: torch.device) -> Path:
    """Where the calibration of a device is kept; a CPU's by host and thread count, a GPU's by its model's name.

    The folder is ``~/.cache/recompile/hardware``, or what the environment variable RECOMPILE_HARDWARE_DIR says.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu-{platform.node()}-{torch.get_num_threads()}-threads"
    folder = os.environ.get(FOLDER_VARIABLE) or Path.home() / ".cache" / "recompile" / "hardware"
    return Path(folder) / f"{name.replace(' ', '-').replace('/', '-')}.json"


def best_seconds(run: Callable[[], object], seconds_of: Callable[[Callable[[], object]], float]) -> float:
    """The shortest of NUM_RUNS runs after one that warms up."""
    run()
    return min(seconds_of(run) for _ in range(NUM_RUNS))


def _seconds_on_cpu(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _seconds_on_cuda(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def copy_rate(device: torch.device, seconds_of: Callable) -> float:
    """Bytes per second of a copy within the device's memory, reads and writes together."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_seconds(lambda: target.copy_(source), seconds_of)


def matmul_rates(device: torch.device, seconds_of: Callable) -> dict[str, float]:
    """FLOP per second of a square matmul, by dtype."""
    size, rates = MATMUL_SIZE[device.type], {}
    for dtype in MEASURED_DTYPES:
        x = torch.ones(size, size, device=device, dtype=dtype)
        y = torch.empty_like(x)
        rates[str(dtype).removeprefix("torch.")] = (
            2 * size**3 / best_seconds(lambda x=x, y=y: torch.mm(x, x, out=y), seconds_of)
        )
    return rates


def launch_seconds(device: torch.device) -> float:
    """What one more kernel adds to a queue of kernels that have nothing to do."""
    x = torch.zeros(1, device=device)

    def launch_many() -> None:
        for _ in range(NUM_LAUNCHES):
            x.add_(1)

    return best_seconds(launch_many, _seconds_on_cuda) / NUM_LAUNCHES


def host_rate(device: torch.device, seconds_of: Callable) -> float:
    """Bytes per second from pinned host memory to the device."""
    source = torch.ones(HOST_COPY_BYTES // 4, pin_memory=True)
    target = torch.empty(HOST_COPY_BYTES // 4, device=device)
    return HOST_COPY_BYTES / best_seconds(lambda: target.copy_(source, non_blocking=True), seconds_of)
