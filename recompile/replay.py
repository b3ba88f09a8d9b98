"""What a program that Inductor emitted holds in memory, found by going through its text without running it.

The program is the Python wrapper around the kernels. Its ``call(args)`` is a straight line of allocations
(``empty_strided_cuda``), renamings (``buf3 = buf1; del buf1  # reuse``), views (``reinterpret_tensor``), launches, and
``del``. A block of memory lives as long as a name leads to it, or somebody outside holds it, as in the real run.

Pure: text and numbers in, numbers out; no torch import. Linear in the length of the text.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# CUDA's caching allocator hands out multiples of this (kMinBlockSize in c10/core/AllocatorConfig.h; before torch 2.9 in
# c10/cuda/CUDACachingAllocator.cpp). Of a cached segment it may hand out up to 1 MiB more than was asked for when the
# rest would be too small to keep (kSmallSize); that depends on the process's history and is not modelled.
BLOCK_BYTES = 512

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

CHECK_PREFIX = "assert_"  # assert_size_stride, assert_alignment and whatever a release adds
SETTINGS = frozenset({"torch.cuda.set_device"})
READS_NO_MEMORY = frozenset({"get_raw_stream", "empty_strided_cpu", "empty_strided_cpu_pinned"})


class ReplayError(ValueError):
    """A statement of the program that the replay has no rule for; the text shows the statement."""


@dataclass(eq=False)
class Block:
    """A block of device memory of ``num_bytes``. Two blocks are never equal."""

    num_bytes: int


@dataclass(frozen=True)
class Allocator:
    """What a program's allocations cost: the call that is counted, and what bytes are rounded up to."""

    function: str
    block_bytes: int

    def rounded(self, num_bytes: int) -> int:
        """The bytes of the block that is handed out for ``num_bytes``; nothing for nothing."""
        return -(-num_bytes // self.block_bytes) * self.block_bytes

    def block_of(self, num_bytes: int) -> Block:
        return Block(self.rounded(num_bytes))


CUDA = Allocator("empty_strided_cuda", BLOCK_BYTES)
CPU = Allocator("empty_strided_cpu", 1)  # recompile.measure counts the bytes that were asked for


@dataclass(frozen=True)
class Launch:
    """A call in the program that runs something on the device.

    ``names`` are the variables among its arguments, and the one its result is given. ``live_bytes`` are allocated while
    it runs, ``scratch_bytes`` of its own included.
    """

    function: str
    names: tuple[str, ...]
    live_bytes: int


@dataclass(frozen=True)
class Run:
    """One call of a program. ``peak_bytes`` is the most that was allocated at one time.

    ``returned`` has the block behind each returned value, None for what is no tensor or belongs to the caller.
    """

    peak_bytes: int
    returned: tuple[Block | None, ...]
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class ExternSizes:
    """What library calls allocate themselves, by the name that the program gives their result.

    ``results``: the bytes of each tensor in the result, in order. ``scratch``: bytes that are free again afterwards.
    """

    results: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)


def replay(
    source: str,
    inputs: Sequence[Block | None],
    sizes: ExternSizes = ExternSizes(),
    held: Iterable[Block] = (),
    allocator: Allocator = CUDA,
) -> Run:
    """Go through the ``call`` of the program ``source``.

    ``inputs``: the block behind each argument in order, None where it is the caller's for good and not to be counted.
    ``held``: blocks that the caller keeps alive meanwhile; they are counted. Raises ReplayError for a statement without
    a rule, or a library call that ``sizes`` does not know.
    """
    return _Replay(inputs, sizes, held, allocator).run(call_of(source))


