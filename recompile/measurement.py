"""Measures how much memory a call needs: the peak increase of allocated memory while it runs.

On CUDA this is what the caching allocator counts itself: `max_memory_allocated` less `memory_allocated` at the start.
The CPU allocator keeps no such count, so there it is summed up from the allocator's own events, which PyTorch's
profiler records, one for every allocation and free, with the address and the bytes. Three things need care:

- Of a block that was allocated while no profiler ran, the allocator reports no free, or one of a wrong size. So every
  storage alive at the start is watched by a weak reference, which drops a marker among the events when it is freed.
- The profiler sees its own thread and those that PyTorch starts for it. A thread that the call starts through Python's
  `threading` gets a recorder of its own.
- Events carry a time and no order between threads: what two threads do within some microseconds may be swapped.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _EventType, _ExperimentalConfig, _RecordFunctionFast

START = "recompile.measure: start"
END = "recompile.measure: end"
FREED = "recompile.measure: freed "
NOISE = b"USDT:"  # The profiler of torch 2.13 writes two such lines to stderr for every recording.


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one call did to allocated memory.

    `peak_bytes`: the largest increase of allocated memory, in bytes, over what was allocated when the call started;
    0 if nothing was ever allocated beyond that. `seconds`: wall time of that same call, on CPU slowed down by the
    recording. `timeline`: `(seconds since the start, bytes)`, the allocated memory over that of the start after each
    change, first `(0.0, 0)` and last the return; bytes are negative where the call has freed more of what was there
    than it has allocated. On CUDA the timeline has these two points only.
    """

    peak_bytes: int
    seconds: float
    timeline: tuple[tuple[float, int], ...]


def measure(fn: Callable[..., Any], *args: Any, device: str | torch.device | None = None, **kwargs: Any) -> Measurement:
    """Calls `fn(*args, **kwargs)` exactly once; returns its peak increase of allocated memory in bytes, and seconds.

    `device`: "cpu" or "cuda" (or "cuda:1"), whose memory is measured. None takes the current CUDA device if the program
    has used CUDA, otherwise the CPU. A keyword `device` of `fn`'s own is passed with `functools.partial`.

    Compile first: the first call of a compiled function also holds what the compiler allocates. Drop gradients that
    the call is to allocate anew (`zero_grad()`): gradients that exist already are not part of the increase.
    What `fn` raises goes through. On CPU, memory that PyTorch did not allocate (NumPy's, say) is not counted, and no
    other profiler may be active.
    """
    if not callable(fn):
        raise TypeError(f"measure() takes a function to call, then its arguments; got {type(fn).__name__}: {fn!r:.80}")
    target = target_device(device)
    call = functools.partial(fn, *args, **kwargs)
    return _measure(call, target)


def target_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        target = None
    if target is None or target.type not in ("cpu", "cuda"):
        raise ValueError(f'device={device!r}: accepted are "cpu", "cuda", "cuda:N" and None (find out)')
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'device={device!r}: this PyTorch sees no CUDA device; accepted here are "cpu" and None')
    return target


def start_recording(device: torch.device) -> Recording:
    """Begin to record a device's memory, where a step is no single call; the recording's ``stop`` ends it.

    One recording at a time. On CUDA it resets the peak that PyTorch keeps statistics of. Raises RuntimeError on the CPU
    while a profiler is active.
    """
    return _CudaRecording(device) if device.type == "cuda" else _CpuRecording()


def _measure(call: Callable[[], Any], device: torch.device) -> Measurement:
    recording = start_recording(device)
    try:
        result = call()
    except BaseException:
        recording.cancel()
        raise
    measurement = recording.stop()
    del result  # Kept until the recording has ended: the timeline ends with what the call returned.
    return measurement


class Recording:
    """A device's memory from construction to `stop`, or to `mark_end` if that came before."""

    def mark_end(self) -> None:
        """Here ends what counts. Where the recording itself cannot end: autograd gives a thread back its profiler."""

    def stop(self) -> Measurement:
        """Ends the recording and sums it up."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Ends the recording, whatever it has seen."""


