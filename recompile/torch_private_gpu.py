"""A GPU that is not there, as PyTorch's compiler and Triton's see it, from their private parts.

The other files that import private parts: ``torch_private``, ``torch_private_lowering``, ``torch_private_trace``.
Written against torch 2.11 to 2.14 and Triton 3.6 to 3.8.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.utils._triton as torch_triton
from torch._dynamo import debug_utils, device_interface
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import compile_fx, select_algorithm
from torch._inductor import utils as inductor_utils
from torch._inductor.codecache import CacheBase, PyCodeCache
from torch._inductor.fx_passes import post_grad
from torch._inductor.runtime.hints import DeviceProperties
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensorMode

from recompile.chip import MAX_THREADS_PER_BLOCK, REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE, Chip

GPU = torch.device("cuda:0")
CUDA_TYPE, META_TYPE = 1, 14  # c10::DeviceType
DEVICE_GUARDS_SYMBOL = "_ZN3c104impl26device_guard_impl_registryE"


# The device that is not there


def properties_of(chip: Chip) -> types.SimpleNamespace:
    """A chip in the words of ``torch.cuda.get_device_properties``."""
    return types.SimpleNamespace(
        name=chip.device_name,
        major=chip.capability[0],
        minor=chip.capability[1],
        multi_processor_count=chip.num_multiprocessors,
        max_threads_per_multi_processor=chip.max_threads_per_multiprocessor,
        max_threads_per_block=MAX_THREADS_PER_BLOCK,
        regs_per_multiprocessor=REGISTERS_PER_MULTIPROCESSOR,
        shared_memory_per_block_optin=chip.shared_bytes_per_block,
        warp_size=WARP_SIZE,
    )


class _AbsentCuda(device_interface.CudaInterface):
    """CUDA's interface for Inductor; what it knows it asks of ``torch.cuda``, which answers for the absent GPU."""

    class Worker(device_interface.CudaInterface.Worker):
        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return torch.cuda.get_device_properties(device)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_device_properties(device: Any = None) -> Any:
        return torch.cuda.get_device_properties(device)


class _AbsentDriver:
    """Triton's driver as far as a compiler asks: the target, and nothing that would run."""

    def __init__(self, chip: Chip):
        self.chip = chip

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.chip.architecture, WARP_SIZE)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


class AbsentGenerator(torch.Generator):
    """A generator that says it is the GPU's; nobody draws from it."""

    device = GPU

    def clone_state(self) -> AbsentGenerator:
        return AbsentGenerator()


@contextmanager
def absent_generators() -> Iterator[None]:
    """Torch finds a default generator for the GPU while it runs; torch 2.14 asks its C++ part for it as well."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "default_generators", (AbsentGenerator(),)))
        if hasattr(torch._C, "_accelerator_getDefaultGenerator"):
            ask = "_accelerator_getDefaultGenerator"
            stack.enter_context(mock.patch.object(torch._C, ask, lambda index: AbsentGenerator()))
        yield


def answers_of(chip: Chip) -> dict[str, Callable[..., Any]]:
    """What functions of ``torch.cuda`` return for the chip, by name."""
    properties = properties_of(chip)
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: chip.capability,
        "get_device_name": lambda device=None: chip.device_name,
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),  # lowering keeps and puts it back
        "set_rng_state": lambda state, device="cuda": None,
    }


def for_this_thread(pretended: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that answers one way to the thread that made it, and to all others as ever."""
    owner = threading.get_ident()

    @functools.wraps(real)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return (pretended if threading.get_ident() == owner else real)(*args, **kwargs)

    return answer


@contextmanager
def absent_gpu(chip: Chip) -> Iterator[None]:
    """While it runs, this thread finds a CUDA device that is the chip, though there is none; then all is as before.

    Nothing can be computed on it: it is there for fake tensors and for code generation. It holds Dynamo's compile lock:
    another thread's compilation, or dry run, waits. Raises RuntimeError inside itself, ImportError without Triton.
    """
    with compile_lock, ExitStack() as stack:
        if device_interface.get_interface_for_device("cuda") is _AbsentCuda:
            raise RuntimeError("the GPU dry run cannot run inside itself")
        post_grad.lazy_init()  # registers patterns once a process: while the truth is told
        forget_devices()
        stack.callback(forget_devices)
        for name, pretended in answers_of(chip).items():
            stack.enter_context(
                mock.patch.object(torch.cuda, name, for_this_thread(pretended, getattr(torch.cuda, name)))
            )
        stack.enter_context(absent_generators())
        interfaces = dict.fromkeys(("cuda", "cuda:0"), _AbsentCuda)
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, interfaces))
        stack.enter_context(mock.patch.dict(device_interface.caching_worker_device_properties))
        stack.enter_context(mock.patch.object(compile_fx, "get_cuda_device_context", lambda module: nullcontext()))
        stack.enter_context(mock.patch.object(CacheBase, "get_system", lambda: {"hash": f"absent-{chip.architecture}"}))
        stack.enter_context(mock.patch.object(select_algorithm, "_ALGORITHM_SELECTOR_CACHE", None))
        stack.enter_context(mock.patch.object(torch._C, "_conv_determine_backend_memory_format", cudnn_format))
        stack.enter_context(harmless_device_guard())
        stack.enter_context(absent_driver(chip))
        yield


