"""The options of the backend as one frozen value. Every bad value is refused here, by name, with what is accepted."""

from __future__ import annotations

import hashlib
import inspect
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from recompile import planner as planners
from recompile import registry
from recompile.errors import OptionError
from recompile.hardware import Hardware
from recompile.hardware import resolve as resolve_hardware
from recompile.torch_private import (
    inductor_mode_names,
    inductor_mode_options,
    inductor_option_names,
    inductor_option_type,
)
from recompile.units import parse_bytes

OWN_OPTIONS = ("memory_budget", "planner", "hardware", "cost", "reserve", "verbose", "mode")
SMALLEST_BYTE_BUDGET = 2  # 0 and 1 without a decimal point are more likely meant as shares


@dataclass(frozen=True)
class Options:
    """What the user asked for. ``memory_budget``: None, a share as float, bytes as int, or "auto"."""

    memory_budget: float | int | str | None = None
    planner: str | Callable = "mincut"
    hardware: str | Hardware | None = None
    cost: Callable | None = None
    reserve: int = 0
    verbose: bool = False
    inductor: tuple[tuple[str, Any], ...] = ()
    kept_back: int = 0  # bytes of a budget in bytes that Inductor's program took beyond the prediction; not an option

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Check an options dict and ``mode``. Raises OptionError (a ValueError) naming option, value and choices."""
        given = {str(key).replace("-", "_"): value for key, value in (options or {}).items()}
        if len(given) != len(options or {}):
            names = ", ".join(sorted(map(str, options)))
            raise OptionError(f"an option is given twice (a dash and an underscore are the same in names): {names}")
        inner_mode = given.pop("mode", None)
        if mode is not None and inner_mode is not None and mode != inner_mode:
            raise OptionError(
                f"mode={mode!r} and options['mode']={inner_mode!r} contradict each other; give one of them"
            )
        own = {key: given.pop(key) for key in OWN_OPTIONS if key in given}
        inductor = {**_mode_options(mode or inner_mode), **_checked_inductor_options(given)}
        parsed = cls(
            memory_budget=_checked_budget(own.get("memory_budget")),
            planner=_checked_planner(own.get("planner", "mincut")),
            hardware=_checked_hardware(own.get("hardware")),
            cost=_checked_cost(own.get("cost")),
            reserve=_checked_reserve(own.get("reserve", 0)),
            verbose=_checked_bool("verbose", own.get("verbose", False)),
            inductor=tuple(sorted(inductor.items())),
        )
        if parsed.reserve and parsed.memory_budget != "auto":
            raise OptionError(f"reserve={own['reserve']!r} has no meaning without memory_budget='auto'")
        return parsed

    def planner_function(self) -> Callable:
        return planners.BY_NAME[self.planner] if isinstance(self.planner, str) else self.planner

    def planner_name(self) -> str:
        return (
            self.planner if isinstance(self.planner, str) else getattr(self.planner, "__qualname__", repr(self.planner))
        )

    def with_auto_resolved(self, device: torch.device) -> Options:
        """``memory_budget="auto"`` as bytes: what is free on the device now, less ``reserve``."""
        if self.memory_budget != "auto":
            return self
        return replace(self, memory_budget=max(0, free_bytes(device) - self.reserve))

    def with_region_budget(self, budgets: Sequence[float]) -> Options:
        """These options under ``torch.autograd.graph.region_activation_memory_budget``, whose share goes first."""
        if not budgets:
            return self
        if len(budgets) > 1:
            raise OptionError(
                f"region_activation_memory_budget gives one graph several budgets, {list(budgets)}; a graph has one: "
                f"put a graph break between the regions"
            )
        return replace(self, memory_budget=float(budgets[0]))

    def fingerprint(self, hardware: Hardware) -> str:
        """A stable text for cache keys: our sources, these options, the hardware, torch's version."""
        parts = [
            sources_hash(),
            torch.__version__,
            hardware.fingerprint(),
            repr(self.memory_budget),
            callable_key(self.planner),
            callable_key(self.cost),
            repr(self.reserve),
            repr(self.kept_back),
            registry.fingerprint(),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def callable_key(function: str | Callable | None) -> str:
    """What identifies a planner or cost model in cache keys: a plain function by its name, source and defaults.

    Anything that cannot be told apart by these (a lambda, a closure, an object, unreadable source) never matches, so it
    is never served from a cache. What a function reads from globals is not in the key.
    """
    if isinstance(function, str | None):
        return str(function)
    never_matches = secrets.token_hex(16)
    if not inspect.isfunction(function) or function.__closure__ or function.__name__ == "<lambda>":
        return never_matches
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(isinstance(value, int | float | str | None) for value in defaults):
        return never_matches
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return never_matches
    digest = hashlib.sha256(f"{source}{defaults}".encode()).hexdigest()
    return f"{function.__module__}.{function.__qualname__}:{digest}"


def sources_hash(with_report: bool = True) -> str:
    """A hash of every source and data file of this package, passes included; the report's only if asked."""
    import recompile.passes

    folders = (pathlib.Path(__file__).parent, pathlib.Path(recompile.passes.__file__).parent)
    files = (file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".json"))
    texts = [
        file.name.encode() + b"\0" + file.read_bytes() for file in files if with_report or file.parent.name != "report"
    ]
    return hashlib.sha256(b"".join(sorted(texts))).hexdigest()  # the same wherever the folders lie


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on the device now: free ones, and those cached by the allocator but unused."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _checked_budget(value: Any) -> float | int | str | None:
    accepted = 'None, a float from 0.0 to 1.0 (a share), bytes as an int or as text such as "12GiB", or "auto"'
    if value is None or value == "auto":
        return value
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise OptionError(f"memory_budget={value!r}: {error}; accepted are {accepted}") from None
    if isinstance(value, float) and 0.0 <= value <= 1.0:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= SMALLEST_BYTE_BUDGET:
        return value
    hint = f" Write {float(value)} if you mean a share." if value in (0, 1) and isinstance(value, int) else ""
    raise OptionError(f"memory_budget={value!r} is not accepted; accepted are {accepted}.{hint}")


