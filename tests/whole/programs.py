"""Random training functions as data: instructions that render to the source of a ``forward``.

An instruction is a line of source with holes and two numbers that choose what fills them, among the values so far that
fit. Every line is tried eagerly while the source is written; one that eager PyTorch refuses is left out, so that any
list of instructions is a program and removing some of them leaves a smaller one.

    print(rendered([Instruction("{o} = {a}.t()", 0, 0)], [0]))
"""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 4, 6
LARGEST = 20.0  # a result with larger numbers goes through tanh
MAX_NUMEL = 300
NAMES = {"torch": torch, "F": F, "checkpoint": checkpoint}


class Instruction(NamedTuple):
    line: str
    first: int
    second: int


# What an operand must be: predicates of the tensor that fills {a}, and of the two that fill {a} and {b}.


def is_float(a: torch.Tensor) -> bool:
    return a.dtype is torch.float32 and a.numel() > 0


def is_batch(a: torch.Tensor) -> bool:
    return is_float(a) and a.ndim > 0 and a.shape[-1] > 1


def is_matrix(a: torch.Tensor) -> bool:
    return is_batch(a) and a.ndim == 2


def is_wide(a: torch.Tensor) -> bool:
    return is_batch(a) and a.shape[-1] == WIDTH


def is_mask(a: torch.Tensor) -> bool:
    return a.dtype is torch.bool


def is_index(a: torch.Tensor) -> bool:
    return a.dtype is torch.int64 and a.ndim > 0


def broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    return is_float(b) and all(m == n or 1 in (m, n) for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))


def fills(a: torch.Tensor, b: torch.Tensor) -> bool:
    return is_float(b) and b.ndim <= a.ndim and broadcasts(a, b) and torch.broadcast_shapes(a.shape, b.shape) == a.shape


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return is_float(b) and b.shape == a.shape


def multiplies(a: torch.Tensor, b: torch.Tensor) -> bool:
    return is_matrix(b) and a.shape[-1] == b.shape[0]


def masks(a: torch.Tensor, b: torch.Tensor) -> bool:
    return is_mask(b) and b.shape == a.shape


def indexes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return is_index(b)


Predicate = Callable[..., bool]
LINES: dict[str, tuple[Predicate, Predicate | None]] = {}


def lines(fits: Predicate, fits_both: Predicate | None, *texts: str) -> None:
    LINES.update((text, (fits, fits_both)) for text in texts)


lines(is_float, None, *(f"{{o}} = {text}" for text in (
    "torch.tanh({a})", "torch.sin({a})", "torch.exp({a})", "torch.sigmoid({a})", "torch.relu({a})", "F.gelu({a})",
    "F.silu({a})", "{a} * {a}", "{a} * 0.7", "1 - {a}", "{a}.abs().sqrt()", "{a}.detach()", "{a}.clone()",
    "torch.where({a} > 0.3, {a}, 0.1)", "torch.clamp({a}, -0.4, 0.9)",
)))  # fmt: skip
lines(is_float, broadcasts, *(f"{{o}} = {text}" for text in (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / (2 + {b} * {b})", "torch.maximum({a}, {b})",
    "torch.where({a} > 0.3, {a}, {b})", "torch.addcmul({a}, {a}, {b})",
)))  # fmt: skip
lines(is_batch, None, *(f"{{o}} = {text}" for text in (
    "{a}.sum(-1)", "{a}.mean(0, keepdim=True)", "{a}.sum()", "torch.softmax({a}, -1)", "F.log_softmax({a}, -1)",
    "F.layer_norm({a}, {a}.shape[-1:], eps=0.1)", "{a}.amax(-1)", "{a}.cumsum(0)", "{a}.var(-1)", "{a}.norm(dim=-1)",
    "torch.logsumexp({a}, -1)",
)))  # fmt: skip
lines(is_wide, None, *(f"{{o}} = {text}" for text in (
    "F.linear({a}, self.w, self.bias)", "F.linear({a}, self.head)", "{a} @ self.w", "{a} @ self.frozen",
    "F.layer_norm({a}, (6,), self.gain, self.bias, eps=0.1)", "{a} * self.gain", "torch.tanh(F.linear({a}, self.head))",
    "{a} * torch.exp(self.stat)", "{a} + self.stat",
)))  # fmt: skip
lines(is_matrix, None, "{o} = {a}.t()", "{o} = {a} @ {a}.t()", "{o} = torch.bmm({a}[None], {a}.t()[None])")
lines(is_matrix, multiplies, "{o} = {a} @ {b}", "{o} = torch.mm({a}, {b}) * 0.5")
lines(is_batch, None, *(f"{{o}} = {text}" for text in (
    "{a}[..., 1:]", "{a}[..., :2]", "{a}[0]", "{a}[..., 0]", "{a}.reshape(-1)", "{a}.view(2, -1)", "{a}.unsqueeze(0)",
    "{a}.transpose(0, -1)", "{a}.expand(2, *{a}.shape)", "{a}.flip(0)", "F.pad({a}, (1, 1))", "{a}[..., ::2]",
    "{a}[[0, -1, 0]]", "{a}.squeeze()", "{a}.contiguous()",
)))  # fmt: skip
lines(is_float, same_shape, "{o} = torch.cat([{a}.reshape(-1), {b}.reshape(-1)])", "{o} = torch.stack([{a}, {b}], -1)")
lines(is_batch, None, *(f"{{o}}, {{p}} = {text}" for text in (
    "{a}.chunk(2, -1)", "{a}.max(-1)", "torch.var_mean({a}, -1)", "{a}.sort(-1)", "{a}.topk(2)",
    "{a}[..., :2].unbind(-1)", "{a}[..., :2].split(1, -1)", "{a}.min(0)",
)))  # fmt: skip
lines(is_float, None, *(
    "{a}.relu_()", "{a}.mul_(0.5)", "{a}.add_(0.25)", "{a}.tanh_()", "{a}.zero_()", "{a}.exp_()",
    "F.dropout({a}, 0.5, inplace=True)", "{a}.masked_fill_({a} > 0.6, 0.2)", "{a}.bernoulli_(0.5)",
))  # fmt: skip
lines(is_batch, None, "{a}[0] = 0.5", "{a}[..., :2].mul_(0.5)", "{a}[..., 1:].add_(1)", "{a}.view(-1)[1:3].sin_()",
      "{a}[..., 0] = {a}[..., 1]", "{a}.transpose(0, -1).mul_(0.9)", "{a}[0].relu_()")  # fmt: skip