class _CudaRecording(Recording):
    def __init__(self, device: torch.device):
        self._device = device
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._before_bytes = torch.cuda.memory_allocated(device)
        self._started = time.perf_counter()
        self._measured: Measurement | None = None

    def mark_end(self) -> None:
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._started
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before_bytes
        end_bytes = torch.cuda.memory_allocated(self._device) - self._before_bytes
        self._measured = Measurement(peak_bytes, seconds, ((0.0, 0), (seconds, end_bytes)))

    def stop(self) -> Measurement:
        if self._measured is None:
            self.mark_end()
        return self._measured


class _CpuRecording(Recording):
    def __init__(self) -> None:
        if torch.autograd._profiler_enabled():
            raise RuntimeError(
                "measure() needs PyTorch's profiler, and one is active already: call it outside of that one"
            )
        gc.collect()
        self._watches = _watch_live_storages()
        self._recorder = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, use_kineto=True)
        self._threads: list[_RecordedThread] = []
        with _without_noise_on_stderr():
            self._recorder.__enter__()
        self._patch = _recorded_threads(self._threads)
        self._patch.__enter__()
        self._seconds: float | None = None
        with _RecordFunctionFast(START):
            self._started = time.perf_counter()

    def mark_end(self) -> None:
        self._seconds = time.perf_counter() - self._started
        with _RecordFunctionFast(END):
            pass

    def stop(self) -> Measurement:
        seconds = time.perf_counter() - self._started if self._seconds is None else self._seconds
        self.cancel()
        start_ns, end_ns, changes = _changes_of_recorder(self._recorder)
        for thread in self._threads:
            changes += thread.changes()
        return _measurement(start_ns, seconds, [change for change in changes if change[0] <= end_ns])

    def cancel(self) -> None:
        self._patch.__exit__(None, None, None)
        with _without_noise_on_stderr():
            self._recorder.__exit__(None, None, None)
        self._watches.clear()


def _measurement(start_ns: int, seconds: float, changes: list[tuple[int, int]]) -> Measurement:
    """Sums up `(time in nanoseconds, bytes allocated or minus bytes freed)`."""
    live_bytes = peak_bytes = 0
    timeline = [(0.0, 0)]
    for time_ns, delta_bytes in sorted(changes, key=lambda change: change[0]):
        live_bytes += delta_bytes
        peak_bytes = max(peak_bytes, live_bytes)
        timeline.append((min(max(time_ns - start_ns, 0) * 1e-9, seconds), live_bytes))
    timeline.append((seconds, live_bytes))
    return Measurement(peak_bytes, seconds, tuple(timeline))