def _checked_planner(value: Any) -> str | Callable:
    if callable(value) or (isinstance(value, str) and value in planners.BY_NAME):
        return value
    names = ", ".join(repr(name) for name in planners.BY_NAME)
    raise OptionError(
        f"planner={value!r} is unknown; accepted are {names}, or a function (JointGraph, Hardware, Budget) -> Plan"
    )


def _checked_hardware(value: Any) -> str | Hardware | None:
    if value is None:
        return None
    try:
        resolved = resolve_hardware(value, torch.device("cpu"))
    except ValueError as error:
        raise OptionError(str(error)) from None
    return resolved


def _checked_cost(value: Any) -> Callable | None:
    if value is None or callable(value):
        return value
    raise OptionError(
        f"cost={value!r} is not accepted; accepted is a function (fx.Node, Annotation, Hardware) -> seconds, or None"
    )


def _checked_reserve(value: Any) -> int:
    try:
        count = parse_bytes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise OptionError(f"reserve={value!r}: {error}") from None
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise OptionError(
            f'reserve={value!r} is not accepted; accepted are bytes as an int or as text such as "512MiB"'
        )
    return count


def _checked_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} is not accepted; accepted are True and False")
    return value


def _mode_options(mode: Any) -> dict[str, Any]:
    if mode is None:
        return {}
    if mode not in inductor_mode_names():
        raise OptionError(f"mode={mode!r} is unknown; accepted are {', '.join(map(repr, inductor_mode_names()))}")
    return inductor_mode_options(mode)


def _checked_inductor_options(given: Mapping[str, Any]) -> dict[str, Any]:
    known = inductor_option_names()
    for name, value in given.items():
        if name == "custom_partitioner_fn":
            raise OptionError("option 'custom_partitioner_fn' is what this backend sets itself; pass a planner instead")
        if name not in known:
            close = [option for option in (*OWN_OPTIONS, *sorted(known)) if name in option or option in name][:5]
            like = f" Similar: {', '.join(close)}." if close else ""
            raise OptionError(
                f"option {name!r} is unknown; accepted are {', '.join(OWN_OPTIONS)} and every option of Inductor "
                f"(torch._inductor.list_options()).{like}"
            )
        wanted = inductor_option_type(name)
        if isinstance(wanted, type) and not isinstance(value, wanted):
            raise OptionError(f"option {name}={value!r} must be a {wanted.__name__}, got a {type(value).__name__}")
    return dict(given)
