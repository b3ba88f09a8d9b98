"""What nodes of a joint graph hold, as JSON and back: arguments, targets, and what fake tensors stand for.

JSON's own values stand for themselves, a list for a list; all else is an object with one key that says what it is:
``{"node": "mm_3"}``, ``{"dtype": "bfloat16"}``, ``{"tensor": [...]}``. Reading calls nothing that a file names: ops are
looked up among those that torch has registered, functions in a table, the rest is data.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace

import recompile.torch_private  # noqa: F401  registers Inductor's ops
from recompile.torch_private_fakes import FakeValues

# Functions on sizes, beside ops, that a joint graph may call.
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {f"operator.{name}": getattr(operator, name) for name in operator.__all__}
    | {f"math.{name}": function for name, function in vars(math).items() if callable(function)}
    | {f"torch.{name}": function for name, function in vars(torch).items() if name.startswith("sym_")}
)
NAME_OF_FUNCTION = {function: name for name, function in FUNCTIONS.items()}
WORDS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}  # torch.bfloat16 and such
HIGHER_ORDER = "higher_order"


class Unsupported(ValueError):
    """A value that the format has no place for; the text says which."""


class Writer:
    """Turns values into JSON. ``storages`` collects the memory behind tensors: what shares it shares an entry."""

    def __init__(self) -> None:
        self.storages: list[list[Any]] = []
        self._place: dict[int, int] = {}

    def value(self, value: Any) -> Any:
        """An argument or a node's value. Raises Unsupported."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise Unsupported(
                f"the size {value}, which varies: only graphs of fixed sizes can be saved (dynamic=False)"
            )
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, fx.Node):
            return {"node": value.name}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, torch.Size | tuple):
            return {"tuple": [self.value(item) for item in value]}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, Mapping):
            return {"dict": [[self.value(key), self.value(item)] for key, item in value.items()]}
        return self._named(value)

    def _named(self, value: Any) -> Any:
        word = next((word for kind, word in WORDS.items() if isinstance(value, kind)), None)
        if word is not None:
            return {word: str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, complex):
            return {"complex": repr(value)}
        if isinstance(value, slice):
            return {"slice": [self.value(part) for part in (value.start, value.stop, value.step)]}
        if value is Ellipsis:
            return {"ellipsis": True}
        return {"target": target_name(value)}

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.layout is not torch.strided:
            raise Unsupported(f"a tensor of layout {tensor.layout}: only dense tensors can be saved")
        sizes = [self.value(size) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
        storage = tensor.untyped_storage()
        if storage._cdata not in self._place:
            self._place[storage._cdata] = len(self.storages)
            self.storages.append([self.value(storage.nbytes()), str(tensor.device)])
        dims = tensor.dim()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [self._place[storage._cdata], dtype, sizes[:dims], sizes[dims : 2 * dims], sizes[-1]]


class Reader:
    """Turns JSON back into values; tensors are fake ones. ``nodes`` are those read so far, by name."""

    def __init__(self, storages: list[list[Any]]):
        self.nodes: dict[str, fx.Node] = {}
        self._fakes = FakeValues()
        self._devices = [torch.device(device) for _, device in storages]
        self._storages = [
            self._fakes.storage(size_bytes, device)
            for (size_bytes, _), device in zip(storages, self._devices, strict=True)
        ]

    def value(self, data: Any) -> Any:
        """The value that ``Writer.value`` wrote. Raises Unsupported for what is not of the format."""
        if isinstance(data, list):
            return [self.value(item) for item in data]
        if not isinstance(data, dict):
            return data
        if len(data) != 1:
            raise Unsupported(f"an object with the keys {sorted(data)} in the place of a value")
        ((kind, content),) = data.items()
        if kind in WORDS.values():
            return _word(kind, content)
        read = self._READERS.get(kind)
        if read is None:
            raise Unsupported(f"a value of an unknown kind {kind!r}")
        return read(self, content)

    def _node(self, name: str) -> fx.Node:
        return self.nodes[name]

    def _tensor(self, content: list[Any]) -> torch.Tensor:
        place, dtype, shape, stride, offset = content
        storage, device = self._storages[place], self._devices[place]
        return self._fakes.tensor(storage, _word("dtype", dtype), shape, stride, offset, device)

    def _tuple(self, content: list[Any]) -> tuple[Any, ...]:
        return tuple(self.value(item) for item in content)

    def _dict(self, content: list[Any]) -> dict[Any, Any]:
        return {self.value(key): self.value(item) for key, item in content}

    def _slice(self, content: list[Any]) -> slice:
        return slice(*map(self.value, content))

    _READERS: Mapping[str, Callable[[Reader, Any], Any]] = MappingProxyType(
        {
            "node": _node,
            "tensor": _tensor,
            "tuple": _tuple,
            "dict": _dict,
            "slice": _slice,
            "float": lambda self, content: float(content),
            "complex": lambda self, content: complex(content),
            "device": lambda self, content: torch.device(content),
            "ellipsis": lambda self, content: Ellipsis,
            "target": lambda self, content: target_of(content),
        }
    )


def _word(kind: str, name: str) -> Any:
    """A dtype, layout or memory format of torch by its name."""
    value = vars(torch).get(name)
    wanted = next(wanted for wanted, word in WORDS.items() if word == kind)
    if not isinstance(value, wanted):
        raise Unsupported(f"{name!r} is no {kind} that torch {torch.__version__} knows")
    return value


# Targets


def target_name(target: Any) -> str:
    """What a node calls, by name: ``aten.mm.default``, ``higher_order.flex_attention``, ``operator.getitem``."""
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"{HIGHER_ORDER}.{target.name()}"
    try:
        if target in NAME_OF_FUNCTION:
            return NAME_OF_FUNCTION[target]
    except TypeError:  # it has no hash
        pass
    raise Unsupported(f"a {type(target).__name__}, {target!r:.80}, which is neither data nor an op of torch")


def target_of(name: str) -> Any:
    """The op or function of that name. Nothing is imported: Unsupported says what is missing."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    words = name.split(".")
    if not all(word.isidentifier() for word in words):
        raise Unsupported(f"{name!r} is no name of an op")
    namespace = getattr(torch.ops, words[0], None)
    if words[0] == HIGHER_ORDER:
        found = getattr(namespace, words[1], None) if len(words) == 2 else None
        if isinstance(found, HigherOrderOperator):
            return found
    elif len(words) == 3 and isinstance(namespace, _OpNamespace):
        packet = getattr(namespace, words[1], None)
        found = getattr(packet, words[2], None) if isinstance(packet, OpOverloadPacket) else None
        if isinstance(found, OpOverload):
            return found
    raise Unsupported(
        f"the op {name!r}, which torch {torch.__version__} does not have here: import the library that defines it "
        f"first, or load the file with the torch that it was saved with"
    )