def call_of(source: str) -> ast.FunctionDef:
    """The function ``call`` of a program, on its own or in a class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            return node
    raise ReplayError("the program has no function `call`")


def kernel_sources(source: str) -> dict[str, str]:
    """The text of every Triton kernel that a program defines, by name, in order."""
    found = {}
    for node in ast.parse(source).body:
        call = node.value if isinstance(node, ast.Assign) else None
        if isinstance(call, ast.Call) and dotted(call.func) == "async_compile.triton":
            found[node.targets[0].id] = call.args[1].value
    return found


def dotted(node: ast.expr) -> str:
    """``extern_kernels.mm`` for the expression of that name."""
    return ast.unparse(node)


class _Replay:
    """The state of one replay: which blocks each name leads to, and how often each block is led to."""

    def __init__(self, inputs: Sequence[Block | None], sizes: ExternSizes, held: Iterable[Block], allocator: Allocator):
        self.sizes = sizes
        self.allocator = allocator
        self.blocks: dict[str, tuple[Block | None, ...]] = {}  # a tensor leads to one block, a tuple to several
        self.num_holders: Counter[Block] = Counter()
        self.live_bytes = self.peak_bytes = 0
        self.launches: list[Launch] = []
        self.inputs = tuple(inputs)
        self._hold([*held, *self.inputs])

    def run(self, call: ast.FunctionDef) -> Run:
        returned = self._statements(call.body)
        if returned is None:
            raise ReplayError("the program returns nothing")
        return Run(self.peak_bytes, returned, tuple(self.launches))

    def _statements(self, statements: Iterable[ast.stmt]) -> tuple[Block | None, ...] | None:
        for statement in statements:
            if isinstance(statement, ast.With):
                returned = self._statements(statement.body)
                if returned is not None:
                    return returned
            elif isinstance(statement, ast.Return):
                values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
                return tuple(block for value in values for block in self._value(value))
            else:
                self._statement(statement)
        return None

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._release(self.blocks.pop(target.id))
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._call(statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            pass  # a docstring
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement.targets[0], statement.value)
        else:
            raise no_rule(statement)

    def _call(self, call: ast.Call) -> None:
        """A call whose result is not kept: a check, or a launch that writes into its arguments."""
        function = dotted(call.func)
        if function == "args.clear":
            self._release(self.inputs)  # from here on the names of the inputs alone keep them
        elif not function.startswith(CHECK_PREFIX) and function not in SETTINGS:
            self._launch(call, ())

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Name) and value.id == "args":
            if len(target.elts) != len(self.inputs):
                raise ReplayError(f"the program takes {len(target.elts)} arguments, {len(self.inputs)} were given")
            for name, block in zip(target.elts, self.inputs, strict=True):
                self._bind(name.id, (block,))
        elif isinstance(target, ast.Name):
            self._bind(target.id, self._result(target.id, value))
        else:
            raise no_rule(target)

    def _result(self, name: str, value: ast.expr) -> tuple[Block | None, ...]:
        """The blocks behind the right-hand side of an assignment to ``name``."""
        if not isinstance(value, ast.Call):
            return self._value(value)
        function = dotted(value.func)
        if function == self.allocator.function:
            return (self.allocator.block_of(strided_bytes(value)),)
        if function in READS_NO_MEMORY:
            return (None,)
        if function == "reinterpret_tensor":
            return self._value(value)
        if name not in self.sizes.results:
            raise no_rule(value, f"nothing is known about what it allocates for {name}")
        blocks = tuple(self.allocator.block_of(num_bytes) for num_bytes in self.sizes.results[name])
        self._hold(blocks)
        self._launch(value, (name,), self.allocator.rounded(self.sizes.scratch.get(name, 0)))
        self._release(blocks)
        return blocks

    def _value(self, value: ast.expr) -> tuple[Block | None, ...]:
        """The blocks behind a name, a view of one, an element of a tuple, or a constant (none)."""
        if isinstance(value, ast.Name):
            return self.blocks.get(value.id, (None,))  # a name from outside: a size, or a constant of the module
        if isinstance(value, ast.Constant | ast.Attribute | ast.BinOp):
            return (None,)
        if isinstance(value, ast.Call) and dotted(value.func) == "reinterpret_tensor":
            return self._value(value.args[0])
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
            return (self._value(value.value)[value.slice.value],)
        raise no_rule(value)

    def _launch(self, call: ast.Call, results: tuple[str, ...], scratch_bytes: int = 0) -> None:
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        used = [node.id for argument in arguments for node in ast.walk(argument) if isinstance(node, ast.Name)]
        names = tuple(dict.fromkeys([*(name for name in used if name in self.blocks), *results]))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + scratch_bytes)
        self.launches.append(Launch(dotted(call.func), names, self.live_bytes + scratch_bytes))

    def _bind(self, name: str, blocks: tuple[Block | None, ...]) -> None:
        self._hold(blocks)
        self._release(self.blocks.get(name, ()))
        self.blocks[name] = blocks

    def _hold(self, blocks: Iterable[Block | None]) -> None:
        for block in blocks:
            if block is not None:
                self.num_holders[block] += 1
                self.live_bytes += block.num_bytes if self.num_holders[block] == 1 else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, blocks: Iterable[Block | None]) -> None:
        for block in blocks:
            if block is not None:
                self.num_holders[block] -= 1
                self.live_bytes -= block.num_bytes if self.num_holders[block] == 0 else 0


def strided_bytes(call: ast.Call) -> int:
    """Bytes behind ``empty_strided_cuda(sizes, strides, torch.dtype)``."""
    try:
        sizes, strides = ast.literal_eval(call.args[0]), ast.literal_eval(call.args[1])
        item_bytes = ITEM_BYTES[dotted(call.args[2]).removeprefix("torch.")]
    except (ValueError, KeyError) as error:
        raise no_rule(call, "sizes, strides and dtype must be plain") from error
    if 0 in sizes:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))) * item_bytes


def no_rule(node: ast.AST, reason: str = "the replay has no rule for it") -> ReplayError:
    return ReplayError(f"`{ast.unparse(node)[:200]}`: {reason}")