lines(is_float, fills, "{a}.add_({b})", "{a}.mul_({b})", "{a}.copy_({b})", "{a}[...] = {b}", "{a}.sub_({b}, alpha=0.5)")
lines(is_float, None, *(f"{{o}} = {text}" for text in (
    "F.dropout({a}, 0.5)", "F.dropout({a}, 0.3) * {a}", "{a} * torch.rand_like({a})", "torch.rand_like({a})",
    "{a} + torch.randn_like({a})", "torch.bernoulli(torch.sigmoid({a}))", "F.rrelu({a}, training=True)",
    "{a} * (torch.rand({a}.shape) > 0.5)", "{a} + torch.randint(0, 3, {a}.shape)",
)))  # fmt: skip
lines(is_float, None, "self.count.add_(1)", "self.stat.mul_(0.9)", "self.state.t().add_(0.1)",
      "self.state[1].mul_(0.5)", "self.state.view(-1)[2:9].sub_(0.2)", "{o} = self.stat", "{o} = self.state",
      "{o} = self.state[0]", "{o} = torch.exp(self.state)", "{o} = {a} * self.count", "{o} = self.w",
      "self.stat.add_(self.state[0])", "{o} = self.state.clone()", "self.stat.uniform_()")  # fmt: skip
lines(is_wide, None, "self.stat.mul_(0.9).add_({a}.detach().reshape(-1, 6).mean(0), alpha=0.1)",
      "self.state[0].copy_({a}.detach().reshape(-1, 6)[0])", "self.state[:, 1:3] = {a}.detach().reshape(-1, 6)[0, :2]",
      "self.stat.copy_({a}.detach().reshape(-1, 6)[-1])")  # fmt: skip
lines(is_float, None, "{o} = {a} > 0.3", "{o} = ({a} * 3).long()")
lines(is_batch, None, "{o} = {a}.argmax(-1)", "{o} = {a}.argsort(-1)")
lines(is_float, masks, "{o} = torch.where({b}, {a}, -0.2)", "{o} = {a}.masked_fill({b}, 0.4)", "{o} = {a} * {b}")
lines(is_index, None, "{o} = F.embedding({a} % 6, self.w)", "{o} = F.one_hot({a} % 6, 6).float()", "{o} = {a} + 1")
lines(is_batch, indexes, "{o} = {a}[..., {b}.reshape(-1) % {a}.shape[-1]]",
      "{o} = {a}.index_select(0, {b}.reshape(-1) % len({a}))")  # fmt: skip
lines(is_wide, None, *(f"{{o}} = checkpoint(lambda r: {body}, {{a}}, use_reentrant=False)" for body in (
    "torch.tanh(F.linear(r, self.w, self.bias)).sin()", "F.dropout(torch.sin(r), 0.5).exp()",
    "r.exp().relu_() @ self.w", "(r * torch.rand_like(r)).sin() @ self.head",
)))  # fmt: skip
lines(is_wide, None, "with torch.autocast('cpu', torch.bfloat16): {o} = F.linear(torch.sin({a}), self.w).float()",
      "with torch.no_grad(): {o} = {a} @ self.w")  # fmt: skip

RANDOM_WORDS = ("dropout", "rand", "bernoulli", "rrelu", "uniform_")