def _changes_of_recorder(recorder: torch.autograd.profiler.profile) -> tuple[int, float, list[tuple[int, int]]]:
    """When the call began and ended, and every change of the CPU's memory after that: `(time in nanoseconds, bytes)`.

    The end is infinite where none is marked.
    """
    events = []
    pending = list(recorder.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation or event.name.startswith((START, END, FREED)):
            events.append(event)
    events.sort(key=lambda event: event.start_time_ns)
    start_ns = next(event.start_time_ns for event in events if event.name == START)
    end_ns = next((event.start_time_ns for event in events if event.name == END), math.inf)
    changes = _changes(event for event in events if event.start_time_ns > start_ns and event.name != END)
    return start_ns, end_ns, list(changes)


def _changes(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Takes the frees of blocks with a marker from the marker, and then drops the allocator's own report, if any."""
    marked: set[int] = set()
    for event in events:
        if event.name.startswith(FREED):
            address, size_bytes = _read_marker(event.name)
            marked.add(address)
            yield event.start_time_ns, -size_bytes
            continue
        block = event.extra_fields
        if block.device.type != "cpu":
            continue
        if block.alloc_size > 0:
            marked.discard(block.ptr)
        elif block.ptr in marked:
            marked.remove(block.ptr)
            continue
        yield event.start_time_ns, block.alloc_size


def _watch_live_storages() -> list[weakref.ref]:
    """Weak references to the storages in CPU memory that live now; each drops a marker when its storage is freed."""
    watches: dict[int, weakref.ref] = {}
    tensors = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
        storages = [_allocated_storage(tensor) for tensor in (*tensors, *gradients) if tensor is not None]
    for storage in storages:
        if storage is not None and storage.data_ptr() not in watches:
            mark = functools.partial(_mark_freed, storage.data_ptr(), storage.nbytes())
            watches[storage.data_ptr()] = weakref.ref(storage, mark)
    return list(watches.values())


def _allocated_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage, if its free needs a marker: not empty, not NumPy's, not shared (always reported)."""
    if tensor.layout != torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu" or storage.is_shared() or not storage.resizable():
            return None
        return storage if storage.data_ptr() else None
    except (NotImplementedError, RuntimeError):  # Tensors without a storage, such as functorch's wrappers.
        return None


def _mark_freed(address: int, size_bytes: int, _: weakref.ref) -> None:
    with _RecordFunctionFast(f"{FREED}{address} {size_bytes}"):
        pass


def _read_marker(name: str) -> tuple[int, int]:
    address, size_bytes = name.removeprefix(FREED).split()
    return int(address), int(size_bytes)


class _RecordedThread:
    """Records the allocator's events of one thread that the measured call starts, with the profiler's older recorder:
    the one of `_CpuRecording` exists once in a process and belongs to the thread that started it."""

    def __init__(self, thread: threading.Thread):
        self._name = thread.name
        self._run: Callable[[], None] | None = thread.run
        self._anchor_ns = 0
        self._events: list[Any] | None = None

    def run(self) -> None:
        no_stack_no_shapes = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        torch.autograd._enable_profiler_legacy(no_stack_no_shapes)
        try:
            self._anchor_ns = time.time_ns()
            with _RecordFunctionFast(START):
                pass
            self._run()
        finally:
            self._run = None  # Or the thread, and what it holds, would live until the end of the measurement.
            self._events = [event for events in torch.autograd._disable_profiler_legacy() for event in events]

    def changes(self) -> list[tuple[int, int]]:
        """`(time in nanoseconds, bytes)` of every change; empty, with a warning, while the thread still runs."""
        if self._events is None:
            what = f"thread {self._name!r} outlives the measured call: what it allocates is not in the measurement"
            warnings.warn(what, RuntimeWarning, stacklevel=4)
            return []
        anchor = next((event for event in self._events if event.name() == START), None)
        return [] if anchor is None else list(self._changes_after(anchor))

    def _changes_after(self, anchor: Any) -> Iterator[tuple[int, int]]:
        """These events tell no addresses. A free right after a marker is taken for the allocator's own report of the
        same block; if it is another block's, the measurement errs upwards."""
        marker_came_last = False
        for event in self._events:
            time_ns = self._anchor_ns + round(anchor.cpu_elapsed_us(event) * 1e3)
            if event.kind() == "push" and event.name().startswith(FREED):
                marker_came_last = True
                yield time_ns, -_read_marker(event.name())[1]
            elif event.kind() == "memory_alloc":
                if event.cpu_memory_usage() > 0 or not marker_came_last:
                    yield time_ns, event.cpu_memory_usage()
                marker_came_last = False


@contextlib.contextmanager
def _recorded_threads(threads: list[_RecordedThread]) -> Iterator[None]:
    """While inside, every thread started through `threading` is recorded and appended to `threads`."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_recorded(thread: threading.Thread) -> None:
        recorded = _RecordedThread(thread)
        threads.append(recorded)
        thread.run = recorded.run  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


@contextlib.contextmanager
def _without_noise_on_stderr() -> Iterator[None]:
    """Holds back what is written to stderr inside (some milliseconds) and passes on all of it but Kineto's noise."""
    try:
        stderr_fd = os.dup(2)
    except OSError:  # The program has closed its stderr.
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr_fd, 2)
            os.close(stderr_fd)
            held.seek(0)
            passed = b"".join(line for line in held if not line.startswith(NOISE))
            if passed:
                os.write(2, passed)
