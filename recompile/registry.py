"""What authors of custom ops say about them: whether running one twice is harmless, and what one run costs."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket


@dataclass(frozen=True, slots=True)
class OpFacts:
    """``recompute``: the op is a pure function of its arguments. ``flop``: as a number or from its arguments."""

    recompute: bool
    flop: int | Callable[..., int] | None


_registered: dict[OpOverloadPacket, OpFacts] = {}


def register_op(op: Any, *, recompute: bool = False, flop: int | Callable[..., int] | None = None) -> None:
    """State facts about a custom op; the last statement about an op holds.

    ``op``: what ``torch.library.custom_op`` returned, an op of ``torch.ops``, or its name ``"library::op"``.
    ``recompute=True`` allows backward to run it again: only say so of a function of its arguments without any state
    or effect. ``flop``: a number, or a function that gets the op's arguments with shapes (tuples of int) in the place
    of tensors, as formulas of ``torch.utils.flop_counter`` do. Without it the op is priced by the bytes it moves.
    Raises TypeError for anything that is not an op, ValueError for an op that writes to its arguments.
    """
    packet = _packet_of(op)
    for name in packet.overloads():
        if recompute and getattr(packet, name)._schema.is_mutable:
            raise ValueError(f"{packet} writes to its arguments: it cannot be allowed to run twice")
    if flop is not None and not callable(flop) and not (isinstance(flop, int) and flop >= 0):
        raise TypeError(f"flop={flop!r} is neither a number of FLOP nor a function of the op's arguments")
    _registered[packet] = OpFacts(recompute, flop)


def facts_about(target: Any) -> OpFacts | None:
    """What was registered for an op, or None."""
    return _registered.get(target.overloadpacket) if isinstance(target, OpOverload) else None


def fingerprint() -> str:
    """A stable text of all that was registered, for cache keys."""
    lines = sorted(f"{packet}:{facts.recompute}:{_flop_key(facts.flop)}" for packet, facts in _registered.items())
    return "\n".join(lines)


def _flop_key(flop: int | Callable[..., int] | None) -> str:
    if not callable(flop):
        return str(flop)
    try:
        return hashlib.sha256(inspect.getsource(flop).encode()).hexdigest()
    except (OSError, TypeError):
        return f"{flop.__module__}.{flop.__qualname__}"


def _packet_of(op: Any) -> OpOverloadPacket:
    if isinstance(op, str) and op.count("::") == 1:
        namespace, name = op.split("::")
        found = getattr(getattr(torch.ops, namespace), name.split(".")[0], None)
        if found is None:
            raise TypeError(f"there is no op {op!r}; import the library that defines it first")
        return found
    overload = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns holds its overload
    if isinstance(overload, OpOverload):
        return overload.overloadpacket
    if isinstance(overload, OpOverloadPacket):
        return overload
    raise TypeError(
        f"register_op takes an op of torch.ops, what torch.library.custom_op returned, or a name, got {op!r}"
    )
