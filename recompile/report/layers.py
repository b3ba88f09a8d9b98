"""Values by module: repeated layers found by their number in the module's path, and layers that are treated alike."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from recompile.report.explanation import GraphReport, ValueRow

ANY_LAYER = "*"
MOST_PLACES = 4096  # paths of modules that are remembered: a few thousand values share a few hundred


@dataclass(frozen=True, slots=True)
class Place:
    """A module's path, taken apart at its first number: ``blocks.3.mlp.0`` is layer 3 of ``blocks.*``, at ``mlp.0``."""

    stem: str
    layer: int | None  # None: no number in the path
    rest: str

    @property
    def folded(self) -> str:
        """The path with ``*`` for the layer."""
        return ".".join(part for part in (self.stem, self.rest) if part)


@functools.lru_cache(MOST_PLACES)
def place_of(module: str) -> Place:
    parts = module.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return Place(module, None, "")
    return Place(".".join([*parts[:at], ANY_LAYER]), int(parts[at]), ".".join(parts[at + 1 :]))


def stem_text(stem: str) -> str:
    """``blocks`` for ``blocks.*``."""
    return stem.removesuffix(ANY_LAYER).rstrip(".") or "layers"


@dataclass(frozen=True)
class Fold:
    """Rows that are alike in different layers, or several times in one."""

    rows: tuple[ValueRow, ...]

    @property
    def first(self) -> ValueRow:
        return self.rows[0]

    @property
    def module(self) -> str:
        """``blocks.*.mlp``, or the very path of a single row."""
        return self.first.module if len(self.rows) == 1 else place_of(self.first.module).folded

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers that the rows are in."""
        return sorted({place_of(row.module).layer for row in self.rows} - {None})

    @property
    def size_bytes(self) -> int:
        return sum(row.size_bytes for row in self.rows)

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def again_seconds(self) -> float:
        return sum(row.again_seconds for row in self.rows)

    @property
    def flop(self) -> int:
        return sum(row.flop for row in self.rows)


def folds_of(rows: Iterable[ValueRow], also: Callable[[ValueRow], Any] = lambda row: row.reason) -> list[Fold]:
    """Rows of one op, shape, dtype, line and module but for the layer, and of one ``also``; in order of appearance."""
    groups: dict[tuple, list[ValueRow]] = {}
    for row in rows:
        groups.setdefault((*likeness(row), place_of(row.module).folded, also(row)), []).append(row)
    return [Fold(tuple(group)) for group in groups.values()]


def likeness(row: ValueRow) -> tuple:
    """What rows of equal layers have in common."""
    return row.op, row.shape, row.dtype, row.source


def by_place(rows: Iterable[ValueRow]) -> dict[tuple, ValueRow]:
    """Rows by their place in a layer, which equal layers share."""
    seen: Counter[tuple] = Counter()
    found = {}
    for row in rows:
        like = (place_of(row.module).rest, *likeness(row))
        found[*like, seen[like]] = row
        seen[like] += 1
    return found


@dataclass(frozen=True)
class Treatment:
    """Layers of one kind with the same decisions; ``kept``, ``again`` and ``unneeded`` are the first one's rows.

    ``layers`` is empty for what belongs to no layer.
    """

    stem: str
    layers: tuple[int, ...]
    kept: tuple[ValueRow, ...]
    again: tuple[ValueRow, ...]
    unneeded: tuple[ValueRow, ...] = ()

    @property
    def kept_bytes(self) -> int:
        return sum(row.size_bytes for row in self.kept)


@dataclass(frozen=True)
class Layer:
    """The decided values of one layer, and those of its forward that backward needs in no way."""

    stem: str
    number: int | None
    kept: tuple[ValueRow, ...]
    again: tuple[ValueRow, ...]
    unneeded: tuple[ValueRow, ...] = ()

    @property
    def kept_bytes(self) -> int:
        return sum(row.size_bytes for row in self.kept)

    @property
    def again_seconds(self) -> float:
        return sum(row.again_seconds for row in self.again)

    @property
    def again_flop(self) -> int:
        return sum(row.flop for row in self.again)


def layers_of(graph: GraphReport) -> list[Layer]:
    """Every layer that has a decided value, by stem and number; what is in none comes last, as one."""
    found: dict[tuple, list[ValueRow]] = {}
    for row in graph.values:
        if (row.decision and row.kind != "input") or is_unneeded(row):
            place = place_of(row.module)
            found.setdefault((place.stem, place.layer) if place.layer is not None else ("", None), []).append(row)
    order = {stem: k for k, stem in enumerate(dict.fromkeys(stem for stem, _ in found))}
    keys = sorted(found, key=lambda key: (key[1] is None, order[key[0]], key[1] or 0))
    return [
        Layer(
            stem,
            number,
            tuple(row for row in found[stem, number] if row.decision == "saved"),
            tuple(row for row in found[stem, number] if row.decision == "recomputed"),
            tuple(row for row in found[stem, number] if not row.decision),
        )
        for stem, number in keys
        if any(row.decision for row in found[stem, number])
    ]


def is_unneeded(row: ValueRow) -> bool:
    """Whether a value is made in forward and gone before backward, which does without it."""
    own = row.kind not in ("input", "view") and row.storage == row.name
    return own and row.side == "forward" and not row.decision and row.size_bytes > 0


def treatments_of(layers: Sequence[Layer]) -> list[Treatment]:
    """Layers of one kind that keep and compute again the same values, in the order of their first."""
    groups: dict[tuple, list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.stem, layer.number is None, pattern_of(layer)), []).append(layer)
    return [
        Treatment(
            group[0].stem,
            tuple(layer.number for layer in group if layer.number is not None),
            group[0].kept,
            group[0].again,
            group[0].unneeded,
        )
        for group in groups.values()
    ]


def pattern_of(layer: Layer) -> frozenset:
    """What is decided in a layer, whatever its number."""
    rows = Counter(
        (place_of(row.module).rest, *likeness(row), row.decision) for row in (*layer.kept, *layer.again)
    )  # fmt: skip
    return frozenset(rows.items())


def ranges_text(numbers: Sequence[int]) -> str:
    """``0–3, 7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