def cudnn_format(images: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """The memory format of a convolution's result on a GPU; a build of torch without cuDNN would say: contiguous.

    As ``cudnn_conv_suggest_memory_format`` in aten/src/ATen/native/ConvUtils.h has it: channels last when either
    operand is, float64 excepted.
    """
    formats = {suggest_memory_format(images), suggest_memory_format(weight)}
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
    return wanted if wanted in formats and images.dtype != torch.float64 else torch.contiguous_format


@contextmanager
def harmless_device_guard() -> Iterator[None]:
    """Lets operators and indexing touch fake CUDA tensors in a build of torch without CUDA.

    Such a build has no device guard for CUDA and refuses (``FakeTensorMode`` gives one that does nothing to builds with
    CUDA only), so the one of meta tensors, which does nothing either, stands in for it. The table is c10's, by
    DeviceType (c10/core/DeviceType.h, c10/core/impl/DeviceGuardImplInterface.h); Python has no other access to it.
    """
    guards = device_guards()
    if guards is None or guards[CUDA_TYPE] is not None:
        yield
        return
    guards[CUDA_TYPE] = guards[META_TYPE]
    try:
        yield
    finally:
        guards[CUDA_TYPE] = None


def device_guards() -> Any | None:
    """c10's table of device guards as an array of pointers; None where the library does not show it."""
    folder = pathlib.Path(torch.__file__).parent / "lib"
    library = next((file for file in (folder / "libc10.so", folder / "libc10.dylib") if file.exists()), None)
    try:
        return (ctypes.c_void_p * (META_TYPE + 1)).in_dll(ctypes.CDLL(str(library)), DEVICE_GUARDS_SYMBOL)
    except (OSError, ValueError):
        return None


@contextmanager
def absent_driver(chip: Chip) -> Iterator[None]:
    """Triton compiles for the chip while it runs."""
    try:
        from triton.runtime.driver import driver
    except ImportError as error:
        raise ImportError("the GPU dry run needs Triton: install it with `pip install triton`") from error

    active = driver._active  # reading driver.active would look for a real one
    driver.set_active(_AbsentDriver(chip))
    try:
        yield
    finally:
        driver._active = active


def forget_devices() -> None:
    """Empty the caches in which torch keeps what it once found out about devices."""
    DeviceProperties.create.cache_clear()
    CacheBase.get_local_cache_path.cache_clear()
    debug_utils._cuda_system_info_comment.cache_clear()
    FakeTensorMode.cache_clear()  # results of operators on fake tensors, which depend on what the device answers
    for module in (torch_triton, inductor_utils):
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


# Compiling kernels


def compile_kernel(source: str, chip: Chip) -> dict[str, Any]:
    """What Triton makes of a kernel's text for the chip: ``{"ptx": str, "cubin": bytes, ...}``.

    Of the configurations that Inductor would try on the device, the first is compiled. Raises what Triton raises.
    """
    import triton
    from torch._inductor.runtime import triton_helpers

    made: list[Any] = []
    compile_for_target = triton.compile

    def keep(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_for_target(*args, **kwargs))
        raise _Compiled

    with (
        absent_gpu(chip),
        mock.patch.object(triton, "compile", keep),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
    ):
        tuner = autotuner_of(source)
        try:
            tuner._precompile_config(tuner.configs[0])
        except _Compiled:
            return dict(made[0].asm)
    raise RuntimeError("Inductor did not come to compile the kernel")


class _Compiled(BaseException):
    """Leaves Inductor before it would load a kernel."""


def autotuner_of(source: str) -> Any:
    """The object behind a kernel's text, made as Inductor's async_compile makes it."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    module = PyCodeCache.load(source)
    return next(value for value in vars(module).values() if isinstance(value, CachingAutotuner))
