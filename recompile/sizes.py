"""What symbolic sizes count as: the numbers at which the facts about a graph with dynamic shapes are taken.

Nothing here makes a size static: an expression over symbols is evaluated, never guarded on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from recompile.torch_private import SizeSymbol, evaluated, size_symbols

UNBACKED_SIZE = 4096  # what a size that depends on data counts as, or its upper bound: a guess, too large to look free


@dataclass(frozen=True, eq=False)
class Sizes:
    """The largest number that each symbol stands for, by the symbol; one that is left out counts at its hint.

    An expression counts at the most that it can be while no symbol exceeds its number: ``s0 - s1`` as if s1 were least.
    """

    values: Mapping[Any, int] = field(default_factory=dict)
    _numbers: dict[Any, int] = field(default_factory=dict, repr=False)  # results by expression

    def number(self, size: Any) -> int:
        """A size as a plain number. A size without a hint counts as UNBACKED_SIZE, or its upper bound if smaller."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        numbers = self._numbers if self.values else {}  # without values it serves many graphs, with equal symbols
        return evaluated(size, self.values, UNBACKED_SIZE, numbers)

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(self.number(size) for size in tensor.shape)

    def named(self, symbols: Iterable[SizeSymbol]) -> tuple[str, ...]:
        """The numbers of these symbols for people: ``s77=64``; ``u0=4096 (assumed)`` where data decide."""
        return tuple(
            f"{symbol.name}={self.values.get(symbol.symbol, symbol.hint)}"
            if symbol.hint is not None
            else f"{symbol.name}={min(UNBACKED_SIZE, symbol.upper_bound or UNBACKED_SIZE)} (assumed)"
            for symbol in symbols
        )


AT_HINTS = Sizes()


def symbols_in(graph: fx.Graph) -> Sequence[SizeSymbol]:
    """The symbols that the sizes of a graph's values are made of, in the order in which they turn up."""
    return size_symbols(size for node in graph.nodes for size in _sizes_in(node.meta.get("val")))


def _sizes_in(val: Any) -> Iterator[torch.SymInt]:
    if isinstance(val, torch.SymInt):
        yield val
    elif isinstance(val, torch.Tensor):
        yield from (size for size in val.shape if isinstance(size, torch.SymInt))
    elif isinstance(val, list | tuple):
        for item in val:
            yield from _sizes_in(item)