@dataclass(frozen=True)
class Program:
    """The source of a ``forward(self, x, y, h)`` of Model, and its name as a file."""

    source: str

    @property
    def is_random(self) -> bool:
        return any(word in self.source for word in RANDOM_WORDS)

    @property
    def is_rounded(self) -> bool:
        return "autocast" in self.source

    def model(self) -> Model:
        """A model with this forward; the source is registered, so that tracebacks and Dynamo find it."""
        name = f"<program {hash(self.source) & 0xFFFFFFFF:08x}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        namespace = dict(NAMES)
        exec(compile(self.source, name, "exec"), namespace)
        return type("Program", (Model,), {"forward": namespace["forward"]})()


class Model(nn.Module):
    """The parameters and buffers of every program; ``head`` is ``w``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(numbers(WIDTH, WIDTH) * 0.7)
        self.bias = nn.Parameter(numbers(WIDTH, start=40))
        self.gain = nn.Parameter(1 + numbers(WIDTH, start=50) * 0.2)
        self.frozen = nn.Parameter(numbers(WIDTH, WIDTH, start=60), requires_grad=False)
        self.head = self.w
        self.register_buffer("stat", numbers(WIDTH, start=100))
        self.register_buffer("state", numbers(ROWS, WIDTH, start=110))
        self.register_buffer("count", torch.tensor(1))


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    """Numbers between -1 and 1, no two alike."""
    return torch.sin(torch.arange(start, start + math.prod(shape)) * 1.7 + 0.3).reshape(shape)


def example_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """x, which a program may write to, and y, which wants a gradient. A program also gets h, an activation: y * 0.9."""
    return numbers(ROWS, WIDTH, start=200), numbers(ROWS, WIDTH, start=300).requires_grad_()


def rendered(instructions: Sequence[Instruction], outputs: Sequence[int]) -> Program:
    """The program of these instructions; it returns its last value that wants a gradient, and those that ``outputs``
    counts, first those that nothing reads.
    """
    writer = Writer()
    with torch.random.fork_rng(devices=[]):
        for instruction in instructions:
            writer.add(instruction)
    made = [name for name in dict.fromkeys([*reversed(writer.unread), *reversed(writer.values)]) if name[0] == "v"]
    last = next((name for name in made if writer.values[name].requires_grad), "y")
    returned = dict.fromkeys([last, *(made[number % len(made)] for number in outputs if made)])
    text = [*writer.lines, f"return ({', '.join(returned)},)"]
    return Program("def forward(self, x, y, h):\n" + "".join(f"    {line}\n" for line in text))


class Writer:
    """Source so far, and the values that its names have when it is run."""

    def __init__(self) -> None:
        x, y = example_inputs()
        self.values: dict[str, Any] = {"x": x, "h": y * 0.9, "y": y}
        self.model = Model()
        self.lines: list[str] = []
        self.unread: dict[str, None] = {"h": None, "y": None}  # values that want a gradient and that no line reads yet
        self.fresh = (f"v{number}" for number in itertools.count())

    def add(self, instruction: Instruction) -> None:
        """Append an instruction's line, unless nothing fits or eager refuses it."""
        fits, fits_both = LINES[instruction.line]
        a = self._choose(instruction.first, fits)
        b = self._choose(instruction.second, lambda b: fits_both(self.values[a], b)) if a and fits_both else None
        if a is None or (fits_both and b is None):
            return
        results = {hole: next(self.fresh) for hole in ("o", "p") if f"{{{hole}}}" in instruction.line}
        line = instruction.line.format(a=a, b=b, **results)
        if not self._run(line) or not all(self._is_small(name) for name in results.values()):
            return
        self.lines.append(line)
        for name in (a, b):
            self.unread.pop(name, None)
        self.unread.update((name, None) for name in results.values() if self.values[name].requires_grad)
        for name in [*results.values(), *([] if results else [a])]:
            self._tame(name, in_place=not results)

    def _choose(self, number: int, fits: Predicate) -> str | None:
        """A name that fits; the small numbers are for values that nothing reads yet, the latest first."""
        order = dict.fromkeys([*reversed(self.unread), *reversed(self.values)])
        fitting = [name for name in order if fits(self.values[name])]
        return fitting[number % len(fitting)] if fitting else None

    def _run(self, line: str) -> bool:
        before = dict(self.values)
        names = {**NAMES, "self": self.model, **self.values}
        try:
            exec(line, names)
        except (RuntimeError, IndexError, ValueError, TypeError):
            self.values = before
            return False
        self.values = {name: names[name] for name in names if name in before or (name[0] == "v" and name[1:].isdigit())}
        return True

    def _is_small(self, name: str) -> bool:
        if self.values[name].numel() <= MAX_NUMEL:
            return True
        del self.values[name]
        return False

    def _tame(self, name: str, in_place: bool) -> None:
        value = self.values[name].detach()
        if is_float(value) and not (value.abs() <= LARGEST).all():
            line = f"{name}.tanh_()" if in_place else f"{name} = torch.tanh({name})"
            if self._run(line):
                self.lines.append(line)
